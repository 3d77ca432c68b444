"""Faults that a test puts into a participant; each strikes once, and says whether it was consumed.

A fault is made on the driver (`die_at`, `raise_at`, `delay_at`, `drop_at`, `corrupt_at`) and put into the actor of its
rank by `put_fault`. When it strikes it writes down the time in its folder, so that the driver can tell how long it took
to hear of it, and that it has struck, even where the process is gone. The folder also has a pipe that ends delays.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import ray

from raycollect.backends.shm.meeting import _ASLEEP, _WORD_STRIDE
from raycollect.engine.instruments import POINTS
from raycollect.errors import KernelError
from raycollect.member.participant import this_participant
from raycollect.member.runtime import this_runtime

IN_KERNEL = "in_kernel"
"""The point that no executor has: amid the work of a kernel, where the backend can be reached there."""

PHASES = ("before_check", "after_check", "before_kernel", IN_KERNEL, "after_kernel")

STRUCK, PIPE, CAME = "struck", "pipe", "rank {} has come"
MOST_HELD = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong in a participant, and where; a value, which travels.

    Attributes:
        action: A name in `ACTIONS`.
        rank: The rank in which it strikes.
        point: One of `PHASES`, or another of the executor's points.
        nth: At which visit of the rank it strikes; 1 is the first.
        way: A name in `DEATHS` for a death; for control bytes the backend whose check they belong to, or ``"link"``.
        group: The group whose consistency check it is.
        folder: Where it writes down that it has struck; empty: nowhere.
    """

    action: str
    rank: int
    point: str
    nth: int = 1
    way: str = ""
    group: str = "default"
    folder: str = ""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS or self.point not in (*POINTS, IN_KERNEL) or self.nth < 1:
            raise ValueError(f"no such fault: {self}")


def die_at(rank: int, point: str, *, way: str = "sigkill", **more: Any) -> Fault:
    """The process ends there."""
    return Fault(action="die", rank=rank, point=point, way=way, **more)


def raise_at(rank: int, point: str, **more: Any) -> Fault:
    """An error is raised there."""
    return Fault(action="raise", rank=rank, point=point, **more)


def delay_at(rank: int, point: str, **more: Any) -> Fault:
    """The rank stays there until the driver opens the pipe (`Folder.release`), or for good."""
    return Fault(action="delay", rank=rank, point=point, **more)


def note_at(rank: int, point: str, **more: Any) -> Fault:
    """No fault: the rank notes that it has come there (`Folder.has_come`), and goes on."""
    return Fault(action="note", rank=rank, point=point, **more)


def drop_at(rank: int, point: str, *, way: str, **more: Any) -> Fault:
    """The control bytes that the rank sends next are not sent."""
    return Fault(action="drop", rank=rank, point=point, way=way, **more)


def corrupt_at(rank: int, point: str, *, way: str, **more: Any) -> Fault:
    """A byte of the control bytes that the rank sends next is flipped."""
    return Fault(action="corrupt", rank=rank, point=point, way=way, **more)


class Folder:
    """What a driver and a fault have in common.

    Args:
        path: A directory of this machine, without anything in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path / PIPE)
        self._fd = os.open(path / PIPE, os.O_RDWR)  # with both ends here no open waits

    def release(self) -> None:
        """Lets those go on who are held, or will be."""
        os.write(self._fd, bytes(MOST_HELD))

    def close(self) -> None:
        """Lets everybody go on, for good."""
        self.release()
        os.close(self._fd)

    def has_come(self, rank: int) -> bool:
        """Whether a rank has come to the point of its `note_at`."""
        return (self.path / CAME.format(rank)).exists()

    @property
    def struck_s(self) -> float | None:
        """When the fault struck, as `time.time`; None: it has not."""
        try:
            return float((self.path / STRUCK).read_text())
        except FileNotFoundError:
            return None


# ---------------------------------------------------------------------------------------------- in the actor


class Injected:
    """A fault where it strikes: the `Faults` of a participant.

    Attributes:
        consumed: Whether it has struck.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.consumed = False
        self._left = fault.nth
        self._undo: list[Callable[[], None]] = []

    def at(self, point: str, seq: int, rank: int) -> None:
        """See `protocols.Faults`."""
        fault = self.fault
        if (point, rank) != (fault.point, fault.rank) or self._left <= 0:
            return
        self._left -= 1
        if not self._left:
            ACTIONS[fault.action](self)

    def strike(self) -> None:
        """Notes that it strikes now."""
        self.consumed = True
        if self.fault.folder:
            fresh = Path(self.fault.folder, f"{STRUCK}.fresh")
            fresh.write_text(repr(time.time()))
            fresh.rename(fresh.with_name(STRUCK))  # whole, should this process end now

    def patch(self, holder: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replaces what an object, or module, calls by that name."""
        original, own = getattr(holder, name), name in vars(holder)
        setattr(holder, name, wrap(original))
        self._undo.append(lambda: setattr(holder, name, original) if own else delattr(holder, name))

    def take_back(self) -> None:
        """Undoes what it has patched."""
        while self._undo:
            self._undo.pop()()


def put_fault(actor_self: Any, fault: Fault) -> None:
    """Puts a fault into this participant. Runs inside the actor."""
    injected, runtime = Injected(fault), this_runtime()
    if fault.point == IN_KERNEL:
        sys._raycollect_fault = injected  # type: ignore[attr-defined]
        for holder, name in _inner_calls():
            injected.patch(holder, name, lambda call: _reaching(injected, call))
        return
    runtime.instruments.faults = injected


def put(actor_self: Any, point: str, action: str, way: str = "exit") -> None:
    """Lets this participant ``"die"``, ``"raise"`` or ``"stall"`` at a point, whatever its rank. Runs inside it."""
    fault = Fault(action={"stall": "hold"}.get(action, action), rank=0, point=point, way=way)
    this_runtime().instruments.faults = _OfAnyRank(fault)


def take_back(actor_self: Any) -> None:
    """Undoes what a fault has patched. Runs inside the actor."""
    here = vars(sys).pop("_raycollect_fault", None) or this_runtime().instruments.faults
    if isinstance(here, Injected):
        here.take_back()


class _OfAnyRank(Injected):
    def at(self, point: str, seq: int, rank: int) -> None:
        super().at(point, seq, self.fault.rank)


def _inner_calls() -> list[tuple[Any, str]]:
    """What backends call amid a kernel, again and again: (holder, name)."""
    backends = "raycollect.backends"
    calls = ("shm.staged", "fold"), ("shm.in_place", "fold"), ("tcp.run", "fold_with")
    gloo = import_module(f"{backends}.gloo.communicator").GlooLink
    return [*((import_module(f"{backends}.{module}"), name) for module, name in calls), (gloo, "reduce")]


def _reaching(injected: Injected, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that comes to the point first."""

    def reach(*args: Any, **kwargs: Any) -> Any:
        injected.at(IN_KERNEL, 0, injected.fault.rank)
        return call(*args, **kwargs)

    return reach


# ---------------------------------------------------------------------------------------------- what strikes


def _die(injected: Injected) -> None:
    injected.strike()
    DEATHS[injected.fault.way]()


def _note(injected: Injected) -> None:
    Path(injected.fault.folder, CAME.format(injected.fault.rank)).touch()


def _raise(injected: Injected) -> None:
    injected.strike()
    raise KernelError(detail=f"injected at {injected.fault.point}")


def _delay(injected: Injected) -> None:
    injected.strike()
    with Path(injected.fault.folder, PIPE).open("rb", buffering=0) as pipe:
        pipe.read(1)


def _hold(injected: Injected) -> None:
    """For a minute: the test kills whoever is held."""
    injected.strike()
    threading.Event().wait(60)


def _drop(injected: Injected) -> None:
    _DROPS[injected.fault.way](injected)


def _corrupt(injected: Injected) -> None:
    _CORRUPTIONS[injected.fault.way](injected)


ACTIONS: dict[str, Callable[[Injected], None]] = {
    "die": _die,
    "raise": _raise,
    "delay": _delay,
    "hold": _hold,
    "note": _note,
    "drop": _drop,
    "corrupt": _corrupt,
}


def _kill_by_ray() -> None:
    ray.kill(ray.get_runtime_context().current_actor)
    threading.Event().wait()


def _leave() -> None:
    raise SystemExit("injected")


DEATHS: dict[str, Callable[[], Any]] = {
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(1),
    "ray.kill": _kill_by_ray,
    "SystemExit": _leave,
}
"""How a process ends. By an exception that is no error Ray ends it, after that has gone through all our frames."""


# ---------------------------------------------------------------------------------------------- control bytes


def _plans_of(group: str) -> Any:
    groups: dict[str, Any] = this_participant()._lease._groups.by_id  # type: ignore[union-attr]
    return next(one for one in groups.values() if one.spec.name == group).plans


def _flipped(data: bytes, at: int = 0) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0xFF
    return bytes(changed)


def _on_link(injected: Injected, change: Callable[[bytes], bytes | None]) -> None:
    """What becomes of the next frame to the controller; None: it is not written."""
    link, here = this_participant()._lease.link, threading.get_ident()  # type: ignore[union-attr]

    def wrap(write: Any) -> Any:
        def once(frame: bytes) -> Any:
            changed = change(frame)
            if changed is None and threading.get_ident() != here:
                return None  # that of a timer is lost as well: what follows a lost frame is taken for forged
            injected.strike()
            injected.take_back()
            return None if changed is None else write(changed)

        return once

    injected.patch(link, "_write", wrap)


def _silence_bells(injected: Injected) -> None:
    """The bells of a `shm` group that this rank rings in this launch are lost, while the others sleep."""
    meeting = _plans_of(injected.fault.group).communicator._parts.meeting
    others = [rank for rank in range(len(meeting._words) // _WORD_STRIDE) if rank != meeting.rank]
    asleep = [rank * _WORD_STRIDE + _ASLEEP for rank in others]
    while not all(meeting._words[at] for at in asleep):
        os.sched_yield()
    left = 2  # in the consistency check, and as this rank leaves

    def wrap(ring: Any) -> Any:
        def silent(ranks: Any, **options: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                injected.take_back()

        return silent

    injected.patch(meeting, "_ring", wrap)
    injected.strike()


def _flip_in_shared_memory(injected: Injected) -> None:
    """All ranks of a `shm` group read the same wrong arrival."""
    meeting = _plans_of(injected.fault.group).communicator._parts.meeting

    def wrap(bring: Any) -> Any:
        def once(launch: Any, arrival: bytes, until_s: float) -> Any:
            injected.strike()
            injected.take_back()
            return bring(launch, _flipped(arrival), until_s)

        return once

    injected.patch(meeting, "_bring", wrap)


def _mesh(injected: Injected) -> dict[int, Any]:
    """The connections of a `tcp` group, or of one whose library has its consistency check there."""
    communicator = _plans_of(injected.fault.group).communicator
    peers: dict[int, Any] = getattr(communicator, "_mesh", communicator)._tcp_mesh._peers
    return peers


def _drop_on_mesh(injected: Injected) -> None:
    """No rank of the group gets the arrival."""
    peers = _mesh(injected)

    def silent(peer: Any) -> Callable[..., None]:
        def once(*frame: Any) -> None:
            injected.strike()
            del peer.queue

        return once

    for peer in peers.values():
        peer.queue = silent(peer)


def _flip_on_mesh(injected: Injected) -> None:
    """One rank of the group gets a wrong arrival, the others the right one."""
    peers = _mesh(injected)
    peer = peers[min(peers)]

    def wrap(queue: Any) -> Any:
        def once(kind: int, step: int, body: Any, *rest: Any) -> None:
            injected.strike()
            injected.take_back()
            queue(kind, step, memoryview(_flipped(body)), *rest)

        return once

    injected.patch(peer, "queue", wrap)


_DROPS: dict[str, Callable[[Injected], None]] = {
    "shm": _silence_bells,
    "tcp": _drop_on_mesh,
    "gloo": _drop_on_mesh,
    "link": lambda injected: _on_link(injected, lambda frame: None),
}
"""Whose control bytes -> how they are lost. Memory loses nothing; what can be lost there is a bell."""

_CORRUPTIONS: dict[str, Callable[[Injected], None]] = {
    "shm": _flip_in_shared_memory,
    "tcp": _flip_on_mesh,
    "gloo": _flip_on_mesh,
    "link": lambda injected: _on_link(injected, lambda frame: _flipped(frame, -1)),
}
