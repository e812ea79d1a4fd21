"""Finds devices by name: the shipped catalogue, a user's own folders, and ``local``, the machine at hand."""

from __future__ import annotations

import os
import re
from functools import cache, cached_property
from pathlib import Path

from foretell.errors import InputError, UnknownNameError, near_names
from foretell.hardware.device import Device
from foretell.hardware.loader import DATA, load_device, read_toml, slug_of

__all__ = ["Catalogue", "add_devices", "catalogue", "device", "devices", "fold"]

#: Names that mean the machine at hand, read anew at every call.
LOCAL = ("local", "local-cpu")
#: Environment variable: folders of device files, separated as in PATH.
ENVIRONMENT = "FORETELL_DEVICES"

_MARKS = re.compile(r"\((?:r|tm)\)|[®™]")
_WORD = re.compile(r"[a-z0-9]+")
_BRANDS = frozenset(
    ("nvidia", "nv", "tesla", "geforce", "amd", "instinct", "radeon", "intel", "google", "aws", "apple")
)


def fold(name: str) -> str:
    """The part of a device name that identifies it: no case, separators or leading makers' names.

    >>> fold("NVIDIA GeForce RTX 3090") == fold("rtx3090") == fold("rtx-3090")
    True
    """
    words = _WORD.findall(_MARKS.sub("", name.casefold()))
    while len(words) > 1 and words[0] in _BRANDS:
        words.pop(0)
    return "".join(words)


class Catalogue:
    """Devices by name over one or more folders of TOML files.

    Files are read when their device is asked for, once. Raises `InputError` if two files, or an alias and another
    file, share a name.
    """

    def __init__(self, *folders: str | Path) -> None:
        self._files: dict[str, Path] = {}
        self._keys: dict[str, str] = {}  # folded name or alias → device name
        self._aliases: dict[str, list[str]] = {}
        self._loaded: dict[str, Device] = {}
        self._add_folder(DATA / "devices")
        for name, aliases in read_toml(DATA / "aliases.toml").items():
            for alias in aliases:
                self._add_alias(alias, name, DATA / "aliases.toml")
        for folder in folders:
            for name in self._add_folder(Path(folder)):
                # A user's file keeps its aliases in itself, so it must be read now.
                found = load_device(self._files[name])
                for alias in found.aliases:
                    self._add_alias(alias, name, self._files[name])

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every device's name, sorted."""
        return tuple(sorted(self._files))

    def resolve(self, name: str) -> str:
        """The catalogue's name for `name`, which may be an alias in any case, with any separators.

        Raises `UnknownNameError` with near names; a name shared by several devices, such as ``a100``, is unknown too:
        there is no default device.
        """
        key = fold(name)
        if key not in self._keys:
            raise self._unknown(name, key)
        return self._keys[key]

    def device(self, name: str) -> Device:
        """The `Device` called `name`."""
        name = self.resolve(name)
        if name not in self._loaded:
            self._loaded[name] = load_device(self._files[name], tuple(self._aliases.get(name, ())))
        return self._loaded[name]

    def _unknown(self, name: str, key: str) -> UnknownNameError:
        # Compare folded names: by them "rtx4090ti" is near rtx-4090, and "a100" is inside each of its variants.
        variants = [n for n in self.names if len(key) > 2 and fold(n).startswith(key)]
        if variants:
            hint = f"there is no default among its variants: write {', '.join(variants)}"
            return UnknownNameError("device", name, variants, self.names, hint)
        near = [self._keys[k] for k in near_names(key, self._keys, 8)]
        return UnknownNameError("device", name, tuple(dict.fromkeys(near))[:5], self.names)

    def _add_folder(self, folder: Path) -> list[str]:
        if not folder.is_dir():
            raise InputError("no such folder", str(folder), "give a folder of device TOML files")
        added = []
        for path in sorted(folder.glob("*.toml")):
            name = slug_of(path)
            if name in self._files or name in LOCAL:
                other = self._files.get(name, "reserved for this machine")
                raise InputError(f"device {name!r} exists already ({other})", str(path), "rename the file")
            self._files[name] = path
            self._claim(fold(name), name, path)
            added.append(name)
        return added

    def _add_alias(self, alias: str, name: str, path: Path) -> None:
        if name not in self._files:
            raise InputError(f"aliases for {name!r}, which has no file", str(path), "mend the name")
        self._claim(fold(alias), name, path)
        self._aliases.setdefault(name, []).append(alias)

    def _claim(self, key: str, name: str, path: Path) -> None:
        owner = self._keys.setdefault(key, name)
        if owner != name:
            raise InputError(f"{key!r} would mean both {owner!r} and {name!r}", str(path), "make names unambiguous")


_added: tuple[Path, ...] = ()


@cache
def _shared(folders: tuple[Path, ...]) -> Catalogue:
    return Catalogue(*folders)


def catalogue(extra_dir: str | Path | None = None) -> Catalogue:
    """The catalogue in use: shipped devices, then ``FORETELL_DEVICES``, then `add_devices`, then `extra_dir`."""
    folders = [Path(entry) for entry in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if entry]
    folders += _added
    if extra_dir is not None:
        return Catalogue(*folders, extra_dir)
    return _shared(tuple(folders))


def add_devices(folder: str | Path) -> tuple[str, ...]:
    """Add a folder of device files for the rest of the process; returns the names added. All its files are checked."""
    global _added
    before = set(catalogue().names)
    grown = catalogue(folder)
    folder = Path(folder).resolve()
    _added = (*_added, folder)
    return tuple(name for name in grown.names if name not in before)


def device(name: str) -> Device:
    """The device called `name` (any case and separators, or an alias), or ``local``: the machine at hand.

    >>> device("NVIDIA A100-SXM4-80GB").name
    'a100-sxm4-80gb'
    >>> device("a100")
    Traceback (most recent call last):
    ...
    foretell.errors.UnknownNameError: unknown device 'a100'; there is no default among its variants: write ...
    """
    if name.casefold() in LOCAL:
        from foretell.hardware.local import local_device

        return local_device(gpu=name.casefold() == "local")
    return catalogue().device(name)


def devices() -> tuple[str, ...]:
    """Names of all devices in the catalogue, sorted; ``local`` is not among them."""
    return catalogue().names
