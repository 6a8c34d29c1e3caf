"""Random settings and random sequences of steps, shared by the comparison tests."""

import random


def overflow_pattern(rng: random.Random, steps: int) -> list[bool]:
    """Whether each step is finite: a constant rate of overflows, or bursts."""
    if rng.random() < 0.7:
        rate = rng.choice((0.0, 0.02, 0.1, 0.3, 0.6, 0.95, 1.0))
        return [rng.random() >= rate for _ in range(steps)]
    flags: list[bool] = []
    while len(flags) < steps:
        flags += [True] * rng.randint(1, 15) + [False] * rng.randint(1, 6)
    return flags[:steps]


def draw(rng: random.Random, **choices: tuple) -> dict:
    """Draw one value for each setting."""
    return {name: rng.choice(values) for name, values in choices.items()}
