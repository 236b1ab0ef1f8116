"""Microbatches in flight, counted from a schedule."""

from distlab.techniques.pipeline_parallel.schedules import Action


def most_in_flight(actions: list[Action]) -> int:
    """The most microbatches that a rank has between their forward and the end of their backward; each chunk counts."""
    current = most = 0
    for action in actions:
        current += {"forward": 1, "input": 0, "backward": -1, "weight": -1}[action.kind]
        most = max(most, current)
    return most
