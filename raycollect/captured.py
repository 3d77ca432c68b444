"""Captured steps: collectives and method calls that are stated once, and run again and again without Ray.

The block of a `capture` is recorded like a batch. At its end each participant is given its routine, by one actor task;
from then on a run is a number, and its arguments, of which all hear at once.
"""

from __future__ import annotations

import copy
import functools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.dag import ClassMethodNode

from raycollect import batches, ray_internals
from raycollect import group as groups
from raycollect.agenda import Argument, CaptureAgenda, MethodCall, Pending, Ref, plain
from raycollect.batches import Batch
from raycollect.call import DEFAULT_TIMEOUT_S
from raycollect.capturing import Installed, install
from raycollect.channel.protocol import MAX_FRAME_NBYTES
from raycollect.controller import Controller
from raycollect.course import Stage
from raycollect.errors import CaptureError, ProtocolError, Violation, refusal
from raycollect.explained import explain_capture
from raycollect.group import Membership, Operand
from raycollect.model import TensorInfo
from raycollect.payload import pack_value, pack_values, unpack_value, unpack_values
from raycollect.planner import STAGING_NBYTES, Source
from raycollect.planner.explain import StepExplanation
from raycollect.routine import CAPTURE_NBYTES, Given
from raycollect.runs import RunFlight, Runs
from raycollect.work import CapturedRun

__all__ = ["Capture", "capture"]

ARGUMENTS_NBYTES = MAX_FRAME_NBYTES - 1024
"""The longest arguments of a run, in bytes as `payload` packs them: a frame of the channel, less what is around it."""

RESERVED = ("async_op", "fence", "timeout_s")
"""The parameters of `Capture.run` itself."""

_NONE = object()


class _Recording(Batch):
    """The block of a captured step, as the verbs see it: a batch that is not sent."""

    _ASYNC_ADVICE = "False in a captured step: run(async_op=True) is for the whole of it"

    def __init__(self, step: Capture, capture: bytes, staging_nbytes: int, timeout_s: float | None) -> None:
        super().__init__(staging_nbytes=staging_nbytes, timeout_s=timeout_s)
        self.recorded = CaptureAgenda(capture)
        self.agenda = self.recorded
        self._step: Capture | None = step

    @property
    def has_failed(self) -> bool:
        """Whether it did not end well."""
        return bool(self._why)

    def end(self) -> dict[Membership, Controller]:
        """The groups that are kept, for the capture to keep on; bound methods are called no more."""
        held, self._held, self._step = self._held, {}, None
        return held

    def stand_in(self, value: Any) -> Any:
        """A bound method is called here, where it first appears."""
        if type(value) is Pending:
            return self.own(value)
        return self._step._called(value) if self._step is not None and type(value) is ClassMethodNode else value

    def own(self, value: Pending) -> Pending:
        """What stands for a value, if it is not of another captured step.

        Raises:
            CaptureError: It is.
        """
        if value.step >= 0 and not value.is_of(self.agenda):
            raise CaptureError(
                detail=f"{value!r} is of another captured step: what that makes is there only while it runs"
            )
        return value

    def _send(self) -> None:
        pass  # the capture does more

    def _release(self) -> None:
        pass  # the capture keeps them

    def _sent(self) -> Batch:
        raise CaptureError(detail="a batch in a captured step has no results of its own: let the step return them")


class Capture:
    """What is recorded in a ``with capture() as step:`` block, and its runs; see `capture`.

    In the block `call`, `argument` and `returns` are there, besides the driver's verbs; after it, `run` and `close`.
    Any thread may run it. Where nobody has it any more it is closed.
    """

    def __init__(self, *, staging_nbytes: int = STAGING_NBYTES, timeout_s: float | None = None) -> None:
        self._id = secrets.token_bytes(CAPTURE_NBYTES)
        self._block = _Recording(self, self._id, staging_nbytes, timeout_s)
        self._timeout_s = timeout_s
        self._parameters: dict[str, Argument] = {}
        self._nodes: dict[int, tuple[ClassMethodNode, Pending]] = {}  # bound methods, by their identity
        self._shape: Any = _NONE  # of what runs return: places in `_leaves`, in lists, tuples and dicts
        self._echoed: dict[str, Argument] = {}  # the arguments in it
        self._leaves: list[Any] = []
        self._held: dict[Membership, Controller] = {}
        self._controller: Controller | None = None
        self._installed: Installed | None = None
        self._runs: Runs | None = None
        self._state = "its block was not entered"  # why it can't run; empty while it can
        self._names: tuple[tuple[str, ...], ...] = ()  # of the arguments of a run, by position
        self._places: tuple[tuple[int, int], ...] = ()  # where the values that runs return come from
        self._blank: tuple[bytes, ...] = ()  # the arguments of a run that has none
        self._counts = (0, 0)  # collectives, method calls

    # ------------------------------------------------------------------------------------------ the block

    def __enter__(self) -> Capture:  # noqa: PYI034 - typing.Self came with Python 3.11
        if self._state != "its block was not entered":
            raise CaptureError(detail="a captured step is recorded once: make another one")
        if batches.current() is not None:
            raise CaptureError(detail="a captured step can't be recorded inside a batch or another captured step")
        self._block.__enter__()
        self._state = "its block has not ended"
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        try:
            self._block.__exit__(kind, exc, trace)
        finally:
            self._held = self._block.end()
            self._nodes = {}
            self._state = "its block failed"
            if exc is not None or self._block.has_failed:
                self._block.recorded.clear()
                self._release()
        if exc is not None:
            return
        try:
            self._install()
        except BaseException:
            self._release()
            raise
        finally:
            self._block.recorded.clear()
            self._leaves = []
        self._state = ""

    def _install(self) -> None:
        agenda = self._block.recorded
        if not agenda.asked and not agenda.calls:
            raise CaptureError(detail="nothing was recorded in the block: call verbs of the driver, or step.call")
        self._counts = len(agenda.asked), len(agenda.calls)
        agenda.end_plan()
        self._controller = controller = Controller.current()
        installed = install(
            controller,
            self._id,
            agenda,
            self._leaves,
            self._hold,
            staging=self._block.staging_nbytes,
            timeout_s=DEFAULT_TIMEOUT_S if self._timeout_s is None else self._timeout_s,
        )
        self._installed, self._runs = installed, installed.runs
        self._names, self._places = installed.names, installed.places
        self._blank = (b"",) * len(installed.names)

    def _hold(self, controller: Controller, membership: Membership) -> None:
        if membership not in self._held:
            self._held[membership] = controller
            controller.hold(membership)

    def _release(self) -> None:
        held, self._held = self._held, {}
        for membership, controller in held.items():
            controller.release(membership)

    # ------------------------------------------------------------------------------------------ recording

    def call(self, actor: Any, method: Any = _NONE, /, *args: Any, **kwargs: Any) -> Pending:
        """Records a method call on a participant; ``actor.method.remote()`` is none: it runs now, and once.

        The method runs in a thread of its own, at its place in the step: never while Ray runs a method of an actor
        whose methods run in order. What it returns stays where it is.

        Args:
            actor: The actor handle; or the method, as ``actor.method``, with its arguments; or a bound method, as
                ``actor.method.bind(...)`` gives it, alone.
            method: The method's name, after an actor handle.
            args: Its arguments: plain values and arrays, which are the same in each run; `argument`; what other calls
                of the step made on the same actor; ObjectRefs: of a tensor of that actor the tensor itself, of others
                the value.
            kwargs: The same, by name.

        Returns:
            What stands for the value: for operands of verbs, arguments of later calls on this actor, and `returns`.

        Raises:
            CaptureError: Not in the block itself.
            RefusedError: The actor or an argument can't be used; with every reason.
        """
        self._inside("step.call()")
        if type(actor) is ClassMethodNode and method is _NONE and not args and not kwargs:
            return self._called(actor)
        named = ray_internals.read_method(actor)
        if named is not None:
            return self._record(*named, args if method is _NONE else (method, *args), kwargs)
        return self._record(actor, method, args, kwargs)

    def argument(self, name: str, default: Any = _NONE) -> Argument:
        """Declares an argument that each run is given by name, for methods that the step calls.

        Args:
            name: Its name; not one of `run`'s own parameters.
            default: Its value where a run does not give it; left out: each run has to.

        Raises:
            CaptureError: Not in the block itself.
            InvalidArgumentError: The name or the default can't be used.
        """
        self._inside("step.argument()")
        found = ""
        if not isinstance(name, str) or not name.isidentifier():
            found, expected = repr(name), "a name such as 'rate'"
        elif name in RESERVED:
            found, expected = repr(name), f"not one of run's own: {', '.join(RESERVED)}"
        elif name in self._parameters:
            found, expected = f"{name!r} again", "declared once"
        if found:
            raise refusal("argument", "", (_wrong("name", found, expected),))
        if default is not _NONE:
            _packed(default, "default", "argument")
        made = Argument(self, name, default=default, has_default=default is not _NONE)
        self._parameters[name] = made
        return made

    def returns(self, values: Any) -> None:
        """Says what each run gives back: copies of these values, in this structure.

        Args:
            values: What calls of the step made, or refs that take part in it: one, or a list, tuple or dict of them.
                Among them may be the step's arguments, and plain values and arrays, which come back as they are. None:
                there are no results.

        Raises:
            CaptureError: Not in the block itself, or called before.
            InvalidArgumentError: Something else is among them.
        """
        self._inside("step.returns()")
        if self._shape is not _NONE:
            raise CaptureError(detail="step.returns() was called before: give it all values at once")
        leaves: list[Any] = []
        shape = self._shape_of(values, leaves, "the value")
        self._shape, self._leaves, self._echoed = shape, leaves, _echoed(shape)

    def _shape_of(self, value: Any, leaves: list[Any], where: str) -> Any:
        """The structure, with the places of its values; `leaves` gets the values."""
        if type(value) in (list, tuple):
            return type(value)(self._shape_of(one, leaves, f"{where}[{at}]") for at, one in enumerate(value))
        if type(value) is dict:
            return {name: self._shape_of(one, leaves, f"{where}[{name!r}]") for name, one in value.items()}
        if type(value) is ClassMethodNode:
            value = self._called(value)
        if type(value) is Argument:
            return self._own_argument(value)
        if not (type(value) is Pending and self._block.own(value).step >= 0):
            value = plain(value)
            if not isinstance(value, ray.ObjectRef):
                expected = "what a call gave, a ref, an argument, or a plain value; or a list, tuple or dict of them"
                return Given(_packed(value, where, "returns", expected))
            key, maker = ray_internals.read_ref(value)
            value = Ref(key, value, maker, where)
        leaves.append(value)
        return len(leaves) - 1

    def _inside(self, what: str) -> None:
        """Raises CaptureError where the caller is not in the block itself."""
        found = batches.current()
        if found is self._block:
            return
        if found is not None and found.outermost is self._block:
            raise CaptureError(detail=f"{what} can't be inside a batch of the step: a batch is one plan")
        raise CaptureError(detail=f"{what} belongs into the block of its own captured step: {self!r}")

    def _called(self, node: ClassMethodNode) -> Pending:
        """What stands for the value of a bound method, which is called once."""
        known = self._nodes.get(id(node))
        if known is None:
            self._inside("a bound method")
            actor = None if node.is_class_method_output else node._get_actor_handle()
            made = self._record(actor, node.get_method_name(), node.get_args(), node.get_kwargs())
            known = self._nodes[id(node)] = (node, made)
        return known[1]

    def _record(self, actor: Any, method: Any, args: Any, kwargs: Any) -> Pending:
        violations: list[Violation] = []
        actor_id = ""
        if not isinstance(actor, ray.actor.ActorHandle):
            violations.append(_wrong("actor", *_no_actor(actor)))
        else:
            actor_id = actor._actor_id.hex()
            violations += groups.strangers([Operand(ref=None, key=None, actor_id=actor_id)])
        if actor_id and not isinstance(method, str):
            found = "missing" if method is _NONE else f"a {type(method).__name__}"
            violations.append(_wrong("method", found, "its name"))
        elif actor_id and not violations:
            violations += _misfits(actor, method, args, kwargs)
        given = tuple(self._argument(one, f"argument {at}", actor_id, violations) for at, one in enumerate(args))
        named = tuple((name, self._argument(one, name, actor_id, violations)) for name, one in kwargs.items())
        if violations:
            raise refusal(f"call of {method}" if isinstance(method, str) else "call", "", tuple(violations))
        return self._block.recorded.call(actor, actor_id, method, given, named)

    def _argument(self, value: Any, where: str, actor_id: str, violations: list[Violation]) -> Any:
        """An argument of a method as routines are written from; what is wrong is noted."""
        if type(value) is ClassMethodNode:
            value = self._called(value)
        if type(value) is Argument:
            return self._own_argument(value)
        if type(value) is Pending and self._block.own(value).step >= 0:
            if actor_id and value.actor_id != actor_id:
                found, expected = "a value of another actor", "one of the same actor: send_ref it first"
                violations.append(Violation(kind="not_member", rank=-1, field=where, found=found, expected=expected))
            return value
        value = plain(value)
        if isinstance(value, ray.ObjectRef):
            key, maker = ray_internals.read_ref(value)
            return Ref(key, value, maker, where)
        try:
            return Given(pack_value(value))
        except TypeError as exc:
            violations.append(_wrong(where, str(exc), _AS_ARGUMENT))
            return None

    def _own_argument(self, value: Argument) -> Argument:
        if value.owner is not self:
            raise CaptureError(detail=f"{value!r} is of another one: call step.argument() in this block")
        return value

    # ------------------------------------------------------------------------------------------ running

    def run(
        self, *, async_op: bool = False, fence: bool = False, timeout_s: float | None = None, **arguments: Any
    ) -> Any:
        """Runs the step: all its calls, in order, on all participants.

        Runs take place in the order in which they are begun, after the collectives of this process begun before, and
        before those begun after. They do not wait for methods that were submitted to the actors but have not begun;
        refs that the step uses were made when it was captured.

        Args:
            async_op: True: returns a `CapturedRun` at once. Several runs may be under way.
            fence: True: the run comes after all methods that were submitted to the participants before; it costs an
                actor task each.
            timeout_s: After how many seconds the run is given up and fails; None: the limits of its collectives alone.
            arguments: The arguments that the step declares, by name.

        Returns:
            The values that the step returns, in the structure that was given to `returns`; None without one.

        Raises:
            CaptureError: It is closed, or not ready, or called in a block that records.
            CaptureBrokenError: An earlier run failed.
            InvalidArgumentError: An argument is missing, unknown, too long or of a type that does not travel.
            UnknownGroupError, GroupBrokenError: A group was destroyed or a member is gone; nothing was sent.
            MethodError: A method raised.
            RefusedError, FaultError: As collectives do.
        """
        if self._state or batches.current() is not None:
            raise CaptureError(detail=(self._state and f"this captured step can't run: {self._state}") or _IN_BLOCK)
        payloads = self._arguments(arguments) if arguments or self._parameters else self._blank
        flight = self._runs.begin(payloads, fence=fence, timeout_s=timeout_s)  # type: ignore[union-attr]  # or there would be a state
        given = {name: arguments.get(name, one.default) for name, one in self._echoed.items()}
        if async_op:
            return CapturedRun(self, flight, functools.partial(self._collect, given=given))
        flight.wait(None)
        return self._collect(flight, given)

    def close(self) -> None:
        """Lets go of the step, and of all that it holds; runs under way are aborted. May be called twice."""
        runs = self._runs
        if runs is not None:
            self._state, self._installed = "it was closed", None
            runs.close()
            self._release()

    def _arguments(self, given: dict[str, Any]) -> tuple[bytes, ...]:
        """The arguments of a run as each participant gets them."""
        parameters = self._parameters
        found = [_wrong(name, "given", f"one of {_names(parameters)}") for name in given if name not in parameters]
        values = {name: given.get(name, one.default) for name, one in parameters.items()}
        found += [_wrong(name, "missing", "a value") for name, value in values.items() if value is _NONE]
        if found:
            raise refusal("run", "", tuple(found))
        packed: dict[tuple[str, ...], bytes] = {}
        for mine in self._names:
            if mine not in packed:
                packed[mine] = self._pack(mine, values)
        return tuple(packed[mine] for mine in self._names)

    def _pack(self, names: tuple[str, ...], values: dict[str, Any]) -> bytes:
        try:
            packed = pack_values([values[name] for name in names])
        except TypeError:
            for name in names:
                _packed(values[name], name, "run")
            raise
        if len(packed) > ARGUMENTS_NBYTES:
            sizes = ", ".join(f"{name} {len(pack_value(values[name]))}" for name in names)
            expected = f"at most {ARGUMENTS_NBYTES}: hand over what is long by an ordinary method before the run"
            raise refusal("run", "", (_wrong("arguments", f"{len(packed)} bytes ({sizes})", expected),))
        return packed

    def _collect(self, flight: RunFlight, given: Mapping[str, Any]) -> Any:
        """The values that a run returns, which was given these arguments that it returns.

        Raises:
            RaycollectError: It failed.
        """
        if flight.error is not None:
            raise copy.copy(flight.error) from flight.error.__cause__  # its own: with the frames it would keep the step
        if self._shape is _NONE:
            return None
        values = [unpack_values(one or b"") for one in flight.results]
        try:
            found = [values[at][place] for at, place in self._places]
        except LookupError:
            raise ProtocolError(detail=f"run {flight.seq} came back without its results") from None
        return _filled(self._shape, found, given)

    # ------------------------------------------------------------------------------------------ looking at it

    @property
    def stages(self) -> tuple[Stage | tuple[MethodCall, ...], ...]:
        """Its plans, and between them its method calls, in order; none where it is not ready."""
        if self._installed is None:
            return ()
        calls = self._installed.calls
        found: list[Stage | tuple[MethodCall, ...]] = []
        for stage in self._installed.runs.course.stages:
            found += [_until(calls, found, stage.first), stage]
        found.append(_until(calls, found, self._counts[0] + 1))
        return tuple(one for one in found if one)

    def tensor_infos(self, timeout_s: float = 60.0) -> dict[Source, tuple[TensorInfo, ...] | None]:
        """How the operands of its plans look, by what stands for them there; None: not before the first run.

        Raises:
            CaptureError: It is not ready, or closed.
            UnknownGroupError, GroupBrokenError: A group was destroyed, or a member is gone.
        """
        installed, controller = self._installed, self._controller
        if installed is None or controller is None:
            raise CaptureError(detail=f"this captured step has no tensors yet, or no more: {self._state}")
        runs = installed.runs
        peers = controller.crew(runs.memberships, runs.course.participants)
        looks = ray.get([peer.actor._raycollect_look.remote(self._id) for peer in peers], timeout=timeout_s)
        found = {source: looks[at][slot] for source, (at, slot) in installed.operands.items()}
        return {source: None if one is None else tuple(one) for source, one in found.items()}

    def explain(self) -> StepExplanation:
        """Explains what each run does: its method calls and plans in order, each plan as `raycollect.plan` does.

        Raises:
            CaptureError: It is not ready, or closed; or what a plan works on shows in the first run only.
            UnknownGroupError, GroupBrokenError: A group was destroyed, or a member is gone.
        """
        if self._installed is None:
            raise CaptureError(detail=_UNEXPLAINED.get(self._state) or f"this step can't be explained: {self._state}")
        infos = self.tensor_infos()
        runs = self._installed.runs
        fixed = {source for source in infos if not runs.keys[source].startswith(self._id)}  # type: ignore[call-overload]
        return explain_capture(runs.course, self.stages, infos, fixed)

    def __del__(self) -> None:
        runs, controller = getattr(self, "_runs", None), getattr(self, "_controller", None)
        if runs is not None and controller is not None and not runs.is_closed:
            controller.forsake(runs, tuple(self._held))

    def __repr__(self) -> str:
        verbs, calls = self._counts
        state = self._state or "ready"
        if not self._state and self._runs is not None and self._runs.failure is not None:
            state = f"broken by {type(self._runs.failure).__name__}"
        return f"<Capture of {verbs} collectives and {calls} method calls: {state}>"


_UNEXPLAINED = {"its block has not ended": "a captured step can't be explained before its block has ended"}

_AS_ARGUMENT = (
    "a plain value or an array, alone or in lists, tuples and dicts; for others pass a ref, of ray.put or of a method, "
    "as an argument of its own, as you do with what calls of the step give and with step.argument()"
)
_IN_RUN = (
    "a plain value or an array, alone or in lists, tuples and dicts: hand over others by an ordinary method before the "
    "run"
)

_IN_BLOCK = "a captured step can't run inside a batch or the block of a captured step: its runs are plans of their own"


def capture(*, staging_nbytes: int = STAGING_NBYTES, timeout_s: float | None = None) -> Capture:
    """Records the calls of a block once, to run them again and again without Ray.

    ``with capture() as step:`` records the driver's verbs, and method calls by ``step.call(actor, "method", ...)``. At
    the end of the block every participant is told its part. ``step.run()`` then does all of it, at the cost of one
    small message per participant. Collectives with no method call between them are one plan, like a batch.

    Args:
        staging_nbytes: See `batch`.
        timeout_s: How long ranks wait for each other, in seconds, where a call does not say, and how long participants
            may take to be ready; default 60.

    Raises:
        InvalidArgumentError: An argument makes no sense.
        CaptureError: A captured step, or what stands for a value in it, is used where it can't be.
        RefusedError, GroupError, FaultError: At the end of the block: it can't be planned, or not all are ready.
    """
    batches.check_arguments("capture", staging_nbytes, timeout_s)
    return Capture(staging_nbytes=staging_nbytes, timeout_s=timeout_s)


def _until(
    calls: tuple[MethodCall, ...], found: list[Stage | tuple[MethodCall, ...]], request: int
) -> tuple[MethodCall, ...]:
    """The method calls before a request that were not found yet."""
    known = sum(len(one) for one in found if not isinstance(one, Stage))
    return tuple(call for call in calls[known:] if call.before <= request)


def _filled(shape: Any, values: list[Any], given: Mapping[str, Any]) -> Any:
    """A structure with values, and arguments by their names, in their places."""
    if type(shape) is int:
        return values[shape]
    if type(shape) is Given:
        return unpack_value(shape.packed)
    if type(shape) is Argument:
        return given[shape.name]
    if type(shape) is dict:
        return {name: _filled(one, values, given) for name, one in shape.items()}
    return type(shape)(_filled(one, values, given) for one in shape)


def _echoed(shape: Any) -> dict[str, Argument]:
    """The arguments in a structure, by name."""
    if type(shape) is Argument:
        return {shape.name: shape}
    inner = shape.values() if type(shape) is dict else shape if type(shape) in (list, tuple) else ()
    return {name: one for part in inner for name, one in _echoed(part).items()}


def _packed(value: Any, where: str, op: str, expected: str = "") -> bytes:
    """A value as it travels.

    Raises:
        InvalidArgumentError: It can't.
    """
    try:
        return pack_value(value)
    except TypeError as exc:
        raise refusal(op, "", (_wrong(where, str(exc), expected or _IN_RUN),)) from None


def _no_actor(value: Any) -> tuple[str, str]:
    """What was given in the place of an actor, and what to give."""
    expected = "the handle of a participant, or its method: step.call(actor, 'method', ...)"
    if isinstance(value, ray.ObjectRef):
        return "an ObjectRef: its method was called already, and is not called again by runs", expected
    return f"a {type(value).__name__}", expected


def _misfits(actor: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Violation]:
    """What is wrong with a call of a method, as far as the actor's handle tells."""
    known = ray_internals.methods_of(actor)
    if known is None:
        return []
    who = ray_internals.describe_actor(actor)
    if method not in known:
        public = [name for name in known if not name.startswith("_")]
        return [_wrong("method", f"{method!r}, which {who} lacks", f"one of {', '.join(public)}")]
    if ray_internals.is_generator(actor, method):
        found, expected = f"{method!r} of {who}, a generator", "one that returns its value"
        return [Violation(kind="unsupported", rank=-1, field="method", found=found, expected=expected)]
    try:
        known[method].bind(*args, **kwargs)
    except TypeError as exc:
        return [_wrong("arguments", f"not those of {method} of {who}: {exc}", f"{method}{known[method]}")]
    return []


def _names(parameters: dict[str, Argument]) -> str:
    return ", ".join(parameters) or "no arguments: the step declares none"


def _wrong(field: str, found: str, expected: str) -> Violation:
    return Violation(kind="argument", rank=-1, field=field, found=found, expected=expected)
