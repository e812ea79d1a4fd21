"""Recurrent layers: one op a direction, as PyTorch's fused layer."""

from __future__ import annotations

from foretell.workload.onnx.builder import Builder, row_major
from foretell.workload.onnx.nodes import Node
from foretell.workload.onnx.ops.movement import stacked
from foretell.workload.onnx.ops.registry import translates
from foretell.workload.onnx.values import Value

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@translates(*_GATES)
def _recurrent(b: Builder, n: Node) -> list[Value]:
    """Inputs x (T, B, I), W (directions, gates·H, I), R (directions, gates·H, H), bias, lengths, h0, c0.

    Every step's input meets W and its state meets R; outputs are (T, directions, B, H), the last state and cell.
    """
    x, w, r = n.value(0), n.value(1), n.value(2)
    batch_first = bool(n.number("layout", 0))
    x = b.contiguous(b.permute(x, (1, 0, 2), "aten.transpose.int") if batch_first else x)
    assert x.shape is not None
    steps, batch, features = x.shape
    directions, rows, wide = n.shape(1)
    hidden = n.shape(2)[2]
    gates = _GATES[n.op]
    if wide != features or rows != gates * hidden or n.shape(2)[:2] != (directions, rows) or directions not in (1, 2):
        raise ValueError(f"weights {n.shape(1)} and {n.shape(2)} do not fit an input of {x.shape}")
    state = ((batch, hidden), x.dtype)
    cells = [state, state] if n.op == "LSTM" else [state]
    initial = [v for v in (n.input(5), n.input(6)) if v is not None]
    results = []
    for direction in range(directions):
        operands: list[Value | None] = [x]
        for value in (w, r, n.input(3), *initial):
            operands.append(_part(b, value, direction, directions))
        outputs = [((steps, batch, hidden), x.dtype), *cells]
        results.append(b.emit("aten.mkldnn_rnn_layer.default", operands, outputs, {"mode": n.op.lower()}))
    every = stacked(b, [one[0] for one in results], 2 if batch_first else 1)
    if batch_first:
        every = b.permute(every, (1, 0, 2, 3))
    final = [stacked(b, [one[i] for one in results], 1 if batch_first else 0) for i in range(1, 1 + len(cells))]
    return [every, *final]


def _part(b: Builder, value: Value | None, direction: int, directions: int) -> Value | None:
    """One direction's weights or state."""
    if value is None or value.shape is None or directions == 1:
        return value
    strides = (value.strides or row_major(value.shape))[1:]
    return b.view("aten.select.int", value, value.shape[1:], strides)
