"""Verbs of ranks with several GPUs each, on a fake of cupy: the whole way, with ranks as threads of one process."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import raycollect as col
from raycollect.backends import streams
from raycollect.errors import (
    AliasError,
    AllocationError,
    ConcurrentCallError,
    InvalidArgumentError,
    MismatchError,
    NotATensorError,
    RefusedError,
    UnknownGroupError,
    UnsupportedError,
)
from raycollect.group.process_groups import ProcessGroups
from raycollect.member import init
from raycollect.member import verbs as imperative
from tests.fake_cupy import installed

DEVICES = 4
SEEDS = [0, 1, 2]
_names = itertools.count(1)


class Ranks:
    """Groups whose ranks are threads, each with a table of groups of its own; they share the fake's GPUs."""

    def __init__(self, fake, rendezvous):
        self.fake = fake
        self.cupy = fake.cupy
        self._rendezvous = rendezvous
        self._pools = [ThreadPoolExecutor(1) for _ in range(3)]
        self._own = threading.local()
        self._groups = []

    def process_groups(self):
        if not hasattr(self._own, "process_groups"):
            self._own.process_groups = ProcessGroups()
        return self._own.process_groups

    def group(self, world, backend="nccl", **options):
        name = f"gpus-{next(_names)}"
        self.must(world, lambda _: None)
        self.must(world, self._join, world, name, backend, options)
        self._groups.append((world, name))
        return name

    def _join(self, rank, world, name, backend, options):
        options = options or None
        init.init_collective_group(world, rank, backend, name, 8_000, pg_options=options, rendezvous=self._rendezvous)

    def run(self, world, body, *args):
        """Calls ``body(rank, *args)`` on all ranks at once; what one raises is in the list like what it returns."""
        futures = [self._pools[rank].submit(body, rank, *args) for rank in range(world)]
        return [one.exception(60) or one.result() for one in futures]

    def must(self, world, body, *args):
        results = self.run(world, body, *args)
        for one in results:
            if isinstance(one, BaseException):
                raise one
        return results

    def close(self):
        for world, name in self._groups:
            self.must(world, lambda _, name=name: init.destroy_collective_group(name))
        for pool in self._pools:
            pool.shutdown()

    def put(self, device, values):
        """An array of that device."""
        with self.cupy.cuda.Device(device):
            return self.cupy.asarray(np.asarray(values))

    def apart(self, device, values):
        """The same, with gaps between the elements."""
        with self.cupy.cuda.Device(device):
            wide = self.cupy.zeros((*np.shape(values), 2), np.asarray(values).dtype)
            wide[..., 0] = self.cupy.asarray(np.asarray(values))
            return wide[..., 0]


@pytest.fixture
def ranks(request, tmp_path, monkeypatch):
    seed = getattr(request, "param", 0)
    path = tmp_path / "rendezvous"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(streams, "_free", defaultdict(list))
    with installed(DEVICES, nccl_version=23003, seed=seed) as fake:
        made = Ranks(fake, f"file://{path}")
        monkeypatch.setattr(ProcessGroups, "current", made.process_groups)
        yield made
        made.close()
        streams._free.clear()


every_seed = pytest.mark.parametrize("ranks", SEEDS, indirect=True)
LAYOUTS = {"home first": [0, 1, 2], "home last": [3, 1, 0], "home absent": [2, 3], "home only": [0], "one absent": [1]}
every_layout = pytest.mark.parametrize("devices", LAYOUTS.values(), ids=LAYOUTS.keys())


def _values(rank, at, shape, dtype="float32"):
    """Whole numbers that tell whose they are; sums of them are exact."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 + 1 + 2 * rank + 3 * at).astype(dtype)


def _host(tensors):
    return [one.get() for one in tensors]


# ---------------------------------------------------------------------------------------------- what it does


@every_seed
@every_layout
def test_allreduce(ranks, devices):
    name = ranks.group(2)

    def body(rank, shape, op):
        mine = [ranks.put(one, _values(rank, at, shape)) for at, one in enumerate(devices)]
        col.allreduce_multigpu(mine, name, op)
        return _host(mine)

    for shape, op, rule in [
        ((5,), "SUM", np.sum),
        ((1001,), "SUM", np.sum),
        ((3, 1), "MAX", np.max),
        ((), "PRODUCT", np.prod),
        ((7,), "MIN", np.min),
        ((4,), "AVG", np.mean),
        ((0,), "SUM", np.sum),
    ]:
        everyone = [_values(rank, at, shape) for rank in range(2) for at in range(len(devices))]
        expected = rule(np.stack(everyone), axis=0)
        for got in ranks.must(2, body, shape, op):
            for one in got:
                np.testing.assert_allclose(one, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float16", "float64", "complex64"])
def test_allreduce_of_other_types(ranks, dtype):
    name = ranks.group(2)

    def body(rank):
        mine = [ranks.put(at, _values(rank, at, (9,)).astype(dtype)) for at in range(3)]
        col.allreduce_multigpu(mine, name)
        return _host(mine)

    everyone = [_values(rank, at, (9,)).astype(dtype) for rank in range(2) for at in range(3)]
    expected = np.logical_or.reduce(everyone) if dtype == "bool" else np.sum(np.stack(everyone), axis=0, dtype=dtype)
    for got in ranks.must(2, body):
        for one in got:
            assert one.dtype == dtype
            np.testing.assert_array_equal(one, expected)


@every_seed
@every_layout
def test_reduce(ranks, devices):
    name = ranks.group(3)
    shape = (13,)

    def body(rank, root, chosen):
        mine = [ranks.apart(one, _values(rank, at, shape)) for at, one in enumerate(devices)]
        col.reduce_multigpu(mine, root, chosen, name)
        return _host(mine)

    total = sum(_values(rank, at, shape) for rank in range(3) for at in range(len(devices)))
    for root, chosen in [(0, len(devices) - 1), (2, 0)]:
        for rank, got in enumerate(ranks.must(3, body, root, chosen)):
            for at, one in enumerate(got):
                whole = (rank, at) == (root, chosen)
                np.testing.assert_array_equal(one, total if whole else _values(rank, at, shape))


@every_seed
@every_layout
def test_broadcast(ranks, devices):
    name = ranks.group(2)
    shape = (2, 7)

    def body(rank, root, chosen):
        make = [ranks.put, ranks.apart][rank]
        mine = [make(one, _values(rank, at, shape)) for at, one in enumerate(devices)]
        col.broadcast_multigpu(mine, root, chosen, name)
        return _host(mine)

    for root, chosen in itertools.product(range(2), range(len(devices))):
        for got in ranks.must(2, body, root, chosen):
            for one in got:
                np.testing.assert_array_equal(one, _values(root, chosen, shape))


@every_seed
@every_layout
def test_allgather(ranks, devices):
    name = ranks.group(2)
    shape, count = (3, 5), len(devices)

    def body(rank):
        given = [ranks.apart(one, _values(rank, at, shape)) for at, one in enumerate(devices)]
        make = [ranks.put, ranks.apart][rank]
        taken = [[make(one, np.zeros(shape, np.float32)) for _ in range(2 * count)] for one in devices]
        col.allgather_multigpu(taken, given, name)
        return [_host(one) for one in taken], _host(given)

    for rank, (taken, given) in enumerate(ranks.must(2, body)):
        for row in taken:
            for place, one in enumerate(row):
                np.testing.assert_array_equal(one, _values(*divmod(place, count), shape))
        for at, one in enumerate(given):
            np.testing.assert_array_equal(one, _values(rank, at, shape))


@every_seed
@every_layout
def test_reducescatter(ranks, devices):
    name = ranks.group(2)
    shape, count = (11,), len(devices)

    def given_by(rank, at):
        return [_values(rank, at, shape) * (place + 1) for place in range(2 * count)]

    def body(rank, op):
        make = [ranks.put, ranks.apart][rank]
        given = [[make(one, item) for item in given_by(rank, at)] for at, one in enumerate(devices)]
        taken = [make(one, np.zeros(shape, np.float32)) for one in devices]
        col.reducescatter_multigpu(taken, given, name, op)
        return _host(taken), [_host(one) for one in given]

    everyone = [given_by(rank, at) for rank in range(2) for at in range(count)]
    for op, rule in [("SUM", np.sum), ("AVG", np.mean)]:
        total = rule(np.stack([np.stack(one) for one in everyone]), axis=0)
        for rank, (taken, given) in enumerate(ranks.must(2, body, op)):
            for at, one in enumerate(taken):
                np.testing.assert_allclose(one, total[rank * count + at], rtol=1e-6)
            for at, row in enumerate(given):
                np.testing.assert_array_equal(row, given_by(rank, at))


@every_seed
@pytest.mark.parametrize(("source", "target"), [(0, 0), (0, 2), (3, 0), (1, 2)])
@pytest.mark.parametrize("n_elements", [0, 4])
def test_send_and_recv(ranks, source, target, n_elements):
    name = ranks.group(2)

    def body(rank):
        if rank == 1:
            col.send_multigpu(ranks.put(source, _values(1, 0, (9,))), 0, target, name, n_elements)
            return None
        mine = ranks.put(target, np.zeros(9, np.float32))
        col.recv_multigpu(mine, 1, source, name, n_elements)
        return mine.get()

    got, _ = ranks.must(2, body)
    expected = _values(1, 0, (9,))
    expected[n_elements or 9 :] = 0
    np.testing.assert_array_equal(got, expected)


@every_seed
def test_multigpu_call_is_ordered_with_the_callers_streams(ranks):
    """No stream is waited for by the test itself: the tensors are written, reduced and read on streams of their own."""
    name = ranks.group(2)
    cuda = ranks.cupy.cuda

    def body(rank):
        mine, writers = [], []
        for at in range(3):
            with cuda.Device(at):
                writers.append(cuda.Stream(non_blocking=True))
                writers[at].use()
                mine.append(ranks.cupy.zeros(501, np.float32))
                for _ in range(20):
                    mine[at] += rank + at + 1
        col.allreduce_multigpu(mine, name)
        seen = []
        for at in range(3):
            with cuda.Device(at), cuda.Stream(non_blocking=True):
                seen.append((mine[at] * 2).get())
        for at in range(3):
            with cuda.Device(at):
                cuda.Stream.null.use()
        return seen

    expected = 2 * 20 * sum(rank + at + 1 for rank in range(2) for at in range(3))
    for got in ranks.must(2, body):
        for one in got:
            np.testing.assert_array_equal(one, np.full(501, expected, np.float32))


def test_the_gpu_of_the_group_may_be_another_one(ranks):
    name = ranks.group(2, device=2)

    def body(rank):
        mine = [ranks.put(one, np.full(6, rank + 1.0)) for one in (0, 2)]
        col.allreduce_multigpu(mine, name)
        return _host(mine)

    for got in ranks.must(2, body):
        np.testing.assert_array_equal(got, np.full((2, 6), 6.0))


def test_calls_of_the_same_kind_make_no_more_events(ranks):
    name = ranks.group(2)

    def body(rank):
        mine = [ranks.put(at, np.full(6, 1.0)) for at in range(3)]
        col.allreduce_multigpu(mine, name)

    for _ in range(3):
        ranks.must(2, body)
    before = ranks.fake.events, ranks.fake.streams
    for _ in range(5):
        ranks.must(2, body)
    assert ranks.fake.events <= before[0] + 2 * 3  # two ranks may first meet in the middle of a call now
    assert ranks.fake.streams == before[1]


# ---------------------------------------------------------------------------------------------- what is refused


def _kinds(found, kind):
    assert [type(one) for one in found] == [kind] * len(found), found
    return str(found[0])


def _reduce(ranks, name, devices_of, change=lambda rank, mine: mine):
    def body(rank):
        mine = change(rank, [ranks.put(one, np.full(4, rank + 1.0)) for one in devices_of[rank]])
        try:
            col.allreduce_multigpu(mine, name)
        finally:
            arrays = [one for one in mine if hasattr(one, "get")] if isinstance(mine, list) else []
            untouched = all((one.get() == rank + 1).all() for one in arrays)
            assert untouched or len(set(map(len, devices_of))) == 1

    return body


def test_all_ranks_give_as_many(ranks):
    name = ranks.group(2)
    message = _kinds(ranks.run(2, _reduce(ranks, name, [[0, 1], [0, 1, 2]])), MismatchError)
    assert "2 GPUs" in message
    assert "3 GPUs" in message
    ranks.must(2, _reduce(ranks, name, [[0, 1], [2, 3]]))  # the group works on


@pytest.mark.parametrize("verb", ["allgather_multigpu", "reducescatter_multigpu"])
def test_all_ranks_give_as_many_lists(ranks, verb):
    name = ranks.group(2)

    def body(rank, counts):
        gpus = range(counts[rank])
        ones = [ranks.put(at, np.ones(3)) for at in gpus]
        lists = [[ranks.put(at, np.ones(3)) for _ in range(2 * counts[rank])] for at in gpus]
        getattr(col, verb)(*((lists, ones) if verb == "allgather_multigpu" else (ones, lists)), name)

    _kinds(ranks.run(2, body, [2, 3]), MismatchError)
    ranks.must(2, body, [2, 2])


BAD = {
    "two on one GPU": (lambda ranks, mine: [mine[0], mine[0]], InvalidArgumentError),
    "no list": (lambda ranks, mine: mine[0], InvalidArgumentError),
    "an empty list": (lambda ranks, mine: [], InvalidArgumentError),
    "no tensors": (lambda ranks, mine: ["a", "b"], NotATensorError),
    "on the host": (lambda ranks, mine: [np.ones(4), np.ones(4)], UnsupportedError),
    "two shapes": (lambda ranks, mine: [mine[0], mine[1][:3]], MismatchError),
    "two dtypes": (lambda ranks, mine: [mine[0], ranks.put(1, np.ones(4, np.int32))], MismatchError),
    "self-overlapping": (lambda ranks, mine: [mine[0], _repeated(ranks, 1)], AliasError),
}


def _repeated(ranks, device):
    with ranks.cupy.cuda.Device(device):
        one = ranks.cupy.full(1, 1.0)
        return ranks.cupy.ndarray((4,), one.dtype, memptr=one.data, strides=(0,))


@pytest.mark.parametrize(("change", "error"), BAD.values(), ids=BAD.keys())
def test_violation_on_one_rank_is_raised_on_all(ranks, change, error):
    name = ranks.group(2)

    def body(rank):
        mine = [ranks.put(at, np.full(4, 1.0)) for at in range(2)]
        given = change(ranks, mine) if rank == 1 else mine
        try:
            col.allreduce_multigpu(given, name)
        finally:
            assert (np.array(_host(mine)) == 1).all()

    assert "rank 1" in _kinds(ranks.run(2, body), error)
    ranks.must(2, _reduce(ranks, name, [[0, 1], [0, 1]]))


def test_another_backend_is_refused(ranks):
    name = ranks.group(2, "tcp")
    message = _kinds(ranks.run(2, _reduce(ranks, name, [[0, 1], [0, 1]])), UnsupportedError)
    assert "nccl" in message


def test_roots_and_indexes_have_to_be_there_and_the_same(ranks):
    name = ranks.group(2)

    def call(verb, *indexes):
        def body(rank):
            verb([ranks.put(at, np.ones(3)) for at in range(2)], 0, indexes[rank], name)

        return ranks.run(2, body)

    for verb in (col.reduce_multigpu, col.broadcast_multigpu):
        _kinds(call(verb, 2, 2), InvalidArgumentError)
        _kinds(call(verb, 0, 1), MismatchError)
        assert call(verb, 1, 1) == [None, None]


def test_both_ends_name_the_same_gpus(ranks):
    name = ranks.group(2)

    def body(rank, target, source, n_elements=0):
        if rank == 0:
            col.send_multigpu(ranks.put(0, np.ones(4)), 1, target, name, n_elements)
        else:
            col.recv_multigpu(ranks.put(1, np.zeros(4)), 0, source, name, n_elements)

    assert "to GPU 1" in _kinds(ranks.run(2, body, 2, 0), MismatchError)
    _kinds(ranks.run(2, body, 1, 3), MismatchError)
    _kinds(ranks.run(2, body, DEVICES, 0), InvalidArgumentError)
    _kinds(ranks.run(2, body, 1, 0, 5), InvalidArgumentError)
    _kinds(ranks.run(2, body, 1, 0, -1), InvalidArgumentError)
    ranks.must(2, body, 1, 0)


def test_the_first_elements_of_a_tensor_with_gaps_are_refused(ranks):
    name = ranks.group(2)

    def body(rank):
        if rank == 0:
            col.send_multigpu(ranks.put(0, np.ones(4)), 1, 0, name, 2)
        else:
            col.recv_multigpu(ranks.apart(0, np.zeros(4)), 0, 0, name, 2)

    _kinds(ranks.run(2, body), InvalidArgumentError)


def test_lists_of_lists_have_to_fit(ranks):
    name = ranks.group(2)

    def body(rank, change):
        given = [ranks.put(at, np.ones(3)) for at in range(2)]
        taken = [[ranks.put(at, np.zeros(3)) for _ in range(4)] for at in range(2)]
        col.allgather_multigpu(change(taken), given, name)

    for change, error in [
        (lambda taken: taken[:1], InvalidArgumentError),
        (lambda taken: [taken[0], taken[1][:3]], InvalidArgumentError),
        (lambda taken: [taken[0], taken[0]], InvalidArgumentError),
        (lambda taken: [taken[0], taken[1][:3] + taken[1][:1]], AliasError),
        (lambda taken: [[*taken[0][:3], taken[0][3][:2]], taken[1]], MismatchError),
    ]:
        _kinds(ranks.run(2, body, change), error)
    ranks.must(2, body, lambda taken: taken)


def test_allocation_failure_is_raised_on_all_ranks(ranks):
    name = ranks.group(2)
    ranks.must(2, _reduce(ranks, name, [[0, 1], [0, 1]]))

    def body(rank):
        mine = [ranks.put(at + rank, np.full(1 << 12, 1.0)) for at in range(2)]
        ready.wait(20)
        if rank == 0:
            ranks.fake.limit(ranks.fake.allocated(0) + 1000)
        ready.wait(20)
        try:
            col.allreduce_multigpu(mine, name)
        finally:
            ranks.fake.limit(1 << 40)
            assert (np.array(_host(mine)) == 1).all()

    ready = threading.Barrier(2)
    _kinds(ranks.run(2, body), AllocationError)
    ranks.must(2, _reduce(ranks, name, [[0, 1], [0, 1]]))


def test_two_threads_at_once_are_refused_on_all_ranks(ranks):
    name, others = ranks.group(2), threading.Event()

    def call(rank):
        mine = [ranks.put(at, np.ones(3)) for at in range(2)]
        with pytest.raises(ConcurrentCallError):
            col.allreduce_multigpu(mine, name)
        assert (np.array(_host(mine)) == 1).all()

    def body(rank):
        if rank:
            assert others.wait(20)
            return [call(rank), call(rank)]
        process_groups = ranks.process_groups()
        communicator = process_groups.find(name).communicator("all")

        def beside(before):
            ranks._own.process_groups = process_groups
            while not before():
                time.sleep(0.001)  # polls for what another thread does
            call(rank)

        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(beside, lambda: True), pool.submit(beside, lambda: communicator.call)]
            while communicator._objecting is None:  # the call at the door has begun again
                time.sleep(0.001)
            others.set()
            return [one.result(20) for one in calls]

    ranks.must(2, body)
    ranks.must(2, _reduce(ranks, name, [[0, 1], [0, 1]]))


@pytest.mark.parametrize(
    ("dtype", "op"), [("int32", "AVG"), ("float32", "BAND"), ("complex64", "MAX"), (ml_dtypes.bfloat16, "SUM")]
)
def test_a_reduction_without_a_meaning_is_refused(ranks, dtype, op):
    name = ranks.group(2)

    def body(rank):
        col.allreduce_multigpu([ranks.put(at, np.ones(3, dtype)) for at in range(2)], name, op)

    assert op in _kinds(ranks.run(2, body), UnsupportedError)


def test_an_op_that_is_none_is_refused(ranks):
    name = ranks.group(2)

    def body(rank):
        col.allreduce_multigpu([ranks.put(at, np.ones(3)) for at in range(2)], name, "most")

    _kinds(ranks.run(2, body), InvalidArgumentError)


def test_a_plain_call_does_not_match_one_of_several_gpus(ranks):
    name = ranks.group(2)

    def body(rank):
        if rank == 0:
            col.allreduce_multigpu([ranks.put(at, np.ones(3)) for at in range(2)], name)
        else:
            imperative.allreduce(ranks.put(0, np.ones(3)), name)

    assert "GPUs" in _kinds(ranks.run(2, body), MismatchError)


# ---------------------------------------------------------------------------------------------- without


def test_without_a_gpu_the_verbs_say_so():
    for call in (
        lambda: col.allreduce_multigpu([np.ones(2)]),
        lambda: col.send_multigpu(np.ones(2), 0, 0),
        lambda: col.recv_multigpu(np.ones(2), 0, 0),
        lambda: col.synchronize(0),
    ):
        with installed(0), pytest.raises(UnsupportedError, match="GPU") as raised:
            call()
        assert isinstance(raised.value, RefusedError)


def test_without_a_group_the_verbs_say_so(ranks):
    with pytest.raises(UnknownGroupError):
        col.allreduce_multigpu([ranks.put(0, np.ones(2))], "nobody")
    with pytest.raises(UnknownGroupError):
        col.send_multigpu(ranks.put(0, np.ones(2)), 1, 0, "nobody")


def test_synchronize_waits_for_a_gpu(ranks):
    with ranks.cupy.cuda.Device(1):
        stream = ranks.cupy.cuda.Stream(non_blocking=True)
        with stream:
            x = ranks.cupy.zeros(100)
            x += 1
    col.synchronize(1)
    assert ranks.fake.pending(stream) == 0
