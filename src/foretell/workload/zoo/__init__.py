"""Architectures that no library we build on has, written from their papers.

A model is one `registry.add` in any file of this folder. `models()` lists the names, `build(name)` makes the module,
`input_size(name)` is what it was published with. On the command line: ``zoo:NAME``.
"""

from foretell.workload.zoo.registry import Entry, build, entry, input_size, models

__all__ = ["Entry", "build", "entry", "input_size", "models"]
