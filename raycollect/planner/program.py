"""One participant's half of a plan: what travels."""

from __future__ import annotations

from dataclasses import dataclass

from raycollect.model import ReduceOp
from raycollect.planner.template import NATIVE, Choice, Template

STAGING_NBYTES = 32 << 20
"""The bytes of staging in which tensors may travel packed, where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Who runs a kernel together.

    Attributes:
        group_id: The group whose communicator runs it; empty at a door that the controller keeps.
        rank: This participant's rank in it.
        ranks: The ranks that take part, ascending.
        memory: Where its kernels work; see `GroupSpec.memory`.
    """

    group_id: str
    rank: int
    ranks: tuple[int, ...]
    memory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank does for one request; the same for all requests of the same form.

    Attributes:
        op: The operation's name, for messages and the door.
        domains: Who takes part, by level (`Step.level`).
        root: The root rank that all must agree on; -1: none.
        reduce_op: The reduce op that all must agree on.
        template: What to do.
        choices: The algorithms, in the order of `Template.ways`.
    """

    op: str
    domains: tuple[Domain, ...]
    root: int
    reduce_op: ReduceOp | None
    template: Template
    choices: tuple[Choice, ...] = (NATIVE,)

    @property
    def group_id(self) -> str:
        """The request's group."""
        return self.domains[0].group_id

    @property
    def rank(self) -> int:
        """This participant's rank in it."""
        return self.domains[0].rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return self.domains[0].ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One request, on one participant.

    Attributes:
        share: Which of the program's shares.
        request: The place of the request in the plan.
        inputs: For each OPERAND buffer, in order: n >= 0, the n-th key of the program; -1 - t, the output of task t.
        round: The round of the door to which it is first brought, from 0.
        alone: Where its launches begin if nothing may be reordered; see `Program.bundles`.
    """

    share: int
    request: int
    inputs: tuple[int, ...]
    round: int = 0
    alone: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Tasks of one share that run together: tensors of all of them may travel packed.

    Attributes:
        tasks: Which tasks, ascending.
        base: For each of the share's choices, the launch in which its steps ``at == 0`` run; 0: the door's own.
    """

    tasks: tuple[int, ...]
    base: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One participant's half of a plan; the same whenever a plan of this form is dispatched again.

    Launches are numbered over all participants, and each participant begins its own in ascending order: one global
    order, so no cycle of waits. Launch n is ``seq + n`` of its communicator. Launch 0 is the door's; kernels whose
    ranks are those of the door run in it too.

    Attributes:
        name: What to call it in messages: the operation, or ``"batch"``.
        timeout_s: How long to wait for the others, in seconds.
        rounds: How often the participants meet at the door; more than once where one learns shapes from others.
        door: Who meets there: the ranks of a group that all participants are members of, or, where there is none, all
            positions, with an empty group id: then the controller keeps the door.
        shares: The distinct shares.
        tasks: The tasks, in the order of the requests.
        bundles: The tasks in the order in which they run. It holds where operands under different keys are different
            memory. Where one participant finds that they are not, all run one task after the other instead, in the
            order of the requests, with launches from `Task.alone` on.
        everyone: For each request of the plan: (its ranks, their places at the door). Empty where each request has
            exactly the ranks that are at the door.
        keys: How many keys it works on.
        staging: The bytes of staging in which tensors may travel packed; 0: none does.
        commits: Whether all participants meet once more, at the controller, before they overwrite what they gave.
    """

    name: str
    timeout_s: float
    rounds: int
    door: Domain
    shares: tuple[Share, ...]
    tasks: tuple[Task, ...]
    bundles: tuple[Bundle, ...]
    everyone: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    keys: int = 0
    staging: int = STAGING_NBYTES
    commits: bool = False

    @property
    def makes(self) -> bool:
        """Whether it makes anything for the user."""
        return any(self.shares[task.share].template.makes for task in self.tasks)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A plan's place in the order of one participant (P2).

    Attributes:
        seq: Its place in its controller's order, from 1; its launches take the numbers from there on.
        predecessor: The plan that this participant must have ended before; 0: none.
    """

    seq: int
    predecessor: int
