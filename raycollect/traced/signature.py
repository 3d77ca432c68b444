"""The arguments of a step's function: leaves, which may differ between calls, and the key, on which the trace depends.

Plain values, arrays and tensors are *leaves*, alone or in lists, tuples and dicts. The structure around them, their
types, and all other arguments are the *key* of a trace: calls with equal keys share one trace.
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

_FIXED, _ARRAY = range(2)  # the first item of a key of a value that is no structure
_PLAIN_KINDS = frozenset("biufcSUmM")  # of dtypes whose elements are plain bytes


class _Identity:
    """Wraps a value that is not hashable; equal only for the same object."""

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
        function: The function.
        static: The names of parameters whose values are part of the key, of any type.
        bound: Whether its first argument is always the same object, which is no part of the key.

    Raises:
        InvalidArgumentError: The function has no such parameter.
    """

    def __init__(self, function: Callable[..., Any], static: Collection[str] = (), *, bound: bool = False) -> None:
        self.signature: inspect.Signature = inspect.signature(function)
        parameters = self.signature.parameters
        self.names: tuple[str, ...] = tuple(parameters)
        unknown = [name for name in static if name not in parameters]
        if unknown:
            expected = f"among the parameters {', '.join(self.names) or '(there are none)'}"
            raise refusal("step", "", (wrong_argument("static", ", ".join(map(repr, unknown)), expected),))
        self._is_static = tuple([name in static for name in self.names])
        self._first = int(bound)
        self._is_plain = all(param.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for param in parameters.values())
        self._defaults = {name: param.default for name, param in parameters.items() if param.default is not param.empty}

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Returns the value of each parameter, including defaults; raises TypeError as the function itself does."""
        rest = self.names[len(args) :]
        if self._is_plain and not rest and not kwargs and len(args) == len(self.names):
            return args
        if self._is_plain and rest and kwargs.keys() <= set(rest):
            try:
                return [*args, *[kwargs[name] if name in kwargs else self._defaults[name] for name in rest]]
            except KeyError:
                pass  # an argument is missing
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return [bound.arguments[name] for name in self.names]

    def read(self, values: Sequence[Any], leaves: list[Any]) -> Hashable:
        """Returns the key of a call; appends its leaves, in order."""
        pairs = zip(values, self._is_static, strict=True)
        if self._first:
            next(pairs, None)
        return tuple([_key(value, leaves, fix) for value, fix in pairs])

    def traced(self, values: Sequence[Any], leaf: Callable[[str, str, Any], Any]) -> inspect.BoundArguments:
        """Returns the arguments with which the function is traced.

        Args:
            values: The values of the parameters.
            leaf: Returns the placeholder of a leaf, in the order of `read`: by its parameter, its name and its value.
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
        return kind, *[_key(item, leaves, fix) for item in value]
    if kind is dict:
        names = tuple(value)
        return kind, names, tuple(map(type, names)), *[_key(item, leaves, fix) for item in value.values()]
    array_key = _array_key(value)
    if array_key is None:
        return _fixed(value, kind)
    if not fix:
        leaves.append(value)
        return array_key
    if isinstance(value, np.generic):
        return array_key, value.tobytes()
    expected = "a value that does not change: leave the parameter out of `static`"
    raise refusal("step", "", (wrong_argument("static", f"an array or a tensor ({kind.__qualname__})", expected),))


def _array_key(value: Any) -> Hashable:
    """Returns the dtype and shape of an array, a numpy scalar or a tensor; None for other values."""
    kind = type(value)
    if kind is np.ndarray or kind is np.memmap or isinstance(value, np.generic):
        dtype = value.dtype
        return (_ARRAY, kind, dtype, value.shape) if is_plain_dtype(dtype) else None
    if isinstance(value, np.ndarray) or not _may_be_tensor(kind) or not arrays.is_tensor(value):  # type: ignore[arg-type]
        return None
    return _ARRAY, kind, arrays.describe(value)


@lru_cache(maxsize=256)
def _may_be_tensor(kind: type) -> bool:
    """Returns whether objects of a type may be tensors; the check of an object of another type is slow."""
    return any(hasattr(kind, name) for name in ("__dlpack__", "__array_interface__", "__cuda_array_interface__"))


def is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Returns whether arrays of a dtype can be sent with a run."""
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
        return kind([_traced(item, f"{where}[{at}]", leaf) for at, item in enumerate(value)])
    if kind is dict:
        return {name: _traced(item, f"{where}[{name!r}]", leaf) for name, item in value.items()}
    is_leaf = value is not None and (kind in SCALARS or _array_key(value) is not None)
    return leaf(where, value) if is_leaf else value
