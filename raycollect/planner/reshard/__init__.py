"""Reshards: tensors move between two layouts, by the fewest bytes between hosts, proven before anything is sent.

`request` has the layouts of both sides and the tensors of each rank, `matching` checks the layouts and matches holders
with readers, `routes` chooses the senders, `halves` is one rank's share, `rounds` packs transfers into rounds of
bounded size, and `proof` proves the halves of all ranks. `planner.lower_reshard` makes a part of a plan of them.
"""
