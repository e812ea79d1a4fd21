"""`Residual`: the learned part of a prediction, what physics leaves of a measurement.

A residual predicts log(measured / physical) from dimensionless features of the operation and the device, at three
quantiles, clipped to the range its data spanned. Its interval is made honest by conformal margins: what has to be added
to the outer quantiles so that 80 % of the held-out measurements fall between them, on devices the calibration has
seen and, by leaving each device out, on ones it has not (conformalised quantile regression, Romano, Patterson and
Candès, 2019).

A residual is a JSON file ``calibrations/NAME.residual.json`` and three LightGBM text models beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cost.trees import Forest
from foretell.errors import InputError
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]

SCHEMA = "foretell.residual/1"
_LARGEST = math.log(1e6)  # of a factor's logarithm
QUANTILES: tuple[tuple[str, float], ...] = (("low", 0.1), ("mid", 0.5), ("high", 0.9))


@dataclass(frozen=True, slots=True)
class Residual:
    """Forests of log(measured / physical), features in the order of `features`.

    `clip` is the (least, most) the logarithm may be. `margins` maps ``seen`` and ``unseen`` (devices) to what widens
    the interval downwards and upwards, in logarithms.
    """

    name: str
    features: tuple[str, ...]
    forests: Mapping[str, Forest]
    clip: tuple[float, float]
    margins: Mapping[str, tuple[float, float]]
    provenance: Mapping[str, Any]

    def has_seen(self, device: Device) -> bool:
        """Whether measurements of this very device are among those it was fitted on."""
        return device.name in self.provenance.get("devices", ())

    def factors(self, x: Floats, seen: bool = True) -> tuple[Floats, Floats, Floats]:
        """(low, mid, high) factors on a physical time for each row of `x` (rows, features); low ≤ mid ≤ high."""
        low, mid, high = (
            np.clip(self.forests[name].predict(x), *self.clip) if len(x) else np.zeros(0) for name, _ in QUANTILES
        )
        down, up = self.margins["seen" if seen else "unseen"]
        return np.exp(np.minimum(low - down, mid)), np.exp(mid), np.exp(np.maximum(high + up, mid))


@cache
def load(name: str) -> Residual:
    """A shipped residual."""
    folder = files("foretell.cost") / "calibrations"
    return read(folder, name)


def read(folder: Traversable, name: str) -> Residual:
    """The residual `name` in a folder. Raises InputError naming what is wrong and where."""
    source = folder / f"{name}.residual.json"
    repair = f"see the shipped files for schema {SCHEMA}"
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"no residual: {error}", source.name, repair) from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InputError(f'"schema" is not {SCHEMA!r}', source.name, repair)
    for key in ("features", "clip", "margins", "provenance"):
        if key not in data:
            raise InputError(f"missing key {key!r}", source.name, repair)
    for key in ("margins", "provenance"):
        if not isinstance(data[key], dict):
            raise InputError(f"{key} is no object", source.name, repair)
    if not isinstance(data["features"], list) or not all(isinstance(name, str) for name in data["features"]):
        raise InputError("features is no list of names", source.name, repair)
    forests = {}
    for quantile, _ in QUANTILES:
        file = folder / f"{name}.{quantile}.txt"
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(f"no forest: {error}", file.name, "fit it anew") from error
        forests[quantile] = Forest.parse(text, file.name)
        if list(forests[quantile].features) != data["features"]:
            raise InputError("its features differ from those of the JSON file", file.name, "fit it anew")
    keys = dict.fromkeys(("seen", "unseen", *data["margins"]))
    pairs = {"clip": data["clip"], **{f"margins.{key}": data["margins"].get(key) for key in keys}}
    for key, pair in pairs.items():
        if not isinstance(pair, list) or len(pair) != 2 or not all(_is_logarithm(number) for number in pair):
            raise InputError(f"{key} is {str(pair)[:60]}, not two logarithms up to {_LARGEST:g}", source.name, repair)
    if data["clip"][0] > data["clip"][1]:
        raise InputError(f"clip is {data['clip']}, the larger first", source.name, repair)
    return Residual(
        name,
        tuple(data["features"]),
        MappingProxyType(forests),
        (float(data["clip"][0]), float(data["clip"][1])),
        MappingProxyType({key: (float(a), float(b)) for key, (a, b) in data["margins"].items()}),
        MappingProxyType(data["provenance"]),
    )


def _is_logarithm(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and abs(number) <= _LARGEST
