"""Archives of exported programs are data: nothing in them runs, and what is wrong with one is said."""

from __future__ import annotations

import importlib.util
import json
import pickle
import struct
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foretell.errors import InputError, UnknownNameError
from foretell.workload import pt2
from foretell.workload.options import options
from foretell.workload.pt2.builder import row_major, view_strides
from foretell.workload.pt2.symbols import Unbound, evaluate, symbol_of, symbols_in


def load() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "fuzz_files.py"
    spec = importlib.util.spec_from_file_location("fuzz_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fuzz = load()


def read(path: Path, **settings: Any) -> Any:
    return pt2.graph(str(path), options(**settings))


@pytest.mark.parametrize("old", [False, True])
def test_pickles_in_an_archive_are_never_opened(tmp_path: Path, old: bool) -> None:
    sprung, path = tmp_path / "sprung", tmp_path / "trap.pt2"
    path.write_bytes(fuzz.trapped(sprung, old))
    graph = read(path)
    assert not sprung.exists()
    assert graph.macs() == read_sound(tmp_path).macs()
    with zipfile.ZipFile(path) as archive:  # the trap works: whoever unpickles a member springs it
        member = "serialized_constants.pt" if old else "m/data/constants/custom_obj_0"
        pickle.loads(archive.read(member))
    assert sprung.exists()


def read_sound(folder: Path, old: bool = False) -> Any:
    path = folder / "sound.pt2"
    path.write_bytes(fuzz.pt2_bytes(fuzz.program(), old))
    return read(path)


def test_both_layouts_give_one_graph(tmp_path: Path) -> None:
    new, old = read_sound(tmp_path), read_sound(tmp_path, old=True)
    assert (new.provenance["layout"], old.provenance["layout"]) == ("models", "serialized_exported_program")
    assert new.ops == old.ops
    assert new.storages == old.storages
    # By hand: convolution 8·3·9·64, linear 8·4, attention 2·4, the cell's two products 4·12 each.
    assert new.macs() == 8 * 3 * 9 * 64 + 8 * 4 + 2 * 4 + 2 * 4 * 12
    assert new.parameters == 8 * 3 * 9 + 8 + 4 * 8 + 12 * 4


def test_several_programs_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "both.pt2"
    text = json.dumps(fuzz.program())
    path.write_bytes(fuzz.archive({"m/models/encoder.json": text, "m/models/decoder.json": text}))
    with pytest.raises(InputError, match="holds several programs: decoder, encoder; name one after a colon"):
        read(path)
    assert pt2.graph(f"{path}:encoder", options()).name == "pt2:both.pt2:encoder"
    with pytest.raises(UnknownNameError, match="did you mean 'encoder'"):
        pt2.graph(f"{path}:encoderr", options())


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({}, "is an empty zip archive without a program to read"),
        ({"readme.txt": "x"}, "is a zip archive without a program to read"),
        ({"archive/data.pkl": b"\x80\x02N."}, "is a PyTorch checkpoint (zipped pickle) without a program to read"),
        ({"m/data/aotinductor/model/x.so": b""}, "holds only compiled code (AOTInductor)"),
        ({"m/models/model.json": "[]"}, "member m/models/model.json: is not a JSON object"),
        ({"m/models/model.json": "{"}, "member m/models/model.json: not JSON"),
        ({"m/models/model.json": b"\xff\xfe\xff"}, "is not text"),
        ({"m/models/model.json": "{}"}, "schema_version is missing"),
        ({"m/models/model.json": '{"schema_version": {"major": 9, "minor": 0}}'}, "it is of schema 9, not one of 7, 8"),
        ({"m/models/model.json": "[" * 100_000}, "nested too deeply"),
        ({"m/models/model.json": "1" * 5000}, "not JSON"),
    ],
)
def test_archives_without_a_program_say_what_they_are(tmp_path: Path, members: Any, said: str) -> None:
    path = tmp_path / "other.pt2"
    path.write_bytes(fuzz.archive(members))
    with pytest.raises(InputError) as error:
        read(path)
    assert said in str(error.value)
    assert "other.pt2" in str(error.value)
    assert error.value.repair


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is an empty file, not a PyTorch exported program"),
        (b"GGUF" + bytes(40), "is a GGUF checkpoint, not a PyTorch exported program"),
        (b"\x80\x04N.", "is a pickle, not"),
        (b"PK\x03\x04" + bytes(100), "the archive's table of contents is missing"),
    ],
)
def test_other_files_are_named_for_what_they_are(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "other.pt2"
    path.write_bytes(data)
    with pytest.raises(InputError) as error:
        read(path)
    assert said in str(error.value)


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "is a folder"), (tmp_path / "none.pt2", "no such file"),
                       (Path("/dev/zero"), "is no regular file")):
        with pytest.raises(InputError, match=said):
            read(path)
    with pytest.raises(InputError):
        pt2.graph("a\0b", options())


def test_a_long_table_of_contents_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "many.pt2"
    path.write_bytes(fuzz._huge_archive(65_535))
    with pytest.raises(InputError, match=r"lists 65,535 members|is a damaged archive"):
        read(path)
    with path.open("wb") as file:  # zip64: a directory of 4 GiB
        record = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 10**8, 10**8, 2**32, 100)
        file.write(b"PK\x03\x04" + bytes(96) + record)
        file.write(b"PK\x06\x07" + struct.pack("<IQI", 0, 100, 1))
        file.write(b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0))
    with pytest.raises(InputError, match="lists 100,000,000 members, more than a program has"):
        read(path)


def test_what_unpacks_to_more_than_a_program_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt2"
    path.write_bytes(fuzz.bomb("m/models/model.json", 2**30))
    with pytest.raises(InputError, match=r"member m/models/model\.json: is 1,073,741,824 bytes long, more than"):
        read(path)
    path.write_bytes(fuzz.bomb("m/models/model.json", 2**26, fill=b"[],1"))
    with pytest.raises(InputError, match="would take too much memory when parsed"):
        read(path)


def test_a_program_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.pt2"
    name, other = b"m/models/model.json", b"m/models/nodel.json"
    text = json.dumps(fuzz.program())
    data = fuzz.archive({name.decode(): text, other.decode(): text})
    path.write_bytes(data.replace(other, name))
    with pytest.raises(InputError, match=r"member m/models/model\.json: is in the archive twice"):
        read(path)


def _changed(tmp_path: Path, node: int, argument: str, value: Any) -> Path:
    program = fuzz.program()
    for one in program["graph_module"]["graph"]["nodes"][node]["inputs"]:
        if one["name"] == argument:
            one["arg"] = value
    path = tmp_path / "changed.pt2"
    path.write_bytes(fuzz.pt2_bytes(program))
    return path


@pytest.mark.parametrize(
    ("node", "argument", "value", "said"),
    [
        (0, "weight", fuzz._ref("l"), "are no convolution in 2 dimensions"),
        (0, "stride", {"as_ints": [2, 2]}, "its result is stated as (1, 8, 8, 8), but size 8 is 4"),
        (0, "stride", {"as_ints": [0, 0]}, "node 0 (aten.conv2d.default)"),
        (0, "input", fuzz._ref("gru"), "value gru is used before it is made"),
        (3, "self", fuzz._ref("w"), "has not the elements of"),
        (4, "weight", fuzz._ref("w"), "node 4 (aten.linear.default)"),
        (4, "weight", fuzz._ref("g"), "cannot be multiplied with a weight of 12×4"),
        (7, "dim0", {"as_int": 9}, "its argument dim0 is 9, but there are 3 dimensions"),
        (8, "num_layers", {"as_int": 10**9}, "2 weights are not those of 1000000000 layers"),
    ],
)
def test_arguments_that_do_not_fit_name_their_node(
    tmp_path: Path, node: int, argument: str, value: Any, said: str
) -> None:
    with pytest.raises(InputError) as error:
        read(_changed(tmp_path, node, argument, value))
    assert said in str(error.value)
    assert "changed.pt2: node" in str(error.value)


def test_an_open_size_without_an_example_asks_for_it(tmp_path: Path) -> None:
    program = fuzz.program()
    values = program["graph_module"]["graph"]["tensor_values"]
    values["x"]["sizes"][2] = {"as_expr": {"expr_str": "s5", "hint": None}}
    path = tmp_path / "open.pt2"
    path.write_bytes(fuzz.pt2_bytes(program))
    with pytest.raises(InputError, match=r"size s5 is open and the archive has no example of it; set it with --input"):
        read(path)
    assert read(path, inputs=["x=1x3x8x8"]).macs() == read_sound(tmp_path).macs()
    assert read(path, inputs=["0=1x3x8x8"]).macs() == read_sound(tmp_path).macs()
    with pytest.raises(UnknownNameError, match="'y'; known: x"):
        read(path, inputs=["y=1x3x8x8"])


# --- sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s0", 7),
        ("2*s0 + 1", 15),
        ("((s0 - 1)//2)", 3),
        ("s0**2", 49),
        ("Symbol('s0', positive=True, integer=True)", 7),
        ("Add(Mul(Integer(2), Symbol('s0', positive=True, integer=True)), Integer(-1))", 13),
        ("FloorDiv(Symbol('s0'), Integer(2))", 3),
        ("CeilDiv(Symbol('s0'), Integer(2))", 4),
        ("Mul(Rational(1, 7), Symbol('s0'))", 1),
        ("Mul(Pow(Symbol('s0'), Integer(-1)), Integer(14))", 2),
        ("Max(Integer(3), Symbol('s0'))", 7),
        ("Mod(Symbol('s0'), Integer(4))", 3),
        ("FloorToInt(IntTrueDiv(Symbol('s0'), Integer(2)))", 3),
    ],
)
def test_expressions_over_open_sizes(text: str, value: int) -> None:
    assert evaluate(text, {"s0": 7}) == value
    if "s0" in text:
        assert symbols_in(text) == ("s0",)


def test_expressions_agree_with_sympy() -> None:
    sympy = pytest.importorskip("sympy")
    x, y = sympy.symbols("s0 s1", integer=True, positive=True)
    for expression in (x * y + 3, (x + y) ** 2 - x, 4 * x * y - 2 * (x + 1), sympy.Max(x, y, 3), sympy.floor(x / 2)):
        for a, b in ((1, 2), (7, 3), (10, 10)):
            wanted = int(expression.subs({x: a, y: b}))
            assert evaluate(sympy.srepr(expression), {"s0": a, "s1": b}) == wanted
            assert evaluate(str(expression), {"s0": a, "s1": b}) == wanted


@pytest.mark.parametrize(
    "text",
    ["", "s0 +", "(" * 5000, "__import__('os')", "s0.real", "[s0]", "s0 if s0 else 1", "lambda: 1", "9**99", "1/0",
     "Rational(1, 2)", "'a'", "1.5", "Max()", "Integer(1, 2, 3)", "f(s0)", "1+" * 9000 + "1", "x" * 30_000],
)
def test_other_text_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        evaluate(text, {"s0": 7})


def test_a_power_is_not_worked_out_where_it_cannot_be_a_size() -> None:
    with pytest.raises(ValueError, match="a size has an exponent beyond 64"):
        evaluate("Pow(Integer(2), Integer(1000000000000))", {})


def test_a_symbol_without_a_value_says_so() -> None:
    with pytest.raises(Unbound, match="size s1 is not known"):
        evaluate("s0 + s1", {"s0": 1})
    assert symbol_of("Symbol('s3', integer=True)") == "s3"
    assert symbol_of("2*s3") is None


def test_views_have_the_strides_that_pytorch_gives_them() -> None:
    torch = pytest.importorskip("torch")
    shapes = [((4, 6), (24,)), ((4, 6), (2, 2, 6)), ((2, 3, 4), (6, 4)), ((2, 3, 4), (2, 12)), ((6, 1, 4), (6, 4))]
    for old, new in shapes:
        for order in ({tuple(range(len(old))), tuple(range(len(old)))[::-1]}):
            x = torch.empty(old).permute(order)
            ours = view_strides(tuple(x.shape), x.stride(), new)
            try:
                theirs = x.view(new).stride()
            except RuntimeError:
                assert ours is None
            else:
                assert ours == theirs
    assert row_major((2, 0, 3)) == (3, 3, 1)


# --- at random --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", fuzz.READERS)
def test_malformed_files_are_refused_by_name_and_soon(tmp_path: Path, reader: str) -> None:
    tally = {"read": 0, "refused": 0}
    for data in fuzz.inputs(reader, 400, seed=1):
        outcome, took = fuzz.check(reader, data, tmp_path)
        tally[outcome] += 1
        assert took < fuzz.MOST_SECONDS
    assert sum(tally.values()) == 400
    assert tally["refused"] > 200
