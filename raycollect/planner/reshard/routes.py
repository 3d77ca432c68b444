"""Chooses the sender of each box for each reader.

A reader that holds a piece copies it itself. Otherwise a holder of its host sends it. If its host has none, a holder of
another host sends it to one reader of each host, which passes it on to the others there. Of several possible senders,
the one with the fewest bytes to send so far does. A partial sum is added up at its readers, each a share of it, and
is passed on from there like any other piece.

So the bytes between hosts are minimal: each host that does not hold a piece receives it once.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from operator import add, sub
from typing import NamedTuple

from raycollect.planner.boxes import Box, Point, halved, volume
from raycollect.planner.reshard.matching import Alike, BoxPiece, matched
from raycollect.planner.reshard.request import Form, Reshard


class Transfer(NamedTuple):
    """One box of all tensors of a form, at one place at all senders, and at one at all receivers."""

    form: Form
    box: Box
    src_at: tuple[Point, ...]  # where the box begins at a giver; several: at the givers of each addend of a sum
    dst_at: Point  # where it begins at a taker
    ends: list[tuple[tuple[int, ...], int]]  # (the givers, the taker); ranks are those of the group


class Routes(NamedTuple):
    """All transfers, by stage: in the first stage ranks send boxes of sources, in the others received ones."""

    copies: tuple[Transfer, ...]  # inside a rank
    stages: tuple[tuple[Transfer, ...], ...]


def routes(reshard: Reshard, hosts: Sequence[int]) -> Routes:
    """Chooses the transfers; `hosts` has the host of each rank of the group. Deterministic."""
    router = _Router(reshard, hosts)
    for form in reshard.forms:
        for piece in matched(form.src, form.dst).pieces:
            router.add(form, piece)
    return Routes(tuple(router.copies), tuple(tuple(stage) for stage in router.stages if stage))


_Places = dict[int, Point]  # rank -> where the box begins there


class _Moving(NamedTuple):
    """A box, and its transfers so far."""

    form: Form
    box: Box
    nbytes: int
    transfers: dict[tuple[int, tuple[Point, ...], Point], Transfer]

    @classmethod
    def of(cls, form: Form, box: Box) -> _Moving:
        return cls(form, box, volume(box) * form.itemsize * form.count, {})

    def places(self, groups: Sequence[Alike], ranks: Sequence[int]) -> list[tuple[int, Point]]:
        """Where the box begins on the ranks of the group that `ranks` has for those of the side."""
        places: list[tuple[int, Point]] = []
        for shift, some in groups:
            at = tuple(map(add, self.box[0], shift))
            places += [(ranks[rank], at) for rank in some]
        return places

    def go(
        self, by: list[Transfer], givers: tuple[int, ...], src_at: tuple[Point, ...], taker: int, dst_at: Point
    ) -> None:
        """Adds a giver and a taker to one of the transfers in `by`, or to a new one."""
        key = id(by), src_at, dst_at
        transfer = self.transfers.get(key)
        if transfer is None:
            transfer = self.transfers[key] = Transfer(self.form, self.box, src_at, dst_at, [])
            by.append(transfer)
        transfer.ends.append((givers, taker))


class _Router:
    def __init__(self, reshard: Reshard, hosts: Sequence[int]) -> None:
        self._reshard = reshard
        self._hosts = hosts
        self._alone = {rank: (rank,) for rank in reshard.ranks}
        self._sent = dict.fromkeys(reshard.ranks, 0)  # rank -> the bytes that it has to send so far
        self._received = dict.fromkeys(reshard.ranks, 0)
        self.copies: list[Transfer] = []
        self.stages: tuple[list[Transfer], ...] = ([], [], [], [])

    def add(self, form: Form, piece: BoxPiece) -> None:
        src, dst = self._reshard.src_ranks, self._reshard.dst_ranks
        box = _Moving.of(form, piece.box)
        needed = box.places(piece.readers, dst)
        readers: _Places = {}
        again = [place for place in needed if readers.setdefault(*place) != place[1]]
        if form.src.parts > 1:
            self._add_sum(form, piece, readers)
            holders: _Places = {}
        else:
            holders = dict(box.places(piece.holders[0], src))
            self._spread(box, holders, readers, 0)
        for rank, at in again:  # a rank that needs a box at several places receives it once
            if rank in holders:
                box.go(self.copies, self._alone[rank], (holders[rank],), rank, at)
            else:
                box.go(self.stages[-1], self._alone[rank], (readers[rank],), rank, at)

    def _spread(self, box: _Moving, holders: _Places, readers: _Places, stage: int) -> None:
        waiting: dict[int, list[int]] = {}
        for rank, at in readers.items():
            if rank not in holders:
                waiting.setdefault(self._hosts[rank], []).append(rank)
            elif not stage:
                box.go(self.copies, self._alone[rank], (holders[rank],), rank, at)
        if not waiting:
            return
        everywhere, on_host = self._offers(holders)
        for host, ranks in waiting.items():
            offers = on_host.get(host)
            if offers is not None:
                self._serve(box, holders, offers, ranks, readers, stage)
                continue
            lander = min(ranks, key=lambda rank: (self._received[rank], rank))
            self._serve(box, holders, everywhere, [lander], readers, stage)
            if len(ranks) > 1:
                rest = [rank for rank in ranks if rank != lander]
                offers = [(self._sent[lander], lander)]
                self._serve(box, {lander: readers[lander]}, offers, rest, readers, stage + 1)

    def _offers(self, holders: _Places) -> tuple[list[tuple[int, int]], dict[int, list[tuple[int, int]]]]:
        everywhere = [(self._sent[rank], rank) for rank in holders]
        on_host: dict[int, list[tuple[int, int]]] = {}
        for offer in everywhere:
            on_host.setdefault(self._hosts[offer[1]], []).append(offer)
        for offers in (everywhere, *on_host.values()):
            heapq.heapify(offers)
        return everywhere, on_host

    def _serve(
        self,
        box: _Moving,
        holders: _Places,
        offers: list[tuple[int, int]],
        ranks: Sequence[int],
        readers: _Places,
        stage: int,
    ) -> None:
        by, all_sent = self.stages[stage], self._sent
        for rank in ranks:
            sent, giver = offers[0]
            while sent < all_sent[giver]:  # it has been chosen elsewhere meanwhile
                heapq.heapreplace(offers, (all_sent[giver], giver))
                sent, giver = offers[0]
            box.go(by, self._alone[giver], (holders[giver],), rank, readers[rank])
            all_sent[giver] += box.nbytes
            self._received[rank] += box.nbytes

    def _add_sum(self, form: Form, piece: BoxPiece, readers: Mapping[int, Point]) -> None:
        whole = _Moving.of(form, piece.box)
        addends = [dict(whole.places(some, self._reshard.src_ranks)) for some in piece.holders]
        own = {rank for some in addends for rank in some}
        landers = sorted(readers, key=lambda rank: (rank not in own, self._received[rank], rank))
        for lander, share in zip(landers, halved(piece.box, len(landers)), strict=False):
            part = _Moving.of(form, share)
            by = tuple(map(sub, share[0], piece.box[0]))
            givers = [min(some, key=lambda rank: self._distance(rank, lander)) for some in addends]
            for giver in givers:
                if giver != lander:
                    self._sent[giver] += part.nbytes
                    self._received[lander] += part.nbytes
            src_at = tuple(tuple(map(add, some[giver], by)) for some, giver in zip(addends, givers, strict=True))
            places = {rank: tuple(map(add, at, by)) for rank, at in readers.items()}
            part.go(self.stages[0], tuple(givers), src_at, lander, places[lander])
            self._spread(part, {lander: places[lander]}, places, 1)

    def _distance(self, giver: int, taker: int) -> tuple[bool, bool, int, int]:
        return giver != taker, self._hosts[giver] != self._hosts[taker], self._sent[giver], giver
