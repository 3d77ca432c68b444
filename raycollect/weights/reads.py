"""What a rank of a receiver group reads from a holder: whole atoms, or deltas; inside the actor.

Between two steps of a training few elements may change. A publisher has the two newest versions. So a receiver of
another host names the version whose bits lie in its tensors, and gets what differs, where that is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from raycollect.backends.arrays import Array
from raycollect.core import threads
from raycollect.core.model import Key
from raycollect.errors import RaycollectError, brief
from raycollect.planner.boxes import extent
from raycollect.pos import fetch
from raycollect.pos.boxes import Borrowed, Box, empty
from raycollect.weights import digests
from raycollect.weights.cut import Atom, Digests, VersionCut
from raycollect.weights.directory import Atoms, Holder, Holders
from raycollect.weights.protocol import RankState

READERS = 4
"""The threads of a receiver that read deltas."""

WHOLE = Key(b"")
"""Stands for no version: the holder is asked for whole atoms."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """The atoms of one request.

    Attributes:
        arrays: Their elements; empty if they were written into the tensors.
        landed: Their digests, recomputed.
        nbytes: The bytes that arrived for them.
    """

    arrays: dict[Atom, Array]
    landed: dict[Atom, bytes]
    nbytes: int


def in_turn(holders: Holders, before: Holders, machine: str) -> list[tuple[Holder, Atoms, Key]]:
    """Returns holders in the order in which a rank asks them, and the keys of earlier versions to ask for deltas from.

    Those of its host come first. Publishers of other hosts are asked for deltas if they are among the holders `before`,
    those of the version that the rank staged last.
    """
    keys = {(holder.incarnation, holder.rank): holder.key for holder, _ in before if holder.is_publisher}
    near = [(holder, places, WHOLE) for holder, places in holders if holder.machine == machine]
    far = [(holder, places, WHOLE) for holder, places in holders if holder.machine != machine]
    earlier = [
        (holder, places, since)
        for holder, places, _ in far
        if holder.is_publisher and (since := keys.get((holder.incarnation, holder.rank), holder.key)) != holder.key
    ]
    return [*near, *earlier, *far]


def _boxes(places: Atoms, some: Iterable[Atom], cut: VersionCut) -> list[Box]:
    """Returns the boxes of atoms in a holder's tensors."""
    return [Box(*piece, cut.dtypes[atom[0]]) for atom in some for piece in places[atom]]


def whole(
    cut: VersionCut, holder: Holder, places: Atoms, some: Sequence[Atom], timeout_s: float, *, in_arena: bool
) -> Borrowed:
    """Borrows whole atoms; see `deltas`. A bucket whose members the holder has apart is assembled.

    Raises:
        RaycollectError: As `fetch.borrow`.
    """
    borrowed = fetch.borrow(
        holder.address,
        holder.key,
        _boxes(places, some, cut),
        actor=holder.actor,
        incarnation=holder.incarnation,
        timeout_s=timeout_s,
        in_arena=in_arena,
    )
    if len(borrowed.arrays) > len(some):
        arrays = iter(borrowed.arrays)
        borrowed.arrays = [_assembled(atom, [next(arrays) for _ in places[atom]], in_arena=in_arena) for atom in some]
    return borrowed


def _assembled(atom: Atom, pieces: list[Array], *, in_arena: bool) -> Array:
    if len(pieces) == 1 and pieces[0].shape == extent(atom[1]):
        return pieces[0]
    bucket = empty(extent(atom[1]), pieces[0].dtype, in_arena=in_arena)
    digests.join(bucket, [piece.reshape(-1) for piece in pieces])
    return bucket


def deltas(
    cut: VersionCut,
    holder: Holder,
    places: Atoms,
    since: Key,
    before: Digests,
    lying: Mapping[Atom, Sequence[Array]],
    timeout_s: float,
    *,
    in_arena: bool,
) -> tuple[dict[Atom, Array], int]:
    """Reads atoms as deltas, and returns their elements, which are not verified, and the bytes that arrived.

    Atoms without a smaller delta are left out, so that receivers are asked for them before publishers of other hosts.

    Args:
        cut: The atoms of both versions.
        holder: The holder.
        places: Where atoms lie in its tensors.
        since: The key under which it has an earlier version.
        before: The digests of the earlier version.
        lying: The atoms as they lie here, of buckets each member; those with other digests are left out.
        timeout_s: How long to wait, in seconds.
        in_arena: Whether the elements are kept in shared memory.

    Raises:
        RaycollectError: As `fetch.read_deltas`.
    """
    copies = {}
    for atom, boxes in lying.items():
        copy = empty(extent(atom[1]), boxes[0].dtype, in_arena=in_arena)
        if atom in cut.members:
            digests.join(copy, [box.reshape(-1) for box in boxes])
            digest = digests.digest(copy)
        else:
            digest = digests.copied(copy, boxes[0])
        if digest == digests.of_whole(before[atom]):
            copies[atom] = copy
    if not copies:
        return {}, 0
    have_arrived, nbytes = fetch.read_deltas(
        holder.address,
        holder.key,
        _boxes(places, copies, cut),
        since,
        list(copies.values()),
        actor=holder.actor,
        incarnation=holder.incarnation,
        timeout_s=timeout_s,
    )
    return {atom: copies[atom] for atom, has_arrived in zip(copies, have_arrived, strict=True) if has_arrived}, nbytes


def in_threads(get: Callable[[list[Atom]], Arrived], requests: Sequence[list[Atom]]) -> list[Arrived]:
    """Calls `get` for each request in several threads, until a call raises a RaycollectError; returns the results."""
    left = iter(requests)  # the threads share it

    def run() -> list[Arrived]:
        arrived: list[Arrived] = []
        with suppress(RaycollectError):
            arrived.extend(map(get, left))
        for _ in left:  # they would fail, too
            pass
        return arrived

    with threads.pool("raycollect-read", READERS) as workers:  # copies and digests hold no GIL
        others = [threads.submit(workers, run) for _ in requests[1:READERS]]
        return [*run(), *(some for other in others for some in other.result())]


def missing(state: RankState, cut: VersionCut, holders: Holders, failures: Mapping[Key, RaycollectError]) -> str:
    """Describes the atoms that no holder gave; `failures` are the errors by holder."""
    left = state.missing
    tried = [f"{holder.actor}: {brief(failures[holder.key])}" for holder, _ in holders if holder.key in failures]
    detail = f"{len(left)} of {len(state.wanted)} parts are missing, first {cut.shown(left[0])}: "
    return detail + ("; ".join(tried) or "it has no holders")
