"""The base of publications and subscriptions, and a list of those that a process has open, for the live view."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakSet

from raycollect.member.runtime import Runtime, this_runtime
from raycollect.ray_bridge import ray_session
from raycollect.weights.protocol import Version
from raycollect.weights.ranks import Ranks, why_over

_Side = TypeVar("_Side", bound="WeightSide")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSide:
    """A publication or a subscription that this process has open.

    Attributes:
        name: The name of the publication.
        actors: The display names of its actors, by rank.
        receives: Whether it is a subscription.
        version: The version that the methods of a receiver group see; None: no update has ended yet.
        skipped: How many versions the updates of a receiver group have skipped, in all.
    """

    name: str
    actors: tuple[str, ...]
    receives: bool
    version: Version | None
    skipped: int


class _OpenSides:
    """The sides of a process; those that were closed stay until they are collected."""

    def __init__(self, runtime: Runtime) -> None:
        self._all = WeakSet[WeightSide]()
        self._lock = threading.Lock()

    def add(self, side: WeightSide) -> None:
        with self._lock:
            self._all.add(side)

    def all(self) -> list[WeightSide]:
        with self._lock:
            return list(self._all)


class WeightSide:
    """The base of `Publication` and `Subscription`. It may be used as a context, which closes it."""

    _receives = False
    _is_open = True
    _session: Any = None
    _version: Version | None = None
    _skipped = 0
    _ranks: Ranks

    def __init__(self, name: str) -> None:
        self.name = name
        self._session = ray_session.core_worker() if ray_session.is_connected() else None

    def _opened(self) -> None:
        """Lists this side, once it is complete."""
        this_runtime().part(_OpenSides, _OpenSides).add(self)

    def _described(self) -> OpenSide | None:
        """Describes this side; None if it was closed, or Ray has ended."""
        if why_over(self._session, is_open=self._is_open):
            return None
        actors = tuple(member.actor for member in self._ranks.members)
        return OpenSide(
            name=self.name, actors=actors, receives=self._receives, version=self._version, skipped=self._skipped
        )

    def close(self) -> None:
        """Ends it."""
        raise NotImplementedError

    def __enter__(self: _Side) -> _Side:  # noqa: PYI019 - Python 3.10 has no `Self`
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_sides() -> list[OpenSide]:
    """Returns the publications and subscriptions that this process has open. Any thread may call it."""
    described = (side._described() for side in this_runtime().part(_OpenSides, _OpenSides).all())
    return [side for side in described if side is not None]
