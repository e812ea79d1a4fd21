"""Devices, nodes and clusters, in SI units, every number with its source."""

from foretell.hardware.catalogue import Catalogue, add_devices, catalogue, device, devices
from foretell.hardware.cluster import Cluster, Node, cluster, load_node, network, networks, node, nodes
from foretell.hardware.device import DTYPES, KINDS, UNITS, Device, Link
from foretell.hardware.loader import load_device

__all__ = [
    "DTYPES",
    "KINDS",
    "UNITS",
    "Catalogue",
    "Cluster",
    "Device",
    "Link",
    "Node",
    "add_devices",
    "catalogue",
    "cluster",
    "device",
    "devices",
    "load_device",
    "load_node",
    "network",
    "networks",
    "node",
    "nodes",
]
