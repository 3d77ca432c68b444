"""The base class of all messages."""

from __future__ import annotations

from typing import Any

from raycollect.core.codec import Wire

Error = dict[str, Any]
"""The result of `raycollect.errors.to_wire`; `from_wire` checks it."""


class Message(Wire, frozen=True, tag=True):
    """Base of all messages."""
