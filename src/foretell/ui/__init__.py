"""A page on this machine where one picks a workload and devices and gets the report: ``foretell ui``."""

from foretell.ui.server import Server

__all__ = ["Server"]
