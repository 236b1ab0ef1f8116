"""What ranks and the one process share, checked by statements of a few lines each that share nothing with it.

The proof compares N ranks with one process. Both run the same model on the same samples with the same optimizer, so
what is wrong there is equally wrong on both sides. Tests therefore compare these with what was published or is true by
definition:

    model, causal, positions   scores, loss and routers by their definition; a position sees none behind it, and
                               knows its place
    first weights              their deviation is the published one within its sampling error; another seed, others
    loss, shares               the mean over the whole batch is torch's own mean of it, however it is divided
    targets                    of a text the bytes one further on; of points y = 2x + 1 with noise of 0.1
    epochs, shards             an epoch has every sample once, in another order than the last; shards cover a batch
                               once, and those of the proof are uneven where they can be
    optimizer                  three steps of it against its formula
    dropout, recomputation     if requested (model_statements.py)

Sizes are those of the settings, with two samples of at most POSITIONS positions. Of a model of one's own only its data
and the optimizer can be stated.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from distlab.lab.lab import Lab
from distlab.lab.workload import data
from distlab.lab.workload.data import Batches, Microbatch, PartedBatches
from distlab.lab.workload.model import VOCABULARY
from distlab.lab.workload.optimizer import make_optimizer
from distlab.lab.workload.user_model import is_own, reads_text
from tests.lab.verify.model_statements import (
    ERRORS,
    STATED,
    TOLERANCE,
    check_dropout,
    check_first_weights,
    check_model,
    check_recomputation,
    difference,
    summed_loss,
)  # fmt: skip

EPOCH = 2  # global batches of the proof, so that its third step begins another epoch
MOST_EPOCHS = 40  # of two samples, whose order is equal by chance in one of two


def check_shared_parts(lab: Lab) -> None:
    """All statements, on rank 0; nothing without the proof, or where a mode trains nothing."""
    if not lab.config.proof or not lab.mode.audits or lab.rank:
        return
    lab.at(0, "statements of what ranks and one process share")
    batches = lab.batches(torch.float64, proof=True)
    check_data(lab, batches)
    check_optimizer(lab)
    if all(type(layer) in STATED for layer in lab.mode.model(lab.config, lab.config.seed).layers):
        check_first_weights(lab)
        check_model(lab, batches)
        check_loss(lab, everyones(lab, batches))
    check_dropout(lab, batches)
    if lab.config.recompute:
        check_recomputation(lab)


# --- the loss ---


def check_loss(lab: Lab, parts: list[Microbatch]) -> None:
    """What all shards' microbatches add up to is torch's own mean over the whole batch, at scores that are drawn."""
    for dtype in dict.fromkeys([torch.float64, getattr(torch, lab.config.dtype)]):
        loss, generator, total = lab.model(dtype).loss, torch.Generator().manual_seed(lab.config.seed), 0.0
        scores: list[Tensor] = []
        for each in parts:
            shape = (*each.targets.shape, VOCABULARY) if lab.config.model == "gpt" else each.targets.shape
            scores.append(torch.randn(shape, generator=generator).to(each.targets.device, dtype))
            total += loss(scores[-1], each.targets).item() * each.share
        exact, targets = torch.cat(scores).double(), torch.cat([each.targets for each in parts])
        wanted = summed_loss(exact, targets).item() / targets.numel()
        unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        rounding = TOLERANCE if dtype == torch.float64 else unit * math.sqrt(targets.numel())
        detail = f"{wanted:.6g} in the mean over {targets.numel()} terms, in {dtype}"
        lab.check("loss", abs(total - wanted), rounding * max(1.0, wanted), detail=detail)


# --- the data ---


def check_data(lab: Lab, batches: Batches) -> None:
    parts = everyones(lab, batches)
    terms = sum(each.targets.numel() * each.share for each in parts)
    lab.check("shares", abs(terms - 1), TOLERANCE, detail="a batch's, added up over all terms")
    check_shards(lab, batches, parts)
    check_epochs(lab, batches)
    if reads_text(lab.config.model):
        off = misread(lab, batches)
        lab.check("targets", off, 0, detail="bytes of samples that are not the text's next ones")
    elif not is_own(lab.config.model):
        check_points(lab, batches)


def everyones(lab: Lab, batches: Batches) -> list[Microbatch]:
    shards = lab.mesh.size("dp")
    return [part for shard in range(shards) for part in batches.microbatches(0, shard, shards)]


def check_shards(lab: Lab, batches: Batches, parts: list[Microbatch]) -> None:
    """The assigned rows are those of the batch; where shards can be uneven, they are, and microbatches too."""
    shards, accumulated = lab.mesh.size("dp"), lab.config.num_microbatches
    whole = batches.full(0)
    missing = rows_of([whole]) - rows_of(parts)
    surplus = rows_of(parts) - rows_of([whole])
    sizes = [[len(part.inputs) for part in batches.microbatches(0, shard, shards)] for shard in range(shards)]
    even = shards > 1 and batches.batch // accumulated > shards and len({sum(each) for each in sizes}) == 1
    if not isinstance(batches, PartedBatches):  # whose microbatches are all shards' together
        divided = [each for each in sizes if sum(each) > len(each) > 1]
        even = even or any(len(set(each)) == 1 for each in divided)
    sizes_text = ", ".join(" + ".join(map(str, each)) for each in sizes)
    detail = f"samples missing or twice, of shards of {sizes_text}{', even where they need not be' * even}"
    lab.check("shards", missing.total() + surplus.total() + even, 0, detail=detail)


def rows_of(parts: Iterable[Microbatch]) -> Counter[bytes]:
    return Counter(
        one.double().numpy().tobytes() + other.double().numpy().tobytes()
        for part in parts
        for one, other in zip(part.inputs.cpu(), part.targets.cpu(), strict=False)
    )


def check_epochs(lab: Lab, batches: Batches) -> None:
    """Two epochs of the proof hold each sample once, not all epochs are in one order, nor two seeds; the first and the
    last batch of an epoch that is timed have nothing in common."""
    config, batch = lab.config, batches.batch
    whole = config.model == "line"  # of which every step takes all points
    length = 1 if whole else EPOCH
    orders = [
        [number for step in range(length) for number in batches.full_ids(epoch * length + step)]
        for epoch in range(MOST_EPOCHS)
    ]
    wrong = sum(sorted(order) != list(range(length * batch)) for order in orders[:2])
    if not whole and length * batch > 1:
        wrong += orders.count(orders[0]) == len(orders)
        other = copy.copy(batches)
        other.config = config.model_copy(update={"seed": config.seed + 1})
        wrong += batch > ERRORS and other.full_ids(0) == orders[0][:batch]
        timed = lab.batches(batches.dtype)
        if timed.num_batches > 1:
            wrong += not set(timed.full_ids(0)).isdisjoint(timed.full_ids(timed.num_batches - 1))
    detail = "epochs that lack a sample or have one twice, or all in one order"
    lab.check("epochs", wrong, 0, detail=detail)


def misread(lab: Lab, batches: Batches) -> int:
    """Bytes of the first batch that are not the text's: sample i is its bytes from i·S on, a target the one behind."""
    text, seq = data.read_text(lab.config), lab.config.seq
    whole, wrong = batches.full(0), 0
    for number, inputs, targets in zip(batches.full_ids(0), whole.inputs.tolist(), whole.targets.tolist(), strict=True):
        start = number * seq
        if start + seq < len(text):  # a short text is read over again
            wanted = text[start : start + seq + 1]
            pairs = zip([*inputs, *targets], [*wanted[:-1], *wanted[1:]], strict=False)
            wrong += sum(one != other for one, other in pairs) + abs(len(inputs) - seq) + abs(len(targets) - seq)
    return wrong


def check_points(lab: Lab, batches: Batches) -> None:
    """x is uniform in (-1, 1), y - 2x - 1 normal with a deviation of 0.1."""
    whole = batches.full(0)
    x, noise = whole.inputs.flatten(), (whole.targets - 2 * whole.inputs - 1).flatten()
    count = x.numel()
    off = max(
        abs(x.mean().item()) * math.sqrt(3 * count),  # a deviation of 1/√3
        abs(x.square().mean().item() - 1 / 3) * math.sqrt(count * 45 / 4),
        abs(noise.mean().item()) / 0.1 * math.sqrt(count),
        abs(noise.square().mean().item() / 0.01 - 1) * math.sqrt(count / 2),
        math.inf if x.abs().max() >= 1 else 0.0,
    )
    lab.check("targets", off, ERRORS, detail="sampling errors off y = 2x + 1 and noise of 0.1")


# --- the optimizer ---


def check_optimizer(lab: Lab) -> None:
    """Three steps of it from weights that are drawn, along gradients that are: w - lr·g, or AdamW (Loshchilov and
    Hutter 2019, algorithm 2, with the published 0.9, 0.999, 1e-8 and torch's decay of 0.01)."""
    generator, lr = torch.Generator().manual_seed(lab.config.seed), lab.config.learning_rate
    weight = nn.Parameter(torch.randn(100, generator=generator, dtype=torch.float64))
    wanted, first, second = weight.detach().clone(), torch.zeros(()), torch.zeros(())
    optimizer, off = make_optimizer([weight], lab.config), 0.0
    for step in range(1, 4):
        weight.grad = gradient = torch.randn(100, generator=generator, dtype=torch.float64)
        optimizer.step()
        if lab.config.optimizer == "adamw":
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient.square()
            direction = first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
            wanted = wanted - lr * (direction + 0.01 * wanted)
        else:
            wanted = wanted - lr * gradient
        off = max(off, difference(weight.detach(), wanted))
    detail = f"of three steps of {lab.config.optimizer} against its formula"
    lab.check("optimizer", off, TOLERANCE, detail=detail)
