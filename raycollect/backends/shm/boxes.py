"""Boxes of tensors, which receivers read in the memory of the sender.

A rank publishes a table of the boxes that it sends: the offset of their first elements in its shared memory, and the
strides. A box of a tensor in shared memory is copied once, by its receiver, from tensor to tensor. The sender copies a
box of any other tensor, or one that travels in another dtype, to its staging buffer, which is in shared memory; the
receiver copies it from there. Both look alike to the receiver.

The table is a row of words. For each round: a word that tells whether the rank packs or passes on anything, and for
each rank of the launch the index of its boxes in the table. Then the boxes in the order of the receiver, each with its
offset and a stride per dimension.

Ranks wait for each other between rounds only if a staging buffer is filled again, or boxes are passed on. At the end
senders wait for their receivers.

A rank that has ended uses its staging buffer again, with the table in it, also in other groups. So slower ranks read
only the tables of their senders. But if the listing of any rank tells that it packs or passes on after the first round,
all ranks read all tables, and no rank ends before: the barrier of that round is after their reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from raycollect.backends import folds
from raycollect.backends.array_copies import ArrayCopies
from raycollect.backends.arrays import Array, byte_range, native
from raycollect.backends.elements import convert
from raycollect.backends.shm.directory import GIVES, ROUNDS_MEET, ArrayDirectory, Listing, Places
from raycollect.backends.shm.in_place import COPY_NBYTES
from raycollect.backends.shm.meeting import Meeting
from raycollect.core.boxes import BoxExchange, BoxRound, Give
from raycollect.core.kernel_progress import LENT, here
from raycollect.core.model import Launch, ReduceOp
from raycollect.core.protocols import SegmentSource
from raycollect.errors import InternalError

_PACKS, _PASSES_ON = 1, 2
_NOTHING = Places()
_Copies = list[tuple[Array, Array]]  # (to, from)


class _BoxTable(NamedTuple):
    """This rank's table, the copies that it makes before each round, and the other ranks that it has to do with."""

    table: Array
    flags: int  # of the listing
    places: Places  # the position of the table
    packs: Sequence[ArrayCopies]
    givers: frozenset[int]
    takers: frozenset[int]


class _Moves(NamedTuple):
    """The boxes that this rank reads in a round."""

    copies: ArrayCopies
    sums: list[tuple[Array, list[Array]]]
    nbytes: int


class _BoxSchedule(NamedTuple):
    """The rounds of this rank, derived from the tables of the ranks that it has to read."""

    tables: dict[int, bytes]
    rounds: list[_Moves]
    flags: list[int]  # by round, of all ranks together; of the first round, of some ranks


class ShmBoxes:
    """One rank's part in exchanges of boxes; `segments` locates its arrays in shared memory."""

    def __init__(self, directory: ArrayDirectory, rank: int, segments: SegmentSource) -> None:
        self._directory = directory
        self._rank = rank
        self._segments = segments
        self._schedules: WeakKeyDictionary[BoxExchange, _BoxSchedule] = WeakKeyDictionary()

    def show(self, launch: Launch, boxes: BoxExchange | None) -> None:
        """Lists the positions of this rank's boxes, and packs those that others can't read; a barrier has to follow."""
        offer = self._offer(launch, boxes) if boxes is not None and self._directory.is_open else None
        if boxes is None or offer is None:
            self._directory.write(0, _NOTHING, launch.ranks)
            return
        np.copyto(boxes.table[: offer.table.nbytes], offer.table.view(np.uint8))
        offer.packs[0].run()
        self._directory.write(offer.flags, offer.places, launch.ranks)

    def run(self, meeting: Meeting, launch: Launch, boxes: BoxExchange, until_s: float, *, shown: bool) -> bool:
        """Runs an exchange if all ranks can locate their boxes; all ranks decide alike.

        `shown`: all ranks called `show` before the last barrier, which is the agreement.
        """
        listings = self._listings(meeting, launch, until_s) if shown else []
        if not (shown and _all_give(listings)):
            self.show(launch, boxes)
            meeting.barrier(launch, until_s)
            listings = self._listings(meeting, launch, until_s)
        offer = self._offer(launch, boxes)
        if offer is None or not _all_give(listings):
            return False
        schedule = self._read(launch, boxes, _tables(launch, offer, listings))
        for at, moves in enumerate(schedule.rounds):
            if at and schedule.flags[at] & _PACKS:
                meeting.barrier(launch, until_s)  # by then no rank reads the previously packed boxes
                offer.packs[at].run()
            if at and schedule.flags[at]:
                meeting.barrier(launch, until_s)
            self._move(meeting, launch, moves, at, until_s)
        self._part(meeting, launch, offer, until_s)
        return True

    def _listings(self, meeting: Meeting, launch: Launch, until_s: float) -> list[Listing]:
        return self._directory.read(launch.ranks, lambda: meeting.barrier(launch, until_s))

    def _move(self, meeting: Meeting, launch: Launch, moves: _Moves, at: int, until_s: float) -> None:
        meter, done, looked = here(), 0, 0
        for step, nbytes in moves.copies.steps:
            step()
            done += nbytes
            if done - looked > COPY_NBYTES:
                meeting.check(launch, launch.ranks, until_s)
                looked, meter.part = done, at + done / moves.nbytes
        for target, parts in moves.sums:
            _add_up(target, parts)
            meeting.check(launch, launch.ranks, until_s)

    def _part(self, meeting: Meeting, launch: Launch, offer: _BoxTable, until_s: float) -> None:
        givers, takers = tuple(offer.givers), tuple(offer.takers)
        if givers:
            meeting.check(launch, givers, until_s)  # they have not left, so their data was valid
        elif takers:
            here().part = LENT
        meeting.barrier(launch, until_s, waiting=givers, waits_for=takers)

    # ------------------------------------------------------------------------------------------- sent boxes

    def _offer(self, launch: Launch, boxes: BoxExchange) -> _BoxTable | None:
        cached: tuple[tuple[int, ...], _BoxTable | None] | None = boxes.memo.get("offer")
        if cached is None or cached[0] != launch.ranks:
            cached = boxes.memo["offer"] = launch.ranks, self._written(launch, boxes)
        return cached[1]

    def _written(self, launch: Launch, boxes: BoxExchange) -> _BoxTable | None:
        ranks, rounds = launch.ranks, boxes.rounds
        words = [0] * (len(rounds) * (1 + len(ranks)))
        packs: list[ArrayCopies] = []
        flags = GIVES
        for at, box_round in enumerate(rounds):
            head = at * (1 + len(ranks))
            copies: _Copies = []
            begun: dict[int, int] = {}  # ranks that get the same boxes read the same words
            for place, rank in enumerate(ranks):
                some = box_round.gives.get(rank, ())
                if rank == self._rank or not some:
                    continue
                if id(some) not in begun:
                    begun[id(some)] = len(words)
                    if not self._write(some, words, copies):
                        return None
                words[head + 1 + place] = begun[id(some)]
            words[head] = _PACKS * bool(copies) | _PASSES_ON * box_round.passes_on
            if at and words[head]:
                flags |= ROUNDS_MEET
            packs.append(ArrayCopies(copies, convert))
        table = np.array(words, np.int64)
        ref = self._segments.locate(boxes.table.ctypes.data, table.nbytes)
        if ref is None:
            return None
        me = {self._rank}
        givers = {peer for box_round in rounds for take in box_round.takes for peer in take.peers} - me
        takers = {rank for box_round in rounds for rank, some in box_round.gives.items() if some} - me
        return _BoxTable(table, flags, Places.of([ref]), packs, frozenset(givers), frozenset(takers))

    def _write(self, gives: Sequence[Give], words: list[int], copies: _Copies) -> bool:
        # Adds the positions of boxes, and the copies to make; False if others can't read one of them.
        for give in gives:
            located = self._place(give)
            if located is None:
                return False
            array, offset = located
            words += (offset, *array.strides)
            if array is give.part:
                copies.append((give.part, give.box))
        return True

    def _place(self, give: Give) -> tuple[Array, int] | None:
        # Where others read a box: in its tensor if possible, else in the staging buffer.
        for array in (give.box, give.part):
            if array.dtype == give.part.dtype:
                start, stop = byte_range(array)
                ref = self._segments.locate(start, stop - start)
                if ref is not None:
                    return array, ref.offset + array.ctypes.data - start
        return None

    # ------------------------------------------------------------------------------------------- received boxes

    def _read(self, launch: Launch, boxes: BoxExchange, tables: dict[int, bytes]) -> _BoxSchedule:
        schedule = self._schedules.get(boxes)
        if schedule is None or schedule.tables != tables:
            words = {rank: np.frombuffer(table, np.int64) for rank, table in tables.items()}
            rounds = [self._moves(launch, box_round, at, words) for at, box_round in enumerate(boxes.rounds)]
            heads = [at * (1 + len(launch.ranks)) for at in range(len(boxes.rounds))]
            flags = [reduce(or_, [int(table[head]) for table in words.values()], 0) for head in heads]
            schedule = self._schedules[boxes] = _BoxSchedule(tables, rounds, flags)
        return schedule

    def _moves(self, launch: Launch, box_round: BoxRound, at: int, words: dict[int, Array]) -> _Moves:
        head = at * (1 + len(launch.ranks)) + 1 + launch.ranks.index(self._rank)
        sources = {
            rank: self._sources(rank, table, int(table[head]), _taken_from(rank, box_round))
            for rank, table in words.items()
        }
        sources[self._rank] = iter([give.box for give in box_round.gives.get(self._rank, ())])
        copies: _Copies = []
        sums: list[tuple[Array, list[Array]]] = []
        for take in box_round.takes:
            parts = [[next(sources[peer]) for _ in take.boxes] for peer in take.peers]
            if len(parts) == 1:
                copies += zip(take.boxes, parts[0], strict=True)
            else:
                sums += [(box, [some[at] for some in parts]) for at, box in enumerate(take.boxes)]
        return _Moves(ArrayCopies(copies, convert), sums, sum(target.nbytes for target, _ in copies))

    def _sources(self, rank: int, table: Array, at: int, targets: Sequence[tuple[Array, Any]]) -> Iterator[Array]:
        memory: Any = self._directory.segment(rank) if targets else None
        words = table.tolist()
        for target, dtype in targets:
            ndim = target.ndim
            offset, strides = words[at], tuple(words[at + 1 : at + 1 + ndim])
            at += 1 + ndim
            try:
                yield np.ndarray(target.shape, dtype, memory, offset, strides)
            except ValueError as exc:
                raise InternalError(detail=f"rank {rank} names memory beyond the end of its segment: {exc}") from exc


def _tables(launch: Launch, offer: _BoxTable, listings: Sequence[Listing]) -> dict[int, bytes]:
    of_all = any(listing.flags & ROUNDS_MEET for listing in listings)
    return {
        rank: bytes(listing.arrays[0])
        for rank, listing in zip(launch.ranks, listings, strict=True)
        if of_all or rank in offer.givers
    }


def _taken_from(rank: int, box_round: BoxRound) -> list[tuple[Array, Any]]:
    takes = [take for take in box_round.takes for peer in take.peers if peer == rank]
    return [each for take in takes for each in zip(take.boxes, take.dtypes, strict=True)]


def _all_give(listings: Sequence[Listing]) -> bool:
    return all(listing.flags & GIVES for listing in listings)


def _add_up(target: Array, parts: Sequence[Array]) -> None:
    # As `PackedBoxes.unload`: the same bits.
    rows = [np.ascontiguousarray(part, native(part.dtype)).reshape(-1) for part in parts]
    total = np.empty_like(rows[0])
    folds.fold(ReduceOp.SUM, rows, total)
    convert(target, total.reshape(target.shape))
