"""Tokens of the caller, by which it learns that the last reference to a result in an actor is gone (P5).

Such a result travels as a handle. Ray counts a ref nested in the handle with it, through every borrower. If the actor
owned that ref, its process and the caller's would exchange messages about each result. So the caller lends a ref of its
own: it goes to the method in an argument that only the mixin sees, and returns in the handle. The task's reply then
tells Ray all that it needs to know.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from typing import Any, NamedTuple

import ray

from raycollect.core import threads
from raycollect.core.codec import Codec
from raycollect.core.model import Key
from raycollect.ray_bridge.ray_refs import on_last_ref
from raycollect.ray_bridge.serialization import PackedRef, as_bytes, take_over

__all__ = ["CallTokens", "LentToken", "let_go"]

_TOKEN = Parameter("_raycollect_token", Parameter.POSITIONAL_ONLY)  # the mixin takes it away
_MARK = b"\x93raycollect\x8e token "  # begins a token among a method's arguments, which may be users' own bytes
_LENT = Codec[tuple[bytes, PackedRef]](tuple[bytes, PackedRef], "token")  # its owner, and the token

BATCH = 64
"""How many tokens one actor task makes."""

MOST_TOLD = 4096
"""The most keys of one message."""

# They have stopped lending. A thread that drops a ref while Ray shuts down ends the process. The hub's thread learns of
# the end of actors then, so it leaves the unused tokens to other threads, which drop them by `let_go`.
_ended: deque[CallTokens] = deque()
_letting_go = threading.RLock()  # a finalizer may do the same


def let_go(*, waits: bool = False) -> None:
    """Drops the unused tokens of all `CallTokens` that have ended.

    If another thread does that now, `let_go` returns at once, as finalizers that wait for others may run there;
    `waits` makes it wait for that thread, as the controller needs before Ray is shut down.
    """
    if _letting_go.acquire(blocking=waits):
        try:
            with suppress(IndexError):  # empty
                while True:
                    _ended.popleft()._let_go()
        finally:
            _letting_go.release()


class LentToken(NamedTuple):
    """The token of a method's result, with the name by which the actor knows its owner."""

    token: Any
    owner: bytes
    packed: PackedRef  # as it arrived, and returns

    @staticmethod
    def read(argument: Any) -> LentToken | None:
        """Reads the first argument of a call; None if it is the caller's own."""
        if type(argument) is not bytes or not argument.startswith(_MARK):
            return None
        owner, packed = _LENT.decode(argument[len(_MARK) :])
        return LentToken(packed.ref(), owner, packed)


@dataclass(frozen=True, slots=True)
class _TokenArgument:
    """A token on its way to a method; Ray counts it with the call."""

    token: Any
    data: bytes

    @classmethod
    def of(cls, token: Any, owner: bytes) -> _TokenArgument:
        return cls(token, _MARK + _LENT.encode((owner, PackedRef.of(token))))

    def form(self) -> Any:
        return as_bytes(self.data, self.token)


class CallTokens:
    """The tokens for one actor. `lend` is called under the lock of `SubmittedCalls`; any thread may do the rest.

    Args:
        handle: The actor's handle.
        owner: The name by which the actor knows this end of the connection.
        methods: Its methods that have returned tensors; more may be added.
        order: Has the actor make that many refs, in a task of its own, so that they are small and in this process.
        tell: Tells the actor that no process holds the values of these keys any more.
        soon: Makes a call in a moment, in another thread; False if it won't.
    """

    def __init__(
        self,
        handle: Any,
        owner: bytes,
        methods: Collection[str],
        order: Callable[[int], list[Any]],
        tell: Callable[[list[Key]], None],
        soon: Callable[[Callable[[], None]], bool],
    ) -> None:
        let_go()
        self._handle = _taking_tokens(handle)
        self._owner = owner
        self._methods = methods
        is_supported = self._handle is not None and take_over(_TokenArgument, _TokenArgument.form)
        self._order: Callable[[int], list[Any]] | None = order if is_supported else None
        self._tell = tell
        self._soon = soon
        self._ready: list[tuple[_TokenArgument, list[Key]]] = []
        self._coming: list[Any] = []
        self._living: set[Key] = set()
        self._gone: deque[Key] = deque()
        self._is_telling = threading.RLock()  # a finalizer may do the same
        self._is_due = False
        self._at_end: Callable[[], None] | None = None

    def lend(self, method: str, options: dict[str, Any]) -> tuple[Any, Callable[[Any], None]] | None:
        """Adds a token to the arguments of a call whose only result may stay in the actor.

        Args:
            method: The method that is called.
            options: The arguments of Ray's function that submits the call; changed.

        Returns:
            The handle to call it by, and a function to call with the ref of the result; None if the actor has to make
            a token itself.
        """
        takes = method in self._methods and options.get("num_returns") == 1 and options.get("tensor_transport") is None
        taken = self._take() if takes else None
        if taken is None:
            return None
        argument, cell = taken
        options["args"] = (argument, *(options["args"] or ()))

        def submitted(result: Any) -> None:
            key = Key(result.binary())
            self._living.add(key)
            cell.append(key)

        return self._handle, submitted

    def tell(self) -> None:
        """Tells the actor the keys of released values."""
        with self._is_telling:
            self._is_due = False
            while self._gone and self._tell_some():
                pass
        if self._at_end is not None and not self._living:
            self._at_end()

    def _tell_some(self) -> bool:
        keys: list[Key] = []
        try:
            with suppress(IndexError):  # empty
                while len(keys) < MOST_TOLD:
                    keys.append(self._gone.popleft())
            self._tell(keys)
            self._living.difference_update(keys)
        except Exception as exc:  # noqa: BLE001 - any: the keys are told later
            self._gone.extendleft(reversed(keys))
            threads.failed("telling released values", exc)  # perhaps no thread can be started
            self._is_due = self._soon(self.tell)
            return False
        return True

    def end(self, call: Callable[[], None]) -> None:
        """Stops lending; makes a call once no process holds a value whose token was lent. Any thread."""
        self._order, self._at_end = None, call
        _ended.append(self)
        self.tell()

    def _let_go(self) -> None:
        self._ready.clear()
        self._coming.clear()

    def _take(self) -> tuple[_TokenArgument, list[Key]] | None:
        if len(self._ready) < BATCH // 2:
            self._refill()
        if self._order is None:  # another thread has ended it, perhaps before these arrived
            self._let_go()
        try:
            return self._ready.pop()
        except IndexError:  # not made yet, or dropped by another thread
            return None

    def _refill(self) -> None:
        if not self._coming:
            self._request()
        if self._coming and ray.wait(self._coming[:1], timeout=0, fetch_local=False)[0]:  # they are returns of one task
            for ref in self._coming:
                cell: list[Key] = []
                if on_last_ref(ref, partial(self._nobody_holds, cell)):
                    self._ready.append((_TokenArgument.of(ref, self._owner), cell))
            self._coming = []

    def _request(self) -> None:
        order = self._order
        if order is not None:
            try:
                self._coming = order(BATCH)
            except Exception as exc:  # noqa: BLE001 - whatever Ray raises, as of a queue that is full: it can do without
                threads.failed("ordering tokens", exc)

    def _nobody_holds(self, cell: list[Key]) -> None:
        if not cell:
            return
        self._gone.extend(cell)
        if not self._is_due:
            self._is_due = True
            if not self._soon(self.tell):
                self.tell()


def _taking_tokens(handle: Any) -> Any:
    """A weak handle of the same actor whose methods have one more argument; None if this Ray offers no way."""
    signatures = getattr(handle, "_ray_method_signatures", None)
    if not isinstance(signatures, dict):
        return None
    weak = object.__new__(type(handle))
    weak.__dict__.update(handle.__dict__)
    weak._ray_weak_ref = True
    weak._ray_method_signatures = {name: [_TOKEN, *parameters] for name, parameters in signatures.items()}
    return weak
