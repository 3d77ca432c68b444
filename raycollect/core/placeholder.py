"""Placeholders for values: handles, results of calls in a batch, arguments of captured steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any


class Placeholder:
    """Stands for a remote or future value, and refuses to be used as the value.

    Otherwise Python would treat it as a value that is true and unequal to everything, with silently wrong results.
    """

    __slots__ = ()

    def _misused(self, name: str = "") -> Exception:
        """The error to raise; for access to an attribute of that name, an AttributeError."""
        raise NotImplementedError

    def _used(self, use: str) -> Exception:
        """The error to raise if an operator or function `use` takes it as the value: ``"+"``, ``"float()"``."""
        return self._misused()

    def _passed_to(self, function: str) -> None:
        """Called if it is passed to a function of Ray; may raise a clearer error than Ray."""

    __array_priority__: float = 1e9  # numpy's operators defer to the methods of this class

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __eq__(self, other: object) -> bool:
        # It equals itself, and refuses comparison with values.
        if other is None or isinstance(other, Placeholder):
            return self is other
        raise self._used("==")

    def __format__(self, spec: str) -> str:
        if spec:
            raise self._used("format()")
        return str(self)

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            # Libraries look up names such as `__deepcopy__` on any object, also on uninitialized ones.
            if name.startswith("__") or name in type(self).__slots__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise self._misused(name)


# numpy's functions call `__array__`. As the methods are set dynamically, type checkers refuse their use, too.
_REFUSED = (
    "bool iter reversed len getitem setitem delitem contains call int float complex index bytes round trunc floor ceil "
    "lt le gt ge add sub mul truediv floordiv mod divmod pow matmul lshift rshift and or xor radd rsub rmul rtruediv "
    "rfloordiv rmod rdivmod rpow rmatmul rlshift rrshift rand ror rxor neg pos abs invert array"
)
_SIGNS = {
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//",
    "mod": "%", "pow": "**", "matmul": "@", "lshift": "<<", "rshift": ">>", "and": "&", "or": "|", "xor": "^",
    "neg": "-", "pos": "+", "invert": "~", "getitem": "[]", "setitem": "[]", "delitem": "[]", "contains": "in",
}  # fmt: skip


def _refusing(name: str) -> Callable[..., Any]:
    use = _SIGNS.get(name) or _SIGNS.get(name.removeprefix("r")) or f"{name}()"

    def refuse(self: Placeholder, *_: Any, **__: Any) -> Any:
        raise self._used(use)

    return refuse


for _name in _REFUSED.split():
    setattr(Placeholder, f"__{_name}__", _refusing(_name))
