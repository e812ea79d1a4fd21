"""Claims of the systems whose mechanism is in `foretell.workload`: architectures."""
