"""Reshards: tensors move between two layouts, by the fewest bytes between hosts, proven before anything is sent.

`request` says what is asked for and what ranks must hold, `matching` finds what is wrong with it and who holds what
whom needs, `routes` chooses who sends, `halves` is what one rank does, `rounds` packs the transfers into rounds of
bounded size, `proof` proves the halves of all ranks, and `lowering` makes a part of a plan of them.
"""
