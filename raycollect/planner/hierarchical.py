"""Collectives in two levels: inside each host, and between one rank of each host.

Links between hosts are slow, and the ranks of a host share theirs. So the bytes of a host cross it once, by its leader
(the host's lowest rank), and not once per rank (Karonis et al.: "Exploiting hierarchy in parallel computer networks to
optimize collective operation performance", 2000). Level 1 has the groups of the hosts, level 2 that of the leaders.

An allreduce that has to give the bits of the left fold in rank order can't fold the hosts side by side:
``(a + b) + (c + d)`` is not ``((a + b) + c) + d``. It goes through the hosts one after the other: a leader folds the
result of the hosts before it with its own tensor, then the ranks of its host fold theirs onto that. This is slower the
more hosts there are, but still cheaper than sending all bytes over the shared links where hosts hold many ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raycollect.core.model import OpKind, ReduceOp
from raycollect.planner.cost import FREE, Cost, beside, launch, priced
from raycollect.planner.ir import Part
from raycollect.planner.membership import Membership
from raycollect.planner.setting import Setting, Written
from raycollect.planner.template import Step

_HOST, _LEADERS = 1, 2


def is_possible(setting: Setting) -> bool:
    """Whether there are two levels, and the operation can be done in them."""
    layout = setting.layout
    if not (setting.hosts and setting.leaders and layout.host_count > 1 and layout.largest > 1):
        return False
    if setting.backend == "tcp" and not setting.bitwise:
        return False  # its own kernels go host by host, and what goes on inside happens meanwhile
    if setting.kind is OpKind.BROADCAST:
        return True
    if setting.kind is not OpKind.ALLREDUCE or setting.op is ReduceOp.AVG:  # the average of averages is another one
        return False
    return layout.contiguous or not setting.bitwise


def levels(membership: Membership) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]:
    """The inner groups, as `Part.levels`."""
    found = tuple((inner.spec.group_id, membership.ranks_of(inner)) for inner in membership.inner)
    return found[:-1], found[-1:]


def cost(setting: Setting) -> Cost:
    """The cost by both levels."""
    if setting.kind is OpKind.BROADCAST:
        root = FREE if setting.root_leads else _inside(setting, OpKind.BROADCAST, setting.layout.root_size)
        first = Cost(line=root.line)  # the root's host is counted with the others
        return first + _over_leaders(setting, OpKind.BROADCAST) + _everywhere(setting, OpKind.BROADCAST)
    side_by_side = _everywhere(setting, OpKind.REDUCE) + _over_leaders(setting, OpKind.ALLREDUCE)
    folded = _chained(setting) if setting.bitwise else side_by_side
    return folded + _everywhere(setting, OpKind.BROADCAST)


def _chained(setting: Setting) -> Cost:
    folds = FREE
    for ranks, hosts in setting.layout.sizes:
        folds += _inside(setting, OpKind.REDUCE, ranks).times(hosts)
    for pair in map(setting.layout.pair, setting.layout.chain):
        folds += launch(setting.leaders, pair) + priced(OpKind.REDUCE, setting.leaders, pair)
    return folds + _over_leaders(setting, OpKind.BROADCAST)


def _over_leaders(setting: Setting, kind: OpKind) -> Cost:
    leaders = setting.layout.apart()
    return launch(setting.leaders, leaders) + priced(kind, setting.leaders, leaders)


def _everywhere(setting: Setting, kind: OpKind) -> Cost:
    """On all hosts at the same time."""
    return beside((_inside(setting, kind, ranks), hosts) for ranks, hosts in setting.layout.sizes)


def _inside(setting: Setting, kind: OpKind, ranks: int) -> Cost:
    if ranks == 1:
        return FREE
    host = setting.layout.one_host(ranks)
    return launch(setting.hosts, host) + priced(kind, setting.hosts, host)


class _StepWriter:
    """Collects the steps of all ranks, launch by launch; `at` is the launch that is being written."""

    def __init__(self, part: Part, membership: Membership) -> None:
        self.steps: dict[int, list[Step]] = {rank: [] for rank in part.ranks}
        self.hosts = membership.topology.groups()
        self.at = 0
        self._op = part.request.op
        templates = {rank: part.template(rank) for rank in part.ranks}
        self._result = {rank: template.result for rank, template in templates.items()}
        self._now = {rank: template.src for rank, template in templates.items()}  # where what it has now is

    def inside(self, host: int, kind: OpKind, root: int = 0) -> None:
        if len(self.hosts[host]) > 1:
            self._kernel(kind, self.hosts[host], range(len(self.hosts[host])), level=_HOST, root=root)

    def over_leaders(self, kind: OpKind, root: int = -1, pair: tuple[int, ...] = ()) -> None:
        leaders = [ranks[0] for ranks in self.hosts]
        self._kernel(kind, leaders, pair or range(len(leaders)), level=_LEADERS, root=root, pair=pair)

    def _kernel(
        self,
        kind: OpKind,
        ranks: Sequence[int],
        places: Iterable[int],
        *,
        level: int,
        root: int,
        pair: tuple[int, ...] = (),
    ) -> None:
        moves = kind is OpKind.BROADCAST
        for place in places:
            rank, is_root = ranks[place], place == root
            gives, takes = (is_root, not is_root) if moves else (True, is_root or root < 0)
            step = Step(
                kind=kind,
                src=self._now[rank] if gives else -1,
                dst=self._result[rank] if takes else -1,
                op=None if moves else self._op,
                peer=root,
                level=level,
                ranks=pair,
                at=self.at,
            )
            self.steps[rank].append(step)
            if takes:
                self._now[rank] = self._result[rank]


def write(part: Part, membership: Membership) -> Written:
    """Writes the steps of each rank."""
    writer = _StepWriter(part, membership)
    if part.request.kind is OpKind.BROADCAST:
        _broadcast(writer, part.request.root, membership.topology.hosts[part.request.root])
    elif membership.bitwise:
        _fold_host_by_host(writer)
    else:
        _fold_side_by_side(writer)
    return tuple(tuple(writer.steps[rank]) for rank in part.ranks)


def _broadcast(writer: _StepWriter, root: int, home: int) -> None:
    """From the root to its host, unless it leads it; to the leaders; to their hosts."""
    leads = writer.hosts[home][0] == root
    if not leads:
        writer.inside(home, OpKind.BROADCAST, writer.hosts[home].index(root))
        writer.at += 1
    writer.over_leaders(OpKind.BROADCAST, home)
    writer.at += 1
    for host in range(len(writer.hosts)):
        if host != home or leads:
            writer.inside(host, OpKind.BROADCAST)


def _fold_side_by_side(writer: _StepWriter) -> None:
    for host in range(len(writer.hosts)):
        writer.inside(host, OpKind.REDUCE)
    writer.at += 1
    writer.over_leaders(OpKind.ALLREDUCE)
    _spread(writer)


def _fold_host_by_host(writer: _StepWriter) -> None:
    for host, ranks in enumerate(writer.hosts):
        if host:
            writer.over_leaders(OpKind.REDUCE, host, (host - 1, host))
            writer.at += 1
        if len(ranks) > 1:
            writer.inside(host, OpKind.REDUCE)
            writer.at += 1
    writer.over_leaders(OpKind.BROADCAST, len(writer.hosts) - 1)
    _spread(writer)


def _spread(writer: _StepWriter) -> None:
    writer.at += 1
    for host in range(len(writer.hosts)):
        writer.inside(host, OpKind.BROADCAST)
