"""Tests that need an NVIDIA GPU; `pytest tests/gpu` alone collects them, and skips each where there is none."""
