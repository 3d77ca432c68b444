"""`cupy.RawModule`: kernels in a small part of CUDA C++, which are run as what they say, for all elements at once.

The part: functions of one statement or of one instruction of PTX, and kernels whose elements have nothing to do with
each other, a loop over them with one statement a line. As with cupy, which compiles everything with `-ftz=true`,
operators of C++ take subnormal numbers of 32 bits for zeros; PTX does what it says.
"""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import numpy as np

from ._arrays import flushed
from ._state import current

__all__ = ["RawModule"]

_FUNCTION = re.compile(
    r"__device__ (?P<gives>[\w ]+?) (?P<name>\w+)\((?P<takes>[^)]*)\) \{ return (?P<value>[^;{}]*); \}"
)
_PTX = re.compile(
    r"__device__ (?P<gives>[\w ]+?) (?P<name>\w+)\((?P<takes>[^)]*)\)"
    r' \{ (?P=gives) c; asm\("(?P<instruction>[\w.]+) %0, %1(?:, %2)?;" : "=\w"\(c\) : [^;]*\); return c; \}'
)
_KERNEL = re.compile(r'extern "C" __global__ void (?P<name>\w+)\((?P<takes>[^)]*), unsigned long long n\) \{')
_LOOP = re.compile(
    r"for \(unsigned long long i = blockIdx\.x \* \(unsigned long long\)blockDim\.x \+ threadIdx\.x; i < n;"
    r" i \+= \(unsigned long long\)gridDim\.x \* blockDim\.x\) \{"
)
_STORE = re.compile(r"(?P<array>\w+)\[(?P<index>[^\]=]+)\] = (?P<value>[^;]*);")
_ASSIGNED = re.compile(r"(?:(?P<kind>[\w ]+) )?(?P<name>\w+) = (?P<value>[^;]*);")
_CHOICE = re.compile(r"(?P<when>[^?]+) \? (?P<one>[^?]+) : (?P<other>[^?]+)")
_ALLOWED = (
    *(ast.Expression, ast.BinOp, ast.BitAnd, ast.BitOr, ast.BitXor, ast.Add, ast.Sub, ast.Mult, ast.Div),
    *(ast.LShift, ast.RShift, ast.Compare, ast.Lt, ast.Gt, ast.NotEq, ast.Call, ast.Name, ast.Load, ast.Constant),
    ast.Subscript,
)

_parsing = threading.Lock()
"""CPython 3.11 counts how deep a tree is for all threads together: two that parse at once may get a SystemError."""

_NUMBERS = {
    "float": "f4",
    "double": "f8",
    "bool": "?",
    "int": "i4",
    "short": "i2",
    "signed char": "i1",
    "long long": "i8",
    "unsigned": "u4",
    "unsigned short": "u2",
    "unsigned char": "u1",
    "unsigned long long": "u8",
}
"""C++'s name of a type -> numpy's."""

_MOST_THREADS = 1024


def _cast(dtype: Any) -> Callable[[Any], Any]:
    return lambda value: np.asarray(value).astype(dtype)


def _exactly(value: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """An array of just that type."""
    found = np.asarray(value)
    assert found.dtype == dtype, f"{found.dtype}, not {dtype}"
    return found


def _divided(a: Any, b: Any) -> np.ndarray[Any, Any]:
    assert np.asarray(a).dtype.kind == "f", f"a division of {np.asarray(a).dtype}"
    return a / b


_KNOWN: dict[str, Callable[..., Any]] = {
    **{name: _cast(dtype) for name, dtype in _NUMBERS.items() if name.isidentifier()},
    "__uint_as_float": lambda bits: _exactly(bits, np.uint32).view(np.float32),
    "__float_as_uint": lambda value: _exactly(value, np.float32).view(np.uint32),
    **{f"__d{name}_rn": rule for name, rule in (("add", np.add), ("sub", np.subtract))},
    **{f"__d{name}_rn": rule for name, rule in (("mul", np.multiply), ("div", np.divide))},
    "_where": np.where,
    "_divided": _divided,
    "_plain": lambda rule, a, b: flushed(rule(flushed(a), flushed(b))),
    **{f"_{name}": getattr(np, name) for name in ("add", "subtract", "multiply", "less", "greater", "not_equal")},
}
"""What every kernel can call."""

_INSTRUCTIONS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "add.rn.f32": ("f4", np.add),
    "sub.rn.f32": ("f4", np.subtract),
    "mul.rn.f32": ("f4", np.multiply),
    "div.rn.f32": ("f4", np.divide),
    "set.lt.u32.f32": ("f4", lambda a, b: np.where(a < b, np.uint32(0xFFFFFFFF), np.uint32(0))),
    "cvt.f32.f16": ("u2", lambda a: a.view(np.float16).astype(np.float32)),
    "cvt.rn.f16.f32": ("f4", lambda a: a.astype(np.float16).view(np.uint16)),
}
"""Instruction of PTX -> the type of what it takes, and what it does."""


@dataclass
class _Kernel:
    """A kernel: its pointers with the types behind them, and its statements."""

    pointers: list[tuple[str, str]]
    steps: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)


class RawModule:
    """A module.

    Raises:
        ValueError: It is not in that part of C++.
    """

    def __init__(
        self,
        *,
        code: str | None = None,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Any = None,
        jitify: Any = None,
    ) -> None:
        if code is None:
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        self._names: dict[str, Any] = dict(_KNOWN)
        self._kernels: dict[str, _Kernel] = {}
        lines = iter(filter(None, map(str.strip, code.splitlines())))
        for line in lines:
            head = _KERNEL.fullmatch(line)
            if head is None:
                self._add(line)
                continue
            kernel = self._kernels[head["name"]] = _Kernel([_pointer(one) for one in head["takes"].split(", ")])
            if _LOOP.fullmatch(next(lines)) is None:
                raise ValueError(f"the fake can't read the loop of {head['name']}")
            for step in iter(lambda: next(lines), "}"):
                kernel.steps.append(self._step(step))
            if next(lines) != "}":
                raise ValueError(f"the fake can't read the end of {head['name']}")

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(name, self._kernels.get(name), self._names)

    def _add(self, line: str) -> None:
        found = _FUNCTION.fullmatch(line)
        if found is not None:
            call = _function(found["gives"], _takes(found), _compiled(found["value"]), self._names)
        else:
            found = _PTX.fullmatch(line)
            if found is None:
                raise ValueError(f"the fake can't read {line!r}")
            call = _instruction(found["instruction"], found["gives"])
        self._names[found["name"]] = call

    def _step(self, line: str) -> Callable[[dict[str, Any]], None]:
        store = _STORE.fullmatch(line)
        if store is not None:
            index, value = _compiled(store["index"]), _compiled(store["value"])

            def put(own: dict[str, Any]) -> None:
                own[store["array"]][self._value(index, own)] = self._value(value, own)

            return put
        found = _ASSIGNED.fullmatch(line)
        if found is None:
            raise ValueError(f"the fake can't read {line!r}")
        value = _compiled(found["value"])

        def assign(own: dict[str, Any]) -> None:
            name = found["name"]
            dtype = _NUMBERS[found["kind"]] if found["kind"] else own[name].dtype
            own[name] = np.asarray(self._value(value, own)).astype(dtype)

        return assign

    def _value(self, code: CodeType, own: dict[str, Any]) -> Any:
        return eval(code, {"__builtins__": {}}, {**self._names, **own})


class RawKernel:
    """A kernel of a module; called with its grid, its blocks, and the addresses and the number of its elements."""

    def __init__(self, name: str, kernel: _Kernel | None, names: dict[str, Any]) -> None:
        self.name = name
        self._kernel, self._names = kernel, names

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[int, ...], **_: Any) -> None:
        """Enqueues it on the caller's stream.

        Raises:
            ValueError: There is no such kernel, or it can't be launched so.
        """
        if self._kernel is None:
            raise ValueError(f"the module has no kernel {self.name}")
        if not (all(one >= 1 for one in grid) and all(1 <= one <= _MOST_THREADS for one in block)):
            raise ValueError(f"{self.name} can't be launched on {grid} blocks of {block} threads")
        *pointers, count = args
        if len(pointers) != len(self._kernel.pointers) or any(type(one) is not int for one in args):
            raise TypeError(f"{self.name} takes {len(self._kernel.pointers)} addresses and a number, and got {args}")
        machine, kernel = current(), self._kernel
        own = {
            name: _elements(machine.heap.rest(address), dtype)
            for address, (name, dtype) in zip(pointers, kernel.pointers, strict=True)
        }

        def run() -> None:
            values = {**own, "i": np.arange(count)}
            for step in kernel.steps:
                step(values)

        spans = [(address, 1) for address in pointers]
        machine.enqueue(machine.current_queue(), machine.work(f"cupy.{self.name}", run, spans))


def _elements(rest: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    itemsize = np.dtype(dtype).itemsize
    return rest[: rest.size // itemsize * itemsize].view(dtype)


def _pointer(text: str) -> tuple[str, str]:
    kind, _, name = text.removeprefix("const ").partition("* ")
    return name, _NUMBERS[kind]


def _takes(found: re.Match[str]) -> list[tuple[str, str]]:
    return [(kind, name) for kind, _, name in (one.rpartition(" ") for one in found["takes"].split(", "))]


def _instruction(name: str, gives: str) -> Callable[..., Any]:
    if name not in _INSTRUCTIONS:
        raise ValueError(f"the fake does not know {name}")
    dtype, rule = _INSTRUCTIONS[name]
    return lambda *args: _exactly(rule(*(_exactly(one, dtype) for one in args)), _NUMBERS[gives])


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
    return compile(ast.fix_missing_locations(_Operators().visit(tree)), value, "eval")


def _means_something_else(node: ast.AST, text: str) -> bool:
    """Whether C++ reads it in another way: there comparisons bind closer than bits do, and have two sides."""
    if not isinstance(node, ast.Compare):
        return False
    bare = [side for side in (node.left, *node.comparators) if text[max(side.col_offset - 1, 0)] != "("]
    bits = (ast.BitAnd, ast.BitOr, ast.BitXor)
    return len(node.ops) > 1 or any(isinstance(side, ast.BinOp) and isinstance(side.op, bits) for side in bare)


class _Operators(ast.NodeTransformer):
    """Lets operators take subnormal floats for 0, and divisions look whether they are of floats."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        rule = _RULES.get(type(node.op))
        return node if rule is None else _called(rule, node.left, node.right)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        return _called(_RULES[type(node.ops[0])], node.left, node.comparators[0])


_RULES: dict[type[ast.AST], str] = {
    ast.Add: "_add",
    ast.Sub: "_subtract",
    ast.Mult: "_multiply",
    ast.Div: "_divided",
    ast.Lt: "_less",
    ast.Gt: "_greater",
    ast.NotEq: "_not_equal",
}
"""Operator of C++ -> numpy's function for it."""


def _called(rule: str, *sides: ast.expr) -> ast.AST:
    names = [ast.Name(name, ast.Load()) for name in ("_plain", rule)]
    return ast.Call(names[0], [names[1], *sides], [])


def _function(gives: str, takes: list[tuple[str, str]], value: CodeType, names: dict[str, Any]) -> Any:
    def call(*args: Any) -> Any:
        given = {
            name: np.asarray(arg).astype(_NUMBERS[kind], casting="unsafe" if kind in _ANY_WHOLE else "no")
            for (kind, name), arg in zip(takes, args, strict=True)
        }
        return np.asarray(eval(value, {"__builtins__": {}}, {**names, **given})).astype(_NUMBERS[gives])

    return call


_ANY_WHOLE = {name for name, dtype in _NUMBERS.items() if dtype[0] in "iu"}
"""Types to which C++ converts whole numbers of other types where a function takes them; floats are never converted."""
