"""The rules of network design against brute force, published tables and other libraries."""

import itertools
import math
import random

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from foretell.errors import InfeasibleError, InputError
from foretell.workload import zoo
from foretell.workload.zoo import design, regnet
from foretell.workload.zoo.design import Scaling, compound
from foretell.workload.zoo.efficientnet import (
    RELEASED,
    EfficientNet,
    image_size,
    released,
    scaled_mobilenet_v2,
    scaled_resnet50,
)


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def macs(module: nn.Module, *size: int) -> float:
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(torch.empty(1, 3, *size))
    return counter.get_total_flops() / 2


# --- memory traffic ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [1, 3])
def test_equal_widths_move_least(kernel: int) -> None:
    product = 4096  # inputs · outputs, so that all have the same multiply-adds
    costs = {w: design.memory_access_cost(28 * 28, w, product // w, kernel) for w in (1 << i for i in range(13))}
    assert min(costs, key=lambda w: costs[w]) == 64
    least = design.least_memory_access_cost(28 * 28, product * kernel**2 * 28 * 28, kernel)
    assert costs[64] == pytest.approx(least)
    assert all(cost >= least * (1 - 1e-12) for cost in costs.values())


def test_aggregation_reads_what_its_modules_do() -> None:
    from foretell.workload.zoo.vovnet import OneShotAggregation

    block = OneShotAggregation(64, 32, 100, depth=6)
    read = sum(m.in_channels for m in block.modules() if isinstance(m, nn.Conv2d))
    assert read == design.one_shot_reads(64, 32, 6) < design.dense_reads(64, 32, 6) == 864


def test_a_balanced_group_takes_arithmetic_as_long_as_movement() -> None:
    for ridge, side in itertools.product((3.0, 12.7, 60.0), (14, 56, 112)):
        width = design.balanced_group_width(ridge, side**2)
        if math.isinf(width):
            assert 4 * ridge >= 2 * side**2
        else:
            assert 2 * 9 * width / (4 * (2 + 9 * width / side**2)) == pytest.approx(ridge)
    assert design.group_convolution_intensity(56**2, 8) == pytest.approx(
        2 * 128 * 8 * 9 * 56**2 / (4 * (2 * 128 * 56**2 + 128 * 8 * 9))  # 128 channels, counted out
    )


# --- RegNet ------------------------------------------------------------------------------------------------------

# Figures 15 and 16 of Radosavovic et al., CVPR 2020, and pycls's model zoo: stage depths, stage widths, then GMAC,
# parameters (M) and activations (M) as printed.
TABLES = {
    "x-200mf": ((1, 1, 4, 7), (24, 56, 152, 368), 0.2, 2.7, 2.2),
    "x-400mf": ((1, 2, 7, 12), (32, 64, 160, 384), 0.4, 5.2, 3.1),
    "x-600mf": ((1, 3, 5, 7), (48, 96, 240, 528), 0.6, 6.2, 4.0),
    "x-800mf": ((1, 3, 7, 5), (64, 128, 288, 672), 0.8, 7.3, 5.1),
    "x-1.6gf": ((2, 4, 10, 2), (72, 168, 408, 912), 1.6, 9.2, 7.9),
    "x-3.2gf": ((2, 6, 15, 2), (96, 192, 432, 1008), 3.2, 15.3, 11.4),
    "x-4.0gf": ((2, 5, 14, 2), (80, 240, 560, 1360), 4.0, 22.1, 12.2),
    "x-6.4gf": ((2, 4, 10, 1), (168, 392, 784, 1624), 6.5, 26.2, 16.4),
    "x-8.0gf": ((2, 5, 15, 1), (80, 240, 720, 1920), 8.0, 39.6, 14.1),
    "x-12gf": ((2, 5, 11, 1), (224, 448, 896, 2240), 12.1, 46.1, 21.4),
    "x-16gf": ((2, 6, 13, 1), (256, 512, 896, 2048), 15.9, 54.3, 25.5),
    "x-32gf": ((2, 7, 13, 1), (336, 672, 1344, 2520), 31.7, 107.8, 36.3),
    "y-400mf": ((1, 3, 6, 6), (48, 104, 208, 440), 0.4, 4.3, 3.9),
    "y-4.0gf": ((2, 6, 12, 2), (128, 192, 512, 1088), 4.0, 20.6, 12.3),
    "y-32gf": ((2, 5, 12, 1), (232, 696, 1392, 3712), 32.3, 145.0, 30.3),
}


@pytest.mark.parametrize("name", TABLES)
def test_regnet_parameters_give_the_published_stages_and_counts(name: str) -> None:
    depths, widths, published_macs, published_parameters, activations = TABLES[name]
    chosen = regnet.PUBLISHED[name]
    stages = chosen.stages()
    assert tuple(s.depth for s in stages) == depths
    assert tuple(s.width for s in stages) == widths
    with torch.device("meta"):
        network = regnet.regnet(chosen)
    assert parameters(network) / 1e6 == pytest.approx(published_parameters, abs=0.051)
    assert macs(network, 224, 224) / 1e9 == pytest.approx(published_macs, abs=0.051)
    counted = regnet.counts(stages)
    # Those of RegNetY include the two small outputs of squeeze and excitation, which `counts` leaves out.
    assert counted.activations / 1e6 == pytest.approx(activations, abs=0.051 if not chosen.squeeze else 0.07)
    if not chosen.squeeze:
        assert counted.parameters == parameters(network)
        assert counted.macs == macs(network, 224, 224)


@pytest.mark.parametrize("name", regnet.PUBLISHED)
def test_regnet_has_timms_widths(name: str) -> None:
    timm_regnet = pytest.importorskip("timm.models.regnet")
    sizes = ("200mf", "400mf", "600mf", "800mf", "1.6gf", "3.2gf", "4.0gf", "6.4gf", "8.0gf", "12gf", "16gf", "32gf")
    numbers = ("002", "004", "006", "008", "016", "032", "040", "064", "080", "120", "160", "320")
    theirs = timm_regnet.model_cfgs[f"regnet{name[0]}_{dict(zip(sizes, numbers, strict=True))[name[2:]]}"]
    ours = regnet.PUBLISHED[name]
    assert (ours.depth, ours.w0, ours.wa, ours.wm) == (theirs.depth, theirs.w0, theirs.wa, theirs.wm)
    widths = timm_regnet.generate_regnet(ours.wa, ours.w0, ours.wm, ours.depth, ours.group_width)[0]
    assert design.quantised_linear(ours.depth, ours.w0, ours.wa, ours.wm) == tuple(widths)


@pytest.mark.parametrize("name", ["x-400mf", "y-800mf"])
def test_regnet_has_as_many_parameters_as_timms(name: str) -> None:
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        theirs = timm.create_model({"x-400mf": "regnetx_004", "y-800mf": "regnety_008"}[name])
        assert parameters(regnet.regnet(regnet.PUBLISHED[name])) == parameters(theirs)


def test_stage_widths_hold_whole_groups_for_any_bottleneck() -> None:
    for width, group, ratio in itertools.product((8, 24, 56, 152, 368, 1000), (1, 8, 24, 32), (1.0, 2.0, 4.0)):
        moved, fitted = design.compatible_widths(width, group, ratio)
        inner = moved / ratio
        assert inner == int(inner)
        assert int(inner) % fitted == 0
        assert abs(moved - width) <= max(group * ratio, ratio)
    with pytest.raises(InputError, match="multiple of 8"):
        regnet.RegNetParameters(13, 23, 36.44, 2.49, 8)


@pytest.mark.parametrize("name", regnet.SPACES)
def test_a_design_space_draws_members_that_keep_its_rules(name: str) -> None:
    low, high = 100e6, 400e6
    members = regnet.SPACES[name].sample(12, seed=3, macs=(low, high))
    assert len(set(members)) > 6
    assert members == regnet.SPACES[name].sample(12, seed=3, macs=(low, high))
    rules = {
        "anynetx-b": lambda s: len({x.bottleneck for x in s}) == 1,
        "anynetx-d": lambda s: [x.width for x in s] == sorted(x.width for x in s),
        "anynetx-e": lambda s: [x.depth for x in s] == sorted(x.depth for x in s),
        "regnetx": lambda s: [x.width for x in s] == sorted(x.width for x in s) and len(s) == 4,
    }
    for member in members:
        assert low <= regnet.counts(member).macs <= high
        assert rules.get(name, lambda s: True)(member)
    with torch.device("meta"):
        network = regnet.AnyNet(members[0])
    assert macs(network, 224, 224) == regnet.counts(members[0]).macs
    assert parameters(network) == regnet.counts(members[0]).parameters


def test_a_space_without_such_members_says_so() -> None:
    with pytest.raises(InfeasibleError, match="gave 0 of 3 networks"):
        regnet.SPACES["anynetx-a"].sample(3, macs=(1e15, 2e15), tries=50)


def test_edf_is_the_share_below() -> None:
    chance = random.Random(0)
    values = [chance.random() for _ in range(101)]
    at = [0.0, 0.3, values[7], 1.0]
    assert regnet.edf(values, at) == tuple(sum(v < t for v in values) / 101 for t in at)
    with pytest.raises(InputError, match="empty population"):
        regnet.edf([], [1.0])


# --- compound scaling --------------------------------------------------------------------------------------------

# Tan and Le, ICML 2019, table 2: parameters (M) and "FLOPS" (G multiply-adds), as printed.
TABLE_2 = {
    "b0": (5.3, 0.39),
    "b1": (7.8, 0.70),
    "b2": (9.2, 1.0),
    "b3": (12, 1.8),
    "b4": (19, 4.2),
    "b5": (30, 9.9),
    "b6": (43, 19),
    "b7": (66, 37),
}


@pytest.mark.parametrize("name", RELEASED)
def test_scaled_efficientnets_are_the_published_ones(name: str) -> None:
    timm = pytest.importorskip("timm")
    scaling, size = released(name)
    with torch.device("meta"):
        ours, theirs = EfficientNet(scaling), timm.create_model(f"efficientnet_{name}")
    assert parameters(ours) == parameters(theirs)
    published_parameters, published_macs = TABLE_2[name]
    assert parameters(ours) / 1e6 == pytest.approx(published_parameters, rel=0.02)
    # The paper's figures are up to 5 % less than the convolutions' own from B4 on.
    assert macs(ours, size, size) / 1e9 == pytest.approx(published_macs, rel=0.05)


def test_released_factors_follow_the_formula_at_first() -> None:
    for phi, name in ((1, "b2"), (2, "b3")):
        scaling, size = released(name)
        formula = compound(phi)
        assert (scaling.width, scaling.depth) == pytest.approx((formula.width, formula.depth), abs=0.05)
        assert image_size(formula) == pytest.approx(size, abs=5)


@pytest.mark.parametrize("build", [scaled_resnet50, scaled_mobilenet_v2])
def test_compound_scaling_of_other_networks_multiplies_their_work(build) -> None:
    pytest.importorskip("timm")
    counted = []
    for phi in (0, 2):
        scaling = compound(phi)
        with torch.device("meta"):
            network = build(scaling)
        counted.append(macs(network, image_size(scaling), image_size(scaling)))
    # 1.92² before channels, layers and pixels are rounded, the layers always up.
    assert 0.95 * compound(2).macs < counted[1] / counted[0] < 1.4 * compound(2).macs


def test_unscaled_networks_are_the_originals() -> None:
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        for ours, theirs in ((scaled_resnet50, "resnet50"), (scaled_mobilenet_v2, "mobilenet_v2")):
            assert parameters(ours(Scaling())) == parameters(torchvision.models.get_model(theirs))


def test_the_grid_search_finds_the_best_constants_within_budget() -> None:
    # A score whose best on the surface alpha · beta² · gamma² = 2 is at the paper's constants.
    wanted = (1.2, 1.1, 1.15)
    found = design.compound_constants(
        lambda s: -abs(s.depth - wanted[0]) - abs(s.width - wanted[1]) - abs(s.resolution - wanted[2])
    )
    assert found == pytest.approx(wanted)
    tried: list[Scaling] = []
    design.compound_constants(lambda s: float(tried.append(s) or 0))
    assert all(1.9 <= s.macs <= 2.1 + 1e-9 for s in tried)
    assert any(s.depth > 1.9 for s in tried), "depth alone is among the candidates"


def test_rules_need_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, foretell.workload.zoo.design; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_vovnets_are_timms_without_attention() -> None:
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        for ours, theirs in (("vovnet39", "vovnet39a"), ("vovnet57", "vovnet57a")):
            assert parameters(zoo.build(ours)) == parameters(timm.create_model(theirs))
