"""The engine simulator's parts: sequences, KV blocks, ranks and replicas; schedulers and routers as families.

Words used here. A *rank* is one scheduler with KV blocks of its own; a *replica* is one or several ranks in lock step
(data-parallel attention); an *iteration* is one pass of the model over what a rank scheduled.
"""
