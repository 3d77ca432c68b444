"""Objects that work only in the process that created them."""

from __future__ import annotations

from typing import Any, ClassVar

from raycollect.errors import BoundToProcessError


class BoundToProcess:
    """Pickling it, as Ray does with arguments and results, raises BoundToProcessError."""

    __slots__ = ()

    _INSTEAD: ClassVar[str]  # what to pass instead

    def __reduce__(self) -> Any:
        raise BoundToProcessError(found=repr(self), instead=self._INSTEAD)
