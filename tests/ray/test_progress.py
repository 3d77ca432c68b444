"""How far real participants are: while a kernel is held, of a rank that is stopped, of runs, and in bars."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import ray
import tqdm.auto

import raycollect as col
from raycollect.driver import progress as gauge
from tests.ray.workers import Worker
from tests.waiting import stopped, wait_until

MB = 1 << 20


@pytest.fixture
def workers(actors):
    return actors(Worker, 2)


class Gate:
    """Lets a test decide when somebody in another process goes on: a pipe, of which each reads a byte."""

    def __init__(self, path):
        os.mkfifo(path)
        self.path = str(path)
        self.end = os.open(path, os.O_RDWR)

    def open(self):
        os.write(self.end, b"x")


@pytest.fixture
def gate(tmp_path):
    found = Gate(tmp_path / "gate")
    yield found
    os.close(found.end)


def wait_at(self, path):
    with Path(path).open("rb") as pipe:
        pipe.read(1)


def hold_fold(self, path, nth):
    """Lets the nth fold of this process wait at a gate; that one alone."""
    import itertools

    from raycollect.backends.shm import in_place

    fold, numbers = in_place.fold, itertools.count(1)

    def held(op, parts, out):
        if next(numbers) == nth:
            in_place.fold = fold
            with Path(path).open("rb") as pipe:
                pipe.read(1)
        fold(op, parts, out)

    in_place.fold = held


def made(workers, nbytes=8 * MB):
    return [one.make.remote(lambda self, size: col.ones(size, np.float32), nbytes // 4) for one in workers]


def far(work):
    """(bytes done, bytes) by rank, in MiB."""
    return [(one.done_nbytes / MB, one.total_nbytes / MB) for one in work.progress(20).ranks]


def test_allreduce_progress_sums_its_ranks(workers, gate, capsys):
    col.declare_collective_group(workers)
    refs = made(workers)
    ray.get(
        workers[1].call.remote(hold_fold, gate.path, 10)
    )  # of 16 blocks, of which four are folded between two looks
    work = col.allreduce_refs(refs, async_op=True)
    assert wait_until(lambda: far(work) == [(7.5, 8.0), (3.5, 8.0)])
    shown = work._repr_html_()
    assert "11 MiB of 16 MiB (69 %)" in shown
    assert f'<progress max="{16 * MB}" value="{11 * MB}"' in shown
    assert str(work.progress().laggard) == "rank 1 is at 44 %"
    gate.open()
    assert work.wait(progress=True) == refs
    found = work.progress()
    assert (found.done_nbytes, found.total_nbytes, found.fraction, found.left_s) == (16 * MB, 16 * MB, 1.0, 0.0)
    assert found.rate > 0
    assert capsys.readouterr().out == ""


def test_stopped_rank_counts_at_its_last_position(workers, gate, monkeypatch, capsys):
    group = col.declare_collective_group(workers)
    refs = made(workers)
    pid = group.status().members[1].pid
    ray.get(workers[1].call.remote(hold_fold, gate.path, 10))
    work = col.allreduce_refs(refs, async_op=True)
    assert wait_until(lambda: far(work) == [(7.5, 8.0), (3.5, 8.0)])
    monkeypatch.setattr(gauge, "SILENT_S", 0.0)
    with stopped(pid):
        found = work.progress(0.05)
        assert (found.done_nbytes, str(found.laggard)) == (11 * MB, "rank 1 gives no answer")
        with pytest.raises(col.errors.CollectiveTimeoutError), col.progress(after_s=0.0):
            work.wait(2)  # in which rank 0 answers, and the bar is drawn
    gate.open()
    work.wait()
    out, err = capsys.readouterr()
    assert "rank 1 gives no answer" in err
    assert out == ""


def test_progress_block_shows_bars_that_end_full(workers, gate, capsys):
    """An operation, a batch, and a run; the bars of a test are drawn as soon as there is something to say."""
    col.declare_collective_group(workers, backend="shm")
    refs = made(workers)
    with col.capture() as step:
        col.allreduce_refs(refs)
        col.broadcast_refs(refs)

    def shown(run):
        capsys.readouterr()
        ray.get(workers[1].call.remote(hold_fold, gate.path, 10))
        with col.progress(after_s=0.0), opened_by_the_bar(gate.open):
            run()
        return capsys.readouterr()

    def in_batch():
        with col.batch():
            for _ in range(3):
                col.allreduce_refs(refs)

    for name, run in (("allreduce", lambda: col.allreduce_refs(refs)), ("batch", in_batch), ("captured", step.run)):
        out, err = shown(run)
        last = err.replace("\r", "\n").strip().splitlines()[-1]
        assert last.startswith(name)
        assert "100%" in last
        assert "B/s" in last
        assert out == ""
    run = step.run(async_op=True)
    run.wait()
    run.progress()
    step.close()


class opened_by_the_bar:
    """A block in which a gate is opened as soon as a bar has shown some bytes."""

    def __init__(self, opens):
        self.opens = opens

    def __enter__(self):
        self.refresh = tqdm.auto.tqdm.refresh

        def refresh(bar, *args, **kwargs):
            found = self.refresh(bar, *args, **kwargs)
            if bar.n and self.opens is not None:
                self.opens()
                self.opens = None
            return found

        tqdm.auto.tqdm.refresh = refresh

    def __exit__(self, *exc):
        del tqdm.auto.tqdm.refresh
        assert self.opens is None, "no bar has shown anything"


def test_progress_names_ranks_not_begun_and_ctrl_c_cancels_the_operation(workers, gate, monkeypatch, capsys):
    col.declare_collective_group(workers)
    refs = made(workers)
    ray.wait(refs, num_returns=2)
    blocked = workers[1].call.remote(wait_at, gate.path)
    work = col.allreduce_refs(refs, async_op=True)
    assert wait_until(lambda: str(work.progress().laggard) == "rank 1 has not begun")
    assert str(work.progress().ranks[0]) == "rank 0 is in the consistency check"
    assert work.progress().total_nbytes == 0
    refresh = tqdm.auto.tqdm.refresh

    def interrupted(bar, *args, **kwargs):
        monkeypatch.undo()
        refresh(bar)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(tqdm.auto.tqdm, "refresh", interrupted)
    with pytest.raises(KeyboardInterrupt), col.progress(after_s=0.0):
        col.allreduce_refs(refs)
    gate.open()
    ray.get(blocked)
    assert "allreduce" in capsys.readouterr().err
    work.wait()
    assert col.allreduce_refs(refs) == refs
    assert ray.get(workers[0].call.remote(lambda self: 1)) == 1


def test_a_step_is_measured_over_all_of_its_plans(workers, gate):
    col.declare_collective_group(workers)
    refs = made(workers)
    with col.capture() as step:
        col.allreduce_refs(refs)
        for one in workers:
            step.call(one.get_buffer)
        col.allreduce_refs(refs)
    for _ in range(3):
        step.run()
    ray.get(workers[1].call.remote(hold_fold, gate.path, 10))
    run = step.run(async_op=True)
    assert wait_until(lambda: far(run) == [(7.5, 16.0), (3.5, 16.0)])
    gate.open()
    run.wait(progress=True)
    assert run.progress().fraction == 1.0
    step.close()
