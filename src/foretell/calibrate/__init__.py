"""Calibrations by measuring: the machine at hand (`here`, `microbench`) or a table of measurements (`tables`)."""
