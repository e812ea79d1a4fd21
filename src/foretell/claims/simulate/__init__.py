"""Claims of the systems whose mechanism is in `foretell.simulate`: pipelines, networks, training at scale."""
