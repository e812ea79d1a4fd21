"""Build what a `Measured` needs from the columns of a measurement table, without tensors or a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from foretell.errors import unknown
from foretell.graph import OpTable
from foretell.graph.kinds import kind_of
from foretell.graph.table import DTYPE_CODE, KIND_CODE, PHASE_CODE

#: Columns whose default is not 0.
_DEFAULTS: dict[str, float] = {"repeat": 1.0, "operands": 3.0}
_NAMES = ("name", "module", "kind", "phase", "dtype")
_BOOLS = ("channels_last", "causal")
_NUMBERS = tuple(f.name for f in fields(OpTable) if f.name not in (*_NAMES, *_BOOLS))


def op_table(
    name: str | Sequence[str],
    dtype: str | Sequence[str],
    *,
    kind: str | Sequence[str] | None = None,
    phase: str | Sequence[str] = "forward",
    module: str | Sequence[str] = "",
    **columns: Any,
) -> OpTable:
    """An `OpTable` of given columns, each an array of n rows or one value for all of them; the others are 0.

    `name` are dispatcher names (``aten.mm.default``), from which `kind` follows where none is given; `dtype`, `kind`
    and `phase` are names, not codes. `repeat` defaults to 1, `operands` to 3. Raises UnknownNameError for a name that
    is none, ValueError where the columns differ in length.

    >>> table = op_table("aten.mm.default", "bfloat16", gemm_batch=1, gemm_m=[1, 2], gemm_n=8, gemm_k=8, macs=[64, 128])
    >>> len(table), table.repeat
    (2, array([1., 1.]))
    """
    for column in columns:
        if column not in (*_NUMBERS, *_BOOLS):
            raise unknown("column", column, (*_NUMBERS, *_BOOLS))
    given = [np.atleast_1d(np.asarray(value)) for value in (name, dtype, kind or "", phase, module, *columns.values())]
    n = next((len(value) for value in given if len(value) != 1), 1)

    def full(value: Any, as_type: Any) -> Any:
        array = np.atleast_1d(np.asarray(value, dtype=as_type))
        if len(array) not in (1, n):
            raise ValueError(f"a column has {len(array)} rows where another has {n}")
        return np.broadcast_to(array, n).copy()

    def codes(value: Any, code: dict[str, int], what: str) -> Any:
        names, index = np.unique(full(value, np.str_), return_inverse=True)
        for one in names:
            if one not in code:
                raise unknown(what, str(one), code)
        return np.array([code[str(one)] for one in names], dtype=np.int16)[index]

    names = full(name, object)
    if kind is None:
        distinct, index = np.unique(full(name, np.str_), return_inverse=True)
        kind = np.array([kind_of(str(one)) for one in distinct])[index].tolist()
    return OpTable(
        name=names,
        module=full(module, object),
        kind=codes(kind, KIND_CODE, "kind"),
        phase=codes(phase, PHASE_CODE, "phase"),
        dtype=codes(dtype, DTYPE_CODE, "dtype"),
        **{column: full(columns.get(column, _DEFAULTS.get(column, 0.0)), np.float64) for column in _NUMBERS},
        **{column: full(columns.get(column, False), np.bool_) for column in _BOOLS},
    )
