"""Layers on ranks of a pipeline, counted by hand."""

from foretell.simulate.training.stages import layers_of
from foretell.workload import llm


def test_layers_in_order() -> None:
    config = llm.config("llama-3-8b")  # 32 equal layers
    assert layers_of(config, 4)[:, :, 0].tolist() == [[8], [8], [8], [8]]
    assert layers_of(config, 4, 2)[:, :, 0].tolist() == [[4, 4]] * 4
    assert layers_of(config, 4, 1, 7, 7)[:, 0, 0].tolist() == [7, 9, 9, 7]
    assert layers_of(config, 3)[:, 0, 0].tolist() == [11, 11, 10]


def test_dense_layers_come_first() -> None:
    config = llm.config("deepseek-v3")  # 61 layers, the first 3 dense
    kinds = [group.moe for group in config.groups]
    dense, routed = kinds.index(False), kinds.index(True)
    found = layers_of(config, 16)
    assert found.sum() == 61
    assert found[0, 0, dense] == 3
    assert found[0, 0, routed] == 1
    assert not found[1:, :, dense].any()
