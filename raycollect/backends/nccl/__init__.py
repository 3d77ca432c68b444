"""Backend `nccl`: NVIDIA GPUs, by NCCL, or by CUDA IPC where all ranks share one."""
