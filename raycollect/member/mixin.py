"""The mixin: tensors that an actor's public methods return stay in the actor, and Ray gets a handle."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

from raycollect.core import threads
from raycollect.engine.step_actions import Invoke
from raycollect.errors import RaycollectError, RefusedError, Violation, refusal, wrong_argument
from raycollect.errors.text import listed, shown
from raycollect.member.methods import Methods
from raycollect.member.participant import Participant, describe, this_participant
from raycollect.member.returns import BY_VALUE, UNKNOWN, Returns, keep, keep_item, needs_nothing
from raycollect.observe.trace import METHOD
from raycollect.pos.handle import Handle
from raycollect.ray_bridge import direct_transport, ray_actors, submitted_calls
from raycollect.ray_bridge.call_tokens import LentToken

_log = logging.getLogger("raycollect")

_Method = TypeVar("_Method", bound=Callable[..., Any])

_inside: ContextVar[bool] = ContextVar("raycollect_inside", default=False)
"""True during a method that Ray has called: calls from inside it are plain calls."""


_wrapped: WeakSet[type] = WeakSet()
"""The classes that `_warn_of_wrapper` has named."""


def by_value(method: _Method) -> _Method:
    """Opts a method of a `CollectiveParticipant` out: Ray passes its return values as usual.

    Raises:
        InvalidArgumentError: The argument is not a function.
    """
    if isinstance(method, type) or not callable(getattr(method, "func", method)):  # partialmethod is not callable
        raise refusal("by_value", "", (wrong_argument("method", shown(method), "a function in a class"),))
    setattr(method, BY_VALUE, True)
    return method


class CollectiveParticipant:
    """Makes an actor's tensors available to collectives.

    Inherit it, next to anything else, in a class that becomes a Ray actor. Tensors that public methods return (numpy
    arrays; non-empty lists, tuples and dicts of them) stay in the actor, under the id of the ObjectRef. Everything else
    goes by value, whole; so does a single tensor without dimensions, which counts as a number. A ref that is passed to
    a public method arrives as the tensor: the same one if it lives here, a copy if it lives in another participant. The
    mixin needs no ``super().__init__()``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Warns if the instance is no actor, but in one."""
        if not ray_actors.is_of_ray(cls):
            _warn_of_wrapper(cls)
        new: Any = super().__new__
        return new(cls) if new is object.__new__ else new(cls, *args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        submitted_calls.see_calls()  # those that Ray may retry included
        if not ray_actors.is_ray_class(cls):
            return  # changes only the class that Ray derives from the user's
        if any(_is_async(inspect.getattr_static(cls, name)) for name in dir(cls)):
            # Ray makes this an async actor: a plain function would block its event loop.
            cls._raycollect_run = _run_program_async  # type: ignore[method-assign]
            cls._raycollect_capture = _capture_async  # type: ignore[method-assign,assignment]
            cls._raycollect_result = _result_async  # type: ignore[method-assign]
        for name in dir(cls):
            if not name.startswith("_") and _is_method(cls, name):
                setattr(cls, name, _hold(getattr(cls, name), name))

    # The controller calls these.

    def _raycollect_describe(self) -> dict[str, Any]:
        return {**describe(self), "participant": True}

    def _raycollect_run(self, payload: bytes, *values: Any) -> Any:
        return this_participant().run_task(payload, ray_actors.current_task())

    def _raycollect_tokens(self, count: int) -> list[None]:
        """Has Ray make refs that the caller owns."""
        return [None] * count

    def _raycollect_fence(self, controller: str = "", seq: int = 0) -> None:
        """Ends after all tasks submitted before it, and after that plan of that controller."""
        if seq:
            this_participant().pass_fence(controller, seq)

    def _raycollect_items(self, function: Callable[..., Iterator[Any]], *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Runs a generator function, as `__ray_call__` runs a function."""
        yield from function(self, *args, **kwargs)

    def _raycollect_result(self, function: Callable[..., Future[Any]], *args: Any) -> Any:
        """Runs a function, as `__ray_call__` does, and returns the result of the future that it returns."""
        return function(self, *args).result()

    def _raycollect_capture(self, payload: bytes, *values: Any) -> bool:
        here = this_participant()
        return here.leased().capture(payload, values, functools.partial(_invoker, here.methods, self, None))

    def _raycollect_look(self, capture: bytes) -> list[Any]:
        return this_participant().leased().captured_step(capture).runner.look()


def _warn_of_wrapper(cls: type) -> None:
    """Warns once of instances in an actor of another class, such as a replica of Serve: they are no participants."""
    if cls not in _wrapped and ray_actors.current_actor_id():
        _wrapped.add(cls)
        _log.warning(
            "%s is no participant, as Ray's actor is of another class (%s): its methods return plain values. Let its "
            "methods make members' calls, or publish and subscribe their own tensors",
            cls.__qualname__,
            ray_actors.current_class(),
        )


async def _run_program_async(self: CollectiveParticipant, payload: bytes, *values: Any) -> Any:
    here, task = this_participant(), ray_actors.current_task()
    result = here.hand_over(payload, task)
    return here.run_program(payload, task) if result is None else await asyncio.wrap_future(result)


async def _capture_async(self: CollectiveParticipant, payload: bytes, *values: Any) -> bool:
    here, loop = this_participant(), asyncio.get_running_loop()
    return here.leased().capture(payload, values, functools.partial(_invoker, here.methods, self, loop))


async def _result_async(self: CollectiveParticipant, function: Callable[..., Future[Any]], *args: Any) -> Any:
    return await asyncio.wrap_future(function(self, *args))


def _is_async(method: Any) -> bool:
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


# ---------------------------------------------------------------------------------------------- wrapping


def _is_method(cls: type, name: str) -> bool:
    kind = type(inspect.getattr_static(cls, name))
    return kind not in (staticmethod, classmethod) and inspect.isfunction(getattr(cls, name, None))


def _hold(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    partial = getattr(method, "_partialmethod", None) or getattr(method, "__partialmethod__", None)
    if partial is not None and any(hasattr(function, BY_VALUE) for function in (partial, partial.func)):
        by_value(method)  # a new function, made by this access
    if inspect.isasyncgenfunction(method):
        return _hold_async_generator(method, name)
    if inspect.isgeneratorfunction(method):
        return _hold_generator(method, name)
    return _hold_coroutine(method, name) if inspect.iscoroutinefunction(method) else _hold_plain(method, name)


def _hold_plain(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        lent = LentToken.read(args[0]) if args else None
        if lent is not None:
            args = args[1:]
        task = _outermost(name)
        if task is None:
            return method(self, *args, **kwargs)
        here = this_participant()
        methods = here.methods
        try:
            with _called_by_ray(here, task, name):
                args, kwargs = _resolve(args, kwargs)
                with methods.guard():
                    value = method(self, *args, **kwargs)
            result = keep(here, method, task, value, lent)
            if type(result) is direct_transport.Returned and lent is None:
                here.keeps(name)
        except BaseException:
            methods.note_end(task, is_over=False)
            raise
        if type(result) is not Returns:
            methods.note_end(task, is_over=needs_nothing(result))
        return result

    return held


def _hold_coroutine(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    async def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        task = _outermost(name)
        if task is None:
            return await method(self, *args, **kwargs)
        here = this_participant()
        with _called_by_ray(here, task, name):
            args, kwargs = await _resolve_async(here, args, kwargs)
            value = await method(self, *args, **kwargs)
        return keep(here, method, task, value)

    return held


def _hold_generator(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def held(self: Any, *args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        task = _outermost(name)
        if task is None:
            return (yield from method(self, *args, **kwargs))
        here = this_participant()
        with _called_by_ray(here, task, name):
            args, kwargs = _resolve(args, kwargs)
            items = method(self, *args, **kwargs)
        index = _first_index(method, sys._getframe())
        is_over = False
        try:
            with here.methods.guard():
                while True:
                    with _called_by_ray(here, task, name):
                        try:
                            value = next(items)
                        except StopIteration:
                            is_over = True
                            return None
                    yield keep_item(here, method, task, index, value, streamed=True)
                    index += bool(index)
        finally:
            here.methods.note_end(task, is_over=is_over)

    return held


def _hold_async_generator(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    async def held(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        task = _outermost(name)
        if task is None:
            async for value in method(self, *args, **kwargs):
                yield value
            return
        here = this_participant()
        with _called_by_ray(here, task, name):
            args, kwargs = await _resolve_async(here, args, kwargs)
            items = method(self, *args, **kwargs)
        index = _first_index(method, sys._getframe())
        while True:
            with _called_by_ray(here, task, name):
                try:
                    value = await anext(items)
                except StopAsyncIteration:
                    return
            yield keep_item(here, method, task, index, value, streamed=True)
            index += bool(index)

    return held


def _first_index(method: Callable[..., Any], frame: FrameType) -> int:
    """The index of the first item of a generator; a streaming generator's own ref has index 1."""
    declared, streamed = ray_actors.declares_count(method), ray_actors.is_streamed(frame)
    if streamed or (streamed is None and not declared):
        return 2
    return 1 if declared else UNKNOWN


def _take_in(self: CollectiveParticipant, value: Any, copies: int = 0) -> Any:
    """Stores a value of the driver, as a return value of this method; with `copies`, in a list of so many copies."""
    return [value] * copies if copies else value


# Not `_raycollect_...`: plans wait for these methods, as for users' methods.
CollectiveParticipant.__raycollect_give_kept__ = _hold(  # type: ignore[attr-defined]
    lambda self, capture, seq: this_participant().leased().captured_step(capture).runner.take_kept(seq),
    "__raycollect_give_kept__",
)
CollectiveParticipant.__raycollect_take_in__ = _hold(_take_in, "__raycollect_take_in__")  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------- captured steps


def _invoker(guarded: Methods, actor: Any, loop: asyncio.AbstractEventLoop | None, names: Sequence[str]) -> Invoke:
    """Returns the function that calls methods in runs of a captured step, in the actor's event loop if it has one.

    Raises:
        InvalidArgumentError: The actor has no such method.
        UnsupportedError: The method is a generator.
    """
    methods = {name: _method(actor, name) for name in names}

    def invoke(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        guarded.may_begin()
        token = _inside.set(True)
        try:
            return methods[name](*args, **kwargs)
        finally:
            _inside.reset(token)

    async def call(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        value = invoke(name, args, kwargs)  # in the context of this task
        return await value if inspect.iscoroutine(value) else value

    def invoke_there(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        token = _inside.set(True)  # the loop takes over the context
        try:
            return asyncio.run_coroutine_threadsafe(call(name, args, kwargs), loop).result()  # type: ignore[arg-type]
        finally:
            _inside.reset(token)

    return invoke if loop is None else invoke_there


def _method(actor: Any, name: str) -> Callable[..., Any]:
    attribute = inspect.getattr_static(type(actor), name, None)
    method = getattr(actor, name, None) if attribute is not None else None
    if not callable(method):
        public = (other for other in dir(type(actor)) if not other.startswith("_"))
        names = [other for other in public if callable(inspect.getattr_static(type(actor), other))]
        raise _wrong_method("argument", f"{name!r}, which {type(actor).__name__} lacks", f"one of {listed(names)}")
    if inspect.isgeneratorfunction(attribute) or inspect.isasyncgenfunction(attribute):
        raise _wrong_method("unsupported", f"{name!r}, a generator", "one that returns its value")
    return method  # type: ignore[no-any-return]


def _wrong_method(kind: str, actual: str, expected: str) -> RefusedError:
    return refusal("capture", "", (Violation(kind=kind, field="method", found=actual, expected=expected),))


# ---------------------------------------------------------------------------------------------- one call


def _outermost(name: str) -> bytes | None:
    """The task, if Ray has called this method; None if the class's own code has."""
    if _inside.get():
        return None
    task = ray_actors.current_task()
    return task if task is not None and ray_actors.current_method() == name else None


@contextmanager
def _called_by_ray(here: Participant, task: bytes, name: str) -> Iterator[None]:
    """A context around a method: records its exception under its task, and its time in the timeline."""
    token, ring = _inside.set(True), here.runtime.tracer.ring
    began_s = 0.0 if ring is None else ring.clock()
    try:
        here.methods.may_begin(name)
        yield
    except SystemExit:
        here.exits()
        raise
    except Exception as exc:
        here.store.fail(task, f"{type(exc).__name__}: {exc}")
        raise
    finally:
        _inside.reset(token)
        if ring is not None:
            ring.ended(METHOD, name, began_s)


def _resolve(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces handles in the arguments by tensors, as Ray replaces refs by values."""
    if not any(isinstance(value, Handle) for value in (*args, *kwargs.values())):
        return args, kwargs
    return tuple(map(_value, args)), {name: _value(value) for name, value in kwargs.items()}


async def _resolve_async(
    here: Participant, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Calls `_resolve`; in a helper thread if it has to wait for tensors of other participants."""
    handles = [value for value in (*args, *kwargs.values()) if isinstance(value, Handle)]
    if not handles:
        return args, kwargs
    if all(handle.incarnation == here.identity.incarnation for handle in handles):
        return _resolve(args, kwargs)
    return await threads.awaitable(_resolve_here, args, kwargs, workers=here.fetch_threads)


def _resolve_here(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        return _resolve(args, kwargs)
    except (RaycollectError, MemoryError):
        raise
    except Exception as exc:
        raise threads.failed("fetching the arguments of a coroutine", exc) from exc


def _value(argument: Any) -> Any:
    return argument.fetch_for_use() if isinstance(argument, Handle) else argument
