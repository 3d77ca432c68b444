"""raycollect in Ray's own registries: a backend of `ray.util.collective`, and a transport of Ray Direct Transport."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec

NAME = "RAYCOLLECT"
"""The name in both registries."""


def register_with_ray() -> None:
    """Registers the backend ``"raycollect"`` of `ray.util.collective`, and the tensor transport ``"RAYCOLLECT"``.

    Ray keeps both registries per process. Call this function at the top of the module that defines the actors, before
    their classes: Ray reads the name of a transport as it decorates a method. Or call it in every worker process, by
    ``ray.init(runtime_env={"worker_process_setup_hook": "raycollect.register_with_ray"})``. A second call does nothing.

    The backend uses shared memory between processes of one host, and sockets between hosts. The transport needs torch,
    which this function imports if it is installed, and moves tensors in host memory.
    """
    from ray.util.collective.backend_registry import register_collective_backend

    from raycollect.ray_plugins.collective_group import CollectiveGroup

    with suppress(ValueError):  # registered before
        register_collective_backend(NAME, CollectiveGroup)
    if find_spec("torch") is not None:
        import torch
        from ray.experimental import register_tensor_transport

        from raycollect.ray_plugins.tensor_transport import TensorTransport

        with suppress(ValueError):
            register_tensor_transport(NAME, ["cpu"], TensorTransport, torch.Tensor)
