"""How many functions one call enters, by thread: ``python -m benchmarks.hot_path``, with ``-v`` by name.

Counted over calls that were made before, on refs that stay, of 4 B on two actors of one machine, on the driver and on
one of the actors: the Python functions of `raycollect`, and those of libraries that they call, with a star. After a
pause, a library's are as cold as ours. What dataclasses generate is theirs.
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
        self.entered: Counter[tuple[str, str]] = Counter()  # (thread, function); a library's ends with a star
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.is_on and event == "call" and code.co_filename != __file__:
            name = getattr(code, "co_qualname", code.co_name)  # the name alone before Python 3.11
            star = "" if code.co_filename.startswith(_PACKAGE) else "*"
            self.entered[threading.current_thread().name, f"{Path(code.co_filename).stem}.{name}{star}"] += 1

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
    print(f"\n{what}: {_in_words(here + there)} in all")
    for place, entered in (("driver", here), ("an actor", there)):
        threads: dict[str, Counter[tuple[str, str]]] = {}
        for (thread, name), count in entered.items():
            threads.setdefault(thread, Counter())[thread, name] = count
        for thread, own in sorted(threads.items(), key=lambda item: -item[1].total()):
            print(f"  {place}, {thread}: {_in_words(own)}")
            if "-v" in sys.argv:
                print("    " + ", ".join(f"{name} {count / CALLS:g}" for (_, name), count in own.most_common()))


def _in_words(entered: Counter[tuple[str, str]]) -> str:
    theirs = sum(count for (_, name), count in entered.items() if name.endswith("*"))
    return f"{(entered.total() - theirs) / CALLS:.1f} functions, and {theirs / CALLS:.1f} of libraries"


if __name__ == "__main__":
    main()
