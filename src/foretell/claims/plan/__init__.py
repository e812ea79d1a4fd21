"""Claims of the systems whose mechanism is in `foretell.plan`: planners, and what they plan for."""
