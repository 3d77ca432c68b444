"""Packs transfers into rounds, in each of which a rank sends and receives a bounded number of bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import add, sub
from typing import NamedTuple

from raycollect.planner.boxes import Box, extent, halved, volume
from raycollect.planner.reshard.halves import Copy, Give, Half, LocalBoxes, Round, Take
from raycollect.planner.reshard.request import LocalTensor, Named, Reshard, local_tensors
from raycollect.planner.reshard.routes import Routes, Transfer

ROUND_NBYTES = 16 << 20
"""How much a rank sends, and receives, in a round at most (a sum of single elements may need more)."""

PIECE_NBYTES = 4 << 20
"""How much of one box travels in a round at most."""


def halves_of(reshard: Reshard, found: Routes) -> dict[int, Half]:
    """Writes what each rank does; in the order of the ranks."""
    packer = _Packer(reshard)
    for stage in found.stages:
        packer.pack(stage)
    copies: dict[int, list[Copy]] = {}
    for one in found.copies:
        size, form = extent(one.box), one.form
        copy = Copy(*(LocalBoxes(form.first, form.count, at, size) for at in (*one.src_at, one.dst_at)))
        for _, rank in one.ends:
            copies.setdefault(rank, []).append(copy)
    rounds = packer.written()
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
            copies=tuple(copies.get(rank, ())),
            rounds=rounds[rank],
        )
        for rank in reshard.ranks
    }


class _Side:
    """The local tensors of the ranks of one side; ranks that look alike share the tables."""

    def __init__(self, reshard: Reshard, named: Named, ranks: Sequence[int]) -> None:
        layouts = dict(named)
        self._keys = [layouts[name].key or name for name in reshard.names]
        self._of = {ranks[rank]: tensors for rank, tensors in local_tensors(named).items()}
        self._known: dict[int, tuple[int, ...]] = {}

    def tensors(self, rank: int) -> tuple[LocalTensor, ...]:
        return self._of.get(rank, ())

    def places(self, rank: int) -> tuple[int, ...]:
        tensors = self.tensors(rank)
        if id(tensors) not in self._known:
            at = {one.key: place for place, one in enumerate(tensors)}
            self._known[id(tensors)] = tuple(at.get(key, -1) for key in self._keys)
        return self._known[id(tensors)]


class _Part(NamedTuple):
    """A part of a transfer that fits into a round."""

    src: tuple[LocalBoxes, ...]  # at the givers: of each addend of a sum
    dst: LocalBoxes
    passed_on: bool
    itemsize: int
    nbytes: int  # that each giver sends


class _Packer:
    """Puts each transfer into the earliest round of its stage that has room for it at all of its ends."""

    def __init__(self, reshard: Reshard) -> None:
        self._ranks = reshard.ranks
        self._rounds: list[list[tuple[_Part, tuple[int, ...], int]]] = []  # (a part, its givers, its taker)

    def pack(self, stage: Sequence[Transfer]) -> None:
        # Rank -> the place of its next byte, where each round has ROUND_NBYTES
        begin = len(self._rounds) * ROUND_NBYTES
        sends = defaultdict[int, int](lambda: begin)
        takes = defaultdict[int, int](lambda: begin)
        for transfer in stage:
            parts = [(part, part.nbytes, part.nbytes * len(part.src)) for part in _cut(transfer)]
            for givers, taker in transfer.ends:
                several = max(map(givers.count, givers)) if len(givers) > 1 else 1  # addends of one giver
                for part, nbytes, incoming in parts:
                    sent, taken = max([sends[rank] for rank in givers]), takes[taker]
                    at = max(sent, taken) // ROUND_NBYTES
                    floor, end = at * ROUND_NBYTES, (at + 1) * ROUND_NBYTES
                    if max(sent, floor) + nbytes * several > end or max(taken, floor) + incoming > end:
                        at, floor = at + 1, end  # which none of them has begun
                    for rank in givers:
                        sends[rank] = max(sends[rank], floor) + nbytes
                    takes[taker] = max(taken, floor) + incoming
                    while len(self._rounds) <= at:
                        self._rounds.append([])
                    self._rounds[at].append((part, givers, taker))

    def written(self) -> dict[int, tuple[Round, ...]]:
        found: dict[int, list[Round]] = {rank: [] for rank in self._ranks}
        for some in self._rounds:
            gives = defaultdict[int, list[Give]](list)
            takes = defaultdict[int, list[Take]](list)
            pairs = defaultdict[tuple[int, int], int](int)
            # The widest elements first, so that all are aligned
            for (src, dst, passed_on, _, nbytes), givers, taker in sorted(some, key=lambda one: -one[0].itemsize):
                for rank, boxes in zip(givers, src, strict=True):
                    gives[rank].append(Give(taker, passed_on, boxes))
                    pairs[rank, taker] += nbytes
                takes[taker].append(Take(givers, dst))
            most = max(pairs.values())
            for rank, rounds in found.items():
                rounds.append(Round(most, tuple(gives.get(rank, ())), tuple(takes.get(rank, ()))))
        return {rank: tuple(rounds) for rank, rounds in found.items()}


def _cut(transfer: Transfer) -> Iterator[_Part]:
    """Cuts a transfer by names, and a box that is too large by its dimensions."""
    form, box, src_at, dst_at, passed_on, _ = transfer
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
            nbytes = volume(piece) * names * form.itemsize
            yield _Part(tuple(src), dst, passed_on, form.itemsize, nbytes)


def _pieces(box: Box, most: int) -> list[Box]:
    count = -(-volume(box) // most)
    return [box] if count < 2 else [small for part in halved(box, count) for small in _pieces(part, most)]
