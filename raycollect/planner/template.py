"""What a rank does for one request: buffers, and the kernels over them by each algorithm."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from raycollect.model import OpKind, ReduceOp


class Role(enum.Enum):
    """What a buffer of a template is."""

    OPERAND = "operand"
    """Kept in the participant's store, given with the program, or made by an earlier task of it."""
    LIKE = "like"
    """Made before the door, with the infos of another buffer of this rank."""
    PIECE = "piece"
    """Made before the door, with the infos of this rank's piece of another buffer."""
    LEARNED = "learned"
    """Made between two rounds of the door, as what the other ranks bring demands."""
    HOME = "home"
    """Scratch, made before the door on the GPU of the group: stands there for another buffer, a list with tensors of
    each GPU of this rank (`gpu_lists.carried`)."""
    LISTS = "lists"
    """Made before the door on the GPUs of another buffer that is such a list (`gpu_lists.made`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One operand, output or scratch; it may stand for a list or dict of tensors.

    Attributes:
        role: See `Role`.
        source: LIKE, PIECE, HOME, LISTS: the index of the other buffer.
        scratch: True: made for the steps only, and let go of when they have ended.
    """

    role: Role
    source: int = -1
    scratch: bool = False

    @property
    def is_output(self) -> bool:
        """True where the plan makes it for the user."""
        return self.role is not Role.OPERAND and not self.scratch


class Local(enum.Enum):
    """What a rank does by itself."""

    COPY = "copy"
    """Copies `src` (or one piece of it) to `dst` (or one piece of it), which may be the same memory.

    It begins no launch: it has the `Step.at` of a kernel before or behind it, if there is one.
    """
    COMMIT = "commit"
    """Waits until the controller knows that all ranks have come so far: who goes on does not go back.

    Before it no operand is written, so that either all ranks get their results, or all keep what they had. Like a copy
    it begins no launch.
    """
    FOLD = "fold"
    """Reduces the tensors of the list `src` over this rank's GPUs, to `dst` on the GPU of the group.

    It begins no launch, as the next two.
    """
    BRING = "bring"
    """Copies the list `src`, or the tensor of it that `src_piece` names, to `dst` on the GPU of the group."""
    SPREAD = "spread"
    """Copies `src`, on the GPU of the group, to the list `dst`: to all of its tensors but that which `src_piece` names,
    or to the one that `dst_piece` names."""


CROSSINGS = (Local.FOLD, Local.BRING, Local.SPREAD)
"""What a rank does between its GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One kernel, over all tensors of its buffers.

    Attributes:
        kind: What to do; `model.PIECES` says where a buffer is taken as one piece per rank.
        src: The index of the buffer read; -1: none.
        dst: The index of the buffer written; -1: none; may equal `src`.
        op: The reduce op.
        peer: The root, or the other rank of a send or receive, by the ranks of the step's group; -1: no meaning.
        level: In which group it runs: 0 the request's own; above, an inner one (`Part.levels`).
        ranks: The ranks of that group that run it; empty: all that take part in the request.
        at: In which launch of its part it runs, from 0. Launches of a part begin in this order on every rank.
        src_piece: The piece of `src` that is meant; -1: all of it. For what is done between a rank's GPUs see `Local`:
            there it names a tensor of a list by its place, or for a send by the number of its GPU.
        dst_piece: The piece of `dst` that is meant; -1: all of it.
    """

    kind: OpKind | Local
    src: int = -1
    dst: int = -1
    op: ReduceOp | None = None
    peer: int = -1
    level: int = 0
    ranks: tuple[int, ...] = ()
    at: int = 0
    src_piece: int = -1
    dst_piece: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What one or several ranks do.

    Attributes:
        buffers: The buffers, by index.
        steps: The kernels, in order; by the first of the part's algorithms.
        src: The index of the buffer that holds what this rank gives; -1: none.
        dst: The index of the buffer that holds what it takes, where that is not `src`; -1: none.
        result: The index of the buffer that holds this rank's result; -1: none.
        others: The kernels by each other algorithm of the part, over the same buffers.
    """

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    src: int = -1
    dst: int = -1
    result: int = -1
    others: tuple[tuple[Step, ...], ...] = ()

    @property
    def ways(self) -> tuple[tuple[Step, ...], ...]:
        """The kernels by each algorithm."""
        return (self.steps, *self.others)

    @property
    def is_learned(self) -> bool:
        """Whether a shape follows from what other ranks bring."""
        return any(buffer.role is Role.LEARNED for buffer in self.buffers)

    @property
    def is_listed(self) -> bool:
        """Whether operands are lists with tensors of each GPU; kernels then write scratch only."""
        return any(buffer.role is Role.HOME for buffer in self.buffers)

    def named(self, index: int) -> list[tuple[str, int]]:
        """The tensors of a list that its steps name: (what the index is called, the index)."""
        steps = [step for way in self.ways for step in way if step.kind in CROSSINGS]
        sides = [("src_tensor", one.src, one.src_piece) for one in steps]
        sides += [("dst_tensor", one.dst, one.dst_piece) for one in steps]
        return [(name, piece) for name, at, piece in sides if at == index and piece >= 0]

    @property
    def makes(self) -> bool:
        """Whether this rank's result is made by the plan."""
        return any(buffer.is_output for buffer in self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of a part's algorithms, and when it is taken: the last one whose conditions hold.

    Attributes:
        name: Its name: ``"native"``, ``"hierarchical"``, ...
        at_least: The bytes that a rank gives from which on it is taken (all tensors of a bundle together).
        stepwise: Whether it folds in several kernels, so that types which are folded wider than they are kept
            (floats of less than 32 bits) would get other bits, and take an earlier choice.
        width: How many launches it has.
    """

    name: str = "native"
    at_least: int = 0
    stepwise: bool = False
    width: int = 1


NATIVE = Choice()
"""The backend's own kernels."""
