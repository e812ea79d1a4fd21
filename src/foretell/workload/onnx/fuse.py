"""Put together again what exporters spell out: PyTorch's fused operations as ONNX had no name for them.

Only forms that exporters write for one PyTorch operation are joined, so that the graph is the captured one: attention
(``scaled_dot_product_attention`` scales *both* operands by the root of the scale), layer and group norm, GELU, SiLU,
and a linear layer's bias. A model that spells these out itself keeps its own operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.workload.onnx.ops.registry import FUSED

_NORM_CHAIN = 8


@dataclass(slots=True)
class Plan:
    """The nodes of one graph in an order that runs, without those that nothing needs.

    `users` are the nodes that read a name; a graph's output has one more reader, None. `joined` counts what was put
    together, by name.
    """

    nodes: list[Any]
    users: dict[str, list[Any]] = field(default_factory=dict)
    joined: dict[str, int] = field(default_factory=dict)


def reads(node: Any) -> Iterable[str]:
    """Names a node reads, those inside its graphs included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield from free_names(attribute.g)


def free_names(graph: Any) -> set[str]:
    """Names a graph takes from around it."""
    own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    found: set[str] = set()
    for node in graph.node:
        found.update(name for name in reads(node) if name not in own)
        own.update(node.output)
    found.update(v.name for v in graph.output if v.name not in own)
    return found


def plan(nodes: Sequence[Any], outputs: Sequence[str], scalars: set[str], vectors: set[str]) -> Plan:
    """Join what belongs together, and leave out what no output needs.

    `scalars` are names of single stored numbers, `vectors` those of stored tensors of one dimension.
    """
    result = Plan(list(nodes))
    _index(result, outputs)
    matcher = _Matcher(result, scalars, vectors)
    replaced: dict[int, Any] = {}
    for position, node in enumerate(result.nodes):
        match = matcher.match(node)
        if match is not None:
            replaced[position] = match
            result.joined[match.op_type] = result.joined.get(match.op_type, 0) + 1
    result.nodes = _needed([replaced.get(i, node) for i, node in enumerate(result.nodes)], outputs)
    _index(result, outputs)
    return result


def _index(result: Plan, outputs: Sequence[str]) -> None:
    users: dict[str, list[Any]] = {name: [None] for name in outputs}
    for node in result.nodes:
        for name in reads(node):
            users.setdefault(name, []).append(node)
    result.users = users


def _needed(nodes: list[Any], outputs: Sequence[str]) -> list[Any]:
    wanted = set(outputs)
    kept = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            kept.append(node)
            wanted.update(reads(node))
    return kept[::-1]


class _Matcher:
    """Looks at a node that could end a pattern and, backwards, at what made its operands."""

    def __init__(self, result: Plan, scalars: set[str], vectors: set[str]) -> None:
        self.users = result.users
        self.scalars, self.vectors = scalars, vectors
        self.makers = {name: node for node in result.nodes for name in node.output if name}

    def match(self, node: Any) -> Any | None:
        """The one node that stands for a pattern ending here; None where there is none."""
        if node.domain not in ("", "ai.onnx"):
            return None
        look = {"MatMul": self._attention, "Add": self._sum, "Div": self._norm, "Mul": self._product}
        function = look.get(node.op_type)
        try:
            return function(node) if function is not None else None
        except (IndexError, ValueError):  # too few operands, which is told when the node itself is reached
            return None

    # --- helpers ------------------------------------------------------------------------------------------------

    def maker(self, name: str, *kinds: str) -> Any | None:
        """What made a name, if it is of one of these kinds."""
        node = self.makers.get(name)
        if node is None or (kinds and node.op_type not in kinds) or node.domain not in ("", "ai.onnx"):
            return None
        return node

    def once(self, name: str) -> bool:
        """Whether exactly one node reads a name's content; CastLike reads its second operand's type alone."""
        users = [u for u in self.users.get(name, []) if u is None or u.op_type != "CastLike" or u.input[0] == name]
        return len(users) == 1 and users[0] is not None

    def uncast(self, name: str) -> str:
        """What a name was before a CastLike, which changes nothing between tensors of one type."""
        node = self.maker(name, "CastLike")
        return str(node.input[0]) if node is not None else name

    def number(self, name: str) -> bool:
        """Whether a name is one number by construction."""
        if name in self.scalars:
            return True
        node = self.makers.get(name)
        for _ in range(_NORM_CHAIN):
            if node is None:
                return False
            if node.op_type == "Constant":
                return node.output[0] in self.scalars
            if node.op_type not in ("Sqrt", "Cast", "CastLike", "Div", "Reciprocal") or not node.input:
                return False
            if node.input[-1 if node.op_type == "Div" else 0] in self.scalars:
                return True
            if node.op_type == "Sqrt" and self._of_a_size(node.input[0]):
                return True
            node = self.makers.get(node.input[-1 if node.op_type == "Div" else 0])
        return False

    def _of_a_size(self, name: str) -> bool:
        """Whether a value comes from a tensor's shape through casts and picks: the head's depth."""
        for _ in range(_NORM_CHAIN):
            node = self.makers.get(name)
            if node is None or not node.input:
                return False
            if node.op_type == "Shape":
                return True
            if node.op_type not in ("Cast", "CastLike", "Slice", "Gather", "Squeeze", "Sqrt", "Div", "Reciprocal"):
                return False
            name = node.input[-1 if node.op_type == "Div" else 0]
        return False

    def _joined(self, node: Any, name: str, inputs: Sequence[str], **attrs: Any) -> Any:
        from onnx import helper

        made = helper.make_node(name, list(inputs), [node.output[0]], node.name, domain=FUSED, **attrs)
        made.metadata_props.extend(node.metadata_props)
        return made

    # --- attention ----------------------------------------------------------------------------------------------

    def _attention(self, node: Any) -> Any | None:
        """MatMul(Softmax(MatMul(q·s, kᵀ·s) [+ mask]), v), with nothing else reading in between."""
        weights = node.input[0]
        softmax = self._softmax_of(weights)
        if softmax is None:
            return None
        scores, mask = softmax.input[0], ""
        if not self.once(scores):
            return None
        added = self.maker(scores, "Add")
        if added is not None:
            first, second = added.input
            scores, mask = (first, second) if self.maker(first, "MatMul") else (second, first)
            if not self.once(scores):
                return None
        product = self.maker(scores, "MatMul")
        if product is None:
            return None
        left, right = self._scaled(product.input[0]), self._scaled(product.input[1])
        if left is None or right is None:
            return None
        key, transposed = self._untransposed(right)
        causal = bool(mask) and self._is_triangle(mask)
        inputs = [left, key, node.input[1], *([mask] if mask and not causal else [])]
        return self._joined(node, "Attention", inputs, k_transposed=int(transposed), is_causal=int(causal))

    def _softmax_of(self, name: str) -> Any | None:
        """The softmax behind the weights: itself, or with rows that are masked whole set to zero."""
        node = self.maker(name, "Softmax", "Where", "Dropout")
        if node is not None and node.op_type == "Dropout" and len(node.input) < 3:
            node = self.maker(node.input[0], "Softmax", "Where")
        if node is not None and node.op_type == "Where":
            condition = self.maker(node.input[0], "IsNaN")
            softmax = self.maker(node.input[2], "Softmax")
            return softmax if condition is not None and softmax is not None else None
        return node if node is not None and node.op_type == "Softmax" and self.once(node.output[0]) else None

    def _scaled(self, name: str) -> str | None:
        """What is multiplied by a number to give `name`."""
        node = self.maker(name, "Mul")
        if node is None or not self.once(name):
            return None
        first, second = node.input
        if self.number(second):
            return str(first)
        return str(second) if self.number(first) else None

    def _untransposed(self, name: str) -> tuple[str, bool]:
        """The keys behind kᵀ, where it is a transposition of the last two dimensions, plain or through a batch."""
        node = self.maker(name, "Transpose")
        if node is not None and self._swaps_last(node):
            return str(node.input[0]), False
        outer = self.maker(name, "Reshape")
        swap = self.maker(outer.input[0], "Transpose") if outer is not None else None
        inner = self.maker(swap.input[0], "Reshape") if swap is not None else None
        if swap is not None and inner is not None and self._swaps_last(swap):
            return str(inner.input[0]), False
        return name, True

    @staticmethod
    def _swaps_last(node: Any) -> bool:
        perm = next((list(a.ints) for a in node.attribute if a.name == "perm"), [])
        rank = len(perm)
        return rank > 2 and perm == [*range(rank - 2), rank - 1, rank - 2]

    def _is_triangle(self, name: str) -> bool:
        """Whether a mask is Where(lower triangle of ones, 0, -inf), as ``is_causal=True`` is written."""
        node = self.maker(name, "Where", "CastLike", "Cast")
        while node is not None and node.op_type in ("CastLike", "Cast"):
            node = self.maker(node.input[0], "Where", "CastLike", "Cast")
        if node is None or not all(self.number(x) for x in node.input[1:3]):
            return False
        step = self.makers.get(node.input[0])
        while step is not None and step.op_type in ("Not", "Cast", "CastLike", "Equal"):
            step = self.makers.get(step.input[0])
        if step is None or step.op_type != "Trilu":
            return False
        ones = self.makers.get(step.input[0])
        while ones is not None and ones.op_type in ("Cast", "CastLike"):
            ones = self.makers.get(ones.input[0])
        return ones is not None and ones.op_type in ("Expand", "ConstantOfShape", "Constant")

    # --- linear, norms ------------------------------------------------------------------------------------------

    def _sum(self, node: Any) -> Any | None:
        return self._linear(node) or self._affine(node)

    def _linear(self, node: Any) -> Any | None:
        """Add(MatMul(x, w), b) with a stored vector b."""
        for product, bias in (node.input, list(node.input)[::-1]):
            made = self.maker(product, "MatMul")
            stored = made is not None and self._is_stored_vector(bias) and self._is_stored(made.input[1])
            if made is not None and stored and self.once(product):
                return self._joined(node, "Linear", [*made.input, bias])
        return None

    def _is_stored_vector(self, name: str) -> bool:
        node = self.maker(name, "Identity")
        return name in self.vectors or (node is not None and node.input[0] in self.vectors)

    def _is_stored(self, name: str) -> bool:
        """Whether a name is a stored tensor, as it is or transposed."""
        node = self.makers.get(name)
        if node is None:
            return True
        return node.op_type in ("Transpose", "Identity") and node.input[0] not in self.makers

    def _affine(self, node: Any) -> Any | None:
        """x̂·scale + bias over a layer or group norm spelled out."""
        for scaled, bias in (node.input, list(node.input)[::-1]):
            times = self.maker(scaled, "Mul")
            if times is None or not self.once(scaled):
                continue
            for normal, scale in (times.input, list(times.input)[::-1]):
                if not self.once(normal):
                    continue
                div = self.maker(normal, "Div")
                x = self._standardised(div) if div is not None else None
                if x is not None and scale in self.vectors and bias in self.vectors:
                    return self._joined(node, "LayerNormalization", [x, scale, bias])
                groups = self._grouped(normal)
                if groups is not None:
                    return self._joined(node, "GroupNormalization", [*groups, self.uncast(scale), self.uncast(bias)])
        return None

    def _norm(self, node: Any) -> Any | None:
        """A layer norm without scale; one with scale is matched where its bias is added."""
        x = self._standardised(node)
        if x is None or self._scaled_later(node.output[0]):
            return None
        return self._joined(node, "LayerNormalization", [x])

    def _scaled_later(self, name: str) -> bool:
        users = self.users.get(name, [])
        if len(users) != 1 or users[0] is None or users[0].op_type != "Mul":
            return False
        product = users[0]
        after = self.users.get(product.output[0], [])
        return any(x in self.vectors for x in product.input) and len(after) == 1 and after[0] is not None \
            and after[0].op_type == "Add" and any(x in self.vectors for x in after[0].input)

    def _standardised(self, div: Any) -> str | None:
        """x where div is (x − mean(x)) / sqrt(mean((x − mean(x))²) + ε) over the last dimension."""
        root = self.maker(div.input[1], "Sqrt")
        centred = self.maker(div.input[0], "Sub")
        shifted = self.maker(root.input[0], "Add") if root is not None else None
        if centred is None or shifted is None:
            return None
        variance = self.maker(shifted.input[0], "ReduceMean") or self.maker(shifted.input[1], "ReduceMean")
        mean = self.maker(centred.input[1], "ReduceMean")
        if variance is None or mean is None or mean.input[0] != centred.input[0]:
            return None
        square = self.maker(variance.input[0], "Pow", "Mul")
        base = self._centred_behind(square.input[0]) if square is not None else None
        if base is None or base.input[0] != centred.input[0] or not self._last(mean) or not self._last(variance):
            return None
        return str(centred.input[0])

    def _centred_behind(self, name: str) -> Any | None:
        cast = self.maker(name, "Cast")
        return self.maker(cast.input[0] if cast is not None else name, "Sub")

    @staticmethod
    def _last(node: Any) -> bool:
        axes = next((list(a.ints) for a in node.attribute if a.name == "axes"), None)
        return axes == [-1] or (axes is None and len(node.input) > 1)

    def _grouped(self, name: str) -> tuple[str, str] | None:
        """(x, per-group scale) where `name` is Reshape(InstanceNormalization(Reshape(x))), as group norm is written."""
        back = self.maker(name, "Reshape")
        norm = self.maker(back.input[0], "InstanceNormalization") if back is not None else None
        front = self.maker(norm.input[0], "Reshape") if norm is not None else None
        if back is None or norm is None or front is None:
            return None
        if not self.once(back.input[0]) or not self.once(norm.input[0]):
            return None
        return str(front.input[0]), str(norm.input[1])

    # --- activations --------------------------------------------------------------------------------------------

    def _product(self, node: Any) -> Any | None:
        """SiLU: x · sigmoid(x); GELU: x · (1 + erf(x / √2)) · ½ in either order of the factors."""
        for x, gate in (node.input, list(node.input)[::-1]):
            made = self.maker(gate, "Sigmoid")
            if made is not None and made.input[0] == x and self.once(gate):
                return self._joined(node, "Silu", [x])
        factors: list[str] = []
        self._factors(node, factors, 3)
        halves = [f for f in factors if self.number(f)]
        sums = [f for f in factors if self._erf_behind(f) is not None]
        others = [f for f in factors if f not in halves and f not in sums]
        if len(factors) != 3 or len(halves) != 1 or len(sums) != 1 or len(others) != 1:
            return None
        erf = self._erf_behind(sums[0])
        ratio = self.maker(erf.input[0], "Div", "Mul") if erf is not None else None
        if ratio is None or others[0] not in ratio.input:
            return None
        return self._joined(node, "Gelu", [others[0]])

    def _erf_behind(self, name: str) -> Any | None:
        """erf(·) where `name` is 1 + erf(·)."""
        total = self.maker(name, "Add")
        if total is None:
            return None
        return self.maker(total.input[0], "Erf") or self.maker(total.input[1], "Erf")

    def _factors(self, node: Any, into: list[str], depth: int) -> None:
        for name in node.input:
            made = self.maker(name, "Mul")
            if made is not None and depth > 0 and self.once(name):
                self._factors(made, into, depth - 1)
            else:
                into.append(name)
