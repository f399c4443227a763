"""The search for the best learning rate, on an open ladder, and the best of a few values of a second number."""

import math

LOWEST = -12  # steps below the first rate, tried only while all rates diverge


def next_points(tried: dict[tuple[int, int], float], start: int, values: int) -> list[tuple[int, int]]:
    """The points (step of the rate, index of the second number) to try next: the neighbours of the best one on
    either ladder, or a lower rate while all diverge. Empty at the end."""
    if not tried:
        return [(-1, start), (0, start), (1, start)]
    step, value = best_point(tried)
    if math.isinf(tried[step, value]):
        lowest = min(step for step, _ in tried) - 1
        return [(lowest, start)] if lowest >= LOWEST else []
    rates = [(step - 1, value), (step + 1, value)]
    seconds = [(step, other) for other in (value - 1, value + 1) if 0 <= other < values]
    return [point for point in rates if point not in tried] or [point for point in seconds if point not in tried]


def best_point(tried: dict[tuple[int, int], float]) -> tuple[int, int]:
    """The point of the lowest loss; of equal losses the lower rate."""
    return min(tried, key=lambda point: (tried[point], point))
