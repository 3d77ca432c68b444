"""What happened: a bounded record that every error can show."""

from __future__ import annotations

from raycollect.observe.recorder import Event, Recorder

__all__ = ["Event", "Recorder"]
