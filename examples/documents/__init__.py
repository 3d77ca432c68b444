"""The examples of the documents about `ray.util.collective`, with one import changed.

Three further changes make them run on any machine, and each file says where: numpy in the place of cupy, no GPUs asked
for, and slips of the documents corrected.
"""
