"""Foretell: how fast, how large, how full and how dear a workload will be, before anything runs."""

__version__ = "0.1.0"
