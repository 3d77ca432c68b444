"""One participant's half of a plan, which is sent to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated

from msgspec import Meta

from raycollect.core.codec import Wire
from raycollect.core.model import OpKind, ReduceOp
from raycollect.planner.template import NATIVE, Choice, Template

MOST_RANKS = 1 << 20
"""A larger number must not make the reader allocate for it."""

STAGING_NBYTES = 32 << 20
"""The default for the staging in which tensors may travel packed."""


class Domain(Wire, frozen=True, kw_only=True, dict=True):
    """The ranks that run a kernel together."""

    rank: int
    members: Annotated[int, Meta(ge=0, le=MOST_RANKS)] | tuple[int, ...]  # `ranks`; n for all of 0 to n - 1
    memory: str = ""  # where its kernels work; see `GroupSpec.memory`
    coalesces: bool = False  # whether its kernels run together; see `GroupSpec.coalesces`
    group_id: str  # the group whose communicator runs it; empty at an agreement through the controller

    @classmethod
    def of(
        cls, group_id: str, rank: int, ranks: tuple[int, ...], memory: str = "", *, coalesces: bool = False
    ) -> Domain:
        """The domain of these ranks, ascending."""
        is_whole = ranks[:1] == (0,) and ranks[-1] == len(ranks) - 1
        members = len(ranks) if is_whole else ranks
        return cls(group_id=group_id, rank=rank, members=members, memory=memory, coalesces=coalesces)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return tuple(range(self.members)) if isinstance(self.members, int) else self.members


class Share(Wire, frozen=True, kw_only=True):
    """The work of one rank for all requests of one form."""

    domain: Domain  # the participating ranks
    root: int  # the root rank that all must agree on; -1: none
    reduce_op: ReduceOp | None  # the reduce op that all must agree on
    template: Template
    choices: tuple[Choice, ...] = (NATIVE,)  # the algorithms, in the order of `Template.ways`
    op: str  # the operation's name, for messages and the agreement

    def __post_init__(self) -> None:
        OpKind(self.op)

    @property
    def group_id(self) -> str:
        """The request's group."""
        return self.domain.group_id

    @property
    def rank(self) -> int:
        """This participant's rank in it."""
        return self.domain.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return self.domain.ranks


class Task(Wire, frozen=True, kw_only=True):
    """One request, on one participant."""

    request: int
    # For each OPERAND buffer, in order: n >= 0, the n-th key of the program; -1 - t, the output of task t
    inputs: tuple[int, ...]
    round: int = 0  # its first round of agreement, from 0
    alone: int = 0  # where its launches begin if nothing may be reordered; see `Program.bundles`
    share: int  # the index of its share in the program


class Bundle(Wire, frozen=True, kw_only=True):
    """Tasks of one share that run together: tensors of all of them may travel packed."""

    # For each of the share's choices, the launch of its steps with ``at == 0``; 0: that of the agreement
    base: tuple[int, ...] = (0,)
    tasks: tuple[int, ...]  # the indexes of the tasks, ascending


class Program(Wire, frozen=True, kw_only=True, dict=True):
    """One participant's half of a plan; the same whenever a plan of this form is dispatched again.

    Launches are numbered over all participants, and each participant begins its own in ascending order. This is one
    global order, so waits form no cycle. Launch n is ``seq + n`` of its communicator. Launch 0 is that of the
    agreement; kernels with the same ranks run in it too.
    """

    timeout_s: float  # the time limit of waits for the others, in seconds
    rounds: int  # the rounds of agreement; more than one if a participant learns shapes from others
    # The ranks of the agreement, in a group that has all participants; or all positions, with an empty group id,
    # through the controller
    agreement: Domain
    shares: tuple[Share, ...]  # distinct
    tasks: tuple[Task, ...]
    # The tasks in the order in which they run, valid if different keys are different memory. If any participant
    # has overlapping keys, all run one task after the other instead, in the order of the requests,
    # with launches from `Task.alone` on.
    bundles: tuple[Bundle, ...]
    # For each request of the plan: (its ranks, their places in the agreement). Empty where each request has
    # exactly the ranks of the agreement.
    everyone: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    keys: int = 0  # the number of its keys
    staging: int = STAGING_NBYTES  # the bytes of staging in which tensors may travel packed; 0: none does
    # Whether all participants synchronize through the controller before they overwrite their operands
    commits: bool = False
    name: str  # the operation, or ``"batch"``, for messages

    @cached_property
    def group_ids(self) -> frozenset[str]:
        """The groups of its requests."""
        return frozenset([share.group_id for share in self.shares])

    @property
    def makes(self) -> bool:
        """Whether it makes any output."""
        return any(self.shares[task.share].template.makes for task in self.tasks)

    def positions_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The positions of ranks that have ended the launch of the agreement; empty if others may have more to do."""
        return () if self.everyone else tuple(map(self.agreement.ranks.index, ranks))


class Ticket(Wire, frozen=True):
    """A plan's place in the order of one participant (P2)."""

    seq: int  # its place in its controller's order, from 1; its launches take the numbers from there on
    predecessor: int  # the plan that must have ended on this participant before; 0: none
