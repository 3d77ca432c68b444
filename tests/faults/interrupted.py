"""A driver whose calls are interrupted by real signals at random times: `python -m tests.faults.interrupted --help`.

SIGINT comes from another thread, and raises KeyboardInterrupt. SIGALRM comes from a timer, and raises a TimeoutError,
as in programs that limit a call by `signal.setitimer`. After each call the driver looks at all tensors, and at what is
left: a call that returned has done all of its work, one that was interrupted has the signal's own exception, and what
was begun has ended everywhere. Its last line of output is what it has counted, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

import raycollect as col
from raycollect.driver.controller import Controller
from tests.support.waiting import wait_until

NAME, ELEMENTS = "interrupted", 33
BEFORE = 1, 2, 4
TOTAL = sum(BEFORE)
MOST_FAILURES = 5


class Alarm(TimeoutError):
    """What the handler of SIGALRM raises."""


class Worker(col.CollectiveParticipant):
    """Holds three tensors."""

    def __init__(self) -> None:
        self.buffers = [np.zeros(ELEMENTS, np.int64) for _ in range(3)]

    def buffer(self, at: int) -> Any:
        return self.buffers[at]

    def fill(self, value: int) -> None:
        for one in self.buffers:
            one[...] = value
            col.mark_written(one)

    @col.by_value
    def read(self) -> list[list[int]]:
        return [sorted(set(one.tolist())) for one in self.buffers]


class Signals:
    """Sends signals at random times; their handlers raise while a call is `armed`."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.armed = False
        self.sent: Counter[str] = Counter()
        self._delays: queue.SimpleQueue[float] = queue.SimpleQueue()
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGALRM, self._alarm)
        threading.Thread(target=self._kill, daemon=True).start()

    def _interrupt(self, number: int, frame: Any) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def _alarm(self, number: int, frame: Any) -> None:
        if self.armed:
            self.armed = False
            raise Alarm

    def _kill(self) -> None:
        while True:
            time.sleep(self._delays.get())
            os.kill(os.getpid(), signal.SIGINT)

    def aim(self, within_s: float) -> None:
        """Has a signal, or two, or none come within some seconds."""
        for kind in self.draw.choice([["SIGINT"], ["SIGALRM"], ["SIGINT", "SIGALRM"], []]):
            delay_s = self.draw.uniform(0, within_s)
            self.sent[kind] += 1
            if kind == "SIGINT":
                self._delays.put(delay_s)
            else:
                signal.setitimer(signal.ITIMER_REAL, max(delay_s, 1e-6))


class Driver:
    """Makes calls of all kinds on tensors that hold `BEFORE`, and notes what is wrong after each."""

    def __init__(self, backend: str, seed: int) -> None:
        self.draw = random.Random(seed)
        self.signals = Signals(self.draw)
        self.counts: dict[str, Counter[str]] = {}
        self.failures: list[str] = []
        self.rays: list[str] = []
        self.took_s: dict[str, float] = {}
        self.workers = [ray.remote(num_cpus=0)(Worker).remote() for _ in BEFORE]
        self.group = col.declare_collective_group(self.workers, group_name=NAME, backend=backend)
        self.refs = [[one.buffer.remote(at) for one in self.workers] for at in range(3)]
        first, second, third = self.refs
        with col.capture() as self.step:
            col.allreduce_refs(third, NAME)
        self.calls: dict[str, tuple[Callable[[], Any], dict[int, int]]] = {
            "allreduce": (lambda: col.allreduce_refs(first, NAME), {0: TOTAL}),
            "asynchronous": (lambda: col.allreduce_refs(first, NAME, async_op=True).wait(), {0: TOTAL}),
            "batch": (self._batch, {0: TOTAL, 1: BEFORE[0]}),
            "gather": (lambda: col.allgather_refs(None, second, NAME), {}),
            "run": (self.step.run, {2: TOTAL}),
            "get": (lambda: [one.tolist() for one in col.get(first)], {}),
            "status": (self.group.status, {}),
            "cancel": (lambda: col.allgather_refs(None, second, NAME, async_op=True).cancel(), {}),
        }
        self._fill()

    def _batch(self) -> None:
        with col.batch():
            col.allreduce_refs(self.refs[0], NAME)
            col.broadcast_refs(self.refs[1], 0, NAME)

    def _fill(self) -> None:
        ray.get([one.fill.remote(value) for one, value in zip(self.workers, BEFORE, strict=True)])

    def once(self) -> None:
        kind = self.draw.choice(list(self.calls))
        call, counts = self.calls[kind][0], self.counts.setdefault(kind, Counter())
        took_s = self.took_s.get(kind, 0.002)
        self.signals.aim(1.2 * took_s)
        outcome, began_s = "returned", time.monotonic()
        try:
            try:
                self.signals.armed = True
                call()
            finally:
                self.signals.armed = False
        except KeyboardInterrupt:
            outcome = "SIGINT"
        except Alarm:
            outcome = "SIGALRM"
        except BaseException as exc:
            outcome = self._fault(kind, exc)
        else:
            self.took_s[kind] = 0.9 * took_s + 0.1 * (time.monotonic() - began_s)
        counts[outcome] += 1
        self._check(kind, outcome)

    def _fault(self, kind: str, exc: BaseException) -> str:
        """Whether it is Ray that was broken by an exception in its own code, or raycollect."""
        frames = traceback.extract_tb(exc.__traceback__)
        in_ray = bool(frames) and str(Path(ray.__file__).parent) in frames[-1].filename
        is_ray = in_ray and not isinstance(exc, col.errors.RaycollectError)
        told = f"{kind}: {''.join(traceback.format_exception(exc))}"
        (self.rays if is_ray else self.failures).append(told)
        return "Ray's fault" if is_ray else "failed"

    def _check(self, kind: str, outcome: str) -> None:
        """Looks at what is left, and at all tensors; a run that was begun runs to its end, or not at all."""
        controller = Controller.current()
        if not wait_until(lambda: not controller.trackers()):
            left = [vars(one) for one in controller.trackers()]
            self.failures.append(f"{kind}, {outcome}: left are {left}")
        written, found = self.calls[kind][1], ray.get([one.read.remote() for one in self.workers])
        for at in range(3):
            now, after = [one[at] for one in found], [[written.get(at, 0)]] * len(BEFORE)
            allowed = [after] if at in written else [[[value] for value in BEFORE]]
            if at in written and outcome != "returned":
                allowed.append([[value] for value in BEFORE])
            if now not in allowed and (outcome == "returned" or at not in written or kind == "run"):
                self.failures.append(f"{kind}, {outcome}: tensor {at} is {now}")
        if written:
            self._fill()

    def end(self) -> None:
        """What a driver can still do that was never interrupted."""
        col.allreduce_refs(self.refs[0], NAME)
        self.step.run()
        if self.group.status().state != "alive":
            self.failures.append(f"the group is {self.group.status().state}")
        claimed = Controller.current().claim_bell()
        if claimed is None:
            self.failures.append("the bell is lost")
        else:
            claimed.release()
        self.group.destroy()
        col.declare_collective_group(self.workers, group_name=NAME).destroy()
        for number in (signal.SIGINT, signal.SIGALRM):
            if getattr(signal.getsignal(number), "__self__", None) is not self.signals:
                self.failures.append(f"the handler of signal {number} is {signal.getsignal(number)}")


def main() -> None:
    """Runs the calls, and prints what was counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="local", help="of a running Ray; by default one is started")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--backend", default="shm")
    asked = parser.parse_args()
    options: dict[str, Any] = {"num_cpus": 4, "include_dashboard": False} if asked.address == "local" else {}
    ray.init(address=asked.address, log_to_driver=False, **options)
    driver, began_s = Driver(asked.backend, asked.seed), time.monotonic()
    for done in range(asked.calls):
        driver.once()
        if len(driver.failures) >= MOST_FAILURES:
            break
        if (done + 1) % 1000 == 0:
            print(f"{done + 1} calls in {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    driver.end()
    counted = {kind: dict(found) for kind, found in sorted(driver.counts.items())}
    print(json.dumps({"calls": counted, "sent": driver.signals.sent, "failures": driver.failures, "ray": driver.rays}))


if __name__ == "__main__":
    main()
