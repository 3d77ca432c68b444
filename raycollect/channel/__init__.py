"""The control plane: small authenticated messages, and bulk data, between the processes of a plan.

========================  ====================================================================
`messages`                the messages and their codec
`protocol`                handshake, frames and their tags: no I/O, no clock, no threads
`loop`, `endpoint`        one thread that watches sockets; a control connection on it
`stream`                  a connection in blocking mode
`server`, `client`        the listening end, the connecting ends
`completion_bell`         wakes who waits for a plan, through shared memory
`order_bell`              brings orders, through shared memory
`refusals`                logs refused clients
========================  ====================================================================
"""

from __future__ import annotations

from raycollect.channel.client import DataClient, Hub
from raycollect.channel.completion_bell import CompletionBell, CompletionBellClient
from raycollect.channel.endpoint import Link
from raycollect.channel.order_bell import OrderBell, OrderBellClient
from raycollect.channel.server import DataLink, Server

__all__ = [
    "CompletionBell",
    "CompletionBellClient",
    "DataClient",
    "DataLink",
    "Hub",
    "Link",
    "OrderBell",
    "OrderBellClient",
    "Server",
]
