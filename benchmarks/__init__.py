"""Measurements of `raycollect` beside what people use today: ``python -m benchmarks --help``.

All contenders of a comparison are measured in one run, in turn, so that whatever else happens on the machine hits all
alike; in another order each time; what each has computed is checked in every round. Contenders that are not
installed are named as skipped.

==============  ====================================================================================================
`interleave`    times contenders in turn
`report`        what a measurement is: rows, peaks of memory, skips; kept as JSON
`targets`       what the library has to reach, as a table, and whether it does
`tables`        the terminal
`machine`       what the numbers were measured on
`suites`        one module per suite: who is compared, on what
`kernels`       the processes of suite `kernel`, and the contenders in them
`crew`          the actors of the suites that need Ray
`ours`,         the contenders on these actors; those of one suite alone stand with it
`theirs`,
`pairs`
==============  ====================================================================================================
"""
