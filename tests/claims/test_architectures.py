"""What the claims about architectures share."""

import pytest

from foretell.claims import Source, claims
from foretell.claims.architectures import (
    counts,
    estimate,
    faster,
    fewer,
    less_energy,
    macs,
    measured_faster,
    parameters,
    ratio_of_speeds,
    timm_model,
)

SYSTEMS = (
    "regnet",
    "efficientnet",
    "vovnet",
    "linknet",
    "lowformer",
    "efficientmod",
    "wavemix",
    "ghost-sr",
    "e2gc",
    "genet",
    "tresnet",
    "efficientvit",
)
# What their abstracts claim in numbers, whatever came of it.
HEADLINES = (
    ("regnet", "up to 5×"),
    ("efficientnet", "8.4×", "6.1×", "84.3 %", "91.7 %", "98.8 %"),
    ("vovnet", "2× faster", "1.6× to 4.1×"),
    ("linknet", "11.5 M", "21.2 GFLOPs"),
    ("efficientmod", "25 %", "0.6", "2.9", "+3.6"),
    ("ghost-sr", "46 % fewer", "42 % less"),
    ("e2gc", "10.8 %", "4.73 %"),
    ("genet", "6.4×", "81.3 %"),
    ("tresnet", "80.8 %", "96.0 %", "99.0 %", "91.5 %", "99.1 %"),
    ("efficientvit", "40.4 %", "45.2 %", "5.8×", "3.7×", "7.4×"),
)


@pytest.mark.parametrize(("system", "words"), [(s, w) for s, *w in HEADLINES], ids=[h[0] for h in HEADLINES])
def test_the_abstracts_figures_are_in_the_ledger(system: str, words: list[str]) -> None:
    texts = " ".join(f"{c.title} {c.claimed.text}" for c in claims(system))
    assert [word for word in words if word not in texts] == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_architecture_has_tried_claims_and_says_what_it_did_not_try(system: str) -> None:
    found = claims(system)
    assert sum(claim.how != "not tried" for claim in found) >= 2
    assert any(claim.how == "not tried" for claim in found)
    # A verdict that is not a clean one says why.
    unexplained = [c.id for c in found if c.verdict == "not reproduced" and not c.note]
    assert unexplained == []


def test_a_workloads_own_settings_win() -> None:
    large = estimate(("zoo:vovnet27_slim", {"image_size": 128}), "v100-sxm2-16gb", image_size=64, batch=2)
    small = estimate("zoo:vovnet27_slim", "v100-sxm2-16gb", image_size=64, batch=2)
    assert large.flops > 3 * small.flops
    assert large.items == small.items == {"images": 2}


def test_gains_are_of_the_first_over_the_second() -> None:
    pair = (("zoo:vovnet27_slim", {"image_size": 64}), ("zoo:vovnet39", {"image_size": 64}))
    gain = faster(*pair, "v100-sxm2-16gb", batch=64)
    a, b = (estimate(w, "v100-sxm2-16gb", batch=64) for w in pair)
    assert gain.value == pytest.approx(b.time_s / a.time_s - 1)
    assert gain.value > 0
    assert ratio_of_speeds(*pair, "v100-sxm2-16gb", batch=64).value == pytest.approx(1 + gain.value)
    assert less_energy(*pair, "v100-sxm2-16gb", batch=64).value == pytest.approx(b.energy_j / a.energy_j - 1)
    saved = fewer(parameters, "zoo:vovnet27_slim", "zoo:vovnet39")
    slim, full = (parameters(w).value for w in ("zoo:vovnet27_slim", "zoo:vovnet39"))
    assert saved.value == pytest.approx(1 - slim / full)
    assert macs("zoo:vovnet27_slim", 64, flops=2).value == 2 * macs("zoo:vovnet27_slim", 64).value


def test_counts_makes_a_claim_for_each_published_figure() -> None:
    made = counts(
        "system",
        Source("A paper", 2020, "A venue", "table 1"),
        {"zoo:vovnet39": ("VoVNet-39", 22.6e6, None), "zoo:vovnet57": ("VoVNet-57", None, 8.9e9)},
        image_sizes={"zoo:vovnet57": 32},
        cheap=("zoo:vovnet39",),
    )
    assert [claim.id for claim in made] == ["system/parameters-vovnet39", "system/macs-vovnet57"]
    assert [claim.cheap for claim in made] == [True, False]
    assert made[0].run is not None
    assert made[1].run is not None
    assert made[0].rule.judge(made[0].claimed.value, made[0].run().value) == "reproduced"
    assert made[1].run().value < 0.05 * 8.9e9  # at 32×32


def test_measuring_leaves_the_threads_as_they_were() -> None:
    import torch
    from torch import nn

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        gain = measured_faster(lambda: nn.Conv2d(3, 4, 3), lambda: nn.Conv2d(3, 512, 9), (32, 32), repeats=3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert gain.value > 0
    assert gain.details["ours_s"] < gain.details["theirs_s"]


def test_folding_leaves_no_batch_norm() -> None:
    pytest.importorskip("timm")
    import torch
    from torch import nn

    with torch.device("meta"):
        for name in ("efficientvit_m0", "mobilenetv3_small_050"):
            assert any(isinstance(m, nn.BatchNorm2d) for m in timm_model(name)().modules())
            folded = timm_model(name, folded=True)()
            assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
            assert folded(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
