"""Defers Python's signal handlers while the main thread is in a critical section, such as sending a plan.

Python runs signal handlers in the main thread, between any two steps of its code, and they may raise: KeyboardInterrupt
after Ctrl-C, or the user's TimeoutError after `signal.alarm`. Inside ``with Deferred():`` no handler runs. A signal is
recorded, and its handler runs at the end of the outermost block, or at a wait inside it. So a handler raises its
exception only between critical sections:

- `waiting` waits, and runs the handlers of signals that arrive meanwhile;
- `deliver` runs the handlers of signals that have arrived;
- `Allowed` undoes `Deferred` for a block that may take long, and that may be interrupted anywhere.

Other threads run no handlers, so all of this does nothing there.

In the outermost block, `_record` replaces each handler. While signals are not deferred, it calls the replaced handler.
So a handler may raise at any point in this file, too: each signal still reaches its handler, and the next block
restores the handlers.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # those of `signal` convert handlers to enums, and take ten times as long
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from math import inf
from threading import get_ident
from time import monotonic
from types import CodeType, FrameType
from typing import Any, TypeVar

SLICE_S = 0.05
"""The longest delay of a handler in `waiting`, in seconds."""

_NAMES = "HUP INT QUIT USR1 USR2 ALRM TERM CHLD CONT TSTP XCPU VTALRM PROF WINCH IO PWR"

_SIGNALS = tuple(int(getattr(signal, f"SIG{name}")) for name in _NAMES.split() if hasattr(signal, f"SIG{name}"))
"""The signals that programs handle in Python, except real-time signals, whose handlers are not deferred."""

_DEPTH = 12  # the most frames of `Deferred.__enter__`, below that of its caller

_HIDDEN = ("raycollect", "ray")  # packages whose frames are hidden in a notebook

_ACTION_NBYTES = 1024  # more than any `struct sigaction` takes

_Function = TypeVar("_Function", bound=Callable[..., Any])

_get: Callable[[int], Any] = _signal.getsignal
_set: Callable[[int, Any], Any] = _signal.signal


class _Main:
    """The state of the main thread; no other thread uses it.

    Attributes:
        ident: The main thread.
        is_deferring: Whether signals are recorded.
        pending: The signals that were recorded, in the order of their arrival.
        open: The number of open blocks of `open_block`, during which the handlers stay replaced.
        handlers: The current and earlier handlers that `_record` replaces, by signal.
    """

    def __init__(self) -> None:
        self.ident = threading.main_thread().ident
        self.is_deferring = False
        self.pending: list[int] = []
        self.open = 0
        self.handlers: dict[int, Any] = {}
        self._seen: list[Any] = []  # the handlers of `_SIGNALS` at the last check
        self._to_swap: tuple[int, ...] = ()  # the signals among them that `_record` can handle

    def swap(self) -> None:
        """Replaces all handlers. Signals still reach them until `is_deferring` is set."""
        if [*map(_get, _SIGNALS)] != self._seen:  # checked each time: a program may have set a handler
            self._look()
        try:
            for number in self._to_swap:
                _set(number, _record)
        except BaseException:  # of a handler
            self.restore()
            raise

    def _look(self) -> None:
        """Finds the signals with handlers that are functions of Python."""
        # Inside `Allowed` they are already replaced
        seen = [self.handlers[at] if (handler := _get(at)) is _record else handler for at in _SIGNALS]
        if seen != self._seen:
            python_handlers = {
                number: handler for number, handler in zip(_SIGNALS, seen, strict=True) if _is_python(number, handler)
            }
            self.handlers.update(python_handlers)
            self._seen, self._to_swap = seen, tuple(python_handlers)

    def restore(self) -> None:
        """Restores the handlers, except those that the program has set meanwhile."""
        if self.open:
            return
        for number, handler in self.handlers.items():
            if _get(number) is _record:
                _set(number, handler)

    def deliver(self, frame: FrameType) -> None:
        """Runs the handlers of all recorded signals, even if one of them raises."""
        while self.pending:
            number = self.pending.pop(0)
            try:
                _handle(number, frame)
            finally:
                if self.pending:
                    self.deliver(frame)

    def forked(self) -> None:
        """Resets the state in a forked child, whose main thread is the thread that forked."""
        self.ident = get_ident()
        self.is_deferring, self.open = False, 0
        self.pending.clear()
        self.restore()


class Deferred:
    """Defers signals for a block; blocks may be nested. Waits in it use `waiting` or `Allowed`."""

    __slots__ = ("_begins",)

    def __enter__(self) -> None:
        main = _main
        self._begins = begins = not main.is_deferring and get_ident() == main.ident
        if begins:
            main.swap()
            main.is_deferring = True

    def __exit__(self, *exc: object) -> None:
        if self._begins:
            main = _main
            main.is_deferring = False  # from here on a handler may raise
            try:
                main.restore()
            except BaseException:  # of a handler
                main.restore()
                raise
            finally:
                if main.pending:
                    main.deliver(sys._getframe(1))


class Allowed:
    """Lets handlers run in a block inside `Deferred`; those of recorded signals run as it begins."""

    __slots__ = ("_begins",)

    def __enter__(self) -> None:
        main = _main
        self._begins = get_ident() == main.ident and main.is_deferring
        if self._begins:
            try:
                main.is_deferring = False
                if main.pending:
                    main.deliver(sys._getframe(1))
            except BaseException:  # of a handler
                self.__exit__()
                raise

    def __exit__(self, *exc: object) -> None:
        if self._begins:
            _main.swap()  # a handler may have used `Deferred`, whose end restores all handlers
            _main.is_deferring = True


def guarded(function: _Function) -> _Function:
    """Marks a method `__exit__` that no handler may keep from beginning: its first statement enters `Deferred`.

    A handler that raises at the beginning of such a method would leave its block open forever. The method is
    guarded between `open_block` and `close_block`, which it calls itself.
    """
    _guarded.add(function.__code__)
    return function


def open_block() -> None:
    """Begins a block whose `__exit__` is `guarded`; called inside `Deferred`."""
    if runs_handlers():
        _main.open += 1


def close_block() -> None:
    """Ends a block of `open_block`; called inside `Deferred`."""
    if runs_handlers():
        _main.open = max(_main.open - 1, 0)


def runs_handlers() -> bool:
    """Whether the calling thread runs the handlers of signals."""
    return get_ident() == _main.ident


def deliver() -> None:
    """Runs the handlers of recorded signals, inside `Deferred`."""
    if _main.pending and get_ident() == _main.ident:
        with Allowed():
            pass


def waiting(wait: Callable[[float], object], timeout_s: float | None = None) -> bool:
    """Waits, and runs the handlers of signals that arrive meanwhile, at most `SLICE_S` later.

    Args:
        wait: Waits for the given seconds, and returns whether its condition holds; it then returns at once, without
            running a handler.
        timeout_s: The total limit, in seconds; None: no limit.

    Returns:
        False after a timeout.
    """
    if not _main.is_deferring or get_ident() != _main.ident:
        return bool(wait(threading.TIMEOUT_MAX if timeout_s is None else max(timeout_s, 0.0)))
    until_s = inf if timeout_s is None else monotonic() + timeout_s
    while not wait(max(min(until_s - monotonic(), SLICE_S), 0.0)):
        deliver()
        if monotonic() >= until_s:
            return False
    return True


def _record(number: int, frame: FrameType | None) -> Any:
    main = _main
    if not (main.is_deferring or (main.open and _is_guarded(frame))):
        return _handle(number, frame)
    if number not in main.pending:
        main.pending.append(number)
    return None


def _handle(number: int, frame: FrameType | None) -> Any:
    try:
        return _main.handlers[number](number, frame)
    except BaseException:
        _hide_frames(traceback.walk_stack(sys._getframe()))
        raise


def hide_frames(exc: BaseException) -> None:
    """Hides the frames of this package and of Ray in the traceback of an interrupt from IPython, which shows each."""
    _hide_frames(traceback.walk_tb(exc.__traceback__))


def _hide_frames(frames: Iterable[tuple[FrameType, int]]) -> None:
    if "IPython" in sys.modules:
        for frame, _ in frames:
            if str(frame.f_globals.get("__name__")).partition(".")[0] in _HIDDEN:
                frame.f_locals["__tracebackhide__"] = True


def _is_guarded(frame: FrameType | None) -> bool:
    """Whether a `guarded` method begins, or the `Deferred` in it."""
    for _ in range(_DEPTH):
        if frame is None or frame.f_code in _guarded:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code in _guarded


def _is_python(number: int, handler: Any) -> bool:
    """Whether a signal runs this function; False if a library has replaced Python's C handler, as Ray does."""
    return callable(handler) and _address(number) == _pythons()


@cache
def _pythons() -> int:
    """The address of the C function that Python sets for each signal with a handler."""
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
        unset = _get(number)
        if unset == signal.SIG_DFL:
            try:
                _set(number, lambda *_: None)
            except ValueError:  # the main thread of a subinterpreter, which runs no handlers
                return -1
            try:
                return _address(number)
            finally:
                _set(number, unset)
    return -1


def _address(number: int) -> int:
    action = (ctypes.c_size_t * (_ACTION_NBYTES // ctypes.sizeof(ctypes.c_size_t)))()
    ctypes.CDLL(None).sigaction(ctypes.c_int(number), None, action)
    return int(action[0])  # the handler comes first


_guarded: set[CodeType] = set()
_main = _Main()
os.register_at_fork(after_in_child=_main.forked)
