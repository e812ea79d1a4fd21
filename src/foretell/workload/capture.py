"""Capture a PyTorch module as a `Graph`: forward, and for training autograd's backward and the optimiser step.

The module is re-homed: its parameters and buffers (real, or on *meta*) are replaced by fake CPU tensors for the time
of the capture, and put back afterwards. Then one step runs as it really would, below it a `Recorder`.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from foretell.errors import CaptureError, ForetellError, InputError
from foretell.graph import Graph
from foretell.workload.autocast import cuda_autocast
from foretell.workload.fused import fused_operations
from foretell.workload.lora_torch import AdapterWeight, adapted
from foretell.workload.options import Options
from foretell.workload.trace import Recorder

_CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AUTOCAST = {"amp": torch.float16, "amp_bf16": torch.bfloat16}

Loss = Callable[[Any], torch.Tensor]


def capture_module(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Options,
    name: str | None = None,
    items: Mapping[str, int] | None = None,
    loss: Loss | None = None,
    keep_output: bool = True,
    prepare: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], dict[str, Any]] | None = None,
    provenance: Mapping[str, str] | None = None,
) -> Graph:
    """One step of `module` on example inputs (real, meta or fake tensors: only shape and type matter).

    `loss` maps the module's output to the scalar that is differentiated; by default `default_loss`. With
    `keep_output` the caller's variable keeps the output alive through the step, as a plain training loop does.
    `prepare` runs before the recorded step, unrecorded, and returns more keyword arguments (a filled KV cache).
    Raises CaptureError naming the user's line where the module fails or depends on values.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError("a scripted module hides what it runs", "capture the module it was made from")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    training = options.trains
    with ExitStack() as stack:
        stack.enter_context(_eager_compiled(module))
        stack.enter_context(_without_mha_fastpath())
        stack.enter_context(fused_operations())
        if options.lora is not None:
            stack.enter_context(adapted(module, options.lora))
        parameters, buffers = stack.enter_context(_rehomed(module, fake, options))
        stack.enter_context(_mode(module, training))
        inputs = _fake_inputs((tuple(args), dict(kwargs or {})), fake, options)
        recorder = Recorder({id(m): _clean(n) for n, m in module.named_modules()})
        for tensor in parameters:
            recorder.register(tensor, "parameter")
        for tensor in buffers:
            recorder.register(tensor, "buffer")
        step = _Step(module, inputs, options, recorder, loss or default_loss, keep_output)
        with fake, _explained(name or type(module).__name__):
            if prepare is not None:
                with torch.no_grad(), _autocast(options):
                    extra = prepare(module, *inputs)
                inputs[1].update(extra)
                for tensor in pytree.tree_leaves(list(_cache_tensors(extra))):
                    recorder.register(tensor, "kv_cache")
            input_tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
            input_ids = tuple(recorder.register(t, "input") for t in input_tensors)
            optimizer = step.make_optimizer([p for p in parameters if p.requires_grad]) if training else None
            with recorder, recorder.follow_modules():
                output_ids = step.run(optimizer)
            recorder.recording = False
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        total = sum(p.numel() for p in parameters)
        del optimizer, step
    if not any(op.kind != "view" for op in recorder.ops):
        raise CaptureError(
            f"{name or type(module).__name__}: nothing ran that could be recorded",
            "run the work in forward itself, not in a thread or a generator that nobody consumes",
        )
    first = next((t.shape[0] for t in input_tensors if t.dim() > 0), 1)
    return Graph(
        name=name or type(module).__name__,
        mode=options.phase,
        precision=options.precision,
        ops=tuple(recorder.ops),
        tensors=tuple(recorder.tensors),
        storages=recorder.storages(_role_by_life(recorder)),
        parameters=total,
        trainable_parameters=trainable,
        items=MappingProxyType(dict(items or {"samples": max(1, int(first)) * options.accumulate})),
        inputs=input_ids,
        outputs=output_ids,
        provenance=MappingProxyType({"torch": torch.__version__, **(provenance or {})}),
    )


class _Step:
    """Forward, backward and optimiser step of one module, driven as a training loop drives them."""

    def __init__(
        self,
        module: nn.Module,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        options: Options,
        recorder: Recorder,
        loss: Loss,
        keep_output: bool,
    ) -> None:
        self.module, self.inputs, self.options = module, inputs, options
        self.recorder, self.loss, self.keep_output = recorder, loss, keep_output

    def make_optimizer(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer | None:
        """The optimiser with its state already there, as in any step but the first; None without parameters."""
        if not parameters:
            raise CaptureError("nothing to train: no parameter requires a gradient", "set requires_grad=True on some")
        optimizer = make_optimizer(self.options.optimizer, parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with Recorder({}) as scratch:  # step counters are read on the host: answer them
            scratch.phase = "optimizer"
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.recorder.register(value, "optimizer")
        return optimizer

    def run(self, optimizer: torch.optim.Optimizer | None) -> tuple[int, ...]:
        if optimizer is None:
            with torch.no_grad(), _autocast(self.options):
                output = self.module(*self.inputs[0], **self.inputs[1])
            return self._mark_outputs(output)
        recorder = self.recorder
        output_ids: tuple[int, ...] = ()
        output: Any = None
        for _ in range(self.options.accumulate):
            recorder.phase = "forward"
            with _autocast(self.options):
                output = self.module(*self.inputs[0], **self.inputs[1])
                value = self.loss(output)
            if not (isinstance(value, torch.Tensor) and value.requires_grad):
                raise CaptureError(
                    "the loss does not depend on any parameter that requires a gradient",
                    "check requires_grad, or return the loss from the module",
                )
            output_ids = tuple(
                recorder.index_of(t) for t in pytree.tree_leaves(_plain(output)) if isinstance(t, torch.Tensor)
            )
            if not self.keep_output:
                output = None
            recorder.phase = "backward"
            value.backward()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        recorder.set_role(parameter.grad, "gradient")
        recorder.phase = "optimizer"
        optimizer.step()
        del value, output
        optimizer.zero_grad(set_to_none=True)
        return output_ids

    def _mark_outputs(self, output: Any) -> tuple[int, ...]:
        ids = []
        for holder in (self.inputs[1], output if isinstance(output, Mapping) else {}):
            for tensor in _cache_tensors(holder):  # what the next step will find cached
                self.recorder.set_role(tensor, "kv_cache")
        for tensor in pytree.tree_leaves(_plain(output)):
            if isinstance(tensor, torch.Tensor):
                ids.append(self.recorder.index_of(tensor))
                self.recorder.mark_output(tensor)
        self.recorder.recording = False  # what the caller still holds outlives the step
        return tuple(ids)


def default_loss(output: Any) -> torch.Tensor:
    """The scalar to differentiate where the caller names none.

    The output's own ``loss`` or a scalar output is taken as it is; a (batch, classes) output gets cross-entropy with
    random targets; anything else the mean of its floating-point tensors.
    """
    plain = _plain(output)
    if isinstance(plain, Mapping) and isinstance(plain.get("loss"), torch.Tensor):
        return plain["loss"].mean() if plain["loss"].dim() else plain["loss"]
    tensors = [t for t in pytree.tree_leaves(plain) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not tensors:
        raise CaptureError(
            "the module returned no tensor that depends on its parameters", "return the output to differentiate"
        )
    if len(tensors) == 1 and tensors[0].dim() == 0:
        return tensors[0]
    if tensors[0].dim() == 2 and tensors[0].is_floating_point():
        target = torch.empty(tensors[0].shape[0], dtype=torch.int64, device=tensors[0].device)
        return nn.functional.cross_entropy(tensors[0], target)
    total = tensors[0].mean()
    for tensor in tensors[1:]:
        total = total + tensor.mean()
    return total


def make_optimizer(name: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimiser by name, multi-tensor ("foreach") as PyTorch chooses on CUDA."""
    optim = torch.optim
    if name == "sgd":
        return optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)
    if name == "sgd-plain":
        return optim.SGD(parameters, lr=0.1, foreach=True)
    if name == "adam":
        return optim.Adam(parameters, foreach=True)
    if name == "adamw":
        return optim.AdamW(parameters, foreach=True)
    if name == "adamw-fused":
        return optim.AdamW(parameters, fused=True)
    if name == "rmsprop":
        return optim.RMSprop(parameters, foreach=True)
    if name == "adagrad":
        return optim.Adagrad(parameters, foreach=True)
    return _Lion(parameters)


class _Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"), multi-tensor."""

    def __init__(self, parameters: list[torch.Tensor], lr: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            momenta = [self.state[p]["exp_avg"] for p in params]
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            updates = torch._foreach_lerp(momenta, grads, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_add_(params, updates, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, grads, 1 - beta2)


# --- re-homing --------------------------------------------------------------------------------------------------


@contextmanager
def _rehomed(
    module: nn.Module, fake: FakeTensorMode, options: Options
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Swap every parameter, buffer and plain tensor attribute for a fake CPU twin; yields (parameters, buffers).

    Shared tensors stay shared. On exit the module is exactly as it was.
    """
    twins: dict[int, torch.Tensor] = {}
    sources: list[torch.Tensor] = []  # keeps ids of the originals from being reused
    undo: list[tuple[dict[str, Any], str, Any]] = []
    parameters: list[torch.Tensor] = []
    buffers: list[torch.Tensor] = []

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in twins:
            sources.append(tensor)
            twins[id(tensor)] = _fake_like(tensor, options)
            (parameters if isinstance(tensor, nn.Parameter) else buffers).append(twins[id(tensor)])
        return twins[id(tensor)]

    try:
        with fake:
            for submodule in module.modules():
                for slots in (submodule._parameters, submodule._buffers, submodule.__dict__):
                    for key, value in list(slots.items()):
                        if isinstance(value, torch.Tensor):
                            replacement: Any = twin(value)
                        elif slots is submodule.__dict__ and key == "_flat_weights":  # a recurrent layer's own list
                            replacement = [twin(t) if isinstance(t, torch.Tensor) else t for t in value]
                        else:
                            continue
                        undo.append((slots, key, value))
                        slots[key] = replacement
        yield parameters, buffers
    finally:
        for slots, key, value in reversed(undo):
            slots[key] = value


def _fake_like(tensor: torch.Tensor, options: Options) -> torch.Tensor:
    """A fake CPU tensor like the given one; runs inside a fake mode."""
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        raise CaptureError("a lazy layer has no shapes yet", "run the module once on example inputs first")
    converted = tensor.is_floating_point() and not isinstance(tensor, AdapterWeight)
    dtype = _CAST.get(options.precision, tensor.dtype) if converted else tensor.dtype
    with torch.no_grad():
        if options.layout == "nhwc" and tensor.dim() == 4 and tensor.is_floating_point():
            twin = torch.empty(tensor.shape, dtype=dtype, device="cpu", memory_format=torch.channels_last)
        elif tensor.layout is torch.strided:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
        else:
            raise CaptureError(f"a tensor of layout {tensor.layout} cannot be captured", "convert it to dense first")
    if isinstance(tensor, nn.Parameter):
        twin._is_param = True  # what makes isinstance(twin, nn.Parameter) true; nn.Parameter(twin) would make two
        return twin.requires_grad_(tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else twin


_INITIALISERS = frozenset({
    "uniform_", "normal_", "exponential_", "random_", "bernoulli_", "fill_", "zero_", "copy_", "clamp_", "erfinv_",
    "add_", "sub_", "mul_", "div_",
})


class Uninitialised(TorchFunctionMode):
    """Skip what constructors do to fill meta tensors, which hold no values: it is a third of the time of a capture."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _INITIALISERS:
            target = args[0] if args else kwargs.get("tensor")  # of Tensor.normal_, of nn.init.normal_
            if isinstance(target, torch.Tensor) and target.is_meta:
                return target
        return func(*args, **kwargs)


def _fake_inputs(inputs: Any, fake: FakeTensorMode, options: Options) -> Any:
    inputs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, inputs)
    with fake:
        return pytree.tree_map_only(torch.Tensor, lambda t: _fake_like(t, options), inputs)


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation mode for the capture; each submodule's own flag is restored."""
    flags = [(m, m.training) for m in module.modules()]
    try:
        module.train(training)
    except NotImplementedError as error:  # a graph module of torch.export is fixed in one mode
        raise CaptureError(f"the module cannot switch mode: {error}", "capture the one it was made from") from error
    try:
        yield
    finally:
        for submodule, flag in flags:
            submodule.training = flag


@contextmanager
def _eager_compiled(module: nn.Module) -> Iterator[None]:
    """Run ``torch.compile``d modules eagerly, so that they count the same."""
    compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in module.modules())
    if not compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        yield


@contextmanager
def _without_mha_fastpath() -> Iterator[None]:
    """``nn.MultiheadAttention`` has a fused CPU/CUDA inference path that hides its operations."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _autocast(options: Options) -> Any:
    dtype = _AUTOCAST.get(options.precision)
    return cuda_autocast(dtype) if dtype is not None else nullcontext()


# --- names, roles, errors ---------------------------------------------------------------------------------------


def _clean(name: str) -> str:
    """Module path without the wrapper that ``torch.compile`` adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _plain(output: Any) -> Any:
    """A module's output as plain containers (``transformers`` returns ordered-dict classes)."""
    if isinstance(output, Mapping):
        return {key: _plain(value) for key, value in output.items() if not str(key).endswith("cache")}
    if hasattr(output, "to_tuple"):
        return output.to_tuple()
    return output


def _cache_tensors(extra: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in extra.values():
        for layer in getattr(value, "layers", ()):
            for tensor in vars(layer).values():
                if isinstance(tensor, torch.Tensor):
                    yield tensor


def _role_by_life(recorder: Recorder) -> Callable[[int, int | None], str]:
    phases = [op.phase for op in recorder.ops]

    def role(born: int, dies: int | None) -> str:
        if born < 0:
            return "buffer"
        if phases[born] == "forward" and (dies is None or phases[max(dies, 0)] != "forward"):
            return "activation" if "backward" in phases else "temporary"
        return "temporary"

    return role


_VALUE_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn a failure inside the module into one error that names the user's line and the repair."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it prints a traceback of what is told here in one line
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the module prints is not our output
            yield
    except ForetellError:
        raise
    except _VALUE_DEPENDENT as error:
        raise CaptureError(
            f"{name}: control flow depends on values, which do not exist before the run{user_line(error)}",
            "decide it from shapes, or capture the branch you mean as a module of its own",
        ) from error
    except (KeyboardInterrupt, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise CaptureError(
            f"{name}: the module failed: {type(error).__name__}: {text[:300]}{user_line(error)}",
            "check that it runs on these inputs; give other ones with --input NAME=SHAPE:DTYPE (inputs=…)",
        ) from error
    finally:
        logger.setLevel(level)


def user_line(error: BaseException) -> str:
    """Where in the user's code it happened: the innermost frame outside PyTorch and Foretell."""
    here = str(Path(__file__).resolve().parents[1]) + "/"
    torch_home = str(Path(inspect.getfile(torch)).parent) + "/"
    found = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((here, torch_home, "<")) and "contextlib" not in file:
            line = linecache.getline(file, trace.tb_lineno).strip()
            found = f" at {file}:{trace.tb_lineno}" + (f": {line}" if line else "")
        trace = trace.tb_next
    return found


def example_tensor(shape: Sequence[int], dtype: str) -> torch.Tensor:
    """A meta tensor of a shape and named type, as example input."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise InputError(f"PyTorch has no dtype {dtype}", repair="use e.g. float32, int64, bool")
    try:
        return torch.empty(tuple(shape), dtype=kind, device="meta")
    except (RuntimeError, OverflowError):
        size = "x".join(map(str, shape))[:80]
        raise InputError(f"an input of shape {size} does not fit 64 bits", repair="give smaller dimensions") from None
