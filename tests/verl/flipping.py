"""A module for `custom_backend_module`: raycollect's engine, with a bit that is flipped on its way at will."""

from __future__ import annotations

from verl.checkpoint_engine import CheckpointEngineRegistry

import raycollect.verl


@CheckpointEngineRegistry.register("flipping")
class Flipping(raycollect.verl.CheckpointEngine):
    flips = False

    def flip(self):
        """Flips a bit of the next message."""
        self.flips = True

    def broadcast(self, message, group_name):
        super().broadcast(message, group_name)
        if self.flips:
            message[3] ^= 1
        self.flips = False
