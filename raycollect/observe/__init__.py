"""What happened: a bounded record that every error can show; and where the time went, in timelines."""

from __future__ import annotations

from raycollect.observe.recorder import Event, Recorder
from raycollect.observe.trace import Label, Place, Ring, Span, Tracer

__all__ = ["Event", "Label", "Place", "Recorder", "Ring", "Span", "Tracer"]
