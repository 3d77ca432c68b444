"""All that the package uses of Ray beyond its public API; docs/adr/0001-ray-internals.md says what and why."""
