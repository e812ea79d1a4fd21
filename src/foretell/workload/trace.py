"""Record what really runs: a dispatch mode below autograd, on fake tensors, that writes down every operation.

Nothing is computed and no weight is materialised: tensors are fake, so they have shapes, types, strides and storages
with true lifetimes, and no values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.graph import Op, Storage, Tensor, kind_of, make_op
from foretell.workload.shapes import SHAPES

_DEVICE = torch.ops.prim.device.default
_INDEX = "_foretell_index"  # attribute of a fake tensor: (recorder, tensor index)

# Bookkeeping of the dispatcher and autograd: no kernel, no work.
_SILENT = frozenset(
    {
        "aten.detach.default",
        "aten.detach_.default",
        "aten.alias.default",
        "aten.lift_fresh.default",
        "aten.lift_fresh_copy.default",
        "aten.sym_size.int",
        "aten.sym_stride.int",
        "aten.sym_numel.default",
        "aten.is_same_size.default",
        "aten._has_same_storage_numel.default",
        "aten.resolve_conj.default",
        "aten.resolve_neg.default",
        "aten.set_.source_Storage_storage_offset",
        "aten._assert_async.default",
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "profiler._record_function_enter_new.default",
        "profiler._record_function_exit._RecordFunction",
    }
)


class Recorder(TorchDispatchMode):
    """Records operations, tensors and storage lifetimes while it is active.

    `phase` is set by whoever drives the step. `scalar` is what a read of a scalar returns in the optimiser phase
    (its step counters are host numbers in a real run).
    """

    def __init__(self, module_names: dict[int, str]) -> None:
        super().__init__()
        self.phase = "forward"
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self._roles: list[str | None] = []
        self._nbytes: list[int] = []
        self._born: list[int] = []
        self._dies: list[int | None] = []
        self._live: dict[int, int] = {}  # storage address → index
        self._names = module_names
        self._path: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self.recording = True

    # --- storages and tensors -----------------------------------------------------------------------------------

    def _storage(self, tensor: torch.Tensor, born: int, role: str | None) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        index = self._live.get(address)
        if index is None:
            index = len(self._nbytes)
            self._live[address] = index
            self._nbytes.append(storage.nbytes())
            self._born.append(born)
            self._dies.append(None)
            self._roles.append(role)
            weakref.finalize(storage, self._freed, address, index).atexit = False
        elif role is not None:
            self._roles[index] = role
        return index

    def _freed(self, address: int, index: int) -> None:
        if self._live.get(address) == index:
            del self._live[address]
        if self.recording:
            self._dies[index] = len(self.ops) - 1

    def _describe(self, tensor: torch.Tensor, born: int, role: str | None = None) -> int:
        shape = tuple(tensor.shape)
        strides: tuple[int, ...] | None = tuple(tensor.stride())
        if strides == _row_major(shape):
            strides = None
        index = len(self.tensors)
        self.tensors.append(Tensor(shape, _dtype_name(tensor.dtype), self._storage(tensor, born, role), strides))
        setattr(tensor, _INDEX, (self, index))
        return index

    def register(self, tensor: torch.Tensor, role: str) -> int:
        """Make a tensor that exists before the step known under its role; returns its index."""
        return self._describe(tensor, -1, role)

    def set_role(self, tensor: torch.Tensor, role: str) -> None:
        """Say what a tensor's storage turned out to be."""
        index = self._live.get(tensor.untyped_storage()._cdata)
        if index is not None:
            self._roles[index] = role

    def mark_output(self, tensor: torch.Tensor) -> None:
        """Say that the tensor is returned by the step, unless its storage already has a role."""
        index = self._live.get(tensor.untyped_storage()._cdata)
        if index is not None and self._roles[index] is None:
            self._roles[index] = "output"

    def index_of(self, tensor: torch.Tensor) -> int:
        """The tensor's index; a tensor never seen was there before the step."""
        known = getattr(tensor, _INDEX, None)
        if known is not None and known[0] is self:
            return int(known[1])
        return self._describe(tensor, -1)

    # --- modules ------------------------------------------------------------------------------------------------

    @contextmanager
    def follow_modules(self) -> Iterator[None]:
        """Keep the path of the module that runs, for naming ops (nothing is counted through modules)."""
        from torch.nn.modules import module as nn_module

        def enter(module: torch.nn.Module, _args: Any) -> None:
            self._path.append(self._names.get(id(module), self.module))

        def leave(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
            if self._path:
                self._path.pop()

        handles = (
            nn_module.register_module_forward_pre_hook(enter),
            nn_module.register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def module(self) -> str:
        """Path of the module whose forward runs now."""
        return self._path[-1] if self._path else ""

    def _module_now(self) -> str:
        """Module of the op at hand; a backward op belongs to the module of its forward op."""
        if self.phase == "backward" and not self._path:
            node = torch._C._current_autograd_node()
            return self._module_of_node.get(node._sequence_nr(), "") if node is not None else ""
        if self.phase != "optimizer" and torch.is_grad_enabled():
            # The op's own node was made just before it; one that needs no gradient finds the node of another.
            self._module_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, self.module)
        return self.module

    # --- dispatch -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for at every step of autograd: answered without a detour
        kwargs = kwargs or {}
        name = _op_name(func)
        if not self.recording:
            return func(*args, **kwargs)
        if name in _SILENT:
            out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor) and args and isinstance(args[0], torch.Tensor):
                setattr(out, _INDEX, (self, self.index_of(args[0])))
            return out
        if name == "aten._local_scalar_dense.default" and self.phase == "optimizer":
            return 1.0
        inputs: list[int] = []
        for value in args:
            self._collect(value, inputs)
        for value in kwargs.values():
            self._collect(value, inputs)
        module = self._module_now()
        out = SHAPES.get(func, func)(*args, **kwargs)
        if name == "aten._local_scalar_dense.default":
            return out
        at = len(self.ops)
        outputs: list[int] = []
        seen: set[int] = set()
        for tensor in (*_tensors(out), *_mutated(func, args, kwargs)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                outputs.append(self._describe(tensor, at))
        kind = kind_of(name)
        if kind == "other" and _is_pointwise(func):
            kind = "pointwise"
        self.ops.append(
            make_op(
                name,
                self.tensors,
                tuple(inputs),
                tuple(outputs),
                phase=self.phase,
                module=module,
                attrs=_attributes(name, args, kwargs),
                kind=kind,
            )
        )
        return out

    def _collect(self, value: Any, into: list[int]) -> None:
        if isinstance(value, torch.Tensor):
            into.append(self.index_of(value))
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, torch.Tensor):
                    into.append(self.index_of(item))

    # --- result -------------------------------------------------------------------------------------------------

    def storages(self, default: Callable[[int, int | None], str]) -> tuple[Storage, ...]:
        """The storages, those without a role given one by `default(born, dies)`."""
        return tuple(
            Storage(nbytes, role or default(born, dies), born, dies)
            for nbytes, role, born, dies in zip(self._nbytes, self._roles, self._born, self._dies, strict=True)
        )

    def settle_sizes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the sizes of storages that were resized after they were first seen."""
        for tensor in tensors:
            index = self._live.get(tensor.untyped_storage()._cdata)
            if index is not None:
                self._nbytes[index] = tensor.untyped_storage().nbytes()


@cache
def _op_name(func: Any) -> str:
    return str(func)


@cache
def _is_pointwise(func: Any) -> bool:
    return torch.Tag.pointwise in getattr(func, "tags", ())


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments an op writes into."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _mutated(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for position, name in _written_arguments(func):
        yield from _tensors(args[position] if position < len(args) else kwargs.get(name))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


_CONVOLUTION = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _attributes(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> MappingProxyType[str, Any]:
    """What the counting rules and the cost models read of an op's arguments besides its tensors."""
    attrs: dict[str, Any] = {}
    if name == "aten.convolution.default":
        for key, value in zip(_CONVOLUTION, args[3:9], strict=False):
            attrs[key] = tuple(value) if isinstance(value, (list, tuple)) else value
    elif name == "aten.convolution_backward.default":
        for key, value in zip(_CONVOLUTION, args[4:10], strict=False):
            attrs[key] = tuple(value) if isinstance(value, (list, tuple)) else value
        attrs["grad_mask"] = tuple(args[10])
    elif name.startswith("foretell.sdpa"):
        attrs["causal"] = bool(args[-1])
        attrs["masked"] = args[-2] is not None
    elif "pool" in name and len(args) > 1 and isinstance(args[1], (list, tuple)):
        attrs["window"] = tuple(args[1])
    elif name.startswith(("aten.native_batch_norm", "aten._native_batch_norm")) and "backward" not in name:
        attrs["training"] = bool(next((a for a in args[3:] if isinstance(a, bool)), False))
        attrs["affine"] = args[1] is not None
    elif name == "aten.native_layer_norm.default":
        attrs["affine"] = args[2] is not None
    elif name == "aten.native_group_norm.default":
        attrs["affine"] = args[1] is not None
    elif name.startswith(("aten.sum.", "aten.mean.", "aten.amax.", "aten.var", "aten.std")) and len(args) > 1:
        if isinstance(args[1], (list, tuple)):
            attrs["dims"] = tuple(args[1])
    elif name.startswith(("aten._softmax", "aten._log_softmax")) and len(args) > 1:
        attrs["dim"] = args[1] if isinstance(args[1], int) else args[2]
    elif name == "aten.topk.default":
        attrs["k"] = args[1]
    return MappingProxyType(attrs)
