"""How a version becomes visible, step by step: without Ray, without a clock, without a socket.

A *put* seals the version on each rank of the publisher, and posts it when all have: before, nobody can ask for it. An
*update* has two phases. Each rank of a receiver group stages the version in memory that no method sees, and recomputes
the digest of each atom from what landed. When all have, and not before, they are told to show it, which each does
between two methods. A rank that dies drops out; one that fails, or is late, fails the update, and nothing is shown.

A *stream* is a put whose ranks seal one part after another, while they compute. Receivers may land a part at once. But
they have no version then that could be verified or shown: that begins with an update, when the put is over and all of
its digests are known. So a layer that fails leaves nothing but bytes that no method sees.

A rank that has no memory for that makes the version *in place*. From the first byte on it is dirty, and sees no
version: its methods are refused until it is told to show what it has verified.

There is no record of the decision to show: what was told last is in the ranks, which a later update asks. So whoever
dies, at whatever moment, no rank shows a version that not all living ranks of its group have verified
(`tests/pure/weights/test_protocol.py` visits every order of these steps, with a death at each).

States are frozen. A move that makes no sense has no entry in its table, and is ignored: it came late.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

Atom = tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""A part of a tensor that has a digest of its own: the tensor's name, and a box of it."""

Digests = Mapping[Atom, bytes]


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """One state of a publication's weights.

    Versions are ordered by epoch and number.

    Attributes:
        epoch: Counts up with the publishers of this name.
        number: Counts up within the epoch.
        publisher: Who has put it, for people.
        signature: A digest of names, shapes, dtypes and layouts.
        nbytes: The bytes of its tensors, each once.
        digests: The digest of each part: xxh3, 128 bits, of its elements in C order.
        dtypes: The element type of each tensor, by name.
        count: How many versions its publisher had put then, this one included.
    """

    epoch: int
    number: int
    publisher: str = field(default="", compare=False)
    signature: bytes = field(default=b"", compare=False, repr=False)
    nbytes: int = field(default=0, compare=False)
    digests: Digests = field(default_factory=dict, compare=False, repr=False)
    dtypes: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    count: int = field(default=0, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.number} of epoch {self.epoch}"


# ---------------------------------------------------------------------------------------------- a rank


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank of a receiver group has.

    Attributes:
        shown: The version that its methods see.
        staged: The version that is made in memory which they don't see.
        wanted: The digest that each of its atoms has there.
        landed: The digests of what lies there, of verified atoms.
        is_open: Whether more atoms of it are still to be known: it comes by a stream.
        is_dirty: Whether it is made in place, and methods may see nothing.
    """

    shown: Version | None = None
    staged: Version | None = None
    wanted: Digests = field(default_factory=dict)
    landed: Digests = field(default_factory=dict)
    is_open: bool = False
    is_dirty: bool = False

    @property
    def missing(self) -> list[Atom]:
        """The atoms that are still to come."""
        return [atom for atom, digest in self.wanted.items() if self.landed.get(atom) != digest]


def stage(state: RankState, version: Version, wanted: Digests) -> RankState:
    """Begins to make a version: what has landed before and is the same stays, so that a retry takes what is missing."""
    landed = {atom: digest for atom, digest in wanted.items() if state.landed.get(atom) == digest}
    return replace(state, staged=version, wanted=wanted, landed=landed, is_open=False)


def stage_in_place(state: RankState, version: Version, wanted: Digests, found: Digests) -> RankState:
    """`stage`, where bytes land in what methods see; `found`: the digests of what lies there, made anew."""
    state = stage(replace(state, landed=found), version, wanted)
    return replace(state, shown=None, is_dirty=True) if state.missing else state


def open_stream(state: RankState, version: Version, among: Sequence[Atom]) -> RankState:
    """Begins to take a version part by part, or again; `among`: its atoms, of which none has to come."""
    if state.staged is not None and (state.staged, not state.is_open) > (version, False):
        return state
    landed = {atom: state.landed[atom] for atom in among if atom in state.landed}
    return replace(state, staged=version, wanted={}, landed=landed, is_open=True)


def expect(state: RankState, version: Version, part: Digests) -> RankState:
    """A part of a version that is open is there to be had; what lies there of it is missing, unless it is the same."""
    if state.staged != version or not state.is_open:
        return state
    landed = {atom: digest for atom, digest in state.landed.items() if part.get(atom, digest) == digest}
    return replace(state, wanted={**state.wanted, **part}, landed=landed)


def land(state: RankState, version: Version, found: Digests) -> RankState:
    """Atoms have come, and these are the digests of what lies there now; those that are wrong are still missing."""
    if state.staged != version:
        return state
    right = {atom: digest for atom, digest in found.items() if state.wanted.get(atom) == digest}
    return replace(state, landed={**state.landed, **right})


def may_show(state: RankState, version: Version) -> bool:
    """Whether all of a version has been verified here."""
    return state.staged == version and not state.is_open and not state.missing


def show(state: RankState, version: Version) -> RankState:
    """Methods see a version from now on; one that is not whole here changes nothing."""
    return replace(state, shown=version, is_dirty=False) if may_show(state, version) else state


def shown_by_all(ranks: Iterable[Version | None]) -> Version | None:
    """The version that all of some ranks have come to, of what each shows; None: one shows nothing yet."""
    found = list(ranks)
    known = [one for one in found if one is not None]
    return min(known) if known and len(known) == len(found) else None


# ---------------------------------------------------------------------------------------------- events and moves


@dataclass(frozen=True, slots=True)
class Event:
    """What has become of a rank; `digests` are those of its atoms, where it says so."""

    rank: int
    digests: Digests = field(default_factory=dict)


class Verified(Event):
    """All atoms of a rank have landed, with these digests."""


class Shown(Event):
    """A rank's methods see the version."""


class Sealed(Event):
    """A rank of the publisher keeps its part of the version, with these digests."""


class SealedPart(Event):
    """A rank of the publisher keeps some atoms of the version, with these digests, and will seal others."""


class Lost(Event):
    """A rank's process is gone."""


class Failed(Event):
    """A rank could not do what it was told, or has not in time."""


class Tell(enum.Enum):
    """What is to be done next: POST by the publisher, LAND by any receiver, the rest by whom is waited for."""

    STAGE = "stage"
    SHOW = "show"
    SEAL = "seal"
    POST = "post"
    LAND = "land"


class Phase(enum.Enum):
    """How far a put or an update is."""

    STAGING = "staging"
    SHOWING = "showing"
    SEALING = "sealing"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Round:
    """A put, or an update of one receiver group.

    Attributes:
        version: Which version it is about.
        phase: How far it is.
        waiting: The ranks from which something is due.
        done: What the others have said, by rank: the digests of their atoms.
        lost: The ranks that are gone.
        differing: The atoms of which replicas of the publisher had different bits.
        parts: The digests of the atoms that were sealed as parts of a stream.
    """

    version: Version
    phase: Phase
    waiting: frozenset[int]
    done: Mapping[int, Digests] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    differing: tuple[Atom, ...] = ()
    parts: Digests = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether nothing is due any more."""
        return self.phase in (Phase.DONE, Phase.FAILED)

    @property
    def is_shown(self) -> bool:
        """Whether a rank shows the version of an update. Those that are still waited for have verified it then."""
        return self.waiting < set(self.done)


def begin_update(version: Version, ranks: int) -> tuple[Round, Tell]:
    """Begins an update: all ranks are to stage."""
    return Round(version, Phase.STAGING, frozenset(range(ranks))), Tell.STAGE


def begin_put(version: Version, ranks: int) -> tuple[Round, Tell]:
    """Begins a put: all ranks are to seal."""
    return Round(version, Phase.SEALING, frozenset(range(ranks))), Tell.SEAL


def advance(state: Round, event: Event) -> tuple[Round, Tell | None]:
    """What an event makes of a put or an update, and what is to be done next."""
    move = _MOVES.get((state.phase, type(event)))
    if move is None or event.rank not in state.waiting:
        return state, None
    return move(state, event)


def _heard(state: Round, event: Event) -> Round:
    digests = {} if isinstance(event, Shown) else {event.rank: event.digests}
    return replace(state, waiting=state.waiting - {event.rank}, done={**state.done, **digests})


def _verified(state: Round, event: Event) -> tuple[Round, Tell | None]:
    return _all_verified(_heard(state, event))


def _lost_one(state: Round, event: Event) -> tuple[Round, Tell | None]:
    done = {rank: one for rank, one in state.done.items() if rank != event.rank}
    left = replace(state, waiting=state.waiting - {event.rank}, done=done, lost=state.lost | {event.rank})
    return _all_verified(left) if state.phase is Phase.STAGING else _all_shown(left)


def _all_verified(state: Round) -> tuple[Round, Tell | None]:
    if state.waiting:
        return state, None
    if not state.done:
        return replace(state, phase=Phase.FAILED), None
    return replace(state, phase=Phase.SHOWING, waiting=frozenset(state.done)), Tell.SHOW


def _shown(state: Round, event: Event) -> tuple[Round, Tell | None]:
    return _all_shown(_heard(state, event))


def _all_shown(state: Round) -> tuple[Round, Tell | None]:
    if state.waiting:
        return state, None
    return replace(state, phase=Phase.DONE if state.done else Phase.FAILED), None


def _sealed_part(state: Round, event: Event) -> tuple[Round, Tell | None]:
    parts = dict(state.parts)
    differing = _joined(parts, event.digests)
    if differing:
        return replace(state, phase=Phase.FAILED, differing=differing), None
    return replace(state, parts=parts), Tell.LAND


def _sealed(state: Round, event: Event) -> tuple[Round, Tell | None]:
    state = _heard(state, event)
    if state.waiting:
        return state, None
    digests = dict(state.parts)
    differing = [atom for one in state.done.values() for atom in _joined(digests, one)]
    if differing:
        return replace(state, phase=Phase.FAILED, differing=tuple(differing)), None
    return replace(state, phase=Phase.DONE, version=replace(state.version, digests=digests)), Tell.POST


def _joined(known: dict[Atom, bytes], digests: Digests) -> tuple[Atom, ...]:
    """Adds digests to those that are known, and returns the atoms of which others are."""
    return tuple(atom for atom, digest in digests.items() if known.setdefault(atom, digest) != digest)


def _lost_part(state: Round, event: Event) -> tuple[Round, Tell | None]:
    return replace(state, phase=Phase.FAILED, lost=frozenset({event.rank})), None


def _failed(state: Round, event: Event) -> tuple[Round, Tell | None]:
    return replace(state, phase=Phase.FAILED), None


_MOVES: dict[tuple[Phase, type], Callable[[Round, Event], tuple[Round, Tell | None]]] = {
    (Phase.STAGING, Verified): _verified,
    (Phase.STAGING, Lost): _lost_one,
    (Phase.STAGING, Failed): _failed,
    (Phase.SHOWING, Shown): _shown,
    (Phase.SHOWING, Lost): _lost_one,
    (Phase.SHOWING, Failed): _failed,
    (Phase.SEALING, SealedPart): _sealed_part,
    (Phase.SEALING, Sealed): _sealed,
    (Phase.SEALING, Lost): _lost_part,
    (Phase.SEALING, Failed): _failed,
}
"""What an event means in a phase. A publisher's rank that is lost takes its part of the version with it."""
