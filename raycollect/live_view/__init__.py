"""The live view: what each rank of this process's groups is doing, as a page, in a terminal and as JSON."""

from __future__ import annotations

from raycollect.live_view.view import LiveView, live

__all__ = ["LiveView", "live"]
