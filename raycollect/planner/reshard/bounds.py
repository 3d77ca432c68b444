"""Counts what a reshard moves, from the halves of its ranks, beside the least that any plan must move between hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raycollect.planner.boxes import volume
from raycollect.planner.report_rows import Moved, MovedLink, MovedRank
from raycollect.planner.reshard.halves import Half
from raycollect.planner.reshard.matching import matched
from raycollect.planner.reshard.request import Reshard


def moved_by(reshard: Reshard, halves: Mapping[int, Half], hosts: Sequence[int]) -> Moved:
    """What the halves move; `hosts` has the host of each rank of the group."""
    links: dict[tuple[int, int], int] = {}
    ranks = []
    for rank, half in halves.items():
        sent, received, own = 0, 0, sum(half.nbytes(one.src) for one in half.copies)
        for number in range(len(half.rounds)):
            there, here = half.messages(number)
            own += there.pop(rank, 0)
            here.pop(rank, None)
            sent += sum(there.values())
            received += sum(here.values())
            for peer, nbytes in there.items():
                links[rank, peer] = links.get((rank, peer), 0) + nbytes
        ranks.append(
            MovedRank(
                rank=rank, nbytes_sent=sent, nbytes_received=received, nbytes_own=own, staging=half.staging_nbytes
            )
        )
    found = tuple(
        MovedLink(giver=giver, taker=taker, nbytes=nbytes, is_between=hosts[giver] != hosts[taker])
        for (giver, taker), nbytes in sorted(links.items())
    )
    return Moved(
        ranks=tuple(ranks),
        links=found,
        rounds=max((len(half.rounds) for half in halves.values()), default=0),
        pieces=sum(len(one.takes) for half in halves.values() for one in half.rounds),
        least_between=least_between(reshard, hosts),
    )


def least_between(reshard: Reshard, hosts: Sequence[int]) -> int:
    """The least bytes that go between hosts: what a host needs and does not hold; -1 where there are partial sums."""
    total = 0
    for form in reshard.forms:
        if form.src.parts > 1:
            return -1
        for box, (holders,), readers in matched(form.src, form.dst).pieces:
            held = {hosts[reshard.src_ranks[rank]] for one in holders for rank in one.ranks}
            needed = {hosts[reshard.dst_ranks[rank]] for one in readers for rank in one.ranks}
            total += len(needed - held) * volume(box) * form.itemsize * form.count
    return total
