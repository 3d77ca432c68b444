"""Measurements: contenders are timed in turn, in one process, so that noise hits all of them alike.

`report` holds what every suite shares: rows, the table, the machine's description. `interleave` times contenders.
Each suite is a module of its own: ``python -m benchmarks.allreduce``.
"""
