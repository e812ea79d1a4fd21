from collections.abc import Callable
from dataclasses import replace

import numpy as np

from foretell.cost.estimate import Estimate, OpEstimates
from foretell.graph import Graph
from foretell.report import dearest_ops, graph_settings, graph_summary, op_table
from foretell.report.graphs import short_name
from foretell.workload.options import Options

Make = Callable[..., Estimate]
Printed = Callable[..., str]


def squeezed(text: str) -> list[str]:
    return [" ".join(row.split()) for row in text.splitlines()]


def test_the_summary_counts_what_the_graph_does(graph: Graph, printed: Printed) -> None:
    rows = squeezed(printed(graph_summary(graph, settings=graph_settings(graph)), 100))
    assert rows[0] == "py:mlp.py:make · train"
    assert "Settings input 4×8 float32 · fp32" in rows
    assert "Step 4 samples · 6 ops" in rows  # relu runs three times
    assert "Parameters 128 · 512 B" in rows  # 16 × 8 in fp32
    # forward 4·8·16 = 512 multiply-adds, backward as many
    assert "Arithmetic 2.05 kFLOP · 1,024 multiply-adds" in rows
    assert "forward 1.02 kFLOP · backward 1.02 kFLOP · optimizer 0 FLOP" in rows
    # elements of 4 bytes: matmul 32 + 128 + 64 and 32 + 64 + 128, relu 3 · (64 + 64), the other 128 + 128: 1,088
    assert "By kind kind ops arithmetic traffic of all traffic" in rows
    assert "matmul 2 2.05 kFLOP 1.75 KiB ━━━━━━········" in rows  # 448 / 1,088 of 14 cells
    assert "pointwise 3 1.5 KiB ━━━━━·········" in rows  # 384 / 1,088
    assert "Not counted arithmetic of mine.strange.default ×1" in rows


def test_nothing_left_out_is_not_mentioned(graph: Graph, printed: Printed) -> None:
    clean = replace(graph, ops=tuple(op for op in graph.ops if op.counted))
    assert "Not counted" not in printed(graph_summary(clean))


def test_normalisation_is_counted_apart(graph: Graph, printed: Printed) -> None:
    assert "fvcore" not in printed(graph_summary(graph))
    normed = replace(graph, ops=(replace(graph.ops[0], norm_macs=7), *graph.ops[1:]))
    assert "1,031 multiply-adds with normalisation, as fvcore counts" in printed(graph_summary(normed))


def test_every_op_has_its_row(graph: Graph, printed: Printed) -> None:
    rows = squeezed(printed(op_table(graph), 120))
    assert rows[0] == "# op phase writes FLOP bytes module"
    assert rows[1] == "0 mm forward 4×16 float32 1.02 k 896 B fc"  # reads 4×8 and 8×16, writes 4×16, 4 bytes each
    assert rows[2] == "1 relu ×3 forward 4×16 float32 1.5 KiB act"  # 3 × (256 + 256) B
    assert rows[4] == "3 mine.strange optimizer 8×16 float32 ? 1 KiB"
    assert len([row for row in rows if row]) == 1 + len(graph.ops)


def test_a_forward_pass_needs_no_phase_column(graph: Graph, printed: Printed) -> None:
    forward = replace(graph, ops=graph.ops[:2])
    assert squeezed(printed(op_table(forward), 120))[0] == "# op writes FLOP bytes module"


def test_the_dearest_ops_come_first(graph: Graph, estimate: Make, printed: Printed) -> None:
    times = np.array([1e-3, 4e-3, 3e-3, 2e-3])
    zero = np.zeros(4)
    columns = OpEstimates(times, times, zero, zero, np.array([0, 1, 2, 1], dtype=np.int8))
    rows = squeezed(printed(dearest_ops(graph, estimate(ops=columns, time_s=10e-3), limit=2), 120))
    assert rows[2] == "# op phase time share bound by module"
    assert rows[3] == "1 relu ×3 forward 4 ms 40 % memory act"
    assert rows[4] == "2 mm backward 3 ms 30 % launch fc"
    assert rows[6] == "the 2 dearest of 4 ops; explain one with --op #"


def test_the_table_fits_80_columns(graph: Graph, printed: Printed) -> None:
    deep = replace(graph, ops=tuple(replace(op, module="model.layers.11.block." * 5 + "fc") for op in graph.ops))
    text = printed(op_table(deep), 80)
    assert max(len(row.rstrip()) for row in text.splitlines()) <= 80
    assert "block.fc" in text  # the end of the path is what tells modules apart


def test_what_is_cut_says_so_at_80_columns(graph: Graph, printed: Printed) -> None:
    module = "layer1.0.conv1"
    wide = replace(graph.tensors[5], shape=(128, 2048, 112, 112))
    ops = tuple(replace(op, module=module, name="aten.native_batch_norm_backward.default") for op in graph.ops)
    many = replace(graph, ops=ops * 30, tensors=(*graph.tensors[:5], wide))
    rows = printed(op_table(many), 80).splitlines()
    assert max(len(row.rstrip()) for row in rows) <= 80
    assert all(row.rstrip().endswith(module) for row in rows[1:] if row)
    assert "…" in rows[3]  # of the op's name, whose end is kept
    assert "backward" in rows[3]
    deep = replace(many, ops=tuple(replace(op, module="stages.3.blocks.1." + module) for op in ops))
    last = printed(op_table(deep), 80).splitlines()[1].rstrip().split()[-1]
    assert last.startswith("…")
    assert last.endswith("conv1")


def test_inputs_beyond_the_third_are_counted(graph: Graph) -> None:
    assert graph_settings(replace(graph, inputs=(0, 1, 2, 3))) == (
        "input 4×8 float32",
        "input 8×16 float32",
        "input 4×16 float32",
        "1 input more",
    )


def test_settings_say_how_it_was_captured(graph: Graph) -> None:
    plain = graph_settings(graph)
    assert graph_settings(graph, Options()) == plain
    assert graph_settings(graph, Options(phase="train", optimizer="adamw", accumulate=2, checkpointing=True)) == (
        *plain,
        "adamw",
        "2 micro-batches",
        "checkpointing",
    )
    assert graph_settings(graph, Options(phase="decode", context=4096))[-1] == "4,096 tokens cached"


def test_short_names_keep_what_tells() -> None:
    assert short_name("aten.mm.default") == "mm"
    assert short_name("aten.add_.Tensor") == "add_.Tensor"
    assert short_name("foretell.sdpa.default") == "foretell.sdpa"
