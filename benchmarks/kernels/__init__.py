"""The processes of suite `kernel`: no Ray, one process per rank and contender.

A `Team` is one contender: `worker` is what each of its processes runs, a `Player` what it does there. A worker blocks
on a Unix socket until the coordinator, who asks one team at a time, wants something; so nobody spins, inside MPI or
elsewhere, while another is measured.

What makes it fair:

- All players of an operation get float32 arrays of the same sizes, filled with the same values; only where the memory
  comes from differs: ordinary (numpy) for all but `raycollect shm, arena` and the limit.
- Each operation is timed by each rank; a burst counts as on the rank whose burst took longest. So a sender that returns
  early, or a rank that leaves a barrier first, gains nothing. Where ranks need not wait for each other (a broadcast,
  a send), an operation may overlap the next one of its burst.
- A burst of operations runs back to back, after one that is not timed and brings ranks and caches to where the
  contender itself leaves them.
- One thread per rank for everyone (`OMP_NUM_THREADS=1`, `torch.set_num_threads(1)`), and no rank bound to a core.
- raycollect runs as a program runs it: staging, the agreement (the consistency check), the kernel, the end of the
  launch. gloo and MPI have no such agreement.
"""
