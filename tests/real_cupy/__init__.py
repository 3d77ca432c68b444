"""Checks against the real cupy and NCCL, as far as they run without a GPU; `make real-cupy` runs them."""
