"""Plans to explain."""

from __future__ import annotations

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it

from raycollect.backends.capabilities import BUILT_IN
from raycollect.core.model import GroupSpec, OpKind, ReduceOp, TensorInfo
from raycollect.planner import Link, Membership, Request, Topology, plan
from raycollect.planner.explain import explain
from raycollect.planner.report import Invoked, MethodCalls, StepExplanation
from tests.support.values import replace


def group(name, count, backend="shm", ops=None):
    given = {} if ops is None else {"ops": tuple(one.value for one in ops)}
    known = BUILT_IN.get(backend)
    coalesces = known is not None and known.coalesces
    return GroupSpec(
        name=name, group_id=f"id of {name}", backend=backend, world_size=count, coalesces=coalesces, **given
    )


def membership(hosts, *, name="default", backend="shm", bitwise=True, ops=None, first=0):
    """A group whose rank r is on host ``hosts[r]``; its members are named by their numbers from `first` on."""
    topology = Topology.of(
        hosts, inside=Link(latency_s=1e-5, bandwidth=8e9), between=Link(latency_s=5e-5, bandwidth=1e9)
    )
    spec = group(name, len(hosts), backend, ops)
    participants = tuple(f"member {first + rank}" for rank in range(len(hosts)))
    known = BUILT_IN.get(backend)
    told = {} if known is None else {"chunk_nbytes": known.chunk_nbytes, "pricing": known.pricing}
    return Membership(spec=spec, participants=participants, topology=topology, bitwise=bitwise, **told)


def distant():
    """A group in which any link takes a millisecond, so that a broadcast goes by a tree below 48,000 bytes."""
    there = membership([0, 0, 1], backend="gloo", bitwise=False)
    near, far = Link(latency_s=1e-3, bandwidth=8e9), Link(latency_s=1e-3, bandwidth=1e9)
    return replace(there, topology=replace(there.topology, inside=near, between=far))


def info(size, dtype="float32", itemsize=4):
    return (TensorInfo(shape=(size,), dtype=dtype, itemsize=itemsize),)


def each(there, source):
    """The operands of an operation to which every rank gives one."""
    return tuple((rank, source(rank), None) for rank in range(there.spec.world_size))


def allreduce(there, tag="x", op=ReduceOp.SUM, **more):
    return Request(kind=OpKind.ALLREDUCE, group=there.spec, operands=each(there, lambda r: (tag, r)), op=op, **more)


def gathering(kind, there, tag="x"):
    return Request(kind=kind, group=there.spec, operands=each(there, lambda r: (tag, r)))


def broadcast(there, root=0, tag="x"):
    operands = [(r, (tag, r), None) if r == root else (r, None, (tag, r)) for r in range(there.spec.world_size)]
    return Request(kind=OpKind.BROADCAST, group=there.spec, operands=tuple(operands), root=root)


def send(there, root, peer, tag="x", into=None):
    operands = sorted([(root, (tag, root), None), (peer, None, into)])
    return Request(kind=OpKind.SEND, group=there.spec, operands=tuple(operands), root=root, peer=peer)


def told(requests, memberships, held, **more):
    """The explanation of a plan in which a source ``(tag, rank)`` holds ``held[tag]``."""
    memberships = memberships if isinstance(memberships, list) else [memberships] * len(requests)
    planned = plan(requests, memberships, **more)
    return explain(planned, {source: held[source[0]] for source in planned.uses()})


def native():
    there = membership([0] * 4)
    return told([allreduce(there)], there, {"x": info(1 << 18)})


def tree():
    there = distant()
    return told([broadcast(there)], there, {"x": info(1000)})


def mixed():
    there = membership([0, 0, 1, 1], backend="tcp")
    requests = [
        broadcast(there, 1, "weights"),
        send(there, 0, 3, "message"),
        allreduce(there, "loss", ReduceOp.MAX),
        send(there, 3, 2, "message", ("answer", 2)),
    ]
    held = {"weights": info(1 << 20), "message": info(7), "loss": info(1, "float64", 8), "answer": info(7)}
    return told(requests, there, held)


def overlapping():
    left, right = membership([0, 0], name="left <&>"), membership([0, 0], name="right", first=1)
    requests = [broadcast(left, 0, at) for at in range(100)] + [broadcast(right, 1, at) for at in range(100, 150)]
    return told(requests, [left] * 100 + [right] * 50, {at: info(1024) for at in range(150)}, staging=100 << 10)


def on(device, size, library="cupy"):
    return (replace(info(size)[0], device=device, library=library),)


def methods(first, *names, after=()):
    """A call of each method of each of some actors."""
    each = [(f"Trainer<{at}>", name) for name, count in names for at in range(count)]
    return MethodCalls(
        calls=tuple(
            Invoked(call=first + at, actor=actor, method=name, after=after if at < names[0][1] else ())
            for at, (actor, name) in enumerate(each)
        )
    )


def captured(first, requests, there, held, fixed=0):
    planned = plan(requests, [there] * len(requests))
    return explain(planned, {source: held[source[0]] for source in planned.uses()}, first), fixed


def step_of(*stages):
    """The explanation of a step with these stages, each with the number of its fixed refs."""
    return StepExplanation(
        participants=6, stages=tuple(stage for stage, _ in stages), fixed=tuple(count for _, count in stages)
    )


def step():
    there = membership([0] * 6, name="digits")
    requests = [gathering(OpKind.ALLGATHER, there), allreduce(there, "x", ReduceOp.MAX)]
    return step_of(
        (methods(0, ("gradient", 6)), 0),
        captured(6, [allreduce(there, tag) for tag in "ab"], there, {"a": info(650), "b": info(10)}),
        (methods(8, ("apply", 6), ("loss", 2), after=(6,)), 0),
        captured(16, requests, there, {"x": info(1 << 16)}, fixed=6),
    )
