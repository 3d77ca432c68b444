"""`cupy.ElementwiseKernel`: kernels in the part of C++ that Python can read.

The operation is assignments, `;` between them. Their values are arithmetic, functional casts, calls, indices of raw
arguments, and at the outside one choice by `?` and `:`. Functions of the preamble stand on a line each and return one
such value. Anything else is refused, so what runs here is what was written, element by element in the types of C++.
"""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from ._arrays import _launch, ndarray

__all__ = ["ElementwiseKernel"]

_FUNCTION = re.compile(
    r"(?:template <typename T> )?__device__ (?P<gives>[\w ]+?) (?P<name>\w+)\((?P<takes>[^)]*)\)"
    r" \{ return (?P<value>[^;{}]*); \}"
)
_CHOICE = re.compile(r"(?P<when>[^?]+) \? (?P<one>[^?]+) : (?P<other>[^?]+)")
_ALLOWED = (
    *(ast.Expression, ast.BinOp, ast.BitAnd, ast.BitOr, ast.BitXor, ast.Add, ast.Sub, ast.Mult, ast.Div),
    *(ast.LShift, ast.RShift, ast.Compare, ast.Lt, ast.Gt, ast.NotEq, ast.Call, ast.Name, ast.Load, ast.Constant),
    ast.Subscript,
)

_parsing = threading.Lock()
"""CPython 3.11 counts how deep a tree is for all threads together: two that parse at once may get a SystemError."""

_NUMBERS = {"float": "f4", "double": "f8", "float16": "f2", "unsigned": "u4", "unsigned short": "u2"}
"""C++'s name of a type -> numpy's."""


class _Parameter(NamedTuple):
    """A parameter of a kernel."""

    name: str
    dtype: np.dtype[Any]
    is_raw: bool


def _cast(dtype: Any) -> Callable[[Any], Any]:
    return lambda value: np.asarray(value).astype(dtype)


_KNOWN: dict[str, Callable[..., Any]] = {
    **{name: _cast(dtype) for name, dtype in _NUMBERS.items() if name.isidentifier()},
    "__uint_as_float": lambda bits: _exactly(bits, np.uint32).view(np.float32),
    "__float_as_uint": lambda value: _exactly(value, np.float32).view(np.uint32),
    "_where": np.where,
    "_divided": lambda a, b: _floating(a) / _floating(b),
}
"""What every kernel can call."""


def _exactly(value: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """An array of just that type."""
    found = np.asarray(value)
    assert found.dtype == dtype, f"{found.dtype}, not {dtype}"
    return found


def _floating(value: Any) -> np.ndarray[Any, Any]:
    found = np.asarray(value)
    assert found.dtype.kind == "f", f"a division of {found.dtype}"
    return found


class ElementwiseKernel:
    """A kernel; called with its inputs and its outputs, all of one shape but those that are raw.

    Raises:
        ValueError: It is not in that part of C++.
    """

    def __init__(
        self, in_params: str, out_params: str, operation: str, name: str = "kernel", preamble: str = "", **_: Any
    ) -> None:
        self.name = name
        self._inputs, self._outputs = _parameters(in_params), _parameters(out_params)
        self._steps = [_step(one) for one in operation.split(";") if one.strip()]
        self._names: dict[str, Any] = dict(_KNOWN)
        for line in filter(None, map(str.strip, preamble.splitlines())):
            self._add(line)

    def _add(self, line: str) -> None:
        found = _FUNCTION.fullmatch(line)
        if found is None:
            raise ValueError(f"the fake can't read {line!r}")
        takes = [one.rpartition(" ") for one in found["takes"].split(", ")]
        self._names[found["name"]] = _function(found["gives"], takes, _compiled(found["value"]), self._names)

    def __call__(self, *args: Any) -> Any:
        """Enqueues it on the caller's stream."""
        parameters = [*self._inputs, *self._outputs]
        if len(args) != len(parameters):
            raise TypeError(f"Wrong number of arguments for {self.name}: {len(args)}, not {len(parameters)}")
        for parameter, value in zip(parameters, args, strict=True):
            if not isinstance(value, ndarray) or value.dtype != parameter.dtype:
                raise TypeError(f"Type is mismatched. {parameter.name} {getattr(value, 'dtype', value)}")
        shapes = {value.shape for one, value in zip(parameters, args, strict=True) if not one.is_raw}
        if len(shapes) != 1:
            raise ValueError(f"the fake does not broadcast {shapes}")
        hosts = {one.name: value._host() for one, value in zip(parameters, args, strict=True)}
        _launch(self.name, lambda: self._run(hosts), *args)
        outputs = args[len(self._inputs) :]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _run(self, hosts: Mapping[str, Any]) -> None:
        for target, value in self._steps:
            hosts[target][...] = eval(value, {"__builtins__": {}}, {**self._names, **hosts})


def _parameters(text: str) -> list[_Parameter]:
    found = []
    for one in text.split(","):
        *before, kind, name = one.split()
        found.append(_Parameter(name, np.dtype(kind), before == ["raw"]))
    return found


def _step(text: str) -> tuple[str, CodeType]:
    target, _, value = text.partition(" = ")
    return target.strip(), _compiled(value)


def _compiled(value: str) -> CodeType:
    """An expression of C++ as one of Python; `||` is between what has only one value in both."""
    text = value.strip().replace("||", "|")
    choice = _CHOICE.fullmatch(text)
    if choice is not None:
        when = choice["when"]
        bare = when if when.startswith("(") else f"({when})"
        text = f"_where({bare}, {choice['one']}, {choice['other']})"
    with _parsing:
        tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED) or _means_something_else(node, text):
            raise ValueError(f"the fake can't read {value!r}: {ast.dump(node)}")
    return compile(ast.fix_missing_locations(_Divisions().visit(tree)), value, "eval")


def _means_something_else(node: ast.AST, text: str) -> bool:
    """Whether C++ reads it in another way: there comparisons bind closer than bits do, and have two sides."""
    if not isinstance(node, ast.Compare):
        return False
    bare = [side for side in (node.left, *node.comparators) if text[max(side.col_offset - 1, 0)] != "("]
    bits = (ast.BitAnd, ast.BitOr, ast.BitXor)
    return len(node.ops) > 1 or any(isinstance(side, ast.BinOp) and isinstance(side.op, bits) for side in bare)


class _Divisions(ast.NodeTransformer):
    """Lets divisions look whether they are of floats: those of whole numbers have no fraction in C++."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        return ast.Call(ast.Name("_divided", ast.Load()), [node.left, node.right], [])


def _function(gives: str, takes: list[tuple[str, str, str]], value: CodeType, names: dict[str, Any]) -> Any:
    def call(*args: Any) -> Any:
        given: dict[str, Any] = {}
        for (kind, _, name), arg in zip(takes, args, strict=True):
            if kind != "T":
                _exactly(arg, _NUMBERS[kind])
            given[name] = np.asarray(arg)
        same = {one.dtype for (kind, _, name), one in zip(takes, given.values(), strict=True) if kind == "T"}
        assert len(same) < 2, f"one T is {same}"
        found = eval(value, {"__builtins__": {}}, {**names, **given})
        return np.asarray(found).astype(same.pop() if gives == "T" else _NUMBERS[gives])

    return call
