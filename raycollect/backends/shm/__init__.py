"""Backend `shm`: processes of one machine, in memory that they share."""
