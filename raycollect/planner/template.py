"""The work of a rank for one request: buffers, and the kernels over them by each algorithm."""

from __future__ import annotations

import enum

from raycollect.core.codec import Wire
from raycollect.core.model import OpKind, ReduceOp


class Role(enum.Enum):
    """The roles of the buffers of a template."""

    OPERAND = "operand"
    """Kept in the participant's store, given with the program, or made by an earlier task of it."""
    LIKE = "like"
    """Made before the agreement, with the infos of another buffer of this rank."""
    PIECE = "piece"
    """Made before the agreement, with the infos of this rank's piece of another buffer."""
    LEARNED = "learned"
    """Made between two rounds of agreement, when the infos of the other ranks are known.

    A scratch has room for the inputs of all ranks."""
    LAID = "laid"
    """Made before the agreement, by the layouts of a reshard (`Template.boxes`)."""


class Buffer(Wire, frozen=True, kw_only=True):
    """One operand, output or scratch; it may be a list or dict of tensors."""

    source: int = -1  # LIKE, PIECE: the index of the other buffer; LAID: of one that it is like, if any
    scratch: bool = False  # whether it is made for the steps only, and dropped when they have ended
    role: Role

    @property
    def is_output(self) -> bool:
        """Whether the plan makes it for the user."""
        return self.role is not Role.OPERAND and not self.scratch


class Local(enum.Enum):
    """The steps without other ranks. None begins a launch; `TemplateStep.at` is that of an adjacent kernel.

    Values are numbers, which tell them from those of `OpKind` on the wire.
    """

    COPY = 1
    """Copies `src` (or one piece of it) to `dst` (or one piece of it), which may be the same memory."""
    COMMIT = 2
    """Waits until all ranks have reached it, as the controller says.

    No operand is written before it, so that either all ranks get their results, or all keep their operands."""


class TemplateStep(Wire, frozen=True, kw_only=True):
    """One kernel, over all tensors of its buffers."""

    src: int = -1  # the index of the buffer read; -1: none
    dst: int = -1  # the index of the buffer written; -1: none; may equal `src`
    op: ReduceOp | None = None
    peer: int = -1  # the root, or the other rank of a send or receive, -1: none
    ranks: tuple[int, ...] = ()  # the ranks that run it; empty: all that take part in the request
    # The launch of its part in which it runs, from 0. Every rank begins the launches of a part in this order.
    at: int = 0
    src_piece: int = -1  # the piece of `src`; -1: all of it
    dst_piece: int = -1  # the piece of `dst`; -1: all of it
    kind: OpKind | Local  # `operations.PIECES` says which buffers have one piece per rank


class Template(Wire, frozen=True, kw_only=True):
    """The work of one rank for a request."""

    steps: tuple[TemplateStep, ...]  # the kernels, in order, by the first of the part's algorithms
    src: int = -1  # the index of the buffer that this rank gives; -1: none
    dst: int = -1  # the index of the buffer that it takes into, where that is not `src`; -1: none
    result: int = -1  # the index of the buffer with this rank's result; -1: none
    others: tuple[
        tuple[TemplateStep, ...], ...
    ] = ()  # the kernels by each other algorithm of the part, over the same buffers
    boxes: bytes = b""  # of a reshard, the boxes of the rank (`reshard.halves.Half`); else empty
    buffers: tuple[Buffer, ...]

    @property
    def ways(self) -> tuple[tuple[TemplateStep, ...], ...]:
        """The kernels by each algorithm."""
        return (self.steps, *self.others)

    @property
    def is_learned(self) -> bool:
        """Whether a shape follows from the arrivals of other ranks."""
        return any(buffer.role is Role.LEARNED for buffer in self.buffers)

    @property
    def makes(self) -> bool:
        """Whether the plan makes this rank's result."""
        return any(buffer.is_output for buffer in self.buffers)


class Choice(Wire, frozen=True, kw_only=True):
    """One of a part's algorithms, and its condition; the last one whose condition holds is taken."""

    name: str  # `native`, `tree`, ...
    at_least: int  # the least bytes per rank from which it is taken (all tensors of a bundle together)
    width: int  # the number of its launches


NATIVE = Choice(name="native", at_least=0, width=1)
"""The backend's own kernels."""
