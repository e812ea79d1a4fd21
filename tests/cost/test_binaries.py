"""Compiled kernels: what ptxas says of them, what we read in the binary; and files that are damaged."""

from __future__ import annotations

import random
import re
import shutil
import struct
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from foretell.cost import binaries
from foretell.cost.binaries import Kernel, parse_binary, parse_ptxas, read_binary, read_ptxas, short_name
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


def fatbin(*cubins: bytes) -> bytes:
    """A fatbin of cubins."""
    entries = b""
    for data in cubins:
        padded = data + bytes(-len(data) % 8)
        entries += struct.pack("<HHIQQQQQQQ", 2, 0x101, 64, len(padded), 0, 0, 0, 0x11, 0, 0) + padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def x86(*fatbins: bytes) -> bytes:
    """An object file for the processor with fatbins."""
    data = bytes(8).join(fatbins)
    return elf(62, 0, **{".nv__fatbin": (data, len(data), 0, 0)}).replace(b".nv..fatbin", b".nv_fatbin\0")


def test_fatbins_within_an_object_file() -> None:
    one = parse_binary(cubin(), "k")
    assert parse_binary(fatbin(cubin()), "k") == one
    assert parse_binary(fatbin(cubin()) + bytes(8) + fatbin(cubin()), "k") == 2 * one
    assert parse_binary(x86(fatbin(cubin()), fatbin(cubin())), "k") == 2 * one


def pointing_at(data: bytes, count: int, shift: int = 0) -> bytes:
    """An object file of `count` ``.nv_fatbin`` sections that lie over each other, each `shift` bytes after the last."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    at = 64 + len(data)
    headers = struct.pack("<IIQQQQIIQQ", 12, 3, 0, 0, at, len(names), 0, 0, 1, 0) + b"".join(
        struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, 64 + i * shift, len(data) - i * shift, 0, 0, 1, 0) for i in range(count)
    )
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, at + len(names), 0, 64, 0, 0, 64, count + 1, 0)
    return header + data + names + headers


def test_sections_that_lie_over_each_other_are_searched_once() -> None:
    data = fatbin(cubin())
    assert parse_binary(pointing_at(data, 1000), "k") == parse_binary(cubin(), "k")
    assert parse_binary(pointing_at(data + bytes(8000), 1000, shift=8), "k") == parse_binary(cubin(), "k")
    with pytest.raises(InputError, match="no kernel"):
        parse_binary(pointing_at(bytes(1 << 20), 60_000), "k")


def slow_files() -> dict[str, bytes]:
    """Files whose tables promise much more work than they have bytes."""
    names = b"".join(b".text.k%d\0.nv.info.k%d\0" % (i, i) for i in range(3000))
    attributes = bytes(1 << 18)
    headers = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64, len(names), 0, 0, 1, 0)
    for found in re.finditer(rb"[^\0]+", names):
        place = (64 + len(names), len(attributes)) if found[0].startswith(b".nv") else (64, 0)
        headers += struct.pack("<IIQQQQIIQQ", found.start(), 1, 0, 0, *place, 0, 40 << 24, 1, 0)
    start = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(7)
    at = 64 + len(names) + len(attributes)
    attributed = struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, at, 80, 64, 0, 0, 64, len(headers) // 64, 0)
    long = bytes(4000).replace(b"\0", b"a") + b"\0"
    headers_of_long = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64, len(long), 0, 0, 1, 0) * 60_000
    named = struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(long), 80, 64, 0, 0, 64, 60_000, 0)
    magic = struct.pack("<I", 0xBA55ED50)
    return {
        "one table of attributes for every kernel": start + attributed + names + attributes + headers,
        "long names that lie over each other": start + named + long + headers_of_long,
        "fatbins of nothing": (magic + struct.pack("<HHQ", 1, 16, 0)) * 600_000,
        "magics that are no fatbins": magic + struct.pack("<HHQ", 1, 16, 0) + b"\0" + magic * 600_000,
        "cubins of nothing": fatbin(elf(190, 80)) * 40_000,
    }


def test_what_promises_too_much_work_is_refused(within: Any) -> None:

    for data in slow_files().values():
        with pytest.raises(InputError, match="k: more than 500,000 sections, symbols and attributes"):
            within(2, partial(parse_binary, data, "k"))


def test_files_that_are_too_large_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.fatbin"
    with path.open("wb") as file:
        file.write(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 30))
        file.truncate(1 << 30)
    for read in (read_binary, read_ptxas):
        with pytest.raises(InputError, match=r"sparse\.fatbin: is larger than"):
            read(path)


def test_more_kernels_than_anyone_reads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_MOST_KERNELS", 3)
    line = "Compiling entry function 'k' for 'sm_80'\nUsed 8 registers\n"
    assert len(parse_ptxas(3 * line)) == len(parse_binary(3 * fatbin(cubin()), "k")) == 3
    for parse in (lambda: parse_ptxas(4 * line, "k"), lambda: parse_binary(4 * fatbin(cubin()), "k")):
        with pytest.raises(InputError, match="k: more than 3 kernels"):
            parse()


def test_a_kernel_that_no_gpu_could_run_is_damage() -> None:
    def with_registers(registers: int, shared: int) -> bytes:
        return elf(190, 80, _text_k=(b"", 0, 6, registers << 24 | 1), _nv_shared_k=(b"", shared, 3, 0))

    assert parse_binary(with_registers(255, 163 << 10), "k") == [Kernel("k", 255, 163 << 10, 0, "8.0")]
    with pytest.raises(InputError, match="k has 166,913 bytes of shared memory a block, where 166,912 are the most"):
        parse_binary(with_registers(255, (163 << 10) + 1), "k")
    with pytest.raises(InputError, match="k has 127 barriers a block, where 16 are the most"):
        parse_binary(elf(190, 80, _text_k=(b"", 0, 6 | 127 << 20, 0)), "k")


def test_names_do_not_steer_the_terminal() -> None:
    name = "a\x1b[2J\x07b"
    text = f"Compiling entry function '{name}' for 'sm_80'\nUsed 8 registers"
    damaged = cubin().replace(b".text.k\0", b".text.\x1b\0")
    for kernel in (*parse_ptxas(text), *parse_binary(damaged, "k")):
        assert kernel.name.isprintable()


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
                assert 0 <= kernel.registers <= 255
                assert 0 <= kernel.shared_bytes <= 227 << 10
        except InputError:
            continue


def test_a_fatbin_whose_sizes_lie() -> None:
    for size in (1 << 40, (1 << 64) - 1):
        with pytest.raises(InputError, match="ends before"):
            parse_binary(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, size) + bytes(64), "k")
    with pytest.raises(InputError, match="header of 0 bytes"):  # would go round for ever
        parse_binary(struct.pack("<IHHQ", 0xBA55ED50, 1, 0, 0) + bytes(64), "k")


PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3oldPf' for 'sm_70'
ptxas info    : Function properties for _Z3oldPf
    8 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, 1024+16 bytes smem, 352 bytes cmem[0]
ptxas info    : Compiling entry function '_Z3newPf' for 'sm_90a'
ptxas info    : Used 168 registers, used 9 barriers
"""


def test_text_of_older_and_newer_ptxas() -> None:
    assert parse_ptxas(PTXAS) == [
        Kernel("_Z3oldPf", 255, 1024, 0, "7.0", None, 16),
        Kernel("_Z3newPf", 168, 0, 9, "9.0", None, 0),
    ]
    assert parse_ptxas(PTXAS.replace("\n", "\r\n")) == parse_ptxas(PTXAS)
    with pytest.raises(InputError, match=re.escape("nvcc -Xptxas -v")):
        parse_ptxas("error: no such file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("168 reg", "999999999 reg"), "log:8: _Z3newPf has 999,999,999 registers a thread, where 255 are the most"),
        (("168 reg", "9" * 5000 + " reg"), "log:8: _Z3newPf has 999,999,999,999,999,999 registers"),
        (("168 reg", "256 reg"), "log:8: _Z3newPf has 256 registers"),
        (("9 barriers", "17 barriers"), "log:8: _Z3newPf has 17 barriers a block, where 16 are the most"),
        (("1024+16 bytes smem", "98305 bytes smem"), "log:6: _Z3oldPf has 98,305 bytes of shared memory a block"),
        (("1024+16 bytes smem", "9876543210 bytes smem"), "log:6: _Z3oldPf has 9,876,543,210 bytes of shared memory"),
    ],
)
def test_more_than_a_gpu_has_is_refused_by_line(change: tuple[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_ptxas(PTXAS.replace(*change), "log")
    assert message in str(caught.value)


def test_the_limit_of_shared_memory_is_that_of_what_it_was_compiled_for() -> None:
    line = "Compiling entry function 'k' for 'sm_{}'\nUsed 8 registers, {} bytes smem"
    assert parse_ptxas(line.format(90, 227 << 10))[0].shared_bytes == 227 << 10
    assert parse_ptxas(line.format(99, 227 << 10))[0].capability == "9.9"  # not known: as much as any has
    for architecture in (75, 80, 99):
        with pytest.raises(InputError, match="of shared memory a block"):
            parse_ptxas(line.format(architecture, (227 << 10) + 1))


def test_text_that_is_all_alike_takes_no_time(within: Any) -> None:

    entry = "Compiling entry function '"
    texts = ("1" * 4_000_000, entry * 150_000, entry + "a" * 4_000_000, "Used 1 registers" * 250_000, "\n" * 4_000_000)
    for text in texts:
        with pytest.raises(InputError, match="no kernel"):
            within(1, partial(parse_ptxas, text))


def damaged(whole: bytes, chance: random.Random) -> bytes:
    """`whole` with bytes and fields changed, cut short, or with a piece of it elsewhere."""
    data = bytearray(whole)
    for _ in range(chance.randint(1, 3)):
        at, to = sorted(chance.randrange(len(data)) for _ in range(2))
        match chance.randrange(6):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                field = chance.choice((0, 1, 0x7F, 0xFF, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, len(data)))
                data[at & ~7 : (at & ~7) + 8] = struct.pack("<Q", field)
            case 2:
                data[at & ~3 : (at & ~3) + 4] = struct.pack("<I", chance.choice((0, 1, 0xFFFF, (1 << 32) - 1)))
            case 3:
                del data[at : to + 1]
                data += b"\0"
            case 4:
                data[at:at] = data[at : to + 1]
            case 5:
                data[at : to + 1] = bytes(to + 1 - at)
    return bytes(data)


@pytest.mark.parametrize("kind", ["cubin", "fatbin", "object file", "ptxas"])
def test_whatever_a_file_holds_ends_in_kernels_or_an_input_error(kind: str) -> None:
    whole = {
        "cubin": cubin(),
        "fatbin": fatbin(cubin(), cubin()) + bytes(8) + fatbin(cubin()),
        "object file": x86(fatbin(cubin())),
        "ptxas": PTXAS.encode(),
    }[kind]
    chance = random.Random(kind)
    outcomes = {True: 0, False: 0}
    for _ in range(400):
        data = damaged(whole, chance)
        try:
            kernels = parse_ptxas(data.decode("utf-8", "replace")) if kind == "ptxas" else parse_binary(data, "k")
        except InputError:
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        for kernel in kernels:
            assert 0 <= kernel.registers <= 255
            assert 0 <= kernel.barriers <= 16
            assert 0 <= kernel.shared_bytes <= 227 << 10
            assert short_name(kernel.name).isprintable()
    assert min(outcomes.values()) > 20  # neither all refused nor all taken
