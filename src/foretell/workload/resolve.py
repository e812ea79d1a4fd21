"""Workload strings: ``timm:NAME``, ``torchvision:NAME``, ``hf:PATH``, ``llm:NAME``, ``zoo:NAME``, ``py:FILE:FACTORY``,
``pt2:FILE``, ``onnx:FILE``.

Each source is one function from a name and `Options` to a `Graph`. Torch and the libraries that hold the models are
imported only inside them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from foretell import documents
from foretell.errors import CaptureError, ForetellError, InputError, unknown
from foretell.graph import Graph
from foretell.workload import cache
from foretell.workload.options import InputSpec, Options

if TYPE_CHECKING:
    from torch import nn

Source = Callable[[str, Options], Graph]

_SOURCES: dict[str, Source] = {}


def source(prefix: str) -> Callable[[Source], Source]:
    """Register where workloads with this prefix come from; refuses a second one."""

    def register(function: Source) -> Source:
        if prefix in _SOURCES:
            raise ValueError(f"workload source {prefix!r} exists already")
        _SOURCES[prefix] = function
        return function

    return register


def sources() -> tuple[str, ...]:
    """The known prefixes."""
    return tuple(_SOURCES)


def resolve(workload: str, options: Options) -> Graph:
    """The graph of a workload string. Raises UnknownNameError, InputError or CaptureError."""
    if not workload.isprintable():  # a terminal would take it for a command
        raise InputError(f"{workload[:80]!r} has characters that do not print", repair="rename the file")
    prefix, separator, name = workload.partition(":")
    if not separator:
        if workload.endswith(".json") or _is_file(workload):
            if workload.endswith(".pt2"):
                raise InputError("is a PyTorch exported program", workload, f"write pt2:{workload}")
            if workload.endswith(".onnx"):
                raise InputError("is an ONNX model", workload, f"write onnx:{workload}")
            if options != Options():
                raise InputError("a captured graph takes no settings", workload, "capture the workload anew with them")
            return Graph.from_json(Path(workload))
        raise InputError(
            f"{workload[:200]!r} names no workload",
            repair=f"write PREFIX:NAME with a prefix of {', '.join(sources())}, or the path of a captured graph.json",
        )
    if prefix not in _SOURCES:
        raise unknown("workload prefix", prefix, sources())
    if prefix != "llm":
        refuse_llm_settings(options, fixed=prefix in ("pt2", "onnx"))
    if not name:
        raise InputError(f"{workload!r} has no name after the colon", repair=f"write e.g. {_EXAMPLES[prefix]}")
    try:
        return _with_training(_SOURCES[prefix](name, options), options)
    except OverflowError as error:
        raise InputError(f"sizes beyond 64 bits ({error})", workload, "check batch, lengths and widths") from error


def _with_training(graph: Graph, options: Options) -> Graph:
    """The graph, which then says itself how it trains: a file of it is read without the options."""
    if not options.trains:
        return graph
    return replace(graph, provenance=MappingProxyType({**graph.provenance, "training": ", ".join(options.training())}))


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long, or a null byte
        return False


def refuse_llm_settings(options: Options, fixed: bool = False) -> None:
    """Refuse what only llm: workloads have; of a `fixed` program, also what changes its layers."""
    repair = "take an llm: workload, e.g. llm:llama-3.1-8b"
    if options.quantize is not None:
        raise InputError("4-bit weights are known for llm: workloads only", "--quantize", repair)
    if options.trains and options.optimizer in ("adamw-8bit", "paged-adamw", "paged-adamw-8bit"):
        raise InputError("is known for llm: workloads only", f"--optimizer {options.optimizer}", repair)
    if options.lora is not None and fixed:
        raise InputError("an exported program takes no adapters", "--lora", "export it with them, or name the model")


_EXAMPLES = {
    "timm": "timm:resnet50",
    "torchvision": "torchvision:vit_b_16",
    "hf": "hf:config.json",
    "llm": "llm:llama-3.1-8b",
    "zoo": "zoo:hardnet68",
    "py": "py:model.py:make",
    "pt2": "pt2:model.pt2",
    "onnx": "onnx:model.onnx",
}


def need(library: str, extra: str) -> Any:
    """Import an optional library, or say which extra holds it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ForetellError(
            f"this workload needs {library}, which does not import here ({error})",
            hint=f"pip install 'foretell[{extra}]'",
        ) from error


# --- image models -----------------------------------------------------------------------------------------------


@source("timm")
def _timm(name: str, options: Options) -> Graph:
    timm = need("timm", "zoo")
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        raise unknown("timm model", architecture, timm.list_models())

    def shape(module: nn.Module) -> tuple[int, ...]:
        config = getattr(module, "pretrained_cfg", None) or {}
        channels, height, width = config.get("input_size", (3, 224, 224))
        if options.image_size is not None:
            height = width = options.image_size
        return channels, height, width

    def make(_options: Options) -> Graph:
        module = on_meta(lambda: timm_module(architecture, options.image_size))
        if options.checkpointing:
            if not hasattr(module, "set_grad_checkpointing"):
                raise CaptureError(f"timm:{architecture} does not support checkpointing", "leave --checkpointing out")
            try:
                module.set_grad_checkpointing(True)
            except (AssertionError, NotImplementedError) as error:
                raise CaptureError(
                    f"timm:{architecture} does not support checkpointing", "leave --checkpointing out"
                ) from error
        return _capture_images(f"timm:{architecture}", module, shape(module), options, "timm")

    return cache.cached(f"timm:{architecture}", options, ("torch", "timm"), make)


def timm_module(architecture: str, image_size: int | None = None) -> nn.Module:
    """A timm model without pretrained weights, built for square images of `image_size` where that changes it."""
    import timm

    config = timm.get_pretrained_cfg(architecture)
    default = getattr(config, "input_size", (3, 224, 224))[-1] if config is not None else 224
    if image_size is not None and image_size != default:
        try:
            return timm.create_model(architecture, img_size=image_size)
        except TypeError:
            pass  # sizes are free: the model takes no such argument
    return timm.create_model(architecture)


@source("torchvision")
def _torchvision(name: str, options: Options) -> Graph:
    models = need("torchvision", "zoo").models
    if name not in models.list_models():
        raise unknown("torchvision model", name, models.list_models())

    def make(_options: Options) -> Graph:
        kwargs: dict[str, Any] = {"weights": None}
        if name in ("inception_v3", "googlenet"):
            kwargs["init_weights"] = False  # drawing them takes seconds, and they are never read
        if "weights_backbone" in _signature(models.get_model_builder(name)):
            kwargs["weights_backbone"] = None
        module = on_meta(lambda: models.get_model(name, **kwargs))
        size = options.image_size or _torchvision_size(models, name)
        shape: tuple[int, ...] = (3, size, size)
        if name in models.list_models(module=models.video):
            shape = (3, 16, size, size)
        if options.checkpointing:
            raise CaptureError(f"torchvision:{name} does not support checkpointing", "leave --checkpointing out")
        return _capture_images(f"torchvision:{name}", module, shape, options, "torchvision")

    return cache.cached(f"torchvision:{name}", options, ("torch", "torchvision"), make)


def _torchvision_size(models: Any, name: str) -> int:
    """The side of the images the published weights are evaluated on."""
    try:
        crop = models.get_model_weights(name).DEFAULT.transforms().crop_size
        return int(crop[0] if isinstance(crop, (list, tuple)) else crop)
    except (AttributeError, ValueError, TypeError):
        return 224


def _signature(function: Any) -> Mapping[str, Any]:
    return inspect.signature(function).parameters


@source("zoo")
def _zoo(name: str, options: Options) -> Graph:
    need("torch", "torch")
    zoo = importlib.import_module("foretell.workload.zoo")
    if name not in zoo.models():
        raise unknown("zoo model", name, zoo.models())

    def make(_options: Options) -> Graph:
        if options.checkpointing:
            raise CaptureError(f"zoo:{name} does not support checkpointing", "leave --checkpointing out")
        module = on_meta(lambda: zoo.build(name))
        size = options.image_size or zoo.input_size(name)
        shape = (3, size, size) if isinstance(size, int) else (3, *size)
        return _capture_images(f"zoo:{name}", module, shape, options, "foretell")

    return cache.cached(f"zoo:{name}", options, ("torch",), make)


def _capture_images(
    name: str, module: nn.Module, shape: tuple[int, ...], options: Options, library: str
) -> Graph:
    from foretell.workload.capture import capture_module, example_tensor

    if options.phase not in ("inference", "train"):
        raise InputError(f"{name} has no {options.phase} phase", repair="give --phase inference or train")
    if options.seq_len is not None or options.context is not None:
        raise InputError(f"{name} takes images, not tokens", repair="leave --seq-len and --context out")
    inputs: tuple[Any, ...] = (example_tensor((options.batch, *shape), "float32"),)
    kwargs: dict[str, Any] = {}
    batch = options.batch
    if options.inputs:
        inputs, kwargs = given_inputs(module, options.inputs)
        batch = given_batch(options)
    return capture_module(
        module,
        inputs,
        kwargs,
        options=options,
        name=name,
        items={"images": batch * options.accumulate},
        provenance={"source": library, "input": "x".join(map(str, shape))},
    )


def given_inputs(module: nn.Module, inputs: Mapping[str, InputSpec]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The user's ``--input`` as positional and keyword arguments of the module's forward.

    Numbers are positions, from 0; else the names are forward's own.
    """
    from foretell.workload.capture import example_tensor

    tensors = {name: example_tensor(spec.shape, spec.dtype) for name, spec in inputs.items()}
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(module.forward).parameters
    except ValueError:  # a scripted module
        parameters = {}
    positions = sorted((name for name in tensors if name.isdigit()), key=int)
    if [int(name) for name in positions] != list(range(len(positions))):
        said = ", ".join(positions)
        raise InputError(f"inputs {said}: positions count from 0 without gaps", "--input", "write e.g. 0=8x3x224x224")
    names = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    anything = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in tensors:
        if name not in names and name not in positions and not anything:
            raise unknown("input", name, names or ["0"])
    return tuple(tensors[n] for n in positions), {n: tensor for n, tensor in tensors.items() if n not in positions}


def given_batch(options: Options) -> int:
    """The batch of the user's ``--input``: its first dimension. Another ``--batch`` beside it is refused."""
    shape = next(iter((options.inputs or {}).values())).shape
    batch = shape[0] if shape else 1
    if options.batch != batch and options.names_batch:
        raise InputError(f"--batch {options.batch} contradicts an input of {batch}", repair="leave --batch out")
    return max(1, batch)


def _of_batch(examples: tuple[Any, ...], kwargs: dict[str, Any], batch: int, label: str) -> tuple[Any, Any]:
    """Example inputs of another batch: the first dimension of every tensor, where that is one and the same."""
    import torch
    from torch.utils import _pytree as pytree

    tensors = [leaf for leaf in pytree.tree_leaves((examples, kwargs)) if isinstance(leaf, torch.Tensor)]
    first = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if first == {batch}:
        return examples, kwargs
    if len(first) != 1 or None in first:
        shapes = ", ".join("x".join(map(str, tensor.shape)) or "a scalar" for tensor in tensors)
        raise InputError(
            f"{label}: example inputs of {shapes or 'no tensor'} do not show what the batch is",
            f"--batch {batch}",
            "leave --batch out, or give every input with --input",
        )

    def other(tensor: torch.Tensor) -> torch.Tensor:
        format_ = torch.contiguous_format
        if tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
            format_ = torch.channels_last
        shape = (batch, *tensor.shape[1:])
        return torch.empty(shape, dtype=tensor.dtype, device="meta", memory_format=format_)

    return pytree.tree_map_only(torch.Tensor, other, (examples, kwargs))  # type: ignore[no-any-return]


# --- the user's own ---------------------------------------------------------------------------------------------


@source("py")
def _py(name: str, options: Options) -> Graph:
    """``FILE.py:FACTORY``: runs the user's own code. FACTORY returns a module, or (module, *example inputs)."""
    need("torch", "torch")
    file, _, factory_name = name.rpartition(":")
    if not file or not factory_name:
        raise InputError(f"py:{name!r} is not FILE.py:FACTORY", repair="write e.g. py:model.py:make")
    path = Path(file)
    if not path.is_file():
        raise InputError("no such file", str(path), "give the path of the Python file that has the factory")
    factory = _load_factory(path, factory_name)
    made = on_meta(factory)
    module, *examples = made if isinstance(made, tuple) and made else (made,)
    return capture_given(module, tuple(examples), options, name=f"py:{path.name}:{factory_name}")


def _load_factory(path: Path, name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location(f"_foretell_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError("is not a Python file", str(path), "give a file that ends in .py")
    namespace = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = namespace
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(namespace)
    except (Exception, SystemExit) as error:
        raise CaptureError(f"{path}: importing it failed: {type(error).__name__}: {error}", "run it by itself first") \
            from error
    finally:
        sys.path.pop(0)
    factory = getattr(namespace, name, None)
    if not callable(factory):
        raise unknown(f"factory in {path}", name, [n for n, v in vars(namespace).items() if callable(v)])
    return factory  # type: ignore[no-any-return]


def capture_given(module: Any, examples: tuple[Any, ...], options: Options, name: str | None = None) -> Graph:
    """Capture a module that the caller made, on the caller's example inputs or on ``options.inputs``."""
    from torch import nn

    from foretell.workload.capture import capture_module

    refuse_llm_settings(options)
    if not isinstance(module, nn.Module):
        raise InputError(f"got {type(module).__name__}, not a torch.nn.Module", repair="give a module instance")
    label = name or type(module).__name__
    if options.phase not in ("inference", "train"):
        raise InputError(f"{label} has no {options.phase} phase", repair="give --phase inference or train")
    if options.checkpointing:
        enable = getattr(module, "set_grad_checkpointing", None) or getattr(
            module, "gradient_checkpointing_enable", None
        )
        if enable is None:
            raise CaptureError(f"{label} has no switch for checkpointing", "use torch.utils.checkpoint in its forward")
        enable()
    kwargs: dict[str, Any] = {}
    if len(examples) and isinstance(examples[-1], dict):
        kwargs, examples = dict(examples[-1]), examples[:-1]
    if options.inputs:
        examples, kwargs = given_inputs(module, options.inputs)
        given_batch(options)
    if not examples and not kwargs:
        raise InputError(
            f"{label}: no example inputs",
            repair="return (module, example) from the factory, or give --input 0=8x3x224x224:float32",
        )
    if not options.inputs and options.names_batch:
        examples, kwargs = _of_batch(examples, kwargs, options.batch, label)
    return _with_training(capture_module(module, examples, kwargs, options=options, name=label), options)


# --- transformers -----------------------------------------------------------------------------------------------


@source("hf")
def _hf(name: str, options: Options) -> Graph:
    need("transformers", "zoo")
    from foretell.workload import hf

    return hf.graph(name, options)


@source("llm")
def _llm(name: str, options: Options) -> Graph:
    from foretell.workload import llm

    if options.inputs:
        raise InputError("llm: workloads take no --input", repair="give --batch, --seq-len and --context")
    if options.layout != "nchw" or options.image_size is not None:
        raise InputError("llm: workloads take no images", repair="leave --layout and --image-size out")
    config = llm.config(name)
    decode = options.phase == "decode"
    length = options.seq_len or min(2048, (config.context_length or 2048) - decode)
    graph = llm.graph(
        config,
        phase=options.phase,
        batch=options.batch,
        seq_len=None if decode else length,
        context=options.context if options.context is not None else length if decode else 0,
        precision=options.precision,
        optimizer=options.optimizer,
        checkpointing=options.checkpointing,
        accumulate=options.accumulate,
        lora=options.lora,
        quantize=options.quantize,
    )
    if options.trains:
        graph = replace(graph, provenance=MappingProxyType({**graph.provenance, "inputs": "tokens, targets"}))
    return graph.renamed(f"llm:{name}")


@source("pt2")
def _pt2(name: str, options: Options) -> Graph:
    """``FILE.pt2``: a program that ``torch.export.save`` wrote, read as data."""
    from foretell.workload import pt2

    return pt2.graph(name, options)


@source("onnx")
def _onnx(name: str, options: Options) -> Graph:
    """``FILE.onnx``: parsed, and never run."""
    need("onnx", "onnx")
    onnx = importlib.import_module("foretell.workload.onnx")
    return onnx.graph(name, options)  # type: ignore[no-any-return]


# --- building without weights -----------------------------------------------------------------------------------


def on_meta(build: Callable[[], Any]) -> Any:
    """Build a model on the meta device: no weight is materialised.

    A constructor that reads values cannot run there; it is run again on fake CPU tensors, which hold small constants.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from foretell.workload.capture import Uninitialised, user_line

    with quiet():
        try:
            with torch.device("meta"), Uninitialised():
                return build()
        except ForetellError:
            raise
        except (Exception, SystemExit) as first:
            try:
                with FakeTensorMode(allow_non_fake_inputs=True):
                    return build()
            except ForetellError:
                raise
            except (Exception, SystemExit) as error:
                text = " ".join(str(first).split())[:300]
                raise CaptureError(
                    f"building the model failed: {type(first).__name__}: {text}{user_line(first)}",
                    "mend that; models are built without weights: load none, and read no tensor values",
                ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """While a model is built: no warnings, which nobody asked for, and what it prints kept out of our output."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield


def load_json_object(path: Path, what: str) -> dict[str, Any]:
    """A JSON object from a file; InputError says what is wrong and where."""
    data = documents.read_json(path, what)
    if not isinstance(data, dict):
        raise InputError("not a JSON object", str(path), f"give a {what}")
    return data
