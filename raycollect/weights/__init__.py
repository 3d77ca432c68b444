"""Weights: the layouts that others say, and versions that are whole or not there."""
