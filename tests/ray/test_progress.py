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
from tests.support.actors import Worker
from tests.support.waiting import wait_until

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
