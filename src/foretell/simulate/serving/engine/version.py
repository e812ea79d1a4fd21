"""Versions of engines, where their habits changed."""

from __future__ import annotations

from functools import cache

__all__ = ["since"]


@cache
def since(version: str, first: tuple[int, int]) -> bool:
    """Whether an engine's version is `first` or later; no version is the newest.

    >>> since("0.10.1", (0, 9)), since("v0.8", (0, 9)), since("", (0, 9))
    (True, False, True)
    """
    parts = [int(part) for part in version.lstrip("v").split(".")[:2] if part.isdigit()]
    return not parts or tuple(parts) >= first
