"""Human units, parsed and printed at the edges only; inside Foretell everything is plain SI.

Decimal and binary prefixes are kept apart: ``GB`` = 10⁹ bytes, ``GiB`` = 2³⁰ bytes. Letter case
matters, as ``b`` is a bit and ``B`` a byte: ``400 Gb/s`` = 50 GB/s. (Data sheets print memory
capacities in decimal where binary is meant; the hardware catalogue stores the true amount.)

Every parser takes a number and its unit, ``"80 GiB"`` or ``"80GiB"``, and raises `InputError`,
saying what it accepts, for another unit, a missing one, a negative number, NaN or infinity.
"""

from __future__ import annotations

import math
import re

from foretell.errors import InputError

__all__ = [
    "format_bytes",
    "format_count",
    "format_energy",
    "format_flops",
    "format_money",
    "format_power",
    "format_rate",
    "format_time",
    "parse_bandwidth",
    "parse_bytes",
    "parse_flops",
    "parse_frequency",
    "parse_money",
    "parse_money_per_hour",
    "parse_power",
    "parse_time",
    "printable",
]

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")
_BINARY = {f"{letter}i": 2.0 ** (10 * i) for i, letter in enumerate("KMGTPE", start=1)}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\s\d.+-].*?)?\s*")


def _prefixed(*units: str, factor: float = 1.0, binary: bool = False) -> dict[str, float]:
    prefixes = {**_DECIMAL, **_BINARY} if binary else _DECIMAL
    return {prefix + u: scale * factor for u in units for prefix, scale in prefixes.items()}


_BYTES = {**_prefixed("B", binary=True), "byte": 1.0, "bytes": 1.0}
_BANDWIDTH = {
    **_prefixed("B/s", binary=True),
    **_prefixed("b/s", "bit/s", "bps", factor=1 / 8),
}
_FLOPS = _prefixed("FLOP/s", "FLOPS", "OP/s", "OPS")
_TIME = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_FREQUENCY = _prefixed("Hz")
_POWER = {"mW": 1e-3, **_prefixed("W")}


def parse_bytes(text: str, where: str | None = None) -> int:
    """Bytes in a capacity such as ``80GB`` or ``512 KiB``.

    >>> parse_bytes("80GB"), parse_bytes("80 GiB")
    (80000000000, 85899345920)
    """
    accepted = "a number of bytes such as '80GB', '80 GiB', '512KiB'"
    return round(_parse(text, _BYTES, accepted, where))


def parse_bandwidth(text: str, where: str | None = None) -> float:
    """Bytes per second in ``3.35TB/s`` (bytes) or ``400Gb/s`` (bits).

    >>> parse_bandwidth("400Gb/s")
    50000000000.0
    """
    accepted = "a bandwidth such as '900 GB/s', '3.35TB/s' (bytes) or '400Gb/s' (bits)"
    return _parse(text, _BANDWIDTH, accepted, where)


def parse_flops(text: str, where: str | None = None) -> float:
    """FLOP (or integer operations) per second in ``989 TFLOP/s`` or ``1979TOPS``."""
    accepted = "an arithmetic rate such as '989 TFLOP/s', '19.5TFLOPS' or '624 TOPS'"
    return _parse(text, _FLOPS, accepted, where)


def parse_time(text: str, where: str | None = None) -> float:
    """Seconds in ``1.5 ms``, ``20us``, ``2 h``."""
    return _parse(text, _TIME, "a time such as '1.5 ms', '20us', '3 min', '2 h'", where)


def parse_frequency(text: str, where: str | None = None) -> float:
    """Hertz in ``1410 MHz``."""
    return _parse(text, _FREQUENCY, "a frequency such as '1410 MHz' or '1.98GHz'", where)


def parse_power(text: str, where: str | None = None) -> float:
    """Watts in ``400 W`` or ``10.2kW``."""
    return _parse(text, _POWER, "a power such as '400 W' or '10.2kW'", where)


def parse_money(text: str, where: str | None = None) -> float:
    """US dollars in ``1999 USD``."""
    return _parse(text, {"USD": 1.0}, "a price such as '1999 USD'", where)


def parse_money_per_hour(text: str, where: str | None = None) -> float:
    """US dollars per hour in ``4.10 USD/h``."""
    return _parse(text, {"USD/h": 1.0}, "an hourly price such as '4.10 USD/h'", where)


def _parse(text: str, units: dict[str, float], accepted: str, where: str | None) -> float:
    repair = f"write {accepted}"
    if not isinstance(text, str):
        raise InputError(f"{text!r} has no unit", where, repair)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not a number with a unit", where, repair)
    number, unit = float(match[1]), match[2]
    if unit is None:
        raise InputError(f"{text!r} has no unit", where, repair)
    if unit not in units:
        raise InputError(f"{text!r} has the wrong unit {unit!r}", where, repair)
    if match[1].startswith("-"):
        raise InputError(f"{text!r} is negative", where, repair)
    value = number * units[unit]
    if not math.isfinite(value):
        raise InputError(f"{text!r} is too large", where, repair)
    return value


def printable(text: str) -> str:
    r"""The text with a question mark for each character that a terminal would take for a command.

    >>> printable("a\x1b[31mb")
    'a?[31mb'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def format_bytes(value: float) -> str:
    """A capacity with a binary prefix: ``format_bytes(85899345920)`` is ``'80 GiB'``."""
    return _scaled(value, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


def format_rate(value: float, unit: str = "B") -> str:
    """A rate with a decimal prefix.

    >>> format_rate(2.039e12), format_rate(312e12, "FLOP")
    ('2.04 TB/s', '312 TFLOP/s')
    """
    return _scaled(value, 1000.0, tuple(f"{p}{unit}/s" for p in _PREFIXES))


def format_flops(value: float) -> str:
    """A number of floating-point operations: ``format_flops(8.18e9)`` is ``'8.18 GFLOP'``."""
    return _scaled(value, 1000.0, tuple(f"{p}FLOP" for p in _PREFIXES))


def format_count(value: float) -> str:
    """A plain count: ``format_count(25557032)`` is ``'25.6 M'``."""
    return _scaled(value, 1000.0, _PREFIXES).rstrip()


def format_time(value: float) -> str:
    """A duration in seconds.

    >>> format_time(0.00123), format_time(95), format_time(7500)
    ('1.23 ms', '1 min 35 s', '2 h 5 min')
    """
    if value != value or math.isinf(value) or value < 0:
        return f"{value:g} s"
    if value < 59.95:
        return _scaled(value * 1e9, 1000.0, ("ns", "µs", "ms", "s"))
    if value < 3599.5:
        minutes, seconds = divmod(round(value), 60)
        return f"{minutes} min {seconds} s"
    if value < 48 * 3600:
        hours, minutes = divmod(round(value / 60), 60)
        return f"{hours} h {minutes} min"
    return f"{value / 86400:.1f} d"


def format_power(value: float) -> str:
    """Watts: ``format_power(400)`` is ``'400 W'``."""
    return _scaled(value, 1000.0, ("W", "kW", "MW", "GW"))


def format_energy(value: float) -> str:
    """Joules below one kilowatt-hour, watt-hours above: ``'1.2 kJ'``, ``'3.4 kWh'``."""
    if abs(value) < 3.6e6:
        return _scaled(value * 1e6, 1000.0, ("µJ", "mJ", "J", "kJ", "MJ"))
    return _scaled(value / 3600.0, 1000.0, ("Wh", "kWh", "MWh", "GWh"))


def format_money(value: float) -> str:
    """US dollars: cents above one dollar, two significant digits below.

    >>> format_money(1234.5), format_money(0.00047)
    ('$1,234.50', '$0.00047')
    """
    sign, size = ("-" if value < 0 else ""), abs(value)
    if size == 0 or size >= 0.995 or size != size:
        return f"{sign}${size:,.2f}"
    digits = 1 - math.floor(math.log10(size))
    return f"{sign}${size:.{digits}f}"


def _scaled(value: float, step: float, names: tuple[str, ...]) -> str:
    """Three significant digits in the largest of `names` (each `step` times the last) that fits."""
    if not math.isfinite(value):
        return f"{value:g} {names[0]}"
    index, size = 0, abs(value)
    # 999.5 would print as 1000 with three digits, so the next prefix begins just below.
    while size >= step * 0.9995 and index < len(names) - 1:
        size /= step
        index += 1
    if 0 < size < 0.9995:
        number = f"{size:.3g}"
    else:
        number = f"{size:.{max(0, 3 - len(str(round(size))))}f}"
        number = number.rstrip("0").rstrip(".") if "." in number else number
    return f"{'-' if value < 0 else ''}{number} {names[index]}"
