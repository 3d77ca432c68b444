"""The entry point by which torch finds the backend ``"raycollect"`` of `torch.distributed` without an import.

``import torch``, from 2.5 on, calls `autoload` wherever this package is installed. So it imports nothing but what torch
has imported, and raises nothing.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger("raycollect")


def autoload() -> None:
    """Registers the backend, or logs why it can't: an exception would fail ``import torch``."""
    try:
        register()
    except Exception as exc:  # noqa: BLE001 - any, of any version of torch
        _log.warning("torch.distributed has no backend 'raycollect': %s: %s", type(exc).__name__, exc)


def register() -> None:
    """Registers the backend; its code is imported when the first process group is made."""
    import torch

    distributed: Any = torch.distributed
    cuda: Any = torch.backends.cuda
    if distributed.is_available() and "RAYCOLLECT" not in distributed.Backend._plugins:
        devices = ["cpu", "cuda"] if cuda.is_built() else ["cpu"]
        distributed.Backend.register_backend("raycollect", _create, extended_api=True, devices=devices)


def _create(given: Any, options: Any) -> Any:
    from raycollect.member.torch.process_group import create

    return create(given, options)
