"""A collective, or a run of a captured step, under way, as its caller sees it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from time import monotonic
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raycollect import diagnosis, html, ray_internals
from raycollect.controller import Controller
from raycollect.errors import (
    CollectiveTimeoutError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
    RetryError,
    Violation,
    refusal,
)
from raycollect.flight import ABSENT, Flight
from raycollect.gauge import Gauge, Progress
from raycollect.handle import Handle
from raycollect.model import Key
from raycollect.parcel import Parcel
from raycollect.planner.wording import counted, named, seconds_words
from raycollect.runs import RunFlight
from raycollect.words import a_type

MOST_NAMED = 8
"""How many of those who have not ended are named where a collective is shown; the others are counted."""

MOST_RESULTS = 16
"""How many results are looked at where a collective is shown."""

SHOWN_S = 0.5
"""How long participants may take to say how far they are where a collective is shown, in seconds."""

AWAKE_S = 0.1
"""How often the loop of an await looks around, in seconds."""


class _UnderWay:
    """A flight, and whether its caller has been told the outcome."""

    def __init__(self, controller: Controller, flight: Flight) -> None:
        self._controller = controller
        self._flight = flight
        self._is_heard = False  # whether the caller has been told, or does not want to be
        self._began_s = monotonic()
        self._gauge: Gauge | None = None  # once somebody has asked how far it is
        self._gauging = threading.Lock()

    def progress(self, timeout_s: float = SHOWN_S) -> Progress:
        """Asks the participants how far it is; does not wait for its outcome, and changes nothing.

        Args:
            timeout_s: How long they may take to answer, in seconds. Who takes longer counts as where it was when it
                last answered.

        Returns:
            How far it is, in bytes; where the outcome is known, how far it came, as far as anybody had asked.
        """
        with self._gauging:
            if self._gauge is None:
                self._gauge = Gauge(self._controller, self._flight, self._began_s)
            if not self._flight.resolved:
                self._gauge.ask()
            self._gauge.hear(timeout_s)
            return self._gauge.read()

    def _hear(self, timeout_s: float | None, what: str, progress: bool | None) -> None:
        """Waits for the outcome.

        Raises:
            CollectiveTimeoutError: It was not known in time.
            ProgressError: A progress bar is wanted, and can't be had.
        """
        flight = self._flight
        if not diagnosis.wait(self._controller, flight, timeout_s, progress=progress):
            over = CollectiveTimeoutError(
                op=flight.plan.name,
                group_name=flight.group_name,
                detail=f"this wait is over; the {what} goes on",
                timeout_s=timeout_s or 0.0,
            )
            if timeout_s:  # who only looks in does not want to wait for reports
                diagnosis.explain_delay(self._controller, flight, over, timeout_s)
            raise over
        self._is_heard = True
        if isinstance(flight.error, CollectiveTimeoutError):
            diagnosis.explain_delay(self._controller, flight, flight.error)

    def __del__(self) -> None:
        if not getattr(self, "_is_heard", True):
            self._flight.abandon()

    @property
    def _state(self) -> str:
        flight = self._flight
        if flight.resolved:
            return "done" if flight.error is None else type(flight.error).__name__
        ended, count = self._ended(), len(flight.plan.participants)
        far = f", {ended} of {count} have ended" if ended else ""  # else the last one may tell of all
        return f"under way for {seconds_words(monotonic() - self._began_s)}{far}"

    def _ended(self) -> int:
        """How many participants have said that they have ended."""
        flight = self._flight
        return sum(not flight.is_pending(at) for at in range(len(flight.plan.participants)))

    def _far(self) -> Progress | None:
        """How far it is in bytes, where that can be known soon."""
        try:
            far = self.progress()
        except Exception:  # noqa: BLE001 - a group that is gone meanwhile: it is shown without
            return None
        return far if far.total_nbytes else None

    def _html(self, kind: str, title: str, *told: tuple[str, object]) -> html.Markup:
        """The work as a bar, and what there is to say of it.

        Args:
            kind: What it is.
            title: What to call it.
            told: (name, what), of which those are left out that are empty.
        """
        flight, count = self._flight, len(self._flight.plan.participants)
        state, is_known, error = self._state, flight.resolved, flight.error
        ended = count if is_known and error is None else self._ended()
        far = self._far()
        late = [flight.member(at) for at in range(count) if ended and flight.is_pending(at)]
        facts = [
            ("bytes", far or ""),
            ("ended", f"{ended} of {counted(count, 'participant')}" if ended or is_known else ""),
            ("not ended", named([f"rank {one.rank} ({one.actor})" for one in late], MOST_NAMED)),
            *told,
            ("error", "" if error is None else html.failure(error)),
        ]
        if far is not None and not is_known:
            shown = html.bar(far.done_nbytes, far.total_nbytes)
        else:
            shown = html.bar(ended if ended or is_known else None, count)
        return html.block(kind, f"{title}: {state}", html.line(shown), html.pairs(facts))


class Work(_UnderWay):
    """What ``async_op=True`` gives: the result refs at once, and a way to wait.

    Await it in a coroutine, or call `wait`. Letting go of it loses nothing: the collective goes on, and is
    logged if it fails.

    Attributes:
        refs: The result: a list of refs in rank order, or the one ref of a send, reduce or gather; None for a barrier.
            For a batch: the list of all these. Usable at once: what uses them waits.
    """

    def __init__(self, controller: Controller, flight: Flight, refs: Any, parcel: Parcel | None = None) -> None:
        super().__init__(controller, flight)
        self.refs = refs
        sent = self._sent = [] if parcel is None else [parcel]  # which holds the operands, until it went well (P5)
        ends_s = self._ends_s = list[float]()  # when it ended, where that was seen

        def let_go() -> None:
            ends_s.append(monotonic())
            if flight.error is None:
                sent.clear()

        if sent:
            flight.when_resolved(let_go)

    def done(self) -> bool:
        """True when the outcome is known; never waits, never raises."""
        return self._flight.resolved

    def wait(self, timeout_s: float | None = None, *, progress: bool | None = None) -> Any:
        """Waits for the outcome.

        Args:
            timeout_s: How long this call waits, in seconds; None: as long as the collective's own limits allow.
            progress: Whether to show a progress bar on stderr if that lasts; None: inside `raycollect.progress` alone.

        Returns:
            `refs`.

        Raises:
            ProgressError: A progress bar is wanted, and tqdm is not installed.
            CollectiveTimeoutError: The outcome was not known in time; the collective goes on.
            RaycollectError: The collective failed; the error says on which rank and why.
        """
        self._hear(timeout_s, "collective", progress)
        error = _explain(self._flight)
        if error is not None:
            for ref in self._flight.made.values():
                ref.future()  # it holds the error too: as nobody else asks for it, Ray would log it as unhandled
            raise error
        return self.refs

    def cancel(self) -> bool:
        """Aborts the collective on all ranks.

        Returns:
            False where the outcome was known already, or all ranks are about to take their results (``snapshot=True``).
        """
        self._is_heard = True
        if self._flight.resolved or self._flight.is_committed:
            return False
        self._controller.send(self._flight, self._flight.fail(PlanAbortedError(detail="cancelled by its caller")))
        return True

    @contextmanager
    def cancelled_by_signals(self) -> Iterator[None]:
        """Around a wait for a caller who is not given this: what interrupts it (Ctrl-C) cancels the collective."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self.cancel()
            raise

    def retry(self) -> Work:
        """Runs the same collective, or batch, again after it has failed: with the same refs, on the same actors.

        A group that was broken is rebuilt first (`Group.rebuild`). Whether the operands are as they were is seen at the
        door: what a failed collective has half overwritten is refused there with TensorDirtyError. They are whole after
        a refusal, a late rank that never came, and wherever results go elsewhere (``inplace=False``), or come all at
        once (``snapshot=True``).

        Returns:
            The new attempt, with refs of its own where it makes something.

        Raises:
            RetryError: It is under way, or went well; its batch may have been done in part; its group has other
                members now.
            UnknownGroupError: Its group was destroyed.
            GroupBrokenError: Its group is broken.
        """
        self._is_heard = self._flight.resolved
        if not self._flight.resolved:
            raise RetryError(op=self._flight.plan.name, detail="it is under way: wait for it, or cancel it first")
        if self._flight.error is None:
            raise RetryError(op=self._flight.plan.name, detail="it went well")
        parcel = self._sent[0].again(self._controller, self._flight)
        flight = parcel.send(self._controller)
        return Work(self._controller, flight, parcel.given(flight), parcel)

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        resolved = loop.create_future()

        def settle() -> None:
            if not resolved.done():
                resolved.set_result(None)

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed: an await that was cancelled left this behind
                loop.call_soon_threadsafe(settle)

        self._flight.when_resolved(tell)
        end_watch = diagnosis.attend(self._controller, self._flight)
        try:
            with _awake(loop):
                yield from resolved.__await__()
        finally:
            end_watch()
        if self._flight.error is None:
            return self.wait()
        return (yield from asyncio.to_thread(self.wait).__await__())  # others may be asked why

    def _results(self) -> str:
        """What the results are, of those that say so at once; empty while it is under way, and where it failed."""
        if not self._flight.resolved or self._flight.error is not None or not ray.is_initialized():
            return ""
        refs = list(dict.fromkeys(islice(_refs(self.refs), MOST_RESULTS)))
        ready = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0] if refs else []
        try:
            values = [ray_internals.get(ref, 1) for ref in ready]
        except (RayError, GetTimeoutError):
            return ""
        told = Counter(one.words for one in values if isinstance(one, Handle))
        return "; ".join(f"{words}{f' (x {count})' if count > 1 else ''}" for words, count in told.items())

    @html.shown
    def _repr_html_(self) -> str:
        flight = self._flight
        calls = len(flight.plan.requests)
        return self._html(
            "work",
            f"{flight.plan.name} on group {flight.group_name!r}",
            ("plan", flight.seq),
            ("calls", calls if calls > 1 else ""),
            ("took", seconds_words(self._ends_s[0] - self._began_s) if self._ends_s else ""),
            ("results", self._results()),
        )

    def __repr__(self) -> str:
        flight = self._flight
        return f"<Work {flight.plan.name} on group {flight.group_name!r}, plan {flight.seq}: {self._state}>"


class CapturedRun(_UnderWay):
    """What ``run(async_op=True)`` gives: a run under way, and a way to wait for its results.

    Await it in a coroutine, or call `wait`. Letting go of it loses nothing: the run goes on, and is logged if it fails.
    """

    def __init__(
        self, controller: Controller, capture: Any, flight: RunFlight, collect: Callable[[RunFlight], Any]
    ) -> None:
        super().__init__(controller, flight)
        self._run = flight
        self._capture = capture  # which is closed when nobody has it any more
        self._collect = collect
        self._values: tuple[Any, ...] = ()  # the results, once they are read

    def done(self) -> bool:
        """True when the outcome is known; never waits, never raises."""
        if not self._run.resolved:
            self._run.lapse()
        return self._run.resolved

    def wait(self, timeout_s: float | None = None, *, progress: bool | None = None) -> Any:
        """Waits for the outcome.

        Args:
            timeout_s: How long this call waits, in seconds; None: as long as the run's own limits allow.
            progress: Whether to show a progress bar on stderr if that lasts; None: inside `raycollect.progress` alone.

        Returns:
            What `Capture.run` returns: the values that the step returns; None where it returns none.

        Raises:
            ProgressError: A progress bar is wanted, and tqdm is not installed.
            CollectiveTimeoutError: The outcome was not known in time; the run goes on.
            RaycollectError: The run failed; the error says where and why.
        """
        self._hear(timeout_s, "run", progress)
        if not self._values:
            self._values = (self._collect(self._run),)
        return self._values[0]

    def cancel(self) -> bool:
        """Aborts the run on all participants, and with it those begun after it; the step does not run any more.

        Returns:
            False where the outcome was known already.
        """
        self._is_heard = True
        if self._run.resolved:
            return False
        self._run.abort(PlanAbortedError(detail="cancelled by its caller"))
        return True

    def __await__(self) -> Generator[Any, None, Any]:
        if self.done() and self._run.error is None:
            return self.wait()
        # The doorbell rings for threads alone; `wait` warns there, too.
        with _awake(asyncio.get_running_loop()):
            return (yield from asyncio.to_thread(self.wait, progress=False).__await__())

    @html.shown
    def _repr_html_(self) -> str:
        return self._html("run", f"run {self._run.place} of a captured step", ("plan", self._run.seq))

    def __repr__(self) -> str:
        return f"<CapturedRun {self._run.seq}: {self._state}>"


@contextmanager
def _awake(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Around an await: the loop looks around now and then, as the handler of Ctrl-C in a notebook does not wake it."""
    beats: list[asyncio.TimerHandle] = []

    def beat() -> None:
        beats[:] = [loop.call_later(AWAKE_S, beat)]

    beat()
    try:
        yield
    finally:
        beats[0].cancel()


def _refs(given: Any) -> Iterator[Any]:
    """The refs of a result, one after the other."""
    if isinstance(given, ray.ObjectRef):
        yield given
    elif isinstance(given, list):
        for one in given:
            yield from _refs(one)


def _explain(flight: Flight) -> RaycollectError | None:
    """A flight's error with its cause: for operands that are not there, Ray knows what became of their method.

    Called in the thread that waits for the flight, never in the channel's: it asks Ray.
    """
    refs, error = flight.refs, flight.error  # in this order: another thread may explain it meanwhile
    if not isinstance(error, RefusedError) or error.__cause__ is not None:
        return error
    violations, cause = [], None
    for violation in error.violations:
        ref = refs.get(Key(bytes.fromhex(violation.ref)))
        if violation.kind in ABSENT and ref is not None:
            violation, why = look_into(violation, ref)
            cause = cause or why
        violations.append(violation)
    explained = refusal(error.op, error.group_name, tuple(violations))
    explained.__cause__ = cause
    flight.explain(explained)
    return explained


def look_into(violation: Violation, ref: Any) -> tuple[Violation, BaseException | None]:
    """Says what became of the method that should have made a ref's value, and the exception that tells so."""
    try:
        value = ray_internals.get(ref, 5)
    except RayTaskError as exc:
        found = f"missing: its method raised {type(exc.cause or exc).__name__}: {exc.cause or exc}"
        return replace(violation, kind="producer_failed", found=found, expected="a value"), exc
    except (RayError, GetTimeoutError) as exc:
        return replace(violation, found=f"lost ({type(exc).__name__})"), exc
    if isinstance(value, Handle):
        return violation, None
    found = f"{a_type(value)}, returned by value"
    expected = "a tensor, or a list, tuple or dict of tensors, of a method whose name begins with no underscore"
    return replace(violation, kind="not_tensor", found=found, expected=expected), None
