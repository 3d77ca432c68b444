"""The block of a captured step: records collectives and method calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import ray

from raycollect.captured.calls import StepRequests
from raycollect.captured.step_values import Parameters, ReturnedValues, packed
from raycollect.driver import batch, operand_binding
from raycollect.driver.batch import Batch
from raycollect.driver.operand_binding import Operand
from raycollect.driver.pending import Argument, Pending, plain
from raycollect.driver.requests import Ref
from raycollect.engine.step_program import Given
from raycollect.engine.value_codec import pack_value
from raycollect.errors import CaptureError, Violation, refusal, wrong_argument
from raycollect.errors.text import a_type, listed
from raycollect.ray_bridge import ray_actors, ray_refs

_AS_ARGUMENT = (
    "a plain value or an array, alone or in lists, tuples and dicts; pass anything else as an argument of its own: a "
    "ref of ray.put or of a method, what a call of the step gives, or step.argument()"
)
_AS_RETURNED = "what a call gave, a ref, an argument, or a plain value; or a list, tuple or dict of them"


class Recording(Batch):
    """The recording of a captured step's block: to the operations, a batch that is never sent."""

    is_eager: ClassVar[bool] = False  # as a `CallRecorder` of the calls of its thread
    is_traced: ClassVar[bool] = False  # whether the calls are those of a function, and not of a block
    _takes_driver = False
    _ASYNC_ADVICE = "False in a captured step: run(async_op=True) is for the whole of it"

    def __init__(self, capture: bytes, *, staging_nbytes: int, timeout_s: float | None) -> None:
        super().__init__(staging_nbytes=staging_nbytes, timeout_s=timeout_s)
        self.request_list: StepRequests = StepRequests(capture, is_traced=self.is_traced)
        self.parameters: Parameters = Parameters()
        self.returned: ReturnedValues | None = None
        self.leaves: list[Any] = []
        self.retained: list[Pending] = []  # whose values stay in their actors after each run

    # ------------------------------------------------------------------------------------------ as a batch

    def clear(self) -> None:
        """Drops the recorded calls, but not the parameters and the structure of the return value."""
        self.request_list.clear()
        self.leaves, self.retained = [], []

    def seal(self) -> None:
        """Ends the recording; only the parameters and the structure of the return value stay."""
        self.request_list.seal()
        self.clear()

    def _stand_in(self, value: Any) -> Any:
        """Raises CaptureError for a placeholder of another step; everything stands for itself."""
        return self._own(value) if type(value) is Pending else value

    def _own(self, value: Pending) -> Pending:
        if value.step >= 0 and not value._is_of(self.request_list):
            raise CaptureError(
                detail=f"{value!r} belongs to another captured step, and is there only while that one runs"
            )
        return value

    def _send(self) -> None:
        pass  # the capture installs the step

    def _release(self) -> None:
        pass  # the capture releases the groups

    def _sent(self) -> Batch:
        raise CaptureError(detail="a batch in a captured step has no results of its own: let the step return them")

    # ------------------------------------------------------------------------------------------ method calls

    def is_here(self) -> bool:
        """Whether the caller is in the thread, or the asynchronous task, that records."""
        return self._is_open and self._is_here()

    def method(self, submit: Callable[[], Any], handle: Any, name: str, options: dict[str, Any]) -> Pending:
        """Records ``actor.method.remote()``."""
        unusual = ray_actors.unusual_options(handle, name, options)
        if unusual:
            expected = "left out: a run of a step calls the method itself, without a task"
            violations = [wrong_argument(option, value, expected) for option, value in unusual.items()]
            raise refusal(f"call of {name}", "", tuple(violations))
        self._must_precede_batch(name)
        kwargs = {key: value for key, value in (options["kwargs"] or {}).items() if key != ray_actors.TRACE_ARGUMENT}
        return self._record(handle, name, options["args"] or (), kwargs)

    def _must_precede_batch(self, name: str) -> None:
        """Outside a step, a method that a batch's block calls runs before the batch, wherever it is called."""
        inner = batch.current()
        while inner is not None and inner is not self:
            if len(self.request_list.requests) > inner._first:
                detail = f"{name} is called in a batch of a step, after a collective of it: call it before the batch"
                raise CaptureError(detail=detail)
            inner = inner._outer

    def call(self, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pending:
        """Records a method call (`Capture.call`)."""
        named = ray_actors.read_method(method)
        if named is None:
            raise refusal("call", "", (wrong_argument("method", *_no_method(method)),))
        return self._record(*named, args, kwargs)

    def _record(self, actor: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pending:
        actor_id = ray_actors.id_of(actor)
        violations = list(operand_binding.strangers([Operand(ref=None, key=None, actor_id=actor_id)]))
        if not violations:
            violations += _misfits(actor, method, args, kwargs)
        given = tuple(self._argument(value, f"argument {at}", actor_id, violations) for at, value in enumerate(args))
        named = tuple((name, self._argument(value, name, actor_id, violations)) for name, value in kwargs.items())
        if violations:
            raise refusal(f"call of {method}", "", tuple(violations))
        return self.request_list.call(actor, actor_id, method, given, named)

    def _argument(self, value: Any, where: str, actor_id: str, violations: list[Violation]) -> Any:
        value = self._stands_for(value, where)
        if type(value) is Pending:
            if value.actor_id != actor_id:
                actual, expected = "a value of another actor", "one of the same actor: send it there first, by send_ref"
                violations.append(Violation(kind="not_member", field=where, found=actual, expected=expected))
            return value
        if type(value) in (Argument, Ref):
            return value
        try:
            return Given(pack_value(value))
        except TypeError as exc:
            violations.append(wrong_argument(where, str(exc), _AS_ARGUMENT))
            return None

    # ------------------------------------------------------------------------------------------ results

    def returns(self, values: Any) -> None:
        """Records the return value of each run (`Capture.returns`)."""
        if self.returned is not None:
            raise CaptureError(detail="step.returns() was called before: give it all values at once")
        leaves: list[Any] = []
        self.returned = ReturnedValues.of(values, functools.partial(self._leaf, leaves))
        self.leaves = leaves

    def _leaf(self, leaves: list[Any], value: Any, where: str) -> int | Argument | Given:
        value = self._stands_for(value, where)
        if type(value) is Argument:
            return value
        if type(value) not in (Pending, Ref):
            return Given(packed(value, where, "returns", _AS_RETURNED))
        leaves.append(value)
        return len(leaves) - 1

    def _stands_for(self, value: Any, where: str) -> Any:
        """The placeholder of a value of each run: `Argument`, `Pending` or `Ref`; a plain value itself."""
        value = self._stand_in(value)
        if type(value) is Argument:
            return self.parameters.own(value)
        if type(value) is Pending and value.step >= 0:
            return value
        value = plain(value)
        if not isinstance(value, ray.ObjectRef):
            return value
        key, maker = ray_refs.read_ref(value)
        return Ref(key, value, maker, where)


def _no_method(value: Any) -> tuple[str, str]:
    expected = "a method of a participant: step.call(actor.method, ...), or actor.method.remote(...)"
    if isinstance(value, ray.ObjectRef):
        return "an ObjectRef: its method was called already, and is not called again by runs", expected
    return a_type(value), expected


def _misfits(actor: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Violation]:
    signatures = ray_actors.methods_of(actor)
    if signatures is None:
        return []
    who = ray_actors.describe_actor(actor)
    if method not in signatures:
        public = [name for name in signatures if not name.startswith("_")]
        return [wrong_argument("method", f"{method!r}, which {who} lacks", f"one of {listed(public)}")]
    if ray_actors.is_generator(actor, method):
        actual, expected = f"{method!r} of {who}, a generator", "one that returns its value"
        return [Violation(kind="unsupported", field="method", found=actual, expected=expected)]
    try:
        signatures[method].bind(*args, **kwargs)
    except TypeError as exc:
        expected = f"{method}{signatures[method]}"
        return [wrong_argument("list of arguments", f"not what {method} of {who} takes ({exc})", expected)]
    return []
