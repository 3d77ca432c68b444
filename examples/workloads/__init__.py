"""Workloads as they are met in practice, each beside the usual ways to do it: what holds, and how long each way takes.

Each is run as a module, and prints a table; `--json` prints the same for programs.

    python -m examples.workloads.weight_sync        # the weights of a trainer, in all rollout workers (torch)
    python -m examples.workloads.torch_ddp          # data-parallel training (torch)
    python -m examples.workloads.parameter_server   # workers that update one model at their own pace
    python -m examples.workloads.embedding          # a table that is sharded over actors
"""
