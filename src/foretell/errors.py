"""Every error Foretell raises on purpose.

All derive from `ForetellError`, so one ``except`` catches what a user can repair. *Broken* input
(exit code 2) differs from a well-formed question that has no answer, *infeasible* (exit code 3).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "CaptureError",
    "ForetellError",
    "InfeasibleError",
    "InputError",
    "UnknownNameError",
    "near_names",
    "unknown",
]


class ForetellError(Exception):
    """A failure the user can act on.

    `message` says what went wrong and where, `hint` how to repair it; `exit_code` is what the
    command line returns.
    """

    exit_code: int = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take other arguments than `args` holds, so pickling (process pools) needs this.
        return _rebuild, (type(self), self.args, self.__dict__)


class UnknownNameError(ForetellError):
    """`name` is no known name of its `kind`; `near` holds the likeliest of the `known` ones."""

    def __init__(
        self,
        kind: str,
        name: str,
        near: Iterable[str] = (),
        known: Iterable[str] = (),
        hint: str | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.near = tuple(near)
        self.known = tuple(known)
        if hint is None and self.near:
            hint = "did you mean " + _either(self.near) + "?"
        elif hint is None and self.known:
            hint = "known: " + ", ".join(self.known[:12])
            if len(self.known) > 12:
                hint += f" and {len(self.known) - 12} more"
        shown = name if len(name) <= 80 else name[:79] + "…"
        super().__init__(f"unknown {kind} {shown!r}", hint)


class InputError(ForetellError):
    """Malformed input: `what` is wrong, `where` (file, key, argument), and the `repair`."""

    def __init__(self, what: str, where: str | None = None, repair: str | None = None) -> None:
        self.what = what
        self.where = where
        self.repair = repair
        super().__init__(f"{where}: {what}" if where else what, repair)


class InfeasibleError(ForetellError):
    """The question is well formed and has no answer; the message says which limit is in the way."""

    exit_code = 3


class CaptureError(ForetellError):
    """A workload could not be captured: it failed, or depends on values that do not exist yet."""


def near_names(name: str, known: Iterable[str], limit: int = 5) -> tuple[str, ...]:
    """The `known` names likeliest meant by `name`, nearest first.

    Case is ignored. Names that contain `name` whole come first: a short prefix (``a100``) is far
    from its completions by edit distance, yet they are what was meant.
    """
    if len(name) > 200:  # no slip of the pen, and slow to compare
        return ()
    folded: dict[str, str] = {}
    for item in known:
        folded.setdefault(item.casefold(), item)
    wanted = name.casefold()
    inside = sorted((len(k), k) for k in folded if len(wanted) > 1 and wanted in k)
    close = difflib.get_close_matches(wanted, folded, n=limit, cutoff=0.6)
    ordered = dict.fromkeys([*(k for _, k in inside), *close])
    return tuple(folded[k] for k in list(ordered)[:limit])


def unknown(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """An `UnknownNameError` ready to raise, with near names found by `near_names`.

    >>> str(unknown("phase", "trian", ["train", "inference"]))
    "unknown phase 'trian'; did you mean 'train'?"
    """
    names = tuple(known)
    return UnknownNameError(kind, name, near_names(name, names), names)


def _either(names: tuple[str, ...]) -> str:
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " or " + quoted[-1]


def _rebuild(kind: type[ForetellError], args: tuple[Any, ...], state: dict[str, Any]) -> ForetellError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
