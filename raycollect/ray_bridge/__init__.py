"""The package's uses of Ray beyond its public API, which docs/adr/0001-ray-internals.md lists with the reasons."""
