"""What people see: cards, tables and JSON. Every function returns something to print or text; none prints."""

from foretell.report.accuracy import accuracy_view
from foretell.report.card import card
from foretell.report.comparison import SORT_KEYS, comparison, sorted_estimates
from foretell.report.devices import device_list, device_view
from foretell.report.graphs import dearest_ops, graph_settings, graph_summary, op_table
from foretell.report.schema import SCHEMAS, json_text, schema

__all__ = [
    "SCHEMAS",
    "SORT_KEYS",
    "accuracy_view",
    "card",
    "comparison",
    "dearest_ops",
    "device_list",
    "device_view",
    "graph_settings",
    "graph_summary",
    "json_text",
    "op_table",
    "schema",
    "sorted_estimates",
]
