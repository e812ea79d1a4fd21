"""The contract every rule keeps: it fires on a graph made for it, is silent on one that obeys, and its gain is real."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell.advise import Finding, advise, member, rule, rules
from foretell.advise.bench import Bench, held, step_time_s
from foretell.advise.edit import Edit, reshaped
from foretell.cost import estimate
from foretell.cost.learned import Learned
from foretell.cost.model import models
from foretell.errors import ForetellError, InputError, UnknownNameError
from foretell.graph import Graph
from foretell.hardware import device
from foretell.hardware.device import FrozenMap
from foretell.report import schema

Make = Callable[..., Any]


def _separable(n: Any, groups: bool) -> None:
    x = n.relu(n.conv(n.image(32, 56), 128))
    n.conv(n.relu(n.conv(x, 128, 3, groups=128)) if groups else n.relu(n.conv(x, 128, 3)), 32)


def _dense(n: Any, again: bool) -> None:
    features = [n.image(64, 56)]
    for _ in range(6):
        joined = n.cat(*features) if again and len(features) > 1 else features[-1]
        features.append(n.conv(joined, 64, 3))
    n.cat(*features)


def _stem(n: Any, large: bool) -> None:
    x = n.image(3, 224)
    n.pool(n.relu(n.conv(x, 64, 7, 2))) if large else n.relu(n.conv(x, 64, 4, 4))


def _branches(n: Any, parallel: bool) -> None:
    x = n.image(64, 56)
    y = n.norm(n.conv(x, 64, 3))
    n.relu(n.add(n.add(y, n.norm(n.conv(x, 64))), n.norm(x)) if parallel else n.add(n.relu(y), x))


def _small(n: Any, many: bool) -> None:
    x = n.image(16, 8 if many else 64)
    for _ in range(40 if many else 2):
        x = n.relu(x)


# Rule → (what the net is made with, what breaks it, what obeys it).
CASES: dict[str, tuple[dict[str, Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attention": ({}, lambda n: n.attend(1024), lambda n: n.attend(256, heads=96)),
    "batch_norm": ({}, lambda n: n.relu(n.norm(n.conv(n.image(64, 56), 64, 3))),
                   lambda n: n.relu(n.conv(n.image(64, 56), 64, 3))),
    "branches": ({}, lambda n: _branches(n, True), lambda n: _branches(n, False)),
    "channel_multiple": ({}, lambda n: n.conv(n.image(60, 56), 250, 3), lambda n: n.conv(n.image(64, 56), 256, 3)),
    "depthwise": ({}, lambda n: _separable(n, True), lambda n: _separable(n, False)),
    "equal_width": ({}, lambda n: n.conv(n.image(32, 56), 512), lambda n: n.conv(n.image(128, 56), 128)),
    "fragmentation": ({"batch": 1}, lambda n: _small(n, True), lambda n: _small(n, False)),
    "group_width": ({"dtype": "float32"}, lambda n: n.conv(n.image(128, 56), 128, 3, groups=64),
                    lambda n: n.conv(n.image(128, 56), 128, 3)),
    "layout": ({"nhwc": False}, lambda n: n.conv(n.image(64, 56), 64, 3), lambda n: n.attend(64)),
    "memory_traffic": ({}, lambda n: n.conv(n.image(64, 112), 64), lambda n: n.conv(n.image(512, 14), 512, 3)),
    "one_shot": ({}, lambda n: _dense(n, True), lambda n: _dense(n, False)),
    "squeeze_excite": ({}, lambda n: n.conv(n.excite(n.image(64, 112)), 64, 3),
                       lambda n: n.conv(n.excite(n.image(64, 14)), 64, 3)),
    "stem": ({}, lambda n: _stem(n, True), lambda n: _stem(n, False)),
}  # fmt: skip
ON = "a100-sxm4-80gb"


def _graph(net: Make, name: str, broken: bool) -> Graph:
    made, breaks, obeys = CASES[name]
    n = net(**made)
    (breaks if broken else obeys)(n)
    return n.graph(precision="fp32" if made.get("dtype") == "float32" else "fp16")


def _found(graph: Graph, name: str, on: str = ON) -> list[Finding]:
    place = device(on)
    return member(name).check(graph, place, estimate(graph, place))


def test_every_rule_has_its_cases() -> None:
    assert set(CASES) == set(rules())


@pytest.mark.parametrize("name", rules())
def test_every_rule_keeps_the_contract(name: str, net: Make) -> None:
    graph = _graph(net, name, broken=True)
    place = device(ON)
    before = estimate(graph, place)
    found = member(name).check(graph, place, before)
    assert found, "it says something where its rule is broken"
    for finding in found:
        assert finding.rule == name
        assert finding.source == member(name).source
        assert 0 < finding.gain_s < before.time_s
        low, high = finding.gain_interval_s
        assert low <= finding.gain_s <= high
        assert finding.evidence
        assert all(math.isfinite(value) for value in finding.evidence.values())
        assert finding.ops == tuple(sorted(set(finding.ops)))
        assert all(0 <= i < len(graph.ops) for i in finding.ops)
        assert finding.modules == tuple(dict.fromkeys(graph.ops[i].module for i in finding.ops))
        assert finding.what
        assert finding.advice
    assert _found(_graph(net, name, broken=False), name) == []


@pytest.mark.parametrize("on", ["t4", "h100-sxm", "mi300x", "xeon-8480-plus"])
@pytest.mark.parametrize("name", rules())
def test_gains_are_never_negative_on_other_devices(name: str, on: str, net: Make) -> None:
    for broken in (True, False):
        assert all(f.gain_s > 0 for f in _found(_graph(net, name, broken), name, on))


def test_a_gain_is_the_difference_of_two_predictions(net: Make) -> None:
    graph, plain = _graph(net, "batch_norm", True), _graph(net, "batch_norm", False)
    place = device(ON)
    model = held("learned")
    before, after = (step_time_s(g, place, model, "eager") for g in (graph, plain))
    now = estimate(graph, place)
    (finding,) = member("batch_norm").check(graph, place, now)
    assert finding.gain_s == pytest.approx(now.time_s * (1 - after / before), rel=1e-3)


def test_merged_branches_cost_what_one_convolution_does(net: Make) -> None:
    graph = _graph(net, "branches", True)
    one = net()
    one.relu(one.conv(one.image(64, 56), 64, 3))
    place, model = device(ON), held("learned")
    now = estimate(graph, place)
    (finding,) = member("branches").check(graph, place, now)
    before, after = (step_time_s(g, place, model, "eager") for g in (graph, one.graph()))
    assert finding.gain_s == pytest.approx(now.time_s * (1 - after / before), rel=1e-3)
    assert finding.evidence["branches"] == 3


def test_a_shortcut_over_an_activation_is_no_branch(net: Make) -> None:
    n = net()
    x = n.image(64, 56)
    n.add(n.relu(n.conv(x, 64, 3)), n.conv(x, 64))
    assert _found(n.graph(), "branches") == []


def test_a_branch_that_others_read_stays(net: Make) -> None:
    n = net()
    x = n.image(64, 56)
    y = n.conv(x, 64, 3)
    n.add(n.norm(y), n.norm(n.conv(x, 64)))
    n.relu(y)
    assert _found(n.graph(), "branches") == []


def test_the_correction_of_steps_is_held() -> None:
    # A change must not gain from another branch of the trees that correct whole steps.
    model = held("learned")
    assert isinstance(model, Learned)
    assert model.steps is None
    assert model.operations == models()["learned"].operations
    assert held("roofline") is models()["roofline"]


def test_a_convolution_that_others_read_keeps_its_norm(net: Make) -> None:
    n = net()
    y = n.conv(n.image(64, 56), 64, 3)
    n.add(n.norm(y), y)
    assert _found(n.graph(), "batch_norm") == []


def test_sites_alike_are_one_finding(net: Make) -> None:
    n = net()
    x = n.conv(n.image(32, 56), 32, 3)
    for _ in range(3):
        x = n.conv(n.relu(n.conv(n.relu(n.conv(x, 128)), 128, 3, groups=128)), 32)
    (finding,) = _found(n.graph(), "depthwise")
    assert finding.what.endswith(", 3 times")
    assert len(finding.ops) == 9
    # A fused block does 9 · 32 · 128 in place of 32 · 128 + 9 · 128.
    ratio = (9 * 32 * 128) / (32 * 128 + 9 * 128)
    assert finding.evidence["macs_fused"] / finding.evidence["macs"] == pytest.approx(ratio)
    assert finding.evidence["weights_times"] == pytest.approx(ratio)


def test_wide_depthwise_convolutions_are_left_alone(net: Make) -> None:
    n = net()
    x = n.relu(n.conv(n.image(512, 14), 3072))
    n.conv(n.relu(n.conv(x, 3072, 3, groups=3072)), 512)
    assert _found(n.graph(), "depthwise", "t4") == []


def test_least_elements_are_those_of_equal_widths(net: Make) -> None:
    (finding,) = _found(_graph(net, "equal_width", True), "equal_width")
    positions = 32 * 56 * 56
    assert finding.evidence["elements_least"] == pytest.approx(2 * positions * 128 + 128**2)
    assert finding.evidence["elements"] == positions * (32 + 512) + 32 * 512


def test_an_edit_counts_anew(net: Make) -> None:
    n = net()
    n.conv(n.image(16, 8), 32, 3)
    graph = n.graph()
    edit = Edit(graph)
    edit.drop(0)
    edit.convolution(0, 0, graph.ops[0].outputs[0], (5, 5))
    assert graph.macs() * 25 == edit.graph().macs() * 9
    assert Edit(graph).graph() == graph
    assert reshaped(graph, lambda i, t: t) == graph
    again = reshaped(graph, lambda i, t: replace(t))  # every tensor new, and equal
    assert again == graph


def test_the_registry_refuses_a_second_rule_and_names_near_ones() -> None:
    with pytest.raises(ForetellError, match="exists already"):
        rule("depthwise", asks="", source="")(lambda graph, place, now: [])
    with pytest.raises(UnknownNameError, match="depthwise"):
        member("depthwize")


def test_advice_is_sorted_and_valid(net: Make) -> None:
    advice = advise(_graph(net, "branches", True), device(ON))
    assert [f.gain_s for f in advice.findings] == sorted((f.gain_s for f in advice.findings), reverse=True)
    assert {f.rule for f in advice.findings} >= {"branches", "batch_norm"}
    jsonschema.validate(advice.to_dict(), schema("foretell.advice/1"))
    only = advise(_graph(net, "branches", True), device(ON), names=["branches"])
    assert [f.rule for f in only.findings] == ["branches"] == list(only.rules)


@pytest.mark.parametrize(("mode", "said"), [("train", "without --train"), ("decode", "advise transformer")])
def test_other_steps_are_refused(mode: str, said: str, net: Make) -> None:
    with pytest.raises(InputError, match=said):
        advise(replace(_graph(net, "stem", True), mode=mode), device(ON))


def test_a_device_without_peaks_is_refused_by_name(net: Make) -> None:
    with pytest.raises(ForetellError, match=ON):
        advise(_graph(net, "stem", True), replace(device(ON), peaks=FrozenMap()))


def test_benches_are_kept_for_one_estimate(net: Make) -> None:
    graph, place = _graph(net, "stem", True), device(ON)
    first, second = estimate(graph, place), estimate(graph, place)
    assert Bench.of(graph, place, first) is Bench.of(graph, place, first)
    assert Bench.of(graph, place, second).estimate is second


def test_the_documentation_lists_every_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "advise.md").read_text(encoding="utf-8")
    for name in rules():
        assert f"| `{name}` | {member(name).asks} | {member(name).source} |" in page
