"""What is trained: `line`, `mlp` and `gpt`, each a list of layers with a loss behind it.

The models help whoever cuts them. Layers are a list, so that a pipeline gives each stage a slice of it. q, k, v and o
are separate matrices, and attention reads its number of heads from what its projections yield, so that tensor
parallelism may shard them by heads; what gathers from other positions is one function, and an embedding may be told
where its tokens stand, so that context parallelism may shard the sequence. The loss is a module that can be replaced,
and returns the sum over its terms, never the mean: sums of uneven shards add up, means do not. Weights come from a seed
alone, whatever else was drawn.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from distlab.lab.config import Config
from distlab.lab.workload import user_model
from distlab.lab.workload.user_model import SummedLoss

# What a mechanism keeps for a backward pass it keeps the way autograd keeps what operations save: in an attribute of
# its own it would be neither counted among the activations nor let go.

ANCHOR = torch.empty(0, requires_grad=True)  # what makes autograd note the operation; nothing is run back to it


class SaveForBackward(torch.autograd.Function):
    """Saves its tensors, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class SavedForBackward:
    """The end of a graph node, which keeps what the node has saved: torch 2.11 lets go of it with the last tensor."""

    __slots__ = ("_end",)

    def __init__(self, end: Tensor) -> None:
        self._end = end

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        saved: tuple[Tensor, ...] = self._end.grad_fn.saved_tensors  # type: ignore[union-attr]
        return saved


def save_for_backward(*tensors: Tensor) -> SavedForBackward:
    """A graph node whose `saved_tensors` are `tensors`; gradients must be enabled."""
    return SavedForBackward(SaveForBackward.apply(ANCHOR, *tensors))  # type: ignore[no-untyped-call]


def fast_backward(outputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """Add to the leaves of `outputs` their gradients, given one of each output, of its shape; hooks are called.

    `torch.autograd.backward` checks shapes and types before it starts the engine, here of what has just been computed:
    behind a sleep of 10 ms, as in a pipeline that waits, two linear layers take 0.18 ms through it and 0.12 without.
    """
    Variable._execution_engine.run_backward(  # FSDP and DDP of torch take the engine here too
        outputs, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


# Dropout whose masks belong to samples and positions, so that any cut of a batch drops what one process drops.
#
# Each block drops some of what its attention and its MLP add (Srivastava et al. 2014, section 4). Systems keep a
# generator for ranks with other samples, for those that hold the same activations and for those that hold some rows,
# and never equal one process. Here a mask is a function of the run's seed, the layer and the sample, drawn whole, of
# which a rank takes the rows that it has.

PARTS = ("attention", "mlp")  # of a block, whose results are dropped from


class Dropouts:
    """The dropouts of one model on one rank.

    Args:
        layers: whose parts named in PARTS lose a `share` of the numbers that they give.
        shape: of what these give of one whole sample: [S, D] of a text.
    """

    def __init__(self, layers: Sequence[nn.Module], share: float, seed: int, shape: tuple[int, ...]) -> None:
        self.share, self.seed, self.shape = share, seed, shape
        self.rows: Tensor | None = None  # the positions of this rank's rows; None: all
        self.rows_first = False  # [rows, B, D] in the place of [B, rows, D]
        self.samples: list[int] = []  # those that are worked on now, by their checksums
        self._checksums: list[list[int]] = []
        for index, layer in enumerate(layers):
            for name, part in layer.named_children():
                if name in PARTS:
                    part.register_forward_hook(partial(self._drop, f"{index}.{name}"))

    def checksums(self, inputs: Tensor) -> list[int]:
        """What the masks of these whole samples are drawn by."""
        return [zlib.crc32(sample.double().cpu().numpy().tobytes()) for sample in inputs]

    def begin_step(self, microbatches: Sequence[Tensor]) -> None:
        """Begin a step on the inputs of these microbatches."""
        self._checksums = [self.checksums(inputs) for inputs in microbatches]

    def begin_microbatch(self, microbatch: int) -> None:
        self.samples = self._checksums[microbatch]

    def mask(self, part: str, sample: int) -> Tensor:
        """Of one whole sample: zero where it is dropped, else what keeps the sum as it was."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {part} {sample}".encode()))
        return (torch.rand(self.shape, generator=generator) >= self.share) / (1 - self.share)

    def _drop(self, part: str, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        if not self.samples:  # a shape is asked for, or an empty microbatch
            return output
        masks = torch.stack([self.mask(part, sample) for sample in self.samples])
        masks = masks if self.rows is None else masks[:, self.rows]
        return output * (masks.transpose(0, 1) if self.rows_first else masks).to(output)


# Activation checkpointing: a layer keeps its input alone, and computes itself again for the backward pass.
#
# Memory for the backward pass falls from all that every layer saves to one tensor a layer, for one more forward pass
# (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4). torch.utils.checkpoint does the
# same; its first call imports torch's compiler, a second of an idle core and 80 MB of each rank. What a layer drops is
# a function of its samples, so no generator has to be put back; who computes again says of which samples.


class _Computed(Exception):
    """All that the layer saved is there again; what it would still compute nobody needs."""


class _Pass:
    """One pass of one layer, which saves places in a list; the first that is asked for fills the list."""

    def __init__(self, layer: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        self.layer = layer
        self.input = save_for_backward(hidden)
        self.computed: Any = None
        self.num_saved = 0

    def save(self, tensor: Tensor) -> int:
        del tensor
        self.num_saved += 1
        return self.num_saved - 1

    def load(self, place: int) -> Tensor:
        if self.computed is None:
            with torch.enable_grad():  # the backward pass runs without
                self.computed = save_for_backward(*self._compute())
        tensor: Tensor = self.computed.saved_tensors[place]
        return tensor

    def _compute(self) -> list[Tensor]:
        tensors: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            tensors.append(tensor.detach())
            if len(tensors) == self.num_saved:
                raise _Computed

        (hidden,) = self.input.saved_tensors
        try:
            with torch.enable_grad(), saved_tensors_hooks(collect, self._lost):
                self.layer(hidden)
        except _Computed:
            pass
        return tensors

    @staticmethod
    def _lost(nothing: None) -> Tensor:
        raise AssertionError(f"the graph of the second pass is never run backward, and keeps {nothing}")


def recomputed(layer: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """`layer(hidden)`, of which the backward pass finds only `hidden`. The layer must compute the same again."""
    this = _Pass(layer, hidden)
    with saved_tensors_hooks(this.save, this.load):
        return layer(hidden)


VOCABULARY = 256  # a token is a byte
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Layers in a row and a loss; `forward(inputs, targets)` is the sum of the loss's terms, a scalar, and without
    targets what the last layer gives, for a loss of someone's own.

    With `recompute` a layer keeps nothing but its input for the backward pass.
    """

    divisible = True  # whether a batch in parts has the sum of a whole one

    def __init__(self, name: str, layers: list[nn.Module], loss: nn.Module, *, recompute: bool = False) -> None:
        super().__init__()
        self.name = name
        self.recompute = recompute
        self.layers = nn.ModuleList(layers)
        self.loss = loss
        self.dropouts: Dropouts | None = None  # where blocks drop some of what they add

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = inputs
        if self.dropouts is not None:
            self.dropouts.samples = self.dropouts.checksums(inputs)
        for layer in self.layers:
            hidden = recomputed(layer, hidden) if self.recompute else layer(hidden)
        if targets is None:
            return hidden
        total: Tensor = self.loss(hidden, targets)
        return total

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw all weights anew, in place: the same numbers in every process, drawn in float32 whatever the dtype.

        Matrices are normal with a deviation of 0.02 in gpt (Radford et al. 2019, section 2.3), 1/sqrt(inputs) in mlp;
        gains are one, biases zero, and so is all of line, as in its lesson.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            elif self.name == "line":
                parameter.zero_()
            else:
                deviation = 0.02 if self.name == "gpt" else 1 / math.sqrt(parameter.shape[1])
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)

    def num_parameters(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Numbers of each parameter, in order of registration; a tied one counts once."""
        return [parameter.numel() for parameter in self.parameters()]

    def describe(self) -> str:
        """For headings: 'gpt, 1.7M parameters'."""
        count = self.num_parameters()
        short = f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.1f}k" if count >= 1e3 else str(count)
        return f"{self.name}, {short} parameters"


class UserModel(Model):
    """A module of someone's own as layers and a loss (user_model.py)."""

    def __init__(self, spec: str, seed: int, *, recompute: bool = False) -> None:
        self.spec = spec
        loss = SummedLoss(user_model.find_in_file(spec, "loss"))
        super().__init__(spec, user_model.layers_of(user_model.make_user_model(spec, seed)), loss, recompute=recompute)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Take the weights of a model that its own function makes of `seed`."""
        fresh = nn.ModuleList(user_model.layers_of(user_model.make_user_model(self.spec, seed)))
        for parameter, drawn in zip(self.layers.parameters(), fresh.parameters(), strict=True):
            parameter.copy_(drawn)


class Embedding(nn.Module):
    """Bytes to vectors: the token's plus the position's.

    `positions` [S] are those of the tokens that come in, where they do not begin at 0 or not follow each other.
    """

    def __init__(self, seq: int, width: int) -> None:
        super().__init__()
        self.positions: Tensor | None = None
        # Without the draw of numbers that nn.Embedding makes: on the meta device its first one imports sympy and 800
        # modules more, a second of each rank's start.
        self.token = nn.Embedding.from_pretrained(torch.empty(VOCABULARY, width), freeze=False)
        self.position = nn.Embedding.from_pretrained(torch.empty(seq, width), freeze=False)

    def forward(self, tokens: Tensor) -> Tensor:
        at = slice(tokens.shape[1]) if self.positions is None else self.positions
        hidden: Tensor = self.token(tokens) + self.position.weight[at]
        return hidden  # [B, S, D]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What each position takes from those up to it: [B, heads, S, head_dim] of each, and of the result."""
    mixed: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed


class Attention(nn.Module):
    """Causal self-attention over as many heads as the projections hold (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.attend: Attend = causal

    def forward(self, hidden: Tensor) -> Tensor:
        # Heads are counted in the projections' output: a rank of a tensor-parallel group holds only its own.
        q, k, v = (
            project(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )  # [B, heads, S, head_dim]
        out: Tensor = self.o(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        return out  # [B, S, D]


class MLP(nn.Module):
    """Up to four times the width, and down again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(hidden)))
        return out


class Block(nn.Module):
    """A layer of gpt: attention, then an MLP, each behind a norm and beside a residual (pre-LN, Xiong et al. 2020)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out


class Residual(nn.Module):
    """A layer of mlp: the block of gpt without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out


class Head(nn.Module):
    """Vectors to a score for each byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.project(self.norm(hidden))
        return scores  # [B, S, V]


def build_model(config: Config, seed: int) -> Model:
    """The model of LAB_MODEL in float32 on the CPU, its weights a function of `seed` alone."""
    model = _layers(config)
    model.initialise(seed)
    return model


def dropping(model: Model, config: Config, share: float) -> Model:
    """The same, whose blocks drop a `share` of what their attention and their MLP add."""
    shape = (config.seq, config.width) if model.name == "gpt" else (config.width,)
    model.dropouts = Dropouts(list(model.layers), share, config.seed, shape) if share else None
    return model


@lru_cache(maxsize=32)  # a run asks 200 times and more, at 2 to 6 ms
def outline(config: Config) -> Model:
    """The model without its numbers, on the meta device, to count by; it is shared, so nobody changes it."""
    if user_model.is_own(config.model):  # whose function may draw by a generator of the CPU
        return _layers(config).to("meta")
    with torch.device("meta"):
        return _layers(config)


def _layers(config: Config) -> Model:
    if user_model.is_own(config.model):
        return UserModel(config.model, config.seed, recompute=config.recompute)
    if config.model == "line":
        return Model("line", [nn.Linear(1, 1)], SummedLoss(), recompute=config.recompute)
    if config.model == "mlp":
        layers: list[nn.Module] = [Residual(config.width) for _ in range(config.depth)]
        return Model("mlp", layers, SummedLoss(), recompute=config.recompute)
    first, last = Embedding(config.seq, config.width), Head(config.width)
    if config.tie:
        last.project.weight = first.token.weight
    blocks = [Block(config.width, config.heads) for _ in range(config.depth)]
    return Model("gpt", [first, *blocks, last], SummedLoss(), recompute=config.recompute)


def buffer_bytes(config: Config, dtype: torch.dtype) -> int:
    """What the model carries beside its weights, its floating point in `dtype`: of the lab's own models nothing."""
    return carried_bytes(outline(config), dtype)


def carried_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    itemsizes = ((each.numel(), dtype if each.is_floating_point() else each.dtype) for each in module.buffers())
    return sum(numel * kept.itemsize for numel, kept in itemsizes)


def refusals(config: Config) -> list[str]:
    if user_model.is_own(config.model):
        return user_model.refusals(config.model, config.seed, config.batch, lambda: torch.zeros(1, config.seq).long())
    if config.model == "gpt" and config.width % config.heads:
        return [
            f"LAB_WIDTH={config.width} is not a multiple of LAB_HEADS={config.heads}: heads share the width equally"
        ]
    return []
