"""What the lab's models compute, once more: from their published definitions, by matrices, and without a line of them.

Ranks and the one process that they are compared with run the same layers, so a layer that is wrong is wrong on both
sides, and no proof sees it. Here the scores of a model are written down a second time, from the weights by name:

    norm        (x - mean) / sqrt(var + 1e-5)·g + b                    Ba et al. 2016, "Layer Normalization", section 3
    gelu        x·(1 + erf(x/√2)) / 2                                  Hendrycks and Gimpel 2016, section 2
    attention   softmax(q·k/√d over the positions up to one's own)·v   Vaswani et al. 2017, section 3.2
    block       x + attention(norm(x)), then x + MLP(norm(x))          Xiong et al. 2020, figure 1
    mixture     the sum of the k best experts by their gates           Lepikhin et al. 2020, section 2.2

And what is stated of them at weights drawn anew, of their first weights, of what dropout drops, and of what is alive
where layers are computed again.
"""

import math
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.storages import Storages, label_before
from distlab.lab.measure.tensors import largest_difference
from distlab.lab.verify.counted import in_backward
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import VOCABULARY, Block, Embedding, Head, Model, Residual
from tests.labs import sampling_errors

TOLERANCE = 1e-12  # of float64, in which a few hundred roundings of two ways to the same sum leave 1e-14
POSITIONS, SAMPLES = 16, 2
STATED = {Embedding, Block, Residual, Head, nn.Linear}  # layers of the lab's; a mode may train others

BALANCE = 0.01  # Fedus et al. 2021, "Switch Transformers", section 2.2


class Computed(NamedTuple):
    """What a model should give."""

    scores: Tensor  # [B, S, V] of a text, else the predictions
    extra: Tensor  # the auxiliary losses of its mixtures, a sum over tokens


class Weights:
    """The weights of a model by name, as they are now; `unused` are those that no test requests."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.named = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.unused = set(self.named)

    def __call__(self, name: str) -> Tensor:
        self.unused.discard(name)
        return self.named[name]


def computed(weights: Weights, inputs: Tensor, config: Config, mixing: Any = None) -> Computed:
    """What the model of `config` makes of `inputs`; `mixing` says how its tokens find experts, where it has any."""
    if config.model == "line":
        return Computed(linear(weights, "layers.0", inputs), torch.zeros(()))
    text = config.model == "gpt"
    found = Computed(inputs, torch.zeros((), dtype=torch.float64))
    if text:
        positions = weights("layers.0.position.weight")[: inputs.shape[1]]
        found = found._replace(scores=weights("layers.0.token.weight")[inputs] + positions)
    for index in range(text, text + config.depth):
        found = block(weights, f"layers.{index}", found, config, mixing)
    if text:
        last = f"layers.{config.depth + 1}"
        to_bytes = weights("layers.0.token.weight" if config.tie else f"{last}.project.weight")
        found = found._replace(scores=norm(weights, f"{last}.norm", found.scores) @ to_bytes.T)
    return found


def num_weights(config: Config, mixing: Any = None) -> int:
    """How many numbers such a model has: 12 D² a block and its vectors, 8 D² of them its MLP's, whose inner width is
    4 D (Radford et al. 2019, section 2.3), or each expert's."""
    width = config.width
    if config.model == "line":
        return 2
    inner = 8 * width**2 + 5 * width
    if mixing is not None:
        inner = mixing.num_experts * (8 * width**2 + width)
    of_layer = inner + 2 * width + (4 * width**2 + 6 * width) * (config.model == "gpt")
    ends = (256 * (2 - config.tie) + config.seq + 2) * width if config.model == "gpt" else 0
    return config.depth * of_layer + ends


def block(weights: Weights, name: str, before: Computed, config: Config, mixing: Any) -> Computed:
    x, extra = before.scores, before.extra
    if config.model == "gpt":
        x = x + attention(weights, f"{name}.attention", norm(weights, f"{name}.attention_norm", x), config.heads)
    hidden = norm(weights, f"{name}.mlp_norm", x)
    if mixing is None:
        up = gelu(linear(weights, f"{name}.mlp.up", hidden))
        return Computed(x + linear(weights, f"{name}.mlp.down", up), extra)
    mixed, more = mixture(weights, f"{name}.mlp", hidden.flatten(0, -2), mixing)
    return Computed(x + mixed.view_as(x), extra + more)


def norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    off = x - x.mean(-1, keepdim=True)
    return off / (off.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights(f"{name}.weight") + weights(
        f"{name}.bias"
    )


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights(f"{name}.weight").T + weights(f"{name}.bias")


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def attention(weights: Weights, name: str, x: Tensor, heads: int) -> Tensor:
    """Each position looks at those up to itself, in `heads` parts of the width."""
    q, k, v = (linear(weights, f"{name}.{each}", x).chunk(heads, -1) for each in "qkv")
    behind = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    parts = []
    for query, key, value in zip(q, k, v, strict=True):
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        parts.append(scores.masked_fill(behind, -math.inf).softmax(-1) @ value)
    return linear(weights, f"{name}.o", torch.cat(parts, -1))


def mixture(weights: Weights, name: str, tokens: Tensor, mixing: Any) -> tuple[Tensor, Tensor]:
    """What the experts make of tokens [T, D], and the auxiliary losses."""
    number, k, count = mixing.num_experts, mixing.top_k, len(tokens)
    scores = tokens @ weights(f"{name}.router.weight").T
    probabilities = scores.softmax(-1)
    chosen = probabilities.argsort(1, descending=True)[:, :k]
    gates = probabilities.gather(1, chosen)
    gates = gates / gates.sum(1, keepdim=True) if k > 1 else gates
    places = math.ceil(mixing.capacity_factor * k * count / number) if mixing.capacity_factor else count
    up, down = weights(f"{name}.experts.up"), weights(f"{name}.experts.down")
    mixed, used = torch.zeros_like(tokens), [0] * number
    for choice in range(k):  # first choices before second ones
        for token, expert in enumerate(chosen[:, choice].tolist()):
            if used[expert] < places:
                used[expert] += 1
                mixed[token] += gates[token, choice] * (gelu(tokens[token] @ up[expert]) @ down[expert])
    wanted = torch.stack([(chosen == expert).sum() for expert in range(number)]).to(tokens.dtype)
    extra = (BALANCE if mixing.balance else 0.0) * number * (wanted / wanted.sum() * probabilities).sum()
    extra = extra + mixing.z * scores.exp().sum(-1).log().square().sum()
    return mixed, extra


# --- statements of the model ---


@torch.no_grad()
def check_model(lab: Lab, batches: Batches) -> None:
    """Scores, loss and routers at weights drawn anew, so that no bias is zero and no gain one."""
    config, model = lab.config, lab.mode.model(lab.config, lab.config.seed).double()
    model.dropouts = None  # masks are stated apart
    generator = torch.Generator().manual_seed(config.seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) / 10)
    whole = batches.full(0)
    seen = slice(POSITIONS if config.model == "gpt" else None)
    inputs, targets = (each[:SAMPLES, seen].cpu() for each in (whole.inputs, whole.targets))
    weights = Weights(model)
    mixing = next((part.mixing for part in model.modules() if hasattr(part, "mixing")), None)
    try:
        wanted = computed(weights, inputs, config, mixing)
    except KeyError as error:
        lab.check("model", math.inf, 0, detail=f"it lacks {error.args[0]}")
        return
    terms = targets.shape[1] if config.model == "mlp" else 1
    loss = summed_loss(wanted.scores, targets) + terms * wanted.extra
    off = [difference(scores_of(model, inputs), wanted.scores)]
    off.append(abs(model(inputs, targets).item() - loss.item()) / max(1.0, abs(loss.item())))
    numbers, right = model.num_parameters(), num_weights(config, mixing)
    off.append(0.0 if numbers == right and not weights.unused else math.inf)
    unused = "".join(f"; {name} is none of it" for name in sorted(weights.unused))
    detail = f"scores and loss by definition, {numbers} of {right} numbers{unused}"
    lab.check("model", max(off), TOLERANCE, detail=detail)
    if config.model == "gpt" and inputs.shape[1] > 1:
        check_positions(lab, model, inputs, mixing is None)


def scores_of(model: Model, inputs: Tensor) -> Tensor:
    for layer in model.layers:
        inputs = layer(inputs)
    return inputs


def check_positions(lab: Lab, model: Model, inputs: Tensor, alone: bool) -> None:
    """Scores do not depend on what comes later, where tokens are `alone`; a byte is another one elsewhere."""
    half = inputs.shape[1] // 2
    if alone:
        others = inputs.clone()
        others[:, half:] = (others[:, half:] + 1) % VOCABULARY
        off = difference(scores_of(model, others)[:, :half], scores_of(model, inputs)[:, :half])
        detail = f"change of the scores of {half} positions as all behind them change"
        lab.check("causal", off, TOLERANCE, detail=detail)
    same = model.layers[0](torch.full_like(inputs[:1], 65))[0]
    equal = sum(map(torch.equal, same[:-1], same[1:]))
    lab.check("positions", equal, 0, detail="equal neighbours in a text of one byte")


def check_first_weights(lab: Lab) -> None:
    """Radford et al. 2019, section 2.3: a deviation of 0.02; of mlp 1/sqrt(inputs), of line zeros. Gains are one and
    biases zero, and no two matrices nor seeds are equal."""
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
    lab.check("first weights", worst, ERRORS, detail=detail)


def summed_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """By logarithms of probabilities, or squares."""
    if targets.is_floating_point():
        return (scores - targets.double()).square().sum()
    return -F.log_softmax(scores, -1).gather(-1, targets[..., None]).sum()


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest, as a share of the largest number that is wanted, or of one."""
    return largest_difference(found, wanted) / max(1.0, wanted.abs().max().item())


# --- dropout ---

# What dropout promises (Srivastava et al. 2014, section 4; kept numbers are divided by what is kept): found by what
# it makes of the results of the parts that it drops from, and compared with what chance allows.

LEAST_NUMBERS, LAYERS = 8192, 2  # that are checked per part, and layers with such parts
ERRORS = 6.0  # sampling errors: a right draw is farther off in one of 5e8 statements
EXACT = 1e-6  # relative, of a kept number: masks are float32


def check_dropout(lab: Lab, batches: Batches) -> None:
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
    lab.check("dropout", worst[where], ERRORS, detail=detail)


def masks_of(lab: Lab, inputs: Tensor, seed: int) -> tuple[list[Tensor], bool]:
    """[samples, ...] of each part, true where it drops; and whether all else is 1/(1-p) times what it is without."""
    config = lab.config.model_copy(update={"seed": seed})
    model, share = lab.mode.model(config, seed).double(), lab.config.options.dropout  # type: ignore[attr-defined]
    shape = (lab.config.seq, lab.config.width) if model.name == "gpt" else (lab.config.width,)
    rows = inputs[: max(2, -(-LEAST_NUMBERS // math.prod(shape)))]
    hidden = torch.randn(len(rows), *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    masks, exact = [], True
    with torch.no_grad():
        for part in parts_of(model):
            turn(model, rows[:0])
            whole = part(hidden)
            turn(model, rows)
            kept = part(hidden) / whole
            masks.append(kept == 0)
            exact &= bool(((kept * (1 - share) - 1).abs() < EXACT).logical_or(masks[-1]).all())
    return masks, exact


def parts_of(model: Model) -> list[torch.nn.Module]:
    blocks = [layer for layer in model.layers if hasattr(layer, "mlp")][:LAYERS]
    return [getattr(block, name) for block in blocks for name in ("attention", "mlp") if hasattr(block, name)]


def turn(model: Model, inputs: Tensor) -> None:
    """What is computed from now on is of these samples."""
    if model.dropouts is not None:
        model.dropouts.samples = model.dropouts.checksums(inputs)


def common(one: Tensor, other: Tensor) -> float:
    """How many sampling errors what both drop is off what two that do not know of each other do; a few are nothing."""
    wanted = one.double().mean().item() * other.double().mean().item() * one.numel()
    off = abs((one & other).sum().item() - wanted)
    return max(0.0, off - ERRORS) / math.sqrt(wanted) if wanted else off


# --- recomputation ---

# A gradient comes in, and on the way through a layer's ends one more. What a block saves is nine times that and more.
MOST_BESIDE = 4.0


def check_recomputation(lab: Lab) -> None:
    """Whenever a layer is computed again, the inputs of those before it are alive, and next to nothing else."""
    dtype = getattr(torch, lab.config.dtype)
    model, whole = lab.model(dtype), lab.batches(dtype).full(0)
    inputs, targets = whole.inputs[:SAMPLES], whole.targets[:SAMPLES]
    seen = Alive(list(model.layers), lab.device)
    with seen.storages:
        seen.begin(inputs, targets)
        model(inputs, targets).backward()
    detail = f"times a layer's input is alive besides, as layer {seen.where} is computed again"
    lab.check("recomputation", seen.worst, MOST_BESIDE, detail=detail)


class Alive:
    """The most bytes that are alive besides the inputs of layers whenever one is computed again, as a multiple of the
    larger of its input and its output; the last one has the loss behind it, and does not count."""

    def __init__(self, layers: list[nn.Module], device: torch.device) -> None:
        self.storages, self.worst, self.where = Storages(device.type), 0.0, "none"
        self.kept: list[int] = []  # bytes of the input of each layer
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._passed, index, index == len(layers) - 1))
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(drop)

    def begin(self, *tensors: Tensor) -> None:
        label_before(self.storages)
        for tensor in tensors:
            self.storages.add(tensor)
        self.before = self.storages.live_bytes

    def _passed(self, index: int, last: bool, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not in_backward():
            self.kept.append(inputs[0].nbytes if index else 0)
        elif index and not last:
            beside = self.storages.live_bytes - self.before - sum(self.kept[: index + 1])
            share = beside / max(self.kept[index : index + 2])
            if share > self.worst:
                self.worst, self.where = share, str(index)


def drop(parameter: Tensor) -> None:
    parameter.grad = None
