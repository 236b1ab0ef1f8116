"""The reference of puzzle 12."""


def schedule(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[str, int]]:
    warm_up = min(num_stages - stage - 1, num_microbatches)
    actions = [("F", number) for number in range(warm_up)]
    for number in range(warm_up, num_microbatches):
        actions += [("F", number), ("B", number - warm_up)]
    return actions + [("B", number) for number in range(num_microbatches - warm_up, num_microbatches)]
