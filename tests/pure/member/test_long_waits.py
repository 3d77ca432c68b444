"""Calls of members that last: a warning names who has not come, and what it does."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from raycollect.errors import CollectiveTimeoutError
from raycollect.group import watchdog
from raycollect.member import init
from raycollect.member import operations as imperative
from raycollect.member.runtime import this_runtime
from tests.pure.processes import Crew
from tests.support.waiting import stopped


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    made = Crew()
    path = tmp_path_factory.mktemp("rendezvous")
    path.chmod(0o700)
    made.rendezvous = f"file://{path}"
    yield made
    made.close()


@pytest.fixture
def pipes(tmp_path: Path) -> list[Path]:
    """Named pipes, in which a reader waits for a writer."""
    made = [tmp_path / name for name in ("hold", "warned")]
    for path in made:
        os.mkfifo(path)
    return made


class Writing(logging.Handler):
    """Writes each warning into a pipe, and keeps it."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self.path = path
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if len(self.texts) == 1:
            self.path.write_text(self.texts[0])


@contextmanager
def warnings_after(quiet_s: float, path: Path) -> Iterator[list[str]]:
    """What is logged of waits that last longer than this; the first text goes into a pipe as well."""
    handler, before = Writing(path), watchdog.QUIET_S
    logging.getLogger("raycollect").addHandler(handler)
    watchdog.QUIET_S = quiet_s
    for process_group in this_runtime().process_groups.all():
        process_group.watchdog.look_after(quiet_s)  # it may sleep for as long as before
    try:
        yield handler.texts
    finally:
        watchdog.QUIET_S = before
        logging.getLogger("raycollect").removeHandler(handler)


def warned(name: str, rank: int, operation: str, path: Path, quiet_s: float) -> list[str]:
    """Makes a call; gives what is logged meanwhile."""
    with warnings_after(quiet_s, path) as texts:
        called(name, rank, operation)
    return texts


def called(name: str, rank: int, operation: str) -> None:
    x = np.full(3, rank + 1.0)
    if operation == "async":
        imperative.allreduce(x, name, async_op=True).wait()
    elif operation == "send":
        imperative.send(x, 1, name) if rank == 0 else imperative.recv(x, 0, name)
    else:
        imperative.allreduce(x, name)
    if operation != "send":
        assert (x == sum(range(1, init.get_collective_group_size(name) + 1))).all()


def hold(name: str, rank: int, path: Path) -> None:
    path.read_text()


@pytest.mark.parametrize(
    ("operation", "backend"),
    [("allreduce", "shm"), ("allreduce", "tcp"), ("allreduce", "gloo"), ("async", "shm"), ("send", "gloo")],
)
def test_a_members_call_that_lasts_is_warned_of_once(
    crew: Crew, pipes: list[Path], operation: str, backend: str
) -> None:
    """Rank 1 is held. Rank 2 has come; a send is none of its business."""
    group = crew.group(3, backend)
    group.must(called, "allreduce")
    others = [] if operation == "send" else [group.processes[2].start(called, group.name, 2, "allreduce")]
    held = group.processes[1].start(hold, group.name, 1, pipes[0])
    waiting = group.processes[0].start(warned, group.name, 0, operation, pipes[1], 0.3)
    text = pipes[1].read_text()
    pipes[0].write_text("go on")
    held.result(60)
    others.append(group.processes[1].start(called, group.name, 1, "send" if operation == "send" else "allreduce"))
    texts = waiting.result(60)
    for one in others:
        one.result(60)
    op = "send" if operation == "send" else "allreduce"
    assert texts == [text], "once"
    assert text.startswith(
        f"{op} on group {group.name!r}, here rank 0, is still under way after 0.3 s; these ranks have not"
    )
    late, *stack = text.splitlines()[1:]
    assert late.startswith("  - rank 1 (")
    assert " has not begun it, and is in " in late, "the process runs code that is not ours"
    assert late.endswith(" s")
    assert "; awaited for " in late
    assert any(line.endswith(" in hold: path.read_text()") for line in stack)
    assert not any(line.startswith("  - ") for line in stack), "nobody else"
    crew.rest()


def test_a_process_that_is_stopped_gives_no_answer(crew: Crew, pipes: list[Path]) -> None:
    group = crew.group(2, "tcp")
    pid = group.processes[1].process.pid
    assert pid is not None
    with stopped(pid):
        waiting = group.processes[0].start(warned, group.name, 0, "allreduce", pipes[1], 0.1)
        assert "rank 1" in (text := pipes[1].read_text())
        assert " gives no answer: its process is stopped, or " in text
    group.processes[1].start(called, group.name, 1, "allreduce").result(60)
    assert waiting.result(60) == [text]
    crew.rest()


def joined_warned(rendezvous: str, path: Path, quiet_s: float) -> tuple[list[str], BaseException | None]:
    """Joins a group of two as rank 0, alone; gives what is logged meanwhile, and the error."""
    error = None
    with warnings_after(quiet_s, path) as texts:
        try:
            init.init_collective_group(2, 0, "tcp", "lonely", 2_000, rendezvous=rendezvous)
        except CollectiveTimeoutError as exc:
            error = exc
    return texts, error


def test_absent_member_is_reported_as_not_joined(
    crew: Crew, pipes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    [leader] = crew.take(1)
    leader.call(answer_within, 0.1)
    try:
        joining = leader.start(joined_warned, crew.rendezvous, pipes[1], 0.1)
        text = pipes[1].read_text()
        texts, error = joining.result(60)
    finally:
        leader.call(answer_within, watchdog.ANSWER_S)
    assert texts == [text]
    assert text.startswith(
        "join on group 'lonely', here rank 0, is still under way after 0.1 s; these ranks have not arr"
    )
    assert text.splitlines()[1:] == ["  - rank 1 has not joined"]
    assert isinstance(error, CollectiveTimeoutError)
    assert (error.missing, error.reports) == ((1,), ()), "nobody is there to be asked"
    crew.rest()


def answer_within(seconds: float) -> None:
    watchdog.ANSWER_S = seconds
