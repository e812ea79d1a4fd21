"""Structural re-parametrisation: branches that are convolutions, written as the one convolution they amount to.

X. Ding et al., RepVGG: Making VGG-style ConvNets Great Again. CVPR 2021, section 3.3. Nothing is keyed on a class: the
module's forward is traced, and wherever values computed from one input by convolutions, batch norms and identities
are added up, the sum becomes a single convolution, provided that it does no more multiply-adds than the branches did.
That covers RepVGG and MobileOne blocks as well as a batch norm behind a convolution, alone or after the sum.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from foretell.transform.affine import (
    Affine,
    Channelwise,
    Convolution,
    Map,
    added,
    affine_of,
    norm_of,
    scale_and_shift,
)
from foretell.transform.family import Change, Transformed, transform

_ADDITIONS = (operator.add, operator.iadd, torch.add)
_ADDITION_METHODS = ("add", "add_")
_IN_PLACE_OPERATORS = frozenset(
    ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem")
)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_SOURCE = "Ding et al., RepVGG, CVPR 2021, section 3.3"


@transform("reparametrize", exact=True, source=_SOURCE)
def reparametrize(module: nn.Module) -> Transformed:
    """Merge branches of convolutions, batch norms and identities into single convolutions, for inference.

    Returns a new module in evaluation mode that computes the same to rounding; the one given is left as it was.
    Works on *meta* modules too, where there are no weights yet. A module whose forward cannot be traced (it branches
    on values, or takes optional arguments) keeps its own forward; what is inside it is still rewritten.
    """
    return _rewritten(module, "reparametrize", merge=True)


@transform("fold_batch_norm", exact=True, source="Ding et al., RepVGG, CVPR 2021, equation 3")
def fold_batch_norm(module: nn.Module) -> Transformed:
    """Fold each batch norm into the convolution before it, for inference; branches stay.

    Otherwise as `reparametrize`.
    """
    return _rewritten(module, "fold_batch_norm", merge=False)


def _rewritten(module: nn.Module, name: str, merge: bool) -> Transformed:
    work = copy.deepcopy(module).eval()
    changes: list[Change] = []
    skipped: list[tuple[str, str]] = []
    work = _rewrite(work, "", merge, changes, skipped)
    return Transformed(work, name, True, tuple(changes), tuple(skipped))


def _rewrite(
    module: nn.Module, path: str, merge: bool, changes: list[Change], skipped: list[tuple[str, str]]
) -> nn.Module:
    """`module` with everything under it rewritten: traced whole if possible, else child by child."""
    if not any(isinstance(m, Convolution) for m in module.modules()) or isinstance(module, Convolution):
        return module
    reason = _untraceable(module)
    if reason is None:
        try:
            traced = _trace(module)
        except Exception as error:  # the forward is the user's, and a proxy can fail in any way
            reason = f"its forward cannot be traced: {' '.join(str(error).split())[:120]}"
        else:
            return _merge_sites(module, traced, path, merge, changes)
    if reason:
        skipped.append((path, reason))
    for child, submodule in list(module.named_children()):
        new = _rewrite(submodule, f"{path}.{child}" if path else child, merge, changes, skipped)
        if new is not submodule:
            setattr(module, child, new)
    return module


def _untraceable(module: nn.Module) -> str | None:
    """Why not to trace `module`: "" where that goes without saying, None where nothing speaks against it."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return ""
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has hooks"
    for parameter in inspect.signature(module.forward).parameters.values():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if variadic or parameter.default is not parameter.empty:
            # A trace would fix one choice of them, and be silently wrong for another.
            return f"its forward takes optional arguments ({parameter.name})"
    return None


class _Tracer(fx.Tracer):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # The base class looks each tensor up by going through all of them, at every use.
        self.names = {id(t): name for name, t in [*module.named_parameters(), *module.named_buffers()]}

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if isinstance(attr_val, nn.Parameter) and id(attr_val) in self.names:
            name = self.names[id(attr_val)]
            if name not in parameter_proxy_cache:
                parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
            return parameter_proxy_cache[name]
        return attr_val

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor) and id(a) in self.names:
            return self.create_node("get_attr", self.names[id(a)], (), {})
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_norm(m) or super().is_leaf_module(m, module_qualified_name)


def _is_norm(module: nn.Module) -> bool:
    """A batch norm with torch's own forward, whatever its class."""
    return isinstance(module, _BatchNorm) and type(module).forward in (_BatchNorm.forward, SyncBatchNorm.forward)


def _trace(module: nn.Module) -> fx.GraphModule:
    traced = fx.GraphModule(module, _Tracer(module).trace(module), type(module).__name__)
    # Checks of shape, and the attributes read for their messages, keep values alive that nothing else reads.
    for node in reversed(list(traced.graph.nodes)):
        if node.target is torch._assert or (node.target in (getattr, operator.eq) and not node.users):
            traced.graph.erase_node(node)
    return traced


def _writes_to_its_input(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Does `node` work in place?"""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    name = getattr(node.target, "__name__", "")
    in_place = name.endswith("_") or (node.target is getattr(operator, name, None) and name in _IN_PLACE_OPERATORS)
    return in_place or bool(node.kwargs.get("inplace", False)) or "out" in node.kwargs


@dataclass(frozen=True, slots=True)
class _Value:
    """What a node computes: `map` of `source`, by the nodes `parts` (modules among them), one branch a `terms`."""

    source: fx.Node
    map: Map
    parts: tuple[fx.Node, ...]
    terms: tuple[str, ...]
    conv: Convolution | None = None  # the widest convolution among the parts, the model for the merged one
    target: str = ""  # and its path
    saves: bool = False  # is there more among the parts than one convolution?


def _merge_sites(
    module: nn.Module, traced: fx.GraphModule, path: str, merge: bool, changes: list[Change]
) -> nn.Module:
    modules = dict(traced.named_modules())
    values: dict[fx.Node, _Value] = {}
    for node in traced.graph.nodes:
        value = _evaluate(node, modules, traced, values, merge)
        if value is not None:
            values[node] = value
    consumed: set[fx.Node] = set()
    sites: list[tuple[fx.Node, _Value]] = []
    for node in reversed(traced.graph.nodes):
        value = values.get(node)
        if value is None or node in consumed or not isinstance(value.map, Affine) or not value.saves:
            continue
        if _source_changes(value, node, modules):
            continue
        consumed.update(value.parts)
        sites.append((node, value))
    if not sites:
        return module
    calls: dict[str, int] = {}
    for node in traced.graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)] = calls.get(str(node.target), 0) + 1
    replaced: dict[fx.Node, fx.Node] = {}
    for node, value in reversed(sites):
        assert isinstance(value.map, Affine)
        assert value.conv is not None
        merged = value.map.to_module(value.conv)
        # A convolution called once gives its place to the merged one; a shared one must stay for its other callers.
        target = value.target if calls[value.target] == 1 else _free_name(traced, value.target)
        traced.add_submodule(target, merged)
        with traced.graph.inserting_before(node):
            new = traced.graph.call_module(target, (replaced.get(value.source, value.source),))
        replaced[node] = new
        node.replace_all_uses_with(new)
        changes.append(_change(path, value, modules, merged))
        for part in sorted(value.parts, reverse=True):
            traced.graph.erase_node(part)
    _delete_unread_attributes(traced)
    traced.delete_all_unused_submodules()
    traced.graph.lint()
    traced.recompile()
    return traced


def _source_changes(value: _Value, node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Is the input overwritten before `node`? Then the branches read different values under one name."""
    return any(
        user < node and user not in value.parts and _writes_to_its_input(user, modules) for user in value.source.users
    )


def _evaluate(
    node: fx.Node,
    modules: Mapping[str, nn.Module],
    traced: fx.GraphModule,
    values: Mapping[fx.Node, _Value],
    merge: bool,
) -> _Value | None:
    if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
        source = node.args[0]
        module = modules[str(node.target)]
        if not isinstance(source, fx.Node):
            return None
        if isinstance(module, Convolution):
            map_ = affine_of(module)
            size = "×".join(map(str, module.kernel_size))
            return None if map_ is None else _Value(source, map_, (node,), (f"{size} conv",), module, str(node.target))
        if isinstance(module, nn.Identity) or (isinstance(module, _DROPOUTS) and not module.training):
            return _passed(node, source, values)
        if isinstance(module, _BatchNorm) and _is_norm(module):
            return _normalised(node, source, norm_of(module), values)
    elif node.op == "call_function" and node.target is nn.functional.batch_norm:
        if isinstance(node.args[0], fx.Node):
            return _normalised(node, node.args[0], _functional_norm(node, traced), values)
    elif merge and _adds_two(node):
        return _summed(node, node.args[0], node.args[1], values)
    return None


def _adds_two(node: fx.Node) -> bool:
    function = node.op == "call_function" and node.target in _ADDITIONS
    method = node.op == "call_method" and node.target in _ADDITION_METHODS
    return (function or method) and len(node.args) == 2 and not node.kwargs


def _taken(node: Any, user: fx.Node, values: Mapping[fx.Node, _Value]) -> _Value | None:
    """The value of `node` if `user` is all that reads it, so that it may vanish into `user`."""
    return values.get(node) if isinstance(node, fx.Node) and set(node.users) == {user} else None


def _passed(node: fx.Node, source: fx.Node, values: Mapping[fx.Node, _Value]) -> _Value:
    value = _taken(source, node, values)
    if value is None:
        return _Value(source, Channelwise(), (node,), ("identity",))
    return replace(value, parts=(*value.parts, node))


def _normalised(
    node: fx.Node, source: fx.Node, norm: tuple[torch.Tensor, torch.Tensor] | None, values: Mapping[fx.Node, _Value]
) -> _Value | None:
    if norm is None:
        return None
    value = _taken(source, node, values)
    if value is None or (isinstance(value.map, Affine) and value.map.outputs != len(norm[0])):
        return _Value(source, Channelwise().normalised(*norm), (node,), ("norm",))
    if len(value.terms) > 1:
        terms = (*value.terms[:-1], f"{value.terms[-1]}, then norm")
    else:
        terms = (f"{value.terms[0]}·norm",)
    return replace(value, map=value.map.normalised(*norm), parts=(*value.parts, node), terms=terms, saves=True)


def _summed(node: fx.Node, left: Any, right: Any, values: Mapping[fx.Node, _Value]) -> _Value | None:
    if isinstance(left, int | float) or isinstance(right, int | float):
        number, operand = (left, right) if isinstance(left, int | float) else (right, left)
        value = _taken(operand, node, values)
        if value is None:
            return None
        shifted = value.map.shifted(number) if number else value.map
        if shifted is None:
            return None
        return replace(value, map=shifted, parts=(*value.parts, node), saves=True)
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    first, second = _taken(left, node, values), _taken(right, node, values)
    if left is right:
        return None
    # A branch may be the bare input itself: x + conv(x).
    if first is None and second is not None and second.source is left:
        first = _Value(left, Channelwise(), (), ("identity",))
    elif second is None and first is not None and first.source is right:
        second = _Value(right, Channelwise(), (), ("identity",))
    if first is None or second is None or first.source is not second.source:
        return None
    total = added(first.map, second.map)
    if total is None:
        return None
    widest = max((first, second), key=lambda v: 0 if not isinstance(v.map, Affine) else v.map.weight.numel())
    return _Value(
        first.source,
        total,
        (*first.parts, *second.parts, node),
        (*first.terms, *second.terms),
        widest.conv,
        widest.target,
        saves=True,
    )


def _functional_norm(node: fx.Node, traced: fx.GraphModule) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(scale, shift) of a call of `torch.nn.functional.batch_norm` whose statistics are the module's own tensors."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("training", False) is not False:
        return None
    tensors: dict[str, torch.Tensor | None] = {}
    for name in ("running_mean", "running_var", "weight", "bias"):
        argument = given.get(name)
        if argument is None:
            tensors[name] = None
        elif isinstance(argument, fx.Node) and argument.op == "get_attr":
            tensors[name] = operator.attrgetter(str(argument.target))(traced)
        else:
            return None  # computed on the way
    mean, variance = tensors["running_mean"], tensors["running_var"]
    if mean is None or variance is None:
        return None
    return scale_and_shift(mean, variance, tensors["weight"], tensors["bias"], float(given.get("eps", 1e-5)))


def _delete_unread_attributes(traced: fx.GraphModule) -> None:
    """Erase reads of parameters and buffers that nothing uses any more, and what they read where nobody else does."""
    unread: set[str] = set()
    for node in list(traced.graph.nodes):
        if node.op == "get_attr" and not node.users:
            unread.add(str(node.target))
            traced.graph.erase_node(node)
    unread -= {str(node.target) for node in traced.graph.nodes if node.op == "get_attr"}
    called = {str(node.target) for node in traced.graph.nodes if node.op == "call_module"}
    for target in unread:
        owner, _, name = target.rpartition(".")
        above = [".".join(owner.split(".")[: n + 1]) for n in range(owner.count(".") + 1)]
        if not called.intersection(above):
            delattr(traced.get_submodule(owner), name)


def _free_name(traced: fx.GraphModule, target: str) -> str:
    taken = {name for name, _ in traced.named_modules()}
    number = 1
    while f"{target}_merged{number}" in taken:
        number += 1
    return f"{target}_merged{number}"


def _change(path: str, value: _Value, modules: Mapping[str, nn.Module], merged: Convolution) -> Change:
    owners: list[str] = []  # modules whose parameters went into the merged convolution
    for node in value.parts:
        if node.op == "call_module" and next(modules[str(node.target)].parameters(recurse=False), None) is not None:
            owners.append(str(node.target))
        owners += [str(n.target).rpartition(".")[0] for n in node.all_input_nodes if n.op == "get_attr"]
    before = {id(p): p.numel() for name in owners for p in modules[name].parameters(recurse=False)}
    kernel = "×".join(map(str, merged.kernel_size))
    where = value.target if len(value.terms) == 1 else _common(owners)
    return Change(
        where=".".join(filter(None, (path, where))),
        what=f"{' + '.join(value.terms)} → {kernel} conv",
        parameters_before=sum(before.values()),
        parameters_after=sum(p.numel() for p in merged.parameters()),
    )


def _common(paths: list[str]) -> str:
    """The path of the innermost module that holds all of `paths`."""
    shared: list[str] = []
    for names in zip(*(p.split(".") for p in paths), strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)
