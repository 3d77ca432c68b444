"""Proves the halves of all ranks before any is sent: each target gets each of its elements once, the right one.

The proof reads nothing but the halves and the layouts. It follows every message from its giver to its taker, works out
from the local boxes at both ends which elements of which tensors they are, and then looks at what each region of each
target has got.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raycollect.planner.boxes import Box, BoxIndex, Point, common, extent, is_inside, moved, volume, words
from raycollect.planner.layout import ITEMSIZES, Region
from raycollect.planner.reshard.halves import Copy, Half, Take
from raycollect.planner.reshard.request import Form, Reshard
from raycollect.planner.reshard.rounds import ROUND_NBYTES


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
        # What is known of a local box on all ranks that hold the same regions, which have a number
        self._known: dict[tuple[object, ...], _Message] = {}
        self._kinds: dict[object, int] = {}
        self._kind_of: dict[tuple[int, int, bool], int] = {}
        self._covered: set[tuple[object, ...]] = set()
        self._forms = [form for form in reshard.forms for _ in range(form.count)]
        self._form_at = [at for at, form in enumerate(reshard.forms) for _ in range(form.count)]
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
        gives = self._message(rank, copy.first, copy.names, copy.src_at, copy.size, is_dst=False)
        takes = self._message(rank, copy.first, copy.names, copy.dst_at, copy.size, is_dst=True)
        if gives.named != takes.named or gives.part or gives.form.src.parts > 1:
            raise _WrongError(f"copies {_words(gives.named)} to {_words(takes.named)} on rank {rank}")
        self._arrived[rank, takes.form].append(takes.named)

    def _round(self, number: int) -> None:
        sent: dict[tuple[int, int], list[_Message]] = defaultdict(list)
        nbytes: dict[tuple[int, int], int] = defaultdict(int)
        for rank, half in self._halves.items():
            for peer, passed_on, first, names, at, size in half.rounds[number].gives:
                message = self._message(rank, first, names, at, size, is_dst=passed_on)
                if passed_on:
                    self._check_passed_on(rank, message)
                pair = rank, peer
                sent[pair].append(message)
                nbytes[pair] += message.nbytes
        read: dict[tuple[int, int], int] = defaultdict(int)
        new: list[tuple[int, _Message]] = []
        for rank, half in self._halves.items():
            for take in half.rounds[number].takes:
                message = self._message(rank, take.first, take.names, take.at, take.size, is_dst=True)
                self._check_taken(rank, take, message, sent, read)
                new.append((rank, message))
        for pair, messages in sent.items():
            if read[pair] != len(messages):
                raise _WrongError(f"sends from rank {pair[0]} to {pair[1]} what is not taken")
        for rank, message in new:  # only now: a round passes on what has arrived before it
            self._arrived[rank, message.form].append(message.named)
        self._check_sizes(number, nbytes)

    def _check_passed_on(self, rank: int, message: _Message) -> None:
        shared = [common(message.named, other) for other in self._arrived[rank, message.form]]
        if sum(volume(one) for one in shared if one is not None) != volume(message.named):
            raise _WrongError(f"passes on {_words(message.named)} from rank {rank}, which has not received it")

    def _check_taken(
        self,
        rank: int,
        take: Take,
        message: _Message,
        sent: Mapping[tuple[int, int], Sequence[_Message]],
        read: dict[tuple[int, int], int],
    ) -> None:
        parts = []
        for peer in take.peers:
            pair = peer, rank
            messages, at = sent.get(pair, ()), read[pair]
            read[pair] = at + 1
            if at >= len(messages) or messages[at].named != message.named:
                raise _WrongError(
                    f"takes {_words(message.named)} from rank {peer} on rank {rank}, which sends it something else"
                )
            parts.append(messages[at].part)
        if parts != [-1] and parts != list(range(message.form.src.parts)):
            raise _WrongError(f"adds up addends {parts} of {message.form.src.parts} on rank {rank}")

    def _message(self, rank: int, first: int, names: int, at: Point, size: Point, *, is_dst: bool) -> _Message:
        """What a local box of some names is, by the regions that the rank has."""
        place = self._form_at[first] if 0 <= first < len(self._form_at) else -1
        kind = self._kind_of.get((rank, place, is_dst))
        if kind is None:
            kind = self._kind_of[rank, place, is_dst] = self._kind(rank, first, is_dst=is_dst)
        found = self._known.get((kind, first, names, at, size))
        if found is None:
            form = self._form(first, names)
            box, part = self._global(rank, form, at, size, is_dst=is_dst)
            named = (first, *box[0]), (first + names, *box[1])
            found = _Message(form, named, part, volume(named) * form.itemsize)
            self._known[kind, first, names, at, size] = found
        return found

    def _kind(self, rank: int, first: int, *, is_dst: bool) -> int:
        form = self._form(first, 1)
        rows = [(one.bounds, one.at, one.part) for one in self._regions(rank, form, is_dst=is_dst)]
        return self._kinds.setdefault((form, is_dst, tuple(rows)), len(self._kinds))

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

    def _check_sizes(self, number: int, pairs: Mapping[tuple[int, int], int]) -> None:
        said = {half.rounds[number].most for half in self._halves.values()}
        if said != {max(pairs.values(), default=0)}:
            raise _WrongError(f"says that its largest message has {said} bytes, not {max(pairs.values(), default=0)}")
        sent, received = dict[int, int](), dict[int, int]()
        for (giver, taker), nbytes in pairs.items():
            sent[giver] = sent.get(giver, 0) + nbytes
            received[taker] = received.get(taker, 0) + nbytes
        for rank, half in self._halves.items():
            takes = half.rounds[number].takes
            is_single = len(takes) == 1 and max(takes[0].size, default=1) == 1  # a sum of one element may need more
            if max(sent.get(rank, 0), 0 if is_single else received.get(rank, 0)) > ROUND_NBYTES:
                raise _WrongError(f"moves more than {ROUND_NBYTES} bytes of rank {rank} in a round")


def _local_box(at: Point, size: Point) -> Box:
    return at, tuple(a + n for a, n in zip(at, size, strict=True))


def _words(named: Box) -> str:
    return words((named[0][1:], named[1][1:]))
