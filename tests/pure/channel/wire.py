"""The two ends of one connection of the control channel, without I/O."""

from __future__ import annotations

from raycollect.channel.protocol import (
    Connection,
    Reply,
)

SECRET = b"s" * 32
HELLO = {"pid": 7, "who": "driver"}


class Wire:
    """A client and a server, and all that went between them."""

    def __init__(
        self,
        *,
        purpose: str = "control",
        server_secret: bytes = SECRET,
        client_secret: bytes = SECRET,
        server_nonce: bytes = b"S" * 16,
        client_nonce: bytes = b"C" * 16,
    ) -> None:
        self.server = Connection("server", server_secret, nonce=server_nonce)
        self.client = Connection("client", client_secret, nonce=client_nonce, purpose=purpose, hello=HELLO)
        self.challenge = self.server.start()
        assert self.client.start() == b""
        (reply,) = self.client.receive(self.challenge)
        assert isinstance(reply, Reply)
        self.proof = reply.data

    def open(self) -> Wire:
        reply, self.server_opened = self.server.receive(self.proof)
        assert isinstance(reply, Reply)
        self.confirmation = reply.data
        (self.client_opened,) = self.client.receive(reply.data)
        return self
