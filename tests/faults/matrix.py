"""What each fault has to lead to: a table; `fault_scenes` runs its cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from raycollect import errors
from tests.faults import inject
from tests.faults.inject import Fault

GROUP = "faulty"
WORLD_SIZE = 3
LIMIT_S = 20.0
"""How long anybody may have to wait for an error, on a machine that does other things too. How long it took on one that
did not is in tests/faults/results.md."""

SHORT_S = 1.5
"""The time limit of a collective that will not end."""

SMALL, LARGE = 10, 1_250_000
"""Elements of float32; of the large arrays each backend makes several chunks."""

RUNS_BEFORE = 3
"""How many runs of a captured step go well; from the third on they are done the short way."""

FAULTS: dict[str, Callable[..., Fault]] = {
    "SIGKILL": partial(inject.die_at, way="sigkill"),
    "os._exit": partial(inject.die_at, way="exit"),
    "ray.kill": partial(inject.die_at, way="ray.kill"),
    "SystemExit": partial(inject.die_at, way="SystemExit"),
    "raises": inject.raise_at,
    "is held": inject.delay_at,
    "loses its arrival": inject.drop_at,
    "garbles its arrival": inject.corrupt_at,
    "loses a frame": partial(inject.drop_at, way="link"),
    "garbles a frame": partial(inject.corrupt_at, way="link"),
}
"""What a participant does."""

DEADLY = ("SIGKILL", "os._exit", "ray.kill", "SystemExit")
IN_THE_CHECK = ("loses its arrival", "garbles its arrival")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a fault has to lead to.

    Attributes:
        fault: A name in `FAULTS`.
        phase: Where it strikes.
        backends: On which.
        caller: A name in `CALLERS`: by what the ranks came there.
        rank: In which rank.
        error: What is raised on the driver; in calls of the members, on all other ranks. None: nothing.
        goes_on: Whether the driver hears no more than that its wait is over and the collective goes on.
        later: What is raised then, once the rank goes on.
        other: What is raised instead of `error`, where somebody else may be the first to tell.
        blamed: The ranks of which one is named; empty: the rank.
        leaves: What the tensors of the other ranks may be afterwards; see `Seen.tensors`.
        works: Whether the very group can be used again; by all, where nobody has died.
        timeout_s: The time limit of the collective.
    """

    fault: str
    phase: str
    backends: tuple[str, ...]
    caller: str = "plan"
    rank: int = 1
    error: type[BaseException] | None
    goes_on: bool = False
    later: type[BaseException] | None = None
    other: type[BaseException] | None = None
    blamed: tuple[int, ...] = ()
    leaves: tuple[str, ...]
    works: bool
    timeout_s: float = 60.0

    @property
    def is_deadly(self) -> bool:
        return self.fault in DEADLY


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row on one of its backends."""

    row: Row
    backend: str

    def __str__(self) -> str:
        row = self.row
        words = (row.caller, self.backend, row.phase, *row.fault.split(), *(() if row.rank else ("hub",)))
        return "-".join(words)


DRIVER = -1


# ---------------------------------------------------------------------------------------------- the table


MESH = ("shm", "tcp")
ALL = (*MESH, "gloo")

UNTOUCHED, DONE, DIRTY = ("before",), ("after",), ("dirty",)
NOT_TORN = (*UNTOUCHED, *DONE, *DIRTY)
"""Whoever is told while it leaves the check stops there; whoever needs no more of the others ends well, as what small
arrays hold comes with the arrivals; the rest is dirty."""


def _rows(phase: str, backends: tuple[str, ...], fault: str, error: Any, leaves: tuple[str, ...], **more: Any) -> Row:
    """A row; a group breaks where somebody has died, unless it says otherwise."""
    return Row(
        **{"works": fault not in DEADLY} | more, fault=fault, phase=phase, backends=backends, error=error, leaves=leaves
    )


_DIED, _FAILED, _LATE = errors.ParticipantDiedError, errors.KernelError, errors.CollectiveTimeoutError
_GARBLED = errors.ProtocolError
_SHORT: dict[str, Any] = {"timeout_s": SHORT_S}
_GOES_ON: dict[str, Any] = {"goes_on": True}

TABLE: tuple[Row, ...] = (
    # a process ends
    _rows("before_check", ALL, "SIGKILL", _DIED, UNTOUCHED),
    _rows("after_check", ALL, "SIGKILL", _DIED, NOT_TORN),
    _rows("before_kernel", ALL, "SIGKILL", _DIED, NOT_TORN),
    _rows("in_kernel", ALL, "SIGKILL", _DIED, DIRTY),
    _rows("after_kernel", ALL, "SIGKILL", _DIED, NOT_TORN),
    _rows("before_check", ("shm",), "os._exit", _DIED, UNTOUCHED),
    _rows("before_kernel", ("tcp",), "ray.kill", _DIED, NOT_TORN),
    _rows("before_check", ALL, "SystemExit", _DIED, UNTOUCHED),
    # a participant fails
    _rows("before_check", ALL, "raises", _FAILED, UNTOUCHED),
    _rows("after_check", ALL, "raises", _FAILED, NOT_TORN),
    _rows("before_kernel", ALL, "raises", _FAILED, NOT_TORN),
    _rows("in_kernel", ALL, "raises", _FAILED, DIRTY),
    _rows("after_kernel", ALL, "raises", _FAILED, NOT_TORN),
    # a participant stays away
    _rows("before_check", ALL, "is held", _LATE, UNTOUCHED, **_SHORT),
    _rows("in_kernel", ALL, "is held", _LATE, DIRTY, **_SHORT),
    _rows("after_check", ALL, "is held", _LATE, DONE, **_GOES_ON),
    _rows("before_kernel", ALL, "is held", _LATE, DONE, **_GOES_ON),
    _rows("after_kernel", ALL, "is held", _LATE, DONE, **_GOES_ON),
    # what it says is lost, or damaged
    _rows("before_check", ("shm",), "loses its arrival", None, DONE),
    *(
        _rows(
            "before_check",
            (on,),
            "loses its arrival",
            errors.PlanAbortedError,
            UNTOUCHED,
            blamed=(0, 1, 2),
            works=False,
        )
        for on in ("tcp", "gloo")
    ),
    _rows("before_check", ("shm",), "garbles its arrival", _GARBLED, UNTOUCHED),
    _rows("before_check", ("tcp", "gloo"), "garbles its arrival", _GARBLED, NOT_TORN),
    # the loss is seen in the next frame, which may come before the wait is over
    _rows(
        "after_kernel",
        ("tcp", "gloo"),
        "loses a frame",
        _LATE,
        DONE,
        other=_DIED,
        works=False,
        later=_DIED,
        **_GOES_ON,
    ),
    _rows("after_kernel", ("tcp", "gloo"), "garbles a frame", _DIED, NOT_TORN, works=False),
    # where outputs are made
    *(
        _rows("before_check", ALL, fault, error, UNTOUCHED, caller="outputs")
        for fault, error in (("SIGKILL", _DIED), ("raises", _FAILED))
    ),
    *(
        _rows("in_kernel", MESH, fault, error, UNTOUCHED, caller="outputs")
        for fault, error in (("SIGKILL", _DIED), ("raises", _FAILED))
    ),
    # runs of a captured step
    _rows("before_check", ALL, "SIGKILL", _DIED, UNTOUCHED, caller="run"),
    _rows("in_kernel", MESH, "SIGKILL", _DIED, NOT_TORN, caller="run"),
    _rows("after_kernel", MESH, "SIGKILL", _DIED, NOT_TORN, caller="run"),
    _rows("before_check", ALL, "raises", _FAILED, UNTOUCHED, caller="run"),
    _rows("in_kernel", MESH, "raises", _FAILED, NOT_TORN, caller="run"),
    _rows("before_check", MESH, "is held", _LATE, UNTOUCHED, caller="run", **_SHORT),
    # calls of the members
    _rows("before_check", ALL, "SIGKILL", _DIED, UNTOUCHED, caller="call"),
    _rows("in_kernel", ALL, "SIGKILL", _DIED, DIRTY, caller="call"),
    _rows("before_check", ALL, "raises", _FAILED, UNTOUCHED, caller="call"),
    _rows("in_kernel", MESH, "raises", errors.PlanAbortedError, DIRTY, caller="call"),
    _rows("before_check", ALL, "is held", _LATE, UNTOUCHED, caller="call", **_SHORT),
    _rows("in_kernel", ALL, "is held", _LATE, DIRTY, caller="call", **_SHORT),
    *(_rows("before_check", MESH, "SIGKILL", _DIED, UNTOUCHED, caller="own call", rank=rank) for rank in (0, 1)),
    _rows("in_kernel", MESH, "SIGKILL", _DIED, DIRTY, caller="own call"),
)


def cases() -> list[Case]:
    """Every row on each of its backends."""
    return [Case(row=row, backend=backend) for row in TABLE for backend in row.backends]
