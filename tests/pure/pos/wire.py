"""A data connection without sockets."""

from __future__ import annotations

from typing import Any


class Wire:
    """Both ends of a data connection: the holder's reads requests and keeps what it sends, the other's reads that."""

    def __init__(self, *requests: Any) -> None:
        self._requests = list(requests)
        self.answers: list[Any] = []
        self.blob = b""

    @property
    def sent(self) -> int:
        return len(self.answers)

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next request; where there is a limit it waits for what was lent, and the client is gone."""
        return self._requests.pop(0) if self._requests and timeout_s is None else None

    def has_ended(self) -> bool:
        return False

    def tell(self, message: Any) -> None:
        self.answers.append(message)

    def send(self, message: Any, blobs: Any = ()) -> None:
        self.answers.append(message)
        self.blob += b"".join(bytes(blob) for blob in blobs)

    def receive_blob(self, *into: memoryview) -> None:
        for view in into:
            view[:], self.blob = self.blob[: view.nbytes], self.blob[view.nbytes :]
