"""What every rank of a plan holds, gives, gets and moves, worked out from its operands.

This predicts what the ranks tell each other in the agreement: the infos of an output are those of the buffer it is made
like, of a piece, or of what the other ranks give (`Role`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from raycollect.core.model import OpKind, TensorInfo
from raycollect.core.operations import PIECES
from raycollect.planner.boxes import volume
from raycollect.planner.ir import Made, Part, Plan, Source
from raycollect.planner.report import Moved, MovedRank
from raycollect.planner.reshard.halves import Half, decode_half
from raycollect.planner.reshard.matching import matched
from raycollect.planner.reshard.request import Reshard, made_of
from raycollect.planner.template import Buffer, Role

Infos = tuple[TensorInfo, ...]
"""The tensors of one value, in order."""


class Sizes:
    """The tensors of the ranks of a plan; `given` has those of each operand, by its source in the requests."""

    def __init__(self, plan: Plan, given: Mapping[Source, Infos]) -> None:
        self._plan = plan
        self._given = given
        self._made: dict[tuple[int, int], Infos] = {}
        self._moved: dict[int, Moved] = {}

    def moved(self, number: int) -> Moved | None:
        """What a reshard moves; None for other requests."""
        part, hosts = self._plan.parts[number], self._plan.memberships[number].topology.hosts
        reshard = part.request.reshard
        if reshard is None:
            return None
        if number not in self._moved:
            halves = {rank: decode_half(part.template(rank).boxes) for rank in part.ranks}
            self._moved[number] = moved_by(reshard, halves, hosts)
        return self._moved[number]

    def gives(self, number: int, rank: int) -> Infos:
        """What a rank gives to a request; empty where it only takes.

        Raises:
            KeyError: An operand's tensors are not known.
        """
        part = self._plan.parts[number]
        source = self._plan.requests[number].operands[part.places[rank]][1]
        return () if source is None else self._held(number, rank, source)

    def nbytes(self, number: int) -> int:
        """The most bytes that a rank gives to a request, all pieces together; of a reshard, those that it sends."""
        moved = self.moved(number)
        if moved is not None:
            return max((one.nbytes_sent for one in moved.ranks), default=0)
        return max((_nbytes(self.gives(number, rank)) for rank in self._plan.parts[number].ranks), default=0)

    def given(self, number: int) -> Infos:
        """What the ranks give to a request; where they differ, what the one with the most bytes gives."""
        return max((self.gives(number, rank) for rank in self._plan.parts[number].ranks), key=_nbytes, default=())

    def made(self, number: int, rank: int) -> Infos:
        """The output of a request on a rank; empty where it makes none there.

        Raises:
            KeyError: An operand's tensors are not known.
            ValueError: An operand can't be cut into a piece per rank.
        """
        known = self._made.get((number, rank))
        if known is None:
            outputs = self._infos(number, rank, lambda one: one.is_output)
            known = self._made[number, rank] = next(outputs, ())
        return known

    def extra(self, number: int) -> tuple[int, int]:
        """The most bytes that a rank makes for a request: (output, scratch)."""
        part = self._plan.parts[number]
        made = [_nbytes(self.made(number, rank)) for rank in part.ranks]
        scratch = [sum(map(_nbytes, self._infos(number, rank, lambda one: one.scratch))) for rank in part.ranks]
        return max(made, default=0), max(scratch, default=0)

    def staged(self, number: int) -> list[tuple[str, int]]:
        """For each tensor of a request: its dtype, and the staging bytes that it takes where it travels packed.

        In pieces, each rank's place is as large as the largest piece, because all ranks have to use the same layout.
        """
        part = self._plan.parts[number]
        if part.request.reshard is not None:  # whose boxes have a staging of their own
            return []
        kind, count = part.request.kind, len(part.ranks)
        in_pieces, out_pieces = PIECES.get(kind, (False, False))
        given = self.given(number)
        if not in_pieces and not out_pieces:
            return [(info.dtype, info.nbytes) for info in given]
        sides = [held for rank in part.ranks if (held := self.gives(number, rank))]
        pieces = [_piece(part, held, rank) for held in sides for rank in part.ranks] if in_pieces else sides
        rows = count * (2 if out_pieces and in_pieces else 1)
        return [(column[0].dtype, rows * max(info.nbytes for info in column)) for column in zip(*pieces, strict=False)]

    def stand_ins(self, number: int, rank: int) -> int:
        """The bytes of the copies of tensors that lie elsewhere than the backend works."""
        memory = self._plan.memberships[number].spec.memory
        if not memory:
            return 0
        steps = [step for way in self._plan.parts[number].template(rank).ways for step in way]
        kernels = [step for step in steps if isinstance(step.kind, OpKind)]
        used = {index for step in kernels for index in (step.src, step.dst) if index >= 0}
        infos = [info for index in used for info in self._buffer(number, rank, index)]
        return sum(info.nbytes for info in infos if info.device.partition(":")[0] != memory)

    def _infos(self, number: int, rank: int, which: Callable[[Buffer], bool]) -> Iterator[Infos]:
        buffers = enumerate(self._plan.parts[number].template(rank).buffers)
        return (self._buffer(number, rank, index) for index, one in buffers if which(one))

    def _buffer(self, number: int, rank: int, index: int) -> Infos:
        part = self._plan.parts[number]
        template = part.template(rank)
        buffer = template.buffers[index]
        if buffer.role is Role.OPERAND:
            _, src, dst = self._plan.requests[number].operands[part.places[rank]]
            source = src if index == template.src and src is not None else dst
            return () if source is None else self._held(number, rank, source)
        if buffer.is_output and (number, rank) in self._made:
            return self._made[number, rank]
        if buffer.role is Role.LEARNED:
            return self._learned(number, rank, of_all=buffer.scratch)
        if buffer.role is Role.LAID:
            return made_of(decode_half(template.boxes).dst)[1]
        held = self._buffer(number, rank, buffer.source)
        return held if buffer.role is Role.LIKE else _piece(part, held, rank)

    def _held(self, number: int, rank: int, source: Source) -> Infos:
        if not isinstance(source, Made):
            return self._given[source]
        earlier = self._plan.memberships[source.request]
        participant = self._plan.memberships[number].participants[rank]
        return self.made(source.request, earlier.rank_of(participant))

    def _learned(self, number: int, rank: int, *, of_all: bool) -> Infos:
        part = self._plan.parts[number]
        in_pieces, out_pieces = PIECES.get(part.request.kind, (False, False))
        givers = part.ranks if out_pieces or of_all else (part.request.root,)
        if out_pieces and not in_pieces:  # the same for all takers
            known = next((self._made[number, one] for one in part.ranks if self._made.get((number, one))), None)
            if known is not None:
                return self._beside(part, known, number, rank)
        held = [self.gives(number, giver) for giver in givers]
        found = tuple(info for one in held for info in (_piece(part, one, rank) if in_pieces else one))
        return self._beside(part, found, number, rank)

    def _beside(self, part: Part, infos: Infos, number: int, rank: int) -> Infos:
        """What comes from the others, on the devices of what the rank itself gives, if anything."""
        mine = self.gives(number, rank)
        if len({info.device for info in (*mine, *infos)}) < 2 or not mine:
            return infos
        row = _piece(part, mine, rank) if PIECES.get(part.request.kind, (False, False))[0] else mine
        return tuple(info.beside(row[at % len(row)]) for at, info in enumerate(infos))


def _piece(part: Part, held: Infos, rank: int) -> Infos:
    count, at = len(part.ranks), part.places[rank]
    if len(held) % count == 0 and (len(held) > 1 or count == 1):
        each = len(held) // count
        return held[at * each : (at + 1) * each]
    piece = held[0].piece(count) if len(held) == 1 else None
    if piece is None:
        raise ValueError(f"{len(held)} tensors can't be cut into {count} pieces")
    return (piece,)


def _nbytes(infos: Infos) -> int:
    return sum(info.nbytes for info in infos)


def moved_by(reshard: Reshard, halves: Mapping[int, Half], hosts: Sequence[int]) -> Moved:
    """What the halves move; `hosts` has the host of each rank of the group."""
    inside, between, ranks = 0, 0, []
    for rank, half in halves.items():
        received, own, given = 0, sum(half.nbytes(one.src) for one in half.copies), dict[int, int]()
        for number in range(len(half.rounds)):
            there, here = half.messages(number)
            own += there.pop(rank, 0)
            here.pop(rank, None)
            received += sum(here.values())
            for peer, nbytes in there.items():
                given[peer] = given.get(peer, 0) + nbytes
        far = sum(nbytes for peer, nbytes in given.items() if hosts[peer] != hosts[rank])
        inside, between = inside + sum(given.values()) - far, between + far
        ranks.append(
            MovedRank(
                rank=rank,
                nbytes_sent=sum(given.values()),
                nbytes_received=received,
                nbytes_own=own,
                staging=half.staging_nbytes,
                gives=tuple(sorted(given.items())),
            )
        )
    return Moved(
        ranks=tuple(ranks),
        nbytes_inside=inside,
        nbytes_between=between,
        rounds=max((len(half.rounds) for half in halves.values()), default=0),
        pieces=sum(len(one.takes) for half in halves.values() for one in half.rounds),
        least_between=least_between(reshard, hosts),
    )


def least_between(reshard: Reshard, hosts: Sequence[int]) -> int:
    """The least bytes that go between hosts: what a host needs and does not hold; -1 where there are partial sums."""
    total = 0
    for form in reshard.forms:
        if form.src.parts > 1:
            return -1
        for box, (holders,), readers in matched(form.src, form.dst).pieces:
            held = {hosts[reshard.src_ranks[rank]] for one in holders for rank in one.ranks}
            needed = {hosts[reshard.dst_ranks[rank]] for one in readers for rank in one.ranks}
            total += len(needed - held) * volume(box) * form.itemsize * form.count
    return total
