"""What tests with Ray share beyond the cluster."""

from __future__ import annotations

import pytest

from raycollect.driver.participant_link import ParticipantLink


@pytest.fixture
def submits(monkeypatch):
    """What is submitted to participants: (actor, number of outputs)."""
    sent, submit = [], ParticipantLink.submit

    def counted(self, payload, outputs):
        sent.append((self.info["actor"], outputs))
        return submit(self, payload, outputs)

    monkeypatch.setattr(ParticipantLink, "submit", counted)
    return sent


@pytest.fixture
def by_channel(monkeypatch):
    """As on a machine without shared memory for doorbells."""

    def refuse(slots):
        raise OSError("no memory")

    monkeypatch.setattr("raycollect.captured.install.Doorbell", refuse)
