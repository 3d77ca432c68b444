"""Workloads from practice: each is what a user would write, and checks its results. README.md lists them."""
