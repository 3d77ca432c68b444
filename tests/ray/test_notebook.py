"""A session in a notebook: what values show of themselves, `await` in a cell, and the key that interrupts one.

A cell is run as ipykernel runs it: in a loop that runs all the time, and awaited there if it awaits.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import signal
import time

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.captured import step as captured
from raycollect.captured.step import SHOWN_S
from raycollect.driver import group as declared
from raycollect.driver.step_runs import RunTracker
from tests.pure.driver.shown_html import read
from tests.support.actors import Gate, Worker, block
from tests.support.steps import Learner
from tests.support.waiting import interrupt_in, stopped, wait_until

SOON_S = SHOWN_S + 3
"""How long showing something may take here, where a machine is shared with other tests, in seconds."""


def shown(value):
    """The text of what a notebook shows of a value, and the HTML; it comes soon."""
    began_s = time.monotonic()
    fragment = value._repr_html_()
    assert time.monotonic() - began_s < SOON_S
    assert "can't be shown" not in fragment
    return read(fragment), fragment


def refs_of(workers):
    return [worker.get_buffer.remote() for worker in workers]


@pytest.fixture
def patient(monkeypatch):
    """Who is shown may take longer to answer than it may for a person: the machine is shared with other tests."""
    for module in (captured, declared):
        monkeypatch.setattr(module, "SHOWN_S", SOON_S - SHOWN_S)


@pytest.fixture
def workers(actors):
    return actors(Worker, 2)


@pytest.fixture
def group(workers):
    return col.declare_collective_group(workers)


@pytest.fixture
def held(actors, workers, group):
    """A work that waits for rank 1, which is in a method until the gate opens."""
    (gate,) = actors(Gate, 1, max_concurrency=8)
    refs = refs_of(workers)
    blocked = block(workers[1], gate)
    work = col.allreduce_refs(refs, async_op=True)
    yield work, gate
    ray.get([gate.open.remote(), blocked])
    assert wait_until(work.done)


# ---------------------------------------------------------------------------------------------- groups


def test_a_group_is_shown_by_its_ranks(patient, group):
    told, _ = shown(group)
    for member in group.status().members:
        assert member.actor in told
        assert str(member.pid) in told
        assert f"{member.host} (node {member.node_id[:6]})" in told
        assert member.device == "CPU"
    for expected in ("group 'default': 2 ranks, alive", "chosen, as 2 ranks are on one machine", "nothing"):
        assert expected in told
    assert "epoch" not in told
    group.destroy()
    told, _ = shown(group)
    assert "2 ranks, destroyed" in told


def test_a_member_that_is_stopped_holds_up_no_cell(group):
    pid = group.status().members[1].pid
    with stopped(pid):
        told, _ = shown(group)
        assert "no answer" in told
        assert "alive" in told
    assert wait_until(lambda: "no answer" not in shown(group)[0])


@pytest.fixture
def learners(actors):
    return actors(Learner, 2)


@pytest.fixture
def digits(learners):
    return col.declare_collective_group(learners)


# ---------------------------------------------------------------------------------------------- cells


def run_cells(*cells, names):
    """Runs cells one after the other in a loop that runs; gives the value of the last one, an expression."""

    async def session():
        value = None
        for cell in cells:
            code = compile(cell, "<cell>", "single" if "\n" in cell else "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            value = eval(code, names)
            if inspect.isawaitable(value):
                value = await value
        return value

    return asyncio.run(session())


@pytest.mark.parametrize("made", ["before", "there"])
def test_await_in_a_cell_gives_the_refs(group, workers, made):
    refs = refs_of(workers)
    names = {"col": col, "refs": refs, "work": col.allreduce_refs(refs, async_op=True)}
    cell = "await work" if made == "before" else "await col.allreduce_refs(refs, async_op=True)"
    assert run_cells(cell, names=names) == refs
    count = 2 if made == "before" else 4
    np.testing.assert_array_equal(col.get(refs[0]), np.full(10, count))


def interrupted_cell(work):
    """Awaits a work in a task that SIGINT cancels, as ipykernel has it; the key is hit when it waits."""

    async def session():
        cell = asyncio.ensure_future(_awaited(work))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, cell.cancel)
        try:
            await asyncio.sleep(0)  # now it waits
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(asyncio.CancelledError):
                await cell
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    asyncio.run(session())


async def _awaited(work):
    return await work


@pytest.fixture
def ctrl_c():
    """SIGINT as in a terminal, after the loop has given it back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_an_await_ends_the_await_alone(patient, ctrl_c, held, group, workers):
    work, gate = held
    interrupted_cell(work)
    assert not work.done()
    assert "under way" in shown(work)[0]
    ray.get(gate.open.remote())
    assert work.wait(30) == work.refs
    assert "no answer" not in shown(group)[0]
    more = col.allreduce_refs(work.refs, async_op=True)  # the loop of the first await is closed by now
    assert asyncio.run(_awaited(more)) == work.refs
    np.testing.assert_array_equal(col.get(work.refs[0]), np.full(10, 4))


def test_a_work_that_outlives_the_loop_of_its_await_is_cancelled_as_any(ctrl_c, held):
    work, _ = held
    interrupted_cell(work)
    assert work.cancel()
    with pytest.raises(errors.PlanAbortedError):
        work.wait()
    assert "PlanAbortedError" in shown(work)[0]


def test_ctrl_c_while_a_captured_step_runs_leaves_it_as_it_is(ctrl_c, actors, gate, digits, learners):
    """The run that was waited for goes on, and the next one comes after it."""
    with col.capture() as step:
        step.returns([step.call(one.note) for one in learners])
    assert step.run() == [1, 1]
    blocked = block(learners[1], gate)
    assert wait_until(lambda: "Buffers.call (" in digits.status().members[1].doing)
    thread = interrupt_in(RunTracker.wait)  # as Ctrl-C does
    with pytest.raises(KeyboardInterrupt):
        step.run()
    thread.join()
    assert "2 begun, some under way" in shown(step)[0]
    ray.get([gate.open.remote(), blocked])
    assert step.run() == [3, 3]
    assert "3 begun" in shown(step)[0]
    step.close()
