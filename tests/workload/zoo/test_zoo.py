"""The zoo against what its papers publish.

Parameters are counted from the modules, multiply-adds by torch's own FLOP counter and convolutional traffic by hooks:
none of it goes through this package's capture or rules.
"""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from foretell.errors import ForetellError, UnknownNameError
from foretell.workload import zoo
from foretell.workload.zoo import registry
from foretell.workload.zoo.hardnet import HarmonicDenseBlock, conv_norm, harmonic_links, harmonic_width


def on_meta(name: str) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return zoo.build(name).eval(), torch.empty(1, 3, *zoo.input_size(name))


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def macs_and_traffic(module: nn.Module, x: torch.Tensor, strided_depthwise: bool = True) -> tuple[float, int]:
    """Multiply-adds of a run, and elements in and out of every convolution (perhaps but for strided depthwise ones)."""
    total = 0

    def add(conv: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal total
        if strided_depthwise or conv.groups == 1 or conv.stride[0] == 1:
            total += inputs[0].numel() + output.numel()

    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            layer.register_forward_hook(add)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x)
    return counter.get_total_flops() / 2, total


# Chao et al., HarDNet, ICCV 2019, table 4 (224×224): parameters (M), multiply-adds (G), CIO (M elements), as printed.
# HarDNet-85 is from the authors' repository. The paper's CIO of the DS models is what remains when the strided
# depthwise layers, which stand where the others pool, are left out.
TABLE_4 = {
    "hardnet39ds": (3.5, 0.44, 8.2),
    "hardnet68ds": (4.2, 0.79, 15.3),
    "hardnet68": (17.6, 4.3, 11.5),
    "hardnet85": (36.7, 9.1, None),
    "hardnet96s": (9.3, 2.5, 11.7),
    "hardnet117s": (20.9, 4.9, 16.7),
    "hardnet138s": (35.5, 6.7, 19.6),
}


@pytest.mark.parametrize("name", TABLE_4)
def test_hardnet_is_the_one_in_the_paper(name: str) -> None:
    published_parameters, published_macs, published_traffic = TABLE_4[name]
    module, x = on_meta(name)
    assert parameters(module) / 1e6 == pytest.approx(published_parameters, rel=0.005, abs=0.05)
    # The paper's counter includes some of what is not a convolution: 0.5 … 2.5 % more than convolutions and linear.
    macs, traffic = macs_and_traffic(module, x, strided_depthwise=False)
    assert macs / 1e9 == pytest.approx(published_macs, rel=0.025)
    if published_traffic is not None:
        assert traffic / 1e6 == pytest.approx(published_traffic, abs=0.051)


# Table 2 (CamVid, 352×480): parameters (M), "GMACs", CIO (MB, fp32). Its GMACs are twice the multiply-adds.
TABLE_2 = {
    "fc_densenet56": (1.4, 60, 1351),
    "fc_densenet67": (3.5, 140, 2286),
    "fc_densenet103": (9.4, 134, 2150),
    "fc_hardnet68": (1.4, 15, 473),
    "fc_hardnet76": (3.5, 54, 932),
    "fc_hardnet84": (8.4, 100, 1267),
}


@pytest.mark.parametrize("name", TABLE_2)
def test_segmentation_networks_are_the_ones_in_the_paper(name: str) -> None:
    published_parameters, published_flops, published_traffic = TABLE_2[name]
    module, x = on_meta(name)
    assert parameters(module) / 1e6 == pytest.approx(published_parameters, abs=0.09)
    macs, traffic = macs_and_traffic(module, x)
    assert 2 * macs / 1e9 == pytest.approx(published_flops, rel=0.015)
    assert 4 * traffic / 1e6 == pytest.approx(published_traffic, abs=0.51)  # to the printed digit


def test_fc_hardnet70_is_the_one_in_its_repository() -> None:
    module, x = on_meta("fc_hardnet70")
    assert parameters(module) / 1e6 == pytest.approx(4.1, abs=0.05)
    assert macs_and_traffic(module, x)[0] / 1e9 == pytest.approx(35.4, rel=0.01)
    assert module(x).shape == (1, 19, 1024, 2048)


# Ding et al., RepVGG, CVPR 2021, table 4, 5: parameters (M) and theoretical FLOPs (multiply-adds, G) once converted.
CONVERTED = {
    "repvgg_a0": (8.30, 1.4),
    "repvgg_a1": (12.78, 2.4),
    "repvgg_a2": (25.49, 5.1),
    "repvgg_b0": (14.33, 3.1),
    "repvgg_b1": (51.82, 11.8),
    "repvgg_b1g2": (41.36, 8.8),
    "repvgg_b1g4": (36.12, 7.3),
    "repvgg_b2": (80.31, 18.4),
    "repvgg_b2g4": (55.77, 11.3),
    "repvgg_b3": (110.96, 26.2),
    "repvgg_b3g4": (75.62, 16.1),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_repvgg_is_the_one_in_the_paper(name: str) -> None:
    published_parameters, published_macs = CONVERTED[name]
    module, x = on_meta(name)
    # A converted block keeps the 3×3 kernel and one bias a channel; 1×1 kernels and the norms go.
    removed = removed_macs = 0
    resolution = 112
    for block in module.features:
        resolution = resolution // block.dense[0].stride[0] if block is not module.features[0] else resolution
        pointwise = block.pointwise[0].weight.numel()
        removed += pointwise + sum(parameters(m) for m in block.modules() if isinstance(m, nn.BatchNorm2d))
        removed -= block.dense[0].out_channels
        removed_macs += pointwise * resolution**2
    assert (parameters(module) - removed) / 1e6 == pytest.approx(published_parameters, abs=0.011)
    assert (macs_and_traffic(module, x)[0] - removed_macs) / 1e9 == pytest.approx(published_macs, abs=0.051)


@pytest.mark.parametrize("size", ["a0", "b1g4", "b3"])
def test_repvgg_has_as_many_parameters_as_timms(size: str) -> None:
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        theirs = timm.create_model(f"repvgg_{size}")
    assert parameters(on_meta(f"repvgg_{size}")[0]) == parameters(theirs)


def test_densenet264_and_ssd512_have_their_published_sizes() -> None:
    assert parameters(on_meta("densenet264")[0]) / 1e6 == pytest.approx(33.3, abs=0.05)
    # 24564 default boxes at 512×512 (Liu et al., table 7) and VOC's 27.2 M parameters.
    module, x = on_meta("ssd512_vgg16")
    locations, scores = module(x)
    assert locations.shape == (1, 24564, 4)
    assert scores.shape == (1, 24564, 21)
    assert parameters(module) / 1e6 == pytest.approx(27.2, abs=0.05)


def test_ssd_on_hardnet_takes_its_sources_at_strides_8_and_16() -> None:
    module, x = on_meta("ssd512_hardnet68")
    lower = module.lower(x)
    assert lower.shape == (1, 320, 64, 64)
    assert module.upper(lower).shape == (1, 640, 32, 32)
    assert module(x)[0].shape == (1, 6 * (64**2 + 32**2 + 16**2 + 8**2 + 4**2) + 4 * (2**2 + 1**2), 4)


def test_harmonic_links_follow_the_rule_by_brute_force() -> None:
    for layer in range(1, 65):
        wanted = [layer - 2**n for n in range(10) if layer - 2**n >= 0 and layer % 2**n == 0]
        assert sorted(harmonic_links(layer)) == sorted(wanted)


def test_harmonic_widths_grow_with_the_power_of_two() -> None:
    # k = 14, m = 1.7: 14, 23.8, 40.46, 68.8 → even numbers
    assert [harmonic_width(i, 14, 1.7) for i in (1, 2, 4, 8)] == [14, 24, 40, 68]
    assert harmonic_width(3, 14, 1.7) == harmonic_width(5, 14, 1.7) == 14


def test_a_block_lets_go_of_layers_no_one_reads_and_computes_the_same() -> None:
    torch.manual_seed(0)
    block = HarmonicDenseBlock(6, 4, 1.7, 8, conv_norm).eval()
    x = torch.randn(2, 6, 9, 9)
    outputs = [x]
    for layer, links in zip(block.layers, block.links, strict=True):
        outputs.append(layer(torch.cat([outputs[i] for i in links], 1)))
    expected = torch.cat([outputs[i] for i in (1, 3, 5, 7, 8)], 1)
    with torch.no_grad():
        assert torch.equal(block(x), expected)
    # After their last readers: layers 8, 3, 8 and 7.
    assert sorted(i for released in block.released for i in released) == [0, 2, 4, 6]


@pytest.mark.parametrize("name", zoo.models())
def test_every_model_maps_its_published_input_to_its_classes(name: str) -> None:
    with torch.device("meta"):
        module = zoo.build(name, num_classes=7).eval()
        output = module(torch.empty(2, 3, *zoo.input_size(name)))
    assert zoo.entry(name).source
    if name.startswith("ssd"):
        assert output[1].shape[0] == 2
        assert output[1].shape[2] == 7
    else:
        assert output.shape[:2] == (2, 7)


@pytest.mark.parametrize("name", ["hardnet39ds", "fc_hardnet68"])
def test_models_run_and_learn_on_real_numbers(name: str) -> None:
    module = zoo.build(name, num_classes=3)
    loss = module(torch.randn(2, 3, 32, 32)).square().mean()
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.parameters())


def test_an_unknown_name_lists_near_ones_and_case_does_not_matter() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'hardnet68'"):
        zoo.build("hardnet69")
    assert zoo.input_size("HarDNet68") == (224, 224)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ForetellError, match="registered twice"):
        registry.add("hardnet68", lambda classes: nn.Identity(), input_size=(1, 1), source="another")
    with pytest.raises(ForetellError, match="lower case"):
        registry.add("HarDNet68", lambda classes: nn.Identity(), input_size=(1, 1), source="another")
