"""The kernels of backend `tcp` between hosts with several ranks each: each host's link carries the fewest bytes.

Theory, for H hosts and arrays of n bytes. Data that the ranks of a host have in common crosses its link once (Karonis
et al.: "Exploiting hierarchy in parallel computer networks to optimize collective operation performance", 2000), and
all of them send a part: a chunk is cut into *rails*, as many as the largest host has ranks. On every host one rank
serves a rail, and only ranks of the same rail send to each other between hosts. Inside a host, rails are exchanged over
its loopback. Between hosts they are exchanged directly, as on one host, a slice of the rail for each host.

==============  ===============================================================  =======================================
kernel          steps of a chunk                                                 a host sends
==============  ===============================================================  =======================================
ALLREDUCE       rails to their ranks, folded; slices between hosts, folded;      2 (H - 1) / H x n
                results between hosts; rails to all ranks of the host
REDUCE          the same, but the results go to the root                         n, the root's (H - 1) / H x n
REDUCESCATTER   pieces to their rails, folded; to their ranks, folded            (H - 1) / H x n
ALLGATHER       each piece to one rank of each other host; on inside the host    (H - 1) x its ranks x n
BROADCAST       slices from the root to the hosts; between these; inside them    n, the root's; others (H - 2) / (H - 1)
==============  ===============================================================  =======================================

GATHER, SCATTER, ALLTOALL and sends have no common data, and are sent directly as in `run`.

Each element is the left fold, over the hosts in the order of their lowest ranks, of the left folds in rank order inside
each: for any size, chunks and fusion (P7). Floats of less than 32 bits would be rounded once per host, so `run` folds
them in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from raycollect.backends.arrays import Array, Flat, native
from raycollect.backends.folds import finish, fold, fold_with, is_widened
from raycollect.backends.kernels import (
    clipped,
    keep_own,
    metered,
    metered_at,
    movement,
    reduce_op,
    scattered_reduction,
    transfers,
)
from raycollect.backends.tcp.link import TcpMesh
from raycollect.backends.tcp.peer import FrameBatch
from raycollect.backends.tcp.run import CHUNK_NBYTES, KernelRun, Staging, Steps, chunk_size
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp

_Spans = Sequence[Sequence[slice]]

WHOLE_UP_TO_NBYTES = 8 << 10  # The size up to which arrays are sent whole: links are shared by the ranks of a host
LEAST_PART = 8  # The first and the last chunk have this part of a chunk
SLOTS = 3  # How many chunks of slices may wait to be folded: links carry some while others are folded


@dataclass(frozen=True, slots=True)
class Hosts:
    """The ranks of a launch by their hosts."""

    groups: tuple[tuple[int, ...], ...]  # for each host its ranks, ascending; hosts by their lowest rank

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, hosts: tuple[int, ...], ranks: tuple[int, ...]) -> Hosts | None:
        """The hosts of a launch; None if all ranks are on one host, or each on its own."""
        by_host: dict[int, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(hosts[rank], []).append(rank)
        return cls(tuple(map(tuple, by_host.values()))) if 1 < len(by_host) < len(ranks) else None

    @property
    def rails(self) -> int:
        """The number of rails."""
        return max(map(len, self.groups))

    def home(self, rank: int) -> int:
        """The index of a rank's host."""
        return next(at for at, ranks in enumerate(self.groups) if rank in ranks)

    def agent(self, host: int, rail: int) -> int:
        """The rank that serves a rail on a host."""
        ranks = self.groups[host]
        return ranks[rail % len(ranks)]

    def rail(self, rank: int) -> int:
        """The rail of one rank's own data."""
        return self.groups[self.home(rank)].index(rank)


class HostRun(KernelRun):
    """One kernel in progress on one rank; `between` stages slices of other hosts."""

    def __init__(
        self,
        mesh: TcpMesh,
        launch: Launch,
        staging: Staging,
        *,
        between: Staging,
        hosts: Hosts,
        in_rank_order: bool,
    ) -> None:
        super().__init__(mesh, launch, staging)
        self._between = between
        self._hosts = hosts
        self._in_rank_order = in_rank_order
        self._home = hosts.home(self._me)
        self._near = tuple(rank for rank in hosts.groups[self._home] if rank != self._me)
        self._far = tuple(host for host in range(len(hosts.groups)) if host != self._home)
        self._rails = [rail for rail in range(hosts.rails) if hosts.agent(self._home, rail) == self._me]

    def _kernel(self, kernel: Kernel) -> None:
        by_host = _BY_HOST.get(kernel.kind)
        if by_host is None or (kernel.op is not None and self._is_flat(native(kernel.sample.dtype))):
            super()._kernel(kernel)
        else:
            by_host(self, kernel)

    def _is_flat(self, dtype: np.dtype[np.generic]) -> bool:
        # Whether elements are folded in rank order, regardless of hosts.
        return self._in_rank_order or is_widened(dtype)

    def _is_small(self, flat: Flat) -> bool:
        return flat.size * flat.dtype.itemsize <= WHOLE_UP_TO_NBYTES

    def _fold(self, op: ReduceOp, own: Array, parts: list[Array], out: Array) -> None:
        if self._is_flat(out.dtype):
            super()._fold(op, own, parts, out)
            return
        rows = {self._me: own, **dict(zip(self._others, parts, strict=True))}
        by_host = []
        for ranks in self._hosts.groups:
            alone = len(ranks) == 1
            folded = rows[ranks[0]] if alone else np.empty_like(out)
            if not alone:
                fold(_summed(op), [rows[rank] for rank in ranks], folded)
            by_host.append(folded)
        mine = by_host.pop(self._home)
        self._fold_hosts(op, by_host, mine, out)

    def _fold_inside(self, op: ReduceOp, own: Array, parts: Sequence[Array], out: Array) -> None:
        fold_with(_summed(op), parts, self._hosts.groups[self._home].index(self._me), own, out)

    def _fold_hosts(self, op: ReduceOp, parts: Sequence[Array], own: Array, out: Array) -> None:
        fold_with(_summed(op), parts, self._home, own, out)
        finish(op, out.view(out.real.dtype), len(self._ranks))

    def _stage(
        self, staging: Staging, turn: int, wanted: Sequence[tuple[int, Array]], batch: FrameBatch
    ) -> list[Array]:
        # Stages an array from each of some ranks, like the given arrays.
        slot, at, parts = staging.slot(turn, sum(like.nbytes for _, like in wanted)), 0, []
        for rank, like in wanted:
            part = slot[at : at + like.nbytes].view(like.dtype)
            self._mesh.receive(rank, part, batch)
            parts.append(part)
            at += like.nbytes
        return parts

    def _peers(self, rail: int) -> list[tuple[int, int]]:
        # (host, rank) of the ranks that serve a rail on the other hosts.
        return [(host, self._hosts.agent(host, rail)) for host in self._far]

    # ------------------------------------------------------------------------------------------ reductions

    def _reduce(self, kernel: Kernel) -> None:
        op, takers, src, dst = self._reduction(kernel)
        if self._is_small(src):
            super()._kernel(kernel)
            return
        root = takers[0] if kernel.kind is OpKind.REDUCE else -1
        spans = enumerate(_eased(src.size, CHUNK_NBYTES // src.dtype.itemsize))
        self._go(self._by_rail(op, src, dst, root, turn, lo, hi) for turn, (lo, hi) in spans)

    def _by_rail(self, op: ReduceOp, src: Flat, dst: Flat | None, root: int, turn: int, lo: int, hi: int) -> Steps:
        own, rails = src.read(lo, hi), _cut(slice(0, hi - lo), self._hosts.rails)
        slices = [_cut(rail, len(self._hosts.groups)) for rail in rails]
        out = np.empty_like(own) if dst is None else dst.target(lo, hi)
        yield from self._rails_inside(op, own, rails, out, turn)
        yield from self._slices_between(op, slices, out, turn)
        if root >= 0:
            yield from self._results_to(root, slices, out)
        else:
            yield from self._results_between(slices, out, self._far)
            yield from self._spread_rails(rails, out)
        if dst is not None:
            dst.commit(lo, hi, out)

    def _rails_inside(self, op: ReduceOp, own: Array, rails: Sequence[slice], out: Array, turn: int) -> Steps:
        # Sends each rail to the rank of this host that serves it, which folds it.
        batch = FrameBatch()
        for rail, span in enumerate(rails):
            if rail not in self._rails:
                self._mesh.send(self._hosts.agent(self._home, rail), own[span], batch)
        wanted = [(rank, own[rails[rail]]) for rail in self._rails for rank in self._near]
        parts = self._stage(self._staging, turn, wanted, batch)
        yield batch
        each = len(self._near)
        for at, rail in enumerate(self._rails):
            self._fold_inside(op, own[rails[rail]], parts[at * each : (at + 1) * each], out[rails[rail]])

    def _slices_between(self, op: ReduceOp, slices: _Spans, out: Array, turn: int) -> Steps:
        # Sends each slice of a rail to the rank that serves the rail on the slice's host, which folds it.
        batch, wanted = FrameBatch(), []
        for rail in self._rails:
            for host, rank in self._peers(rail):
                self._mesh.send(rank, out[slices[rail][host]], batch)
                wanted.append((rank, out[slices[rail][self._home]]))
        parts = self._stage(self._between, turn, wanted, batch)
        yield from _patient(batch)
        each = len(self._far)
        for at, rail in enumerate(self._rails):
            own = out[slices[rail][self._home]]
            self._fold_hosts(op, parts[at * each : (at + 1) * each], own, own)

    def _results_between(
        self, slices: _Spans | Mapping[int, Mapping[int, slice]], out: Array, hosts: Collection[int]
    ) -> Steps:
        # Sends the result of each slice from its host to other hosts.
        batch = FrameBatch()
        for rail in self._rails:
            for host, rank in self._peers(rail):
                if host in hosts:
                    self._mesh.send(rank, out[slices[rail][self._home]], batch)
                    self._mesh.receive(rank, out[slices[rail][host]], batch)
        yield from _patient(batch)

    def _results_to(self, root: int, slices: _Spans, out: Array) -> Steps:
        batch = FrameBatch()
        for rail in range(self._hosts.rails):
            for host in range(len(self._hosts.groups)):
                rank, span = self._hosts.agent(host, rail), slices[rail][host]
                if rank == self._me != root:
                    self._mesh.send(root, out[span], batch)
                elif rank != self._me == root:
                    self._mesh.receive(rank, out[span], batch)
        yield from _patient(batch)

    def _spread_rails(self, rails: Sequence[slice], out: Array) -> Steps:
        # Sends each rail to all ranks of this host.
        batch = FrameBatch()
        for rail, span in enumerate(rails):
            if rail not in self._rails:
                self._mesh.receive(self._hosts.agent(self._home, rail), out[span], batch)
                continue
            for rank in self._near:
                self._mesh.send(rank, out[span], batch)
        yield batch

    def _reducescatter(self, kernel: Kernel) -> None:
        src, dst = scattered_reduction(kernel, self._ranks, self._me)
        give, step = dict(zip(self._ranks, src, strict=True)), chunk_size(dst.dtype, len(src))
        if kernel.most * dst.dtype.itemsize * len(src) <= WHOLE_UP_TO_NBYTES:
            super()._reducescatter(kernel)
            return
        spans = enumerate(_eased(kernel.most, step))
        self._go(self._by_piece(reduce_op(kernel), give, dst, turn, lo, hi) for turn, (lo, hi) in spans)

    def _by_piece(self, op: ReduceOp, give: dict[int, Flat], dst: Flat, turn: int, lo: int, hi: int) -> Steps:
        # Sends pieces to the rank of this host that serves their rail, and from it to their own rank.
        read = {rank: flat.read(*clipped(flat, lo, hi)) for rank, flat in give.items()}
        agents = {rank: self._hosts.agent(self._home, self._hosts.rail(rank)) for rank in self._ranks}
        mine, batch = [rank for rank in self._ranks if agents[rank] == self._me], FrameBatch()
        for rank, agent in agents.items():
            if agent != self._me:
                self._mesh.send(agent, read[rank], batch)
        parts = self._stage(self._staging, turn, [(near, read[rank]) for rank in mine for near in self._near], batch)
        yield batch
        folded, each = {rank: np.empty_like(read[rank]) for rank in mine}, len(self._near)
        for at, rank in enumerate(mine):
            self._fold_inside(op, read[rank], parts[at * each : (at + 1) * each], folded[rank])
        batch, own = FrameBatch(), folded.pop(self._me)
        for rank, part in folded.items():
            self._mesh.send(rank, part, batch)
        wanted = [(rank, own) for _, rank in self._peers(self._hosts.rail(self._me))]
        parts = self._stage(self._between, turn, wanted, batch)
        yield from _patient(batch)
        span = clipped(dst, lo, hi)
        out = dst.target(*span)
        self._fold_hosts(op, parts, own, out)
        dst.commit(*span, out)

    # ------------------------------------------------------------------------------------------ movements

    def _allgather(self, kernel: Kernel) -> None:
        give, take = transfers(kernel, self._ranks, self._me)
        own = give[self._me]
        step = chunk_size(own.dtype, len(self._ranks))
        if kernel.most * own.dtype.itemsize <= WHOLE_UP_TO_NBYTES:
            super()._transfer(kernel)
            return
        keep_own(give, take, self._me, step)
        self._go(self._gathered(own, take, lo, hi) for lo, hi in _eased(kernel.most, step))

    def _gathered(self, own: Flat, take: dict[int, Flat], lo: int, hi: int) -> Steps:
        # Sends each piece to one rank of every other host, which forwards it to the others there.
        spans = {rank: clipped(take[rank], lo, hi) for rank in self._ranks if rank != self._me}
        into = {rank: take[rank].target(*span) for rank, span in spans.items()}
        agents = {
            rank: self._hosts.agent(self._home, self._hosts.rail(rank)) for rank in into if rank not in self._near
        }
        part, batch = own.read(*clipped(own, lo, hi)), FrameBatch()
        for rank in (*self._near, *(rank for _, rank in self._peers(self._hosts.rail(self._me)))):
            self._mesh.send(rank, part, batch)
        for rank in into:
            if agents.get(rank, self._me) == self._me:
                self._mesh.receive(rank, into[rank], batch)
        yield from _patient(batch)
        batch = FrameBatch()
        for rank, agent in agents.items():
            if agent != self._me:
                self._mesh.receive(agent, into[rank], batch)
                continue
            for near in self._near:
                self._mesh.send(near, into[rank], batch)
        yield batch
        for rank, out in into.items():
            take[rank].commit(*spans[rank], out)

    def _broadcast(self, kernel: Kernel) -> None:
        root = kernel.peer
        src, dst, whole = movement(kernel, is_root=self._me == root)
        if self._is_small(whole):
            super()._broadcast(kernel)
            return
        if src is not None and dst is not None:
            keep_own({root: src}, {root: dst}, root, chunk_size(src.dtype))
        spans = _eased(whole.size, CHUNK_NBYTES // whole.dtype.itemsize)
        passed = self._sent_from_root if self._me == root else self._passed_on
        self._go(passed(root, whole, lo, hi) for lo, hi in spans)

    def _others_of(self, root: int) -> list[int]:
        home = self._hosts.home(root)
        return [host for host in range(len(self._hosts.groups)) if host != home]

    def _sent_from_root(self, root: int, whole: Flat, lo: int, hi: int) -> Steps:
        own, batch, others = whole.read(lo, hi), FrameBatch(), self._others_of(root)
        for rail, span in enumerate(_cut(slice(0, hi - lo), self._hosts.rails)):
            for host, part in zip(others, _cut(span, len(others)), strict=True):
                self._mesh.send(self._hosts.agent(host, rail), own[part], batch)
            for rank in self._near:
                self._mesh.send(rank, own[span], batch)
        yield from _patient(batch)

    def _passed_on(self, root: int, whole: Flat, lo: int, hi: int) -> Steps:
        # One rank of each host receives a slice of a rail, and forwards it to the rail's ranks on the other hosts.
        out, batch, rails = whole.target(lo, hi), FrameBatch(), _cut(slice(0, hi - lo), self._hosts.rails)
        others = self._others_of(root)
        if self._home not in others:
            for span in rails:
                self._mesh.receive(root, out[span], batch)
            yield batch
            whole.commit(lo, hi, out)
            return
        slices = {rail: dict(zip(others, _cut(rails[rail], len(others)), strict=True)) for rail in self._rails}
        for rail in self._rails:
            self._mesh.receive(root, out[slices[rail][self._home]], batch)
        yield from _patient(batch)
        yield from self._results_between(slices, out, others)
        yield from self._spread_rails(rails, out)
        whole.commit(lo, hi, out)


def _eased(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Cuts like `metered`, but begins and ends with small chunks.

    The link is idle until the first chunk has passed its host, and after the last chunk has left it.
    """
    return metered(size, step) if size <= step else metered_at(size, _ramp(size, step))


def _ramp(size: int, step: int) -> list[int]:
    # Chunks grow from both ends towards the middle.
    lo, hi, width, first, last = 0, size, max(1, step // LEAST_PART), list[int](), list[int]()
    while hi - lo > 2 * width:
        lo, hi = lo + width, hi - width
        first.append(lo)
        last.append(hi)
        width = min(2 * width, step)
    middle = [(lo + hi) // 2] if hi - lo > width else []
    return [*first, *middle, *reversed(last)]


def _cut(span: slice, count: int) -> list[slice]:
    size = span.stop - span.start
    return [slice(span.start + at * size // count, span.start + (at + 1) * size // count) for at in range(count)]


def _patient(batch: FrameBatch) -> Steps:
    # The links to other hosts carry the next chunk before this one has to arrive.
    yield FrameBatch()
    yield batch


def _summed(op: ReduceOp) -> ReduceOp:
    # An average is divided once, at the end.
    return ReduceOp.SUM if op is ReduceOp.AVG else op


_BY_HOST: dict[OpKind, Callable[[HostRun, Kernel], None]] = {
    OpKind.ALLREDUCE: HostRun._reduce,
    OpKind.REDUCE: HostRun._reduce,
    OpKind.REDUCESCATTER: HostRun._reducescatter,
    OpKind.ALLGATHER: HostRun._allgather,
    OpKind.BROADCAST: HostRun._broadcast,
}
