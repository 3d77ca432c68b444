"""Explains a plan: the algorithms and why, what travels together, bytes, memory and time.

All of it is predicted, not measured: times and bytes come from the cost model (`cost`) by which the planner also
chooses algorithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from raycollect.core.model import PREFIXES, GroupSpec
from raycollect.planner.acts import acts
from raycollect.planner.algorithms import rivals
from raycollect.planner.ir import Made, Plan, Source, Together
from raycollect.planner.pricing import packing, price
from raycollect.planner.render import html, step_html, step_text, text
from raycollect.planner.report import (
    Act,
    Bar,
    Brought,
    Lane,
    LinkCost,
    Memory,
    Methods,
    Moved,
    Report,
    Row,
    StepReport,
    Way,
)
from raycollect.planner.sizes import Infos, Sizes
from raycollect.planner.template import NATIVE
from raycollect.planner.topology import Topology
from raycollect.planner.wording import counted, nbytes_words, numbered, op_words, seconds_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Report):
    """What a call or a batch will do, and how to show it; a notebook shows it as a table."""

    def explain(self) -> str:
        """The explanation as text, in ASCII."""
        return text(self)

    def to_dict(self) -> dict[str, Any]:
        """The explanation as values that JSON gives back as they are."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    def _repr_html_(self) -> str:
        return html(self)

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        calls = counted(len(self.rows), "call")
        ways = ", ".join(dict.fromkeys(row.algorithm for row in self.rows))
        return f"<Explanation of {self.name}: {calls}, {self.participants} participants, {ways}; .explain() tells all>"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExplanation(StepReport):
    """What each run of a captured step will do, and how to show it; a notebook shows it as tables."""

    def explain(self) -> str:
        """The explanation as text, in ASCII but for what the user named."""
        return step_text(self)

    def to_dict(self) -> dict[str, Any]:
        """The explanation as values that JSON gives back as they are."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    def _repr_html_(self) -> str:
        return step_html(self)

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        what = f"{counted(self.calls, 'call')} in {counted(len(self.stages), 'stage')}"
        who = counted(self.participants, "participant")
        return f"<StepExplanation of a captured step: {what}, {who}; .explain() tells all>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan that is a stage of a captured step."""

    plan: Plan
    given: Mapping[Source, Infos]  # the tensors of each operand; see `explain`
    first: int  # the number of its first call among all calls of the step
    fixed: int = 0  # how many of the operands are refs


def explain_step(stages: Sequence[Planned | Methods], participants: int) -> StepExplanation:
    """Explains what each run of a captured step will do.

    Raises:
        KeyError: An operand's tensors are not known.
        ValueError: An operand can't be cut into a piece per rank.
    """
    found = [stage if isinstance(stage, Methods) else explain(stage.plan, stage.given, stage.first) for stage in stages]
    plans = [stage for stage in found if isinstance(stage, Report)]
    return StepExplanation(
        participants=participants,
        calls=sum(len(stage.calls) if isinstance(stage, Methods) else len(stage.rows) for stage in found),
        stages=tuple(found),
        fixed=tuple(stage.fixed for stage in stages),
        launches=sum(one.launches for one in plans),
        memory=_memory_of_all([one.memory for one in plans]),
        time_s=sum(one.time_s for one in plans),
        nbytes_inside=sum(one.nbytes_inside for one in plans),
        nbytes_between=sum(one.nbytes_between for one in plans),
    )


def explain(plan: Plan, given: Mapping[Source, Infos], first: int = 0) -> Explanation:
    """Explains what a plan will do; `first` is the number of its first call, where it is part of a step.

    `given` has the tensors of each operand, by its source in the requests; those of `Made` ones are worked out.

    Raises:
        KeyError: An operand's tensors are not known.
        ValueError: An operand can't be cut into a piece per rank.
    """
    sizes = Sizes(plan, given)
    bundles = [_Bundle(plan, sizes, together, first) for together in plan.order]
    lanes, begins = _lanes(bundles, len(plan.participants))
    after = _after(plan)
    rows = [
        _row(sizes, bundle, place, number, after[number], begins[place])
        for place, bundle in enumerate(bundles)
        for number in bundle.calls
    ]
    rows.sort(key=lambda row: row.call)
    return Explanation(
        name=plan.name,
        participants=len(plan.participants),
        agreement="the controller" if plan.agreement is None else plan.agreement.spec.name,
        rounds=plan.rounds,
        launches=len({launch for row in rows for launch in row.launches} | {0}),
        staging=plan.staging,
        rows=tuple(rows),
        lanes=lanes,
        memory=_memory(plan, sizes, bundles),
        time_s=max((lane.bars[-1].ends_s for lane in lanes), default=0.0),
        nbytes_inside=sum(row.way.nbytes_inside for row in rows),
        nbytes_between=sum(row.way.nbytes_between for row in rows),
        links=tuple(dict.fromkeys(link for membership in plan.memberships for link in _links(membership.topology))),
    )


def _links(topology: Topology) -> Iterator[LinkCost]:
    """What the links are taken to cost, as far as the topology has such."""
    if len(set(topology.hosts)) < len(topology.hosts):
        inside = topology.inside
        yield LinkCost(place="inside", latency_s=inside.latency_s, bandwidth=inside.bandwidth, source=inside.source)
    if topology.host_count > 1:
        far = topology.between
        yield LinkCost(place="between", latency_s=far.latency_s, bandwidth=far.bandwidth, source=far.source)


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return {name: _plain(one) for name, one in value.items()} if isinstance(value, dict) else value


class _Bundle:
    """Calls that run together, and the algorithm that they take."""

    def __init__(self, plan: Plan, sizes: Sizes, together: Together, first: int) -> None:
        self.calls = together.requests  # places in the plan
        self.first = first
        self.numbers = tuple(first + number for number in self.calls)  # for the user
        self.part, self.membership = plan.parts[self.calls[0]], plan.memberships[self.calls[0]]
        self.nbytes = sum(sizes.nbytes(number) for number in self.calls)  # given by a rank to all of them
        infos = [info for number in self.calls for info in sizes.given(number)]
        # Whether it has floats of less than 32 bits
        self.narrow = any(info.itemsize < 4 and "float" in info.dtype for info in infos)
        self.taken = max(at for at, choice in enumerate(self.part.choices) if choice.at_least <= self.nbytes)
        self.base = together.base[self.taken]  # the launch of its first steps
        participants = self.membership.participants
        self.members = tuple(plan.positions[participants[rank]] for rank in self.part.ranks)  # positions
        staged = [one for number in self.calls for one in sizes.staged(number)]
        on_device = self.membership.spec.memory not in ("", "cpu")  # where nothing is packed
        staging = 0 if on_device else plan.staging
        self.packing = packing(self.part.request.kind, self.membership.spec.backend, staged, staging)
        self.tensors = len(staged)  # per rank, in pieces: per piece
        self.costs = tuple(price(self.part, self.membership, choice.name) for choice in self.part.choices)
        alone = self.tensors - self.packing.tensors - self.packing.together
        begun = max(alone + self.packing.kernels + min(self.packing.together, 1), 1) - 1  # kernels after the first one
        more_s = begun * self.costs[0].line.fixed_s
        self.times_s = tuple(cost.line.time_s(self.nbytes) + more_s for cost in self.costs)  # by each of the algorithms

    @property
    def label(self) -> str:
        return f"{numbered(self.numbers)}: {op_words(self.part.request)}, {self.part.choices[self.taken].name}"

    @cached_property
    def launches(self) -> tuple[int, ...]:
        steps = [step for template in self.part.templates for step in template.ways[self.taken]]
        return tuple(sorted({self.base + step.at for step in steps})) or (self.base,)

    def ways(self, nbytes: int, moved: Moved | None) -> tuple[Way, ...]:
        found = []
        for choice, seconds, cost in zip(self.part.choices, self.times_s, self.costs, strict=True):
            inside, between = cost.traffic(nbytes)
            if moved is not None:  # counted
                inside, between = moved.nbytes_inside, moved.nbytes_between
            found.append(
                Way(
                    name=choice.name,
                    at_least=choice.at_least,
                    time_s=seconds,
                    nbytes_inside=inside,
                    nbytes_between=between,
                )
            )
        return tuple(found)

    @cached_property
    def acts(self) -> tuple[Act, ...]:
        return acts(self.part, self.taken, self.base)

    @property
    def bits(self) -> str:
        """In which order a reduction is folded (P7)."""
        request = self.part.request
        if not request.op:
            return ""
        by_host = not self.membership.spec.in_rank_order
        if self.membership.bitwise or (by_host and (self.narrow or request.kind in PREFIXES)):
            return "the left fold in rank order"
        return "the left fold over hosts, in rank order inside each" if by_host else "equal on all ranks"

    @cached_property
    def why(self) -> str:
        choices = self.part.choices
        if len(choices) == 1:
            return self._only()
        others = [at for at in range(len(choices)) if at != self.taken]
        against = ", ".join(f"{seconds_words(self.times_s[at])} by {choices[at].name}" for at in others)
        limit = choices[self.taken or 1].at_least
        side = f"from {nbytes_words(limit)} on" if self.taken else f"below {nbytes_words(limit)}"
        return f"cheaper {side}: {seconds_words(self.times_s[self.taken])} against {against}"

    def _only(self) -> str:
        request, choice = self.part.request, self.part.choices[0]
        if request.reshard is not None:
            return "boxes go from the nearest rank that holds them and has the least to send"
        if request.kind.value in request.group.ops:
            others = rivals(self.part, self.membership)
            return f"cheaper at any size than {' or '.join(others)}" if others else "the only one here"
        if choice.name != NATIVE.name:
            return f"backend {request.group.backend} has no {request.kind.value}"
        used = {step.kind.value for template in self.part.templates for step in template.steps}
        instead = " and ".join(sorted(used)) or "the consistency check"
        return f"backend {request.group.backend} has no {request.kind.value}: {instead} instead"


def _row(sizes: Sizes, bundle: _Bundle, place: int, number: int, after: tuple[int, ...], begins_s: float) -> Row:
    part, membership = bundle.part, bundle.membership
    given, nbytes = sizes.given(number), sizes.nbytes(number)
    made, scratch = sizes.extra(number)
    moved = sizes.moved(number)
    return Row(
        call=bundle.first + number,
        op=op_words(part.request),
        group=membership.spec.name,
        backend=membership.spec.backend,
        chosen=membership.chosen if membership.has_gpus else "",  # else there was nothing to choose
        ranks=part.ranks,
        tensors=len(given),
        dtypes=tuple(dict.fromkeys(info.dtype for info in given)),
        nbytes=nbytes,
        after=tuple(bundle.first + one for one in after),
        bundle=place,
        packed=(bundle.packing.tensors, bundle.tensors, bundle.packing.kernels),
        together=bundle.packing.together,
        algorithm=part.choices[bundle.taken].name,
        why=bundle.why,
        bits=bundle.bits,
        ways=bundle.ways(nbytes, moved),
        launches=bundle.launches,
        acts=bundle.acts,
        made_nbytes=made,
        scratch_nbytes=scratch,
        brought=_brought(sizes, bundle, number),
        begins_s=begins_s,
        time_s=bundle.times_s[bundle.taken],
        moved=moved,
    )


def _brought(sizes: Sizes, bundle: _Bundle, number: int) -> tuple[Brought, ...]:
    alike: dict[tuple[str, str, int, int], list[int]] = {}
    for rank in bundle.part.ranks:
        for (device, memory), (there, back) in sizes.brought(number, rank, bundle.taken).items():
            alike.setdefault((device, memory, there, back), []).append(rank)
    return tuple(
        Brought(ranks=tuple(ranks), device=device, memory=memory, nbytes_there=there, nbytes_back=back)
        for (device, memory, there, back), ranks in alike.items()
    )


def _after(plan: Plan) -> list[tuple[int, ...]]:
    written: dict[Source, int] = {}
    read: dict[Source, list[int]] = {}
    found = []
    for number, (request, part) in enumerate(zip(plan.requests, plan.parts, strict=True)):
        before = set[int]()
        touched = part.touches(request)
        for source, writes in touched:
            if isinstance(source, Made):
                before.add(source.request)
            if source in written:
                before.add(written[source])
            if writes:
                before.update(read.get(source, ()))
        for source, writes in touched:
            if writes:
                written[source], read[source] = number, []
            else:
                read.setdefault(source, []).append(number)
        found.append(tuple(sorted(before - {number})))
    return found


def _lanes(bundles: Sequence[_Bundle], count: int) -> tuple[tuple[Lane, ...], list[float]]:
    free = [0.0] * count
    bars: list[list[int]] = [[] for _ in range(count)]
    drawn = []
    for at, bundle in enumerate(bundles):
        begins_s = max((free[member] for member in bundle.members), default=0.0)
        ends_s = begins_s + bundle.times_s[bundle.taken]
        drawn.append(Bar(label=bundle.label, calls=bundle.numbers, begins_s=begins_s, ends_s=ends_s))
        for member in bundle.members:
            free[member] = ends_s
            bars[member].append(at)
    alike: dict[tuple[int, ...], list[int]] = {}
    for position, mine in enumerate(bars):
        alike.setdefault(tuple(mine), []).append(position)
    lanes = tuple(
        Lane(participants=tuple(positions), bars=tuple(drawn[at] for at in mine)) for mine, positions in alike.items()
    )
    return lanes, [bar.begins_s for bar in drawn]


_CHUNKS = {"local": 0, "shm": 2 << 20, "tcp": 12 << 20, "gloo": 32 << 20, "torch:": 32 << 20}
"""Backend -> the most bytes of its chunks on a rank; the docstring of each backend promises that. All of torch's have
the same."""
_BY_HOST_NBYTES = 34 << 20  # the same where the backend goes host by host


def _memory(plan: Plan, sizes: Sizes, bundles: Sequence[_Bundle]) -> Memory:
    """The most that a participant needs: outputs and scratch are kept until the end of the plan."""
    made, scratch, stand_ins = ([0] * len(plan.participants) for _ in range(3))
    for bundle in bundles:
        for number in bundle.calls:
            extra = sizes.extra(number)
            for rank, member in zip(bundle.part.ranks, bundle.members, strict=True):
                made[member] += extra[0]
                scratch[member] += extra[1]
                stand_ins[member] += sizes.stand_ins(number, rank)
    moves = [sizes.moved(number) for bundle in bundles for number in bundle.calls]
    boxes = max((one.staging for moved in moves if moved is not None for one in moved.ranks), default=0)
    specs = [bundle.membership.spec for bundle in bundles]
    chunks = {one.name: _chunks_of(one) for one in specs}
    return Memory(
        outputs=max(made, default=0),
        scratch=max(scratch, default=0),
        packing=max((boxes, *(bundle.packing.nbytes for bundle in bundles))),
        stand_ins=max(stand_ins, default=0),
        chunks=tuple(chunks.items()),
    )


def _chunks_of(spec: GroupSpec) -> int:
    if spec.hosts:
        return _BY_HOST_NBYTES
    return _CHUNKS.get("torch:" if spec.backend.startswith("torch:") else spec.backend, -1)


def _memory_of_all(parts: Sequence[Memory]) -> Memory:
    return Memory(
        outputs=sum(one.outputs for one in parts),
        scratch=max((one.scratch for one in parts), default=0),
        packing=max((one.packing for one in parts), default=0),
        stand_ins=max((one.stand_ins for one in parts), default=0),
        chunks=tuple({name: nbytes for one in parts for name, nbytes in one.chunks}.items()),
    )
