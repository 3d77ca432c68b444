"""Collectives on overlapping groups from several threads, with methods in between: what one after the other would give.

The controller, its dispatch and flights, the leases with their ledgers and orders, and the executor are the real ones;
the actors' queues, the connections and the backend are threads of this process. What is compared with is numpy, run in
the order of the plans' numbers, and on each participant in the order of its queue.

Some methods are cancelled, before they begin or too late; some plans have operands whose methods raise or never run.
Such a plan is refused, and changes nothing. `tests/ray/test_random_programs.py` does the same over Ray.

``RAYCOLLECT_TEST_ORDER=20`` does twenty times as much.
"""

from __future__ import annotations

import faulthandler
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from raycollect.errors import MismatchError, TensorLostError
from tests.pure.driver.order_model import MUCH, Fleet
from tests.pure.sites import WAIT_S


class Machine(RuleBasedStateMachine):
    """Any groups, any calls; hypothesis looks for the smallest that go wrong."""

    @initialize(
        count=st.integers(2, 4), groups=st.integers(1, 3), seed=st.integers(0, 2**16),
    )  # fmt: skip
    def begin(self, count: int, groups: int, seed: int) -> None:
        chance = random.Random(seed)
        self.fleet = Fleet(count, [chance.sample(range(count), chance.randint(1, count)) for _ in range(groups)])

    @rule(seed=st.integers(0, 2**16), count=st.integers(1, 6))
    def calls(self, seed: int, count: int) -> None:
        self.fleet.act(random.Random(seed), count)

    @rule(seeds=st.lists(st.integers(0, 2**16), min_size=2, max_size=4), count=st.integers(1, 12))
    def calls_of_threads(self, seeds: list[int], count: int) -> None:
        with ThreadPoolExecutor(len(seeds)) as threads:
            for future in [threads.submit(self.fleet.act, random.Random(seed), count) for seed in seeds]:
                try:
                    future.result(WAIT_S)
                except TimeoutError:
                    faulthandler.dump_traceback()  # of all threads: which of them waits for which
                    raise

    @precondition(lambda self: self.fleet.sent)
    @rule()
    def waits(self) -> None:
        self.fleet.settle()

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            try:
                self.fleet.settle()
            finally:
                self.fleet.close()


@pytest.mark.parametrize(
    "programs", [30, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(4 * 3600)])]
)
def test_calls_of_any_threads_are_serializable(programs: int) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=programs * MUCH,
            stateful_step_count=8,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_hundreds_of_calls_from_three_threads(seed: int) -> None:
    """Three groups of four participants, of which none has all, and each shares two with each other."""
    fleet = Fleet(4, [(0, 1, 2), (3, 2, 1), (2, 0, 3)])
    with ThreadPoolExecutor(3) as threads:
        acts = [threads.submit(fleet.act, random.Random(100 * seed + one), 200 * MUCH) for one in range(3)]
        for act in acts:
            act.result(WAIT_S * MUCH)
    fleet.settle()
    assert len(fleet.sent) > 300 * MUCH
    assert any(one.is_refused for one in fleet.sent)
    assert any(len(one.calls) > 1 for one in fleet.sent)
    assert {one.error for one in fleet.sent} == {MismatchError, TensorLostError, type(None)}
    fleet.close()
