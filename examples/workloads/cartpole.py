"""Balancing a pole on a cart, many carts at once: the equations of Barto, Sutton and Anderson (1983), in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GRAVITY, CART_KG, POLE_KG, HALF_POLE_M = 9.8, 1.0, 0.1, 0.5
FORCE_N, TICK_S = 10.0, 0.02
MOST_M, MOST_RAD = 2.4, 12 * np.pi / 180
STATE, ACTIONS = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of episodes: one row each, the steps of an episode in order.

    Attributes:
        states: [n, 4] float32: place and speed of the cart, angle and angular speed of the pole.
        actions: [n] int64: 0 pushes to the left, 1 to the right.
        to_go: [n] float32: the rewards from this step to the end of its episode, one for each step.
        returns: [episodes] float32: the rewards of each episode.
        versions: The versions of the weights that acted.
    """

    states: NDArray[np.float32]
    actions: NDArray[np.int64]
    to_go: NDArray[np.float32]
    returns: NDArray[np.float32]
    versions: tuple[int, ...]


class CartPoles:
    """Carts with poles, each an episode of its own.

    Args:
        count: How many.
        rng: Draws where they begin.
    """

    def __init__(self, count: int, rng: np.random.Generator) -> None:
        self.states = rng.uniform(-0.05, 0.05, (count, STATE))

    def step(self, actions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Pushes each cart for a tick.

        Args:
            actions: [count], 0 or 1.

        Returns:
            [count], True where the pole has fallen or the cart has left the track.
        """
        _, speed, angle, turning = self.states.T
        force = FORCE_N * (2.0 * actions - 1.0)
        sine, cosine = np.sin(angle), np.cos(angle)
        mass = CART_KG + POLE_KG
        push = (force + POLE_KG * HALF_POLE_M * turning**2 * sine) / mass
        turn = (GRAVITY * sine - cosine * push) / (HALF_POLE_M * (4.0 / 3.0 - POLE_KG * cosine**2 / mass))
        move = push - POLE_KG * HALF_POLE_M * turn * cosine / mass
        self.states = self.states + TICK_S * np.stack([speed, move, turning, turn], axis=1)
        return (np.abs(self.states[:, 0]) > MOST_M) | (np.abs(self.states[:, 2]) > MOST_RAD)
