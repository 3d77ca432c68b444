"""Data connections over real sockets: requests, blobs, and what ends them."""

from __future__ import annotations

import secrets
import threading

import pytest

from raycollect.channel import DataClient, DataLink
from raycollect.channel.messages import Bye, Fetch, Fetched, Free, Freed
from raycollect.errors import ConnectionLostError, ProtocolError
from tests.pure.channel.parties import LIMIT_S, Party, Rig, echo, rig

__all__ = ["rig"]  # a fixture


def test_a_control_message_overtakes_a_blob(rig: Rig) -> None:
    there, here = Party(echo), Party()
    there.value = memoryview(secrets.token_bytes(20 << 20))
    address = rig.serve(there)
    link = rig.connect(address, here)
    client = DataClient(address, LIMIT_S)
    answer = client.request(Fetch(key=b"k"))
    assert answer == Fetched(description=b"n2", blob_nbytes=20 << 20)
    link.send(Bye())  # the blob is under way and nobody reads it yet
    assert here.messages.get(timeout=LIMIT_S) == Bye()
    into = bytearray(20 << 20)
    client.receive_blob(memoryview(into)[: 7 << 20])
    assert client.blob_left == 13 << 20
    client.receive_blob(memoryview(into)[7 << 20 :])
    assert into == there.value
    assert client.blob_left == 0
    assert client.request(Free(keys=[b"a", b"b"])) == Freed(count=2)
    client.close()


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 70_000])
def test_blobs_of_any_size_one_after_the_other(rig: Rig, nbytes: int) -> None:
    there = Party()
    there.value = memoryview(secrets.token_bytes(nbytes))
    client = DataClient(rig.serve(there), LIMIT_S)
    for _ in range(3):
        answer = client.request(Fetch(key=b"k"))
        assert isinstance(answer, Fetched)
        assert answer.blob_nbytes == nbytes
        into = bytearray(nbytes)
        client.receive_blob(memoryview(into))
        assert into == there.value
    client.close()


def test_a_blob_must_be_read_and_no_further(rig: Rig) -> None:
    there = Party()
    there.value = memoryview(b"0123456789")
    client = DataClient(rig.serve(there), LIMIT_S)
    client.request(Fetch(key=b"k"))
    with pytest.raises(ProtocolError):
        client.receive_blob(memoryview(bytearray(11)))
    with pytest.raises(ProtocolError, match="were not read"):
        client.request(Free(keys=[]))
    client.close()


def test_an_answer_that_does_not_come_costs_the_time_limit_and_the_client(rig: Rig) -> None:
    class Mute(Party):
        def serve_data(self, link: DataLink) -> None:
            while link.receive() is not None:
                pass

    client = DataClient(rig.serve(Mute()), LIMIT_S)
    with pytest.raises(ConnectionLostError):
        client.request(Bye(), timeout_s=0.05)
    with pytest.raises(ConnectionLostError):
        client.request(Bye())


def test_a_failing_data_handler_ends_its_connection_only(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    address = rig.serve(Party())
    first, second = DataClient(address, LIMIT_S), DataClient(address, LIMIT_S)
    with pytest.raises(ConnectionLostError):
        first.request(Fetch(key=b"boom"))
    assert second.request(Free(keys=[])) == Freed(count=0)
    assert "boom" in caplog.text
    second.close()


def test_closing_the_server_wakes_its_data_threads(rig: Rig) -> None:
    client = DataClient(rig.serve(Party()), LIMIT_S)
    assert client.request(Free(keys=[])) == Freed(count=0)
    rig.servers[0].close()
    assert not [t for t in threading.enumerate() if t.name.startswith("raycollect-data")]
    with pytest.raises(ConnectionLostError):
        client.request(Free(keys=[]))
    client.close()
