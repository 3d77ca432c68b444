"""Requests, plans and programs: what the planner reads and writes.

A `Request` is one call of the user, bound to ranks. A `Plan` says what every rank does, columnar: ranks that play the
same part share one `Template`; what differs per rank are the operand keys. A `Program` is one rank's half, the only
thing that travels.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

from raycollect.model import GroupSpec, Key, OpKind, ReduceOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One collective, bound to the ranks of a group.

    Attributes:
        kind: The operation; a send and the receive that matches it are one request of kind SEND.
        group: The group.
        operands: (rank, src, dst) for each rank that takes part, ascending: the key of what it gives, and of what it
            takes. None where the rank gives or takes nothing, works in place, or asks for an output (see `passes`).
        op: The reduce op, for reductions.
        root: The source rank of a broadcast, scatter or send, the destination of a reduce or gather; -1 otherwise.
        peer: The destination rank of a send; -1 otherwise.
        inplace: False: an allreduce or reduce goes into new tensors, the operands are only read.
        timeout_s: How long ranks wait for each other, in seconds.
    """

    kind: OpKind
    group: GroupSpec
    operands: tuple[tuple[int, Key | None, Key | None], ...]
    op: ReduceOp | None = None
    root: int = -1
    peer: int = -1
    inplace: bool = True
    timeout_s: float = 60.0


class Role(enum.Enum):
    """What a buffer of a program is."""

    OPERAND = "operand"
    """Kept in the participant's store under a key, or given with the program."""
    LIKE = "like"
    """Made before the door, with the infos of another buffer of this rank."""
    PIECE = "piece"
    """Made before the door, with the infos of this rank's piece of another buffer."""
    LEARNED = "learned"
    """Made between the two rounds of the door, as what the other ranks bring demands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One operand, output or scratch of a program; it may stand for a list or dict of tensors.

    Attributes:
        role: See `Role`.
        source: LIKE, PIECE: the index of the other buffer.
        scratch: True: made for the steps only, and let go of when they have ended.
    """

    role: Role
    source: int = -1
    scratch: bool = False

    @property
    def is_output(self) -> bool:
        """True where the plan makes it for the user."""
        return self.role is not Role.OPERAND and not self.scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One kernel, over all tensors of its buffers.

    Attributes:
        kind: What to do; `model.PIECES` says where a buffer is taken as one piece per rank.
        src: The index of the buffer read; -1: none.
        dst: The index of the buffer written; -1: none; may equal `src`.
        op: The reduce op.
        peer: The root, or the other rank of a send or receive; -1 where it has no meaning.
    """

    kind: OpKind
    src: int = -1
    dst: int = -1
    op: ReduceOp | None = None
    peer: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What one or several ranks do.

    Attributes:
        buffers: The buffers, by index.
        steps: The kernels, in order.
        src: The index of the buffer that holds what this rank gives; -1: none.
        dst: The index of the buffer that holds what it takes, where that is not `src`; -1: none.
        result: The index of the buffer that holds this rank's result; -1: none.
    """

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    src: int = -1
    dst: int = -1
    result: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One rank's half of a plan; the same whenever the same plan is dispatched again.

    Attributes:
        op: The operation's name, for messages and the door.
        group_id: The group whose communicator runs it.
        rank: This participant's rank.
        ranks: All ranks that take part, ascending.
        root: The root rank that all must agree on; -1: none.
        reduce_op: The reduce op that all must agree on.
        timeout_s: How long to wait for the others, in seconds.
        rounds: How often the ranks meet at the door: 2 where one learns its output's shape from another.
        keys: The operand keys, in the order of the template's OPERAND buffers.
        template: What to do.
    """

    op: str
    group_id: str
    rank: int
    ranks: tuple[int, ...]
    root: int
    reduce_op: ReduceOp | None
    timeout_s: float
    rounds: int
    keys: tuple[Key, ...]
    template: Template


@dataclass(frozen=True, slots=True)
class Ticket:
    """A plan's place in the order of one participant (P2).

    Attributes:
        seq: Its place in its controller's order, from 1.
        predecessor: The plan that this participant must have ended before; 0: none.
    """

    seq: int
    predecessor: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every rank does.

    Attributes:
        request: What was asked for.
        templates: The distinct parts.
        parts: For each rank that takes part, ascending: the index of its template.
    """

    request: Request
    templates: tuple[Template, ...]
    parts: tuple[int, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return tuple(self._places)

    @cached_property
    def _places(self) -> dict[int, int]:
        """Rank -> its place in `parts` and in the request's operands."""
        return {rank: at for at, (rank, _, _) in enumerate(self.request.operands)}

    @cached_property
    def rounds(self) -> int:
        """How often the ranks meet at the door."""
        learned = any(b.role is Role.LEARNED for t in self.templates for b in t.buffers)
        return 2 if learned else 1

    def template(self, rank: int) -> Template:
        """The part of one rank."""
        return self.templates[self.parts[self._places[rank]]]

    def outputs(self, rank: int) -> int:
        """How many outputs the plan makes on that rank."""
        return sum(buffer.is_output for buffer in self.template(rank).buffers)

    def keys(self, rank: int) -> tuple[Key, ...]:
        """The keys of one rank's operands, in the order of its OPERAND buffers."""
        _, src, dst = self.request.operands[self._places[rank]]
        return tuple(key for key in (src, dst) if key is not None)

    def uses(self) -> dict[Key, bool]:
        """The keys of all operands -> whether the plan writes what they stand for."""
        used: dict[Key, bool] = {}
        for rank in self.ranks:
            template = self.template(rank)
            written = {step.dst for step in template.steps}
            operands = [i for i, buffer in enumerate(template.buffers) if buffer.role is Role.OPERAND]
            for index, key in zip(operands, self.keys(rank), strict=True):
                used[key] = used.get(key, False) or index in written
        return used

    def program(self, rank: int) -> Program:
        """Writes the half of one rank."""
        request = self.request
        return Program(
            op=request.kind.value,
            group_id=request.group.group_id,
            rank=rank,
            ranks=self.ranks,
            root=request.root,
            reduce_op=request.op,
            timeout_s=request.timeout_s,
            rounds=self.rounds,
            keys=self.keys(rank),
            template=self.template(rank),
        )
