"""torch's own tests of collectives, point-to-point calls, groups and DDP, on the process group of raycollect."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
torch_own = pytest.importorskip("tests.pure.member.torch_own")

RANKS = 3
GPU, TAG, SOURCE, MONITORED = "asks for GPUs", "tags", "a receive from any rank", "monitored_barrier, or its text"
UNSUITED = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_all_to_all_cuda": GPU,
    "test_all_to_all_cuda_complex": GPU,
    "test_all_to_all_full_group_cuda": GPU,
    "test_all_to_all_group_cuda": GPU,
    "test_barrier_timeout_full_group": MONITORED,
    "test_barrier_timeout_global": MONITORED,
    "test_barrier_timeout_group": MONITORED,
    "test_batch_isend_irecv_gloo_tags": TAG,
    "test_batch_isend_irecv_mixed_backend_err": GPU,
    "test_batch_isend_irecv_op_err": GPU,
    "test_get_backend": "the name is another",
    "test_monitored_barrier_gloo": MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": MONITORED,
    "test_monitored_barrier_gloo_subgroup": MONITORED,
    "test_new_subgroups_with_group_param": "needs four ranks",
    "test_send_recv_any_source": SOURCE,
    "test_send_recv_any_source_autograd_profiler": SOURCE,
    "test_send_recv_any_source_torch_profiler": SOURCE,
    "test_send_recv_with_tag": TAG,
    "test_send_recv_with_tag_autograd_profiler": TAG,
    "test_send_recv_with_tag_torch_profiler": TAG,
    "test_sparse_all_reduce_sum": "sparse tensors",
}
"""Those that do not pass, and why: the backend does not have it, or the machine."""


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list is that of torch 2.13")
def test_torchs_own_tests_pass_where_they_suit(crew, tmp_path):
    taken, ended = crew.take(RANKS), {}
    folders = [tmp_path / name for name in ("barrier", "test_dir", "init_dir")]
    for folder in folders:
        folder.mkdir()
    imported = [one.start(torch_own.names, RANKS, str(tmp_path)) for one in taken]
    names = [one.result(100) for one in imported][-1]
    for number, name in enumerate(names):
        for path in (path for folder in folders for path in folder.iterdir()):
            path.unlink()
        begun = [one.start(torch_own.run, name, number, rank, RANKS, str(tmp_path)) for rank, one in enumerate(taken)]
        told = [one.result(100) for one in begun]
        how = min((found for found, _ in told), key=("failed", "passed", "skipped").index)
        ended.setdefault(how, {})[name] = next(why for found, why in told if found == how)
    print(*(f"{how} {name}: {why}" for how, some in ended.items() for name, why in some.items()), sep="\n")

    assert {name: why for name, why in ended["failed"].items() if name not in UNSUITED} == {}
    assert UNSUITED.keys() == ended["failed"].keys()
    assert len(ended["passed"]) == 110
