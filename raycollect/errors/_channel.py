"""Errors of the control plane."""

from __future__ import annotations

from dataclasses import dataclass

from raycollect.errors._base import RaycollectError


@dataclass(eq=False, kw_only=True)
class ChannelError(RaycollectError):
    """The control plane failed."""

    detail: str
    peer: str = ""

    def _text(self) -> str:
        return f"{self.peer}: {self.detail}" if self.peer else self.detail


class ProtocolError(ChannelError):
    """The peer broke the protocol's rules; the connection was closed."""


class AuthenticationError(ChannelError):
    """The peer does not hold the key; the connection was closed."""


class ConnectionLostError(ChannelError):
    """The connection ended."""


@dataclass(eq=False, kw_only=True)
class HolderUnreachableError(ChannelError):
    """The process that holds a tensor could not be reached in time; it may well live, and the tensor is as it was.

    Attributes:
        op: What was asked of it: ``"get"`` or ``"free"``.
        actor: What a person calls it.
        ref: The ref, in hexadecimal.
    """

    op: str = ""
    actor: str = ""
    ref: str = ""
    cure = (
        "call it again. If it fails again, check what the message names: file descriptors (ulimit -n) on both sides, "
        "the network between the hosts, or a holder that is stopped"
    )

    def _text(self) -> str:
        who = f"{self.actor} at {self.peer}" if self.actor else self.peer
        return f"{self.op} of {self.ref}: can't reach {who}: {self.detail}"
