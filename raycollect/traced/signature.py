"""What a step's function is called with: values that each call may give others of, and what the trace depends on.

Plain values, arrays and tensors are *leaves*, alone or in lists, tuples and dicts. The structure around them, their
types, and everything else that is passed are the *key* of a trace: calls with equal keys share one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from raycollect.backends import arrays
from raycollect.errors import refusal, wrong_argument

SCALARS = frozenset({bool, int, float, complex, str, bytes})

_FIXED, _ARRAY = range(2)  # what a key of a value that is no structure begins with
_PLAIN_KINDS = frozenset("biufcSUmM")  # of dtypes whose elements are plain bytes


class _Identity:
    """Equal to itself alone, for values that can't be compared by a dict."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return type(other) is _Identity and other.value is self.value


class CallReader:
    """Reads the calls of one function.

    Args:
        function: It.
        static: The names of parameters whose values are part of the key, whatever they are.
        bound: Whether its first argument is always the same object, which is no part of the key.

    Raises:
        InvalidArgumentError: The function has no such parameter.
    """

    def __init__(self, function: Callable[..., Any], static: Collection[str] = (), *, bound: bool = False) -> None:
        self.signature: inspect.Signature = inspect.signature(function)
        parameters = self.signature.parameters
        self.names: tuple[str, ...] = tuple(parameters)
        unknown = [one for one in static if one not in parameters]
        if unknown:
            expected = f"among the parameters {', '.join(self.names) or '(there are none)'}"
            raise refusal("step", "", (wrong_argument("static", ", ".join(map(repr, unknown)), expected),))
        self._is_static = tuple([name in static for name in self.names])
        self._first = int(bound)
        self._is_plain = all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in parameters.values())
        self._defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The value of each parameter, those by default included; TypeError as the function itself raises it."""
        rest = self.names[len(args) :]
        if self._is_plain and not rest and not kwargs and len(args) == len(self.names):
            return args
        if self._is_plain and rest and kwargs.keys() <= set(rest):
            try:
                return [*args, *[kwargs[name] if name in kwargs else self._defaults[name] for name in rest]]
            except KeyError:
                pass  # one is missing
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return [bound.arguments[name] for name in self.names]

    def read(self, values: Sequence[Any], leaves: list[Any]) -> Hashable:
        """The key of a call; adds its leaves, in order."""
        pairs = zip(values, self._is_static, strict=True)
        if self._first:
            next(pairs, None)
        return tuple([_key(one, leaves, fix) for one, fix in pairs])

    def traced(self, values: Sequence[Any], leaf: Callable[[str, str, Any], Any]) -> inspect.BoundArguments:
        """The arguments with which the function is traced.

        Args:
            values: Of the parameters.
            leaf: Gives what stands for a leaf, in the order of `read`: by its parameter, its name and its value.
        """
        filled: Any = dict(zip(self.names, values, strict=True))
        for at, name in enumerate(self.names):
            if at >= self._first and not self._is_static[at]:
                filled[name] = _traced(filled[name], name, partial(leaf, name))
        return inspect.BoundArguments(self.signature, filled)


def _key(value: Any, leaves: list[Any], fix: bool) -> Hashable:
    kind = type(value)
    if value is None:
        return None
    if kind in SCALARS:
        if fix:
            return _FIXED, kind, repr(value) if kind is float or kind is complex else value
        leaves.append(value)
        return kind  # type: ignore[return-value]  # types have a hash
    if kind is list or kind is tuple:
        return kind, *[_key(one, leaves, fix) for one in value]
    if kind is dict:
        names = tuple(value)
        return kind, names, tuple(map(type, names)), *[_key(one, leaves, fix) for one in value.values()]
    found = _array_key(value)
    if found is None:
        return _fixed(value, kind)
    if not fix:
        leaves.append(value)
        return found
    if isinstance(value, np.generic):
        return found, value.tobytes()
    expected = "a value that does not change: leave the parameter out of `static`"
    raise refusal("step", "", (wrong_argument("static", f"an array or a tensor ({kind.__qualname__})", expected),))


def _array_key(value: Any) -> Hashable:
    """The dtype and shape of an array, a numpy scalar or a tensor; None for everything else."""
    kind = type(value)
    if kind is np.ndarray or kind is np.memmap or isinstance(value, np.generic):
        dtype = value.dtype
        return (_ARRAY, kind, dtype, value.shape) if is_plain_dtype(dtype) else None
    if isinstance(value, np.ndarray) or not _may_be_tensor(kind) or not arrays.is_tensor(value):  # type: ignore[arg-type]
        return None
    return _ARRAY, kind, arrays.describe(value)


@lru_cache(maxsize=256)
def _may_be_tensor(kind: type) -> bool:
    """Whether objects of a type show memory: to ask an object of another type takes long."""
    return any(hasattr(kind, name) for name in ("__dlpack__", "__array_interface__", "__cuda_array_interface__"))


def is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of it travel with a run."""
    return (dtype.kind in _PLAIN_KINDS and dtype.fields is None) or dtype in arrays.NARROW


def _fixed(value: Any, kind: type) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return _FIXED, _Identity(value)
    return _FIXED, kind, value


def _traced(value: Any, where: str, leaf: Callable[[str, Any], Any]) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_traced(one, f"{where}[{at}]", leaf) for at, one in enumerate(value)])
    if kind is dict:
        return {name: _traced(one, f"{where}[{name!r}]", leaf) for name, one in value.items()}
    is_leaf = value is not None and (kind in SCALARS or _array_key(value) is not None)
    return leaf(where, value) if is_leaf else value
