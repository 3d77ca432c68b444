"""Checks against the real cupy, NCCL and nvrtc, as far as they run without a GPU; `make real-cupy` runs them."""
