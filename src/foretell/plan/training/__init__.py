"""Plans for training: the legal space, its search, and configuration files."""
