"""What fails in the control plane."""

from __future__ import annotations

from dataclasses import dataclass

from raycollect.errors._base import RaycollectError


@dataclass(eq=False, kw_only=True)
class ChannelError(RaycollectError):
    """The control plane failed.

    Attributes:
        detail: What happened.
        peer: The other end, as text.
    """

    detail: str
    peer: str = ""

    def __str__(self) -> str:
        return f"{self.peer}: {self.detail}" if self.peer else self.detail


class ProtocolError(ChannelError):
    """The peer broke the protocol's rules; the connection was closed."""


class AuthenticationError(ChannelError):
    """The peer does not hold the key; the connection was closed."""


class ConnectionLostError(ChannelError):
    """The connection ended."""
