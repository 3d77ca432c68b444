"""Layouts from DTensors (`layout_of`) and from loaders (`record_layout`).

A recorded loader fills local tensors with the *identities* of elements instead of their values. `identities` numbers
the elements of full tensors, and finds their boxes in local ones. `of_numpy` and `of_torch` make the placeholders.
"""
