"""Proves the halves of all ranks before any is sent: each target gets each of its elements once, the right one.

The proof reads nothing but the halves and the layouts. It follows every message from its giver to its taker, works out
from the local boxes at both ends which elements of which tensors they are, and then looks at what each region of each
target has got.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from raycollect.planner.boxes import Box, BoxIndex, Point, common, extent, is_inside, moved, volume, words
from raycollect.planner.layout import ITEMSIZES, Region
from raycollect.planner.reshard.halves import Copy, Half, LocalBoxes
from raycollect.planner.reshard.request import Form, Reshard
from raycollect.planner.reshard.rounds import ROUND_NBYTES

_Pair = tuple[int, int]
"""(giver, taker)."""


class _WrongError(Exception):
    """What is wrong with the halves."""


class _Message(NamedTuple):
    """What a local box of some names is: replicas have it in common, as one object."""

    form: Form
    named: Box  # of the global tensors, with the names as one more dimension
    part: int  # which addend; -1: passed on
    nbytes: int


def problem_of(reshard: Reshard, halves: Mapping[int, Half]) -> str:
    """What is wrong with the halves; empty where they are proven."""
    try:
        _Proof(reshard, halves).run()
    except _WrongError as exc:
        return str(exc)
    return ""


class _Proof:
    def __init__(self, reshard: Reshard, halves: Mapping[int, Half]) -> None:
        self._reshard = reshard
        self._halves = halves
        self._src = {rank: at for at, rank in enumerate(reshard.src_ranks)}
        self._dst = {rank: at for at, rank in enumerate(reshard.dst_ranks)}
        # What is known of local boxes: on ranks that hold the same regions of one form, and of all forms
        self._known: dict[tuple[object, ...], _Message] = {}
        self._tables: dict[tuple[object, ...], dict[int, _Message]] = {}  # by the id of a box, which its half keeps
        self._table_of: dict[tuple[int, bool], dict[int, _Message]] = {}
        self._boxes: dict[Box, Box] = {}
        self._covered: set[tuple[object, ...]] = set()
        self._forms = [form for form in reshard.forms for _ in range(form.count)]
        # (rank, form) -> what has arrived
        self._arrived: dict[tuple[int, Form], list[Box]] = defaultdict(list)

    def run(self) -> None:
        if set(self._halves) != set(self._reshard.ranks):
            raise _WrongError(f"has halves of ranks {sorted(self._halves)}, not of {list(self._reshard.ranks)}")
        for rank, half in self._halves.items():
            for copy in half.copies:
                self._copy(rank, copy)
        self._check_dtypes()
        counts = {len(half.rounds) for half in self._halves.values()}
        if len(counts) > 1:
            raise _WrongError(f"has between {min(counts)} and {max(counts)} rounds on its ranks")
        for number in range(counts.pop()):
            self._round(number)
        for rank, at in self._dst.items():
            for form in self._reshard.forms:
                for region in form.dst.of_rank.get(at, ()):
                    if region.volume:
                        self._check_region(rank, form, region)
        wrong = [rank for (rank, _), boxes in self._arrived.items() if boxes and rank not in self._dst]
        if wrong:
            raise _WrongError(f"writes on ranks {wrong}, which are no targets")

    def _check_dtypes(self) -> None:
        dtypes = self._reshard.dtypes
        itemsizes = tuple(ITEMSIZES[dtype] for dtype in dtypes)
        for rank, half in self._halves.items():
            if (half.dtypes, half.itemsizes) != (dtypes, itemsizes):
                raise _WrongError(f"reads messages as {half.dtypes} on rank {rank}, not as {dtypes}")

    def _form(self, first: int, count: int) -> Form:
        form = self._forms[first] if 0 <= first < len(self._forms) else None
        if form is None or not (form.first <= first and 0 < count <= form.first + form.count - first):
            raise _WrongError(f"moves names {first} to {first + count}, which are not of one form")
        return form

    def _copy(self, rank: int, copy: Copy) -> None:
        gives, takes = self._message(rank, copy.src, is_dst=False), self._message(rank, copy.dst, is_dst=True)
        if gives.named != takes.named or gives.part or gives.form.src.parts > 1:
            raise _WrongError(f"copies {_words(gives.named)} to {_words(takes.named)} on rank {rank}")
        self._arrived[rank, takes.form].append(takes.named)

    def _round(self, number: int) -> None:
        sent = defaultdict[_Pair, list[Box]](list)
        nbytes = defaultdict[_Pair, int](int)
        addends: dict[tuple[_Pair, int], int] = {}  # (pair, which of its messages) -> which addend it is
        for rank, half in self._halves.items():
            for peer, passed_on, boxes in half.rounds[number].gives:
                message = self._message(rank, boxes, is_dst=passed_on)
                pair = rank, peer
                if passed_on:
                    self._check_passed_on(rank, message)
                if message.part:
                    addends[pair, len(sent[pair])] = message.part
                sent[pair].append(message.named)
                nbytes[pair] += message.nbytes
        taken = defaultdict[_Pair, list[Box]](list)
        for rank, half in self._halves.items():
            for peers, boxes in half.rounds[number].takes:
                message = self._message(rank, boxes, is_dst=True)
                self._arrived[rank, message.form].append(message.named)
                parts = []
                for peer in peers:
                    pair = peer, rank
                    parts.append(addends.get((pair, len(taken[pair])), 0))
                    taken[pair].append(message.named)
                if parts != [-1] and len(parts) + message.form.src.parts > 2:
                    self._check_sum(rank, message, parts)
        for pair in {*sent, *taken}:
            if sent[pair] != taken[pair]:
                raise _WrongError(_unlike(pair, sent[pair], taken[pair]))
        self._check_sizes(number, nbytes)

    def _check_sum(self, rank: int, message: _Message, parts: list[int]) -> None:
        count = message.form.src.parts
        if parts != list(range(count)):
            raise _WrongError(f"adds up addends {parts} of {count} on rank {rank}")

    def _check_passed_on(self, rank: int, message: _Message) -> None:
        shared = [common(message.named, other) for other in self._arrived[rank, message.form]]
        if sum(volume(one) for one in shared if one is not None) != volume(message.named):
            raise _WrongError(f"passes on {_words(message.named)} from rank {rank}, which has not received it")

    def _message(self, rank: int, boxes: LocalBoxes, *, is_dst: bool) -> _Message:
        """What local boxes are, by the regions that the rank has."""
        table = self._table_of.get((rank, is_dst))
        if table is None:
            held = tuple(self._rows(rank, form, is_dst=is_dst) for form in self._reshard.forms)
            table = self._table_of[rank, is_dst] = self._tables.setdefault((is_dst, held), {})
        found = table.get(id(boxes))
        if found is None:
            found = table[id(boxes)] = self._new_message(rank, boxes, is_dst=is_dst)
        return found

    def _new_message(self, rank: int, boxes: LocalBoxes, *, is_dst: bool) -> _Message:
        form = self._form(boxes.first, boxes.names)
        key = form, boxes, is_dst, self._rows(rank, form, is_dst=is_dst)
        if key not in self._known:
            box, part = self._global(rank, form, boxes.at, boxes.size, is_dst=is_dst)
            named = (boxes.first, *box[0]), (boxes.first + boxes.names, *box[1])
            named = self._boxes.setdefault(named, named)  # one object at both ends, which is quick to compare
            self._known[key] = _Message(form, named, part, volume(named) * form.itemsize)
        return self._known[key]

    def _rows(self, rank: int, form: Form, *, is_dst: bool) -> tuple[tuple[Box, Point, int], ...]:
        return tuple((one.bounds, one.at, one.part) for one in self._regions(rank, form, is_dst=is_dst))

    def _regions(self, rank: int, form: Form, *, is_dst: bool) -> Sequence[Region]:
        regions, side = (form.dst, self._dst) if is_dst else (form.src, self._src)
        return regions.of_rank.get(side.get(rank, -1), ())

    def _global(self, rank: int, form: Form, at: Point, size: Point, *, is_dst: bool) -> tuple[Box, int]:
        """The box of the global tensor that a local box is, and its addend."""
        local = _local_box(at, size)
        for one in self._regions(rank, form, is_dst=is_dst):
            if is_inside(local, _local_box(one.at, extent(one.bounds))):
                return moved(local, one.at, one.bounds[0]), -1 if is_dst else one.part
        raise _WrongError(f"uses {words(local)} of a local tensor of rank {rank}, which is in no region")

    def _check_region(self, rank: int, form: Form, region: Region) -> None:
        arrived = self._arrived[rank, form]
        key = form, region.bounds, frozenset(map(id, arrived)), len(arrived)  # messages keep the boxes
        if key in self._covered:  # on a replica
            return
        whole = (form.first, *region.bounds[0]), (form.first + form.count, *region.bounds[1])
        boxes = [one for box in arrived if (one := common(box, whole)) is not None]
        if boxes != [whole] and (sum(map(volume, boxes)) != volume(whole) or BoxIndex(boxes).clash() is not None):
            name = self._reshard.names[form.first]
            raise _WrongError(f"does not write {words(region.bounds)} of {name!r} once on rank {rank}")
        self._covered.add(key)

    def _check_sizes(self, number: int, pairs: Mapping[_Pair, int]) -> None:
        said = {half.rounds[number].most for half in self._halves.values()}
        if said != {max(pairs.values(), default=0)}:
            raise _WrongError(f"says that its largest message has {said} bytes, not {max(pairs.values(), default=0)}")
        sent, received = dict[int, int](), dict[int, int]()
        for (giver, taker), nbytes in pairs.items():
            sent[giver] = sent.get(giver, 0) + nbytes
            received[taker] = received.get(taker, 0) + nbytes
        for rank, half in self._halves.items():
            takes = half.rounds[number].takes
            # A sum of one element may need more
            is_single = len(takes) == 1 and max(takes[0].boxes.size, default=1) == 1
            if max(sent.get(rank, 0), 0 if is_single else received.get(rank, 0)) > ROUND_NBYTES:
                raise _WrongError(f"moves more than {ROUND_NBYTES} bytes of rank {rank} in a round")


def _local_box(at: Point, size: Point) -> Box:
    return at, tuple(a + n for a, n in zip(at, size, strict=True))


def _words(named: Box) -> str:
    return words((named[0][1:], named[1][1:]))


def _unlike(pair: _Pair, sent: Sequence[Box], taken: Sequence[Box]) -> str:
    giver, taker = pair
    for one, other in zip_longest(taken, sent):
        if one is not None and one != other:
            return f"takes {_words(one)} from rank {giver} on rank {taker}, which sends it something else"
    return f"sends from rank {giver} to {taker} what is not taken"
