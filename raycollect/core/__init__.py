"""The base of all other folders, without Ray: shared values, protocols of backends, shared memory, threads."""
