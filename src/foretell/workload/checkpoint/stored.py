"""What a checkpoint on disk holds, as values: `Stored` tensors of one `Checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SCHEMA", "Checkpoint", "Stored"]

SCHEMA = "foretell.checkpoint/1"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it is stored: `dtype` is the format's own name, `shape` has the slowest dimension first.

    `elements` is what it stands for: of a block format the numbers in the blocks, not the blocks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of one checkpoint, over all its files. `metadata` are the short values its headers name."""

    path: str
    kind: str
    files: tuple[str, ...]
    tensors: tuple[Stored, ...]
    file_bytes: int
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without headers and padding: what they take in a device's memory as they are."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def by_dtype(self) -> Mapping[str, tuple[int, int, int]]:
        """For each stored type, most bytes first: tensors, elements, bytes."""
        found: dict[str, tuple[int, int, int]] = {}
        for tensor in self.tensors:
            tensors, elements, nbytes = found.get(tensor.dtype, (0, 0, 0))
            found[tensor.dtype] = (tensors + 1, elements + tensor.elements, nbytes + tensor.nbytes)
        return dict(sorted(found.items(), key=lambda item: (-item[1][2], item[0])))

    def largest(self, count: int = 5) -> tuple[Stored, ...]:
        """The `count` tensors of most bytes."""
        return tuple(sorted(self.tensors, key=lambda tensor: (-tensor.nbytes, tensor.name))[:count])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, schema ``foretell.checkpoint/1``."""
        return {
            "schema": SCHEMA,
            "path": self.path,
            "kind": self.kind,
            "files": list(self.files),
            "file_bytes": self.file_bytes,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "dtypes": [
                {"dtype": dtype, "tensors": tensors, "parameters": elements, "bytes": nbytes}
                for dtype, (tensors, elements, nbytes) in self.by_dtype.items()
            ],
            "metadata": dict(self.metadata),
            "tensors": [[t.name, list(t.shape), t.dtype, t.elements, t.nbytes] for t in self.tensors],
        }
