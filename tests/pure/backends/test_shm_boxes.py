"""Exchanges of boxes on shm: a rank that has ended uses its staging buffer again while others are slow."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from raycollect.core.boxes import BoxExchange, BoxRound, Give, Take
from raycollect.core.model import Launch
from raycollect.core.protocols import Communicator
from raycollect.pos import tensors
from tests.pure.communicators import ThreadTeam

WAIT_S = 20.0
SIZE = 1000
DTYPE = np.dtype(np.float64)


class Rank:
    """One rank's tensors, and its part of an exchange of two rounds.

    In each round rank 0 gives rank 2 a box. In the first round rank 1 gives rank 0 a box, so that rank 1 ends after
    rank 0 has read the tables.
    """

    def __init__(self, rank: int) -> None:
        self.given = [tensors.zeros(SIZE) for _ in range(2)]
        self.taken = [np.zeros(SIZE) for _ in range(2)]
        self.buffer = tensors.zeros(4096, np.uint8)
        gives: list[Mapping[int, Sequence[Give]]] = [{}, {}]
        takes: list[Sequence[Take]] = [(), ()]
        if rank == 0:
            gives = [{2: [Give(np.empty(SIZE), tensor)]} for tensor in self.given]
            takes[0] = [Take((self.taken[0],), (DTYPE,), (1,))]
        if rank == 1:
            gives[0] = {0: [Give(np.empty(SIZE), self.given[0])]}
        if rank == 2:
            takes = [[Take((tensor,), (DTYPE,), (0,))] for tensor in self.taken]
        rounds = [BoxRound(gives=give, takes=take, passes_on=False) for give, take in zip(gives, takes, strict=True)]
        self.exchange = BoxExchange(rounds=rounds, table=self.buffer)


def test_a_slow_rank_reads_what_it_gets_though_another_rank_has_reused_its_buffer() -> None:
    team = ThreadTeam("shm", 3)
    ranks = [Rank(rank) for rank in team.everyone]
    reused = threading.Event()

    def body(communicator: Communicator, launch: Launch, value: int) -> None:
        rank, mine, ok = communicator.rank, ranks[communicator.rank], False
        for tensor in mine.given:
            tensor[:] = value
        try:
            communicator.show_boxes(launch, mine.exchange)
            communicator.agree(launch, b"")
            if value and rank == 2:
                assert reused.wait(WAIT_S)
            assert communicator.launch_boxes(launch, mine.exchange)
            if value:
                for tensor in [mine.buffer, *mine.given]:
                    tensor[:] = 77
                if rank == 1:
                    reused.set()
            ok = True
        finally:
            communicator.end(launch, ok)

    team.must(body, team.launch(), 0)  # the ranks map each other's memory, for which they meet
    team.must(body, team.launch(), 1)
    for tensor in ranks[2].taken:
        np.testing.assert_array_equal(tensor, np.ones(SIZE))
    team.close()
