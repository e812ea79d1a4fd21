"""Schedulers, one file each: what an iteration of a rank works on."""
