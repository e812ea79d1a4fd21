"""Running slices: predictions, resuming, interruption, failures, and how they are shown."""

from __future__ import annotations

import json

import numpy as np
import pytest

import foretell
import foretell.accuracy.runner as running
from foretell.accuracy import Source, run, score, slices, to_dict
from foretell.accuracy.measured import Measured, joined
from foretell.accuracy.programs import BATCHES, Programs, Store, at_batch, dump, load
from foretell.cost.model import RUNTIMES, Settings, models
from foretell.cost.program import lower
from foretell.errors import CaptureError, ForetellError, InputError
from foretell.graph import Graph, Storage, Tensor, make_op

NAME = "timm-inference-3090-amp-nchw-pt240"
FILE = slices()[NAME].files[0]
HEADER = "model,infer_img_size,infer_samples_per_sec,infer_step_time,infer_batch_size,param_count\n"


def product(batch: int, width: int = 512) -> Graph:
    """(batch·196, width) × (width, width), then a relu."""
    shapes = [(batch * 196, width), (width, width), (batch * 196, width), (batch * 196, width)]
    tensors = tuple(Tensor(shape, "float16", i) for i, shape in enumerate(shapes))
    ops = (
        make_op("aten.mm.default", tensors, (0, 1), (2,), module="fc"),
        make_op("aten.relu.default", tensors, (2,), (3,), module="act"),
    )
    storages = tuple(Storage(t.nbytes, "temporary") for t in tensors)
    return Graph("made", "inference", "amp", ops, tensors, storages, width**2, 0, {"images": batch}, (0,), (3,))


def programs(workload: str = "timm:made", width: int = 512) -> Programs:
    graphs = [product(batch, width) for batch in BATCHES]
    small, large = ({r: lower(g, r) for r in RUNTIMES} for g in graphs)
    return Programs(
        workload, "made", graphs[0].parameters, {r: Settings.of(graphs[0], r) for r in RUNTIMES}, small, large
    )


@pytest.fixture
def data(tmp_path):
    """Five rows: three good, one whose capture fails, one of another network."""
    folder = tmp_path / "data"
    (folder / FILE).parent.mkdir(parents=True)
    rows = [
        "good_a,224,1,1.0,64,0.26",
        "good_b,224,1,2.0,128,0.26",
        "good_c,224,1,3.0,256,0.26",
        "fails,224,1,1.0,64,0.26",
        "merged,224,1,1.0,64,0.11",
    ]
    (folder / FILE).write_text(HEADER + "\n".join(rows) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def captures(monkeypatch):
    """Counts captures, which give hand-made programs instead of running timm."""
    calls: list[str] = []

    def capture(workload, options):
        calls.append(workload)
        if workload == "timm:fails":
            raise CaptureError("does not run")
        return programs(workload)

    monkeypatch.setattr("foretell.accuracy.programs._capture", capture)
    monkeypatch.setattr("foretell.accuracy.programs._key", lambda workload, options: workload.replace(":", "-"))
    return calls


def test_rows_are_predicted_and_scored(data, captures, tmp_path):
    report = run([NAME], data, cache_dir=tmp_path / "cache")
    (result,) = report.results
    assert result.complete
    assert result.total == 5
    assert result.score.n == 3
    assert result.score.failed == 2
    assert set(result.failures.values()) == {1}
    times = [p.time_s for p in result.predictions if p.time_s]
    assert times[1] > 1.5 * times[0]  # twice the batch
    assert all(p.low_s < p.time_s < p.high_s for p in result.predictions if p.time_s)


def test_a_second_run_captures_and_predicts_nothing_again(data, captures, tmp_path, monkeypatch):
    first = run([NAME], data, cache_dir=tmp_path)
    assert len(captures) == 5
    monkeypatch.setattr(running, "predict", lambda *_: pytest.fail("predicted again"))
    again = run([NAME], data, cache_dir=tmp_path)
    assert len(captures) == 5
    assert again.results[0].score == first.results[0].score
    assert again.results[0].failures == first.results[0].failures


def test_an_interruption_gives_a_partial_report_and_is_resumed(data, captures, tmp_path):
    def stop(progress):
        if progress.done == 2:
            raise KeyboardInterrupt

    report = run([NAME], data, cache_dir=tmp_path, progress=stop)
    assert report.interrupted
    assert not report.results[0].complete
    done = len(captures)
    assert done < 5
    whole = run([NAME], data, cache_dir=tmp_path)
    assert whole.results[0].complete
    assert len(captures) == 5


def test_a_line_cut_short_is_done_anew(data, captures, tmp_path):
    run([NAME], data, cache_dir=tmp_path)
    (kept,) = (tmp_path / "accuracy").iterdir()
    kept.write_text(kept.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    assert run([NAME], data, cache_dir=tmp_path).results[0].score.n == 3


def test_a_limit_takes_the_same_sample_everywhere(data, captures, tmp_path):
    first = run([NAME], data, limit=2, cache_dir=tmp_path / "a")
    second = run([NAME], data, limit=2, cache_dir=tmp_path / "b")
    names = [p.row.workload for p in first.results[0].predictions]
    assert len(names) == 2
    assert names == [p.row.workload for p in second.results[0].predictions]
    with pytest.raises(InputError, match="limit is 0"):
        run([NAME], data, limit=0)


def test_absent_slices_are_listed_and_named_ones_refused(data, captures, tmp_path):
    report = run(None, data, cache_dir=tmp_path)
    assert [r.slice.name for r in report.results] == [NAME]
    assert "timm-inference-5090-amp-nchw-pt291" in report.absent
    with pytest.raises(InputError, match="5090"):
        run(["timm-inference-5090-amp-nchw-pt291"], data)


def test_the_data_is_json_and_agrees(data, captures, tmp_path):
    report = run([NAME], data, cache_dir=tmp_path)
    found = to_dict(report)
    assert json.loads(json.dumps(found)) == found
    (entry,) = found["results"]
    assert entry["slice"] == NAME
    assert entry["score"]["n"] == 3
    assert entry["score"]["median"] == report.results[0].score.median
    assert sum(entry["failures"].values()) == entry["score"]["failed"] == 2


def test_scores_by_hand():
    s = score([1.0, 2.0, 4.0], [1.1, 1.8, 4.0], [1.0, 1.9, 4.1], [2.0, 2.5, 5.0], failed=7)
    assert s.median == pytest.approx(0.1)
    assert s.mean == pytest.approx(0.2 / 3)
    assert s.bias == pytest.approx(0.0)
    assert s.coverage == pytest.approx(2 / 3)
    assert s.width == pytest.approx(2.5 / 1.9)
    assert score([], [], [], []) is None


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_any_batch_lies_on_the_line_through_two(runtime):
    direct = lower(product(40), runtime)
    made = programs().at(40, runtime)
    for name in ("macs", "bytes_read", "bytes_written", "gemm_m", "gemm_n", "elements"):
        assert np.array_equal(getattr(made.table, name), getattr(direct.table, name)), name


def test_programs_of_different_ops_are_refused():
    a, b = lower(product(8)), lower(product(16))
    other = lower(Graph.from_dict(json.loads(product(16).to_json().replace("aten.relu.", "aten.tanh."))))
    assert len(at_batch(a, b, (8, 16), 12)) == 2
    with pytest.raises(ForetellError, match="other operations at batch 8 than at 16"):
        at_batch(a, other, (8, 16), 12)


def test_programs_survive_the_disk():
    made = programs()
    back = load(dump(made))
    for runtime in RUNTIMES:
        a, b = made.at(32, runtime), back.at(32, runtime)
        assert a.names == b.names
        for name in ("macs", "kind", "name", "module", "channels_last"):
            assert np.array_equal(getattr(a.table, name), getattr(b.table, name)), name
        assert np.array_equal(a.kernels, b.kernels)
        assert made.settings == back.settings
    with pytest.raises(CaptureError, match="why"):
        load(dump("why"))


def test_a_damaged_file_is_captured_anew(captures, tmp_path):
    store = Store(tmp_path)
    store.get("timm:good")
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    store.get("timm:good")
    assert len(captures) == 2


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_captured_network_is_affine_in_its_batch(layout):
    """The programs of a real capture, at a third batch, are those of a capture at that batch."""
    pytest.importorskip("timm")
    from foretell.accuracy.programs import _capture
    from foretell.workload.options import options
    from foretell.workload.resolve import resolve

    asked = {"image_size": 64, "precision": "amp", "layout": layout}
    made = _capture("timm:test_resnet", asked)
    direct = resolve("timm:test_resnet", options(batch=20, **asked))
    assert made.family == "resnet"
    assert made.parameters == direct.parameters
    for runtime in RUNTIMES:
        a, b = made.at(20, runtime), lower(direct, runtime)
        for name in ("name", "macs", "bytes_read", "bytes_written", "gemm_m", "channels_last", "elements"):
            assert np.array_equal(getattr(a.table, name), getattr(b.table, name)), name
        assert np.array_equal(a.kernels, b.kernels)


def test_fast_norm_keeps_layer_norm_in_half_precision():
    pytest.importorskip("timm")
    from foretell.accuracy.programs import _capture
    from foretell.graph import DTYPES

    def norm_dtypes(**extra) -> set[str]:
        made = _capture("timm:test_vit", {"image_size": 160, "precision": "amp", **extra})
        table = made.small["eager"].table
        return {DTYPES[table.dtype[i]] for i, n in enumerate(table.name) if "layer_norm" in n}

    assert norm_dtypes(fast_norm=True) == {"float16"}
    assert norm_dtypes() == {"float32"}


def test_fused_attention_can_be_switched_off():
    pytest.importorskip("timm")
    from foretell.accuracy.programs import _capture

    def kinds(**extra) -> set[str]:
        made = _capture("timm:test_vit", {"image_size": 160, "precision": "amp", **extra})
        return {kind for _, kind in made.small["eager"].names}

    assert "attention" in kinds()
    without = kinds(fused_attn=False)
    assert "attention" not in without
    assert {"batched_matmul", "softmax"} & without


def test_families_are_the_modules_that_define_the_models():
    pytest.importorskip("timm")
    from foretell.accuracy.programs import family_of

    assert family_of("timm:resnet50") == "resnet"
    assert family_of("timm:tv_densenet121") == "densenet"  # a name that timm has renamed
    assert family_of("py:x.py:make") == "py:x.py:make"


def test_predicting_from_kept_programs_is_fast(captures, data, tmp_path, within):
    run([NAME], data, cache_dir=tmp_path)
    within(1.0, lambda: run([NAME], data, cache_dir=tmp_path))


@pytest.mark.parametrize("content", [None, b"\x1f\x8b\x08\x00cut short", b"no gzip at all"])
def test_a_source_without_readable_tables_is_named(tmp_path, content):
    folder = tmp_path / "help-nas"
    folder.mkdir()
    if content is not None:
        (folder / "fbnet_gpu_latency_ms.csv.gz").write_bytes(content)
    with pytest.raises(InputError, match="help-nas"):
        run(["help-nas"], tmp_path, cache_dir=tmp_path / "cache")


def test_a_limit_samples_tables_without_captures_too(tmp_path, monkeypatch):
    parts = [lower(foretell.capture("llm:gpt2", seq_len=8 * (n + 1))) for n in range(6)]
    program, starts = joined(parts, "eager")
    group = np.array(["g"] * 6, dtype=object)
    label = tuple(f"m{n}" for n in range(6))
    seconds = np.arange(1.0, 7.0)
    whole = Measured("x", foretell.device("t4"), Settings(), program, starts, seconds, group, "step", "f", label)
    assert whole.sample(6) is whole
    some = whole.sample(3)
    assert set(whole.sample(2).label) < set(some.label)
    at = [whole.label.index(name) for name in some.label]
    model = models()["roofline"]
    np.testing.assert_allclose(some.times(model), whole.times(model)[at])
    np.testing.assert_array_equal(some.measured_s, seconds[at])
    source = Source("mine", "mine", lambda data: [whole], "about")
    monkeypatch.setattr(running, "sources", lambda: {"mine": source})
    (tmp_path / "mine").mkdir()
    (result,) = run(["mine"], tmp_path, limit=2, model="roofline").results
    assert (result.total, result.score.n) == (2, 2)
