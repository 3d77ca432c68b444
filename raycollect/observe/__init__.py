"""What happened, for errors (`Recorder`), and where the time went (`Tracer`)."""

from __future__ import annotations

from raycollect.observe.recorder import Recorder
from raycollect.observe.trace import Label, Place, Ring, Span, Tracer

__all__ = ["Label", "Place", "Recorder", "Ring", "Span", "Tracer"]
