"""What tests with Ray share beyond the cluster."""

from __future__ import annotations

import pytest

from raycollect.driver.participant_link import ParticipantLink


@pytest.fixture
def submits(monkeypatch):
    """What participants get, by an actor task or the channel: (actor, number of outputs)."""
    sent, submit, order = [], ParticipantLink.submit, ParticipantLink.order

    def counted(self, payload, outputs):
        sent.append((self.info["actor"], outputs))
        return submit(self, payload, outputs)

    def ordered(self, message):
        if message.in_order:
            sent.append((self.info["actor"], 0))
        return order(self, message)

    monkeypatch.setattr(ParticipantLink, "submit", counted)
    monkeypatch.setattr(ParticipantLink, "order", ordered)
    return sent


@pytest.fixture
def by_channel(monkeypatch):
    """As on a machine without shared memory for doorbells."""

    def refuse(slots):
        raise OSError("no memory")

    monkeypatch.setattr("raycollect.captured.install.Doorbell", refuse)
