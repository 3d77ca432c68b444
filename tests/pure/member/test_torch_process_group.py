"""raycollect under torch.distributed, in plain processes: beside gloo, in the same processes on the same tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

from raycollect.errors import GroupBrokenError
from tests.pure.member import torch_bodies as bodies
from tests.pure.processes import outcome

ROOT = Path(__file__).parents[3]


def kill(processes):
    """Ends processes in which torch may have stopped half way: the tests after this one would fail, too."""
    for one in processes:
        one.process.kill()
        one.process.join()


@pytest.fixture
def ranks(crew, tmp_path):
    """Runs a body as ``body(rank, world)`` in processes with both groups."""

    def run(body, world=2, *args, **options):
        taken = crew.take(world)
        store = f"file://{tmp_path}/store"
        begun = [one.start(bodies.begun, body, rank, world, store, options, *args) for rank, one in enumerate(taken)]
        results = [outcome(one) for one in begun]
        failures = [one for one in results if isinstance(one, BaseException)]
        if failures:  # that a rank has left follows from its own
            kill(taken)
            raise min(failures, key=lambda one: isinstance(one, GroupBrokenError))
        return results

    return run


def test_every_operation_of_torch_gives_what_it_should(ranks):
    ranks(bodies.every_operation, 3)


def test_between_hosts_it_runs_on_sockets(ranks):
    ranks(bodies.every_operation, 2, pg_options={"backend": "tcp"})


def test_ranks_send_and_receive_in_rings(ranks):
    ranks(bodies.rings, 3)


def test_calls_under_way_have_futures_and_keep_their_order(ranks):
    ranks(bodies.many_under_way)


def test_a_call_that_is_interrupted_before_its_turn_never_begins(ranks):
    ranks(bodies.interrupted)


def test_subgroups_of_each_size(ranks):
    ranks(bodies.subgroups, 3)


@pytest.mark.parametrize("is_for_cuda", [False, True])
def test_torch_learns_its_devices(ranks, is_for_cuda):
    """Of a torch for CUDA, which this one need not be, only what it asks is tested."""
    ranks(bodies.asked_by_torch, 2, is_for_cuda)


def test_what_it_can_not_do_is_refused(ranks):
    ranks(bodies.refused)


@pytest.mark.parametrize("size", [1, 300_000])
def test_calls_that_nobody_waits_for_end_before_the_group(ranks, size):
    count = 20 if size == 1 else 3
    for held in ranks(bodies.unwaited, 2, count, size):
        assert [set(one.tolist()) for one in held] == [{at + 1.0} for at in range(count)]


@pytest.mark.parametrize("how", ["shutdown", "abort"])
def test_group_is_left_within_its_time_limit(ranks, how):
    took_s, _ = ranks(bodies.never_received, 2, how)
    assert took_s < 30


@pytest.mark.parametrize("how", ["plain", "hook"])
def test_ddp_raises_what_failed(ranks, how):
    """The process died of SIGSEGV: torch looks for the tensors in the value of a future that has failed."""
    told = ranks(bodies.without_a_rank, 2, how)
    assert "CollectiveTimeoutError" in told[0]
    assert "rank 1" in told[0]


def test_groups_come_and_go(crew, tmp_path):
    taken = crew.take(2)
    for turn in range(2):
        store = f"file://{tmp_path}/store"  # the same again
        begun = [one.start(bodies.begun, bodies.summed, rank, 2, store, {}, turn) for rank, one in enumerate(taken)]
        assert [one.result(60) for one in begun] == [3.0 + turn] * 2


def test_the_stores_of_torch(crew, tmp_path):
    """``tcp://`` and ``env://``, as torchrun sets it."""
    taken = crew.take(2)
    for kind in ("tcp", "env"):
        port = bodies.free_port()
        begun = [one.start(bodies.by_server, kind, port, rank, 2) for rank, one in enumerate(taken)]
        try:
            assert [one.result(60) for one in begun] == [3.0] * 2
        except BaseException:
            kill(taken)
            raise


@pytest.mark.full
def test_under_torchrun(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, raycollect.torch\n"
        "torch.distributed.init_process_group('raycollect')\n"
        "x = torch.ones(3)\n"
        "torch.distributed.all_reduce(x)\n"
        "assert x.tolist() == [2.0] * 3\n"
        "torch.distributed.destroy_process_group()\n"
    )
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("name", ["all_reduce", "average", "all_gather", "reduce_scatter", "all_to_all"])
def test_gradients_are_those_of_one_process(crew, name):
    crew.group(3).must(bodies.differentiated, name)


def test_what_has_no_gradient_is_refused(crew):
    crew.group(2).must(bodies.no_gradient)


# ---------------------------------------------------------------------------------------------- what trains on it


@pytest.mark.parametrize("how", ["plain", "views", "hook", "unused", "accumulated"])
def test_ddp_has_the_gradients_that_it_has_on_gloo(ranks, how):
    ranks(bodies.data_parallel, 2, how)


@pytest.mark.parametrize("is_possible", [True, False])
def test_the_hook_moves_the_buckets_of_ddp_to_shared_memory(ranks, is_possible):
    ranks(bodies.in_shared_memory, 2, is_possible)


def test_fsdp_has_the_parameters_that_it_has_on_gloo(ranks):
    ranks(bodies.fully_sharded)


def test_fully_shard_has_the_parameters_that_it_has_on_gloo(ranks):
    ranks(bodies.fully_sharded_in_place)


def test_dtensors_are_distributed_and_gathered(ranks):
    ranks(bodies.dtensors)
