"""Compiled kernels: what ptxas says of them, what we read in the binary; and files that are damaged."""

from __future__ import annotations

import random
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from foretell.cost.binaries import Kernel, parse_binary, parse_ptxas, read_binary, short_name
from foretell.errors import InputError

SOURCE = Path(__file__).with_name("kernels.cu")


def nvcc(*arguments: str, cwd: Path) -> str:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc")
    done = subprocess.run([compiler, *arguments, str(SOURCE)], cwd=cwd, capture_output=True, text=True, check=False)
    if "Unsupported gpu architecture" in done.stderr:
        pytest.skip("this nvcc does not compile for it")
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("architecture", ["75", "80", "90", "120"])
def test_a_cubin_says_what_ptxas_said(tmp_path: Path, architecture: str) -> None:
    printed = nvcc(f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v", "-o", "k.cubin", cwd=tmp_path)
    told = {k.name: k for k in parse_ptxas(printed)}
    read = read_binary(tmp_path / "k.cubin")
    assert [short_name(k.name) for k in read] == ["tile", "scale"]
    for kernel in read:
        other = told[kernel.name]
        assert (kernel.registers, kernel.shared_bytes, kernel.barriers, kernel.capability) == (
            *(other.registers, other.shared_bytes, other.barriers, other.capability),
        )
    assert [k.max_block for k in read] == [256, None]
    assert read[0].shared_bytes == 8192  # float s[2048]
    assert read[0].capability == f"{int(architecture) // 10}.{int(architecture) % 10}"


def test_a_fatbin_holds_several(tmp_path: Path) -> None:
    code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ("80", "90")]
    nvcc(*code, "-fatbin", "-o", "k.fatbin", cwd=tmp_path)
    assert [k.capability for k in read_binary(tmp_path / "k.fatbin")] == ["8.0", "8.0", "9.0", "9.0"]


def test_what_cannot_be_read_says_how_to_compile_it(tmp_path: Path) -> None:
    nvcc("-arch=sm_90", "-fatbin", "--compress-mode=size", "-o", "c.fatbin", cwd=tmp_path)
    with pytest.raises(InputError, match="compressed"):
        read_binary(tmp_path / "c.fatbin")
    nvcc("-arch=sm_90", "-rdc=true", "-cubin", "-o", "r.cubin", cwd=tmp_path)
    with pytest.raises(InputError, match="not linked"):
        read_binary(tmp_path / "r.cubin")


def elf(machine: int, flags: int, **sections: tuple[bytes, int, int, int]) -> bytes:
    """An ELF file of sections given as (content, size, flags, info); ``_`` in their names stands for a dot."""
    contents = {"": (b"", 0, 0, 0), ".shstrtab": (b"", 0, 0, 0)}
    contents |= {name.replace("_", "."): section for name, section in sections.items()}
    names = b"".join(name.encode() + b"\0" for name in contents)
    contents[".shstrtab"] = (names, len(names), 0, 0)
    body, headers = b"", b""
    for name, (content, size, section_flags, info) in contents.items():
        at = names.index(b"\0" + name.encode() + b"\0") + 1 if name else 0
        headers += struct.pack("<IIQQQQIIQQ", at, 1, section_flags, 0, 64 + len(body), size, 0, info, 1, 0)
        body += content
    header = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(7)
    header += struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, 64 + len(body), flags, 64, 0, 0, 64, len(contents), 1)
    return header + body + headers


def cubin() -> bytes:
    """A cubin as CUDA 12 writes it, with one kernel ``k``: registers in ``sh_info``, barriers in ``sh_flags``."""
    bounds = struct.pack("<BBHIII", 4, 0x05, 12, 64, 2, 1)
    return elf(
        190,
        80,
        _text_k=(b"", 0, 6 | 1 << 20, 40 << 24 | 1),
        _nv_shared_k=(b"", 4096, 3, 0),
        _nv_info_k=(bounds, len(bounds), 0, 0),
    )


def test_an_older_cubin() -> None:
    assert parse_binary(cubin(), "k") == [Kernel("k", 40, 4096, 1, "8.0", 128)]


def test_fatbins_within_an_object_file() -> None:
    padded = cubin() + bytes(-len(cubin()) % 8)
    entry = struct.pack("<HHIQQQQQQQ", 2, 0x101, 64, len(padded), 0, 0, 0, 0x11, 0, 0)
    fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry + padded)) + entry + padded
    assert parse_binary(fatbin, "k") == parse_binary(cubin(), "k")
    two = fatbin + bytes(8) + fatbin
    assert parse_binary(two, "k") == 2 * parse_binary(cubin(), "k")
    x86 = elf(62, 0, **{".nv__fatbin": (two, len(two), 0, 0)}).replace(b".nv..fatbin", b".nv_fatbin\0")
    assert parse_binary(x86, "k") == parse_binary(two, "k")


def test_damaged_files_are_refused_never_a_crash() -> None:
    whole = cubin()
    for size in range(len(whole)):
        with pytest.raises(InputError):
            parse_binary(whole[:size], "k")
    chance = random.Random(3)
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(4, len(data))] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        try:
            for kernel in parse_binary(bytes(data), "k"):
                assert 0 <= kernel.registers <= 1024
                assert 0 <= kernel.shared_bytes <= 1 << 24
        except InputError:
            continue


def test_a_fatbin_whose_sizes_lie() -> None:
    for size in (1 << 40, (1 << 64) - 1):
        with pytest.raises(InputError, match="ends before"):
            parse_binary(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, size) + bytes(64), "k")
    with pytest.raises(InputError, match="header of 0 bytes"):  # would go round for ever
        parse_binary(struct.pack("<IHHQ", 0xBA55ED50, 1, 0, 0) + bytes(64), "k")


def test_text_of_older_and_newer_ptxas() -> None:
    text = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3oldPf' for 'sm_70'
ptxas info    : Function properties for _Z3oldPf
    8 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, 1024+16 bytes smem, 352 bytes cmem[0]
ptxas info    : Compiling entry function '_Z3newPf' for 'sm_90a'
ptxas info    : Used 168 registers, used 9 barriers
"""
    assert parse_ptxas(text) == [
        Kernel("_Z3oldPf", 255, 1024, 0, "7.0", None, 16),
        Kernel("_Z3newPf", 168, 0, 9, "9.0", None, 0),
    ]
    with pytest.raises(InputError, match=re.escape("nvcc -Xptxas -v")):
        parse_ptxas("error: no such file")
