"""The tensors of each rank of a plan, worked out from its operands, as the ranks will do in the agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raycollect.core.model import OpKind, TensorInfo
from raycollect.core.operations import PIECES
from raycollect.planner.boxes import volume
from raycollect.planner.ir import Made, Part, Plan, Source
from raycollect.planner.report import Moved
from raycollect.planner.reshard.halves import Half, decode_half
from raycollect.planner.reshard.matching import matched
from raycollect.planner.reshard.request import Reshard, made_of
from raycollect.planner.template import Role

Infos = tuple[TensorInfo, ...]
"""The tensors of one value, in order."""


class Sizes:
    """The tensors of the ranks of a plan; `held` has the tensors of each operand, by its source in the requests.

    Methods raise KeyError for an operand that `held` lacks, and ValueError if an operand has no piece per rank.
    """

    def __init__(self, plan: Plan, held: Mapping[Source, Infos]) -> None:
        self._plan = plan
        self._operands = held
        self._outputs: dict[tuple[int, int], Infos] = {}
        self._gathered: dict[int, Infos] = {}
        self._moved: dict[int, Moved] = {}

    def moved(self, number: int) -> Moved | None:
        """The messages of a reshard; None for other requests."""
        part, hosts = self._plan.parts[number], self._plan.memberships[number].topology.hosts
        reshard = part.request.reshard
        if reshard is None:
            return None
        if number not in self._moved:
            halves = {rank: decode_half(part.template(rank).boxes) for rank in part.ranks}
            self._moved[number] = moved_by(reshard, halves, hosts)
        return self._moved[number]

    def nbytes(self, number: int) -> int:
        """The most bytes that a rank gives to a request, all pieces together; of a reshard, that it sends."""
        moved = self.moved(number)
        if moved is None:
            return nbytes_of(self.largest(number))
        return max(sum(nbytes for _, nbytes in sends) for _, sends in moved.sends)

    def gives(self, number: int, rank: int) -> Infos:
        """The tensors that a rank gives to a request; empty if it only takes."""
        source = self._plan.requests[number].operands[self._plan.parts[number].places[rank]][1]
        return () if source is None else self._held(number, rank, source)

    def largest(self, number: int) -> Infos:
        """The tensors of the rank that gives the most bytes to a request."""
        return max((self.gives(number, rank) for rank in self._plan.parts[number].ranks), key=nbytes_of, default=())

    def output(self, number: int, rank: int) -> Infos:
        """The output of a request on a rank; empty if the plan makes none there."""
        if (number, rank) not in self._outputs:
            buffers = enumerate(self._plan.parts[number].template(rank).buffers)
            output_at = next((index for index, buffer in buffers if buffer.is_output), -1)
            self._outputs[number, rank] = () if output_at < 0 else self._buffer(number, rank, output_at)
        return self._outputs[number, rank]

    def scratch_nbytes(self, number: int, rank: int) -> int:
        """The bytes of scratch of a request on a rank."""
        buffers = enumerate(self._plan.parts[number].template(rank).buffers)
        return sum(nbytes_of(self._buffer(number, rank, index)) for index, buffer in buffers if buffer.scratch)

    def device_staging(self, number: int, rank: int) -> int:
        """The bytes of the copies of tensors on other devices than the backend's."""
        memory = self._plan.memberships[number].spec.memory
        if not memory:
            return 0
        steps = [step for way in self._plan.parts[number].template(rank).ways for step in way]
        kernels = [step for step in steps if isinstance(step.kind, OpKind)]
        used = {index for step in kernels for index in (step.src, step.dst) if index >= 0}
        infos = [info for index in used for info in self._buffer(number, rank, index)]
        return sum(info.nbytes for info in infos if info.device.partition(":")[0] != memory)

    def packed(self, number: int) -> list[tuple[str, int]]:
        """For each tensor of a request: its dtype, and the staging bytes that it takes if it travels packed.

        In pieces, each rank's slot is as large as the largest piece, because all ranks use the same layout.
        """
        part = self._plan.parts[number]
        if part.request.reshard is not None:  # whose boxes have a separate staging
            return []
        in_pieces, out_pieces = _pieces_of(part)
        if not in_pieces and not out_pieces:
            return [(info.dtype, info.nbytes) for info in self.largest(number)]
        sides = [held for rank in part.ranks if (held := self.gives(number, rank))]
        pieces = [_piece(part, held, rank) for held in sides for rank in part.ranks] if in_pieces else sides
        slots = len(part.ranks) * (2 if out_pieces and in_pieces else 1)
        return [(column[0].dtype, slots * max(info.nbytes for info in column)) for column in zip(*pieces, strict=False)]

    def _buffer(self, number: int, rank: int, index: int) -> Infos:
        part = self._plan.parts[number]
        template = part.template(rank)
        buffer = template.buffers[index]
        if buffer.role is Role.OPERAND:
            _, src, dst = self._plan.requests[number].operands[part.places[rank]]
            source = src if index == template.src and src is not None else dst
            return () if source is None else self._held(number, rank, source)
        if buffer.role is Role.LEARNED:
            return self._learned(number, rank, of_all=buffer.scratch)
        if buffer.role is Role.LAID:
            infos = made_of(decode_half(template.boxes).dst)[1]
            like = self._buffer(number, rank, buffer.source) if buffer.source >= 0 else self.gives(number, rank)
            return tuple(info.beside(like[0]) for info in infos) if like else infos
        held = self._buffer(number, rank, buffer.source)
        return held if buffer.role is Role.LIKE else _piece(part, held, rank)

    def _held(self, number: int, rank: int, source: Source) -> Infos:
        if not isinstance(source, Made):
            return self._operands[source]
        participant = self._plan.memberships[number].participants[rank]
        return self.output(source.request, self._plan.memberships[source.request].rank_of(participant))

    def _learned(self, number: int, rank: int, *, of_all: bool) -> Infos:
        part, mine = self._plan.parts[number], self.gives(number, rank)
        in_pieces, out_pieces = _pieces_of(part)
        if in_pieces:
            givers = part.ranks if out_pieces else (part.request.root,)
            infos = tuple(info for giver in givers for info in _piece(part, self.gives(number, giver), rank))
        else:  # the same on all ranks
            if number not in self._gathered:
                givers = part.ranks if out_pieces or of_all else (part.request.root,)
                self._gathered[number] = tuple(info for giver in givers for info in self.gives(number, giver))
            infos = self._gathered[number]
        # On the device of the tensors that the rank itself gives
        return tuple(info.beside(mine[0]) if mine and info.device != mine[0].device else info for info in infos)


def nbytes_of(infos: Infos) -> int:
    """The bytes of some tensors."""
    return sum(info.nbytes for info in infos)


def _pieces_of(part: Part) -> tuple[bool, bool]:
    return PIECES[part.request.kind]


def _piece(part: Part, held: Infos, rank: int) -> Infos:
    count, at = len(part.ranks), part.places[rank]
    if len(held) % count == 0 and (len(held) > 1 or count == 1):
        each = len(held) // count
        return held[at * each : (at + 1) * each]
    piece = held[0].piece(count) if len(held) == 1 else None
    if piece is None:
        raise ValueError(f"{len(held)} tensors can't be cut into {count} pieces")
    return (piece,)


def moved_by(reshard: Reshard, halves: Mapping[int, Half], hosts: Sequence[int]) -> Moved:
    """The messages of the halves of a reshard; `hosts` has the host of each rank of the group."""
    sends: dict[int, dict[int, int]] = {rank: {} for rank in halves}
    own = {rank: sum(half.nbytes(copy.src) for copy in half.copies) for rank, half in halves.items()}
    for rank, half in halves.items():
        for number in range(len(half.rounds)):
            for peer, nbytes in half.messages(number)[0].items():
                if peer == rank:
                    own[rank] += nbytes
                else:
                    sends[rank][peer] = sends[rank].get(peer, 0) + nbytes
    total = sum(sum(messages.values()) for messages in sends.values())
    between = sum(
        nbytes for rank, messages in sends.items() for peer, nbytes in messages.items() if hosts[rank] != hosts[peer]
    )
    return Moved(
        sends=tuple((rank, tuple(sorted(messages.items()))) for rank, messages in sends.items()),
        copies=tuple(own.values()),
        staging=max(half.staging_nbytes for half in halves.values()),
        nbytes_inside=total - between,
        nbytes_between=between,
        rounds=max(len(half.rounds) for half in halves.values()),
        boxes=sum(len(step.takes) for half in halves.values() for step in half.rounds),
        least_between=least_between(reshard, hosts),
    )


def least_between(reshard: Reshard, hosts: Sequence[int]) -> int:
    """The bytes that hosts need and do not hold, which must go between hosts; -1 if there are partial sums."""
    total = 0
    for form in reshard.forms:
        if form.src.parts > 1:
            return -1
        for box, (holders,), readers in matched(form.src, form.dst).pieces:
            held = {hosts[reshard.src_ranks[rank]] for alike in holders for rank in alike.ranks}
            needed = {hosts[reshard.dst_ranks[rank]] for alike in readers for rank in alike.ranks}
            total += len(needed - held) * volume(box) * form.itemsize * form.count
    return total
