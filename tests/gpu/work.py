"""Work on streams, as users of cupy and of torch put it there: the same few things, by either library."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from . import devices

BUSY_SIZE, BUSY_TIMES = (1000, 20) if devices.FAKE else (1 << 27, 400)
"""What keeps a stream busy: so many float32, added to so many times; 0.1 to 0.5 s on the GPUs of some years."""


class Work(Protocol):
    """A library, on the current device."""

    def stream(self) -> Any:
        """Makes a stream that does not wait for the default stream."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes it the current one."""
        ...

    def zeros(self, size: int) -> Any:
        """Makes a tensor of float32, [size], on the current stream."""
        ...

    def is_busy(self, stream: Any) -> bool:
        """Whether it has work to do."""
        ...

    def host(self, tensor: Any) -> np.ndarray:
        """Copies to the host, behind the work of the current stream."""
        ...


class CupyWork:
    """By cupy."""

    def __init__(self) -> None:
        self._cupy = import_module("cupy")

    def stream(self) -> Any:
        return self._cupy.cuda.Stream(non_blocking=True)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return stream

    def zeros(self, size: int) -> Any:
        return self._cupy.zeros(size, np.float32)

    def is_busy(self, stream: Any) -> bool:
        return not stream.done

    def host(self, tensor: Any) -> np.ndarray:
        return tensor.get()


class TorchWork:
    """By torch, whose streams are all independent of the default one."""

    def __init__(self) -> None:
        self._torch = import_module("torch")

    def stream(self) -> Any:
        return self._torch.cuda.Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._torch.cuda.stream(stream)

    def zeros(self, size: int) -> Any:
        return self._torch.zeros(size, device="cuda")

    def is_busy(self, stream: Any) -> bool:
        return not stream.query()

    def host(self, tensor: Any) -> np.ndarray:
        return tensor.cpu().numpy()


WORK: dict[str, type[CupyWork | TorchWork]] = {"cupy": CupyWork, "torch": TorchWork}


class Busy:
    """Something to do that takes a while, on the current stream.

    Args:
        work: The library.
    """

    def __init__(self, work: Work) -> None:
        self._tensor = work.zeros(BUSY_SIZE)

    def start(self) -> None:
        """Puts it on the current stream."""
        for _ in range(BUSY_TIMES):
            self._tensor += 1


def must_be_busy(work: Work, stream: Any) -> None:
    """Fails where a test proves nothing, since the work was done before the call; the fake goes by its own order."""
    assert devices.FAKE or work.is_busy(stream), "the GPU is too fast for BUSY_SIZE and BUSY_TIMES"
