"""Sizes that an exported program leaves open: the symbols, and the expressions over them.

An archive states a size as a whole number or as an expression in text: ``Mul(Integer(2), Symbol('s0', positive=True))``
(since PyTorch 2.7) or ``2*s0`` (before). The text is parsed into a tree and the tree evaluated by the table below:
nothing in it is executed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

__all__ = ["Unbound", "evaluate", "symbol_of", "symbols_in"]

MOST = 2**63 - 1
_MOST_CHARACTERS = 20_000
Number = int | Fraction


class Unbound(ValueError):
    """A symbol has no value."""

    def __init__(self, symbol: str) -> None:
        super().__init__(f"size {symbol} is not known")
        self.symbol = symbol


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """The whole number that an expression is. Raises Unbound, or ValueError where it is malformed."""
    try:
        value = _value(_parse(text), values)
    except (RecursionError, MemoryError):
        raise ValueError("a size is nested too deeply") from None
    except ZeroDivisionError:
        raise ValueError(f"size {text[:80]} divides by 0") from None
    if value.denominator != 1:
        raise ValueError(f"size {text[:80]} is {value}, no whole number")
    return int(value)


def symbols_in(text: str) -> tuple[str, ...]:
    """The symbols of an expression, in order of their first appearance."""
    found: dict[str, None] = {}
    for node in ast.walk(_parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Symbol" and node.args:
            found[str(getattr(node.args[0], "value", ""))] = None
        elif isinstance(node, ast.Name) and node.id not in _FUNCTIONS and node.id not in ("Symbol", "True", "False"):
            found[node.id] = None
    if any(not name.isidentifier() for name in found):
        raise ValueError(f"size {text[:80]!r} has a symbol that is no name")
    return tuple(found)


def symbol_of(text: str) -> str | None:
    """The symbol that an expression is, where it is nothing else."""
    found = symbols_in(text)
    if len(found) != 1:
        return None
    stripped = text.strip()
    return found[0] if stripped == found[0] or stripped.startswith("Symbol(") else None


def _parse(text: str) -> ast.expr:
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"a size is an expression of {len(text):,} characters")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"size {text[:80]!r} is no expression") from None


def _floor_divide(a: Number, b: Number) -> Number:
    return a // b


def _power(a: Number, b: Number) -> Number:
    if b.denominator != 1 or not -64 <= b <= 64:
        raise ValueError("a size has an exponent beyond 64")
    return Fraction(a) ** int(b)


def _product(*factors: Number) -> Number:
    value: Number = 1
    for factor in factors:
        value = _bounded(value * factor)
    return value


def _shift(a: Number, b: Number) -> Number:
    return a * _power(2, b)


_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "Add": lambda *terms: sum(terms),
    "Mul": _product,
    "Integer": lambda n: n,
    "Rational": lambda p, q=1: Fraction(p) / q,
    "Pow": _power,
    "PowByNatural": _power,
    "FloorDiv": _floor_divide,
    "CleanDiv": _floor_divide,
    "CeilDiv": lambda a, b: -((-a) // b),
    "CeilToInt": lambda a: math.ceil(a),
    "ceiling": lambda a: math.ceil(a),
    "FloorToInt": lambda a: math.floor(a),
    "floor": lambda a: math.floor(a),
    "TruncToInt": lambda a: math.trunc(a),
    "IntTrueDiv": lambda a, b: Fraction(a) / b,
    "FloatTrueDiv": lambda a, b: Fraction(a) / b,
    "ToFloat": lambda a: a,
    "Identity": lambda a: a,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ModularIndexing": lambda a, divisor, modulus: a // divisor % modulus,
    "Max": lambda *terms: max(terms),
    "Min": lambda *terms: min(terms),
    "Abs": abs,
    "LShift": _shift,
    "RShift": lambda a, b: a // _power(2, b),
}
_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: _floor_divide,
    ast.Div: lambda a, b: Fraction(a) / b,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _value(node: ast.AST, values: Mapping[str, int]) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return _bounded(int(node.value))
    if isinstance(node, ast.Name):
        return _symbol(node.id, values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, values)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        if name == "Symbol" and node.args and isinstance(node.args[0], ast.Constant):
            return _symbol(str(node.args[0].value), values)
        if name in _FUNCTIONS and node.args:
            arguments = [_value(argument, values) for argument in node.args]
            try:
                return _bounded(_FUNCTIONS[name](*arguments))
            except TypeError:
                raise ValueError(f"{name} takes other than {len(arguments)} numbers in a size") from None
        raise ValueError(f"a size calls {name[:40]}, which is not known")
    raise ValueError(f"a size holds {type(node).__name__}, which is not known")


def _symbol(name: str, values: Mapping[str, int]) -> int:
    if name not in values:
        raise Unbound(name[:80])
    return values[name]


def _bounded(value: Number) -> Number:
    if not -MOST <= value <= MOST or value.denominator > MOST:
        raise ValueError("a size lies beyond 64 bits")
    return value
