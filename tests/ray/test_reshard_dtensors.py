"""`reshard_refs` over torch's DTensors, which say their layouts themselves."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.support.actors import Worker

pytest.importorskip("torch.distributed.tensor")
pytestmark = pytest.mark.usefixtures("tidy")

WHOLE = {"up": np.arange(40, dtype=np.float32).reshape(8, 5), "norm": np.arange(5, dtype=np.float32)}


def join(self, store, rank, world):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def make(self, mesh, placements, fill, axis=None):
    """DTensors of all names, cut by torch over one axis of the mesh or all; without a fill they are zeros."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

    kinds = {"S": Shard, "R": Replicate, "P": Partial, "SS": lambda dim: _StridedShard(dim, split_factor=mesh[-1])}
    there = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "tp")[-len(mesh) :])
    there = there[axis] if axis else there
    found = {}
    for name, whole in WHOLE.items():
        cuts = [kinds[kind](*arguments) for kind, *arguments in placements[name]]
        value = torch.from_numpy(whole * bool(fill))
        found[name] = distribute_tensor(value, there, cuts, src_data_rank=None)
    self.held = found
    return found


def layouts(self):
    return col.layout_of(self.held)


def locals_of(self):
    return {name: one.to_local().numpy() for name, one in self.held.items()}


COLUMNS = {"up": [("S", 1)], "norm": [("R",)]}
FSDP = {"up": [("SS", 0), ("S", 0)], "norm": [("R",), ("S", 0)]}  # FSDP2 over tensor parallel shards
HALVES = {"up": col.layout([8, 5], mesh={"tp": 2}, spec=("tp",)), "norm": col.layout([5], mesh={"dp": 2})}


def _job(world, tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "file"
    made = [Worker.options(num_cpus=0).remote() for _ in range(world)]
    ray.get([worker.call.remote(join, str(store), rank, world) for rank, worker in enumerate(made)])
    yield made
    for worker in made:
        ray.kill(worker)


@pytest.fixture(scope="module")
def four(cluster, tmp_path_factory):
    """Workers of a job of torch."""
    yield from _job(4, tmp_path_factory)


@pytest.fixture(scope="module")
def two(cluster, tmp_path_factory):
    """The same, of another one."""
    yield from _job(2, tmp_path_factory)


@pytest.mark.full  # six processes import torch; tests/pure/planner/test_dtensors.py has all layouts
def test_both_sides_say_their_layouts(four, two):
    given = [w.make.remote(make, (2, 2), FSDP, True) for w in four]
    taken = [w.make.remote(make, (2,), COLUMNS, False) for w in two]
    assert col.plan(col.reshard_refs, given, taken).rows[0].op == "reshard"
    assert col.reshard_refs(given, taken) == taken
    for rank, found in enumerate(ray.get([w.call.remote(locals_of) for w in two])):
        np.testing.assert_array_equal(found["up"], WHOLE["up"][:, :3] if rank == 0 else WHOLE["up"][:, 3:])
        np.testing.assert_array_equal(found["norm"], WHOLE["norm"])
    got = col.get(taken[0])  # elsewhere it is the local tensor
    np.testing.assert_array_equal(got["up"], WHOLE["up"][:, :3])


def test_one_side_says_it_and_the_other_has_words_or_patterns(two):
    given = [w.make.remote(make, (2,), COLUMNS, True) for w in two]
    for src in (None, {"up": col.layout([8, 5], mesh={"tp": 2}, spec=(None, "tp")), "n?": HALVES["norm"]}):
        made = col.get(col.reshard_refs(given, two, src=src, dst=HALVES))
        np.testing.assert_array_equal(made[1]["up"], WHOLE["up"][4:])
    said = ray.get(two[0].call.remote(layouts))
    assert said == ray.get(two[1].call.remote(layouts))
    made = col.get(col.reshard_refs(given[::-1], two, dst={"u*": HALVES["up"], "*": HALVES["norm"]}))
    np.testing.assert_array_equal(made[1]["up"], WHOLE["up"][4:])
    back = col.reshard_refs([w.make.remote(lambda self: self.held) for w in two], two, src=said, dst=HALVES)
    np.testing.assert_array_equal(col.get(back)[0]["up"], WHOLE["up"][:4])


@pytest.mark.full
def test_a_dtensor_on_another_mesh_is_refused_by_name(four):
    pairs = [w.make.remote(make, (2, 2), COLUMNS, True, "tp") for w in four]
    with pytest.raises(errors.LayoutError, match=r"src of 'up' is a DTensor on .* of ranks 2, 3") as caught:
        col.reshard_refs(pairs, four, dst=HALVES)
    assert {one.field for one in caught.value.violations} == {"src of 'up'", "src of 'norm'"}
    with pytest.raises(errors.LayoutError, match="mesh of the 1 ranks that src_refs are"):
        col.reshard_refs(pairs[:1], four[1:3], dst=HALVES)
    made = col.get(col.reshard_refs(pairs[2:], four[:2], dst=HALVES))
    np.testing.assert_array_equal(made[0]["up"], WHOLE["up"][:4])


def test_targets_without_tensors_and_other_operations_are_told(two):
    given = [w.make.remote(make, (2,), COLUMNS, True) for w in two]
    with pytest.raises(errors.LayoutError, match="not known before the call what dst_refs"):
        col.reshard_refs(given, two)
    with pytest.raises(errors.NotATensorError, match="reshard_refs takes DTensors"):
        col.allreduce_refs(given)


def make_module(self, fill, keeps="named_parameters"):
    """A module whose parameters are DTensors, as FSDP2 makes them."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    self.module = torch.nn.Linear(4, 2, bias=False)
    whole = torch.full((2, 4), float(fill))
    self.module.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
    return dict(self.module.named_parameters()) if keeps == "named_parameters" else self.module.state_dict()


def move(self, fill):
    """Moves the module: torch keeps its parameters, and gives them other local tensors."""
    import torch

    before = self.module.weight
    self.module.to_empty(device="cpu")
    assert self.module.weight is before
    with torch.no_grad():
        before.fill_(fill)


def weight(self):
    return self.module.weight.to_local().detach().numpy()


@pytest.fixture(scope="module")
def pair(cluster, tmp_path_factory):
    """Two jobs of two workers."""
    jobs = [_job(2, tmp_path_factory) for _ in range(2)]
    yield [next(job) for job in jobs]
    for job in jobs:
        next(job, None)


@pytest.mark.full  # four processes import torch; tests/pure has the same without torch
def test_dtensors_of_a_module_that_has_moved_are_read_and_written_where_they_are_now(pair, name):
    given, taken = ([w.make.remote(make_module, at) for w in job] for at, job in enumerate(pair))

    def move_to(*fills):
        ray.get([w.call.remote(move, fill) for job, fill in zip(pair, fills, strict=True) for w in job])

    def values():
        return [{float(x) for w in job for x in ray.get(w.call.remote(weight)).flat} for job in pair]

    with col.publish(given, name) as pub, col.subscribe(name, taken) as sub:
        for value in (2.0, 4.0):
            move_to(value, 0.0)
            col.reshard_refs(given, taken)
            assert values() == [{value}, {value}]
            move_to(value + 1, 0.0)
            pub.put()
            sub.update()
            assert values() == [{value + 1}, {value + 1}]


@pytest.mark.full
def test_the_old_dtensors_of_a_module_that_has_moved_are_refused_by_put_and_update(pair, name):
    given, taken = ([w.make.remote(make_module, at, "state_dict") for w in job] for at, job in enumerate(pair))
    with col.publish(given, name) as pub, col.subscribe(name, taken) as sub:
        pub.put()
        sub.update()
        ray.get([w.call.remote(move, 5.0) for job in pair for w in job])
        for use in (pub.put, sub.update):
            with pytest.raises(errors.TensorReplacedError):
                use()
