"""Tensors on GPUs that are published and subscribed, on the fake of cupy: staged in host memory, with the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.errors import (
    AliasError,
    KernelError,
    TensorDirtyError,
    TensorReplacedError,
    UnsupportedError,
    VersionNotPutError,
)
from raycollect.planner.layout import layout
from raycollect.pos import Container
from raycollect.weights import agent, atoms
from raycollect.weights.exclusion import OwnProcess
from raycollect.weights.local_side import LocalSide
from raycollect.weights.receiver import Receiver
from raycollect.weights.source import Source
from tests.pure.mixed import host, is_on_gpu, same
from tests.pure.weights.sides import (
    AMONG,
    KEY,
    LAYOUTS,
    NAMES,
    NBYTES,
    V1,
    entered_here,
    holder,
    receiver,
    source,
    tensors,
)
from tests.support.values import replace

PLACES = ("host", "gpu", "gpu with gaps")


@pytest.fixture(autouse=True)
def here():
    """The actor of both ranks; what reads from it has its store."""
    with entered_here() as actor:
        yield actor


def put(fake, values, where):
    """A tensor of these elements in host memory or on a GPU."""
    if where == "host":
        return values
    if where == "gpu":
        return fake.cupy.asarray(values)
    wide = fake.cupy.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
    wide[..., ::2] = fake.cupy.asarray(values)
    return wide[..., ::2]


def held(fake, value, *where):
    return {name: put(fake, one, at) for (name, one), at in zip(tensors(value).items(), where, strict=True)}


def seal(src, number, attempt=b""):
    version = replace(V1, number=number, count=number)
    key, digests = src.seal(version, AMONG, attempt or bytes([number]))
    return key, replace(version, digests=digests)


def update(src, dst, number):
    key, version = seal(src, number)
    receipt = dst.stage(version, [holder(key)], 1.0)
    shown = dst.show(version)
    assert shown is not None
    return receipt, shown, version


@pytest.mark.parametrize("there", PLACES)
@pytest.mark.parametrize("mine", PLACES)
def test_versions_go_from_any_device_to_any_other(here, fake, there, mine):
    trainer, rollout = held(fake, 1, there, "host", there), held(fake, 0, mine, mine, "host")
    src, dst = source(here, trainer), receiver(here, rollout)
    for number in (1, 2, 3):
        for tensor in trainer.values():
            tensor[...] = np.float32(number)
        assert update(src, dst, number)[0].nbytes == 3 * NBYTES
        for name in NAMES:
            same(rollout[name], np.full((4, 6), number, np.float32))
            assert is_on_gpu(rollout[name]) == (mine != "host" and name != "c")
    assert not here.store.statistics().dirty


def test_the_bits_are_those_of_the_publisher(here, fake):
    values = np.random.default_rng(0).integers(0, 256, (4, 24)).astype(np.uint8).view(np.float32)  # NaNs among them
    trainer, rollout = {**tensors(1), "b": put(fake, values, "gpu")}, held(fake, 0, *PLACES)
    update(source(here, trainer), receiver(here, rollout), 1)
    assert host(rollout["b"]).tobytes() == values.tobytes()


def test_tensors_that_have_not_changed_are_not_read_again(here, fake):
    trainer, rollout = held(fake, 1, "gpu", "gpu", "gpu"), held(fake, 0, "gpu", "gpu", "host")
    src, dst = source(here, trainer), receiver(here, rollout)
    update(src, dst, 1)
    trainer["a"][...] = np.float32(2)
    assert update(src, dst, 2)[0].nbytes == NBYTES
    rollout["b"][0, 0] = np.float32(9)  # what others have written is read again
    assert update(src, dst, 3)[0].nbytes == NBYTES
    for name, value in zip(NAMES, (2, 1, 1), strict=True):
        same(rollout[name], np.full((4, 6), value, np.float32))


def test_what_methods_write_between_the_two_phases_is_read_again(here, fake):
    trainer, rollout = held(fake, 1, "gpu", "gpu", "gpu"), held(fake, 0, "gpu", "gpu", "gpu")
    src, dst = source(here, trainer), receiver(here, rollout)
    update(src, dst, 1)
    trainer["a"][...] = np.float32(2)
    key, version = seal(src, 2)
    dst.stage(version, [holder(key)], 1.0)
    rollout["b"][...] = np.float32(7)
    assert dst.show(version)
    for name, value in zip(NAMES, (2, 1, 1), strict=True):
        same(rollout[name], np.full((4, 6), value, np.float32))


def test_a_receiver_serves_what_its_gpu_has_to_another(here, fake):
    first, second = held(fake, 0, "gpu", "gpu", "gpu"), held(fake, 0, "gpu", "host", "gpu")
    _, key, version = update(source(here, held(fake, 3, "gpu", "gpu", "gpu")), receiver(here, first), 1)
    other = receiver(here, second)
    assert other.stage(version, [holder(key)], 1.0).nbytes == 3 * NBYTES
    assert other.show(version)
    for tensor in second.values():
        same(tensor, np.full((4, 6), 3, np.float32))


def test_parts_of_a_stream_may_be_on_a_gpu(here, fake):
    rollout = held(fake, 0, "gpu", "host", "gpu")
    src, dst = source(here, held(fake, 1, "gpu", "host", "gpu")), receiver(here, rollout)
    dst.open_stream(V1)
    parts = {"a": np.full((4, 6), 5, np.float32), "b": put(fake, np.full((4, 6), 6, np.float32), "gpu with gaps")}
    key, digests = src.seal_part(V1, AMONG, b"1", parts)
    dst.land(V1, digests, [holder(key)], 1.0)
    _, digests = src.seal(V1, AMONG, b"1")
    whole = replace(V1, digests=digests)
    dst.stage(whole, [holder(key)], 1.0)
    assert dst.show(whole)
    for name, value in zip(NAMES, (5, 6, 1), strict=True):
        same(rollout[name], np.full((4, 6), value, np.float32))
    with pytest.raises(VersionNotPutError):
        src.seal_part(replace(V1, number=2, count=2), AMONG, b"2", {"a": put(fake, np.zeros(3, np.float32), "gpu")})


def test_floats_are_converted_and_local_tensors_lie_transposed(here, fake):
    wide, turned = (
        {"w": replace(layout([4, 6], mesh={"rank": 1}, dtype=dtype), axes=(((1, 0),), ((0, 0),)))}
        for dtype in ("float32", "float16")
    )
    among, values = atoms.cut(wide, []), np.arange(24, dtype=np.float32).reshape(6, 4)
    trainer, rollout = {"w": put(fake, values, "gpu")}, {"w": put(fake, np.zeros((6, 4), np.float16), "gpu with gaps")}
    src = Source(here, Container.of(trainer, arrays.is_tensor), wide, 0, dtype="float16")
    dst = Receiver(here, "policy", Container.of(rollout, arrays.is_tensor), turned, 0, inplace=False)
    version = replace(V1, cut=among)
    key, digests = src.seal(version, among, b"1")
    version, (there, _) = replace(version, digests=digests), holder(key)
    dst.stage(version, [(there, atoms.served_places(wide, 0, among))], 1.0)
    assert dst.show(version)
    same(rollout["w"], values.astype(np.float16))
    folded = {"w": np.zeros((6, 4), np.float32)}
    other = Receiver(here, "policy", Container.of(folded, arrays.is_tensor), wide, 0, inplace=False)
    other.stage(version, [(there, atoms.served_places(wide, 0, among))], 1.0)
    assert other.show(version)
    same(folded["w"], values)


def test_a_failed_write_leaves_the_tensors_dirty_until_the_next_one(here, fake, monkeypatch):
    trainer, rollout = held(fake, 1, "host", "host", "host"), held(fake, 0, "gpu", "host", "gpu")
    src, dst = source(here, trainer), receiver(here, rollout)
    key, version = seal(src, 1)
    dst.stage(version, [holder(key)], 1.0)
    runtime = fake.cupy.cuda.runtime
    copy, device_memory = runtime.memcpyAsync, 2

    def read_only(target, *rest):
        if runtime.pointerGetAttributes(target).type == device_memory:
            raise RuntimeError("the bus is off")
        copy(target, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "memcpyAsync", read_only)
        with pytest.raises(KernelError):
            dst.show(version)
    with pytest.raises(TensorDirtyError):
        source(here, rollout).seal(V1, AMONG, b"1")
    assert dst.state.shown is None
    assert dst.show(version)
    assert not here.store.statistics().dirty
    for tensor in rollout.values():
        same(tensor, np.ones((4, 6), np.float32))


def test_what_does_not_fit_is_refused(here, fake):
    whole = fake.cupy.zeros((8, 6), np.float32)
    overlapping = {**tensors(0), "a": whole[:4], "b": whole[2:6]}
    with pytest.raises(AliasError):
        receiver(here, overlapping)
    LocalSide("publish", Container.of(overlapping, arrays.is_tensor), LAYOUTS, 0, is_written=False)
    here.store.put(KEY, Container.of(held(fake, 0, "gpu", "host", "host"), arrays.is_tensor))
    asked = OwnProcess(None), "subscribe", KEY, LAYOUTS, 0, None
    agent.check_side(*asked, False)
    with pytest.raises(UnsupportedError):
        agent.check_side(*asked, True)


def test_a_tensor_may_be_replaced_by_another_on_the_same_device(here, fake):
    trainer, rollout = held(fake, 1, "gpu", "gpu", "gpu"), held(fake, 0, "gpu", "host", "gpu")
    src, dst = source(here, trainer), receiver(here, rollout)
    update(src, dst, 1)
    before, rollout["a"] = rollout["a"], put(fake, tensors(9)["a"], "gpu with gaps")
    trainer["b"] = put(fake, tensors(2)["b"], "gpu with gaps")
    assert update(src, dst, 2)[0].nbytes == 2 * NBYTES
    for tensor, value in zip((before, *rollout.values()), (1, 1, 2, 1), strict=True):
        same(tensor, np.full((4, 6), value, np.float32))
    rollout["a"] = tensors(0)["a"]
    with pytest.raises(TensorReplacedError):
        update(src, dst, 3)
