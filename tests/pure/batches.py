"""Batches as tests need them: by chance, or of requests that have nothing to do with each other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from raycollect.core.model import OpKind
from raycollect.planner import Link, Made, Membership, Plan, Request, Source, plan, plan_part
from tests.pure.memberships import membership, request
from tests.support.values import replace

SLOW = Link(latency_s=1e-3, bandwidth=1e7)
LATE = Link(latency_s=1e-2, bandwidth=8e9)
"""Inside hosts: so that algorithms of few hops are cheaper for small tensors."""
KINDS = (
    OpKind.ALLREDUCE,
    OpKind.REDUCE,
    OpKind.BROADCAST,
    OpKind.ALLGATHER,
    OpKind.GATHER,
    OpKind.SCATTER,
    OpKind.ALLTOALL,
    OpKind.REDUCESCATTER,
    OpKind.BARRIER,
    OpKind.SEND,
)


def _memberships(chance: random.Random) -> list[Membership]:
    """Groups that share participants; a participant is on one host, whatever the group."""
    people = [f"p{number}" for number in range(chance.randint(2, 7))]
    host = {one: chance.randrange(3) for one in people}
    found = []
    for number in range(chance.randint(1, 3)):
        members = chance.sample(people, chance.randint(1, len(people)))
        places = [host[one] for one in members]
        ops = chance.choice([None, None, ("send", "recv", "allreduce", "reducescatter", "barrier")])
        given_ops = {} if ops is None else {"ops": ops}
        bitwise = chance.random() < 0.5
        found.append(
            membership(
                places,
                group_id=f"g{number}",
                members=members,
                backend="tcp" if bitwise else "gloo",
                bitwise=bitwise,
                inside=LATE,
                between=SLOW,
                **given_ops,
            )
        )
    return found


def _batch(
    chance: random.Random, memberships: Sequence[Membership], count: int
) -> tuple[list[Request], list[Membership]]:
    """Requests over few refs, so that many depend on each other."""
    made: dict[str, list[int]] = {}  # participant -> the requests that make something for it
    requests, chosen = [], []
    while len(requests) < count:
        of = chance.choice(memberships)
        kind = chance.choice(KINDS)
        if kind is OpKind.SEND and of.spec.world_size == 1:
            continue
        asked = _asked(chance, of, kind, made)
        for rank, _, _ in asked.operands:
            if plan_part(asked, of).template(rank).makes:
                made.setdefault(of.participants[rank], []).append(len(requests))
        requests.append(asked)
        chosen.append(of)
    return requests, chosen


def _asked(chance: random.Random, of: Membership, kind: OpKind, made: dict[str, list[int]]) -> Request:
    root, peer = chance.sample(range(of.spec.world_size), 2) if of.spec.world_size > 1 else (0, -1)

    def source(rank: int) -> Source:
        person = of.participants[rank]
        if made.get(person) and chance.random() < 0.3:
            return Made(chance.choice(made[person]))
        return f"{person}.{chance.randrange(3)}"

    if kind is OpKind.SEND:
        operands: Any = [(root, source(root), None), (peer, None, source(peer) if chance.random() < 0.5 else None)]
        return Request(
            kind=kind, group=of.spec, operands=tuple(sorted(operands, key=lambda one: one[0])), root=root, peer=peer
        )
    asked = request(kind, of, root, given=chance.random() < 0.5, inplace=chance.random() < 0.5)
    operands = tuple((rank, src and source(rank), dst and source(rank)) for rank, src, dst in asked.operands)
    return replace(asked, operands=operands)


def random_plan(seed: int) -> Plan:
    chance = random.Random(seed)
    memberships = _memberships(chance)
    requests, chosen = _batch(chance, memberships, chance.randint(1, 12))
    return plan(requests, chosen)


def sums(of: Membership, count: int) -> list[Request]:
    """Allreduces of tensors that have nothing to do with each other."""
    asked = request(OpKind.ALLREDUCE, of)
    return [
        replace(asked, operands=tuple((rank, f"{rank}.{number}", None) for rank, _, _ in asked.operands))
        for number in range(count)
    ]
