"""Three typical wrong answers to puzzle 12, and why each is refused."""

REFUSED = {
    1: r"2 stages and 5 microbatches: stage 0 keeps the activations of 5 microbatches at one time, allowed 2",
    2: r"2 stages and 5 microbatches: the bubble is 50.0% of the time, allowed 16.7%",
    3: r"no stage can continue: stage 0 waits for B 0 of stage 1, stage 1 waits for F 1 of stage 0",
}
Actions = list[tuple[str, int]]


def schedule_1(stage: int, num_stages: int, num_microbatches: int) -> Actions:
    """GPipe: all F first, so all activations are kept."""
    return [(action, number) for action in "FB" for number in range(num_microbatches)]


def schedule_2(stage: int, num_stages: int, num_microbatches: int) -> Actions:
    """One microbatch at a time through all stages: nothing overlaps."""
    return [(action, number) for number in range(num_microbatches) for action in "FB"]


def schedule_3(stage: int, num_stages: int, num_microbatches: int) -> Actions:
    """The stages are counted from the wrong end: the last one does most F in advance."""
    warm_up = min(stage, num_microbatches)
    actions = [("F", number) for number in range(warm_up)]
    for number in range(warm_up, num_microbatches):
        actions += [("F", number), ("B", number - warm_up)]
    return actions + [("B", number) for number in range(num_microbatches - warm_up, num_microbatches)]
