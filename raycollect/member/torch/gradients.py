"""DDP's gradients: a hook that averages them in one pass, in shared memory."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from raycollect.member.torch.process_group import TorchProcessGroup
from raycollect.member.torch.work import future_of
from raycollect.pos.segments import Segments

torch: Any = import_module("torch")
distributed: Any = import_module("torch.distributed")


def allreduce_hook(process_group: Any, bucket: Any) -> Any:
    """Averages gradients of DDP: ``model.register_comm_hook(None, raycollect.torch.allreduce_hook)``.

    By default DDP divides the gradients in a separate pass before the reduction; here the division is a part of the
    reduction. On one machine, DDP's buckets of tensors in host memory are moved to shared memory on first use, and the
    ranks add them in place.
    The last bucket, which overlaps with no computation, is reduced in the thread of the backward pass.

    Args:
        process_group: The process group of the model; None: the default group.
        bucket: The gradients in one tensor, a `torch.distributed.GradBucket`.

    Returns:
        A `torch.futures.Future` of the averages.
    """
    buffer, group = bucket.buffer(), process_group or distributed.group.WORLD
    if isinstance(group, TorchProcessGroup) and group.shares_memory:
        move_to_shared_memory(buffer)
    work = distributed.all_reduce(buffer, distributed.ReduceOp.AVG, group, async_op=not bucket.is_last())
    if work is not None:
        return work.get_future().then(lambda ended: ended.value()[0])
    ended = future_of([buffer])
    ended.set_result(buffer)
    return ended


allreduce_hook.__annotations__.clear()  # DDP accepts only its own types as annotations, or none


def move_to_shared_memory(tensor: Any) -> bool:
    """Moves the memory of a tensor and of all its views to the arena; numpy arrays over the old memory would dangle.

    Returns:
        Whether the memory is in the arena now. False if it is a device's, if the arena is full or off, or if this torch
        can't move memory.
    """
    if tensor.device.type != "cpu":
        return False
    storage, segments = tensor.untyped_storage(), Segments.current()
    address, nbytes = storage.data_ptr(), storage.nbytes()
    if segments.locate(address, nbytes) is not None:
        return True
    swap = getattr(storage, "_swap_data_ptr_", None)  # new in torch 2.13
    if swap is not None and nbytes:
        with suppress(OSError, MemoryError):
            shared = torch.from_numpy(segments.allocate(nbytes)).untyped_storage()
            shared.copy_(storage)
            swap(shared)
            return True
    return False
