"""raycollect for torch: ``import raycollect.torch`` makes it a backend of `torch.distributed`.

::

    import raycollect.torch

    torch.distributed.init_process_group("raycollect")
"""

from __future__ import annotations

from raycollect.member.torch_process_group import NAME, TorchProcessGroup, register

__all__ = ["NAME", "TorchProcessGroup", "register"]

register()
