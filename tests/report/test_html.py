"""The report as one file: what it says, that it loads nothing, and that what it is given stays text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import foretell
from foretell.cost import Estimate, Memory, OpEstimates, estimate, lower
from foretell.errors import InputError
from foretell.graph import Graph
from foretell.hardware import Device, device
from foretell.report.html import Page, Variation, html_page, plots, variations
from foretell.report.html.page import content_policy, environment, versions
from foretell.units import format_bytes, format_money, format_time

HOSTILE = "<script>alert(1)</script>\"'&amp;</script><!--"
Made = tuple[Graph, Estimate, Device]


def made(workload: str = "llm:gpt2", on: str = "a100-sxm4-80gb", runtime: str = "eager", **settings: Any) -> Made:
    graph = foretell.capture(workload, **settings)
    return graph, estimate(graph, device(on), runtime=runtime), device(on)


def page_of(graph: Graph, *estimates: Estimate, **more: Any) -> str:
    return html_page(Page(graph, estimates, [device(e.device) for e in estimates], **more))


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    loaded: dict[str, Any] = json.loads(found[1])
    return loaded


def words(text: str) -> str:
    """What a reader sees: no scripts, styles or tags, runs of white space made one."""
    bare = re.sub(r"<(script|style)\b.*?</\1>|<[^>]+>", " ", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(bare))


def tiled(graph: Graph, times: int) -> Graph:
    """`graph` many times over, each in a block of its own."""
    ops, tensors, storages = [], [], []
    for n in range(times):
        base_t, base_s, base_o = len(tensors), len(storages), len(ops)
        storages += [
            replace(
                s,
                born=s.born if s.born < 0 else s.born + base_o,
                dies=None if s.dies is None else s.dies + base_o,
            )
            for s in graph.storages
        ]
        tensors += [replace(t, storage=t.storage + base_s) for t in graph.tensors]
        ops += [
            replace(
                op,
                module=f"block{n}.{op.module}",
                inputs=tuple(t + base_t for t in op.inputs),
                outputs=tuple(t + base_t for t in op.outputs),
            )
            for op in graph.ops
        ]
    return replace(graph, ops=tuple(ops), tensors=tuple(tensors), storages=tuple(storages))


# --- one file, which loads nothing ---


def test_nothing_is_loaded_from_anywhere() -> None:
    graph, predicted, on = made(seq_len=64, train=True)
    text = page_of(graph, predicted, variations={on.name: variations(graph, on, predicted)})
    assert not re.search(r"https?:|//[a-z]|\bsrc\s*=|url\(|@import|<link|<iframe|<img|<object|<base", text)
    assert set(re.findall(r'href="([^"]*)"', text)) <= {"#device-0"}
    assert "fetch(" not in text
    assert "XMLHttpRequest" not in text


def test_the_policy_names_our_script_and_style_and_nothing_else() -> None:
    text = page_of(*made(seq_len=16)[:2])
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])  # type: ignore[index]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert "connect-src" not in rules
    assert "connect-src 'self'" in content_policy(connect=True)
    assert " style=" not in text  # the policy would forbid it


def test_what_is_given_stays_text() -> None:
    graph, predicted, on = made(seq_len=16)
    ops = tuple(replace(op, module=HOSTILE, name=op.name if i else HOSTILE) for i, op in enumerate(graph.ops))
    graph = replace(graph, ops=ops, name=HOSTILE)
    predicted = replace(
        predicted, workload=HOSTILE, notes=(HOSTILE,), not_counted={HOSTILE: 1}, interval_basis=HOSTILE
    )
    text = html_page(
        Page(
            graph,
            [predicted],
            [replace(on, title=HOSTILE)],
            settings=[HOSTILE],
            command=HOSTILE,
            variations={on.name: [Variation("Batch", HOSTILE, None, HOSTILE)]},
        )
    )
    assert "<script>alert" not in text
    assert "<!--" not in text
    assert text.count("<script") == text.count("</script>") == 2  # the data and our own
    assert words(text).count("<script>alert(1)</script>") >= 8
    assert HOSTILE in data_of(text)["texts"]


# --- figures ---


def test_the_tiles_say_what_the_card_says() -> None:
    graph, predicted, on = made(seq_len=128, batch=4, train=True)
    text = words(page_of(graph, predicted, largest_batches={on.name: 321}))
    assert f"Time per step {format_time(predicted.time_s)} 80 % interval" in text
    assert f"Memory {format_bytes(predicted.memory.peak_bytes)} " in text
    assert "fits largest batch that fits: 321" in text
    assert predicted.cost_usd is not None
    noun, number = next(iter(predicted.items.items()))
    assert f"Cost per million {noun} {format_money(1e6 * predicted.cost_usd / number)} at $3.43 an hour" in text
    assert f"Limited by {predicted.bound}" in text
    assert f"interval: {predicted.interval_basis}" in text
    assert "Not counted data loading; host-device input copies" in text
    for name, size in predicted.memory.breakdown.items():
        if size:
            assert f"{name.replace('_', ' ')} " in text


def test_what_is_unknown_says_so(estimate: Callable[..., Estimate], memory: Callable[..., Memory]) -> None:
    graph, predicted, on = made(seq_len=16)
    unsure = replace(
        predicted, energy_j=None, cost_usd=None, mfu=None, memory=memory(capacity_bytes=None, peak_op=-1)
    )
    text = words(html_page(Page(graph, [unsure], [replace(on, price_usd_per_h=None)])))
    assert "Energy unknown the device's power is not in the catalogue" in text
    assert "Cost unknown" in text
    assert "the device's capacity is unknown" in text
    assert "MFU unknown" in text
    assert "is reached before the first op" in text


def test_a_step_that_does_not_fit(memory: Callable[..., Memory]) -> None:
    graph, predicted, _ = made(seq_len=16)
    text = page_of(graph, replace(predicted, memory=memory(peak_bytes=100 << 30)))
    assert 'class="tile bad"' in text
    assert "125 % of 80 GiB: does not fit" in words(text)


def test_devices_side_by_side() -> None:
    graph = foretell.capture("llm:llama-3.1-8b", seq_len=128, precision="bf16")
    names = ("t4", "l40s", "h100-sxm")
    estimates = [estimate(graph, device(name)) for name in names]
    assert [e.memory.fits for e in estimates] == [False, True, True]
    text = page_of(graph, *estimates)
    rows = re.findall(r"<tr(?: class=\"infeasible\")?>\s*<th scope=\"row\"><a.*?</tr>", text, re.DOTALL)
    assert len(rows) == 3
    t4, l40s, h100 = map(words, rows)
    assert "no" in t4.split()
    assert "best" not in t4  # it would have been the cheapest, but cannot
    assert f"{format_time(estimates[2].time_s)} best" in h100
    assert "$6.88/h" in h100
    assert "best" in l40s  # cheapest by the million
    assert text.count('<article id="device-') == text.count('role="tabpanel"') == 3
    assert [d["device"] for d in data_of(text)["devices"]] == list(names)


def test_one_device_has_no_tabs() -> None:
    text = page_of(*made(seq_len=16)[:2])
    assert '<div class="tabs"' not in text
    assert "Devices compared" not in text


def test_versions_and_command() -> None:
    graph, predicted, _ = made(seq_len=16)
    text = page_of(graph, predicted, command="foretell predict 'a b' --on t4")
    assert "<code>foretell predict &#39;a b&#39; --on t4</code>" in text
    assert versions()["foretell"] == foretell.__version__
    assert f"foretell {foretell.__version__} python" in words(text)


def test_a_template_that_misses_a_value_is_an_error() -> None:
    import jinja2

    with pytest.raises(jinja2.UndefinedError, match="nothing"):
        environment().from_string("{{ nothing }}").render()


# --- what if ---


def test_each_variation_is_a_prediction() -> None:
    settings = {"phase": "decode", "context": 256, "batch": 8, "precision": "bf16"}
    graph, base, on = made("llm:gpt2", "l4", **settings)

    def again(changed: Any) -> Graph:
        captured: Graph = foretell.capture("llm:gpt2", **{**settings, **changed})
        return captured

    found = {v.name: v for v in variations(graph, on, base, recapture=again, batch=8)}
    double = foretell.predict("llm:gpt2", on="l4", **{**settings, "batch": 16})
    assert found["batch 16"].estimate.time_s == double.time_s  # type: ignore[union-attr]
    assert found["batch 16"].estimate.memory.peak_bytes == double.memory.peak_bytes  # type: ignore[union-attr]
    # by the item: a batch of 16 in the time of double.time_s
    assert found["batch 16"].change(base) == pytest.approx((double.time_s / 16) / (base.time_s / 8) - 1.0)
    compiled = foretell.predict("llm:gpt2", on="l4", runtime="compiled", **settings)
    assert found["compiled"].estimate.time_s == compiled.time_s  # type: ignore[union-attr]
    fp32 = foretell.predict("llm:gpt2", on="l4", **{**settings, "precision": "fp32"})
    assert found["fp32"].estimate.time_s == fp32.time_s  # type: ignore[union-attr]
    assert "bf16" not in found  # as it is
    assert set(found) >= {"batch 4", "memory bandwidth +25 %", "arithmetic peaks −20 %", "fp16"}


def test_numbers_of_the_device_matter_where_they_limit() -> None:
    graph, base, on = made("llm:llama-3.1-8b", seq_len=2048, precision="bf16", runtime="compiled")
    assert base.breakdown_s["compute"] > 0.7 * base.time_s
    found = {v.name: v.change(base) for v in variations(graph, on, base)}
    assert found["arithmetic peaks +25 %"] < 0.0 < found["arithmetic peaks −20 %"]  # type: ignore[operator]
    assert abs(found["arithmetic peaks −20 %"]) > abs(found["memory bandwidth −20 %"])  # type: ignore[arg-type]


def test_a_variation_that_cannot_be_says_why() -> None:
    graph, base, on = made(seq_len=16)

    def refuse(changed: Any) -> Graph:
        raise InputError("no such batch", "here", "take another")

    found = variations(graph, on, base, recapture=refuse, batch=1)
    text = words(page_of(graph, base, variations={on.name: found}))
    assert "batch 2 not predicted: here: no such batch; take another" in text
    none = variations(graph, on, base, recapture=lambda changed: None, batch=1)
    assert {v.group for v in none} == {"Device", "Runtime"}


def test_changes_are_shown_by_sign_and_length() -> None:
    graph, base, on = made(seq_len=16)
    half, double = (replace(base, time_s=base.time_s * factor) for factor in (0.5, 2.0))
    rows = [Variation("Runtime", "half", half), Variation("Runtime", "double", double), Variation("Runtime", "x", base)]
    text = page_of(graph, base, variations={on.name: rows})
    assert "half −50 %" in words(text)
    assert "double +100 %" in words(text)
    assert "x ±0 %" in words(text)
    # the widest, +100 %, takes the right half of the track, −50 % half of the left
    assert '<rect class="fill bad" x="50.00" width="50.00"' in text
    assert '<rect class="fill good" x="25.00" width="25.00"' in text


# --- plots ---


@pytest.fixture(params=["eager", "compiled"], scope="module")
def train(request: pytest.FixtureRequest) -> Made:
    return made("llm:gpt2", seq_len=512, batch=8, train=True, precision="amp", runtime=request.param)


def test_marks_account_for_every_op_that_runs(train: Made) -> None:
    graph, predicted, on = train
    drawn = plots.roofline(graph, predicted, lower(graph, predicted.runtime), on, plots.Texts())
    assert predicted.ops.gap_s is not None
    busy = predicted.ops.time_s - predicted.ops.gap_s
    counted = sum(drawn["counted"]["time"]) + sum(drawn["uncounted"]["time"])
    assert counted + drawn["undrawn"] == pytest.approx(busy.sum(), rel=1e-3)
    assert (drawn["undrawn"] > 0.0) == (predicted.runtime == "compiled")  # joined to others, they move nothing
    assert ("not drawn" in words(page_of(graph, predicted))) == (predicted.runtime == "compiled")
    macs = sum(op.repeat for op in graph.ops if op.macs)
    assert sum(drawn["counted"]["ops"]) == macs


def test_no_mark_lies_above_the_roof(train: Made) -> None:
    graph, predicted, on = train
    drawn = plots.roofline(graph, predicted, lower(graph, predicted.runtime), on, plots.Texts())
    assert drawn["roofs"][0] == {"name": "fp16 tensor", "flops_per_s": 312e12}  # data sheet of the A100
    assert drawn["ridge"] == pytest.approx(312e12 / 2039e9)
    assert 0 < max(drawn["counted"]["y"]) <= 312e12


def test_a_mark_is_where_its_op_is() -> None:
    graph, predicted, on = made("llm:gpt2", seq_len=512, precision="bf16")
    texts = plots.Texts()
    drawn = plots.roofline(graph, predicted, lower(graph), on, texts)["counted"]
    head = max(range(len(graph.ops)), key=lambda i: graph.ops[i].macs * (graph.ops[i].repeat == 1))
    n = drawn["op"].index(head)
    op = graph.ops[head]
    # x 1×512×768 times w 768×50257 in bf16: 2 · 512 · 768 · 50257 FLOP over 2 bytes an element in and out
    flops = 2 * 512 * 768 * 50257
    nbytes = 2 * (512 * 768 + 768 * 50257 + 512 * 50257)
    assert op.flops == flops
    assert drawn["x"][n] == pytest.approx(flops / nbytes, rel=1e-3)
    gap = predicted.ops.gap_s[head]  # type: ignore[index]
    assert drawn["y"][n] == pytest.approx(flops / (predicted.ops.time_s[head] - gap), rel=1e-3)
    assert texts.all()[drawn["module"][n]] == op.module
    assert plots.FAMILIES["matrix products"]
    assert list(plots.FAMILIES)[drawn["family"][n]] == "matrix products"


def test_the_memory_curve_keeps_its_peak(train: Made) -> None:
    graph, predicted, _ = train
    for limit in (10, 50, 5000):
        curve = plots.memory_curve(graph, predicted, plots.Texts(), limit)
        assert curve is not None
        assert len(curve["bytes"]) <= limit
        assert curve["bytes"][curve["peak"]] == max(curve["bytes"]) == predicted.memory.allocated_bytes
        assert curve["time"] == sorted(curve["time"])
        assert curve["end"] == pytest.approx(predicted.time_s)
    assert [p["phase"] for p in curve["phases"]][:2] == ["forward", "backward"]


def test_without_lifetimes_there_is_no_curve(train: Made) -> None:
    graph, predicted, _ = train
    blind = replace(predicted, memory=replace(predicted.memory, timeline_bytes=None))
    assert plots.memory_curve(graph, blind, plots.Texts()) is None
    assert "unknown" not in data_of(page_of(graph, blind))["texts"]


def test_largest_tensors_at_the_peak_are_alive_there(train: Made) -> None:
    graph, predicted, _ = train
    blocks = plots.alive_at_peak(graph, predicted, 5)
    peak = predicted.memory.peak_op
    sizes = sorted(
        (s.nbytes for s in graph.storages if s.born <= peak and (s.dies is None or s.dies >= peak)), reverse=True
    )
    assert [b.nbytes for b in blocks] == sizes[:5]


def test_equal_layers_are_said_to_be_so() -> None:
    graph, predicted, _ = made("llm:llama-3.1-8b", "h100-sxm", precision="bf16", phase="decode", context=128)
    largest = plots.alive_at_peak(graph, predicted, 3)[0]
    # 32 layers of a 14336×4096 matrix in bf16
    assert (largest.shape, largest.nbytes) == ("32 of 14336×4096 bfloat16", 32 * 14336 * 4096 * 2)
    assert "layers.mlp" in largest.module


def test_the_tree_of_modules_adds_up(train: Made) -> None:
    graph, predicted, _ = train
    for limit in (12, 60, 5000):
        tree = plots.icicle(graph, predicted, plots.Texts(), limit)
        assert tree["parent"][0] == -1
        assert tree["time"][0] == pytest.approx(predicted.time_s, rel=1e-4)
        below: dict[int, float] = {}
        for parent, seconds in zip(tree["parent"][1:], tree["time"][1:], strict=True):
            below[parent] = below.get(parent, 0.0) + seconds
        for parent, seconds in below.items():
            assert seconds == pytest.approx(tree["time"][parent], rel=1e-3)
        assert len(tree["name"]) <= 2 * limit
    names = {n for n, p in zip(tree["name"], tree["parent"], strict=True) if p == 0}
    assert len(names) == 3  # forward, backward, optimizer


def test_a_step_of_20000_ops_is_small_and_quick(within: Any) -> None:
    one = foretell.capture("llm:gpt2", seq_len=64, train=True)
    graph = tiled(one, math.ceil(20_000 / len(one.ops)))
    assert len(graph.ops) >= 20_000
    rng = np.random.default_rng(0)
    predicted = estimate(graph, device("a100-sxm4-80gb"))
    noise = rng.uniform(0.5, 2.0, len(graph.ops))  # no two ops on one spot
    ops = predicted.ops
    assert ops.gap_s is not None
    predicted = replace(
        predicted, ops=replace(ops, time_s=ops.time_s * noise, gap_s=ops.gap_s * noise, launch_s=ops.launch_s)
    )
    text = within(2.0, lambda: page_of(graph, predicted, program=lower(graph)))
    assert len(text.encode()) < 3e6
    drawn = data_of(text)["devices"][0]
    assert len(drawn["roofline"]["counted"]["x"]) + len(drawn["roofline"]["uncounted"]["x"]) <= 2400


def test_numbers_are_plain_and_finite() -> None:
    graph, predicted, _ = made(seq_len=16)
    none = np.zeros(len(graph.ops))
    idle = replace(
        predicted,
        time_s=0.0,
        time_interval_s=(0.0, 0.0),
        breakdown_s=dict.fromkeys(predicted.breakdown_s, 0.0),
        ops=OpEstimates(none, none, none, none, np.zeros(len(graph.ops), dtype=np.int8)),
    )
    assert "NaN" not in page_of(graph, idle)


# --- colours ---


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's contrast ratio."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21.0)
    loader = environment().loader
    assert loader is not None
    source = loader.get_source(environment(), "report.css")[0]
    themes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in re.findall(r":root \{.*?\}", source,
                                                                                              re.DOTALL)]
    assert len(themes) == 2
    assert set(themes[0]) == set(themes[1])
    for theme in themes:
        for text in ("text", "quiet", "accent", "good", "bad"):
            for ground in ("ground", "card"):
                assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
        assert contrast(theme["ground"], theme["accent"]) >= 4.5  # the button
        assert contrast(theme["ground"], theme["text"]) >= 4.5  # the tip
        for bound in ("compute", "memory", "launch"):
            assert contrast(theme["on-bar"], theme[bound]) >= 4.5
        for family in range(len(plots.FAMILIES)):
            assert contrast(theme[f"k{family}"], theme["ground"]) >= 3.0  # graphics need less than text
