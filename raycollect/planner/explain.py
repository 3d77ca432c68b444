"""Explains a plan: the algorithms and why, what travels together, bytes, memory and time.

All of it is predicted, not measured: times and bytes come from the cost model (`cost`) by which the planner also
chooses algorithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from raycollect.core.model import OpKind
from raycollect.core.operations import PREFIXES
from raycollect.planner.algorithms import ALGORITHMS, cost_of, rivals
from raycollect.planner.cost import FREE, Cost, HostLayout, priced
from raycollect.planner.fusion import buckets, coalesced
from raycollect.planner.ir import Made, Part, Plan, Source, Together
from raycollect.planner.membership import Membership
from raycollect.planner.report import Explanation, LinkCost, Memory, MethodCalls, Row, StepExplanation
from raycollect.planner.sizes import Infos, Sizes
from raycollect.planner.template import NATIVE, Local, Template, TemplateStep
from raycollect.planner.topology import Topology
from raycollect.planner.wording import PEER, nbytes_words, op_words, ranks_words, reduce_op_words, seconds_words


def explain_step(stages: Sequence[tuple[Explanation | MethodCalls, int]], participants: int) -> StepExplanation:
    """Explains what each run of a captured step will do: its stages, each with how many refs are its operands."""
    plans = [stage for stage, _ in stages if isinstance(stage, Explanation)]
    memories = [one.memory for one in plans]
    return StepExplanation(
        participants=participants,
        calls=sum(len(stage.calls) if isinstance(stage, MethodCalls) else len(stage.rows) for stage, _ in stages),
        stages=tuple(stage for stage, _ in stages),
        fixed=tuple(fixed for _, fixed in stages),
        launches=sum(one.launches for one in plans),
        memory=Memory(
            outputs=sum(one.outputs for one in memories),
            scratch=max((one.scratch for one in memories), default=0),
            packing=max((one.packing for one in memories), default=0),
            stand_ins=max((one.stand_ins for one in memories), default=0),
            chunks=tuple({name: nbytes for one in memories for name, nbytes in one.chunks}.items()),
        ),
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
    after = _after(plan)
    rows = [
        _row(sizes, bundle, place, number, after[number])
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
        memory=_memory(plan, sizes, bundles),
        time_s=_time_s(bundles),
        nbytes_inside=sum(row.nbytes_inside for row in rows),
        nbytes_between=sum(row.nbytes_between for row in rows),
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


class _Bundle:
    """Calls that run together, and the algorithm that they take."""

    def __init__(self, plan: Plan, sizes: Sizes, together: Together, first: int) -> None:
        self.calls = together.requests  # places in the plan
        self.first = first
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
        self.packing = packing(self.part.request.kind, staged, staging, coalesces=self.membership.spec.coalesces)
        self.tensors = len(staged)  # per rank, in pieces: per piece
        self.costs = tuple(_price(self.part, self.membership, choice.name) for choice in self.part.choices)
        alone = self.tensors - self.packing.tensors - self.packing.together
        begun = max(alone + self.packing.kernels + min(self.packing.together, 1), 1) - 1  # kernels after the first one
        more_s = begun * self.costs[0].line.fixed_s
        self.times_s = tuple(cost.line.time_s(self.nbytes) + more_s for cost in self.costs)  # by each of the algorithms

    @cached_property
    def launches(self) -> tuple[int, ...]:
        steps = [step for template in self.part.templates for step in template.ways[self.taken]]
        return tuple(sorted({self.base + step.at for step in steps})) or (self.base,)

    @cached_property
    def acts(self) -> tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]:
        several = any(step.at for template in self.part.templates for step in template.ways[self.taken])
        found: dict[tuple[str, ...], list[int]] = {}
        for rank, index in zip(self.part.ranks, self.part.parts, strict=True):
            template = self.part.templates[index]
            steps = template.ways[self.taken]
            launches = [f" (launch {self.base + step.at})" if several or self.base else "" for step in steps]
            words = (_step_words(template, step) + launch for step, launch in zip(steps, launches, strict=True))
            found.setdefault(tuple(words), []).append(rank)
        return tuple((tuple(ranks), steps) for steps, ranks in found.items())

    @property
    def bits(self) -> str:
        """In which order a reduction is folded (P7)."""
        request = self.part.request
        if not request.op:
            return ""
        by_host = not self.membership.pricing.rings and not self.membership.spec.in_rank_order
        if self.membership.bitwise or (by_host and (self.narrow or request.kind in PREFIXES)):
            return "the left fold in rank order"
        return "the left fold over hosts, in rank order inside each" if by_host else "equal on all ranks"

    @cached_property
    def why(self) -> str:
        choices = self.part.choices
        if len(choices) == 1:
            return self._only()
        taken, nbytes = choices[self.taken], [choice.at_least for choice in choices]
        start, end = nbytes[self.taken], next((limit for limit in nbytes if limit > nbytes[self.taken]), 0)
        sizes = [f"from {nbytes_words(start)} on"] * (start > 0) + [f"below {nbytes_words(end)}"] * (end > 0)
        times_s = dict(zip((choice.name for choice in choices), self.times_s, strict=True))
        against = ", ".join(f"{seconds_words(times_s[name])} by {name}" for name in times_s if name != taken.name)
        size = " and ".join(sizes) or "at any size"
        return f"cheaper {size}: {seconds_words(times_s[taken.name])} against {against}"

    def _only(self) -> str:
        request, choice = self.part.request, self.part.choices[0]
        if request.reshard is not None:
            return "boxes go from the nearest rank that holds them and has the least to send"
        if request.kind.value in request.group.ops:
            others = rivals(self.part, self.membership)
            return f"cheaper at any size than {' or '.join(others)}" if others else "the only one here"
        if choice.name != NATIVE.name:
            return f"backend {request.group.backend} has no {request.kind.value}"
        steps = (step.kind for template in self.part.templates for step in template.steps)
        used = {kind.value for kind in steps if isinstance(kind, OpKind)}
        instead = " and ".join(sorted(used)) or "the consistency check"
        return f"backend {request.group.backend} has no {request.kind.value}: {instead} instead"


def _row(sizes: Sizes, bundle: _Bundle, place: int, number: int, after: tuple[int, ...]) -> Row:
    part, membership = bundle.part, bundle.membership
    given, nbytes = sizes.given(number), sizes.nbytes(number)
    made, scratch = sizes.extra(number)
    moved = sizes.moved(number)
    inside, between = bundle.costs[bundle.taken].traffic(nbytes)
    if moved is not None:  # counted
        inside, between = moved.nbytes_inside, moved.nbytes_between
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
        nbytes_inside=inside,
        nbytes_between=between,
        launches=bundle.launches,
        acts=bundle.acts,
        made_nbytes=made,
        scratch_nbytes=scratch,
        time_s=bundle.times_s[bundle.taken],
        moved=moved,
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


def _time_s(bundles: Sequence[_Bundle]) -> float:
    """When the last bundle ends: each begins when all of its participants have ended those before it."""
    free: dict[int, float] = {}
    for bundle in bundles:
        ends_s = max((free.get(member, 0.0) for member in bundle.members), default=0.0) + bundle.times_s[bundle.taken]
        free.update(dict.fromkeys(bundle.members, ends_s))
    return max(free.values(), default=0.0)


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
    groups = [bundle.membership for bundle in bundles]
    chunks = {one.spec.name: one.chunk_nbytes for one in groups}
    return Memory(
        outputs=max(made, default=0),
        scratch=max(scratch, default=0),
        packing=max((boxes, *(bundle.packing.nbytes for bundle in bundles))),
        stand_ins=max(stand_ins, default=0),
        chunks=tuple(chunks.items()),
    )


def _step_words(template: Template, step: TemplateStep) -> str:
    """One step, such as ``"reduce sum to rank 0, in place"``."""
    if step.kind is Local.COMMIT:
        return "wait until all ranks have come so far"
    if step.kind is Local.COPY:
        whole = " its place" if step.dst == template.src else " the output"
        return f"copy{_piece(step.src_piece)} to{_piece(step.dst_piece) or whole}"
    words = [step.kind.value, *reduce_op_words(step.op)]
    piece = max(step.src_piece, step.dst_piece)
    if piece >= 0:
        words.append(f"piece {piece}")
    if step.peer >= 0 and step.kind in PEER:
        words.append(f"{PEER[step.kind]} rank {step.peer}")
    if step.ranks and step.kind not in (OpKind.SEND, OpKind.RECV):
        words.append(f"over ranks {ranks_words(step.ranks)}")
    return " ".join(words) + _target(template, step)


def _target(template: Template, step: TemplateStep) -> str:
    if step.dst < 0:
        return ""
    if step.dst == step.src:
        return ", in place"
    buffer = template.buffers[step.dst]
    return ", into a new tensor" if buffer.is_output else ", into scratch" if buffer.scratch else ""


def _piece(piece: int) -> str:
    return "" if piece < 0 else f" piece {piece}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Which tensors of a bundle travel together."""

    tensors: int = 0  # how many tensors are packed
    kernels: int = 0  # in how many kernels
    nbytes: int = 0  # the most staging that a kernel takes on a rank
    together: int = 0  # how many tensors the backend runs with one synchronization of the ranks


def packing(kind: OpKind, sizes: Sequence[tuple[str, int]], staging: int, *, coalesces: bool) -> Packing:
    """Predicts what travels together (`fusion`), from the dtype and the staging bytes of each tensor of a bundle."""
    large = set(coalesced(kind, [nbytes for _, nbytes in sizes], coalesces=coalesces))
    rest = [one for at, one in enumerate(sizes) if at not in large]
    packed = [[rest[at][1] for at in bucket] for bucket in buckets(rest, staging) if len(bucket) > 1]
    return Packing(
        tensors=sum(map(len, packed)),
        kernels=len(packed),
        nbytes=max(map(sum, packed), default=0),
        together=len(large),
    )


def _price(part: Part, membership: Membership, name: str) -> Cost:
    """The cost of one of a part's algorithms; of several kernels that substitute one, one after the other."""
    if name != NATIVE.name:
        return cost_of(ALGORITHMS[name], part, membership)
    hosts = membership.topology.hosts
    place = replace(membership.topology, hosts=tuple(hosts[rank] for rank in part.ranks))
    layout = HostLayout.of(place, part.places.get(part.request.root, -1), rank_order=membership.bitwise)
    steps = [step for template in part.templates for step in template.steps if isinstance(step.kind, OpKind)]
    kinds = dict.fromkeys(OpKind.SEND if step.kind is OpKind.RECV else step.kind for step in steps)
    return sum((priced(kind, membership.pricing, layout) for kind in kinds if isinstance(kind, OpKind)), FREE)
