"""Claims of the systems whose mechanism is in `foretell.cost`: predictors of time."""
