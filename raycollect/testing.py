"""Faults for the tests of programs that use collectives: an actor dies, or stops for a while.

::

    from raycollect.testing import KillWorker

    for seed in range(20):
        with KillWorker(workers, seed=seed):
            train(workers)  # has to survive the loss of any worker, in any of its first ten collectives
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError

from raycollect.errors import refuse, wrong_argument
from raycollect.member.runtime import this_runtime

__all__ = ["KillWorker"]

POINTS = ("before_check", "after_check", "before_kernel", "after_kernel")
MODES = ("sigkill", "exit", "stop")


class KillWorker:
    """Kills one of several actors, or stops it for a while, in one of its next collectives.

    A context manager for the process that submits the collectives. The fault strikes at most once. `seed` determines
    the arguments that are None, so a failure of a test can be repeated.

    Args:
        actors: The actor handles of participants, with `CollectiveParticipant` or without.
        seed: Determines `rank`, `collective` and `point` where these are None.
        mode: ``"sigkill"``: the process ends as if it had run out of memory. ``"exit"``: it calls ``os._exit(1)``.
            ``"stop"``: all its threads stop for `stop_s` (SIGSTOP), then continue.
        rank: The index of the actor in `actors`.
        collective: The number of the collective, counted by the actor from 1 when the block begins. Calls of a batch
            that agree together count as one.
        point: ``"before_check"``: the rank has not arrived at the consistency check. ``"after_check"``: all ranks have
            passed it. ``"before_kernel"`` and ``"after_kernel"``: before and after the transfer.
        within: `collective` is drawn from 1 to this number.
        stop_s: How long a stopped process stops, in seconds.

    Attributes:
        actor: The handle of the actor at fault.
        rank: Its index in `actors`.
        collective: The number of the collective.
        point: The point.

    Raises:
        ValueError: If an argument is out of range.
        InvalidArgumentError: On entry, if the actor has another fault already.
        ray.exceptions.RayActorError: On entry, if the actor is dead.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        seed: int = 0,
        mode: str = "sigkill",
        rank: int | None = None,
        collective: int | None = None,
        point: str | None = None,
        within: int = 10,
        stop_s: float = 2.0,
    ) -> None:
        if not actors or within < 1 or stop_s <= 0:
            raise ValueError("KillWorker needs at least one actor, within >= 1 and stop_s > 0")
        rng = random.Random(seed)  # always draws all three: an argument that is given does not change the others
        drawn = rng.randrange(len(actors)), rng.randint(1, within), rng.choice(POINTS)
        self.rank: int = drawn[0] if rank is None else rank
        self.collective: int = drawn[1] if collective is None else collective
        self.point: str = drawn[2] if point is None else point
        if not 0 <= self.rank < len(actors):
            raise ValueError(f"rank {self.rank} is out of range for {len(actors)} actors")
        if self.collective < 1:
            raise ValueError(f"collective is {self.collective}; the first one is 1")
        if self.point not in POINTS or mode not in MODES:
            raise ValueError(f"point is one of {', '.join(POINTS)}; mode is one of {', '.join(MODES)}")
        self.actor: Any = actors[self.rank]
        self._strike: Callable[[], None] = partial(_STRIKES[mode], stop_s)
        self._token = secrets.token_hex(8)
        self._outcome: Any = None  # the ref of whether it has struck, after the block

    def __enter__(self) -> KillWorker:  # noqa: PYI034 - Python 3.10 has no `Self`
        fault = _Fault(self._token, self.collective, self.point, self._strike)
        ray.get(self.actor.__ray_call__.remote(_put, fault))
        return self

    def __exit__(self, *exc: object) -> None:
        self._outcome = self.actor.__ray_call__.remote(_has_struck, self._token, True)  # not waited for: it may be dead

    def has_struck(self, timeout_s: float = 60.0) -> bool:
        """Returns whether the fault has struck, in the block or after it. Waits for the actor's earlier methods.

        Args:
            timeout_s: How long to wait for the actor's answer.

        Raises:
            ray.exceptions.GetTimeoutError: If the actor does not answer in time.
        """
        outcome = self._outcome or self.actor.__ray_call__.remote(_has_struck, self._token, False)
        try:
            struck: bool = ray.get(outcome, timeout=timeout_s)
        except RayActorError:
            return True
        return struck

    def __repr__(self) -> str:
        return f"KillWorker(rank={self.rank}, collective={self.collective}, point={self.point!r})"


# ---------------------------------------------------------------------------------------------- in the actor


class _Fault:
    """The `Faults` of a participant."""

    def __init__(self, token: str, collective: int, point: str, strike: Callable[[], None]) -> None:
        self.token = token
        self.has_struck = False
        self._collectives_left = collective
        self._point = point
        self._strike = strike

    def at(self, point: str, seq: int, rank: int) -> None:
        """See `raycollect.core.protocols.Faults`."""
        if point == "start":
            self._collectives_left -= 1
        elif point == self._point and self._collectives_left <= 0 and not self.has_struck:
            self.has_struck = True
            self._strike()


def _put(actor_self: Any, fault: _Fault) -> None:
    instruments = this_runtime().instruments
    if instruments.faults is not None:
        refuse("KillWorker", [wrong_argument("actor", "in the block of another KillWorker", "an actor in none")])
    instruments.faults = fault


def _has_struck(actor_self: Any, token: str, is_over: bool) -> bool:
    instruments = this_runtime().instruments
    fault = instruments.faults
    if not isinstance(fault, _Fault) or fault.token != token:
        return True  # Ray has restarted the actor
    if is_over:
        instruments.faults = None
    return fault.has_struck


def _kill(stop_s: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(stop_s: float) -> None:
    os._exit(1)


def _stop(stop_s: float) -> None:
    # Another process has to continue this one. It is started before this one stops.
    subprocess.Popen(["sh", "-c", f"sleep {stop_s}; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


_STRIKES = {"sigkill": _kill, "exit": _exit, "stop": _stop}
