"""Proves the halves of all ranks before any is sent: each target gets each of its elements once, the right one.

The proof reads nothing but the halves and the layouts. It follows every message from its giver to its taker, works out
from the local boxes at both ends which elements of which tensors they are, and then looks at what each region of each
target has got.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from raycollect.planner.boxes import Box, BoxIndex, Point, common, extent, is_inside, moved, volume, words
from raycollect.planner.layout import ITEMSIZES, Region, Regions
from raycollect.planner.reshard.halves import Copy, Give, Half, Take
from raycollect.planner.reshard.request import Form, Reshard
from raycollect.planner.reshard.rounds import ROUND_NBYTES


class _WrongError(Exception):
    """What is wrong with the halves."""


_Message = tuple[int, int, Box, int]  # first name, count, the box of the global tensors, the addend


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
        self._known: dict[tuple[Box, Point, Point, Point], tuple[Box, ...]] = {}
        self._forms = [form for form in reshard.forms for _ in range(form.count)]
        # (rank, form) -> the boxes that have arrived, with the names as one more dimension
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
        form = self._form(copy.first, copy.names)
        box, part = self._global(form.src, self._src, rank, copy.src_at, copy.size)
        there, _ = self._global(form.dst, self._dst, rank, copy.dst_at, copy.size)
        if box != there or part or form.src.parts > 1:
            raise _WrongError(f"copies {words(box)} to {words(there)} on rank {rank}")
        self._arrived[rank, form].append(_named(copy.first, copy.names, box))

    def _round(self, number: int) -> None:
        sent: dict[tuple[int, int], list[_Message]] = defaultdict(list)
        nbytes: dict[tuple[int, int], int] = defaultdict(int)
        for rank, half in self._halves.items():
            for give in half.rounds[number].gives:
                sent[rank, give.peer].append(self._given(rank, give))
                nbytes[rank, give.peer] += half.nbytes(give)
        read: dict[tuple[int, int], int] = defaultdict(int)
        new: list[tuple[int, Form, Box]] = []
        for rank, half in self._halves.items():
            new += ((rank, *self._taken(rank, take, sent, read)) for take in half.rounds[number].takes)
        for pair, messages in sent.items():
            if read[pair] != len(messages):
                raise _WrongError(f"sends from rank {pair[0]} to {pair[1]} what is not taken")
        for rank, form, box in new:  # only now: a round passes on what has arrived before it
            self._arrived[rank, form].append(box)
        self._check_sizes(number, nbytes)

    def _given(self, rank: int, give: Give) -> _Message:
        form = self._form(give.first, give.names)
        if not give.passed_on:
            box, part = self._global(form.src, self._src, rank, give.at, give.size)
            return give.first, give.names, box, part
        box, _ = self._global(form.dst, self._dst, rank, give.at, give.size)
        named = _named(give.first, give.names, box)
        shared = [common(named, other) for other in self._arrived[rank, form]]
        if sum(volume(one) for one in shared if one is not None) != volume(named):
            raise _WrongError(f"passes on {words(box)} from rank {rank}, which has not received it")
        return give.first, give.names, box, -1

    def _taken(
        self,
        rank: int,
        take: Take,
        sent: Mapping[tuple[int, int], Sequence[_Message]],
        read: dict[tuple[int, int], int],
    ) -> tuple[Form, Box]:
        form = self._form(take.first, take.names)
        box, _ = self._global(form.dst, self._dst, rank, take.at, take.size)
        parts = []
        for peer in take.peers:
            messages, at = sent.get((peer, rank), ()), read[peer, rank]
            read[peer, rank] += 1
            if at >= len(messages) or messages[at][:3] != (take.first, take.names, box):
                raise _WrongError(f"takes {words(box)} from rank {peer} on rank {rank}, which sends it something else")
            parts.append(messages[at][3])
        if parts != [-1] and parts != list(range(form.src.parts)):
            raise _WrongError(f"adds up addends {parts} of {form.src.parts} on rank {rank}")
        return form, _named(take.first, take.names, box)

    def _global(self, regions: Regions, side: Mapping[int, int], rank: int, at: Point, size: Point) -> tuple[Box, int]:
        """The box of the global tensor that a local box is, and its addend."""
        for one in regions.of_rank.get(side.get(rank, -1), ()):
            key = (one.bounds, one.at, at, size)  # replicas have it in common
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = _global_box(one, at, size)
            if found:
                return found[0], one.part
        raise _WrongError(f"uses {words(_local_box(at, size))} of a local tensor of rank {rank}, which is in no region")

    def _check_region(self, rank: int, form: Form, region: Region) -> None:
        whole = _named(form.first, form.count, region.bounds)
        boxes = [one for box in self._arrived[rank, form] if (one := common(box, whole)) is not None]
        if boxes == [whole]:
            return
        if sum(map(volume, boxes)) != volume(whole) or BoxIndex(boxes).clash() is not None:
            name = self._reshard.names[form.first]
            raise _WrongError(f"does not write {words(region.bounds)} of {name!r} once on rank {rank}")

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


def _global_box(region: Region, at: Point, size: Point) -> tuple[Box, ...]:
    """The box of the global tensor that a local box in this region is; nothing where it is not in it."""
    local = _local_box(at, size)
    if not is_inside(local, _local_box(region.at, extent(region.bounds))):
        return ()
    return (moved(local, region.at, region.bounds[0]),)


def _named(first: int, count: int, box: Box) -> Box:
    return (first, *box[0]), (first + count, *box[1])
