"""Layers of PyTorch Geometric, captured on numbers of nodes and edges alone, against closed forms."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import foretell
from foretell.errors import CaptureError
from foretell.graph import Graph

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the library's own, on import
    layers = pytest.importorskip(
        "torch_geometric.nn", reason="torch-geometric is not installed: pip install 'foretell[gnn]'"
    )

NODES, EDGES, FEATURES, HIDDEN, CLASSES = 1_000, 8_000, 32, 64, 7


class Net(nn.Module):
    def __init__(self, layer: Any, **settings: Any) -> None:
        super().__init__()
        self.first, self.second = layer(FEATURES, HIDDEN, **settings), layer(HIDDEN, CLASSES, **settings)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edges).relu(), edges)


def captured(layer: Any, edges: int = EDGES, **settings: Any) -> Graph:
    ends = torch.empty(2, edges, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        net = Net(layer, **settings)
    return foretell.capture(net, torch.empty(NODES, FEATURES, device="meta"), ends)


PRODUCTS = NODES * (FEATURES * HIDDEN + HIDDEN * CLASSES)


def test_graphsage_counts_two_products_a_layer() -> None:
    graph = captured(layers.SAGEConv)
    assert graph.macs() == 2 * PRODUCTS
    assert not graph.not_counted
    # weights of nodes and of neighbours, and one bias
    assert graph.parameter_bytes == 4 * (2 * (FEATURES * HIDDEN + HIDDEN * CLASSES) + HIDDEN + CLASSES)


@pytest.mark.parametrize("normalize", [False, True])
def test_graph_convolution_counts_one_product_a_layer(normalize: bool) -> None:
    graph = captured(layers.GCNConv, add_self_loops=False, normalize=normalize)
    assert graph.macs() == PRODUCTS
    assert not graph.not_counted


def test_twice_the_edges_double_the_messages_but_no_product() -> None:
    few, many = captured(layers.SAGEConv), captured(layers.SAGEConv, edges=2 * EDGES)
    assert few.macs() == many.macs()

    def gathered(graph: Graph) -> list[int]:
        """Bytes of the messages: the features of each edge's source, one layer after the other."""
        return [op.bytes_written for op in graph.ops if op.name == "aten.index_select.default"]

    assert gathered(few) == [4 * EDGES * FEATURES, 4 * EDGES * HIDDEN]
    assert gathered(many) == [2 * written for written in gathered(few)]


def test_self_loops_found_in_the_values_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"values.*loop\.py"):
        captured(layers.GCNConv)


def test_it_agrees_with_a_run_on_values() -> None:
    """What is captured is what runs: the same operations as on real edges."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    net, recorder = Net(layers.SAGEConv).eval(), Names()
    with torch.no_grad(), recorder:
        net(torch.zeros(NODES, FEATURES), torch.randint(NODES, (2, EDGES)))
    work = ("aten.addmm.default", "aten.mm.default", "aten.index_select.default", "aten.scatter_add_.default")
    names = [op.name for op in captured(layers.SAGEConv).ops]
    assert {n: names.count(n) for n in work} == {n: recorder.seen.count(n) for n in work}
    assert sum(names.count(n) for n in work) > 6
