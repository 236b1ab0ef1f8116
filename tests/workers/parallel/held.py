"""What a schedule makes a rank hold."""

from workers.parallel.schedules import Action


def most_in_flight(actions: list[Action]) -> int:
    """How many microbatches a rank holds at most between their forward and their backward; with chunks, each apart."""
    held = most = 0
    for action in actions:
        held += 1 if action.kind == "forward" else -1
        most = max(most, held)
    return most
