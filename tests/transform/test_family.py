"""The contract every transform keeps, and the family's registry."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import foretell.transform
from foretell.errors import ForetellError, UnknownNameError
from foretell.transform import Transformed, member, transform, transforms
from foretell.workload import zoo

Trained = Callable[[nn.Module], nn.Module]


class Residual(nn.Module):
    """Convolutions, norms and a shortcut, small enough to run in a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        x = x + self.second(x)
        return self.head(self.drop(x).mean((2, 3)))


SAMPLES = {
    "residual": Residual,
    "repvgg_a0": lambda: zoo.build("repvgg_a0", 10),
    "hardnet39ds": lambda: zoo.build("hardnet39ds", 10),
}


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("name", transforms())
def test_every_transform_keeps_the_contract(name: str, sample: str, trained: Trained) -> None:
    torch.manual_seed(0)
    module = trained(SAMPLES[sample]())
    before = {key: value.clone() for key, value in module.state_dict().items()}
    result = member(name).run(module)

    assert isinstance(result, Transformed)
    assert result.transform == name
    assert result.exact == member(name).exact
    assert result.changes, "the samples give every transform something to do"
    assert str(result).startswith(f"{name} ({'exact' if result.exact else 'approximate'})")
    # The module given is as it was: same tensors, same mode.
    assert module.training
    assert not result.module.training
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    new = {id(p) for p in result.module.parameters()}
    assert not new.intersection(id(p) for p in module.parameters())
    # Parameters are those it says.
    difference = sum(c.parameters_after - c.parameters_before for c in result.changes)
    counts = [sum(p.numel() for p in m.parameters()) for m in (module, result.module)]
    assert difference == counts[1] - counts[0]
    if result.exact:
        x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
        with torch.no_grad():
            expected = module.double().eval()(x)
            found = member(name).run(module).module(x)
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize("name", transforms())
def test_every_transform_works_without_weights_and_says_what_it_does(name: str) -> None:
    with torch.device("meta"):
        module = zoo.build("repvgg_a0")
    result = member(name).run(module)
    assert all(p.is_meta for p in result.module.parameters())
    assert result.module(torch.empty(1, 3, 32, 32, device="meta")).shape == (1, 1000)
    found = member(name)
    assert found.summary.endswith(".")
    assert len(found.source) > 10


@pytest.mark.parametrize("name", transforms())
def test_a_module_with_nothing_to_do_comes_back_as_a_copy(name: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    result = member(name).run(module)
    assert result.changes == ()
    assert result.module is not module
    assert str(result).endswith("0 places changed")


def test_an_unknown_transform_lists_near_ones() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'reparametrize'"):
        member("reparameterise")
    with pytest.raises(AttributeError, match="no attribute 'prune_everything'"):
        foretell.transform.prune_everything  # noqa: B018
    assert foretell.transform.reparametrize is member("Reparametrize").run


def test_a_name_is_registered_once_whatever_its_spelling() -> None:
    with pytest.raises(ForetellError, match="registered already"):
        transform("Fold-Batch-Norm", exact=True, source="another")(lambda module: Transformed(module, "", True, ()))


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, foretell.transform; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
