"""Seats of a doorbell in the test's own process: they take runs, and answer."""

from __future__ import annotations


def take(post):
    """The next run, however often `take` returns without one."""
    while (entry := post.take(5.0)) is None:
        pass
    return entry


def serve(post, runs, answer=bytes):
    """Answers runs by what they bring."""
    for _ in range(runs):
        entry = take(post)
        post.answer(entry.number, answer(entry.payload))
