"""Recurrent layers, one fused call a layer and direction, and cells, step by step.

Sequences are (steps, batch, features) inside; gates lie behind each other in the rows of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foretell.workload.pt2.builder import Builder, Meta
from foretell.workload.pt2.compositions import linear
from foretell.workload.pt2.lowering import Args, Results, lower

_MOST_STEPS = 10_000
_Cell = Callable[[Builder, int, int, Sequence[int]], int]


def _gates(b: Builder, x: int, count: int) -> list[int]:
    shape, strides = b.shape(x), b.strides(x)
    if shape[-1] % count:
        raise ValueError(f"{shape[-1]} features are not {count} gates")
    parts = [b.alias(x, (*shape[:-1], shape[-1] // count), strides) for _ in range(count)]
    b.add("aten.unsafe_split.Tensor", [x], parts)
    return parts


def _gru_step(b: Builder, gates_x: int, h: int, weights: Sequence[int]) -> int:
    x_reset, x_update, x_new = _gates(b, gates_x, 3)
    h_reset, h_update, h_new = _gates(b, linear(b, h, weights[1], _bias(weights, 1)), 3)
    reset = b.write("aten.sigmoid_.default", [b.write("aten.add_.Tensor", [h_reset, x_reset])])
    update = b.write("aten.sigmoid_.default", [b.write("aten.add_.Tensor", [h_update, x_update])])
    scaled = b.write("aten.mul_.Tensor", [h_new, reset])
    new = b.write("aten.tanh_.default", [b.one("aten.add.Tensor", [x_new, scaled], b.meta(h))])
    change = b.write("aten.mul_.Tensor", [b.one("aten.sub.Tensor", [h, new], b.meta(h)), update])
    return b.write("aten.add_.Tensor", [change, new])


def _rnn_step(activation: str) -> _Cell:
    def step(b: Builder, gates_x: int, h: int, weights: Sequence[int]) -> int:
        total = b.write("aten.add_.Tensor", [linear(b, h, weights[1], _bias(weights, 1)), gates_x])
        return b.one(f"aten.{activation}.default", [total], b.meta(h))

    return step


def _bias(weights: Sequence[int], which: int) -> int | None:
    return weights[2 + which] if len(weights) > 2 else None


def _setting(b: Builder, a: Args) -> tuple[int, list[list[int]], int, int]:
    """Input with steps first, weights of each layer and direction, number of layers, of directions."""
    x = a.tensor("input")
    if len(b.shape(x)) != 3:
        raise ValueError(f"a sequence of shape {b.shape(x)} is not (steps, batch, features)")
    if a.flag("batch_first"):
        x = b.transpose(x, 0, 1)
    if b.shape(x)[0] > _MOST_STEPS:
        raise ValueError(f"a sequence of {b.shape(x)[0]:,} steps is longer than {_MOST_STEPS:,}")
    layers, directions = a.number("num_layers"), 2 if a.flag("bidirectional") else 1
    params = a.tensors("params")
    each = 4 if a.flag("has_biases", True) else 2
    if layers < 1 or len(params) != layers * directions * each:
        raise ValueError(f"{len(params)} weights are not those of {layers} layers")
    return x, [params[i : i + each] for i in range(0, len(params), each)], layers, directions


@lower("aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input", "aten.lstm.input")
def _layers(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    x, weights, layers, directions = _setting(b, a)
    first = a.tensors("hx") if a.name == "aten.lstm.input" else [a.tensor("hx")]
    if not b.contiguous(x):
        x = b.one("aten.clone.default", [x], b.meta(x))
    # In the place of biases and of a cell state, where there are none.
    none = [] if len(weights[0]) == 4 and len(first) == 2 else [b.one("aten.new_empty.default", [x], b.meta(x, (0,)))]
    last: list[list[int]] = [[] for _ in first]
    for layer in range(layers):
        sides = []
        for direction in range(directions):
            at = layer * directions + direction
            states = [b.view("aten.select.int", s, b.shape(s)[1:], b.strides(s)[1:]) for s in first]
            states = [*states, *none][:2]
            steps, batch, _ = b.shape(x)
            hidden = b.shape(states[0])[-1]
            made = b.run(
                "aten.mkldnn_rnn_layer.default", [x, *[*weights[at], *none, *none][:4], *states],
                b.meta(x, (steps, batch, hidden)), b.meta(states[0]), b.meta(states[1]), Meta((0,), "uint8"),
            )
            sides.append(made[0])
            for each, state in zip(last, made[1:], strict=False):
                each.append(state)
        x = sides[0]
        if directions == 2:
            x = b.one("aten.cat.default", sides, b.meta(x, (*b.shape(x)[:-1], 2 * b.shape(x)[-1])))
    final = [b.one("aten.stack.default", one, b.meta(one[0], (len(one), *b.shape(one[0])))) for one in last]
    return [b.transpose(x, 0, 1) if a.flag("batch_first") else x, *final]


def _cell_weights(a: Args) -> list[int]:
    biases = [a.maybe("b_ih"), a.maybe("b_hh")]
    return [a.tensor("w_ih"), a.tensor("w_hh"), *(one for one in biases if one is not None)]


@lower("aten.gru_cell.default")
def _gru_cell(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    weights = _cell_weights(a)
    gates = linear(b, a.tensor("input"), weights[0], _bias(weights, 0))
    return [_gru_step(b, gates, a.tensor("hx"), weights)]


@lower("aten.rnn_tanh_cell.default", "aten.rnn_relu_cell.default")
def _rnn_cell(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    weights = _cell_weights(a)
    gates = linear(b, a.tensor("input"), weights[0], _bias(weights, 0))
    return [_rnn_step("tanh" if "tanh" in a.name else "relu")(b, gates, a.tensor("hx"), weights)]


@lower("aten.lstm_cell.default")
def _lstm_cell(b: Builder, a: Args, stated: Sequence[Meta]) -> Results:
    weights = _cell_weights(a)
    h, c = a.tensors("hx")
    total = linear(b, h, weights[1], _bias(weights, 1))
    total = b.write("aten.add_.Tensor", [total, linear(b, a.tensor("input"), weights[0], _bias(weights, 0))])
    parts = _gates(b, total, 4)
    names = ("sigmoid_", "sigmoid_", "tanh_", "sigmoid_")
    take, keep, new, out = (b.write(f"aten.{name}.default", [part]) for name, part in zip(names, parts, strict=True))
    kept = b.one("aten.mul.Tensor", [keep, c], b.meta(c))
    state = b.write("aten.add_.Tensor", [kept, b.one("aten.mul.Tensor", [take, new], b.meta(c))])
    result = b.one("aten.mul.Tensor", [out, b.one("aten.tanh.default", [state], b.meta(c))], b.meta(h))
    return [result, state]
