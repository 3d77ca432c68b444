"""Backend `torch:<name>`: any backend of torch.distributed."""
