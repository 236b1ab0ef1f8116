"""The sweep: every recipe at every multiple of the base batch, on the same samples; its errors, bytes and checks, and
the k at which each recipe breaks down.

Losses decide nothing, so their ingredients are checked. The first and last step of every training are compared with one
process. Held-out samples are never trained on, and the ranks use each sample of a step once and end with equal weights.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from distlab.contract import Claims, Counted, Mode, untrainable
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.event_order import Order
from distlab.lab.measure.prediction import Prediction, of_a_step
from distlab.lab.verify.proof import check_same
from distlab.lab.verify.silent_corruption import Corruption
from distlab.lab.workload import data
from distlab.lab.workload.model import build_model, outline
from distlab.lab.workload.user_model import is_own
from distlab.techniques.collectives.costs import all_reduce_cost

from .checks import LAYERWISE, STEPS, check_step, state_of
from .training import LAMB_RATE, LARS_RATE, Recipe, Stream, Trainee, base_rate, sgd

MULTIPLES = (1, 2, 4, 8, 16, 32)
WORSE = 2.0  # a recipe has broken down at this multiple of its loss at k = 1
EQUALITY = "k steps of η against one of kη"

Losses = dict[int, float]  # held-out, by k


def multiples(config: Config) -> list[int]:
    """Return the k that divide the steps, so that all use the same samples."""
    return [k for k in MULTIPLES if config.steps % k == 0]


def refuse(config: Config, recipes: Mapping[str, Recipe]) -> list[str]:
    if config.model == "line":
        return ["LAB_MODEL='line' has one batch of 32 points, which cannot be multiplied, allowed: mlp, gpt"]
    if is_own(config.model):
        return [f"LAB_MODEL={config.model!r}: largebatch trains only the lab's models, allowed: mlp, gpt"]
    refusals = []
    if config.optimizer != "sgd":
        refusals.append(
            f"LAB_OPTIMIZER={config.optimizer} cannot be set in largebatch: each recipe has its own optimizer"
        )
    if config.clip is not None:
        refusals.append(
            f"LAB_CLIP={config.clip:g} cannot be set in largebatch: with clipping, steps would not grow with the rate"
        )
    if "bucket" in config.model_fields_set:
        refusals.append(
            f"LAB_BUCKET_MIB={config.bucket_mib:g} cannot be set in largebatch: all its gradients are in one bucket"
        )
    optimizers = {recipe.optimizer for recipe in recipes.values()}
    if config.lr is not None and optimizers and sgd not in optimizers:
        refusals.append(f"LAB_LR={config.lr:g} is the base rate of SGD, which no recipe of LAB_VARIANT uses")
    if config.model == "gpt" and not data.text_refusals(config) and len(data.Text(config)) == 1:
        refusals.append(
            f"the text has one sample of LAB_SEQ={config.seq} bytes, but a second one must be held out: "
            "set a longer one in LAB_TEXT"
        )
    return refusals + untrainable(config)


def predict(config: Config) -> list[Prediction]:
    """Return the bytes of one step of any training, per rank."""
    cost = all_reduce_cost(config.world_size, outline(config).num_parameters() * config.itemsize)
    return of_a_step(config.model, "2(N-1)/N x S", [cost] * config.world_size)


def claims(mode: Mode, config: Config) -> Sequence[Claims]:
    """Return the checks: the proof of each recipe; samples, two steps and replicas at every k of the sweep; bytes."""
    batches, proof = len(multiples(config)), config.proof
    plain = [name for name in mode.names if name not in LAYERWISE]

    def claims_of_all(name: str, times: int, test: str) -> Claims:
        return Claims((name,), mode.names, one=True, times=times, when=proof, fails_in=test)

    other_step = "test_samples_of_another_step_fail_the_run"
    return (
        Claims(("effective batch",), one=True, times=batches, fails_in=other_step),
        Claims(("held out",), one=True, fails_in="test_a_sweep_evaluated_on_training_samples_fails_the_run"),
        Claims(("replicas",), mode.names, times=batches),
        Claims(("called bytes", "wire bytes"), (config.model,)),
        Claims(("layers",), LAYERWISE, when=proof, fails_in="test_a_wrong_edge_case_fails_the_run"),
        Claims(("global norms",), LAYERWISE, when=proof, fails_in="test_local_norms_fail_the_run"),
        Claims((EQUALITY,), one=True, when=proof, fails_in="test_summed_gradients_fail_the_run"),
        claims_of_all("gradients", STEPS, other_step),
        claims_of_all("weights", STEPS, "test_a_missing_term_fails_the_run"),
        Claims(("learning rate",), plain, one=True, times=STEPS, when=proof),
        claims_of_all("trained gradients", batches, "test_a_sweep_on_one_batch_fails_the_run"),
        claims_of_all("trained weights", batches, "test_a_sweep_with_wrong_updates_fails_the_run"),
    )


# --- the sweep ---


class SweepResults(NamedTuple):
    losses: dict[str, Losses]  # by recipe
    untrained: float  # the held-out loss before the first step
    counted: Counted  # of one step at the largest k


def note_losses(lab: Lab, k: int, stream: Stream, losses: Mapping[str, Losses]) -> None:
    """Log on each rank its part of the batch at this `k`, and the loss that each recipe reached."""
    ids = stream.sample_ids(0, lab.rank, lab.world_size)
    final_losses = ", ".join(f"{name} {losses_by_k[k]:.3g}" for name, losses_by_k in losses.items())
    number = lab.config.steps // k
    steps = f"{number} step{'s' if number > 1 else ''}"
    lab.note("trains", f"k={k}: {steps}, {len(ids)} of {k * lab.config.batch} samples here; loss {final_losses}")


def sweep(lab: Lab, recipes: Mapping[str, Recipe]) -> SweepResults:
    """Train all `recipes`, one k after the other."""
    config, dtype, ks = lab.config, getattr(torch, lab.config.dtype), multiples(lab.config)
    stream = Stream(config, config.seed, config.steps, lab.device, dtype)

    def trainee(recipe: Recipe, k: int) -> Trainee:
        model = build_model(config, config.seed).to(lab.device, dtype)
        return Trainee(model, stream, recipe, k, config.steps // k, config, lab.group)

    losses: dict[str, Losses] = {name: {} for name in recipes}
    if lab.rank == 0:
        check_held_out(lab, stream)
    with lab.work.of(len(recipes) * sum(config.steps // k for k in ks), "steps of all recipes"):
        for k in ks:
            check_samples(lab, stream.times(k))
            for name, recipe in recipes.items():
                training = trainee(recipe, k)
                train(lab, name, training)
                losses[name][k] = training.held_out_loss()
            note_losses(lab, k, stream.times(k), losses)
    first = next(iter(recipes.values()))
    training, untrained = trainee(first, ks[-1]), trainee(first, 1).held_out_loss()
    with lab.count() as traffic:
        training.backward(0)
        training.update(0)
    return SweepResults(losses, untrained, Counted(traffic, 0, {}, {}, Order({})))


def train(lab: Lab, name: str, trainee: Trainee) -> None:
    """Run all steps of one training, and check the first and the last."""
    steps, label = trainee.steps, f"{name} at k = {trainee.k}"
    corruption = Corruption(lab, {label: trainee}, lab.config.audit_every)
    checked = {0, steps - 1} if lab.config.proof and lab.rank == 0 else set()
    for step in range(steps):
        before = state_of(trainee) if step in checked else []
        lab.begin_step(step, label)
        for kind, part in (("gradients", trainee.backward), ("weights", trainee.update)):
            part(step)
            corruption.hash(kind, label, trainee, step)
        lab.stepped()
        corruption.compare(label, step)
        if step in checked:
            check_step(lab, name, trainee, before, step, proof=False)
    corruption.decide()
    weights = (weight.flatten() for _, weight in trainee.alike("weights"))
    check_same(lab, name, [weight.view(torch.uint8) for weight in weights])  # a diverged training may have inf or NaN


def check_held_out(lab: Lab, stream: Stream) -> None:
    """Check that no held-out sample is trained on."""
    seen = len({*stream.held_out.tolist()} & {*stream.trained.tolist()})
    lab.check("held out", seen, 0, detail="held-out samples that are trained on")


def check_samples(lab: Lab, stream: Stream) -> None:
    """Check that all ranks together use each sample of the first step once."""
    samples_by_rank = lab.exchange.gather("samples", stream.sample_ids(0, lab.rank, lab.world_size))
    if samples_by_rank is not None:
        times, wanted = (
            Counter(sample for samples_of_rank in samples_by_rank for sample in samples_of_rank),
            Counter(stream.full_ids(0)),
        )
        wrong = sum(abs(times[sample] - wanted[sample]) for sample in times | wanted)
        detail = "samples of a step that are not used exactly once"
        lab.check("effective batch", wrong, 0, detail=detail)


# --- results ---


def show_settings(lab: Lab) -> None:
    config, ks = lab.config, multiples(lab.config)
    total = config.steps * config.batch
    lab.say(f"{outline(config).describe()}: {total} samples for every k, {config.dtype}", "model")
    skipped_ks = [str(k) for k in MULTIPLES if k not in ks]
    if skipped_ks:
        lab.say(
            f"k = {', '.join(skipped_ks)}: LAB_STEPS={config.steps} is not a multiple, so the samples would differ",
            "left out",
        )
    lab.say(f"base rates: SGD {base_rate(config):g}, LARS {LARS_RATE:g}, LAMB {LAMB_RATE:g}", "rates")
    for k in ks:
        batch = data.effective_batch(config.model_copy(update={"batch": k * config.batch}), lab.world_size)
        lab.say(f"k = {k}: {batch}, {config.steps // k} steps", "batch")


def show_found(lab: Lab, found: SweepResults) -> None:
    """Show the losses as a table and a chart, and the k at which each recipe breaks down."""
    ks, untrained, ends = multiples(lab.config), found.untrained, {}
    rows: list[list[object]] = []
    for name, losses in found.losses.items():
        ends[name] = break_down(losses, untrained)
        cells = (f"{losses[k]:.3g}" if learned(losses[k], untrained) else "diverged" for k in ks)
        rows.append([name, *cells, ends[name]])
    title = f"loss on held-out samples after {lab.config.steps * lab.config.batch} samples"
    lab.table(f"{lab.config.model}: {title}", ["recipe", *(f"k = {k}" for k in ks), "breaks down at"], rows)
    lab.say(
        f"loss {untrained:.4g} before the first step; a recipe breaks down at the smallest k with a higher loss, or"
        f" with more than {WORSE:g} times its loss at k = 1",
        "found",
    )
    lab.say("breaks down at: " + ", ".join(f"{name} {end}" for name, end in ends.items()), "result", at="normal")
    points_by_recipe = {
        name: [(float(k), loss) for k, loss in losses.items() if learned(loss, untrained)]
        for name, losses in found.losses.items()
    }
    series = {
        name: [list(axis) for axis in zip(*points, strict=True)] for name, points in points_by_recipe.items() if points
    }
    lab.chart(
        f"{lab.config.model}: held-out loss by batch (not drawn above {untrained:.3g}, that of the untrained model)",
        "k", "loss", series, log_x=True,
    )  # fmt: skip


def learned(loss: float, untrained: float) -> bool:
    """Return whether the loss is a number and not above that of an untrained model."""
    return loss <= untrained


def break_down(losses: Losses, untrained: float) -> str:
    bound = min(untrained, WORSE * losses[1])
    failed = [k for k, loss in sorted(losses.items()) if not learned(loss, bound)]
    return f"k = {failed[0]}" if failed else f"none up to {max(losses)}"
