"""How many functions of the package one call enters, by thread: ``python -m benchmarks.hot_path``.

Counted over calls that were made before, on refs that stay, of 4 B on two actors of one machine. Only Python functions
of `raycollect` count, on the driver and on one of the actors; what libraries do between them does not.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import ray

import raycollect as col

CALLS = 200
_PACKAGE = str(Path(col.__file__).parent)


class Counting:
    """Counts the functions that this process enters, in the threads that begin after it was made, and in this one."""

    def __init__(self) -> None:
        self.is_on = False
        self.entered: Counter[tuple[str, str]] = Counter()  # (thread, function)
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            code = frame.f_code
            name = getattr(code, "co_qualname", code.co_name)  # the name alone before Python 3.11
            where = f"{Path(code.co_filename).stem}.{name}"
            self.entered[threading.current_thread().name, where] += 1

    def switch(self, *, on: bool) -> Counter[tuple[str, str]]:
        """Begins or ends counting; returns what was counted so far, and forgets it."""
        self.is_on = on
        entered, self.entered = self.entered, Counter()
        return entered


class Counted(col.CollectiveParticipant):
    """An actor that counts its own functions."""

    def __init__(self) -> None:
        self.counting = Counting()
        self.buffer = np.ones(1, np.float32)

    def get_buffer(self) -> Any:
        """The array that all calls reduce."""
        return self.buffer

    @col.by_value
    def switch(self, on: bool) -> Counter[tuple[str, str]]:
        """`Counting.switch`."""
        return self.counting.switch(on=on)

    @col.by_value
    def reduce(self, calls: int) -> Counter[tuple[str, str]]:
        """Calls a member's own allreduce so often; returns what these calls entered."""
        sys.setprofile(self.counting._note)
        for _ in range(calls):
            col.allreduce(self.buffer, "counted")
        self.counting.switch(on=True)
        for _ in range(calls):
            col.allreduce(self.buffer, "counted")
        return self.counting.switch(on=False)


def main() -> None:
    """Prints the counts of each kind of call."""
    counting = Counting()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        workers = [ray.remote(num_cpus=0)(Counted).remote() for _ in range(2)]
        col.declare_collective_group(workers, group_name="counted")
        refs = [worker.get_buffer.remote() for worker in workers]
        _show("allreduce_refs", *_entered(counting, workers[0], lambda: col.allreduce_refs(refs, group_name="counted")))
        with col.capture() as step:
            col.allreduce_refs(refs, group_name="counted")
        _show("step.run", *_entered(counting, workers[0], step.run))
        step.close()
        _show("a member's allreduce", Counter(), ray.get([worker.reduce.remote(CALLS) for worker in workers])[0])
    finally:
        ray.shutdown()


def _entered(counting: Counting, worker: Any, call: Callable[[], object]) -> tuple[Counter[Any], Counter[Any]]:
    for _ in range(CALLS):
        call()
    ray.get(worker.switch.remote(True))
    counting.switch(on=True)
    for _ in range(CALLS):
        call()
    here = counting.switch(on=False)
    return here, ray.get(worker.switch.remote(False))


def _show(what: str, here: Counter[tuple[str, str]], there: Counter[tuple[str, str]]) -> None:
    total = (sum(here.values()) + sum(there.values())) / CALLS
    print(f"\n{what}: {total:.0f} functions in all")
    for place, entered in (("driver", here), ("an actor", there)):
        threads: Counter[str] = Counter()
        for (thread, _), count in entered.items():
            threads[thread] += count
        for thread, count in threads.most_common():
            print(f"  {place}, {thread}: {count / CALLS:.1f}")
            if "-v" in sys.argv:
                each = {name: many for (other, name), many in entered.items() if other == thread}
                print("    " + ", ".join(f"{name} {many / CALLS:g}" for name, many in Counter(each).most_common()))


if __name__ == "__main__":
    main()
