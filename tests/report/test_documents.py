import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell.cost.estimate import BOUNDS, MEMORY_PARTS, SCHEMA, Estimate
from foretell.errors import UnknownNameError
from foretell.graph import DTYPES, KINDS, MODES, PHASES, ROLES, Graph
from foretell.report import SCHEMAS, json_text, schema
from foretell.report.documents import keys_table

Make = Callable[..., Estimate]
OPTIONAL = ("largest_batch",)  # present where it was asked for


@pytest.fixture(params=SCHEMAS)
def document_schema(request: pytest.FixtureRequest) -> dict[str, Any]:
    return schema(request.param)


def validate(document: Any, name: str) -> None:
    jsonschema.Draft202012Validator(schema(name)).validate(json.loads(json_text(document)))


def parts(node: Any, path: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every sub-schema with its path."""
    if isinstance(node, dict):
        yield path, node
        for name, child in node.get("properties", {}).items():
            yield from parts(child, f"{path}.{name}")
        if isinstance(node.get("items"), dict):
            yield from parts(node["items"], f"{path}[]")


def test_the_schemas_are_schemas_and_describe_every_key(document_schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(document_schema)
    for path, part in parts(document_schema):
        if "const" not in part and not path.endswith("[]"):
            assert part.get("description"), path
        if "properties" in part and part.get("additionalProperties") is not False:
            assert part["required"] == [key for key in part["properties"] if key not in OPTIONAL], path


def test_a_name_says_its_version(document_schema: dict[str, Any]) -> None:
    assert document_schema["title"] == document_schema["properties"]["schema"]["const"]
    with pytest.raises(UnknownNameError, match=r"foretell\.estimate/1"):
        schema("foretell.estimate/2")


def test_closed_sets_are_those_of_the_code() -> None:
    estimate, graph = schema("foretell.estimate/1")["properties"], schema("foretell.graph/1")["properties"]
    op = graph["ops"]["items"]["properties"]
    assert SCHEMA in SCHEMAS
    assert tuple(estimate["bound"]["enum"]) == BOUNDS == tuple(estimate["breakdown_s"]["properties"])
    assert tuple(estimate["memory"]["properties"]["breakdown_bytes"]["properties"]) == MEMORY_PARTS
    assert tuple(estimate["mode"]["enum"]) == MODES == tuple(graph["mode"]["enum"])
    assert tuple(op["kind"]["enum"]) == KINDS
    assert tuple(op["phase"]["enum"]) == PHASES
    assert tuple(op["dtype"]["enum"]) == DTYPES == tuple(graph["tensors"]["items"]["prefixItems"][1]["enum"])
    assert tuple(graph["storages"]["items"]["prefixItems"][1]["enum"]) == ROLES


def test_an_estimate_is_valid_and_nothing_in_it_is_undocumented(estimate: Make) -> None:
    document = estimate(notes=("a",), not_counted={"data loading": 0}).to_dict()
    validate(document, "foretell.estimate/1")
    known = schema("foretell.estimate/1")["properties"]
    assert list(document) == [key for key in known if key not in OPTIONAL]
    assert list(document["memory"]) == list(known["memory"]["properties"])


def test_unknown_figures_are_null(estimate: Make) -> None:
    document = estimate(mfu=None, energy_j=None, cost_usd=None, time_s=0.0).to_dict()
    assert document["throughput_per_s"] == math.inf
    written = json.loads(json_text(document), parse_constant=pytest.fail)
    assert written["throughput_per_s"] is None
    assert written["mfu"] is None
    validate(document, "foretell.estimate/1")


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("mfu", 1.5),
        ("bound", "network"),
        ("time_s", -1.0),
        ("items", {}),
        ("time_interval_s", [1.0]),
        ("schema", "x/1"),
    ],
)
def test_the_schema_refuses_what_is_wrong(estimate: Make, key: str, wrong: Any) -> None:
    document = {**estimate().to_dict(), key: wrong}
    with pytest.raises(jsonschema.ValidationError):
        validate(document, "foretell.estimate/1")


def test_a_graph_is_valid_and_nothing_in_it_is_undocumented(graph: Graph) -> None:
    document = graph.to_dict()
    validate(document, "foretell.graph/1")
    known = schema("foretell.graph/1")["properties"]
    assert list(document) == list(known)
    assert list(document["ops"][0]) == list(known["ops"]["items"]["properties"])
    document["ops"][0]["kind"] = "convolutoin"
    with pytest.raises(jsonschema.ValidationError, match="convolutoin"):
        validate(document, "foretell.graph/1")


def test_json_is_ascii_so_that_any_console_keeps_it() -> None:
    assert json_text({"a": "×"}).isascii()
    assert json.loads(json_text(({"a": ("×", 1, None, True, 0.5)},))) == [{"a": ["×", 1, None, True, 0.5]}]


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_documentation_has_the_keys_of_the_schema(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "schema.md").read_text(encoding="utf-8")
    assert f"<!-- keys of {name}, from the schema file -->\n{keys_table(name)}\n<!-- end of keys -->" in page
