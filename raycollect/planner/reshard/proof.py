"""Proves the halves of all ranks before any is sent: each target gets each of its elements once, the right one.

The proof reads only the halves and the layouts. It follows every message from its sender to its receiver, maps the
local boxes at both ends to elements of global tensors, and checks that each region of each target has received its
elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from raycollect.planner.boxes import Box, BoxIndex, Point, common, extent, is_inside, moved, volume, words
from raycollect.planner.layout import ITEMSIZES, Region, Regions
from raycollect.planner.reshard.halves import Copy, Half, LocalBoxes, PlannedBoxRound
from raycollect.planner.reshard.request import Form, Reshard
from raycollect.planner.reshard.rounds import ROUND_NBYTES


class _WrongHalfError(Exception):
    """The halves are wrong."""


class _Message(NamedTuple):
    """The elements of a local box of some names; one object on all ranks that hold the same regions."""

    form: Form
    named: Box  # of the global tensors, with the names as one more dimension
    part: int  # which addend; -1: it lies in a target
    region: int  # in which region of the form, by its place among those of the rank
    nbytes: int


_Messages = tuple[_Message, ...]

_Sent = dict[int, dict[int, list[Box]]]
"""Giver -> taker -> the boxes of the messages."""

_VALUE, _PASSED_ON = [0], [-1]
"""The addends of a message that is no sum."""


class _Held:
    """The regions that some ranks of one side hold, and the messages of their local boxes."""

    def __init__(self, regions: Sequence[Sequence[Region]], *, is_dst: bool) -> None:
        self.regions = regions  # of each form
        self.is_dst = is_dst
        self.messages: dict[LocalBoxes, _Message] = {}
        self.tuples: dict[int, _Messages] = {}  # by the id of a tuple of boxes, which its half keeps


def problem_of(reshard: Reshard, halves: Mapping[int, Half]) -> str:
    """The fault of the halves; empty if they are proven."""
    try:
        _Proof(reshard, halves).run()
    except _WrongHalfError as exc:
        return str(exc)
    return ""


class _Proof:
    def __init__(self, reshard: Reshard, halves: Mapping[int, Half]) -> None:
        self._reshard = reshard
        self._halves = halves
        self._src = self._side(reshard.src_ranks, [form.src for form in reshard.forms], is_dst=False)
        self._dst = self._side(reshard.dst_ranks, [form.dst for form in reshard.forms], is_dst=True)
        self._boxes: dict[Box, Box] = {}
        self._nothing = _Held([() for _ in reshard.forms], is_dst=True)
        self._copied: dict[tuple[int, int, int], _Messages] = {}
        self._forms = [(at, form) for at, form in enumerate(reshard.forms) for _ in range(form.count)]
        self._arrived: dict[int, list[_Messages]] = defaultdict(list)  # by rank; replicas have the same tuples
        self._has: dict[int, set[int]] = defaultdict(set)  # the same of messages, by the id of each

    @staticmethod
    def _side(ranks: Sequence[int], sides: Sequence[Regions], *, is_dst: bool) -> dict[int, _Held]:
        by_regions: dict[tuple[object, ...], _Held] = {}
        held = {}
        for at, rank in enumerate(ranks):
            rows = [side.of_rank.get(at, ()) for side in sides]
            key = tuple(tuple((region.bounds, region.at, region.part) for region in some) for some in rows)
            if key not in by_regions:
                by_regions[key] = _Held(rows, is_dst=is_dst)
            held[rank] = by_regions[key]
        return held

    def run(self) -> None:
        if set(self._halves) != set(self._reshard.ranks):
            raise _WrongHalfError(f"has halves of ranks {sorted(self._halves)}, not of {list(self._reshard.ranks)}")
        self._check_dtypes()
        for rank, half in self._halves.items():
            if half.copies:
                self._arrived[rank].append(self._copies(rank, half.copies))
        counts = {len(half.rounds) for half in self._halves.values()}
        if len(counts) > 1:
            raise _WrongHalfError(f"has between {min(counts)} and {max(counts)} rounds on its ranks")
        for number in range(counts.pop()):
            self._round({rank: half.rounds[number] for rank, half in self._halves.items()})
        proven = set[tuple[int, ...]]()
        for rank, held in self._dst.items():
            key = id(held), *map(id, self._arrived[rank])
            if key not in proven:  # on a replica
                self._check_regions(rank, held)
                proven.add(key)

    def _check_dtypes(self) -> None:
        dtypes = self._reshard.dtypes
        itemsizes = tuple(ITEMSIZES[dtype] for dtype in dtypes)
        for rank, half in self._halves.items():
            if (half.dtypes, half.itemsizes) != (dtypes, itemsizes):
                raise _WrongHalfError(f"reads messages as {half.dtypes} on rank {rank}, not as {dtypes}")

    def _copies(self, rank: int, copies: Sequence[Copy]) -> _Messages:
        src, dst = self._held(rank, is_dst=False), self._held(rank, is_dst=True)
        key = id(src), id(dst), id(copies)
        if key not in self._copied:
            pairs = [(self._message(rank, src, copy.src), self._message(rank, dst, copy.dst)) for copy in copies]
            for gives, takes in pairs:
                if gives.named != takes.named or gives.part or gives.form.src.parts > 1:
                    raise _WrongHalfError(f"copies {_words(gives.named)} to {_words(takes.named)} on rank {rank}")
            self._copied[key] = tuple(takes for _, takes in pairs)
        return self._copied[key]

    def _round(self, rounds: Mapping[int, PlannedBoxRound]) -> None:
        for rank, step in rounds.items():
            if len(step.takers) != len(step.gives) or len(step.givers) != len(step.takes):
                raise _WrongHalfError(f"has columns of different lengths on rank {rank}")
        sent: _Sent = defaultdict(lambda: defaultdict(list))
        nbytes = defaultdict[int, dict[int, int]](lambda: defaultdict(int))
        addends: dict[tuple[int, int, int], int] = {}  # (giver, taker, which of its messages) -> which addend it is
        givers = {rank: step for rank, step in rounds.items() if step.gives}
        for rank, step in givers.items():
            messages = self._messages(rank, step.gives, is_dst=step.passes_on)
            if step.passes_on:
                self._check_passed_on(rank, messages)
            there, sizes = sent[rank], nbytes[rank]
            for taker, (_, named, part, _, size) in zip(step.takers, messages, strict=True):
                if part:
                    addends[rank, taker, len(there[taker])] = part
                there[taker].append(named)
                sizes[taker] += size
        taken = self._taken(rounds, addends)
        if sent != taken:
            raise _WrongHalfError(_unlike(sent, taken))
        self._check_sizes(rounds, nbytes)

    def _taken(self, rounds: Mapping[int, PlannedBoxRound], addends: Mapping[tuple[int, int, int], int]) -> _Sent:
        taken: _Sent = defaultdict(lambda: defaultdict(list))
        takers = {rank: step for rank, step in rounds.items() if step.takes}
        for rank, step in takers.items():
            messages = self._messages(rank, step.takes, is_dst=True)
            self._arrived[rank].append(messages)
            self._has[rank].update(map(id, messages))
            for givers, (form, named, _, _, _) in zip(step.givers, messages, strict=True):
                parts = []
                for giver in givers:
                    boxes = taken[giver][rank]
                    parts.append(addends.get((giver, rank, len(boxes)), 0) if addends else 0)
                    boxes.append(named)
                if parts not in (_PASSED_ON, _VALUE if form.src.parts == 1 else list(range(form.src.parts))):
                    raise _WrongHalfError(f"adds up addends {parts} of {form.src.parts} on rank {rank}")
        return taken

    def _check_passed_on(self, rank: int, messages: _Messages) -> None:
        for message in messages:
            if id(message) in self._has[rank]:  # as it is
                continue
            arrived = [other for some in self._arrived[rank] for other in some]
            there = [other.named for other in arrived if (other.form, other.region) == (message.form, message.region)]
            shared = [common(message.named, other) for other in there]
            if sum(volume(box) for box in shared if box is not None) != volume(message.named):
                raise _WrongHalfError(f"passes on {_words(message.named)} from rank {rank}, which has not received it")

    def _held(self, rank: int, *, is_dst: bool) -> _Held:
        side = self._dst if is_dst else self._src
        return side.get(rank, self._nothing)

    def _messages(self, rank: int, some: tuple[LocalBoxes, ...], *, is_dst: bool) -> _Messages:
        """The messages of local boxes, by the regions of the rank."""
        held = self._held(rank, is_dst=is_dst)
        messages = held.tuples.get(id(some))
        if messages is None:
            messages = held.tuples[id(some)] = tuple(self._message(rank, held, item) for item in some)
        return messages

    def _message(self, rank: int, held: _Held, boxes: LocalBoxes) -> _Message:
        message = held.messages.get(boxes)
        if message is None:
            message = held.messages[boxes] = self._new_message(rank, held, boxes)
        return message

    def _new_message(self, rank: int, held: _Held, boxes: LocalBoxes) -> _Message:
        first, last = boxes.first, boxes.first + boxes.names
        place, form = self._forms[first] if 0 <= first < len(self._forms) else (-1, None)
        if form is None or not first < last <= form.first + form.count:
            raise _WrongHalfError(f"moves names {first} to {last}, which are not of one form")
        local = _local_box(boxes.at, boxes.size)
        for number, region in enumerate(held.regions[place]):
            if is_inside(local, _local_box(region.at, extent(region.bounds))):
                lo, hi = moved(local, region.at, region.bounds[0])
                named = (first, *lo), (last, *hi)
                named = self._boxes.setdefault(named, named)  # one object at both ends, which is quick to compare
                part = -1 if held.is_dst else region.part
                return _Message(form, named, part, number, volume(named) * form.itemsize)
        raise _WrongHalfError(f"uses {words(local)} of a local tensor of rank {rank}, which is in no region")

    def _check_regions(self, rank: int, held: _Held) -> None:
        arrived: dict[tuple[Form, int], list[Box]] = {}
        for messages in self._arrived[rank]:
            for message in messages:
                arrived.setdefault((message.form, message.region), []).append(message.named)
        for form, regions in zip(self._reshard.forms, held.regions, strict=True):
            for number, region in enumerate(regions):
                whole = (form.first, *region.bounds[0]), (form.first + form.count, *region.bounds[1])
                boxes = arrived.get((form, number), [])
                if sum(map(volume, boxes)) != volume(whole) or BoxIndex(boxes).clash() is not None:
                    name = self._reshard.names[form.first]
                    raise _WrongHalfError(f"does not write {words(region.bounds)} of {name!r} once on rank {rank}")

    def _check_sizes(self, rounds: Mapping[int, PlannedBoxRound], pairs: Mapping[int, Mapping[int, int]]) -> None:
        most = max((nbytes for takers in pairs.values() for nbytes in takers.values()), default=0)
        said = {step.most for step in rounds.values()}
        if said != {most}:
            raise _WrongHalfError(f"says that its largest message has {said} bytes, not {most}")
        received = defaultdict[int, int](int)
        for takers in pairs.values():
            for taker, nbytes in takers.items():
                received[taker] += nbytes
        for rank, step in rounds.items():
            # A sum of one element may need more
            is_single = len(step.takes) == 1 and max(step.takes[0].size, default=1) == 1
            sent = sum(pairs[rank].values()) if rank in pairs else 0
            if max(sent, 0 if is_single else received[rank]) > ROUND_NBYTES:
                raise _WrongHalfError(f"moves more than {ROUND_NBYTES} bytes of rank {rank} in a round")


def _local_box(at: Point, size: Point) -> Box:
    return at, tuple(a + n for a, n in zip(at, size, strict=True))


def _words(named: Box) -> str:
    return words((named[0][1:], named[1][1:]))


def _unlike(sent: _Sent, taken: _Sent) -> str:
    pairs = sorted({(giver, taker) for side in (sent, taken) for giver, takers in side.items() for taker in takers})
    for giver, taker in pairs:
        there, here = (side.get(giver, {}).get(taker, []) for side in (sent, taken))
        wrong = [box for box, other in zip_longest(here, there) if box is not None and box != other]
        if wrong:
            return f"takes {_words(wrong[0])} from rank {giver} on rank {taker}, which sends it something else"
        if here != there:
            return f"sends from rank {giver} to {taker} what is not taken"
    return ""
