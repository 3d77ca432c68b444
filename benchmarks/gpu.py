"""Checks and times the backend `nccl` on this machine's GPUs, in one run of under eight minutes: a short table last.

    python benchmarks/gpu.py [--quick] [--json FILE] [--limit SECONDS] [--parts NAME ...]

It needs cupy with NCCL, and neither Ray nor pytest: machines with GPUs often reach no package registry.

One rank runs in this process. Several run in processes, one per GPU, or two on one GPU if NCCL takes that. Contenders
take turns, so that whatever else happens hits all alike: a kernel of ours, with its wait; the bare call of
`cupy.cuda.nccl` on the same buffers, with a wait for its event; a copy of as many bytes from device to device. The
copies of staging stand beside cupy's own from and to the host.

Exit codes: 0, all went well; 1, a result is wrong or a part failed; 2, there is nothing to run on; 3, something did not
end, and what is shown is what there was. A goal that is missed is shown, and is no failure.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: what is beside this file is found as `benchmarks`, and not by itself
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(one for one in sys.path if one != str(_here))]

from benchmarks import machine
from benchmarks.gpu_ranks import (
    SMALL_NBYTES,
    TIMEOUT_S,
    WARM_UP,
    body_bandwidth,
    body_check,
    body_overhead,
    body_staging,
)
from benchmarks.report import size as told
from raycollect.core.model import OpKind, ReduceOp
from raycollect.planner.wording import columns
from tests.gpu import devices
from tests.gpu.cases import is_refused
from tests.gpu.teams import form
from tests.pure.communicators import Team, Worker
from tests.pure.conformance import KINDS, REDUCTIONS, Case, allowed

LIMIT_S = 470.0
"""When the watchdog ends the run with what it has, by default."""
GRACE_S = 20.0
"""How long a part that has used up its time may take for what it is at."""
MOST_RANKS = 8

GOAL, GOAL_FROM = 0.95, 1 << 20
"""The share of bare NCCL's bandwidth to be reached, and from how many bytes on."""

KB, MB = 1 << 10, 1 << 20
SIZES = (KB, 32 * KB, MB, 8 * MB, 64 * MB, 256 * MB)
QUICK = (KB, MB, 64 * MB)
FAKED = (KB, 4 * KB)

DTYPES = ("float16", "bfloat16", "float32", "float64", "int16", "int32", "int64", "uint8", "bool", "complex64")
FAKED_DTYPES = ("bfloat16", "float32", "int16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that was found out.

    Attributes:
        part: Of which part.
        ranks: How many ranks took part.
        case: What was done.
        times_us: Contender -> the median time of one operation on the slowest rank, in microseconds.
        nbytes: Bytes per rank: the larger side of what a rank gives and takes; 0 where that does not matter.
        said: In words: what is wrong, why it could not run, or a result without numbers.
        ok: Whether it is as it should be; what can't run here is.
    """

    part: str
    ranks: int
    case: str = ""
    times_us: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    said: str = ""
    ok: bool = True


Lines = Callable[[Team, bool], Iterator[Line]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the run.

    Attributes:
        name: What the table calls it.
        ranks: How many ranks.
        budget_s: After how many seconds it stops.
        lines: Does the work with a team, line by line; second, whether in a hurry.
    """

    name: str
    ranks: int
    budget_s: float
    lines: Lines


# ---------------------------------------------------------------------------------------------- the parts


def checked(team: Team, quick: bool) -> Iterator[Line]:
    """Every operation, reduce op, some dtypes, with and without gaps: against float64 where they are floats."""
    sizes = (105,) if devices.FAKE else (1, 1023) if quick else (1, 1023, 1_000_003)
    for kind, dtype in product(KINDS, FAKED_DTYPES if devices.FAKE else DTYPES):
        sends = kind is OpKind.SEND
        if (sends and team.world_size == 1) or devices.why_not("cupy", dtype):
            continue
        ops = [op for op in ReduceOp if allowed(op, dtype)] if kind in REDUCTIONS else [None]
        last, peer = team.world_size - 1, 0 if sends else -1
        cases = [
            Case(kind=kind, dtype=dtype, size=size, op=op, root=last, peer=peer, layout=how, inplace=own)
            for size, op, how, own in product(sizes, ops, ("plain", "every other"), (False, True))
            if not (own and sends)
        ]
        cases = [case for case in cases if not is_refused(case)]
        ranks = (0, last) if sends else team.everyone
        launches = [team.launch(ranks, TIMEOUT_S) for _ in cases]
        wrong = [text for texts in team.must(body_check, launches, cases, ranks=ranks) for text in texts]
        said = f"{len(wrong)} wrong: {wrong[0]}" if wrong else f"{len(cases)} right"
        yield Line(part="checks", ranks=team.world_size, case=f"{kind.value} of {dtype}", said=said, ok=not wrong)


def bandwidth(team: Team, quick: bool) -> Iterator[Line]:
    """Four operations by size, beside NCCL's own calls on the same buffers and a copy."""

    for nbytes in FAKED if devices.FAKE else QUICK if quick else SIZES:
        runs = 4 if devices.FAKE else 200 if nbytes <= MB else 100 if nbytes <= 64 * MB else 30
        found = team.must(body_bandwidth, team.launch(timeout_s=TIMEOUT_S), nbytes, runs)
        for op in found[0]:
            times = slowest([one[op] for one in found])
            yield Line(part="bandwidth", ranks=team.world_size, case=op, times_us=times, nbytes=nbytes)


def overhead(team: Team, quick: bool) -> Iterator[Line]:
    """What one small call costs."""
    runs = 4 if devices.FAKE else 200 if quick else 1000
    launches = [team.launch(timeout_s=TIMEOUT_S) for _ in range(1 + WARM_UP + runs)]
    times = slowest(team.must(body_overhead, launches))
    yield Line(part="overhead", ranks=team.world_size, case="allreduce", times_us=times, nbytes=SMALL_NBYTES)


def staging(team: Team, quick: bool) -> Iterator[Line]:
    """The copies of staging by size, to staging buffers and other memory of the host, beside cupy's own."""
    for nbytes in FAKED if devices.FAKE else QUICK if quick else SIZES:
        found = team.must(body_staging, nbytes, 4 if devices.FAKE else 30)
        for way in found[0]:
            times = slowest([one[way] for one in found])
            yield Line(part="staging", ranks=team.world_size, case=way, times_us=times, nbytes=nbytes)


def slowest(found: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """Contender -> the median of the slowest rank in microseconds, of seconds by rank."""
    return {name: max(statistics.median(one[name]) for one in found) * 1e6 for name in found[0]}


def parts_of(several: int) -> list[Part]:
    """The parts, in order: what tells most goes first."""
    return [
        Part(name="checks", ranks=1, budget_s=50, lines=checked),
        Part(name="bandwidth", ranks=1, budget_s=80, lines=bandwidth),
        Part(name="overhead", ranks=1, budget_s=15, lines=overhead),
        Part(name="staging", ranks=1, budget_s=20, lines=staging),
        Part(name="checks", ranks=several, budget_s=80, lines=checked),
        Part(name="bandwidth", ranks=several, budget_s=110, lines=bandwidth),
        Part(name="overhead", ranks=several, budget_s=15, lines=overhead),
    ]


# ---------------------------------------------------------------------------------------------- the run


class Run:
    """One run: parts one after the other, each in a thread that may be left behind, and what they found.

    Attributes:
        lines: What was found so far.
        hung: Whether something did not end.
    """

    def __init__(self, *, quick: bool, file: Path | None) -> None:
        self.lines: list[Line] = []
        self.hung = False
        self.machine: dict[str, str] = {}
        self._quick, self._file = quick, file
        self._teams: dict[int, Team] = {}
        self._workers: list[Worker] = []
        self._lock = threading.Lock()

    def part(self, part: Part) -> None:
        """Does a part, as far as it goes."""
        if why := devices.why_not_so_many(part.ranks):
            self._add(Line(part=part.name, ranks=part.ranks, said=f"can't run here: {why}"))
            return
        left = threading.Event()
        thread = threading.Thread(target=self._work, args=(part, left), name=part.name, daemon=True)
        thread.start()
        thread.join(part.budget_s + GRACE_S)
        if thread.is_alive():
            left.set()
            self.hung = True
            self._teams.pop(part.ranks, None)
            said = f"did not end within {part.budget_s + GRACE_S:.0f} s, and was left behind"
            self._add(Line(part=part.name, ranks=part.ranks, said=said, ok=False))

    def refuse(self, names: Sequence[str]) -> None:
        """Notes names of no part; the others have run, as time on a GPU is scarce."""
        for name in names:
            self._add(Line(part=name, ranks=0, said="no part has that name", ok=False))

    def _work(self, part: Part, left: threading.Event) -> None:
        until_s = time.monotonic() + part.budget_s
        try:
            for line in part.lines(self._team(part), self._quick):
                if left.is_set():
                    return
                self._add(line)
                if time.monotonic() > until_s:
                    said = f"stopped here: its {part.budget_s:.0f} s were over"
                    self._add(Line(part=part.name, ranks=part.ranks, said=said))
                    return
        except Exception as exc:  # noqa: BLE001 - whatever it is, the next part may work
            traceback.print_exc()
            if not left.is_set():
                self._teams.pop(part.ranks, None)
                said = f"failed: {type(exc).__name__}: {exc}"
                self._add(Line(part=part.name, ranks=part.ranks, said=said, ok=False))

    def _team(self, part: Part) -> Team:
        def workers(count: int) -> list[Worker]:
            made = [Worker() for _ in range(count)]
            self._workers += made
            return made

        if part.ranks not in self._teams:
            self._teams[part.ranks] = form(part.ranks, workers)
        return self._teams[part.ranks]

    def _add(self, line: Line) -> None:
        with self._lock:
            self.lines.append(line)
            self._write()
        print(shown(line), flush=True)

    def _write(self) -> None:
        """Writes all lines so far: a run that is killed leaves what it found."""
        if self._file is not None:
            found = {"machine": self.machine, "lines": [asdict(line) for line in self.lines]}
            fresh = self._file.with_name(self._file.name + ".fresh")
            fresh.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            fresh.replace(self._file)

    def report(self) -> int:
        """Prints the table, and gives the exit code."""
        with self._lock:
            lines = list(self.lines)
        print("\n" + table(self.machine, lines), flush=True)
        return 3 if self.hung else 0 if all(line.ok for line in lines) else 1

    def close(self) -> None:
        """Ends teams and processes."""
        for team in self._teams.values():
            team.close()
        self._teams = {}
        self._kill()

    def give_up(self, limit_s: float) -> None:
        """Ends this process with what it has: code 3."""
        self.hung = True
        self._add(Line(part="watchdog", ranks=0, said=f"the run was ended after {limit_s:.0f} s", ok=False))
        self.leave()

    def leave(self) -> None:
        """Reports, and ends this process whatever its threads are at."""
        code = 3
        with suppress(Exception):
            code = self.report()
        self._kill()
        sys.stdout.flush()
        os._exit(code)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        self._workers = []


# ---------------------------------------------------------------------------------------------- what is shown


def shown(line: Line) -> str:
    """A line as it is shown while the run goes on."""
    ranks = f"{line.ranks} rank{'s' * (line.ranks != 1)}"
    size = told(line.nbytes) if line.nbytes else ""
    times = ", ".join(f"{name} {value:.1f} us" for name, value in line.times_us.items())
    return "  ".join(filter(None, [line.part, ranks, line.case, size, times, line.said]))


def table(described: dict[str, str], lines: Sequence[Line]) -> str:
    """The short table: what the machine is, what was wrong or could not run, then the numbers."""
    rows = [", ".join(f"{name} {value}" for name, value in described.items()), ""]
    for ranks in dict.fromkeys(line.ranks for line in lines if line.part == "checks"):
        mine = [line for line in lines if line.part == "checks" and line.ranks == ranks and line.case]
        wrong = sum(not line.ok for line in mine)
        rows.append(f"checks, {ranks} rank(s): {len(mine) - wrong} of {len(mine)} kinds of operation and dtype right")
    rows += [shown(line) for line in lines if not line.ok or not (line.times_us or line.case)]
    speeds = [line for line in lines if line.part == "bandwidth" and line.times_us]
    if speeds:
        heads = ("operation", "ranks", "size", "ours GB/s", "NCCL GB/s", "of NCCL", "copy GB/s", "of a copy")
        rows += ["", *columns([heads, *map(_speed, speeds)], heads[1:]), "", _verdict(speeds)]
    for line in lines:
        if line.part in ("overhead", "staging") and line.times_us:
            rows.append(shown(line))
    return "\n".join(rows)


def _speed(line: Line) -> tuple[str, ...]:
    """Bytes on the larger side by time: an allreduce moves more on the wire, and so does NCCL's."""
    ours, bare, copy = line.times_us.values()
    rates = [f"{line.nbytes / us / 1e3:.2f}" for us in (ours, bare, copy)]
    shares = f"{bare / ours:.0%}", f"{copy / ours:.0%}"
    return line.case, str(line.ranks), told(line.nbytes), rates[0], rates[1], shares[0], rates[2], shares[1]


def _verdict(speeds: Sequence[Line]) -> str:
    large = [list(line.times_us.values()) for line in speeds if line.nbytes >= GOAL_FROM]
    reached = sum(bare / ours >= GOAL for ours, bare, _ in large)
    return f"goal, {GOAL:.0%} of NCCL from {told(GOAL_FROM)} on: reached in {reached} of {len(large)}"


def describe() -> dict[str, str]:
    """The machine, its GPUs, and the versions that matter."""
    cupy = import_module("cupy")
    found = machine.describe() | {"cupy": cupy.__version__, "NCCL": str(devices.nccl_version())}
    if devices.FAKE:
        return found | {"gpu": "a fake: the numbers mean nothing"}
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    name, memory = properties["name"].decode(), f"{properties['totalGlobalMem'] / 2**30:.0f} GiB"
    return found | {"gpu": f"{devices.count()} x {name} {memory}", "driver": str(cupy.cuda.runtime.driverGetVersion())}


# ---------------------------------------------------------------------------------------------- the program


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything; gives the exit code."""
    parser = argparse.ArgumentParser(description="checks and times the backend nccl on this machine's GPUs")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all lines to a file")
    names = sorted({one.name for one in parts_of(2)})
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="ends with what it has by then")
    parser.add_argument(
        "--parts", nargs="+", metavar="NAME", default=names, help=f"runs only these: {', '.join(names)}"
    )
    chosen = parser.parse_args(arguments)
    with _gpus():
        if why := devices.why_none():
            print(why)
            return 2
        return _run(Run(quick=chosen.quick, file=chosen.json), chosen.limit, chosen.parts)


def _run(run: Run, limit_s: float, names: Sequence[str]) -> int:
    watchdog = threading.Timer(limit_s, run.give_up, (limit_s,))
    watchdog.daemon = True
    watchdog.start()
    faulthandler.dump_traceback_later(limit_s + 5, exit=True)  # where a call holds the GIL, the watchdog can't run
    try:
        run.machine = describe()
        count = devices.count()
        parts = parts_of(min(count, MOST_RANKS) if count > 1 else 2)
        for part in parts:
            if part.name in names:
                run.part(part)
        run.refuse(sorted({*names} - {part.name for part in parts}))
        if run.hung:
            run.leave()
        code = run.report()
        run.close()
        return code
    finally:
        watchdog.cancel()
        faulthandler.cancel_dump_traceback_later()


def _gpus() -> AbstractContextManager[Any]:
    """The machine's; the fake's, where `RAYCOLLECT_FAKE_GPU` asks for it."""
    if not devices.FAKE:
        return nullcontext()
    fake = import_module("tests.fake_cupy")
    chosen: AbstractContextManager[Any] = fake.installed(devices.FAKE_DEVICES, nccl_version=devices.FAKE_NCCL)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
