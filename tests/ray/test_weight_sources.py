"""What weights come from and go to: safetensors files that are mapped, and state_dicts of torch."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.pure.weights.files import write
from tests.support.actors import Worker

ROWS = 512


def tensors(rows=ROWS, columns=64):
    numbers = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    return {"up": numbers, "bias": np.arange(rows, dtype=np.int64), "half": numbers.astype(np.float16)}


def opened(worker, path):
    return worker.make.remote(lambda self, path: col.map_safetensors(path), str(path))


def up_alone(worker, path):
    return worker.make.remote(lambda self, path: {"up": col.map_safetensors(path)["up"]}, str(path))


def empties(worker, like):
    return worker.make.remote(lambda self, like: {name: np.zeros_like(one) for name, one in like.items()}, like)


def assert_holds(refs, expected):
    for found in col.get(refs):
        assert found.keys() == expected.keys()
        for name, one in expected.items():
            np.testing.assert_array_equal(np.asarray(found[name]), one)


def test_a_file_is_broadcast_published_and_resharded(actors, tmp_path, name):
    holder, *others = actors(Worker, 3)
    values = tensors()
    path = write(tmp_path / "model.safetensors", values)
    file = opened(holder, path)
    targets = [empties(one, values) for one in others]
    col.broadcast_refs([file, *targets])
    assert_holds([file, *targets], values)

    fresh = [empties(one, values) for one in others]
    with col.publish([file], name) as pub, col.subscribe(name, fresh) as sub:
        pub.put()
        assert sub.update().version.number == 1
    assert_holds(fresh, values)

    halves = [one.make.remote(lambda self: np.zeros((ROWS // 2, 64), np.float32)) for one in others]
    dst = col.layout([ROWS, 64], mesh={"tp": 2}, spec=("tp",), dtype="float32")
    src = col.layout([ROWS, 64], mesh={"one": 1}, dtype="float32")
    targets = [holding(one, "up", ref) for one, ref in zip(others, halves, strict=True)]
    col.reshard_refs([up_alone(holder, path)], targets, src={"up": src}, dst={"up": dst})
    for at, found in enumerate(col.get(halves)):
        np.testing.assert_array_equal(np.asarray(found), values["up"][at * ROWS // 2 : (at + 1) * ROWS // 2])


def holding(worker, name, ref):
    """The same tensor in a dict."""
    return worker.make.remote(lambda self, name, value: {name: value}, name, ref)


# ---------------------------------------------------------------------------------------------- torch


def module(tied=False):
    """A module whose state_dict has all that is unusual: a counter, bfloat16, a buffer; and tied weights, if asked."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    made = torch.nn.Sequential(
        torch.nn.Embedding(11, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 11, bias=False), torch.nn.Linear(11, 3)
    )
    if tied:
        made[2].weight = made[0].weight
    made[3].to(torch.bfloat16)
    made.register_buffer("places", torch.arange(5))
    return made


def begin(self, tied=False):
    self.module = module(tied)
    return self.module.state_dict()


def change(self, by):
    import torch

    with torch.no_grad():
        for tensor in {id(one): one for one in (*self.module.parameters(), *self.module.buffers())}.values():
            tensor += by


def digest(self):
    import torch

    state = sorted(self.module.state_dict().items())
    return hashlib.sha256(b"".join(one.reshape(-1).view(torch.uint8).numpy().tobytes() for _, one in state)).hexdigest()


@pytest.mark.parametrize("way", ["publish", "broadcast", "reshard"])
def test_state_dicts_of_torch_are_sources_and_targets(actors, name, way):
    pytest.importorskip("torch")
    workers = actors(Worker, 2)  # importing torch is most of what this takes
    source, *targets = refs = [worker.make.remote(begin) for worker in workers]
    for number in (1, 2):
        ray.get(workers[0].call.remote(change, number))
        before = ray.get([worker.call.remote(digest) for worker in workers])
        assert before[0] not in before[1:]
        if way == "publish":
            with col.publish([source], name) as pub, col.subscribe(name, targets) as sub:
                pub.put()
                sub.update()
        elif way == "broadcast":
            col.broadcast_refs(refs)
        else:
            shapes = {name: (one.shape, one.dtype) for name, one in module().state_dict().items()}
            for target in targets:
                one = {name: col.layout(shape, mesh={"one": 1}, dtype=dtype) for name, (shape, dtype) in shapes.items()}
                col.reshard_refs([source], [target], src=one, dst=one)
        assert len(set(ray.get([worker.call.remote(digest) for worker in workers]))) == 1


@pytest.mark.parametrize("way", ["publish", "broadcast"])
def test_tied_weights_are_sources_and_no_targets(actors, name, way):
    pytest.importorskip("torch")
    workers = actors(Worker, 2)
    tied, loose = [worker.make.remote(begin, worker is workers[0]) for worker in workers]
    if way == "publish":
        with pytest.raises(errors.AliasError, match=r"'0.weight'|'2.weight'"):
            col.subscribe(name, [tied])
        with col.publish([tied], name) as pub, col.subscribe(name, [loose]) as sub:
            pub.put()
            sub.update()
    else:
        with pytest.raises(errors.AliasError):
            col.broadcast_refs([tied, loose], 1)
        col.broadcast_refs([tied, loose])
    assert len(set(ray.get([worker.call.remote(digest) for worker in workers]))) == 1
