"""Claims of the systems whose mechanism is in `foretell.learn`: training methods."""
