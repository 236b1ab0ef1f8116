"""What a schedule makes a rank hold."""

from distlab.techniques.pipeline_parallel.schedules import Action


def most_in_flight(actions: list[Action]) -> int:
    """How many microbatches a rank holds at most between their forward and the end of their backward; with chunks, each
    apart."""
    held = most = 0
    for action in actions:
        held += {"forward": 1, "input": 0, "backward": -1, "weight": -1}[action.kind]
        most = max(most, held)
    return most
