"""The method calls that this process submits to actors, in the order in which Ray runs them.

The hook is in the function through which `ActorHandle` submits each call, private methods and ``__ray_call__``
included, which no decorator of the class would see.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

import ray
from ray.actor import ActorHandle

from raycollect.core.model import TASK_NBYTES, Key
from raycollect.core.signals import waiting
from raycollect.ray_bridge import ray_cluster
from raycollect.ray_bridge.call_tokens import CallTokens
from raycollect.ray_bridge.hooks import hook

_FUNNEL = "_actor_method_call"
_OWN = "_raycollect_"  # prefix of the package's own methods, whose order is that of plans
_KEPT = "__raycollect_"  # of those that return tensors, and note their end, as users' methods do

NOTHING = b""
"""In place of a call if plans need not wait for any."""


class CallRecorder(Protocol):
    """Takes the method calls of its thread or asynchronous task.

    Attributes:
        is_eager: Whether Ray runs them nevertheless.
    """

    is_eager: ClassVar[bool]

    def is_here(self) -> bool:
        """Whether the caller is in that thread or task. A context may be copied into others."""

    def method(self, submit: Callable[[], Any], handle: Any, name: str, options: dict[str, Any]) -> Any:
        """Takes a call and returns its result; `submit` passes the call to Ray, whose function takes `options`."""


recorder: ContextVar[CallRecorder | None] = ContextVar("raycollect_recorder", default=None)


class SubmittedCalls:
    """The calls of one actor that this process submits.

    Attributes:
        lock: Held while a call is submitted, so that calls of several threads are noted in Ray's order. It guards the
            other attributes.
        last: The task of the latest call; `NOTHING`; None if it is not known, or the actor does not note its end.
        before: Called once, before the next call is submitted.
        tokens: Lent to calls that take tokens.
    """

    __slots__ = ("__weakref__", "before", "last", "lock", "tokens")

    def __init__(self) -> None:
        self.lock: threading.RLock = threading.RLock()  # a finalizer may call the same actor
        self.last: bytes | None = None
        self.before: Callable[[], object] | None = None
        self.tokens: CallTokens | None = None

    def submit(self, handle: Any, name: str, submit: Callable[..., Any], options: dict[str, Any]) -> Any:
        """Submits a call by Ray's function `submit`, and returns its result. The caller does not hold the lock."""
        with self.lock:
            if self.before is not None:
                self.before()  # if that fails, the call must not be submitted either
                self.before = None
            self.last = None  # unless it is known that it was submitted
            lent = None if self.tokens is None else self.tokens.lend(name, options)
            if lent is None:
                returned = submit(handle, name, **options)
            else:
                to, submitted = lent
                returned = submit(to, name, **options)
                submitted(returned)
            if not name.startswith("_") or name.startswith(_KEPT):
                self.last = _task_of(returned)
        return returned


class AllHeld:
    """Holds the locks of several actors, so that a plan takes its place on all of them at once.

    A thread that holds one lock may need another: Ray pickles the arguments of a call under the lock, and finalizers
    that make calls may run there. So no thread waits for a lock while it holds others. It releases them, waits for the
    lock that it missed, and starts with that one, as C++'s ``std::lock`` does. Enter it inside `Deferred`, so that no
    signal comes between a lock and its count.
    """

    __slots__ = ("_calls", "_held")

    def __init__(self, calls: Sequence[SubmittedCalls]) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        calls, held = self._calls, 0
        while True:
            for actor in calls[held:]:
                if not actor.lock.acquire(False):  # by position: half the time
                    break
                held += 1
            self._held = held
            if held == len(calls):
                return
            self.__exit__()
            self._calls = calls = [*calls[held:], *calls[:held]]
            waiting(partial(calls[0].lock.acquire, True))
            held = 1

    def __exit__(self, *exc: object) -> None:
        for calls in self._calls[: self._held]:
            calls.lock.release()
        self._held = 0


# The latest tasks that Ray may run after calls that were submitted later. True: it retries them if their methods raise.
# False: it retries them in another process of their actor, and has not ended them yet.
_retried: OrderedDict[bytes, bool] = OrderedDict()
_restartable: OrderedDict[bytes, bool] = OrderedDict()  # the latest tasks that Ray retries if their process dies
_MOST_RETRIED = 4096


def expect_retries(actor_id: str) -> None:
    """Notes that Ray may run earlier calls of an actor after new ones, if it has restarted the actor."""
    actor = bytes.fromhex(actor_id)
    tasks = [task for task in tuple(_restartable) if task.endswith(actor)]
    if tasks and ray_cluster.has_restarted(actor_id):
        for task in tasks:
            _restartable.pop(task, None)
            _note(_retried, task, is_lasting=False)


def unsettled_retries(refs: Mapping[Key, Any]) -> dict[Key, Any]:
    """The refs without a value whose methods Ray may run after calls that were submitted later.

    Calls of other processes are not known, nor calls before this process had a class of participants.
    """
    retried = {key: ref for key, ref in refs.items() if key[:TASK_NBYTES] in _retried} if _retried else {}
    if retried:
        pending = set(ray.wait([*retried.values()], num_returns=len(retried), timeout=0, fetch_local=False)[1])
        for key, ref in tuple(retried.items()):
            if ref not in pending:
                del retried[key]
                if _retried.get(key[:TASK_NBYTES]) is False:
                    _retried.pop(key[:TASK_NBYTES], None)
    return retried


_watched: WeakValueDictionary[Any, SubmittedCalls] = WeakValueDictionary()  # by Ray's id of the actor
_watching = threading.RLock()  # a finalizer may declare a group


def watch(handle: Any) -> SubmittedCalls | None:
    """Notes the calls of an actor from now on, while the result is referenced; None if this Ray offers no way."""
    if not see_calls():
        return None
    with _watching:
        calls = _watched.get(handle._actor_id)
        if calls is None:
            calls = _watched[handle._actor_id] = SubmittedCalls()
        return calls


def recording() -> CallRecorder | None:
    """The recorder of this thread's calls; None if they go to Ray."""
    current = recorder.get()
    return current if current is not None and current.is_here() else None


def see_calls() -> bool:
    """Sees all method calls from now on, and which of them Ray may retry; False if this Ray offers no way."""
    if not hasattr(ActorHandle, _FUNNEL):
        return False
    hook(ActorHandle, _FUNNEL, _seeing)
    return True


def _seeing(submit: Callable[..., Any]) -> Callable[..., Any]:
    def noted(handle: Any, name: str, options: dict[str, Any]) -> Any:
        calls = _watched.get(handle._ray_actor_id)
        if calls is None or name.startswith(_OWN):
            returned = submit(handle, name, **options)
        else:
            returned = calls.submit(handle, name, submit, options)
        if options.get("max_task_retries") and (task := _task_of(returned)) is not None:
            is_lasting = bool(options.get("retry_exceptions"))
            _note(_retried if is_lasting else _restartable, task, is_lasting=is_lasting)
        return returned

    def call(self: Any, method_name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        options.update(args=args, kwargs=kwargs)
        taker = recording()
        if taker is None or _is_own(method_name, args):
            return noted(self, method_name, options)
        return taker.method(partial(noted, self, method_name, options), self, method_name, options)

    return call


def _is_own(name: str, args: Any) -> bool:
    """Whether the package itself makes a call, as it forms a group or takes in a value."""
    if name == "__ray_call__":
        return getattr(args[0] if args else None, "__module__", "").startswith("raycollect.member.")
    return name.startswith((_OWN, f"_{_OWN}"))


def _note(tasks: OrderedDict[bytes, bool], task: bytes, *, is_lasting: bool) -> None:
    tasks[task] = is_lasting
    if len(tasks) > _MOST_RETRIED:
        tasks.popitem(last=False)


def _task_of(returned: Any) -> bytes | None:
    first = returned[0] if type(returned) is list else getattr(returned, "_generator_ref", returned)
    return None if first is None else first.binary()[:TASK_NBYTES]
