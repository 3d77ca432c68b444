"""Requests and plans: the planner's input and output.

A `Request` is one call of the user, bound to ranks. A `Part` has every rank's steps for one request, columnar: ranks
with the same steps share one `Template`. A `Plan` is the parts of a call or of a whole batch, in one global order. A
`Program` is one participant's half of a plan. It is sent without its operands, so that it serves other tensors too.

A participant is one process. It has one rank in each of its groups; its *position* is its place among the participants
of a plan. In the plan of one call, positions are the ranks that take part, in their order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from raycollect.core.model import GroupSpec, OpKind, ReduceOp
from raycollect.planner.membership import Membership
from raycollect.planner.program import STAGING_NBYTES, Bundle, Domain, Program, Share, Task
from raycollect.planner.reshard.request import Reshard
from raycollect.planner.template import NATIVE, Choice, Role, Template


@dataclass(frozen=True, slots=True)
class Made:
    """An operand that is the output of an earlier request of the same plan, on the same participant."""

    request: int  # the place of that request in the plan


Source = Hashable
"""The identity of an operand: a `Made`, or a key or number that represents one ref; equal for equal refs."""

Operands = tuple[int, Source | None, Source | None]
"""(rank, src, dst): the input and the output of a rank. None if it has none, works in place, or asks for a new output
(see `passes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One collective, bound to the ranks of a group."""

    kind: OpKind
    group: GroupSpec
    operands: tuple[Operands, ...]  # for each rank that takes part, ascending
    op: ReduceOp | None = None  # for reductions
    # The source rank of a broadcast, scatter or send, the destination of a reduce or gather; -1 otherwise
    root: int = -1
    peer: int = -1  # the destination rank of a send; -1 otherwise
    inplace: bool = True  # False: an allreduce or reduce goes into new tensors, the operands are only read
    timeout_s: float = 60.0  # how long ranks wait for each other, in seconds
    snapshot: bool = False  # whether in-place ranks keep their operands until all have their results (`Local.COMMIT`)
    reshard: Reshard | None = None  # set where an ALLTOALL moves boxes between two layouts

    @property
    def name(self) -> str:
        """The operation, for messages."""
        return self.kind.value if self.reshard is None else "reshard"


@dataclass(frozen=True, kw_only=True)
class Part:
    """The steps of every rank for one request, for any tensors."""

    request: Request  # only the presence of its operands matters
    templates: tuple[Template, ...]  # distinct
    parts: tuple[int, ...]  # for each rank that takes part, ascending: the index of its template
    # The algorithms, in the order of `Template.ways`; the first is always possible
    choices: tuple[Choice, ...] = (NATIVE,)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return tuple(self.places)

    @cached_property
    def places(self) -> dict[int, int]:
        """Rank -> its place in `parts` and in the request's operands."""
        return {rank: at for at, (rank, _, _) in enumerate(self.request.operands)}

    @cached_property
    def rounds(self) -> int:
        """The number of rounds of agreement."""
        return 2 if any(template.is_learned for template in self.templates) else 1

    @cached_property
    def width(self) -> int:
        """The most launches that it may have."""
        return max(choice.width for choice in self.choices)

    @cached_property
    def writes(self) -> tuple[tuple[bool, bool], ...]:
        """For each template: whether it writes the operand that its rank gives, and the one that it takes into."""
        written = [{step.dst for way in template.ways for step in way} - {-1} for template in self.templates]
        return tuple(
            (template.src in indices, template.dst in indices and template.buffers[template.dst].role is Role.OPERAND)
            for template, indices in zip(self.templates, written, strict=True)
        )

    def over(self, templates: Sequence[Template], **changes: Any) -> Part:
        """The same with these templates, one for each rank that takes part, ascending."""
        index_of = {template: at for at, template in enumerate(dict.fromkeys(templates))}
        return replace(
            self, templates=tuple(index_of), parts=tuple(index_of[template] for template in templates), **changes
        )

    def template(self, rank: int) -> Template:
        """The template of one rank."""
        return self.templates[self.parts[self.places[rank]]]

    def touches(self, request: Request) -> list[tuple[Source, bool]]:
        """The operands of a request of this form, and whether each is written."""
        operands = []
        for (_, src, dst), index in zip(request.operands, self.parts, strict=True):
            writes_src, writes_dst = self.writes[index]
            if src is not None:
                operands.append((src, writes_src))
            if dst is not None:
                operands.append((dst, writes_dst))
        return operands

    def domain(self, rank: int) -> Domain:
        """The group, as one rank takes part in it."""
        group = self.request.group
        return Domain.of(group.group_id, rank, self.ranks, group.memory, coalesces=group.coalesces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Requests that run together: the columnar form of a `Bundle`."""

    requests: tuple[int, ...]
    base: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The work of every participant for one call, or for all calls of a batch."""

    requests: tuple[Request, ...]
    parts: tuple[Part, ...]  # the part of each; requests of one form share it
    memberships: tuple[Membership, ...] = field(repr=False)  # the group of each
    participants: tuple[str, ...]  # their names (`Membership.participants`), by position
    order: tuple[Together, ...]  # the requests that run together, in the one global order
    alone: tuple[int, ...]  # for each request, where its launches begin if nothing may be reordered
    first_rounds: tuple[int, ...]  # for each request, the first round of agreement that it takes part in
    rounds: int  # the number of rounds of agreement
    # A group that has all participants; None if they agree through the controller
    agreement: Membership | None = field(repr=False)
    width: int  # the most launches, that of the agreement included
    staging: int = STAGING_NBYTES  # see `Program.staging`

    @property
    def name(self) -> str:
        """The operation, or ``"batch"``, for messages."""
        return self.requests[0].name if len(self.requests) == 1 else "batch"

    @property
    def timeout_s(self) -> float:
        """How long ranks wait for each other, in seconds: in a batch, the longest limit of its calls."""
        return max((request.timeout_s for request in self.requests), default=0.0)

    @cached_property
    def commits(self) -> bool:
        """See `Program.commits`."""
        return any(request.snapshot for request in self.requests)

    @cached_property
    def is_idempotent(self) -> bool:
        """Whether it may run again after a partial run: it overwrites none of its inputs."""
        read: set[Source] = set()
        for request, part in zip(self.requests, self.parts, strict=True):
            written: set[Source] = set()
            for (_, src, dst), index in zip(request.operands, part.parts, strict=True):
                writes_src, writes_dst = part.writes[index]
                read.add(src)
                written |= {source for source, writes in ((src, writes_src), (dst, writes_dst)) if writes}
            if any(type(source) is not Made for source in (written - {None}) & read):
                return False
        return True

    @cached_property
    def positions(self) -> dict[str, int]:
        """Participant -> position."""
        return {participant: at for at, participant in enumerate(self.participants)}

    @cached_property
    def everyone(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """See `Program.everyone`."""
        by_part: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        rows = []
        for part, membership in zip(self.parts, self.memberships, strict=True):
            if id(part) not in by_part:
                places = tuple(self.positions[membership.participants[rank]] for rank in part.ranks)
                by_part[id(part)] = (part.ranks, places)
            rows.append(by_part[id(part)])
        whole = tuple(range(len(self.participants)))
        return () if all(places == whole for _, places in by_part.values()) else tuple(rows)

    @cached_property
    def involved(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each position: (request, rank) of the requests that it takes part in."""
        requests: list[list[tuple[int, int]]] = [[] for _ in self.participants]
        lists: dict[tuple[int, int], list[tuple[list[tuple[int, int]], int]]] = {}
        for number, (part, membership) in enumerate(zip(self.parts, self.memberships, strict=True)):
            mine = lists.get((id(part), id(membership)))
            if mine is None:
                mine = [(requests[self.positions[membership.participants[rank]]], rank) for rank in part.ranks]
                lists[id(part), id(membership)] = mine
            for own, rank in mine:
                own.append((number, rank))
        return tuple(map(tuple, requests))

    def places_at(self, launch: int) -> Sequence[int]:
        """The positions that take part in a launch, counted from the plan's first."""
        return range(len(self.participants))

    def rounds_at(self, launch: int, *, in_group: bool) -> int:
        """The number of agreements of a launch that the controller gathers, by a group or by all."""
        if launch:
            return int(0 < launch < self.width)
        # Else a group gathers them, and only the commit is the controller's.
        return self.rounds * (in_group == (self.agreement is not None)) + (self.commits and not in_group)

    def outputs(self, position: int) -> tuple[int, ...]:
        """The requests that make an output on a participant, in the order in which its program returns them."""
        return tuple(number for number, rank in self.involved[position] if self.parts[number].template(rank).makes)

    def sources(self, position: int) -> tuple[Source, ...]:
        """The sources behind the keys of a participant's program, in their order."""
        sources: dict[Source, None] = {}
        for number, rank in self.involved[position]:
            _, *given = self.requests[number].operands[self.parts[number].places[rank]]
            sources.update(dict.fromkeys(source for source in given if source is not None and type(source) is not Made))
        return tuple(sources)

    def uses(self) -> dict[Source, bool]:
        """Source of each operand -> whether the plan writes it."""
        used: dict[Source, bool] = {}
        for request, part in zip(self.requests, self.parts, strict=True):
            for source, written in part.touches(request):
                if type(source) is not Made:
                    used[source] = used.get(source, False) or written
        return used

    def program(self, position: int) -> Program:
        """Writes the half of one participant."""
        shares: dict[tuple[int, int], int] = {}
        written: list[Share] = []
        tasks: list[Task] = []
        task_of: dict[int, int] = {}
        keys: dict[Source, int] = {}  # in the order of `sources`
        for number, rank in self.involved[position]:
            part = self.parts[number]
            share = shares.setdefault((id(part), rank), len(written))
            if share == len(written):
                written.append(_share(part, rank))
            _, src, dst = self.requests[number].operands[part.places[rank]]
            inputs = tuple(
                -1 - task_of[source.request] if isinstance(source, Made) else keys.setdefault(source, len(keys))
                for source in (src, dst)
                if source is not None
            )
            task_of[number] = len(tasks)
            tasks.append(self._task(share, number, inputs))
        return Program(
            name=self.name,
            timeout_s=self.timeout_s,
            rounds=self.rounds,
            agreement=self._agreement(position),
            shares=tuple(written),
            tasks=tuple(tasks),
            bundles=self._bundles(task_of),
            everyone=self.everyone,
            keys=len(keys),
            staging=self.staging,
            commits=self.commits,
        )

    def _task(self, share: int, number: int, inputs: tuple[int, ...]) -> Task:
        """Participants share equal tasks, which saves memory in large plans."""
        task = self._tasks.get((share, number, inputs))
        if task is None:
            task = Task(
                share=share, request=number, inputs=inputs, round=self.first_rounds[number], alone=self.alone[number]
            )
            self._tasks[share, number, inputs] = task
        return task

    @cached_property
    def _tasks(self) -> dict[tuple[int, int, tuple[int, ...]], Task]:
        return {}

    def _bundles(self, task_of: dict[int, int]) -> tuple[Bundle, ...]:
        if len(task_of) == len(self.requests):
            return self._whole
        bundles = []
        for together in self.order:
            mine = tuple(task_of[number] for number in together.requests if number in task_of)
            if mine:
                bundles.append(Bundle(tasks=mine, base=together.base))
        return tuple(bundles)

    @cached_property
    def _whole(self) -> tuple[Bundle, ...]:
        return tuple(Bundle(tasks=together.requests, base=together.base) for together in self.order)

    def _agreement(self, position: int) -> Domain:
        group_id = "" if self.agreement is None else self.agreement.spec.group_id
        return Domain.of(group_id, self._at_agreement[position], self._at_agreement)

    @cached_property
    def _at_agreement(self) -> tuple[int, ...]:
        if self.agreement is None:
            return tuple(range(len(self.participants)))
        return tuple(map(self.agreement.rank_of, self.participants))


def _share(part: Part, rank: int) -> Share:
    request = part.request
    return Share(
        op=request.kind.value,
        domain=part.domain(rank),
        root=request.root,
        reduce_op=request.op,
        template=part.template(rank),
        choices=part.choices,
    )
