"""What dropout promises (Srivastava et al. 2014, section 4; kept numbers are divided by what is kept): found by what it
makes of the results of the parts that it drops from, and held to what chance allows."""

import math
from itertools import combinations

import torch
from torch import Tensor

from workers.lab import Lab
from workers.workload.data import Batches
from workers.workload.model import Model

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
