"""The entry point by which torch finds the backend ``"raycollect"`` of `torch.distributed` without an import.

``import torch`` calls `register` wherever this package is installed. So it imports nothing but what torch has imported.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Registers the backend; its code is imported when the first process group is made."""
    from torch import distributed

    if distributed.is_available() and "RAYCOLLECT" not in distributed.Backend._plugins:
        distributed.Backend.register_backend("raycollect", _create, extended_api=True, devices=["cpu"])


def _create(given: Any, options: Any) -> Any:
    from raycollect.member.torch.process_group import create

    return create(given, options)
