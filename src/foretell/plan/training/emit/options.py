"""Options of a command line, ``--name value``, read as data from whatever file they stand in.

That is one option a line, a shell script with its continuation lines and variables, or YAML with ``--name: value``.
Nothing is run: a variable is looked up among the plain assignments of the same file, and what only a shell could tell
(``$(…)``, ``${X:-…}`` of an unknown X) leaves its option out, with a note.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foretell.errors import InputError
from foretell.plan.training.emit.found import shown

__all__ = ["Arguments", "Given", "given", "parse"]

_YAML = re.compile(r"^\s*(?:-\s+)?[\"']?(--?[A-Za-z][\w-]*)[\"']?\s*:\s+(.*)$")
_ASSIGNED = re.compile(r"^(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)\+?=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?[-=]([^${}]*))?\}|([A-Za-z_]\w*))")
_OPTION = re.compile(r"^--[A-Za-z]")
_MOST_WORDS = 100_000
_LONGEST_LINE = 100_000  # splitting takes the square of a word's length
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off", "null", "none")


@dataclass(frozen=True, slots=True)
class Given:
    """An option with the values that follow it, and its line."""

    name: str
    values: tuple[str, ...]
    line: int


def given(text: str) -> list[Given]:
    """The options of a text in order."""
    found: list[tuple[str, list[str], int]] = []
    for word, line in _words(text):
        if _OPTION.match(word):
            name, equals, value = word.partition("=")
            found.append((name.replace("_", "-"), [value] if equals else [], line))
        elif found:
            found[-1][1].append(word)
    return [Given(name, tuple(values), line) for name, values, line in found]


def _words(text: str) -> list[tuple[str, int]]:
    variables: dict[str, str] = {}
    words: list[tuple[str, int]] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.rstrip().removesuffix("\\")
        if len(line) > _LONGEST_LINE:
            raise InputError(f"a line of {len(line):,} characters", f"line {number}", "give a file of options")
        yaml = _YAML.match(line)
        if yaml:
            value = yaml[2].split(" #")[0].strip().strip("\"'")
            if value.casefold() not in _FALSE:
                words.append((yaml[1], number))
                if value.casefold() not in _TRUE:
                    words += [(word, number) for word in value.strip("[]").replace(",", " ").split()]
            continue
        for word in _split(line):
            assigned = _ASSIGNED.match(word)
            if assigned:
                value = _expand(assigned[2], variables)
                if value.lstrip("( ").startswith("--"):  # OPTIONS="--a 1 --b 2"
                    words += [(part, number) for part in _split(value.lstrip("( "))]
                elif len(value) <= 200 and "$(" not in value and "`" not in value:
                    variables[assigned[1]] = value
                continue
            part = _expand(word, variables)
            for piece in part.split() if part.startswith("--") else [part]:  # ("--a 1" "--b 2")
                if piece not in ("(", ")"):
                    words.append((piece.rstrip(")") if "(" not in piece else piece, number))
            if len(words) > _MOST_WORDS:
                raise InputError(f"more than {_MOST_WORDS:,} words", f"line {number}", "give a file of options")
    return [(word, line) for word, line in words if word]


def _split(line: str) -> list[str]:
    """Words as a shell would split them; where a quotation goes on beyond the line, its quotes are spaces."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        loose = line.replace('"', " ").replace("'", " ")
        return loose.split(" #")[0].split()


def _expand(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    return _VARIABLE.sub(value, word) if "$" in word else word


@dataclass(frozen=True, slots=True)
class Arguments:
    """Options by name with their values as the framework would hold them: those given, defaults for the rest.

    ``arguments["--name"]`` is the value, `lines` where each option was given, `defaults` what the rest is. Flags are
    true or false.
    """

    values: Mapping[str, object]
    defaults: Mapping[str, object]
    lines: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> object:
        return self.values[name] if name in self.values else self.defaults.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def number(self, name: str) -> int:
        """A whole number, 0 where nothing says it."""
        value = self[name]
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    def text(self, name: str) -> str:
        """A word, empty where nothing says it."""
        value = self[name]
        return value if isinstance(value, str) else ""

    def on(self, name: str) -> bool:
        """Whether a flag is given (or is so by default)."""
        return self[name] is True

    def words(self, name: str) -> tuple[str, ...]:
        """The values of an option that takes several."""
        value = self[name]
        return value if isinstance(value, tuple) else ()


def parse(
    found: Sequence[Given], kinds: Mapping[str, type], defaults: Mapping[str, object], where: str
) -> tuple[Arguments, list[str]]:
    """Options as `Arguments`, and notes on those that `kinds` does not know or that only a shell could tell.

    `kinds` says for each option what its value is: int, float, str, tuple (several words) or bool (a flag). Raises
    InputError, with the line, for a value of another kind and for an option given twice with different values.
    """
    values: dict[str, object] = {}
    lines: dict[str, int] = {}
    notes: list[str] = []
    strange: list[str] = []
    for option in found:
        kind = kinds.get(option.name)
        if kind is None:
            strange.append(option.name)
            continue
        unset = [value for value in option.values[:1] if kind is not bool and ("$" in value or "`" in value)]
        if unset:
            said = f"{option.name} is {shown(unset)}"
            notes.append(f"line {option.line}: {said}, which only a shell could tell; left out")
            continue
        value = _value(option, kind, where)
        if option.name in values and values[option.name] != value:
            raise InputError(
                f"{option.name} is {values[option.name]} on line {lines[option.name]} and {value} here",
                f"{where}: line {option.line}", "leave one of them out",
            )  # fmt: skip
        values[option.name] = value
        lines.setdefault(option.name, option.line)
    if strange:
        notes.append(f"options that say nothing about the plan: {shown(dict.fromkeys(strange))}")
    return Arguments(values, defaults, lines), notes


def _value(option: Given, kind: type, where: str) -> object:
    if kind is bool:
        return True
    if kind is tuple:
        return option.values
    first = option.values[0] if option.values else ""
    if kind is str and first:
        return first
    try:
        return kind(first) if kind is float or re.fullmatch(r"[+-]?\d{1,15}", first) else _refuse(first)
    except ValueError:
        whole = "a whole number of at most 15 digits" if first.isdigit() else "a whole number"
        wanted = {int: whole, float: "a number", str: "a word"}[kind]
        said = shown([first]) or "given without a value"
        raise InputError(f"{option.name} is {said}, want {wanted}", f"{where}: line {option.line}") from None


def _refuse(first: str) -> object:
    raise ValueError(first)
