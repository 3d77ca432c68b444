"""Steps: functions in plain code that are traced by their first call; further calls run the captured step."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, overload

from raycollect.captured.step import CapturedRun
from raycollect.core import html
from raycollect.core.signals import Allowed, Deferred
from raycollect.driver.batch import check_arguments
from raycollect.errors import CaptureBrokenError, CaptureError, GroupError, refuse, wrong_argument
from raycollect.planner import STAGING_NBYTES
from raycollect.planner.report import StepExplanation
from raycollect.ray_bridge.submitted_calls import recording
from raycollect.traced.eager import EndedRun, run_eagerly
from raycollect.traced.kept import unwrap
from raycollect.traced.signature import CallReader
from raycollect.traced.trace import Trace

_log = logging.getLogger("raycollect")

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_Self = TypeVar("_Self")

MOST_FORMS = 8
"""How many traces of a function are cached."""

EAGER = "RAYCOLLECT_STEP"


class CacheInfo(NamedTuple):
    """How often a step's function was traced; see `Step.cache_info`.

    Attributes:
        hits: The number of calls that ran a trace of an earlier call.
        misses: The number of calls for which the function was traced.
        maxsize: How many traces are cached at most.
        currsize: How many traces are cached.
    """

    hits: int
    misses: int
    maxsize: int
    currsize: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    static: tuple[str, ...]
    eager: bool
    staging_nbytes: int
    timeout_s: float | None


class _Traces:
    """The traces of one function, or of one method of one object. Any thread may call it."""

    def __init__(self, function: Callable[..., Any], options: _Options, *, bound: bool = False) -> None:
        self.function = function
        self.options = options
        self.forms: dict[Hashable, Trace] = {}  # by the keys of calls; the most recently used ones
        self.hits = self.misses = self._now = 0
        self.is_eager: bool = options.eager or os.environ.get(EAGER) == "eager"
        self._reader = CallReader(function, options.static, bound=bound)
        self._tracing = threading.RLock()  # a finalizer may call the same step
        self._has_warned = False

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, async_op: bool) -> Any:
        """Runs the function by a cached trace, or by a new one."""
        values, leaves = self._reader.values(args, kwargs), list[Any]()
        key = self._reader.read(values, leaves)
        trace, begun = self._find(key), None
        with Deferred():
            if trace is not None:
                try:
                    begun = trace.begin(leaves)
                except (CaptureBrokenError, GroupError):  # a run failed, or groups or their members have changed
                    if self.forms.get(key) is trace:
                        self.forms.pop(key, None)
            if trace is None or begun is None:
                with Allowed():
                    trace = self._trace(key, values)
                begun = trace.begin(leaves)
            return trace.end(begun, async_op=async_op)

    def look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
        """Returns the trace of a call, without a run."""
        values = self._reader.values(args, kwargs)
        key = self._reader.read(values, [])
        return self._find(key) or self._trace(key, values)

    def _find(self, key: Hashable) -> Trace | None:
        trace = self.forms.get(key)
        if trace is not None:
            self._now += 1
            trace.used = self._now
            self.hits += 1
        return trace

    def _trace(self, key: Hashable, values: Sequence[Any]) -> Trace:
        with self._tracing:
            existing = self._find(key)  # another thread may have made it
            if existing is not None:
                return existing
            options = self.options
            trace = Trace.of(
                self.function, self._reader, values, staging_nbytes=options.staging_nbytes, timeout_s=options.timeout_s
            )
            self.misses += 1
            self._now += 1
            trace.used = self._now
            self.forms[key] = trace
            if len(self.forms) <= MOST_FORMS:
                return trace
            oldest, _ = min(list(self.forms.items()), key=lambda item: item[1].used)
            self.forms.pop(oldest, None)
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "step %s was traced for more than %d kinds of arguments, and the oldest trace is dropped: tracing "
                    "takes milliseconds. Use arrays of few shapes, and the same objects, to need few traces",
                    getattr(self.function, "__qualname__", self.function),
                    MOST_FORMS,
                )
            return trace

    def close(self) -> None:
        with self._tracing:
            traces, self.forms = self.forms, {}
        for trace in list(traces.values()):
            trace.close()


class Step(Generic[_P]):
    """A function that `step` decorates. Any thread may call it.

    It is called like the function. It is released with all its traces when the last reference to it is dropped.
    """

    def __init__(self, function: Callable[_P, Any], options: _Options) -> None:
        functools.update_wrapper(self, function)
        self._traces = _Traces(function, options)
        self._before: tuple[Any, ...] = ()  # the object whose method it is
        self._of_objects: dict[int, tuple[weakref.ref[Any], _Traces]] = {}

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """Runs the function.

        Returns:
            The result of the function, in its structure: refs are replaced by their values, unless marked by `keep`.

        Raises:
            TracedValueError: The function uses an argument, or the result of a call, as a value while it is traced.
            UnrecordableCallError: The function calls a task, or creates an actor.
            MethodError: A method raised.
            RefusedError, GroupError, FaultError: As for collectives.
        """
        traces, given = self._traces, (*self._before, *args) if self._before else args
        if recording() is not None:  # a step in a step is a part of it
            return unwrap(traces.function(*given, **kwargs))
        if traces.is_eager:
            return run_eagerly(traces.function, given, kwargs)
        return traces.run(given, kwargs, async_op=False)

    def start(self, *args: _P.args, **kwargs: _P.kwargs) -> CapturedRun | EndedRun:
        """Begins a run; several may be under way. Its `wait` returns the result of a call; it is awaitable."""
        traces, given = self._traces, (*self._before, *args)
        if recording() is not None:
            raise CaptureError(
                detail="a run can't be started inside a step: call the step, which makes it a part of it"
            )
        if traces.is_eager:
            return EndedRun(functools.partial(run_eagerly, traces.function, given, kwargs))
        return traces.run(given, kwargs, async_op=True)  # type: ignore[no-any-return]

    def explain(self, *args: _P.args, **kwargs: _P.kwargs) -> str:
        """Describes a run with these arguments as text; traces the function if needed, and runs nothing."""
        return self._traces.look((*self._before, *args), kwargs).capture.explain()

    def plan(self, *args: _P.args, **kwargs: _P.kwargs) -> StepExplanation:
        """Returns the values of `explain`; raises the errors of `Capture.plan`."""
        return self._traces.look((*self._before, *args), kwargs).capture.plan()

    def close(self) -> None:
        """Releases all traces and their resources; aborts runs under way. The next call traces the function again."""
        self._traces.close()
        for _, traces in list(self._of_objects.values()):
            traces.close()

    def cache_info(self) -> CacheInfo:
        """Returns how often the function was traced, and how many traces are cached; for a method, of one object."""
        traces = self._traces
        return CacheInfo(traces.hits, traces.misses, MOST_FORMS, len(traces.forms))

    @overload
    def __get__(self, instance: None, owner: type) -> Step[_P]: ...

    @overload
    def __get__(self: Step[Concatenate[_Self, _Q]], instance: _Self, owner: type | None = None) -> Step[_Q]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        bound: Any = object.__new__(type(self))
        bound.__dict__.update(self.__dict__)
        bound._before, bound._traces = (instance,), self._traces_of(instance)
        return bound

    def _traces_of(self, instance: Any) -> _Traces:
        entry = self._of_objects.get(id(instance))
        if entry is not None and entry[0]() is instance:
            return entry[1]
        traces = _Traces(self._traces.function, self._traces.options, bound=True)
        of_objects, key = weakref.ref(self), id(instance)

        def forget(dead: weakref.ref[Any]) -> None:
            step = of_objects()
            current = None if step is None else step._of_objects.get(key)
            if step is not None and current is not None and current[0] is dead:
                del step._of_objects[key]

        try:
            reference = weakref.ref(instance, forget)
        except TypeError:  # the object is treated as a static argument
            return self._traces
        with self._traces._tracing:
            entry = self._of_objects.get(key)
            if entry is None or entry[0]() is not instance:
                entry = self._of_objects[key] = reference, traces
            return entry[1]

    def __reduce__(self) -> Any:
        return _bound if self._before else Step, (self._traces.function, self._traces.options, *self._before)

    @html.shown
    def _repr_html_(self) -> str:
        traces = list(self._traces.forms.values())
        return "".join(trace.capture._repr_html_() for trace in traces) or html.block("step", repr(self))

    def __repr__(self) -> str:
        info = self.cache_info()
        return f"<Step {getattr(self, '__qualname__', '')}: {info.currsize} traces, {info.hits + info.misses} calls>"


def _bound(function: Callable[..., Any], options: _Options, instance: Any) -> Step[Any]:
    return Step(function, options).__get__(instance, type(instance))


@overload
def step(
    function: Callable[_P, Any],
    /,
    *,
    static: Sequence[str] = (),
    eager: bool = False,
    staging_nbytes: int = STAGING_NBYTES,
    timeout_s: float | None = None,
) -> Step[_P]: ...


@overload
def step(
    function: None = None,
    /,
    *,
    static: Sequence[str] = (),
    eager: bool = False,
    staging_nbytes: int = STAGING_NBYTES,
    timeout_s: float | None = None,
) -> Callable[[Callable[_P, Any]], Step[_P]]: ...


def step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    static: Sequence[str] = (),
    eager: bool = False,
    staging_nbytes: int = STAGING_NBYTES,
    timeout_s: float | None = None,
) -> Any:
    """Makes a function of plain driver code run as a captured step.

    The first call traces the function: it records the driver's operations and ``actor.method.remote()`` of
    participants, with placeholders for their values. The first and every further call run the recorded operations,
    without a Ray call. Python code between the calls runs only while the function is traced.

    Numbers, strings, bytes, arrays and CPU tensors, alone or in lists, tuples and dicts, are arguments of the step:
    each call may pass other values. A call with another structure, dtype or shape, or with other objects of other
    types, traces the function again. So does a call after members of a group have changed, or after a failed run.

    Args:
        function: The function, which is neither asynchronous nor a generator.
        static: Parameters whose values the function's Python code may use; each value needs a trace of its own.
        eager: True: each call runs the function through Ray, for debugging, as the environment variable
            ``RAYCOLLECT_STEP=eager`` has all steps do. Results are equal.
        staging_nbytes: As for `batch`.
        timeout_s: As for `capture`.

    Raises:
        InvalidArgumentError: An invalid argument.
    """
    check_arguments("step", staging_nbytes, timeout_s, eager=eager)
    names = (static,) if isinstance(static, str) else tuple(static)
    options = _Options(static=names, eager=eager, staging_nbytes=staging_nbytes, timeout_s=timeout_s)
    if function is None:
        return functools.partial(_decorated, options=options)
    return _decorated(function, options)


def _decorated(function: Callable[_P, Any], options: _Options) -> Step[_P]:
    actual = ""
    if not callable(function) or isinstance(function, type):
        actual = repr(function)
    elif inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        actual = f"{function.__qualname__}, which is asynchronous or a generator"
    if actual:
        refuse("step", [wrong_argument("function", actual, "a plain function; await what its `start` returns")])
    return Step(function, options)
