"""The control plane: small authenticated messages, and bulk data, between the processes of a plan.

========================  ====================================================================
`messages`                the messages and their codec
`protocol`                handshake, frames and their tags: no I/O, no clock, no threads
`loop`, `endpoint`        one thread that watches sockets; a control connection on it
`stream`                  a connection in blocking mode
`server`, `client`        the listening end, the connecting ends
`mailbox`                 sends plans, and reports their ends, through shared memory
`refusals`                logs refused clients
========================  ====================================================================
"""

from __future__ import annotations

from raycollect.channel.client import DataClient, Hub
from raycollect.channel.endpoint import ControlLink
from raycollect.channel.mailbox import Mailbox, MailboxClient
from raycollect.channel.server import DataLink, Server

__all__ = [
    "DataClient",
    "DataLink",
    "Hub",
    "ControlLink",
    "Mailbox",
    "MailboxClient",
    "Server",
]
