"""Workloads from practice, each compared with the usual ways: checks, and times of each way.

Run each as a module. It prints a table; `--json` prints the same for programs.

    python -m examples.workloads.weight_sync        # the weights of a trainer, in all rollout workers (torch)
    python -m examples.workloads.torch_ddp          # data-parallel training (torch)
    python -m examples.workloads.zero1              # data-parallel training with a sharded optimizer (torch)
    python -m examples.workloads.pipeline           # stages of a network that overlap
    python -m examples.workloads.megatron           # weights between other layouts (torch)
"""
