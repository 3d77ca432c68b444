"""raycollect under torch: a process group of torch.distributed, and differentiable collectives."""
