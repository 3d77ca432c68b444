"""Placeholders: for outputs of calls that are not sent yet, and for values of each run of a captured step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raycollect.core.model import Key
from raycollect.core.placeholder import Placeholder
from raycollect.core.user_line import user_line
from raycollect.errors import BatchError, CaptureError, RaycollectError, TracedValueError

_OPEN = "its batch has not ended: use it after the block, or as an operand of a later call in it"
_IN_RUNS = (
    "a value of a captured step exists only while the step runs: pass it to later calls of its block, or to `returns`; "
    "step.explain() describes it after the block, plan() can't"
)
_OF_RUNS = "stands for a value of each run: compute with it in a method"


class _Recorded(Placeholder):
    """A value of the runs of a step. In a traced step, errors name the value and the line that used it."""

    __slots__ = ()

    _traced: str
    """Its name in errors of a traced step; empty in the block of a captured step."""

    _parameter: str = ""

    def _used(self, use: str) -> Exception:
        if not self._traced:
            return self._misused()
        return TracedValueError(value=self._traced, parameter=self._parameter, use=use, where=user_line())

    def _passed_to(self, function: str) -> None:
        if self._traced:
            raise self._used(function)

    def __str__(self) -> str:
        if self._traced:
            raise self._used("str()")
        return repr(self)

    def __eq__(self, other: object) -> bool:
        is_ref = type(self) is type(other) is Pending  # as refs of two calls, they differ
        if self._traced and self is not other and other is not None and not is_ref:
            raise self._used("==")
        return super().__eq__(other)

    def __hash__(self) -> int:
        return super().__hash__()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name[:1] == "_" or name in type(self).__slots__ or not self._traced:
                return super().__getattr__(name)
            raise self._used(f"the attribute {name!r}")


def _misuse(error: RaycollectError, name: str) -> Exception:
    return AttributeError(f"no attribute {name!r}: {error}") if name else error


def _stray(value: _Recorded) -> CaptureError:
    """A placeholder of a captured step is sent to another process."""
    return CaptureError(detail=f"{value!r} has no meaning outside of its driver: {_IN_RUNS}")


class Pending(_Recorded):
    """Stands for a ref that a call of a batch will return: the call's output, which the plan makes.

    Inside the block it may be an operand of later calls. After the block, `ref` is the ObjectRef; `get`, `free` and all
    operations take the placeholder as well. It can't be passed to a Ray call: pass `ref`.

    In a captured step it stands for another value in each run, and never has a ref.

    Attributes:
        actor_id: The participant on which it is made.
        request: The number of its call; -1: a method's.
        step: In a captured step, the place of its call among all calls; -1 elsewhere.
        key: Its key in errors, where an earlier plan of the step makes it; None: the current plan.
    """

    __slots__ = ("_ref", "_request_list", "_traced", "_why", "actor_id", "key", "request", "step")

    def __init__(
        self, request_list: object, request: int, actor_id: str, *, step: int = -1, key: Key | None = None
    ) -> None:
        self.actor_id: str = actor_id
        self.request: int = request
        self.step: int = step
        self.key: Key | None = key
        self._traced: str = ""
        self._request_list: object | None = request_list
        self._ref: Any = None
        self._why = _OPEN

    @property
    def ref(self) -> Any:
        """The ObjectRef.

        Raises:
            BatchError: Its batch has not ended, or failed.
            CaptureError: It is an output of the runs of a captured step.
        """
        if self._traced:  # it is allowed wherever a ref is
            return self
        if self.step >= 0:
            raise CaptureError(detail=f"{self!r} is not a ref: {_IN_RUNS}")
        if self._ref is None:
            raise BatchError(detail=f"{self!r} is not a ref: {self._why}")
        return self._ref

    def _misused(self, name: str = "") -> Exception:
        if self.step >= 0:
            return _misuse(CaptureError(detail=f"{self!r} {_OF_RUNS}"), name)
        what = "stands for a ref, not for its value: compute with it in a method, or fetch it after the block"
        return _misuse(BatchError(detail=f"{self!r} {what} with `col.get`"), name)

    def _is_of(self, request_list: object) -> bool:
        """Whether a call of these requests, which are not sent yet, makes it."""
        return self._request_list is request_list

    def _settle(self, ref: Any, why: str) -> None:
        """Sets its ref, or the reason why it has none."""
        self._request_list, self._ref, self._why = None, ref, why

    def __reduce__(self) -> Any:
        if self._traced:
            raise self._used("pickle")
        if self.step >= 0:
            raise _stray(self)
        raise BatchError(detail=f"{self!r} can't leave the driver: pass its `ref`, after the block has ended")

    def __repr__(self) -> str:
        ref = f"; its ref is {self._ref.hex()}" if self._ref is not None else ""
        if self._traced:
            return f"<{self._traced}>"
        return f"<Pending: made by call {max(self.step, self.request)} on actor {self.actor_id[:6]}{ref}>"


class Argument(_Recorded):
    """Stands for an argument of each run of a captured step.

    Attributes:
        default: Its value where a run gives none.
        kind: Its type, where the step's function is traced: `isinstance` tells the truth.
        made_of: A structure of other arguments and of values; None: it is given by itself.
    """

    __slots__ = ("_parameter", "_traced", "default", "kind", "made_of", "name", "owner")

    def __init__(
        self,
        owner: object,
        name: str,
        *,
        default: Any,
        parameter: str = "",
        kind: type | None = None,
        made_of: Any = None,
    ) -> None:
        self.owner: object = owner
        self.name: str = name
        self.default: Any = default
        self.kind: type = kind or Argument
        self.made_of: Any = made_of
        self._traced: str = f"the argument {name!r}" if parameter else ""
        self._parameter = parameter

    if not TYPE_CHECKING:

        @property
        def __class__(self) -> type:
            return self.kind

    def __hash__(self) -> int:
        if self._traced:
            raise self._used("hash()")
        return object.__hash__(self)

    def _misused(self, name: str = "") -> Exception:
        return _misuse(CaptureError(detail=f"{self!r} {_OF_RUNS}"), name)

    def __reduce__(self) -> Any:
        if self._traced:
            raise self._used("pickle")
        raise _stray(self)

    def __repr__(self) -> str:
        return f"<Argument {self.name!r} of a captured step>"


def plain(value: Any) -> Any:
    """The ref of a `Pending`, which raises if it has none; any other value unchanged."""
    if isinstance(value, Pending) and value._traced:
        raise value._used("raycollect.get() or another function")
    return value.ref if isinstance(value, Pending) else value
