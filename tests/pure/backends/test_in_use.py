"""What a communicator holds is released once, by `close` or by the thread that used it then."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raycollect.backends import in_use
from raycollect.backends.adopted import adopt
from raycollect.backends.gloo.communicator import GlooCommunicator
from raycollect.backends.in_use import InUse
from raycollect.backends.tcp.communicator import connect
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator, Joining
from raycollect.errors import GroupBrokenError
from tests.support.waiting import wait_until

WAIT_S = 20.0
LARGE = 65 << 20
"""Bytes: more than what gloo and torch leave to the mesh."""


@pytest.mark.parametrize("seed", range(10))
def test_the_last_one_out_releases_it_once(seed: int) -> None:
    chance, inside, released = random.Random(seed), [0], list[object]()
    held = object()

    def release(item: object) -> None:
        assert inside[0] == 0, "a thread uses it"
        released.append(item)

    use = InUse(held, release, "g")
    begin = threading.Barrier(6)
    refused = list[BaseException]()

    def enter(entered: object) -> None:
        assert entered is held
        inside[0] += 1
        assert inside[0] == 1
        inside[0] -= 1

    def work(times: int) -> None:
        begin.wait(WAIT_S)
        try:
            for _ in range(times):
                use.call(enter)
        except GroupBrokenError as exc:
            refused.append(exc)

    def close() -> None:
        begin.wait(WAIT_S)
        use.close()

    times = [chance.randrange(1, 200) for _ in range(4)]
    threads = [threading.Thread(target=work, args=(item,)) for item in times]
    threads += [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert released == [held]
    with pytest.raises(GroupBrokenError):
        use.call(enter)
    use.close()
    assert released == [held]


def _interrupted_at(line: int | None, use: InUse[object]) -> set[int]:
    """A call in which Ctrl-C comes at a line of `InUse`; gives the lines that it has reached."""
    reached = set[int]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != in_use.__file__:
            return None
        if event == "line" and frame.f_lineno not in reached:
            reached.add(frame.f_lineno)
            if frame.f_lineno == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        use.call(lambda _: None)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return reached


def test_an_interrupted_call_shuts_nobody_out() -> None:
    lines = _interrupted_at(None, InUse(object(), id, "g"))
    assert len(lines) > 3
    for line in lines:
        released = list[object]()
        use = InUse(object(), released.append, "g")
        _interrupted_at(line, use)
        other = threading.Thread(target=use.call, args=(lambda _: None,), daemon=True)
        other.start()
        other.join(WAIT_S)
        assert not other.is_alive(), f"interrupted at line {line}"
        use.close()
        assert len(released) == 1


# ---------------------------------------------------------------------------------------------- in a kernel


class Slow:
    """A library whose allreduce lasts until the test lets it end: gloo's, one of torch, or a class of Ray's shape."""

    def __init__(self, *_: Any) -> None:
        self.entered, self.may_end = threading.Event(), threading.Event()
        self.closed = 0

    def allreduce(self, *_: Any) -> Slow:
        self.entered.set()
        assert self.may_end.wait(WAIT_S)
        return self

    def close(self) -> None:
        self.closed += 1

    reduce = allreduce
    shutdown = destroy_group = close

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def limit(self, timeout_s: float) -> None:
        """As of gloo."""

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True


def _gloo(slow: Slow, joining: Joining, mesh: Any) -> Communicator:
    return GlooCommunicator(slow, joining, mesh)  # type: ignore[arg-type]


def _torch(slow: Slow, joining: Joining, mesh: Any) -> Communicator:
    pytest.importorskip("torch")
    from raycollect.backends.torch_dist.calls import Library
    from raycollect.backends.torch_dist.communicator import TorchCommunicator

    library = Library(backend=slow, rank=0, world_size=1, group_name=joining.spec.name, is_patient=True)
    return TorchCommunicator(library, joining, mesh)


def _adopted(slow: Slow, joining: Joining, mesh: Any) -> Communicator:
    create: Any = adopt("slow", Slow).factory
    communicator = create(joining)
    communicator._use._held = [slow]  # the one that the test has
    return communicator


@pytest.mark.parametrize("make", [_gloo, _torch, _adopted])
def test_a_communicator_that_is_closed_in_a_kernel_is_released_at_its_end(
    make: Callable[[Slow, Joining, Any], Communicator],
) -> None:
    spec = GroupSpec(name="g", group_id="g", backend="gloo", world_size=1)
    slow = Slow()
    nobody: Any = SimpleNamespace(abort=lambda seq: None)
    joining = Joining(spec, 0, nobody, nobody)
    communicator = make(slow, joining, connect(joining))
    array = np.zeros(LARGE // 4, np.float32)
    kernel = Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM)
    launch = Launch(seq=1, ranks=(0,), timeout_s=WAIT_S)

    def run() -> None:
        try:
            communicator.launch(launch, (kernel,))
        except GroupBrokenError:  # it has noticed
            pass

    running = threading.Thread(target=run)
    running.start()
    assert slow.entered.wait(WAIT_S)
    communicator.close()
    assert slow.closed == 0, "the kernel uses it"
    slow.may_end.set()
    running.join(WAIT_S)
    assert not running.is_alive()
    assert wait_until(lambda: slow.closed == 1)
    communicator.close()
    assert slow.closed == 1
