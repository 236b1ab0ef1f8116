"""All passes over all variants, in their order: prove, time, count, and with LAB_TRACE=1 profile.

Each pass makes its strategies anew, so that none inherits what another left. What is measured is held against what the
mode predicted; a mode that says no more than its variants is run by `everything`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from workers.contract import Build, Held, Measured, Strategy
from workers.lab import Lab
from workers.passes.counted import count
from workers.passes.proof import prove
from workers.passes.recorded import compare_drawn
from workers.passes.shares import say_shares, timed_ends
from workers.passes.timed import time_steps
from workers.workload.data import effective_batch
from workers.workload.own import is_own

if TYPE_CHECKING:
    from workers.checkpoint.resuming import Checkpoints


def everything(lab: Lab) -> None:
    """The run of a mode that has none of its own: measure its variants, and hold them against its predictions."""
    predictions = lab.mode.predict(lab.config)
    for prediction in predictions:
        if lab.wants(prediction.variant):
            lab.say(
                f"{prediction.variant}: {prediction.name} {prediction.formula} = {max(prediction.value):g}"
                f" {prediction.unit}",
                "predict",
            )
    measured = measure(lab)
    lab.compare_traffic(predictions, measured)
    lab.compare_rest(predictions, measured)


def measure(
    lab: Lab,
    *,
    also: Callable[[str, Strategy], None] | None = None,
    proofs: Mapping[str, Callable[[str, Build], None]] | None = None,
    held: Mapping[str, Held] | None = None,
    timed: Callable[[], None] | None = None,
) -> dict[str, Measured]:
    """Prove, time and count every variant that LAB_VARIANT asks for; `also(name, strategy)` adds checks to each proof,
    `timed()` to the timed steps.

    Variants that these settings rule out are skipped, for the reason that the mode gives. Variants in `proofs` do on
    purpose not compute what one process does: each is proven by what stands there in its place, and its timed steps
    are held to what `held` says, or only shown. Returns what was measured on this rank; rank 0 tells what was proven
    and timed when it is, what was counted once it is held against predictions.
    """
    lab.say(effective_batch(lab.config, lab.mesh.size("dp")), "batch")
    chosen, checkpoints = choose(lab)
    if lab.config.proof:
        prove(lab, chosen, also, proofs or {}, checkpoints)
    otherwise = dict.fromkeys(proofs or {}, Held(why="on purpose not what one process computes: its proof decides"))
    ends = timed_ends(lab, chosen, alike=checkpoints is not None or bool(lab.config.planned_faults))
    say_shares(lab, ends)
    with lab.work.of(steps_left(ends, checkpoints), "timed steps"):
        bubbles, drawn = time_steps(lab, chosen, ends, otherwise | dict(held or {}), checkpoints)
    if timed is not None:
        timed()
    lab.finished("timed")
    lab.finished("profile")
    with lab.work.of(len(chosen), "variants counted"):
        counted = count(lab, chosen)
    compare_drawn(lab, drawn, counted)
    if lab.config.trace:
        from workers.passes.profiled import trace

        with lab.work.of(len(chosen), "variants profiled"):
            trace(lab, chosen)
        lab.finished("hidden")
    return {
        name: Measured(**vars(each), bubble=bubbles.get(name))
        for name, each in counted.items()
        if not is_own(name)  # of whose bytes, calls and memory no lesson predicts anything
    }


def choose(lab: Lab) -> tuple[dict[str, Build], "Checkpoints | None"]:
    """The variants that LAB_VARIANT asks for and that these settings allow, and the checkpoints that are asked for."""
    chosen = {each.name: each.build for each in lab.mode.variants if each.build is not None and lab.wants(each.name)}
    checkpoints = None
    reasons = dict(lab.mode.cannot(lab.config))
    if lab.config.checkpoint_every is not None or lab.config.resume is not None:
        from workers.checkpoint.resuming import prepare  # torch's checkpoints: 0.7 s that other runs need not wait

        checkpoints = prepare(lab)
        reasons |= checkpoints.missing(chosen)
    for name in [name for name in chosen if name in reasons]:
        lab.skip(name, reasons[name])
        del chosen[name]
    return chosen, checkpoints


def steps_left(ends: Mapping[str, int], checkpoints: "Checkpoints | None") -> int:
    """The steps of all variants that are to be timed: behind those that a checkpoint holds."""
    found = checkpoints.resumed if checkpoints is not None else None
    done = found.manifest.steps if found is not None else {}
    return sum(max(0, end - done.get(name, 0)) for name, end in ends.items())
