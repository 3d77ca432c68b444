"""Collectives in which something goes wrong: `ray.util.collective` over gloo, and the same calls by raycollect.

The calls are those that both libraries have inside of actors, with the same time limit. Each case has actors of its
own, which have already reduced once. `python -m benchmarks.suites.faults` also writes the outcomes into
`tests/faults/results.md`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from benchmarks.report import Outcome, Record
from benchmarks.suite import Choice, Table

FAULTS = Table("faults", "what becomes of the ranks; rank 1 is at fault")
TABLES = (FAULTS,)
NEEDS_RAY = True

LIBRARIES = {"ray.util.collective": "gloo", "raycollect": "auto"}
LIMIT_S, TIMEOUT_S, START_S = 40.0, 10.0, 60.0  # of the test, of the group (`gloo_timeout`), of the start
AT_ONCE = 3  # cases at once: most of them wait
LARGE = 16_000_000  # elements of float32 that move long enough to be killed meanwhile
LINE_LENGTH = 180

_PATH = re.compile(r"(?<=\[)/\S*/(?=[^/\]]+\])")  # the folder of a source file
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Act:
    """The call of one rank, or ``"nothing"``; the rank may die ``"before"`` the call, or ``"in"`` it."""

    operation: str
    size: int = 4
    dtype: str = "float32"
    dies: str = ""
    options: dict[str, Any] = field(default_factory=dict)


SUM, FROM_0 = Act("allreduce"), Act("broadcast", options={"src_rank": 0})
CASES: dict[str, tuple[Act, ...]] = {
    "killed before an allreduce": (SUM, Act("allreduce", dies="before"), SUM),
    "killed in an allreduce of 64 MB": (
        Act("allreduce", LARGE),
        Act("allreduce", LARGE, dies="in"),
        Act("allreduce", LARGE),
    ),
    "allreduce of 4 against 8 elements": (SUM, Act("allreduce", 8)),
    "broadcast of 4 to 8 elements": (FROM_0, Act("broadcast", 8, options={"src_rank": 0})),
    "float32 against int32": (SUM, Act("allreduce", dtype="int32")),
    "SUM against MAX": (SUM, Act("allreduce", options={"op": "MAX"})),
    "broadcast from rank 0 against from rank 1": (FROM_0, Act("broadcast", options={"src_rank": 1})),
    "allreduce against broadcast": (SUM, FROM_0),
    "send of 4, recv of 8 elements": (
        Act("send", options={"dst_rank": 1}),
        Act("recv", 8, options={"src_rank": 0}),
    ),
    "a rank never comes to the allreduce": (SUM, Act("nothing")),
}


class Rank:
    """One rank, in a process of its own."""

    def __init__(self, library: str, rank: int) -> None:
        self.library, self.types = import_module(library), import_module(f"{library}.types")
        self.backend, self.rank = LIBRARIES[library], rank

    def join(self, ranks: int, group: str) -> None:
        """Joins the group, and reduces once."""
        limit_ms = int(1000 * TIMEOUT_S)
        self.library.init_collective_group(ranks, self.rank, self.backend, group, gloo_timeout=limit_ms)
        self.reduce(ranks, group)

    def reduce(self, ranks: int, group: str) -> None:
        """Reduces, and checks the sum."""
        array = np.full(4, self.rank + 1.0, np.float32)
        self.library.allreduce(array, group)
        assert (array == ranks * (ranks + 1) / 2).all()

    def act(self, act: Act, ranks: int, group: str) -> tuple[str, float]:
        """Makes the call; returns the error or the array's values, and the seconds that it took."""
        if act.dies == "before":
            os._exit(1)
        if act.size == LARGE:
            self.reduce(ranks, group)  # all ranks are here now
        if act.dies == "in":
            threading.Timer(0.01, os._exit, (1,)).start()
        array, options = np.full(act.size, self.rank + 1, act.dtype), dict(act.options)
        if "op" in options:
            options["op"] = getattr(self.types.ReduceOp, options["op"])
        start_s = time.monotonic()
        try:
            getattr(self.library, act.operation)(array, group_name=group, **options)
        except Exception as exc:  # noqa: BLE001 - any
            lines = [*str(exc).splitlines(), ""]
            text = f"{lines[0]} {lines[1].strip(' -')}" if lines[0].endswith(":") else lines[0]
            return f"{type(exc).__name__}: {text}", time.monotonic() - start_s
        return f"**no error**, the array is {' '.join(f'{value:g}' for value in array[:8])}", 0.0


def outcome_of(library: str, case: str) -> Outcome:
    """Tries a case with a library."""
    acts, group = CASES[case], f"fault {next(_numbers)}"
    remote = ray.remote(num_cpus=0)(Rank)
    actors = [remote.remote(library, rank) for rank in range(len(acts))]
    try:
        ray.get([actor.join.remote(len(acts), group) for actor in actors], timeout=START_S)
        at_work = {rank: act for rank, act in enumerate(acts) if act.operation != "nothing"}
        dying = {rank: actors[rank].act.remote(act, len(acts), group) for rank, act in at_work.items() if act.dies}
        if any(act.dies == "before" for act in acts):
            ray.wait(list(dying.values()), timeout=LIMIT_S)
        start_s = time.monotonic()
        refs = {rank: actors[rank].act.remote(act, len(acts), group) for rank, act in at_work.items() if not act.dies}
        with ThreadPoolExecutor(len(refs)) as threads:
            said = threads.map(lambda ref: _fate(ref, start_s), refs.values())
        texts = tuple(f"rank {rank}: {text}" for rank, text in zip(refs, said, strict=True))
        return Outcome(suite=FAULTS.name, case=case, contender=library, said=texts)
    finally:
        for actor in actors:
            ray.kill(actor)


def _fate(ref: Any, start_s: float) -> str:
    try:
        text, seconds = ray.get(ref, timeout=max(start_s + LIMIT_S - time.monotonic(), 0.1))
    except GetTimeoutError:
        return f"still waits after {LIMIT_S:g} s"
    except RayActorError:
        return f"its process dies after {time.monotonic() - start_s:.2f} s"
    plain = _PATH.sub("", text).replace("|", "/").replace("`", "'")
    plain = plain if len(plain) <= LINE_LENGTH else plain[: LINE_LENGTH - 1] + "…"
    return f"`{plain}` after {seconds:.2f} s" if seconds else plain


def measure(choice: Choice) -> Iterator[Record]:
    """Tries all cases with both libraries, some at once."""
    cases = list(CASES)[:3] if choice.quick else list(CASES)
    jobs = [(library, case) for case in cases for library in LIBRARIES]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield from threads.map(lambda job: outcome_of(*job), jobs)


def main() -> None:
    """Tries all cases, and writes the section of the page."""
    from benchmarks import machine
    from tests.faults.report import write_section

    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    outcomes = {(each.case, each.contender): each for each in measure(Choice()) if isinstance(each, Outcome)}
    ray.shutdown()
    versions = machine.describe()
    named = ", ".join(
        f"{name} {versions[name]}" for name in ("ray", "torch", "numpy", "raycollect") if name in versions
    )
    lines = [
        f"Actors on one machine of {versions['cores']} cores; {named}. Each group was given a limit of {TIMEOUT_S:g} s",
        f"as `gloo_timeout`; a rank that waited for {LIMIT_S:g} s was given up. Rank 1 is at fault.",
        "",
        "| what is wrong | `ray.util.collective`, gloo | `raycollect` |",
        "|---|---|---|",
        *(
            f"| {case} | {' | '.join('<br>'.join(outcomes[case, library].said) for library in LIBRARIES)} |"
            for case in CASES
        ),
    ]
    write_section("peers", "\n".join(lines))


if __name__ == "__main__":
    main()
