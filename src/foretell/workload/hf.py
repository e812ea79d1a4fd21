"""``hf:``: any architecture of ``transformers``, built from its configuration alone, with no weights.

``hf:PATH`` reads a ``config.json`` (or a folder that holds one); ``hf:org/name`` asks the model hub for it, where one
is reachable.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import socket
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from foretell.errors import CaptureError, InputError, unknown
from foretell.graph import Graph
from foretell.workload import cache
from foretell.workload.capture import capture_module, example_tensor
from foretell.workload.options import Options
from foretell.workload.resolve import given_batch, given_inputs, load_json_object, on_meta

_DEFAULT_SEQ_LEN = 512
MOST_LAYERS = 10_000
_CACHE_NAMES = ("cache", "past_key_values")  # the argument was renamed between releases of transformers


def graph(name: str, options: Options) -> Graph:
    """The graph of a ``transformers`` model by the path of its config, or its name on the hub."""
    data = read_config(name)
    digest = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def make(_options: Options) -> Graph:
        return capture_config(data, options, label=f"hf:{name}")

    return cache.cached(f"hf:{name}:{digest}", options, ("torch", "transformers"), make)


def read_config(name: str) -> dict[str, Any]:
    """A configuration as plain data, from a file, a folder or the hub."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file() or path.suffix == ".json" or name.startswith((".", "/", "~")):
        return load_json_object(path.expanduser(), "transformers config.json")
    try:
        _reach_hub()
        return dict(transformers.PretrainedConfig.get_config_dict(name)[0])
    except Exception as error:
        raise InputError(
            f"no such file, and the hub did not give it: {' '.join(str(error).split())[:160]}",
            f"hf:{name}",
            "give the path of a config.json",
        ) from error


def _reach_hub() -> None:
    """Fail at once where the hub cannot be reached, instead of after the library's retries."""
    from huggingface_hub import constants

    url = urllib.parse.urlsplit(constants.ENDPOINT)
    socket.create_connection((url.hostname or "", url.port or 443), timeout=3).close()


def capture_config(data: dict[str, Any], options: Options, label: str = "hf") -> Graph:
    """Capture the model that a configuration describes."""
    with _quiet():
        config = make_config(data, label)
        model = build(config, data, label)
        if options.checkpointing:
            _enable_checkpointing(model, label)
    inputs = example_inputs(model, config, options)
    args, kwargs = given_inputs(model, options.inputs) if options.inputs else ((), dict(inputs))
    parameters = inspect.signature(model.forward).parameters
    main = next(iter(inputs))
    sequence = inputs[main].shape[1] if main == "input_ids" else 1
    batch = options.batch
    if options.inputs:
        batch = given_batch(options)
        shape = options.inputs.get("input_ids", next(iter(options.inputs.values()))).shape
        sequence = shape[1] if main == "input_ids" and len(shape) > 1 else sequence
    prepare = None
    cached = {}
    items = {"sequences": batch * options.accumulate}
    if main == "input_ids":
        items["tokens"] = batch * options.accumulate * sequence
    elif main == "pixel_values":
        items = {"images": batch * options.accumulate}
    if options.phase in ("prefill", "decode"):
        cache_name = next((n for n in _CACHE_NAMES if n in parameters), None)
        if cache_name is None:
            raise InputError(f"{label} has no {options.phase} phase", repair="give --phase inference or train")
        kwargs["use_cache"] = True
        if "logits_to_keep" in parameters:
            kwargs["logits_to_keep"] = 1
        if options.phase == "decode":
            context = options.context if options.context is not None else sequence
            cached = {"context": str(context)}
            kwargs["input_ids"] = example_tensor((options.batch, 1), "int64")
            items = {"tokens": options.batch}
            prepare = _prefill(context, options.batch, cache_name)
    elif "use_cache" in parameters:
        kwargs["use_cache"] = False
    if options.trains and "labels" in parameters and "labels" not in kwargs and main == "input_ids":
        kwargs["labels"] = _labels(model, options.batch, kwargs)
    return capture_module(
        model,
        args,
        kwargs,
        options=options,
        name=label,
        items=items,
        keep_output=False,
        prepare=prepare,
        provenance={"transformers": transformers.__version__, "architecture": type(model).__name__, **cached},
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's advice on configurations nobody will run."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def _enable_checkpointing(model: nn.Module, label: str) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable()
    except (ValueError, AttributeError) as error:
        raise CaptureError(f"{label} does not support checkpointing", "leave --checkpointing out") from error


def make_config(data: dict[str, Any], label: str) -> Any:
    """A configuration object; a model type that is not known lists near names."""
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"):
        layers = data.get(key)
        if isinstance(layers, int) and not 0 < layers <= MOST_LAYERS:
            raise InputError(f"{key} is {str(layers)[:40]}", label, f"give 1 to {MOST_LAYERS:,} layers")
    model_type = data.get("model_type")
    if not isinstance(model_type, str):
        raise InputError('no "model_type"', label, "add the model_type that the architecture has in transformers")
    known = transformers.CONFIG_MAPPING
    if model_type not in known:
        raise unknown(f"model_type ({label})", model_type, list(known.keys()))
    try:
        return known[model_type].from_dict({k: v for k, v in data.items() if k != "quantization_config"})
    except Exception as error:
        raise InputError(
            f"transformers refuses it: {' '.join(str(error).split())[:240]}", label, "correct the named field"
        ) from error


def build(config: Any, data: dict[str, Any], label: str) -> nn.Module:
    """The module that the configuration names (its first architecture; else a causal model; else the bare one)."""
    names = data.get("architectures") or []
    names = [names] if isinstance(names, str) else names
    cls = getattr(transformers, names[0], None) if names and isinstance(names[0], str) else None
    if names and cls is None:
        raise unknown(f"architecture ({label})", str(names[0]), [n for n in dir(transformers) if "For" in n])

    def make() -> nn.Module:
        if cls is not None:
            return cls._from_config(config) if hasattr(cls, "_from_config") else cls(config)
        if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            return transformers.AutoModelForCausalLM.from_config(config)
        return transformers.AutoModel.from_config(config)

    try:
        model = on_meta(make)
    except CaptureError as error:
        raise InputError(error.message, label, "check the config's fields against the model's documentation") from error
    with contextlib.suppress(AttributeError):
        model.tie_weights()
    return model


def example_inputs(model: nn.Module, config: Any, options: Options) -> dict[str, Any]:
    """Example inputs by the model's main input: token ids, pixels, or audio features."""
    batch, length = options.batch, options.seq_len or _DEFAULT_SEQ_LEN
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < length:
        if options.seq_len is not None and not hasattr(config, "rope_parameters"):
            raise InputError(
                f"{length} tokens exceed the model's {limit} positions",
                type(model).__name__,
                "give a shorter --seq-len",
            )
        length = min(length, limit) if options.seq_len is None else length
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = options.image_size or getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        channels = getattr(vision, "num_channels", 3)
        inputs = {"pixel_values": example_tensor((batch, channels, height, width), "float32")}
        if "input_ids" in inspect.signature(model.forward).parameters and hasattr(config, "text_config"):
            inputs["input_ids"] = example_tensor((batch, min(length, 77)), "int64")
        return inputs
    if main == "input_features":
        frames = getattr(config, "max_source_positions", 1500) * 2
        inputs = {main: example_tensor((batch, getattr(config, "num_mel_bins", 80), frames), "float32")}
    elif main == "input_values":
        inputs = {main: example_tensor((batch, options.seq_len or 16000), "float32")}
    else:
        inputs = {"input_ids": example_tensor((batch, length), "int64")}
        vision = getattr(config, "vision_config", None)
        if vision is not None and "pixel_values" in inspect.signature(model.forward).parameters:
            size = getattr(vision, "image_size", None)
            if isinstance(size, int):  # a text-and-image encoder pair; for others give --input
                channels = getattr(vision, "num_channels", 3)
                inputs["pixel_values"] = example_tensor((batch, channels, size, size), "float32")
                inputs["input_ids"] = example_tensor((batch, min(length, 77)), "int64")
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = example_tensor((batch, min(length, 448)), "int64")
    return inputs


def _labels(model: nn.Module, batch: int, kwargs: dict[str, Any]) -> torch.Tensor:
    """Targets for the model's own loss: one class a sequence for classifiers, one token id a position otherwise."""
    if type(model).__name__.endswith("ForSequenceClassification"):
        return example_tensor((batch,), "int64")
    ids = kwargs.get("decoder_input_ids", kwargs["input_ids"])
    return example_tensor(tuple(ids.shape), "int64")


def _prefill(context: int, batch: int, cache_name: str) -> Any:
    """Fill a cache with `context` tokens, as generation would have, before the recorded decode step."""

    def prepare(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if context == 0:
            return {}
        ids = torch.empty((batch, context), dtype=torch.int64)
        extra = {"logits_to_keep": 1} if "logits_to_keep" in kwargs else {}
        output = model(input_ids=ids, use_cache=True, **extra)
        return {cache_name: next(c for n in _CACHE_NAMES if (c := getattr(output, n, None)) is not None)}

    return prepare
