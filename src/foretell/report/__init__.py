"""What people see: cards, tables and JSON. Every function returns something to print or text; none prints.

Each is imported when it is first asked for, so that a command pays for its own report only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.report.accuracy import accuracy_view
    from foretell.report.cards import card
    from foretell.report.compared import COMPARE_SORT, FORMATS, compare_table, write_table
    from foretell.report.comparisons import SORT_KEYS, comparison, sorted_estimates
    from foretell.report.devices import device_list, device_view
    from foretell.report.documents import SCHEMAS, json_text, schema
    from foretell.report.graphs import dearest_ops, graph_settings, graph_summary, op_table
    from foretell.report.kv import kv_table, kv_view
    from foretell.report.ledger import claims_in_full, claims_table
    from foretell.report.machines import machine_list, machine_view
    from foretell.report.training import plan_card, ranking_view, uneven_view

__all__ = [
    "COMPARE_SORT",
    "FORMATS",
    "SCHEMAS",
    "SORT_KEYS",
    "accuracy_view",
    "card",
    "claims_in_full",
    "claims_table",
    "compare_table",
    "comparison",
    "dearest_ops",
    "device_list",
    "device_view",
    "graph_settings",
    "graph_summary",
    "json_text",
    "kv_table",
    "kv_view",
    "machine_list",
    "machine_view",
    "op_table",
    "plan_card",
    "ranking_view",
    "schema",
    "sorted_estimates",
    "uneven_view",
    "write_table",
]

# Module → the names it is the home of. No name is a module's, which importing the module would shadow.
_NAMES = {
    "accuracy": ("accuracy_view",),
    "cards": ("card",),
    "compared": ("COMPARE_SORT", "FORMATS", "compare_table", "write_table"),
    "comparisons": ("SORT_KEYS", "comparison", "sorted_estimates"),
    "devices": ("device_list", "device_view"),
    "graphs": ("dearest_ops", "graph_settings", "graph_summary", "op_table"),
    "kv": ("kv_table", "kv_view"),
    "ledger": ("claims_in_full", "claims_table"),
    "machines": ("machine_list", "machine_view"),
    "training": ("plan_card", "ranking_view", "uneven_view"),
    "documents": ("SCHEMAS", "json_text", "schema"),
}
_HOMES = {name: f"foretell.report.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
