"""The protocol by which a version becomes visible, as a state machine without Ray, clock and sockets.

A *put* seals the version on each rank of the publisher. When all ranks have sealed it, the version is posted; receivers
can't ask for it before. An *update* has two phases. Each rank of a receiver group stages the version in memory that no
method sees, and recomputes the digest of each atom from the bytes that landed. When all ranks have verified all atoms,
the driver tells them to show the version, which each rank does between two methods. A rank that dies drops out. A rank
that fails or is late fails the update, and no rank shows the version.

A *stream* is a put whose ranks seal one part after another while they compute. Receivers may land a part at once, but
can't verify or show the version before an update, which begins when the put is over and all digests are known. So a
layer that fails leaves only bytes that no method sees.

A rank without memory for a second set of tensors makes the version *in place*. From the first byte on, the rank is
dirty and sees no version: its methods are refused until it shows a verified version.

The decision to show is recorded nowhere but in the ranks, which a later update asks. So, whichever process dies at
whatever moment, no rank shows a version that not all living ranks of its group have verified
(`tests/pure/weights/test_protocol.py` visits every order of these steps, with a death at each).

States are frozen. An event without an entry in the table of moves is late and is ignored.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raycollect.weights.cut import NO_CUT, Atom, Digests, VersionCut


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """One state of a publication's weights.

    Versions are ordered by epoch and number.

    Attributes:
        epoch: Counts up with the publishers of this name.
        number: Counts up within the epoch.
        publisher: The display name of the process that put it.
        signature: A digest of names, shapes, dtypes and layouts.
        nbytes: The bytes of its tensors, each once.
        digests: The digest of each part: xxh3, 128 bits, of its elements in C order. Small parts lie side by side in
            buckets, of which the digest is those of the parts, one after the other, and then that of the bucket.
        cut: The parts, their element types, and the buckets.
        count: How many versions its publisher had put by then, including this one.
    """

    epoch: int
    number: int
    publisher: str = field(default="", compare=False)
    signature: bytes = field(default=b"", compare=False, repr=False)
    nbytes: int = field(default=0, compare=False)
    digests: Digests = field(default_factory=dict, compare=False, repr=False)
    cut: VersionCut = field(default=NO_CUT, compare=False, repr=False)
    count: int = field(default=0, compare=False, repr=False)

    @property
    def dtypes(self) -> Mapping[str, str]:
        """The element type of each tensor that has elements, by name."""
        return self.cut.tensors

    @property
    def label(self) -> Version:
        """The version without its digests and parts, for those who know them."""
        return replace(self, digests={}, cut=NO_CUT)

    def __str__(self) -> str:
        return f"{self.number} of epoch {self.epoch}"


# ---------------------------------------------------------------------------------------------- a rank


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank of a receiver group.

    Attributes:
        shown: The version that its methods see.
        staged: The version that is being made in memory which methods don't see.
        wanted: The digest of each atom of the staged version.
        landed: The digests of the atoms that have landed and are verified.
        is_open: Whether a stream may still announce more atoms of the staged version.
        is_dirty: Whether the staged version is made in place, so that methods are refused.
    """

    shown: Version | None = None
    staged: Version | None = None
    wanted: Digests = field(default_factory=dict)
    landed: Digests = field(default_factory=dict)
    is_open: bool = False
    is_dirty: bool = False

    @property
    def missing(self) -> list[Atom]:
        """The atoms that have not landed."""
        return [atom for atom, digest in self.wanted.items() if self.landed.get(atom) != digest]


def stage(state: RankState, version: Version, wanted: Digests) -> RankState:
    """Begins to make a version. Landed atoms with the right digests stay, so that a retry reads only missing atoms."""
    landed = {atom: digest for atom, digest in wanted.items() if state.landed.get(atom) == digest}
    return replace(state, staged=version, wanted=wanted, landed=landed, is_open=False)


def stage_in_place(state: RankState, version: Version, wanted: Digests, present: Digests) -> RankState:
    """Begins to make a version in the tensors that methods see; `present` has the recomputed digests of their atoms."""
    state = stage(replace(state, landed=present), version, wanted)
    return replace(state, shown=None, is_dirty=True) if state.missing else state


def open_stream(state: RankState, version: Version, among: Sequence[Atom]) -> RankState:
    """Begins, or begins again, to land the parts of a stream; `among` are the version's atoms, all optional."""
    if state.staged is not None and (state.staged, not state.is_open) > (version, False):
        return state
    landed = {atom: state.landed[atom] for atom in among if atom in state.landed}
    return replace(state, staged=version, wanted={}, landed=landed, is_open=True)


def expect(state: RankState, version: Version, part: Digests) -> RankState:
    """Adds a part of the open version to the wanted atoms; landed atoms with other digests are missing again."""
    if state.staged != version or not state.is_open:
        return state
    landed = {atom: digest for atom, digest in state.landed.items() if part.get(atom, digest) == digest}
    return replace(state, wanted={**state.wanted, **part}, landed=landed)


def land(state: RankState, version: Version, digests: Digests) -> RankState:
    """Notes the digests of atoms that have landed; atoms with wrong digests are still missing."""
    if state.staged != version:
        return state
    right = {atom: digest for atom, digest in digests.items() if state.wanted.get(atom) == digest}
    return replace(state, landed={**state.landed, **right})


def may_show(state: RankState, version: Version) -> bool:
    """Returns whether this rank has verified all of a version."""
    return state.staged == version and not state.is_open and not state.missing


def show(state: RankState, version: Version) -> RankState:
    """Makes a version visible to methods; does nothing if the rank has not verified all of it."""
    return replace(state, shown=version, is_dirty=False) if may_show(state, version) else state


def shown_by_all(ranks: Iterable[Version | None]) -> Version | None:
    """Returns the oldest version that ranks show; None if a rank shows none yet."""
    versions = list(ranks)
    shown = [version for version in versions if version is not None]
    return min(shown) if shown and len(shown) == len(versions) else None


# ---------------------------------------------------------------------------------------------- events and moves


@dataclass(frozen=True, slots=True)
class RankEvent:
    """An event of a rank; `digests` are those of its atoms, for events that have them."""

    rank: int
    digests: Digests = field(default_factory=dict)


class RankVerified(RankEvent):
    """All atoms of a rank have landed, with these digests."""


class RankShown(RankEvent):
    """A rank's methods see the version."""


class RankSealed(RankEvent):
    """A rank of the publisher has sealed its part of the version, with these digests."""


class RankSealedPart(RankEvent):
    """A rank of the publisher has sealed some atoms of the version, with these digests, and will seal others."""


class RankLost(RankEvent):
    """A rank's process has ended."""


class RankFailed(RankEvent):
    """A rank has failed or is late."""


class Tell(enum.Enum):
    """The next action: POST of the publisher, LAND of any receiver, the others of the ranks that are waited for."""

    STAGE = "stage"
    SHOW = "show"
    SEAL = "seal"
    POST = "post"
    LAND = "land"


class Phase(enum.Enum):
    """The phase of a put or an update."""

    STAGING = "staging"
    SHOWING = "showing"
    SEALING = "sealing"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class VersionRound:
    """A put, or an update of one receiver group.

    Attributes:
        version: The version.
        phase: The current phase.
        waiting: The ranks whose next event is due.
        done: The digests of the atoms of the other ranks, by rank.
        lost: The ranks whose processes have ended.
        differing: The atoms whose bits differ between replicas of the publisher.
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
        """Whether the round has ended."""
        return self.phase in (Phase.DONE, Phase.FAILED)

    @property
    def is_shown(self) -> bool:
        """Whether ranks were told to show the version. All ranks that are waited for have verified it then."""
        return bool(self.waiting) and self.waiting <= set(self.done)


def begin_update(version: Version, ranks: int) -> VersionRound:
    """Begins an update: all ranks are to stage."""
    return VersionRound(version, Phase.STAGING, frozenset(range(ranks)))


def begin_put(version: Version, ranks: int) -> tuple[VersionRound, Tell]:
    """Begins a put: all ranks seal."""
    return VersionRound(version, Phase.SEALING, frozenset(range(ranks))), Tell.SEAL


def advance(state: VersionRound, event: RankEvent) -> tuple[VersionRound, Tell | None]:
    """Returns the state of a put or an update after an event, and the next action."""
    move = _MOVES.get((state.phase, type(event)))
    if move is None or event.rank not in state.waiting:
        return state, None
    return move(state, event)


def _heard(state: VersionRound, event: RankEvent) -> VersionRound:
    digests = {} if isinstance(event, RankShown) else {event.rank: event.digests}
    return replace(state, waiting=state.waiting - {event.rank}, done={**state.done, **digests})


def _verified(state: VersionRound, event: RankEvent) -> tuple[VersionRound, Tell | None]:
    return _all_verified(_heard(state, event))


def _lost_one(state: VersionRound, event: RankEvent) -> tuple[VersionRound, Tell | None]:
    done = {rank: digests for rank, digests in state.done.items() if rank != event.rank}
    left = replace(state, waiting=state.waiting - {event.rank}, done=done, lost=state.lost | {event.rank})
    return _all_verified(left) if state.phase is Phase.STAGING else _all_shown(left)


def _all_verified(state: VersionRound) -> tuple[VersionRound, Tell | None]:
    if state.waiting:
        return state, None
    if not state.done:
        return replace(state, phase=Phase.FAILED), None
    return replace(state, phase=Phase.SHOWING, waiting=frozenset(state.done)), Tell.SHOW


def _shown(state: VersionRound, event: RankEvent) -> tuple[VersionRound, Tell | None]:
    return _all_shown(_heard(state, event))


def _all_shown(state: VersionRound) -> tuple[VersionRound, Tell | None]:
    if state.waiting:
        return state, None
    return replace(state, phase=Phase.DONE if state.done else Phase.FAILED), None


def _sealed_part(state: VersionRound, event: RankEvent) -> tuple[VersionRound, Tell | None]:
    parts = dict(state.parts)
    differing = _joined(parts, event.digests)
    if differing:
        return replace(state, phase=Phase.FAILED, differing=differing), None
    return replace(state, parts=parts), Tell.LAND


def _sealed(state: VersionRound, event: RankEvent) -> tuple[VersionRound, Tell | None]:
    state = _heard(state, event)
    if state.waiting:
        return state, None
    digests = dict(state.parts)
    differing = [atom for sealed in state.done.values() for atom in _joined(digests, sealed)]
    if differing:
        return replace(state, phase=Phase.FAILED, differing=tuple(differing)), None
    return replace(state, phase=Phase.DONE, version=replace(state.version, digests=digests)), Tell.POST


def _joined(into: dict[Atom, bytes], digests: Digests) -> tuple[Atom, ...]:
    """Adds digests to `into`, and returns the atoms whose digests differ from those there."""
    return tuple(atom for atom, digest in digests.items() if into.setdefault(atom, digest) != digest)


def _lost_part(state: VersionRound, event: RankEvent) -> tuple[VersionRound, Tell | None]:
    return replace(state, phase=Phase.FAILED, lost=frozenset({event.rank})), None


def _failed(state: VersionRound, event: RankEvent) -> tuple[VersionRound, Tell | None]:
    return replace(state, phase=Phase.FAILED), None


_MOVES: dict[tuple[Phase, type], Callable[[VersionRound, RankEvent], tuple[VersionRound, Tell | None]]] = {
    (Phase.STAGING, RankVerified): _verified,
    (Phase.STAGING, RankLost): _lost_one,
    (Phase.STAGING, RankFailed): _failed,
    (Phase.SHOWING, RankShown): _shown,
    (Phase.SHOWING, RankLost): _lost_one,
    (Phase.SHOWING, RankFailed): _failed,
    (Phase.SEALING, RankSealedPart): _sealed_part,
    (Phase.SEALING, RankSealed): _sealed,
    (Phase.SEALING, RankLost): _lost_part,
    (Phase.SEALING, RankFailed): _failed,
}
"""The move of each event in each phase. If a rank of the publisher is lost, so is its part of the version."""
