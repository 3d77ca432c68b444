"""raycollect for torch: a backend of torch.distributed, and collectives that autograd differentiates.

::

    import raycollect.torch  # which registers it

    torch.distributed.init_process_group("raycollect")
"""

from __future__ import annotations

from raycollect.member.torch.autograd import all_gather, all_reduce, all_to_all, reduce_scatter
from raycollect.member.torch.gradients import allreduce_hook
from raycollect.member.torch.process_group import TorchProcessGroup, register

__all__ = [
    "TorchProcessGroup",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allreduce_hook",
    "reduce_scatter",
    "register",
]

register()
