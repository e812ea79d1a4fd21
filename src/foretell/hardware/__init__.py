'''Devices, nodes, clusters: what hardware can do, in SI units, every number with its source.

>>> from foretell.hardware import cluster, device
>>> gpu = device("NVIDIA A100-SXM4-80GB")
>>> gpu.name, gpu.peak("bf16") / 1e12, round(gpu.ridge("bf16"))
('a100-sxm4-80gb', 312.0, 153)
>>> gpu.sources["memory_bandwidth_bytes_per_s"]
'NVIDIA A100 Tensor Core GPU data sheet, 2021, and ...'
>>> cluster("4x dgx-a100").device_count
32

`device("local")` is the machine at hand. What the catalogue does not know is None, and `Device.missing` lists it; a
name shared by several devices (``a100``) is an error that lists them, never a default.

Adding a device
---------------

One TOML file is one device; its file name is the device's name. Every number is a pair: the value with its unit, and
the key of its source, whose text stands under ``[sources]``. Leave out what you do not know.

>>> text = """
... title = "Acme A1"
... vendor = "Acme"
... kind = "accelerator"              # or "gpu", "cpu"
... architecture = "Anvil"
... aliases = ["acme one"]            # optional
...
... launch_year = [2026, "sheet"]
... multiprocessors = [64, "sheet"]
... boost_clock = ["1.5 GHz", "sheet"]
... memory = ["64 GiB", "sheet"]
... memory_bandwidth = ["2.4 TB/s", "sheet"]
... tdp = ["450 W", "sheet"]
... price_per_hour = ["1.20 USD/h", "cloud"]
...
... [peaks]                           # dense, "<format>.<tensor or vector>": see DTYPES and UNITS
... "bf16.tensor" = ["400 TFLOP/s", "sheet"]
... "fp32.vector" = ["25 TFLOP/s", "sheet"]
...
... [[links]]                         # bandwidth of one link, one direction
... kind = "roce"
... topology = "full-mesh"
... bandwidth = ["400 Gb/s", "sheet"]
... count = [8, "sheet"]
...
... [sources]
... sheet = "Acme A1 data sheet, 2026"
... cloud = "Example Cloud price list, on demand, May 2026"
... """
>>> import tempfile, pathlib
>>> folder = tempfile.TemporaryDirectory()
>>> _ = pathlib.Path(folder.name, "acme-a1.toml").write_text(text, encoding="utf-8")
>>> mine = catalogue(extra_dir=folder.name).device("Acme One")
>>> mine.name, mine.ridge("bf16") > 166, mine.link("roce").total_bandwidth_bytes_per_s
('acme-a1', True, 400000000000.0)
>>> mine.missing()
('base_clock_hz', 'l1_bytes_per_sm', 'l2_bytes', 'memory_type', 'idle_w')
>>> folder.cleanup()

For every use, put such files into a folder named by the environment variable ``FORETELL_DEVICES``, or call
`add_devices`, or pass ``--devices DIR``. NVIDIA GPUs give their ``compute_capability`` and get the limits of occupancy
from ``compute_capability.toml``; others may state them (see `foretell.hardware.loader.LIMITS`). A device joins the
shipped catalogue by the same file in ``devices/``, with its aliases in ``aliases.toml``, so that finding a name need
not read every file.
'''

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
