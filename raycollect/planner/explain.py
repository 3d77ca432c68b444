"""Explains a plan: the algorithms and why, what travels together, bytes, memory and time.

All of it is predicted, not measured: times and bytes come from the cost model (`cost`) by which the planner also
chooses algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.operations import OPERATIONS, PARTIAL_FOLDS
from raycollect.planner.algorithms import ALGORITHMS, cost_of, rivals
from raycollect.planner.cost import FREE, Cost, HostLayout, priced
from raycollect.planner.fusion import buckets, coalesced
from raycollect.planner.ir import Part, Plan, Request, Source, Together
from raycollect.planner.membership import Membership
from raycollect.planner.report import Explanation, Memory, Row
from raycollect.planner.schedule import dependencies
from raycollect.planner.sizes import Infos, Sizes, nbytes_of
from raycollect.planner.template import NATIVE, TemplateStep
from raycollect.planner.topology import Link, Topology
from raycollect.planner.wording import nbytes_words, seconds_words

MOST_STEPS = 8
"""The number of steps of a rank that are named; the others are counted."""


def explain(plan: Plan, held: Mapping[Source, Infos], first: int = 0) -> Explanation:
    """Explains what a plan will do; `first` is the number of its first call, where it is part of a step.

    `held` has the tensors of each operand, by its source in the requests; those of `Made` operands are worked out.

    Raises:
        KeyError: An operand's tensors are not known.
        ValueError: An operand can't be cut into a piece per rank.
    """
    sizes = Sizes(plan, held)
    before = dependencies(plan.requests, plan.parts)
    bundles = [_Bundle(plan, sizes, together) for together in plan.order]
    rows = []
    count = len(plan.participants)
    free_s, outputs, scratch, staging = [0.0] * count, [0] * count, [0] * count, [0] * count
    for place, bundle in enumerate(bundles):
        ends_s = max((free_s[position] for position in bundle.positions), default=0.0) + bundle.time_s
        for number in bundle.requests:
            after = tuple(first + call for call in sorted(before[number]))
            row = bundle.row(number, call=first + number, bundle=place, after=after)
            rows.append(row)
            for rank, position in zip(bundle.part.ranks, bundle.positions, strict=True):
                free_s[position] = ends_s
                outputs[position] += row.made_nbytes
                scratch[position] += row.scratch_nbytes
                staging[position] += sizes.device_staging(number, rank)
    boxes = [row.moved.staging for row in rows if row.moved is not None]
    groups = [bundle.membership for bundle in bundles]
    return Explanation(
        name=plan.name,
        participants=count,
        agreement="the controller" if plan.agreement is None else plan.agreement.spec.name,
        rounds=plan.rounds,
        launches=len({launch for row in rows for launch in row.launches} | {0}),
        staging=plan.staging,
        rows=tuple(sorted(rows, key=lambda row: row.call)),
        memory=Memory(
            outputs=max(outputs, default=0),
            scratch=max(scratch, default=0),
            packing=max([*boxes, *(bundle.packing_nbytes for bundle in bundles)], default=0),
            device_staging=max(staging, default=0),
            chunks=tuple({group.spec.name: group.chunk_nbytes for group in groups}.items()),
        ),
        time_s=max(free_s, default=0.0),
        nbytes_inside=sum(row.nbytes_inside for row in rows),
        nbytes_between=sum(row.nbytes_between for row in rows),
        links=tuple(dict.fromkeys(link for group in plan.memberships for link in _links(group.topology))),
    )


def _links(topology: Topology) -> Iterator[tuple[str, Link]]:
    if len(set(topology.hosts)) < len(topology.hosts):
        yield "inside", topology.inside
    if topology.host_count > 1:
        yield "between", topology.between


class _Bundle:
    """Requests that run together, and their algorithm."""

    def __init__(self, plan: Plan, sizes: Sizes, together: Together) -> None:
        self.requests = together.requests
        self.part, self.membership = plan.parts[self.requests[0]], plan.memberships[self.requests[0]]
        part, group = self.part, self.membership
        self.positions = [plan.positions[group.participants[rank]] for rank in part.ranks]
        self._sizes = sizes
        self._given = tuple(info for number in self.requests for info in sizes.largest(number))
        nbytes = sum(map(sizes.nbytes, self.requests))
        self._taken = max(at for at, choice in enumerate(part.choices) if choice.at_least <= nbytes)
        self._base = together.base[self._taken]  # the launch of its first steps
        # As `fusion` will decide; per rank, in pieces per piece
        tensors = [tensor for number in self.requests for tensor in sizes.packed(number)]
        groups = coalesced(part.request.kind, [size for _, size in tensors], coalesces=group.spec.coalesces)
        large = set(chain(*groups))
        rest = [tensor for at, tensor in enumerate(tensors) if at not in large]
        filled = buckets(rest, plan.staging if group.spec.memory in ("", "cpu") else 0)
        packed = [[rest[at][1] for at in bucket] for bucket in filled if len(bucket) > 1]
        self._packed = sum(map(len, packed)), len(tensors), len(packed)
        self._together = len(large)
        self.packing_nbytes = max(map(sum, packed), default=0)
        kernels = max(len(filled) + len(groups), 1)
        costs = [_price(part, group, choice.name) for choice in part.choices]
        # Each kernel after the first has the start of the first algorithm
        self._times_s = [cost.line.time_s(nbytes) + (kernels - 1) * costs[0].line.fixed_s for cost in costs]
        self._cost, self.time_s = costs[self._taken], self._times_s[self._taken]

    @cached_property
    def _row(self) -> Callable[..., Row]:
        """Makes the row of a request."""
        part, group = self.part, self.membership
        ways = [(rank, part.template(rank).ways[self._taken]) for rank in part.ranks]
        acts: dict[tuple[str, ...], list[int]] = {}
        for rank, steps in ways:
            words = [_step_words(step, self._base) for step in steps[:MOST_STEPS]]
            more = [f"and {len(steps) - MOST_STEPS} more"] if len(steps) > MOST_STEPS else []
            acts.setdefault((*words, *more), []).append(rank)
        return partial(
            Row,
            op=_op_words(part.request),
            group=group.spec.name,
            # Without GPUs "auto" has no choice
            backend=group.spec.backend + (f": {group.chosen}" if group.has_gpus and group.chosen else ""),
            ranks=part.ranks,
            packed=self._packed,
            together=self._together,
            algorithm=part.choices[self._taken].name,
            why=self._why(),
            bits=self._bits(),
            launches=tuple(sorted({self._base + step.at for _, steps in ways for step in steps})) or (self._base,),
            acts=tuple((tuple(ranks), steps) for steps, ranks in acts.items()),
            time_s=self.time_s,
        )

    def row(self, number: int, **place: Any) -> Row:
        """One of the requests."""
        sizes, ranks = self._sizes, self.part.ranks
        given, nbytes, moved = sizes.largest(number), sizes.nbytes(number), sizes.moved(number)
        inside, between = self._cost.traffic(nbytes)
        if moved is not None:
            inside, between = moved.nbytes_inside, moved.nbytes_between
        return self._row(
            tensors=len(given),
            dtypes=tuple(dict.fromkeys(info.dtype for info in given)),
            nbytes=nbytes,
            nbytes_inside=inside,
            nbytes_between=between,
            made_nbytes=max((nbytes_of(sizes.output(number, rank)) for rank in ranks), default=0),
            scratch_nbytes=max((sizes.scratch_nbytes(number, rank) for rank in ranks), default=0),
            moved=moved,
            **place,
        )

    def _bits(self) -> str:
        """The order in which a reduction is folded (P7)."""
        request = self.part.request
        if not request.op:
            return ""
        by_host = not self.membership.pricing.rings and not self.membership.spec.in_rank_order
        narrow = any(info.itemsize < 4 and "float" in info.dtype for info in self._given)
        if self.membership.bitwise or (by_host and (narrow or request.kind in PARTIAL_FOLDS)):
            return "the left fold in rank order"
        return "the left fold over hosts, in rank order inside each" if by_host else "equal on all ranks"

    def _why(self) -> str:
        request, choices = self.part.request, self.part.choices
        if len(choices) > 1:
            starts = [choice.at_least for choice in choices]
            start = starts[self._taken]
            end = next((limit for limit in starts if limit > start), 0)
            sizes = [f"from {nbytes_words(start)} on"] * (start > 0) + [f"below {nbytes_words(end)}"] * (end > 0)
            times = {choice.name: seconds_words(s) for choice, s in zip(choices, self._times_s, strict=True)}
            own = times.pop(choices[self._taken].name)
            others = ", ".join(f"{time} by {name}" for name, time in times.items())
            return f"cheaper {' and '.join(sizes) or 'at any size'}: {own} against {others}"
        if request.reshard is not None:
            return "boxes go from the nearest rank that holds them and has the least to send"
        if request.kind.value in request.group.ops:
            others = " or ".join(rivals(self.part, self.membership))
            return f"cheaper at any size than {others}" if others else "the only algorithm here"
        used = sorted(kind.value for kind in _kinds(self.part)) if choices[0].name == NATIVE.name else []
        substitute = f": {' and '.join(used)} instead" if used else ""
        return f"backend {request.group.backend} has no {request.kind.value}{substitute}"


_PREPOSITIONS = {
    OpKind.RECV: "from",
    **{kind: "to" if spec.takes == "root" else "from" for kind, spec in OPERATIONS.items() if spec.root},
    OpKind.SEND: "to",
}


def _peer_words(name: str, kind: OpKind, op: ReduceOp | None, peer: int) -> str:
    preposition = _PREPOSITIONS.get(kind)
    return name + (f" {op.name.lower()}" if op else "") + (f" {preposition} rank {peer}" if preposition else "")


def _op_words(request: Request) -> str:
    """An operation with its reduce op and root: ``"reduce sum to rank 1"``."""
    if request.kind is OpKind.SEND:
        return f"send from rank {request.root} to rank {request.peer}"
    return _peer_words(request.name, request.kind, request.op, request.root)


def _step_words(step: TemplateStep, base: int) -> str:
    """One step: ``"send piece 2 to rank 1 (launch 3)"``."""
    piece = max(step.src_piece, step.dst_piece)
    suffix = f" piece {piece}" if piece >= 0 else ""
    if not isinstance(step.kind, OpKind):
        return step.kind.name.lower() + suffix
    launch = f" (launch {base + step.at})" if base + step.at else ""
    return _peer_words(step.kind.value + suffix, step.kind, step.op, step.peer) + launch


def _price(part: Part, membership: Membership, name: str) -> Cost:
    """The cost of one of a part's algorithms; the kernels of a substitute run one after the other."""
    if name != NATIVE.name:
        return cost_of(ALGORITHMS[name], part, membership)
    hosts = membership.topology.hosts
    topology = replace(membership.topology, hosts=tuple(hosts[rank] for rank in part.ranks))
    layout = HostLayout.of(topology, part.places.get(part.request.root, -1), rank_order=membership.bitwise)
    return sum((priced(kind, membership.pricing, layout) for kind in _kinds(part)), FREE)


def _kinds(part: Part) -> dict[OpKind, None]:
    """The kernels of a part by its first algorithm; a receive is part of a send."""
    kinds = [step.kind for template in part.templates for step in template.steps]
    return dict.fromkeys(OpKind.SEND if kind is OpKind.RECV else kind for kind in kinds if isinstance(kind, OpKind))
