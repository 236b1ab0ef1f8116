"""Run all passes over all variants, in order: prove, time and count.

Each pass creates new strategies, so that none inherits state. Measured values are compared with the mode's predictions;
a mode that only declares variants is run by `everything`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from distlab.contract import Build, Claims, Held, Measured, Mode, Strategy
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.report.records import Expected
from distlab.lab.report.tables import DRAWN, ON_WIRE
from distlab.lab.verify.counted import COUNTED_STEPS, count
from distlab.lab.verify.proof import prove
from distlab.lab.verify.records import RECORDED_STEPS, compare_drawn
from distlab.lab.verify.timed import time_steps
from distlab.lab.workload.data import effective_batch
from distlab.lab.workload.user_model import is_own

# Some variants are in a run for comparison, not for speed: with gloo the small all_reduces of dp's per_parameter took
# half of the default run's timed steps. Together with others such a variant takes one of `timed_part` steps
# (contract.py), by a fixed rule, so that a run is reproducible to the bit. A variant chosen alone gets all of its
# steps, and so do runs that save, resume or inject faults, where all need the same steps.

LEAST_STEPS = 5  # two untimed ones, and three for a median


def timed_ends(lab: Lab, chosen: Collection[str], *, same_steps: bool) -> dict[str, int]:
    """Return the step before which each variant ends; LAB_STEPS for all if they need the `same_steps`."""
    steps = lab.config.steps
    if same_steps or len(chosen) < 2 or lab.config.backend != "gloo" or lab.config.world_size < 2:
        return dict.fromkeys(chosen, steps)
    parts = {each.name: each.timed_part for each in lab.mode.variants}
    return {name: min(steps, max(LEAST_STEPS, -(-steps // parts.get(name, 1)))) for name in chosen}


def print_shortened(lab: Lab, ends: dict[str, int]) -> None:
    for name, end in ends.items():
        if end < lab.config.steps:
            lab.say(
                f"only {end} of {lab.config.steps} steps of {name} are timed, because they are slow;"
                f" LAB_VARIANT={name} times all",
                "steps",
            )


if TYPE_CHECKING:
    from distlab.lab.checkpoint.resume import Checkpoints


def everything(lab: Lab) -> None:
    """Run a mode without its own run function: measure its variants, and compare them with its predictions."""
    predictions = lab.mode.predict(lab.config)
    for prediction in predictions:
        if lab.wants(prediction.variant):
            lab.say(
                f"{prediction.variant}: {prediction.name} {prediction.formula} = {max(prediction.value):g}"
                f" {prediction.unit}",
                "predict",
            )
    lab.compare_predictions(predictions, measure(lab))


def measure(
    lab: Lab,
    *,
    also: Callable[[str, Strategy], None] | None = None,
    proofs: Mapping[str, Callable[[str, Build], None]] | None = None,
    references: Mapping[str, Held] | None = None,
    timed: Callable[[], None] | None = None,
) -> dict[str, Measured]:
    """Prove, time and count every variant of LAB_VARIANT; `also(name, strategy)` adds checks to each proof, `timed()`
    to the timed steps.

    Variants excluded by these settings are skipped, with the mode's reason. Variants in `proofs` differ from one
    process by design: each has its own proof there, and its timed steps are checked as `references` says, or
    informational.
    Returns this rank's measurements; rank 0 prints proofs and times at once, counts after the comparison with
    predictions.
    """
    lab.say(effective_batch(lab.config, lab.mesh.size("dp")), "batch")
    chosen, checkpoints = choose(lab)
    if lab.config.proof:
        prove(lab, chosen, also, proofs or {}, checkpoints)
    by_design = dict.fromkeys(proofs or {}, Held(why="differs from one process by design: its own proof decides"))
    ends = timed_ends(lab, chosen, same_steps=checkpoints is not None or bool(lab.config.planned_faults))
    print_shortened(lab, ends)
    timed_steps = steps_left(ends, checkpoints)
    recorded = RECORDED_STEPS * len(chosen) if timed_steps else 0
    with lab.work.of(timed_steps + recorded + COUNTED_STEPS * len(chosen), "steps"):
        bubbles, drawn = time_steps(lab, chosen, ends, by_design | dict(references or {}), checkpoints)
        if timed is not None:
            timed()
        lab.finished("timed")
        lab.finished("profile")
        counted = count(lab, chosen)
    compare_drawn(lab, drawn, counted)
    return {
        name: Measured(**vars(each), bubble=bubbles.get(name))
        for name, each in counted.items()
        if not is_own(name)  # no lesson predicts its bytes, calls and memory
    }


def choose(lab: Lab) -> tuple[dict[str, Build], "Checkpoints | None"]:
    """Return the variants chosen by LAB_VARIANT that these settings allow, and the requested checkpoints."""
    chosen = {each.name: each.build for each in lab.mode.variants if each.build is not None and lab.wants(each.name)}
    checkpoints = None
    reasons = dict(lab.mode.cannot(lab.config))
    if lab.config.checkpoint_every is not None or lab.config.resume is not None:
        from distlab.lab.checkpoint.resume import prepare  # torch's checkpoints take 0.7 s to import

        checkpoints = prepare(lab)
        reasons |= checkpoints.missing(chosen)
    for name in [name for name in chosen if name in reasons]:
        lab.skip(name, reasons[name])
        del chosen[name]
    return chosen, checkpoints


def steps_left(ends: Mapping[str, int], checkpoints: "Checkpoints | None") -> int:
    """Return the number of steps to time, of all variants, after those in a checkpoint."""
    found = checkpoints.resumed if checkpoints is not None else None
    done = found.manifest.steps if found is not None else {}
    return sum(max(0, end - done.get(name, 0)) for name, end in ends.items())


# The claims that a run needs, from its settings only: the passes' checks of all variants, and each lesson's list.
#
# This does not use the code that makes the claims, so the report detects a claim that is missing
# (distlab/lab/report/verdict.py). If a claim depends on the run, such as a loss that is not finite, that code records
# why there is nothing to check (`Lab.waive`), or it is not listed.

SURE_STEPS = 5  # of the timed steps that every variant takes, if LAB_STEPS has them
PROVEN = ("losses", "gradients", "weights")
TUNED = ("clipped gradients", "optimizer state", "weights after two steps")


def expected(config: Config, mode: Mode) -> Expected:
    """Return all claims that a run with these settings needs, for the variants that are chosen and can run."""
    own = mode.claims or (measured if mode.run is None else None)
    impossible = {*mode.cannot(config), *mode.left_out}
    wanted = [
        [variant, name, each.times, each.one]
        for each in (own(mode, config) if own is not None else ())
        for variant in (mode.with_like(each.of) if each.when else ())
        for name in each.names
        if variant not in impossible and (variant not in mode.names or not config.variant or variant in config.variant)
    ]
    return Expected(wanted)


def measured(
    mode: Mode, config: Config, not_compared: Sequence[str] = (), unequal: Sequence[str] = (),
    replicated: Sequence[str] | None = None,
) -> tuple[Claims, ...]:  # fmt: skip
    """Return the passes' checks of the variants that they train.

    Args:
        not_compared: those that are not compared with one process.
        unequal: those whose ranks may have different weights after the last step.
        replicated: those with replicated tensors; default: all by hand, unless ranks share one copy.
    """
    trained = [each.name for each in mode.variants if each.build is not None]
    by_hand = [name for name in trained if name not in mode.by_torch]
    compared, own = ([name for name in names if name not in not_compared] for names in (trained, by_hand))
    with_replicas = replicated if replicated is not None else () if mode.shards else mode.by_hand
    proof, fresh, adam = config.proof, config.resume is None, config.optimizer == "adamw"  # else no step may be left
    every, saves = config.audit_every or 0, config.checkpoint_every is not None
    audits = fresh and 0 < every <= min(SURE_STEPS, config.steps) and config.world_size > 1
    saved = config.steps // (config.checkpoint_every or config.steps + 1)
    audited = ("audited loss", "audited weights", *(["audited optimizer"] if adam else []))
    return (
        Claims(("timed steps",), trained),
        Claims(("timed replicas",), [name for name in by_hand if name not in unequal], one=True),
        Claims((DRAWN, ON_WIRE), trained, when=fresh),
        Claims((*PROVEN, "proof steps"), compared, one=True, when=proof),
        Claims(("timed losses",), own, one=True, when=proof),
        Claims(TUNED, compared, one=True, when=proof and (adam or config.clip is not None)),
        Claims(audited, own, one=True, when=proof and fresh),
        Claims(("audited replicas",), with_replicas, one=True, when=audits),
        Claims(("resume", "resumed samples"), compared, one=True, when=proof and saves),
        Claims(("resumed generators",), compared, when=proof and saves),
        Claims(("checkpoint",), one=True, times=saved, when=saved > 0),
        Claims(("resumed generators", "resumed samples", "newest checkpoint"), one=True, when=not fresh),
    )
