"""Event logs for errors (`Recorder`), spans for timelines (`Tracer`), and totals for metrics (`Counters`)."""

from __future__ import annotations

from raycollect.observe.counters import Counters, Tally
from raycollect.observe.recorder import Recorder
from raycollect.observe.trace import Label, Ring, Span, TracedGroup, Tracer

__all__ = ["Counters", "Label", "TracedGroup", "Recorder", "Ring", "Span", "Tally", "Tracer"]
