"""How to run a workload: search spaces, solvers, and what they choose."""
