"""What can be changed in a workload: module in, cheaper module out, with what changed and whether it means the same.

`transforms()` lists the family; each member is an attribute of this package::

    from foretell.transform import reparametrize
    plain = reparametrize(model)          # the model given stays as it was
    print(plain)                          # what changed where
    plain.module(images)

`effect` predicts what a transform changes in time, memory and energy on a device, before anything runs. Importing
this package imports no torch; using a transform does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretell.transform.effect import Effect, effect
from foretell.transform.family import Change, Member, Transform, Transformed, member, transform, transforms

if TYPE_CHECKING:
    from foretell.transform.reparametrization import fold_batch_norm, reparametrize

__all__ = [
    "Change",
    "Effect",
    "Member",
    "Transform",
    "Transformed",
    "effect",
    "fold_batch_norm",
    "member",
    "reparametrize",
    "transform",
    "transforms",
]


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and name in transforms():
        return member(name).run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
