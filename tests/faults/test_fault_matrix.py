"""What P3 and P4 promise, fault by fault: nothing hangs, nobody is killed, nothing is silently wrong.

What each fault has to lead to is the table of `matrix`. With ``--reliability=N`` each case is run N times, and the page
tests/faults/results.md says how long it took; add ``-m ""`` for all cases.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from raycollect import errors
from tests.faults.fault_scenes import Seen, run_case
from tests.faults.matrix import DRIVER, GROUP, LIMIT_S, SHORT_S, TABLE, WORLD_SIZE, Case, Row, cases
from tests.faults.report import write_section
from tests.support.actors import Worker


def pytest_generate_tests(metafunc):
    if "turn" in metafunc.fixturenames:
        turns = range(metafunc.config.getoption("--reliability"))
        metafunc.parametrize("turn", turns or [0], ids=str if turns else lambda turn: "once")


@pytest.fixture(scope="module")
def measured(request):
    """Row -> what was seen in each run; written at the end where that is asked for."""
    found = defaultdict(list)
    yield found
    times = request.config.getoption("--reliability")
    if times:
        write_section("matrix", written(found, times))


# ---------------------------------------------------------------------------------------------- what is right


def assert_told(error: BaseException | None, row: Row) -> None:
    """It says what failed, where, and by whom."""
    if row.error is None:
        assert error is None
        return
    assert type(error) in (row.error, row.other), error
    if row.goes_on and type(error) is row.error:
        assert "goes on" in str(error)
    elif isinstance(error, errors.CollectiveTimeoutError):
        assert (error.op, error.group_name, error.missing) == ("allreduce", GROUP, (row.rank,))
        assert f"rank {row.rank} (Buffers(" in error.detail or row.caller == "own call"
    elif isinstance(error, errors.FaultError):
        assert (error.op, error.group_name) == ("allreduce", GROUP)
        assert error.rank in (row.blamed or (row.rank,))
        assert error.actor.startswith("Buffers(") or row.caller == "own call"  # whose members know no names
        assert error.story or row.is_deadly or row.error is not errors.KernelError or row.caller == "call"
    else:
        assert f"rank {row.rank}" in str(error)


def assert_right(row: Row, seen: Seen) -> None:
    """What the row says came of it, and nothing else."""
    assert seen.raised.keys() == ({DRIVER} if DRIVER in seen.raised else set(range(WORLD_SIZE)) - {row.rank})
    for error in seen.raised.values():
        assert_told(error, row)
    assert seen.seconds < LIMIT_S
    assert type(seen.later) is (row.later or type(None))
    assert len(set(seen.pids)) == 1, "a process ended that had no fault"
    assert set(seen.tensors) <= set(row.leaves)
    assert seen.survivors is None, seen.survivors
    if seen.group is None:
        assert row.works
    else:
        assert isinstance(seen.group, errors.GroupBrokenError)
        assert not row.works, seen.group
    assert len(seen.outputs) == (len(seen.tensors) if row.caller == "outputs" else 0)
    assert [error for error in seen.outputs if not isinstance(error, errors.FaultError)] == []


def _marked(case: Case) -> object:
    """Each row is shown on one backend, those of plans on another in each row, and a death in mid-kernel on all."""
    row = case.row
    turn = TABLE.index(row) if row.caller == "plan" else 0
    is_more = case.backend != row.backends[turn % len(row.backends)]
    is_more &= (row.caller, row.phase, row.fault) != ("plan", "in_kernel", "SIGKILL")
    return pytest.param(case, id=str(case), marks=[pytest.mark.full] * is_more)


@pytest.mark.parametrize("case", [_marked(case) for case in cases()])
def test_fault_has_its_tabled_outcome(actors, tmp_path, measured, case: Case, turn):
    seen = run_case(case, actors(Worker, WORLD_SIZE), tmp_path)
    assert_right(case.row, seen)
    measured[case.row].append(seen)


# ---------------------------------------------------------------------------------------------- what is written

_CALLED = {
    "plan": "a collective",
    "outputs": "a collective with outputs",
    "run": "a run of a captured step",
    "call": "a call of the members",
    "own call": "a call in a group of the members' own",
}
_HEAD = ("what happens to one of three", "when", "amid", "backends", "what is raised", "by whom", "median", "worst")
_LAST = ("tensors of the others", "the group", "the others")


def written(measured: dict[Row, list[Seen]], times: int) -> str:
    """The section of the page."""
    lines = ["| " + " | ".join((*_HEAD, *_LAST)) + " |", "|---" * (len(_HEAD) + len(_LAST)) + "|"]
    lines += ["| " + " | ".join(_cells(row, measured[row])) + " |" for row in TABLE if measured[row]]
    count = sum(map(len, measured.values()))
    return f"""
Each of {len(cases())} cases was run {times} times on a shared machine of {os.cpu_count()} cores, on which other
programs ran too (load average at the end: {_load()}); {count} of {len(cases()) * times} runs ended as they have to.
Times are from the fault, as the faulty process tells it, to the typed error on the driver; of the members, to the last
of them. Where a rank stays away, the collective's time limit of {SHORT_S:g} s is part of it. "Goes on": the rank has
ended all that the others need of it, or the library can't be interrupted; the driver's own limit ends its wait, and the
collective ends well once the rank goes on. A tensor that is dirty can't be read until it is overwritten.

{chr(10).join(lines)}
"""


def _load() -> str:
    return Path("/proc/loadavg").read_text(encoding="ascii").split()[0]


def _cells(row: Row, runs: list[Seen]) -> tuple[str, ...]:
    seconds = [seen.seconds for seen in runs]
    raised = f"`{row.error.__name__}`" if row.error else "nothing"
    raised += ": goes on" if row.goes_on else f" or `{row.other.__name__}`" if row.other else ""
    raised += f", then `{row.later.__name__}`" if row.later else ""
    by = "" if row.error is None else "the driver" if DRIVER in runs[0].raised else "all others"
    found = {state for seen in runs for state in seen.tensors}
    return (
        f"{row.fault}{'' if row.rank else ' (the hub)'}",
        row.phase.replace("check", "consistency check").replace("_", " "),
        _CALLED[row.caller],
        ", ".join(row.backends),
        raised,
        by,
        f"{statistics.median(seconds) * 1000:.0f} ms",
        f"{max(seconds) * 1000:.0f} ms",
        " or ".join(state for state in row.leaves if state in found),
        "works on" if row.works else "is broken",
        "live, work on",
    )
