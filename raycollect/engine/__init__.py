"""Runs programs on a participant: preparation, agreement, kernels; and runs captured steps."""
