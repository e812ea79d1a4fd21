"""The machine at hand as a `Device`: what the operating system and the driver report, and what was measured on it.

Nothing is measured here: ``foretell calibrate --here`` does, and keeps the result in `local_folder`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from foretell import units
from foretell.errors import InputError, UnknownNameError
from foretell.hardware.device import Device, FrozenMap
from foretell.hardware.loader import compute_capabilities, load_device

__all__ = ["CALIBRATION", "TOML", "local_device", "local_folder"]

#: What ``foretell calibrate --here`` writes into `local_folder`: data sheets by kind of device, the processor's model.
TOML = {"cpu": "local.toml", "gpu": "local-gpu.toml"}
CALIBRATION = "local.calibration.json"

#: (vendor, family, model) → (microarchitecture, fp32 FLOP per cycle and core); a multiply-add is 2.
#: Two 256-bit FMA units give 32, two 512-bit ones 64. Source: WikiChip, pages of each microarchitecture.
_CORES: dict[tuple[str, int, tuple[int, ...]], tuple[str, int]] = {
    ("GenuineIntel", 6, (60, 63, 69, 70)): ("Haswell", 32),
    ("GenuineIntel", 6, (61, 71, 79, 86)): ("Broadwell", 32),
    ("GenuineIntel", 6, (78, 94, 142, 158, 165, 166)): ("Skylake", 32),
    ("GenuineIntel", 6, (85,)): ("Skylake-SP", 64),
    ("GenuineIntel", 6, (106, 108)): ("Ice Lake-SP", 64),
    ("GenuineIntel", 6, (143,)): ("Sapphire Rapids", 64),
    ("GenuineIntel", 6, (207,)): ("Emerald Rapids", 64),
    ("GenuineIntel", 6, (173, 174)): ("Granite Rapids", 64),
    ("AuthenticAMD", 23, (49, 96, 104, 113, 144)): ("Zen 2", 32),
    ("AuthenticAMD", 25, (0, 1, 8, 33, 68, 80)): ("Zen 3", 32),
    ("AuthenticAMD", 25, (16, 17, 24, 97, 116, 120, 160)): ("Zen 4", 32),
    ("AuthenticAMD", 26, (2, 17)): ("Zen 5", 64),
}
_NAMED_CLOCK = re.compile(r"@\s*([\d.]+\s*GHz)")


def local_device(
    gpu: bool = True,
    proc: Path = Path("/proc"),
    system: Path = Path("/sys/devices/system"),
    measured: bool = True,
) -> Device:
    """The first GPU that nvidia-smi reports (with `gpu`), else the CPU; with what was measured on it (`measured`).

    What cannot be read (a CPU's memory bandwidth, before it is measured) is None, and `Device.missing` says so.
    """
    found = (_gpu() if gpu else None) or _cpu(proc, system)
    return _measured(found) if measured else found


def local_folder() -> Path:
    """Where what was measured on this machine is kept: ``$XDG_CONFIG_HOME/foretell``, by default ``~/.config``."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base else Path.home() / ".config") / "foretell"


def _measured(found: Device) -> Device:
    """`found` with the peaks and bandwidth that were measured on it, if they were."""
    path = local_folder() / TOML[found.kind]
    if found.name != "local" or not path.is_file():
        return found
    kept = load_device(path)
    if (kept.title, kept.multiprocessors) != (found.title, found.multiprocessors):
        return found  # the file is of another machine: a home folder may be shared
    sources = {k: v for k, v in kept.sources.items() if k.startswith("peaks.") or k == "memory_bandwidth_bytes_per_s"}
    return replace(
        found,
        peaks=FrozenMap({**found.peaks, **kept.peaks}),
        memory_bandwidth_bytes_per_s=kept.memory_bandwidth_bytes_per_s or found.memory_bandwidth_bytes_per_s,
        sources=FrozenMap({**found.sources, **sources}),
    )


def _gpu() -> Device | None:
    """The catalogue's entry for the GPU present, or what the driver says of one that is not in the catalogue."""
    from foretell.hardware.catalogue import catalogue

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = "name,memory.total,clocks.max.sm,power.default_limit,compute_cap"
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    rows = answer.strip().splitlines()
    cells = [cell.strip() for cell in rows[0].split(",")] if rows else []
    if len(cells) != 5:
        return None
    title, memory, clock, power, capability = cells
    try:
        return catalogue().device(title)
    except UnknownNameError:
        pass
    limits, origin = compute_capabilities().get(capability, ({}, {}))
    memory_bytes, clock_hz, tdp_w = _read_bytes(memory), _read_clock(clock), _read_power(power)
    said = {"memory_bytes": memory_bytes, "boost_clock_hz": clock_hz, "tdp_w": tdp_w}
    return Device(
        name="local",
        title=title,
        vendor="NVIDIA",
        kind="gpu",
        architecture="unknown",
        compute_capability=capability,
        memory_bytes=memory_bytes,
        boost_clock_hz=clock_hz,
        tdp_w=tdp_w,
        sources=FrozenMap({**origin, **{k: "nvidia-smi" for k, v in said.items() if v is not None}}),
        **limits,
    )


def _read_bytes(text: str) -> int | None:
    try:
        return units.parse_bytes(text)
    except InputError:  # the driver answers "[N/A]" for what a card does not report
        return None


def _read_clock(text: str) -> float | None:
    try:
        return units.parse_frequency(text)
    except InputError:
        return None


def _read_power(text: str) -> float | None:
    try:
        return units.parse_power(text)
    except InputError:
        return None


def _cpu(proc: Path, system: Path) -> Device:
    blocks = [_colon_lines(block) for block in _read(proc / "cpuinfo").split("\n\n") if block.strip()]
    first = blocks[0] if blocks else {}
    vendor = first.get("vendor_id", "")
    title = first.get("model name", first.get("Processor", "CPU of this machine"))
    cores = len({(b.get("physical id"), b.get("core id")) for b in blocks if "core id" in b}) or len(blocks) or None
    sources: dict[str, str] = {}

    def keep(field: str, value: int | float | None, source: str) -> None:
        if value is not None:
            sources[field] = source

    keep("multiprocessors", cores, "/proc/cpuinfo: distinct cores that this system sees")
    boost_hz = _kilohertz(system / "cpu/cpu0/cpufreq/cpuinfo_max_freq")
    keep("boost_clock_hz", boost_hz, "cpufreq: cpuinfo_max_freq")
    named = _NAMED_CLOCK.search(title)
    base_hz = _kilohertz(system / "cpu/cpu0/cpufreq/base_frequency")
    keep("base_clock_hz", base_hz, "cpufreq: base_frequency")
    if base_hz is None and named:
        base_hz = units.parse_frequency(named[1])
        keep("base_clock_hz", base_hz, "/proc/cpuinfo: clock in the model name")

    architecture, per_cycle = "unknown", None
    for (maker, family, models), (name, flop) in _CORES.items():
        if (maker, str(family)) == (vendor, first.get("cpu family")) and first.get("model", "") in map(str, models):
            architecture, per_cycle = name, flop
    flags = first.get("flags", "").split()
    if per_cycle == 64 and "avx512f" not in flags:
        per_cycle = 32
    if "fma" not in flags:
        per_cycle = None
    peaks: dict[str, float] = {}
    clock_hz, clock_source = boost_hz or base_hz, "its highest known clock"
    if clock_hz is None and "cpu MHz" in first:
        clock_hz, clock_source = float(first["cpu MHz"]) * 1e6, "the clock /proc/cpuinfo shows now, turbo unknown"
    if cores and per_cycle and clock_hz:
        rate = cores * per_cycle * clock_hz
        peaks = {"fp64.vector": rate / 2, "fp32.vector": rate}
        for key in peaks:
            sources[f"peaks.{key}"] = f"cores × {architecture}'s FMA width (WikiChip) × {clock_source}"

    memory_bytes = _kibibytes(_colon_lines(_read(proc / "meminfo")).get("MemTotal", ""))
    keep("memory_bytes", memory_bytes, "/proc/meminfo: MemTotal")
    caches = _caches(system / "cpu", max(len(blocks), 1))
    for level, field in ((1, "l1_bytes_per_sm"), (2, "l2_bytes"), (3, "l3_bytes")):
        keep(field, caches.get(level), "sysfs: cpu/*/cache")
    return Device(
        name="local",
        title=title,
        vendor={"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}.get(vendor, vendor or "unknown"),
        kind="cpu",
        architecture=architecture,
        multiprocessors=cores,
        peaks=FrozenMap(peaks),
        base_clock_hz=base_hz,
        boost_clock_hz=boost_hz,
        l1_bytes_per_sm=caches.get(1),
        l2_bytes=caches.get(2),
        l3_bytes=caches.get(3),
        memory_bytes=memory_bytes,
        sources=FrozenMap(sources),
    )


def _caches(folder: Path, processors: int) -> dict[int, int]:
    """Bytes by level: of one core's data cache for level 1, of all caches together for levels 2 and 3."""
    totals: dict[int, int] = {}
    seen: set[tuple[int, str]] = set()
    for index in sorted(folder.glob("cpu[0-9]*/cache/index[0-9]*"))[: 8 * processors]:
        kind, level = _read(index / "type").strip(), _read(index / "level").strip()
        size, shared = _kibibytes(_read(index / "size")), _read(index / "shared_cpu_list").strip()
        if kind == "Instruction" or not level.isdigit() or size is None or (int(level), shared) in seen:
            continue
        seen.add((int(level), shared))
        if int(level) == 1:
            totals.setdefault(1, size)
        else:
            totals[int(level)] = totals.get(int(level), 0) + size
    return totals


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _colon_lines(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _kibibytes(text: str) -> int | None:
    """``16384 kB`` or ``512K``, which the kernel counts in 1024s, as bytes."""
    match = re.match(r"\s*(\d+)\s*([KMG]?)", text, re.IGNORECASE)
    if not match or not text.strip():
        return None
    return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match[2].upper()]


def _kilohertz(path: Path) -> float | None:
    text = _read(path).strip()
    return float(text) * 1e3 if text.isdigit() else None
