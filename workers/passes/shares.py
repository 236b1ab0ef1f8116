"""How many timed steps each variant takes: LAB_STEPS, or its share of them.

Some variants are in a run for what they show, not for their speed: naive dp's 133 small all_reduces over gloo took 26
of the 53 s of the default run's timed steps. Beside others such a variant takes one of `timed_part` steps
(contract.py), and the run says so. By a rule and not by a clock, so that a run is repeatable to the bit. Whoever asks
for a variant alone gets all of its steps, and so does who saves, resumes or drills, where all have to have done the
same ones.
"""

from collections.abc import Collection

from workers.lab import Lab

LEAST_STEPS = 5  # two that are not timed, and three for a median


def timed_ends(lab: Lab, chosen: Collection[str], *, alike: bool) -> dict[str, int]:
    """The step before which each of these variants ends; LAB_STEPS for all where they are to stay `alike`."""
    steps = lab.config.steps
    if alike or len(chosen) < 2 or lab.config.backend != "gloo" or lab.config.world_size < 2:
        return dict.fromkeys(chosen, steps)
    parts = {each.name: each.timed_part for each in lab.mode.variants}
    return {name: min(steps, max(LEAST_STEPS, -(-steps // parts.get(name, 1)))) for name in chosen}


def say_shares(lab: Lab, ends: dict[str, int]) -> None:
    """Tell who takes fewer, and how to have all."""
    for name, end in ends.items():
        if end < lab.config.steps:
            lab.say(
                f"{name} takes {end} of {lab.config.steps} timed steps, since one takes as long as several of the"
                f" others'; LAB_VARIANT={name} takes all",
                "steps",
            )
