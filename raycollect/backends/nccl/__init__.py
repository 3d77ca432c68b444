"""Backend `nccl`: NVIDIA GPUs, by NCCL."""
