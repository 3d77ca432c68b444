"""The fake of cupy: captured graphs, and what a capture forbids."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from tests.pure.two_gpus import fake, refused

__all__ = ["fake"]  # a fixture


def test_what_a_capture_forbids(fake):
    cuda = fake.cupy.cuda
    stream, other = cuda.Stream(), cuda.Stream(non_blocking=True)
    with pytest.raises(RuntimeError, match="default"):
        cuda.Stream.null.begin_capture()
    with refused(fake, 401):
        stream.end_capture()
    stream.begin_capture()
    other.wait_event(stream.record())
    with other:
        fake.cupy.zeros(3)
    with refused(fake, 904):
        stream.end_capture()


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("synchronize", 900),
        ("query", 900),
        ("get", 900),
        ("device", 900),
        ("outside", 905),
        ("legacy", 906),
        ("event", 907),
        ("event query", 907),
    ],
)
def test_what_a_capture_forbids_spoils_it(fake, what, status):
    cupy, cuda = fake.cupy, fake.cupy.cuda
    stream, other = cuda.Stream(), cuda.Stream(non_blocking=True)
    outside, value = other.record(), cupy.zeros(4)
    cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        event = stream.record()
        wrongs = {
            "synchronize": stream.synchronize,
            "query": lambda: stream.done,
            "get": value.get,
            "device": cuda.runtime.deviceSynchronize,
            "outside": lambda: stream.wait_event(outside),
            "legacy": lambda: cuda.runtime.memsetAsync(value.data.ptr, 0, 4, 0),  # a blocking stream waits for it
            "event": event.synchronize,
            "event query": lambda: event.done,
        }
        with refused(fake, status):
            wrongs[what]()
        with refused(fake, 901):
            value += 1
        with refused(fake, 901):
            stream.end_capture()
        assert not stream.is_capturing()
        value += 1
    stream.synchronize()
    assert value.get().tolist() == [1.0] * 4


@pytest.mark.parametrize("mode", range(3))
def test_who_may_make_unsafe_calls_during_a_capture(fake, mode):
    """In the global mode no thread may, in that of a thread this one may not. The relaxed mode is cupy's own choice."""
    cuda = fake.cupy.cuda
    stream, done = cuda.Stream(non_blocking=True), cuda.Stream(non_blocking=True).record()
    calls = (lambda: cuda.alloc(8), lambda: done.done)
    for call, own in itertools.product(calls, (True, False)):
        stream.begin_capture(None if mode == 2 else mode)
        forbidden = mode == 0 or (mode == 1 and own)
        with ThreadPoolExecutor(1) as others, refused(fake, 900) if forbidden else nullcontext():
            call() if own else others.submit(call).result()
        with refused(fake, 901) if forbidden else nullcontext():
            stream.end_capture()


def test_a_graph_does_not_keep_memory(fake):
    cupy = fake.cupy
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        value = cupy.zeros(100)
        stream.synchronize()
        stream.begin_capture()
        value += 1
        graph = stream.end_capture()
    del value
    graph.launch(stream)
    stream.synchronize()
    assert "a graph is launched that refers to" in fake.violations[0]
    assert all("was freed" in one for one in fake.violations)
    fake.violations.clear()
