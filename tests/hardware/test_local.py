"""The machine at hand: read from a copy of /proc and /sys, and from a stand-in for nvidia-smi."""

import os

import pytest

from foretell.hardware import cluster, device, devices
from foretell.hardware.local import local_device

INTEL = """processor\t: {n}
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 85
model name\t: Intel(R) Xeon(R) Platinum 8175M CPU @ 2.50GHz
cpu MHz\t\t: 3100.000
physical id\t: {socket}
core id\t\t: {core}
flags\t\t: fpu sse2 fma avx2 avx512f

"""


@pytest.fixture
def machine(tmp_path):
    """Two sockets of two cores, two threads a core."""
    proc, system = tmp_path / "proc", tmp_path / "system"
    proc.mkdir()
    threads = [(socket, core) for _ in range(2) for socket in range(2) for core in range(2)]
    text = "".join(INTEL.format(n=n, socket=s, core=c) for n, (s, c) in enumerate(threads))
    (proc / "cpuinfo").write_text(text)
    (proc / "meminfo").write_text("MemTotal:       16384000 kB\nMemFree: 1 kB\n")
    for n, (socket, core) in enumerate(threads):
        own = f"{4 * 0 + 2 * socket + core},{4 + 2 * socket + core}"
        shared = f"{2 * socket}-{2 * socket + 1},{4 + 2 * socket}-{5 + 2 * socket}"
        caches = [("Data", 1, "32K", own), ("Instruction", 1, "32K", own), ("Unified", 2, "1024K", own)]
        caches.append(("Unified", 3, "33M", shared))
        for i, (kind, level, size, who) in enumerate(caches):
            folder = system / f"cpu/cpu{n}/cache/index{i}"
            folder.mkdir(parents=True)
            for name, value in {"type": kind, "level": level, "size": size, "shared_cpu_list": who}.items():
                (folder / name).write_text(f"{value}\n")
    return proc, system


def read(machine):
    return local_device(gpu=False, proc=machine[0], system=machine[1])


def test_cpu_from_proc_and_sysfs(machine):
    found = read(machine)
    assert found.kind == "cpu"
    assert found.vendor == "Intel"
    assert found.multiprocessors == 4
    assert found.memory_bytes == 16384000 * 1024
    assert found.base_clock_hz == 2.5e9
    assert found.boost_clock_hz is None
    assert found.l1_bytes_per_sm == 32 * 1024
    assert found.l2_bytes == 4 * 2**20  # four private caches, each seen from two threads
    assert found.l3_bytes == 2 * 33 * 2**20
    assert found.peak("fp32") == 4 * 64 * 2.5e9  # two 512-bit FMA units
    assert found.peak("fp64") == found.peak("fp32") / 2


def test_bandwidth_is_not_invented(machine):
    found = read(machine)
    assert found.memory_bandwidth_bytes_per_s is None
    assert "memory_bandwidth_bytes_per_s" in found.missing()
    assert found.ridge("fp32") is None
    assert all(found.sources[f"peaks.{key}"] for key in found.peaks)


def test_frequency_driver_gives_the_turbo_clock(machine):
    folder = machine[1] / "cpu/cpu0/cpufreq"
    folder.mkdir()
    (folder / "cpuinfo_max_freq").write_text("3500000\n")
    found = read(machine)
    assert found.boost_clock_hz == 3.5e9
    assert found.peak("fp32") == 4 * 64 * 3.5e9


def test_hidden_instructions_lower_the_peak(machine):
    text = (machine[0] / "cpuinfo").read_text()
    (machine[0] / "cpuinfo").write_text(text.replace(" avx512f", ""))
    assert read(machine).peak("fp32") == 4 * 32 * 2.5e9
    (machine[0] / "cpuinfo").write_text(text.replace(" fma", ""))
    assert read(machine).peak("fp32") is None


def test_unknown_processor_has_no_peak(machine):
    text = (machine[0] / "cpuinfo").read_text()
    (machine[0] / "cpuinfo").write_text(text.replace("model\t\t: 85", "model\t\t: 1"))
    found = read(machine)
    assert found.peaks == {}
    assert {"peaks"} <= set(found.missing())
    assert found.multiprocessors == 4


def test_an_empty_system_is_all_unknown(tmp_path):
    found = local_device(gpu=False, proc=tmp_path, system=tmp_path)
    assert found.memory_bytes is None
    assert found.multiprocessors is None
    assert found.peaks == {}


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A stand-in for nvidia-smi that answers with the given line."""

    def answer(line, code=0):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{line}\nEND\nexit {code}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return answer


def test_a_gpu_in_the_catalogue(smi):
    smi("NVIDIA H100 80GB HBM3, 81559 MiB, 1980 MHz, 700.00 W, 9.0")
    assert device("local") == device("h100-sxm")
    assert device("local-cpu").kind == "cpu"


def test_a_gpu_outside_the_catalogue_keeps_what_the_driver_says(smi):
    smi("NVIDIA Quadro GV100, 32508 MiB, 1627 MHz, [N/A], 7.0")
    found = device("local")
    assert found.kind == "gpu"
    assert found.memory_bytes == 32508 * 2**20
    assert found.boost_clock_hz == 1627e6
    assert found.tdp_w is None
    assert found.max_warps_per_sm == 64
    assert found.peaks == {}
    assert {"peaks", "multiprocessors", "memory_bandwidth_bytes_per_s", "tdp_w"} <= set(found.missing())


@pytest.mark.parametrize(("line", "code"), [("No devices were found", 6), ("", 0), ("one, two", 0)])
def test_a_driver_without_a_gpu_leaves_the_cpu(smi, line, code):
    smi(line, code)
    assert device("local").kind == "cpu"


def test_local_here():
    found = device("local-cpu")
    assert found.name == "local"
    assert found.kind == "cpu"
    assert device("LOCAL-CPU") == found
    assert "local" not in devices()
    assert cluster("local-cpu").device_count == 1
