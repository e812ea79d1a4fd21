"""One file a kind of trace; each registers itself with `foretell.simulate.serving.workloads.family.reader`."""
