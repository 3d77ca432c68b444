"""Placeholders for values: handles, results of calls in a batch, arguments of captured steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any


class Placeholder:
    """Stands for a value that is elsewhere, or not there yet: using it as the value is refused.

    Otherwise Python would take it for a value: true, unequal to everything, and so silently wrong.
    """

    __slots__ = ()

    def _misused(self, name: str = "") -> Exception:
        """The error to raise; where an attribute of that name was asked for, an AttributeError."""
        raise NotImplementedError

    def _used(self, use: str) -> Exception:
        """The error to raise where Python uses it as the value; `use` says how: ``"+"``, ``"float()"``."""
        return self._misused()

    def _passed_to(self, function: str) -> None:
        """It is passed to a function of Ray, which may refuse it; raises where that would not say why."""

    __array_priority__: float = 1e9  # so that numpy's operators leave it to those here

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __eq__(self, other: object) -> bool:
        # It equals itself; comparing it with a value is refused.
        if other is None or isinstance(other, Placeholder):
            return self is other
        raise self._used("==")

    def __format__(self, spec: str) -> str:
        if spec:
            raise self._used("format()")
        return str(self)

    if not TYPE_CHECKING:  # a type checker knows the attributes that there are

        def __getattr__(self, name: str) -> Any:
            # Libraries look for names such as `__deepcopy__` in anything, also in objects not initialised yet.
            if name.startswith("__") or name in type(self).__slots__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise self._misused(name)


# `array` is what numpy's functions ask for. Set like this, type checkers refuse them, too.
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
