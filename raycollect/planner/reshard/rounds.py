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
        self._rounds: list[list[tuple[Transfer, int, int]]] = []  # transfer, first name, count
        self._cuts: dict[tuple[Form, Box, int], _Cut] = {}

    def pack(self, stage: Sequence[Transfer]) -> None:
        begin = len(self._rounds)
        sends: dict[int, tuple[int, int]] = {}  # rank -> the round that it fills, and the bytes in it
        takes: dict[int, tuple[int, int]] = {}
        for whole in stage:
            for one, first, count in self._cut(whole):
                nbytes = volume(one.box) * count * one.form.itemsize
                ends = [(sends, rank, nbytes) for rank, _ in one.givers]
                ends.append((takes, one.taker, nbytes * len(one.givers)))
                at = max(filled.get(rank, (begin, 0))[0] for filled, rank, _ in ends)
                while not all(_has_room(filled.get(rank), at, more) for filled, rank, more in ends):
                    at += 1
                for filled, rank, more in ends:
                    known = filled.get(rank)
                    filled[rank] = (at, more + (known[1] if known is not None and known[0] == at else 0))
                while len(self._rounds) <= at:
                    self._rounds.append([])
                self._rounds[at].append((one, first, count))

    def _cut(self, whole: Transfer) -> Iterator[tuple[Transfer, int, int]]:
        key = (whole.form, whole.box, len(whole.givers))
        known = self._cuts.get(key)
        if known is None:
            known = self._cuts[key] = _cut(*key)
        for box, first, count in known:
            yield (whole if box == whole.box else _part(whole, box)), first, count

    def written(self) -> dict[int, tuple[Round, ...]]:
        found: dict[int, list[Round]] = {rank: [] for rank in self._ranks}
        for some in self._rounds:
            gives: dict[int, list[Give]] = {}
            takes: dict[int, list[Take]] = {}
            pairs: dict[tuple[int, int], int] = {}
            # The widest elements first, so that all are aligned
            for one, first, count in sorted(some, key=lambda entry: -entry[0].form.itemsize):
                size = extent(one.box)
                nbytes = volume(one.box) * count * one.form.itemsize
                for rank, at in one.givers:
                    gives.setdefault(rank, []).append(Give(one.taker, one.passed_on, first, count, at, size))
                    pairs[rank, one.taker] = pairs.get((rank, one.taker), 0) + nbytes
                peers = tuple(rank for rank, _ in one.givers)
                takes.setdefault(one.taker, []).append(Take(peers, first, count, one.at, size))
            most = max(pairs.values())
            for rank, rounds in found.items():
                rounds.append(Round(most, tuple(gives.get(rank, ())), tuple(takes.get(rank, ()))))
        return {rank: tuple(rounds) for rank, rounds in found.items()}


def _has_room(filled: tuple[int, int] | None, at: int, more: int) -> bool:
    return filled is None or filled[0] != at or filled[1] + more <= ROUND_NBYTES


_Cut = tuple[tuple[Box, int, int], ...]
"""(box, first name, count) of the parts of a transfer."""


def _cut(form: Form, box: Box, givers: int) -> _Cut:
    """Cuts a transfer by names, and a box that is too large by its dimensions."""
    limit = max(min(PIECE_NBYTES, ROUND_NBYTES // givers), form.itemsize)
    together = max(limit // (volume(box) * form.itemsize), 1)
    boxes = _pieces(box, limit // form.itemsize)
    return tuple(
        (part, form.first + begin, min(together, form.count - begin))
        for begin in range(0, form.count, together)
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
