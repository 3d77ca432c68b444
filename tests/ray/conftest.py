"""What tests with Ray share beyond the cluster."""

from __future__ import annotations

import pytest

from raycollect.peer import Peer


@pytest.fixture
def submits(monkeypatch):
    """What is submitted to participants: (actor, number of outputs)."""
    sent, submit = [], Peer.submit

    def counted(self, payload, outputs):
        sent.append((self.info["actor"], outputs))
        return submit(self, payload, outputs)

    monkeypatch.setattr(Peer, "submit", counted)
    return sent


@pytest.fixture
def by_channel(monkeypatch):
    """As on a machine without shared memory for doorbells."""

    def refuse(seats):
        raise OSError("no memory")

    monkeypatch.setattr("raycollect.capturing.Doorbell", refuse)
