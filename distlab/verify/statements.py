"""What ranks and the one process share, held to statements of a few lines each that share nothing with it.

The proof compares N ranks with one process. Both run the same model on the same samples with the same optimizer, so
what is wrong there is wrong on both sides alike. Rank 0 therefore holds these to what was published or is true by
definition, once a run and before its variants:

    model, causal, positions   scores, loss and routers by definition.py; a position sees none behind it, and knows its
                               place
    first weights              their deviation is the published one within its sampling error; another seed, others
    loss, shares               the mean over the whole batch is torch's own mean of it, however it was dealt
    targets                    of a text the bytes one further on; of points y = 2x + 1 with noise of 0.1
    epochs, shards             an epoch has every sample once, in another order than the last; shards cover a batch
                               once, and those of the proof are uneven where they can be
    optimizer                  three steps of it against its formula
    dropout, recomputation     where they are asked for: the masks below, repeated.py

Sizes are those of the run, with two samples of at most POSITIONS positions: 0.15 s of the default model. Of a model of
one's own only its data and the optimizer can be stated.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.lab import Lab
from distlab.measure.tensors import largest_difference
from distlab.verify.definition import Weights, computed, num_weights
from distlab.verify.repeated import hold_recomputation
from distlab.workload import data
from distlab.workload.data import Batches, Microbatch, PartedBatches
from distlab.workload.model import VOCABULARY, Block, Embedding, Head, Model, Residual
from distlab.workload.optimizer import make_optimizer
from distlab.workload.reference import fill
from distlab.workload.user_model import is_own, reads_text

# What dropout promises (Srivastava et al. 2014, section 4; kept numbers are divided by what is kept): found by what
# it makes of the results of the parts that it drops from, and held to what chance allows.

LEAST_NUMBERS, LAYERS = 8192, 2  # that are looked at of a part, and layers with such parts
ERRORS = 6.0  # sampling errors: a right draw is farther off in one of 5e8 statements
EXACT = 1e-6  # relative, of a kept number: masks are float32


def hold_dropout(lab: Lab, batches: Batches, control: str) -> None:
    """With LAB_DROPOUT p: a share p of what attention and MLP add is dropped, what is kept is 1/(1-p) times as large, a
    sample's masks repeat, and those of two samples, parts or seeds have in common what chance has."""
    share = getattr(lab.config.options, "dropout", 0.0)
    if not share:
        return
    inputs = batches.full(0).inputs.cpu()
    masks, exact = masks_of(lab, inputs, lab.config.seed)
    again, others = masks_of(lab, inputs, lab.config.seed)[0], masks_of(lab, inputs, lab.config.seed + 1)[0]
    worst = {
        "kept numbers by 1/(1-p)": 0.0 if exact else math.inf,
        "share": sampling_errors(sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks), share),
        "repeated": 0.0 if all(map(torch.equal, masks, again)) else math.inf,
        "two seeds": max(map(common, masks, others)),
        "two parts": max((common(one, other) for one, other in combinations(masks, 2)), default=0.0),
        "two samples": max(common(mask[:-1], mask[1:]) for mask in masks),
    }
    where = max(worst, key=lambda each: worst[each])
    detail = f"sampling errors off what chance allows, or infinite: {where}"
    lab.check("dropout", worst[where], ERRORS, detail=detail, control=control)


def masks_of(lab: Lab, inputs: Tensor, seed: int) -> tuple[list[Tensor], bool]:
    """[samples, ...] of each part, true where it drops, by the model of `seed`; and whether all else is 1/(1-p) times
    what it is without dropout."""
    config = lab.config.model_copy(update={"seed": seed})
    model, share = lab.mode.model(config, seed).double(), lab.config.options.dropout  # type: ignore[attr-defined]
    shape = (lab.config.seq, lab.config.width) if model.name == "gpt" else (lab.config.width,)
    given = inputs[: max(2, -(-LEAST_NUMBERS // math.prod(shape)))]
    hidden = torch.randn(len(given), *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    masks, exact = [], True
    with torch.no_grad():
        for part in parts_of(model):
            turn(model, given[:0])
            whole = part(hidden)
            turn(model, given)
            kept = part(hidden) / whole
            masks.append(kept == 0)
            exact &= bool(((kept * (1 - share) - 1).abs() < EXACT).logical_or(masks[-1]).all())
    return masks, exact


def parts_of(model: Model) -> list[torch.nn.Module]:
    """What the first blocks add: attention and MLP."""
    blocks = [layer for layer in model.layers if hasattr(layer, "mlp")][:LAYERS]
    return [getattr(block, name) for block in blocks for name in ("attention", "mlp") if hasattr(block, name)]


def turn(model: Model, inputs: Tensor) -> None:
    """What is computed from now on is of these samples."""
    if model.dropouts is not None:
        model.dropouts.samples = model.dropouts.checksums(inputs)


def sampling_errors(count: float, draws: int, share: float) -> float:
    """How far a count is from its expectation, in deviations of as many fair draws of that share."""
    return abs(count - draws * share) / math.sqrt(draws * share * (1 - share))


def common(one: Tensor, other: Tensor) -> float:
    """How many sampling errors what both drop is off what two that do not know of each other do; a few are nothing."""
    wanted = one.double().mean().item() * other.double().mean().item() * one.numel()
    off = abs((one & other).sum().item() - wanted)
    return max(0.0, off - ERRORS) / math.sqrt(wanted) if wanted else off


TOLERANCE = 1e-12  # of float64, in which a few hundred roundings of two ways to the same sum leave 1e-14
POSITIONS, SAMPLES = 16, 2
EPOCH = 2  # global batches of the proof, so that its third step begins another epoch
STATED = {Embedding, Block, Residual, Head, nn.Linear}  # layers of the lab's; a mode may train others
MOST_EPOCHS = 40  # of two samples, whose order is alike by chance in one of two
CONTROL = "tests/verify/test_statements.py::test_what_both_sides_share_is_seen_by_name"


def hold_what_is_shared(lab: Lab) -> None:
    """All statements, on rank 0; nothing without the proof, or where a mode trains nothing."""
    if not lab.config.proof or not lab.mode.audits or lab.rank:
        return
    lab.at(0, "statements of what ranks and one process share")
    batches = lab.batches(torch.float64, proof=True)
    hold_data(lab, batches)
    hold_optimizer(lab)
    if all(type(layer) in STATED for layer in lab.mode.model(lab.config, lab.config.seed).layers):
        hold_first_weights(lab)
        hold_model(lab, batches)
        hold_loss(lab, everyones(lab, batches))
    hold_dropout(lab, batches, CONTROL)
    if lab.config.recompute:
        hold_recomputation(lab, CONTROL)


# --- the model ---


@torch.no_grad()
def hold_model(lab: Lab, batches: Batches) -> None:
    """Scores, loss and routers at weights drawn anew, so that no bias is zero and no gain one."""
    config, model = lab.config, lab.mode.model(lab.config, lab.config.seed).double()
    model.dropouts = None  # masks are stated apart
    generator = torch.Generator().manual_seed(config.seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) / 10)
    whole = batches.full(0)
    seen = slice(POSITIONS if config.model == "gpt" else None)
    inputs, targets = (each[:SAMPLES, seen].cpu() for each in (whole.inputs, whole.targets))
    weights, mixing = Weights(model), mixing_of(model)
    try:
        wanted = computed(weights, inputs, config, mixing)
    except KeyError as error:
        lab.check("model", math.inf, 0, detail=f"it lacks {error.args[0]}", control=CONTROL)
        return
    terms = targets.shape[1] if config.model == "mlp" else 1
    loss = summed_loss(wanted.scores, targets) + terms * wanted.extra
    off = [difference(scores_of(model, inputs), wanted.scores)]
    again = lab_weights(model, weights)  # a router's bias has moved
    off.append(abs(model(inputs, targets).item() - loss.item()) / max(1.0, abs(loss.item())))
    off += [difference(again[name], bias) for name, bias in wanted.biases.items()]
    numbers, right = model.num_parameters(), num_weights(config, mixing)
    off.append(0.0 if numbers == right and not weights.unused else math.inf)
    unused = "".join(f"; {name} is none of it" for name in sorted(weights.unused))
    detail = f"scores and loss by definition, {numbers} of {right} numbers{unused}"
    lab.check("model", max(off), TOLERANCE, detail=detail, control=CONTROL)
    if config.model == "gpt" and inputs.shape[1] > 1:
        hold_positions(lab, model, inputs, mixing is None)


def mixing_of(model: Model) -> object | None:
    """How tokens find experts, where the model has any."""
    return next((part.mixing for part in model.modules() if hasattr(part, "mixing")), None)


def lab_weights(model: Model, weights: Weights) -> dict[str, Tensor]:
    """The weights as they are now; those in the model are put back to what they were."""
    now = {name: parameter.clone() for name, parameter in model.named_parameters()}
    fill(model, weights.named)
    return now


def scores_of(model: Model, inputs: Tensor) -> Tensor:
    """What its last layer gives."""
    for layer in model.layers:
        inputs = layer(inputs)
    return inputs


def hold_positions(lab: Lab, model: Model, inputs: Tensor, alone: bool) -> None:
    """Scores do not depend on what comes later, and a byte is another one elsewhere. `alone`: no token takes the place
    of another at an expert."""
    half = inputs.shape[1] // 2
    if alone:
        others = inputs.clone()
        others[:, half:] = (others[:, half:] + 1) % VOCABULARY
        off = difference(scores_of(model, others)[:, :half], scores_of(model, inputs)[:, :half])
        detail = f"change of the scores of {half} positions as all behind them change"
        lab.check("causal", off, TOLERANCE, detail=detail, control=CONTROL)
    same = model.layers[0](torch.full_like(inputs[:1], 65))[0]
    alike = sum(map(torch.equal, same[:-1], same[1:]))
    lab.check("positions", alike, 0, detail="neighbours that are alike in a text of one byte", control=CONTROL)


def hold_first_weights(lab: Lab) -> None:
    """Radford et al. 2019, section 2.3: a deviation of 0.02; of mlp 1/sqrt(inputs), of line zeros. Gains are one and
    biases zero, and no two matrices nor seeds are alike."""
    config, model = lab.config, lab.mode.model(lab.config, lab.config.seed)
    other = dict(lab.mode.model(config, config.seed + 1).named_parameters())
    worst, where, drawn = 0.0, "", set()
    for name, parameter in model.named_parameters():
        weight = parameter.detach().double()
        if weight.dim() < 2 or config.model == "line":
            wanted = 1.0 if weight.dim() < 2 and not name.endswith("bias") else 0.0
            off = math.inf if bool((weight != wanted).any()) else 0.0
        else:
            right, count = 0.02 if config.model == "gpt" else weight.shape[1] ** -0.5, weight.numel()
            off = max(
                abs(weight.mean().item()) / right * math.sqrt(count),
                abs(weight.square().mean().sqrt().item() / right - 1) * math.sqrt(2 * count),
            )
            first = weight.flatten()[0].item()
            off = math.inf if first in drawn or first == other[name].flatten()[0].item() else off
            drawn.add(first)
        worst, where = max((worst, where), (off, name))
    detail = f"sampling errors off the published mean and deviation, or infinite: {where or 'none'}"
    lab.check("first weights", worst, ERRORS, detail=detail, control=CONTROL)


# --- the loss ---


def hold_loss(lab: Lab, parts: list[Microbatch]) -> None:
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
        lab.check("loss", abs(total - wanted), rounding * max(1.0, wanted), detail=detail, control=CONTROL)


def summed_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """By logarithms of probabilities, or squares."""
    if targets.is_floating_point():
        return (scores - targets.double()).square().sum()
    return -F.log_softmax(scores, -1).gather(-1, targets[..., None]).sum()


# --- the data ---


def hold_data(lab: Lab, batches: Batches) -> None:
    """Samples, how they are dealt, and in which order."""
    parts = everyones(lab, batches)
    terms = sum(each.targets.numel() * each.share for each in parts)
    lab.check("shares", abs(terms - 1), TOLERANCE, detail="a batch's, added up over all terms", control=CONTROL)
    hold_shards(lab, batches, parts)
    hold_epochs(lab, batches)
    if reads_text(lab.config.model):
        off = misread(lab, batches)
        lab.check("targets", off, 0, detail="bytes of samples that are not the text's next ones", control=CONTROL)
    elif not is_own(lab.config.model):
        hold_points(lab, batches)


def everyones(lab: Lab, batches: Batches, step: int = 0) -> list[Microbatch]:
    """The microbatches of all shards."""
    shards = lab.mesh.size("dp")
    return [part for shard in range(shards) for part in batches.dealt(step, shard, shards)]


def hold_shards(lab: Lab, batches: Batches, parts: list[Microbatch]) -> None:
    """The rows that are dealt are those of the batch; where shards can be uneven, they are, and microbatches too."""
    shards, accumulated = lab.mesh.size("dp"), lab.config.num_microbatches
    whole = batches.full(0)
    missing = rows_of([whole]) - rows_of(parts)
    surplus = rows_of(parts) - rows_of([whole])
    sizes = [[len(part.inputs) for part in batches.dealt(0, shard, shards)] for shard in range(shards)]
    even = shards > 1 and batches.batch // accumulated > shards and len({sum(each) for each in sizes}) == 1
    if not isinstance(batches, PartedBatches):  # whose microbatches are all shards' together
        divided = [each for each in sizes if sum(each) > len(each) > 1]
        even = even or any(len(set(each)) == 1 for each in divided)
    told = ", ".join(" + ".join(map(str, each)) for each in sizes)
    detail = f"samples missing or twice, of shards of {told}{', even where they need not be' * even}"
    lab.check("shards", missing.total() + surplus.total() + even, 0, detail=detail, control=CONTROL)


def rows_of(parts: Iterable[Microbatch]) -> Counter[bytes]:
    """Inputs and targets of each sample."""
    return Counter(
        one.double().numpy().tobytes() + other.double().numpy().tobytes()
        for part in parts
        for one, other in zip(part.inputs.cpu(), part.targets.cpu(), strict=False)
    )


def hold_epochs(lab: Lab, batches: Batches) -> None:
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
    lab.check("epochs", wrong, 0, detail=detail, control=CONTROL)


def misread(lab: Lab, batches: Batches) -> int:
    """Bytes of the first batch that are not the text's: sample i is its bytes from i·S on, a target the one behind."""
    given, seq = data.read_text(lab.config), lab.config.seq
    whole, wrong = batches.full(0), 0
    for number, inputs, targets in zip(batches.full_ids(0), whole.inputs.tolist(), whole.targets.tolist(), strict=True):
        start = number * seq
        if start + seq < len(given):  # a short text is read over again
            wanted = given[start : start + seq + 1]
            pairs = zip([*inputs, *targets], [*wanted[:-1], *wanted[1:]], strict=False)
            wrong += sum(one != other for one, other in pairs) + abs(len(inputs) - seq) + abs(len(targets) - seq)
    return wrong


def hold_points(lab: Lab, batches: Batches) -> None:
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
    lab.check("targets", off, ERRORS, detail="sampling errors off y = 2x + 1 and noise of 0.1", control=CONTROL)


# --- the optimizer ---


def hold_optimizer(lab: Lab) -> None:
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
    lab.check("optimizer", off, TOLERANCE, detail=detail, control=CONTROL)


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest, as a share of the largest number that is wanted, or of one."""
    return largest_difference(found, wanted) / max(1.0, wanted.abs().max().item())
