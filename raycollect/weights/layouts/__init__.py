"""Layouts that are read from what others say: `layout_of` from DTensors, `record_layout` from a loader.

A recorded loader fills local tensors with the *identities* of elements instead of their values, `names` gives full
tensors that have them, and `regions` reads the boxes off what has come. `of_numpy` and `of_torch` are the stand-ins.
"""
