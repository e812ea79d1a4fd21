from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cost.estimate import Estimate, Memory
from foretell.hardware.device import Device
from foretell.report import card

GIB = 2**30
Make = Callable[..., Estimate]
MakeMemory = Callable[..., Memory]
Printed = Callable[..., str]


def line(text: str, start: str) -> str:
    """The first line that begins with `start`, its runs of spaces made one."""
    return next(" ".join(row.split()) for row in text.splitlines() if row.strip().startswith(start))


def test_every_figure_is_on_the_card(estimate: Make, printed: Printed) -> None:
    text = printed(card(estimate(), settings=("batch 64",), largest_batch=900))
    assert text.startswith("timm:resnet50 · inference on a100-sxm4-80gb\n")
    assert line(text, "Settings") == "Settings batch 64 · fp32 · eager"
    assert line(text, "Time") == "Time 20 ms per step · a step is 64 images"
    assert "80 % interval 16 ms to 28 ms; provisional" in text
    assert line(text, "Throughput") == "Throughput 3,200 images/s"  # 64 / 20 ms
    assert line(text, "Bound by") == "Bound by compute, for 60 % of the time"
    assert line(text, "compute").endswith("60 % 12 ms")
    assert line(text, "memory ").endswith("35 % 7 ms")
    assert line(text, "launch").endswith("5.0 % 1 ms")
    assert line(text, "Work") == "Work 523 GFLOP · 262 GMAC · 25.6 M parameters · MFU 12 %"
    assert line(text, "Memory").startswith("Memory 6 GiB of 80 GiB ━")
    assert line(text, "Memory").endswith("7.5 % fits")
    assert "largest batch that fits: 900" in text
    assert line(text, "activations") == "activations 3 GiB · parameters 1 GiB · framework 1 GiB"
    assert line(text, "allocated") == "allocated 4 GiB · reserved 5 GiB · nvidia-smi 6 GiB"
    assert line(text, "Energy") == "Energy 6.4 J per step · 100 mJ per image · 320 W on average"  # 6.4 / 64, / 20 ms
    assert line(text, "Cost") == "Cost $0.000019 per step · $0.30 per million images"  # 0.0000192 / 64 · 10⁶
    assert text.rstrip().endswith("a100-sxm4-80gb · roofline model")


def test_nvidia_smi_is_named_only_where_the_framework_is_known(
    estimate: Make, memory: MakeMemory, printed: Printed
) -> None:
    text = printed(card(estimate(memory=memory(peak_bytes=5 * GIB, breakdown={"parameters": 5 * GIB}))))
    assert line(text, "allocated") == "allocated 4 GiB · reserved 5 GiB"
    assert "what the framework itself holds there is not known" in text
    assert "framework itself" not in printed(card(estimate()))


def test_equal_throughputs_are_said_once(estimate: Make, printed: Printed) -> None:
    text = printed(card(estimate(items={"tokens": 64, "sequences": 64})))
    assert line(text, "Throughput") == "Throughput 3,200 tokens/s"
    assert "64 tokens, 64 sequences" in text
    two = printed(card(estimate(items={"sequences": 64, "tokens": 128})))
    assert line(two, "Throughput") == "Throughput 3,200 sequences/s · 6,400 tokens/s"


def test_a_launch_bound_step_is_told_of_the_compiler(estimate: Make, printed: Printed) -> None:
    parts = {"compute": 2e-3, "memory": 3e-3, "launch": 15e-3}
    assert "--runtime compiled launches fewer kernels" in printed(card(estimate(breakdown_s=parts)))
    assert "--runtime" not in printed(card(estimate(breakdown_s=parts, runtime="compiled")))
    assert "--runtime" not in printed(card(estimate()))


def test_five_dearest_modules_with_their_shares(estimate: Make, printed: Printed) -> None:
    text = printed(card(estimate()))
    assert line(text, "Dearest").startswith("Dearest layer1.0.conv1")
    assert line(text, "Dearest").endswith("25 % 5 ms")
    assert line(text, "layer4.0.conv3").endswith("5.0 % 1 ms")
    assert "fc" not in text  # the sixth


def test_ops_outside_any_module_are_named(estimate: Make, printed: Printed) -> None:
    assert line(printed(card(estimate(modules=(("", 5e-3),)))), "Dearest").startswith("Dearest outside modules ━━━·")


def test_a_long_module_path_keeps_its_end(estimate: Make, printed: Printed) -> None:
    text = printed(card(estimate(modules=(("model.language_model.layers.31.self_attn.q_proj", 1e-3),))))
    assert "layers.31.self_attn.q_proj" in text


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("terminal", [False, True])
def test_the_card_keeps_its_width(estimate: Make, width: int, terminal: bool, printed: Printed) -> None:
    notes = ("a note that is long enough to need a second line on any console that people use " * 2,)
    text = printed(card(estimate(notes=notes), settings=("input 64×3×224×224 float32",)), width, terminal)
    lengths = {len(row) for row in text.splitlines()}
    assert max(lengths) <= min(width, 100)
    if terminal:
        assert lengths == {min(width, 100)}


def test_piped_output_is_plain(estimate: Make, printed: Printed) -> None:
    text = printed(card(estimate(), settings=("batch 64",)), 160)
    assert not set(text) & set("\x1b╭╮╰╯│")


def test_what_does_not_fit_says_so_without_colour(estimate: Make, memory: MakeMemory, printed: Printed) -> None:
    text = printed(card(estimate(memory=memory(peak_bytes=90 * GIB)), largest_batch=0))
    assert line(text, "Memory").endswith("▶ 112 % DOES NOT FIT")
    assert "no batch fits" in text


def test_unknown_figures_are_called_unknown(estimate: Make, memory: MakeMemory, printed: Printed) -> None:
    blank = estimate(mfu=None, energy_j=None, cost_usd=None, memory=memory(capacity_bytes=None))
    text = printed(card(blank))
    assert "MFU unknown" in text
    assert "Energy unknown" in " ".join(line(text, "Energy").split())
    assert line(text, "Cost").startswith("Cost unknown")
    assert "6 GiB; the device's capacity is unknown" in text
    assert "fits" not in line(text, "Memory").replace("whether it fits", "")


def test_notes_and_what_was_not_counted(estimate: Make, printed: Printed) -> None:
    text = printed(card(estimate(notes=("First.", "Second."), not_counted={"aten.foo.default": 2, "data loading": 0})))
    assert line(text, "Notes") == "Notes First."
    assert line(text, "Second") == "Second."
    assert line(text, "Not counted") == "Not counted arithmetic of aten.foo.default ×2; data loading"
    assert "Notes" not in printed(card(estimate()))
    assert "Not counted" not in printed(card(estimate()))


def test_the_device_gives_title_and_price(estimate: Make, printed: Printed) -> None:
    device = Device("a100-sxm4-80gb", "NVIDIA A100-SXM4-80GB", "NVIDIA", "gpu", "Ampere", price_usd_per_h=3.456)
    text = printed(card(estimate(), device=device))
    assert text.startswith("timm:resnet50 · inference on NVIDIA A100-SXM4-80GB\n")
    assert line(text, "Cost").endswith("at $3.46 an hour")


def test_sequences_and_tokens(estimate: Make, printed: Printed) -> None:
    text = printed(card(estimate(items={"sequences": 1, "tokens": 4096})))
    assert "a step is 1 sequence, 4,096 tokens" in text
    assert line(text, "Throughput") == "Throughput 50 sequences/s · 204,800 tokens/s"


def test_occupancy_is_shown_once_known(estimate: Make, printed: Printed) -> None:
    assert "occupancy" not in printed(card(estimate()))
    assert "occupancy 42 %" in printed(card(estimate(occupancy=0.42)))


def test_names_are_not_read_as_markup(estimate: Make, printed: Printed) -> None:
    strange = estimate(workload="py:[bold]x.py", modules=(("blocks[red].conv", 1e-3),), notes=("[link]n",))
    text = printed(card(strange))
    assert "py:[bold]x.py" in text
    assert "blocks[red].conv" in text
    assert "[link]n" in text


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1e4), st.floats(0, 1), st.floats(0, 1))
def test_any_figures_can_be_printed(estimate: Make, printed: Printed, time_s: float, a: float, b: float) -> None:
    parts = {"compute": time_s * a, "memory": time_s * (1 - a) * b, "launch": time_s * (1 - a) * (1 - b)}
    assert "per step" in printed(card(estimate(time_s=time_s, breakdown_s=parts)))
