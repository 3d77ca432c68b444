"""Links that are measured before the first launch: what is found, what it moves, and who does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from raycollect.backends.tcp import probe as _probe
from raycollect.backends.tcp.link import Link
from raycollect.core.model import Launch
from raycollect.core.protocols import Communicator, Probing
from tests.pure.backends.test_abort import body_sum_of_ones
from tests.pure.closing import closing_all
from tests.pure.communicators import ThreadTeam

TURNS = (((1, 1), (2, 2)), ((1, 0), (3, 2)), ((2, 0), (3, 1)))
"""By rank, of three: each pair in a turn of its own."""


@pytest.fixture
def team_of() -> Iterator[Callable[[int], ThreadTeam]]:
    with closing_all(partial(ThreadTeam, "tcp")) as make:
        yield make


def measured(
    communicator: Communicator, turns: tuple[tuple[tuple[int, int], ...], ...]
) -> list[tuple[int, float, float]]:
    assert isinstance(communicator, Probing)
    return communicator.probe(turns[communicator.rank])


def whole_again(communicator: Communicator, launch: Launch) -> bool:
    """An agreement and a sum, as in any other launch."""
    communicator.agree(launch, b"")
    total = body_sum_of_ones(communicator, launch, 1000)
    communicator.end(launch, True)
    return bool((total == communicator.world_size).all())


def test_the_lower_rank_of_each_pair_tells_the_link_and_launches_go_on(team_of) -> None:
    team = team_of(3)
    found = team.must(measured, TURNS)
    assert [[other for other, *_ in links] for links in found] == [[1, 2], [2], []]
    assert all(latency_s > 0 and bandwidth > 0 for links in found for _, latency_s, bandwidth in links)
    for _ in range(2):
        assert all(team.must(whole_again, team.launch()))


def test_a_pair_moves_what_it_says(team_of, monkeypatch) -> None:
    sent, lock, send = [0], threading.Lock(), Link.send

    def counted(link, rank, array, batch) -> None:
        with lock:
            sent[0] += array.nbytes
        send(link, rank, array, batch)

    monkeypatch.setattr(Link, "send", counted)
    team_of(3).must(measured, TURNS)
    once = 3 * 2 * _probe.BURST_NBYTES
    assert once <= sent[0] < _probe.BURSTS * once + 1000


def test_a_link_that_takes_its_time_carries_one_burst(team_of, monkeypatch) -> None:
    monkeypatch.setattr(_probe, "AGAIN_S", 0.0)
    received, bursts = _probe._Pair._received, [0]

    def counted(pair) -> float:
        bursts[0] += pair._link.rank
        return received(pair)

    monkeypatch.setattr(_probe._Pair, "_received", counted)
    team_of(2).must(measured, (((1, 1),), ((1, 0),)))
    assert bursts == [1]


def test_a_rank_that_does_not_come_costs_a_bounded_time_and_its_own_links(team_of, monkeypatch) -> None:
    """Rank 1 measures nothing: who waits for it gives up, and so does who waits for these."""
    monkeypatch.setattr(_probe, "TOTAL_S", 0.2)
    team = team_of(3)
    found = team.must(measured, (TURNS[0], (), TURNS[2]))
    assert found == [[], [], []]
    assert all(team.must(whole_again, team.launch()))


def test_a_link_that_is_too_slow_is_as_slow_as_the_time_for_it(team_of, monkeypatch) -> None:
    """Rank 1 meets rank 0 and answers its pings, and takes no burst."""
    monkeypatch.setattr(_probe, "PAIR_S", 0.2)
    received, gone = _probe._Pair._received, threading.Event()

    def not_here(pair) -> float:
        if pair._link.rank == 1:
            gone.wait(20)
        return received(pair)

    monkeypatch.setattr(_probe._Pair, "_received", not_here)
    team = team_of(2)
    turns = (((1, 1),), ((1, 0),))
    late = team.start(1, measured, turns)
    (found,) = team.must(measured, turns, ranks=(0,))
    gone.set()
    assert late.result(20) == []
    ((other, latency_s, bandwidth),) = found
    assert other == 1
    assert latency_s < 0.2
    assert bandwidth == _probe.BURST_NBYTES / 0.2
    assert all(team.must(whole_again, team.launch()))


def test_a_burst_in_which_the_receiver_had_no_core_does_not_count(team_of, monkeypatch) -> None:
    """Rank 1 is preempted for 0.1 s in the second half of the first burst: alone, it would say 4 MB/s."""
    wait, waits = _probe._Pair._wait, [0]

    def preempted(pair, batch) -> None:
        if pair._link.rank == 1:
            waits[0] += 1
            # It meets, answers the pings, and receives.
            if waits[0] == 1 + 2 * _probe.PINGS + _probe.PIECES:
                time.sleep(0.1)  # the fault itself
        wait(pair, batch)

    monkeypatch.setattr(_probe._Pair, "_wait", preempted)
    (((_, _, bandwidth),), _) = team_of(2).must(measured, (((1, 1),), ((1, 0),)))
    assert bandwidth > 4 * (_probe.BURST_NBYTES / 2) / 0.1


def test_a_communicator_that_is_closed_while_it_measures_ends_it(team_of, monkeypatch) -> None:
    """As by a member that has died meanwhile: the next pair is not begun."""
    measure = _probe._Pair.measure
    team = team_of(3)

    def closed(pair) -> None:
        measure(pair)
        if pair._link.rank == 0:
            team.communicators[0].close()

    monkeypatch.setattr(_probe._Pair, "measure", closed)
    monkeypatch.setattr(_probe, "TOTAL_S", 0.2)
    found = team.must(measured, TURNS)
    assert [other for other, *_ in found[0]] == [1]
