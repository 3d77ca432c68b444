"""The live view: what each rank of this process's groups is doing, as a page, in a terminal and as JSON."""
