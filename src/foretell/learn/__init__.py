"""Training methods, tested by convergence on small real tasks."""
