"""DenseNet-264, the one published size that the kept libraries do not build.

G. Huang, Z. Liu, L. van der Maaten, K. Weinberger: Densely Connected Convolutional Networks. CVPR 2017, table 1.
"""

from __future__ import annotations

from torch import nn

from foretell.workload.zoo import registry


def densenet264(num_classes: int = 1000) -> nn.Module:
    """DenseNet-264 (growth 32): torchvision's DenseNet with the paper's depths."""
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=32, block_config=(6, 12, 64, 48), num_init_features=64, num_classes=num_classes)


registry.add(
    "densenet264", densenet264, input_size=(224, 224), source="Huang et al., DenseNet, CVPR 2017, table 1"
)
