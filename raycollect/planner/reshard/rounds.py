"""Packs transfers into rounds, in each of which a rank sends and receives a bounded number of bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import add, sub
from typing import Any, NamedTuple

from raycollect.planner.boxes import Box, extent, halved, volume
from raycollect.planner.reshard.halves import Copy, Half, LocalBoxes, PlannedBoxRound
from raycollect.planner.reshard.request import LocalTensor, Named, Reshard, local_tensors
from raycollect.planner.reshard.routes import Routes, Transfer

ROUND_NBYTES = 16 << 20
"""The most bytes that a rank sends, and receives, in a round (a sum of single elements may need more)."""

PIECE_NBYTES = 4 << 20
"""The most bytes of one box that travel in a round."""


def halves_of(reshard: Reshard, chosen: Routes) -> dict[int, Half]:
    """Writes the halves of all ranks, in the order of the ranks."""
    packer = _Packer()
    for number, stage in enumerate(chosen.stages):
        packer.pack(stage, passes_on=number > 0)
    copies: dict[int, list[Copy]] = {}
    for transfer in chosen.copies:
        size, form = extent(transfer.box), transfer.form
        copy = Copy(*(LocalBoxes(form.first, form.count, at, size) for at in (*transfer.src_at, transfer.dst_at)))
        for _, rank in transfer.ends:
            copies.setdefault(rank, []).append(copy)
    rounds = packer.written(reshard.ranks)
    tuples: _Tuples = {}
    itemsizes = tuple(chain.from_iterable([form.itemsize] * form.count for form in reshard.forms))
    src = _Side(reshard, reshard.src, reshard.src_ranks)
    dst = _Side(reshard, reshard.dst, reshard.dst_ranks)
    return {
        rank: Half(
            src=src.tensors(rank),
            dst=dst.tensors(rank),
            src_of=src.places(rank),
            dst_of=dst.places(rank),
            itemsizes=itemsizes,
            dtypes=reshard.dtypes,
            copies=_shared(tuples, copies.get(rank, ())),
            rounds=rounds[rank],
        )
        for rank in reshard.ranks
    }


class _Side:
    """The local tensors of the ranks of one side; ranks with equal tensors share the tables."""

    def __init__(self, reshard: Reshard, named: Named, ranks: Sequence[int]) -> None:
        layouts = dict(named)
        self._keys = [layouts[name].key or name for name in reshard.names]
        self._of = {ranks[rank]: tensors for rank, tensors in local_tensors(named).items()}
        self._places: dict[int, tuple[int, ...]] = {}

    def tensors(self, rank: int) -> tuple[LocalTensor, ...]:
        return self._of.get(rank, ())

    def places(self, rank: int) -> tuple[int, ...]:
        tensors = self.tensors(rank)
        if id(tensors) not in self._places:
            at = {tensor.key: place for place, tensor in enumerate(tensors)}
            self._places[id(tensors)] = tuple(at.get(key, -1) for key in self._keys)
        return self._places[id(tensors)]


class _CutBox(NamedTuple):
    """A part of a transfer that fits into a round."""

    src: tuple[LocalBoxes, ...]  # at the givers: of each addend of a sum
    dst: LocalBoxes
    nbytes: int  # that each giver sends


_Columns = tuple[list[int], list[LocalBoxes], list[tuple[int, ...]], list[LocalBoxes]]
"""The columns of a rank in a round: takers, gives, givers and takes."""


class _Filled(NamedTuple):
    """The transfers of a round so far."""

    passes_on: bool
    columns: defaultdict[int, _Columns]  # by rank
    pairs: defaultdict[tuple[int, int], int]  # the bytes from a rank to another


class _Packer:
    """Puts each transfer into the earliest round of its stage that has room for it at all of its ends."""

    def __init__(self) -> None:
        self._rounds: list[_Filled] = []

    def pack(self, stage: Sequence[Transfer], *, passes_on: bool) -> None:
        # Rank -> the place of its next byte, where each round has ROUND_NBYTES
        begin = len(self._rounds) * ROUND_NBYTES
        sends = defaultdict[int, int](lambda: begin)
        takes = defaultdict[int, int](lambda: begin)
        # The widest elements first, so that all are aligned
        for transfer in sorted(stage, key=lambda item: -item.form.itemsize):
            parts = list(_cut(transfer))
            for givers, taker in transfer.ends:
                several = max(map(givers.count, givers)) if len(givers) > 1 else 1  # addends of one giver
                for src, dst, nbytes in parts:
                    sent, taken = max([sends[rank] for rank in givers]), takes[taker]
                    incoming, at = nbytes * len(givers), max(sent, taken) // ROUND_NBYTES
                    floor, end = at * ROUND_NBYTES, (at + 1) * ROUND_NBYTES
                    if max(sent, floor) + nbytes * several > end or max(taken, floor) + incoming > end:
                        at, floor = at + 1, end  # a round that none of them has begun
                    while len(self._rounds) <= at:
                        filled = _Filled(passes_on, defaultdict(lambda: ([], [], [], [])), defaultdict(int))
                        self._rounds.append(filled)
                    _, columns, pairs = self._rounds[at]
                    for rank, boxes in zip(givers, src, strict=True):
                        sends[rank] = max(sends[rank], floor) + nbytes
                        takers, gives, _, _ = columns[rank]
                        takers.append(taker)
                        gives.append(boxes)
                        pairs[rank, taker] += nbytes
                    takes[taker] = max(taken, floor) + incoming
                    columns[taker][2].append(givers)
                    columns[taker][3].append(dst)

    def written(self, ranks: Sequence[int]) -> dict[int, tuple[PlannedBoxRound, ...]]:
        by_rank: dict[int, list[PlannedBoxRound]] = {rank: [] for rank in ranks}
        tuples: _Tuples = {}
        for passes_on, columns, pairs in self._rounds:
            most = max(pairs.values())
            idle = PlannedBoxRound(most, False, (), (), (), ())
            for rank, rounds in by_rank.items():
                if rank not in columns:
                    rounds.append(idle)
                    continue
                takers, gives, givers, takes = columns[rank]
                there, here = _shared(tuples, gives), _shared(tuples, takes)
                rounds.append(
                    PlannedBoxRound(most, passes_on and bool(gives), tuple(takers), there, tuple(givers), here)
                )
        return {rank: tuple(rounds) for rank, rounds in by_rank.items()}


_Tuples = dict[tuple[int, ...], tuple[Any, ...]]


def _shared(tuples: _Tuples, some: Sequence[Any]) -> tuple[Any, ...]:
    """One tuple for all sequences of the same objects."""
    return tuples.setdefault(tuple(map(id, some)), tuple(some))


def _cut(transfer: Transfer) -> Iterator[_CutBox]:
    """Cuts a transfer by names, and a box that is too large by its dimensions."""
    form, box, src_at, dst_at, _ = transfer
    limit = max(min(PIECE_NBYTES, ROUND_NBYTES // len(src_at)), form.itemsize)
    together = max(limit // (volume(box) * form.itemsize), 1)
    pieces = _pieces(box, limit // form.itemsize)
    for begin in range(0, form.count, together):
        names = min(together, form.count - begin)
        for piece in pieces:
            size, by = extent(piece), tuple(map(sub, piece[0], box[0]))
            *src, dst = (
                LocalBoxes(form.first + begin, names, tuple(map(add, at, by)), size) for at in (*src_at, dst_at)
            )
            yield _CutBox(tuple(src), dst, volume(piece) * names * form.itemsize)


def _pieces(box: Box, most: int) -> list[Box]:
    count = -(-volume(box) // most)
    return [box] if count < 2 else [small for part in halved(box, count) for small in _pieces(part, most)]
