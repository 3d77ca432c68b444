"""What stands for values that are not there yet: outputs of calls on their way into a plan, arguments of runs."""

from __future__ import annotations

from typing import Any

from raycollect.errors import BatchError, CaptureError, RaycollectError
from raycollect.model import Key

__all__ = ["Argument", "Pending", "plain"]

_OPEN = "its batch has not ended: use it after the block, or as an operand of a later call in it"
_IN_RUNS = (
    "what a captured step makes is there only while it runs: give it to later calls in its own block, or to `returns`; "
    "step.explain() tells of it after the block, plan() can't"
)


class _StandIn:
    """What stands for something that is not there yet: to compute with it, or to look into it, is refused."""

    __slots__ = ()

    def _misused(self) -> RaycollectError:
        """What to raise."""
        raise NotImplementedError

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._misused()

    __array_ufunc__ = None  # so that numpy's operators leave it to those here

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __eq__(self, other: object) -> bool:
        """It is itself, wherever it is looked up; to compare it with a value is refused."""
        if other is None or isinstance(other, _StandIn):
            return self is other
        raise self._misused()


# `array` is what numpy's functions ask for. Set like this, type checkers refuse them, too.
_REFUSED = (
    "bool iter len getitem contains call int float complex index lt le gt ge add sub mul truediv floordiv "
    "mod pow matmul radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul neg pos abs invert and or xor "
    "rand ror rxor array"
)
for _name in _REFUSED.split():
    setattr(_StandIn, f"__{_name}__", _StandIn._refuse)


class Pending(_StandIn):
    """Stands for a ref that a call of a batch will give: the call's output, which the plan makes.

    Inside the block it may be an operand of later calls. After the block, `ref` is the ObjectRef; `get`, `free` and all
    verbs take it as well as that. It can't be passed to a Ray call: give `ref`.

    What a call of a captured step makes, or a method that the step calls returns, is another one in each run, and never
    has a ref.

    Attributes:
        actor_id: The participant on which it is made.
        request: The number of its call; -1: a method's.
        step: In a captured step, the place of its call among all calls; -1 elsewhere.
        key: What stands for it in errors, where it is made before the plan that is being recorded; None: in that plan.
    """

    __slots__ = ("_agenda", "_ref", "_why", "actor_id", "key", "request", "step")

    def __init__(self, agenda: object, request: int, actor_id: str, *, step: int = -1, key: Key | None = None) -> None:
        self.actor_id: str = actor_id
        self.request: int = request
        self.step: int = step
        self.key: Key | None = key
        self._agenda: object | None = agenda
        self._ref: Any = None
        self._why = _OPEN

    @property
    def ref(self) -> Any:
        """The ObjectRef.

        Raises:
            BatchError: Its batch has not ended, or failed.
            CaptureError: It is made in the runs of a captured step.
        """
        if self.step >= 0:
            raise CaptureError(detail=f"{self!r} is no ref: {_IN_RUNS}")
        if self._ref is None:
            raise BatchError(detail=f"{self!r} is no ref: {self._why}")
        return self._ref

    def _misused(self) -> RaycollectError:
        if self.step >= 0:
            return CaptureError(detail=f"{self!r} stands for a value of each run: compute with it in a method")
        return BatchError(detail=f"{self!r} stands for a ref, not for its value: compute with it in a method")

    def is_of(self, agenda: object) -> bool:
        """Whether it is made by a call of an agenda that is not sent yet."""
        return self._agenda is agenda

    def settle(self, ref: Any, why: str) -> None:
        """Gives it its ref, or the reason why it has none."""
        self._agenda, self._ref, self._why = None, ref, why

    def __reduce__(self) -> Any:
        if self.step >= 0:
            return _stray, (repr(self),)
        raise BatchError(detail=f"{self!r} can't leave the driver: pass its `ref`, after the block has ended")

    def __repr__(self) -> str:
        ref = f"; its ref is {self._ref.hex()}" if self._ref is not None else ""
        return f"<Pending: made by call {max(self.step, self.request)} on actor {self.actor_id[:6]}{ref}>"


def _stray(what: str) -> None:
    """Refuses to be what stands for a value of a captured step, where it was sent to another process.

    It can be pickled all the same: Ray does so when it is an argument in ``actor.method.bind(...)``.

    Raises:
        CaptureError: Always.
    """
    raise CaptureError(detail=f"{what} has no meaning outside of its driver: {_IN_RUNS}")


class Argument(_StandIn):
    """Stands for a value that each run of a captured step is given anew.

    Attributes:
        name: Its name.
        default: Its value where a run does not give it.
        has_default: Whether it may be left out.
    """

    __slots__ = ("default", "has_default", "name", "owner")

    def __init__(self, owner: object, name: str, *, default: Any, has_default: bool) -> None:
        self.owner: object = owner
        self.name: str = name
        self.default: Any = default
        self.has_default: bool = has_default

    def _misused(self) -> RaycollectError:
        return CaptureError(detail=f"{self!r} stands for a value of each run: compute with it in a method")

    def __reduce__(self) -> Any:
        return _stray, (repr(self),)

    def __repr__(self) -> str:
        return f"<Argument {self.name!r} of a captured step>"


def plain(value: Any) -> Any:
    """A ref as Ray knows it: a `Pending` becomes its ref.

    Raises:
        BatchError: Its batch has not ended, or failed.
        CaptureError: It is made in the runs of a captured step.
    """
    return value.ref if isinstance(value, Pending) else value
