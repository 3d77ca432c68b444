"""Measurements of `raycollect` beside what people use today: ``python -m benchmarks --help``.

Five suites measure the five claims of README.md and docs/performance.md. All contenders of a table take turns in one
run, in an order that is drawn for each turn (`raycollect.cli.harness`), on actors of their own, and each as its own
users write it. Results are checked in every round; contenders that are not installed are named as skipped.

==================  ================================================================================================
`suites.calls`      calls from the driver on refs that stay: alone, after a pause, many at once
`suites.steps`      a loop: an iteration of training on fresh refs, and a captured step
`suites.weights`    weights to rollouts, between layouts, from actor to actor
`suites.links`      the kernels alone, and collectives between hosts
`suites.faults`     a rank that dies, or calls something else
`suite`, `report`   the choices of a run, the measurement of a case, its records
`targets`           what was asked of the library, and whether it is reached
`gpu`               checks and times `nccl` on a GPU, by itself
==================  ================================================================================================
"""
