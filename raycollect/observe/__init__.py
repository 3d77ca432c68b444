"""What happened, for errors (`Recorder`), where the time went (`Tracer`), and how much in all (`Counters`)."""

from __future__ import annotations

from raycollect.observe.counters import Counters, Tally
from raycollect.observe.recorder import Recorder
from raycollect.observe.trace import Label, Place, Ring, Span, Tracer

__all__ = ["Counters", "Label", "Place", "Recorder", "Ring", "Span", "Tally", "Tracer"]
