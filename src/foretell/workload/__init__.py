"""From what a user has (a module, a name, a config) to a `Graph`.

`options` and `resolve` are light; `trace` and its neighbours import torch, and only when a captured workload asks for
it. `llm` holds the parametric transformers and never does.
"""
