"""The examples of the documents about `ray.util.collective`, with one import changed.

Three further changes make them run on any machine, and each file says where: numpy instead of cupy, no GPUs, and
corrected mistakes of the documents.
"""
