"""Chooses who sends what to whom.

A reader that holds a piece copies it itself. Otherwise a holder of its host gives it, and where its host has none, a
holder of another host, to one reader of each host, which passes it on to the others there. Of several that could give,
the one with the least to send so far does. A partial sum is added up at its readers, each a share of it, and goes on
from there like any other piece.

So the bytes between hosts are the least there are: each host that does not hold a piece gets it once.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from operator import add, sub
from typing import NamedTuple

from raycollect.planner.boxes import Box, Point, halved, volume
from raycollect.planner.layout import Region
from raycollect.planner.reshard.matching import Piece, matched
from raycollect.planner.reshard.request import Form, Reshard


class Transfer(NamedTuple):
    """One box of all tensors of a form on its way to one reader; ranks are those of the group."""

    form: Form
    box: Box
    givers: tuple[tuple[int, Point], ...]  # (rank, where the box begins there); several: the addends of a sum, in order
    taker: int
    at: Point  # where the box begins there
    passed_on: bool = False  # whether the giver reads what it has received itself


class Routes(NamedTuple):
    """All that moves, by stage: what a stage passes on has arrived in an earlier one."""

    copies: tuple[Transfer, ...]  # inside a rank
    stages: tuple[tuple[Transfer, ...], ...]


def routes(reshard: Reshard, hosts: Sequence[int]) -> Routes:
    """Chooses the transfers; `hosts` has the host of each rank of the group. Deterministic."""
    router = _Router(reshard, hosts)
    for form in reshard.forms:
        for piece in matched(form.src, form.dst).pieces:
            router.add(form, piece)
    return Routes(tuple(router.copies), tuple(tuple(stage) for stage in router.stages if stage))


def _local(region: Region, box: Box) -> Point:
    return tuple(map(add, region.at, map(sub, box[0], region.bounds[0])))


_Places = dict[int, Point]  # rank -> where the box begins there


class _Router:
    def __init__(self, reshard: Reshard, hosts: Sequence[int]) -> None:
        self._reshard = reshard
        self._hosts = hosts
        self._sent = dict.fromkeys(reshard.ranks, 0)  # rank -> the bytes that it has to send so far
        self._received = dict.fromkeys(reshard.ranks, 0)
        self.copies: list[Transfer] = []
        self.stages: tuple[list[Transfer], ...] = ([], [], [])

    def add(self, form: Form, piece: Piece) -> None:
        src, dst = self._reshard.src_ranks, self._reshard.dst_ranks
        readers = {dst[one.rank]: one for one in piece.readers}
        if form.src.parts > 1:
            addends = [{src[one.rank]: one for one in some} for some in piece.holders]
            self._add_sum(form, piece.box, addends, readers)
            return
        holders = {src[one.rank]: _local(one, piece.box) for one in piece.holders[0]}
        self._spread(form, piece.box, holders, _places(readers, piece.box), 0, passed_on=False)

    def _spread(self, form: Form, box: Box, holders: _Places, readers: _Places, stage: int, *, passed_on: bool) -> None:
        nbytes = volume(box) * form.itemsize * form.count
        waiting: dict[int, list[int]] = {}
        for rank, at in readers.items():
            if rank not in holders:
                waiting.setdefault(self._hosts[rank], []).append(rank)
            elif not passed_on:
                self.copies.append(Transfer(form, box, ((rank, holders[rank]),), rank, at))
        if not waiting:
            return
        everywhere, on_host = self._offers(holders)
        for host, ranks in waiting.items():
            offers = on_host.get(host)
            if offers is not None:
                self._serve(form, box, holders, offers, ranks, readers, nbytes, stage, passed_on=passed_on)
                continue
            lander = min(ranks, key=lambda rank: (self._received[rank], rank))
            self._serve(form, box, holders, everywhere, [lander], readers, nbytes, stage, passed_on=passed_on)
            rest = [rank for rank in ranks if rank != lander]
            offers = [(self._sent[lander], lander)]
            there = {lander: readers[lander]}
            self._serve(form, box, there, offers, rest, readers, nbytes, stage + 1, passed_on=True)

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
        form: Form,
        box: Box,
        holders: _Places,
        offers: list[tuple[int, int]],
        ranks: Sequence[int],
        readers: _Places,
        nbytes: int,
        stage: int,
        *,
        passed_on: bool,
    ) -> None:
        for rank in ranks:
            sent, giver = offers[0]
            while sent < self._sent[giver]:  # it has been chosen elsewhere meanwhile
                heapq.heapreplace(offers, (self._sent[giver], giver))
                sent, giver = offers[0]
            taken = ((giver, holders[giver]),)
            self.stages[stage].append(Transfer(form, box, taken, rank, readers[rank], passed_on))
            self._sent[giver] += nbytes
            self._received[rank] += nbytes

    def _add_sum(
        self, form: Form, box: Box, addends: Sequence[Mapping[int, Region]], readers: Mapping[int, Region]
    ) -> None:
        own = {rank for some in addends for rank in some}
        landers = sorted(readers, key=lambda rank: (rank not in own, self._received[rank], rank))
        for lander, part in zip(landers, halved(box, len(landers)), strict=False):
            nbytes = volume(part) * form.itemsize * form.count
            givers = []
            for some in addends:
                giver = min(some, key=lambda rank: self._distance(rank, lander))
                givers.append((giver, _local(some[giver], part)))
                if giver != lander:
                    self._sent[giver] += nbytes
                    self._received[lander] += nbytes
            at = _local(readers[lander], part)
            self.stages[0].append(Transfer(form, part, tuple(givers), lander, at))
            self._spread(form, part, {lander: at}, _places(readers, part), 1, passed_on=True)

    def _distance(self, giver: int, taker: int) -> tuple[bool, bool, int, int]:
        return giver != taker, self._hosts[giver] != self._hosts[taker], self._sent[giver], giver


def _places(regions: Mapping[int, Region], box: Box) -> _Places:
    return {rank: _local(region, box) for rank, region in regions.items()}
