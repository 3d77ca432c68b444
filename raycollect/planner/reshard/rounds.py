"""Packs transfers into rounds, in each of which a rank sends and receives a bounded number of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import add, sub

from raycollect.planner.boxes import Box, Point, extent, halved, volume
from raycollect.planner.reshard.halves import Copy, Give, Half, Round, Take
from raycollect.planner.reshard.request import Form, LocalTensor, Named, Reshard, local_tensors
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
        size, src_at = extent(one.box), one.givers[0][1]
        copies.setdefault(one.taker, []).append(Copy(one.form.first, one.form.count, src_at, one.at, size))
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


class _Packer:
    """Puts each transfer into the earliest round of its stage that has room for it at both of its ends."""

    def __init__(self, reshard: Reshard) -> None:
        self._ranks = reshard.ranks
        self._rounds: list[list[_Part]] = []
        self._cuts: dict[tuple[int, Box, int], _Cut] = {}

    def pack(self, stage: Sequence[Transfer]) -> None:
        begin = len(self._rounds)
        sends: dict[int, tuple[int, int]] = {}  # rank -> the round that it fills, and the bytes in it
        takes: dict[int, tuple[int, int]] = {}
        empty = begin, 0
        for whole in stage:
            for one, first, count, nbytes in self._cut(whole):
                ends = [(sends, rank, nbytes) for rank, _ in one.givers]
                ends.append((takes, one.taker, nbytes * len(one.givers)))
                at, known = begin, []
                for rounds, rank, _ in ends:
                    there = rounds.get(rank, empty)
                    known.append(there)
                    if there[0] > at:
                        at = there[0]
                for (last, filled), (_, _, more) in zip(known, ends, strict=True):
                    if last == at and filled + more > ROUND_NBYTES:
                        at += 1  # which none of them has begun
                        break
                for (last, filled), (rounds, rank, more) in zip(known, ends, strict=True):
                    rounds[rank] = at, filled + more if last == at else more
                while len(self._rounds) <= at:
                    self._rounds.append([])
                self._rounds[at].append((one, first, count, nbytes))

    def _cut(self, whole: Transfer) -> Iterator[_Part]:
        form, box, givers = whole.form, whole.box, whole.givers
        key = form.first, box, len(givers)
        known = self._cuts.get(key)
        if known is None:
            known = self._cuts[key] = _cut(form, box, len(givers))
        if len(known) == 1:
            ((_, first, count, nbytes),) = known
            return iter([(whole, first, count, nbytes)])
        return (
            (whole if part == box else _part(whole, part), first, count, nbytes) for part, first, count, nbytes in known
        )

    def written(self) -> dict[int, tuple[Round, ...]]:
        found: dict[int, list[Round]] = {rank: [] for rank in self._ranks}
        sizes: dict[Box, Point] = {}
        for some in self._rounds:
            gives: dict[int, list[Give]] = {}
            takes: dict[int, list[Take]] = {}
            pairs: dict[tuple[int, int], int] = {}
            # The widest elements first, so that all are aligned
            for one, first, count, nbytes in sorted(some, key=lambda entry: -entry[0].form.itemsize):
                _, box, givers, taker, taken_at, passed_on = one
                size = sizes.get(box) or sizes.setdefault(box, extent(box))
                for rank, at in givers:
                    gives.setdefault(rank, []).append(Give(taker, passed_on, first, count, at, size))
                    pair = rank, taker
                    pairs[pair] = pairs.get(pair, 0) + nbytes
                peers = tuple([rank for rank, _ in givers])
                takes.setdefault(taker, []).append(Take(peers, first, count, taken_at, size))
            most = max(pairs.values())
            for rank, rounds in found.items():
                rounds.append(Round(most, tuple(gives.get(rank, ())), tuple(takes.get(rank, ()))))
        return {rank: tuple(rounds) for rank, rounds in found.items()}


_Cut = tuple[tuple[Box, int, int, int], ...]
"""(box, first name, count, bytes) of the parts of a transfer."""

_Part = tuple[Transfer, int, int, int]
"""A part of a transfer, the first of its names, how many they are, and its bytes."""


def _cut(form: Form, box: Box, givers: int) -> _Cut:
    """Cuts a transfer by names, and a box that is too large by its dimensions."""
    limit = max(min(PIECE_NBYTES, ROUND_NBYTES // givers), form.itemsize)
    together = max(limit // (volume(box) * form.itemsize), 1)
    boxes = _pieces(box, limit // form.itemsize)
    spans = [(begin, min(together, form.count - begin)) for begin in range(0, form.count, together)]
    return tuple(
        (part, form.first + begin, count, volume(part) * count * form.itemsize)
        for begin, count in spans
        for part in boxes
    )


def _pieces(box: Box, most: int) -> list[Box]:
    count = -(-volume(box) // most)
    return [box] if count < 2 else [small for part in halved(box, count) for small in _pieces(part, most)]


def _part(whole: Transfer, box: Box) -> Transfer:
    by = tuple(map(sub, box[0], whole.box[0]))

    def there(at: Point) -> Point:
        return tuple(map(add, at, by))

    givers = tuple((rank, there(at)) for rank, at in whole.givers)
    return whole._replace(box=box, givers=givers, at=there(whole.at))
