"""One file an algorithm; each registers itself with `foretell.simulate.collectives.family.algorithm`."""
