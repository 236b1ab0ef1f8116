"""The models `line`, `mlp` and `gpt`: each a list of layers followed by a loss.

They are easy to split. The layers are a list, so that each pipeline stage gets a slice of it. For tensor parallelism q,
k, v and o are separate matrices, and attention infers its number of heads from the output of its projections. For
context parallelism one function mixes positions, and an embedding accepts the positions of its tokens. The loss is a
module that can be replaced; it returns the sum over its terms, not the mean, because sums of uneven shards add up and
means do not. Weights depend only on a seed.
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

# Tensors that a mechanism keeps for the backward pass are saved like those of autograd's operations: in an attribute
# they would be neither counted among the activations nor freed with them.

ANCHOR = torch.empty(0, requires_grad=True)  # makes autograd record the operation; it never gets a gradient


class SaveForBackward(torch.autograd.Function):
    """Save the tensors for the backward pass, and compute nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class SavedForBackward:
    """The output of a graph node, which keeps the saved tensors alive: torch 2.11 frees them with the last output."""

    __slots__ = ("_end",)

    def __init__(self, end: Tensor) -> None:
        self._end = end

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        saved: tuple[Tensor, ...] = self._end.grad_fn.saved_tensors  # type: ignore[union-attr]
        return saved


def save_for_backward(*tensors: Tensor) -> SavedForBackward:
    """Return a graph node whose `saved_tensors` are `tensors`; gradients must be enabled."""
    return SavedForBackward(SaveForBackward.apply(ANCHOR, *tensors))  # type: ignore[no-untyped-call]


def fast_backward(outputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """Run the backward pass from `outputs` with these `gradients`, one of the same shape per output; hooks are called.

    `torch.autograd.backward` first checks shapes and types, which are right here: after a sleep of 10 ms, as in a
    waiting pipeline, two linear layers take 0.18 ms with these checks and 0.12 ms without.
    """
    Variable._execution_engine.run_backward(  # torch's FSDP and DDP call the engine like this too
        outputs, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


# Dropout whose masks depend on samples and positions: any split of a batch drops the same numbers as one process.
#
# Each block applies dropout to the outputs of its attention and its MLP (Srivastava et al. 2014, section 4). Usual
# systems have separate random generators for ranks with different samples, with equal activations and with different
# rows, and do not equal one process. Here a mask is a function of the run's seed, the layer and the sample: each rank
# draws the whole mask and uses its own rows.

PARTS = ("attention", "mlp")  # of a block, with dropout on their outputs


class Dropouts:
    """The dropouts of one model on one rank.

    Args:
        layers: their parts in PARTS get dropout with the probability `share`.
        shape: of the output of these parts for one whole sample: [S, D] for a text.
    """

    def __init__(self, layers: Sequence[nn.Module], share: float, seed: int, shape: tuple[int, ...]) -> None:
        self.share, self.seed, self.shape = share, seed, shape
        self.rows: Tensor | None = None  # the positions of this rank's rows; None: all
        self.rows_first = False  # [rows, B, D] in the place of [B, rows, D]
        self.samples: list[int] = []  # checksums of the samples of the current microbatch
        self._checksums: list[list[int]] = []
        for index, layer in enumerate(layers):
            for name, part in layer.named_children():
                if name in PARTS:
                    part.register_forward_hook(partial(self._drop, f"{index}.{name}"))

    def checksums(self, inputs: Tensor) -> list[int]:
        """Return the checksums of these whole samples, which are the seeds of their masks."""
        return [zlib.crc32(sample.double().cpu().numpy().tobytes()) for sample in inputs]

    def begin_step(self, microbatches: Sequence[Tensor]) -> None:
        """Begin a step whose microbatches have these inputs."""
        self._checksums = [self.checksums(inputs) for inputs in microbatches]

    def begin_microbatch(self, microbatch: int) -> None:
        self.samples = self._checksums[microbatch]

    def mask(self, part: str, sample: int) -> Tensor:
        """Return the mask of one whole sample: 0 for a dropped number, else 1 / (1 - share)."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {part} {sample}".encode()))
        return (torch.rand(self.shape, generator=generator) >= self.share) / (1 - self.share)

    def _drop(self, part: str, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        if not self.samples:  # only shapes are computed, or the microbatch is empty
            return output
        masks = torch.stack([self.mask(part, sample) for sample in self.samples])
        masks = masks if self.rows is None else masks[:, self.rows]
        return output * (masks.transpose(0, 1) if self.rows_first else masks).to(output)


# Activation checkpointing: a layer keeps only its input, and is computed again for the backward pass.
#
# Each layer then keeps one tensor for the backward pass, at the cost of one more forward pass (Chen et al. 2016,
# "Training Deep Nets with Sublinear Memory Cost", section 4). torch.utils.checkpoint does the same, but its first call
# imports torch's compiler, which takes a second of an idle core and 80 MB on each rank. Dropout masks depend on the
# samples, so no random generator has to be restored; the caller sets the samples before a layer is computed again.


class _Computed(Exception):
    """Raised when all saved tensors of the layer are recomputed; the rest of the layer is not needed."""


class _Pass:
    """One pass of one layer: autograd saves indices in place of tensors, and the first load recomputes all tensors."""

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
            with torch.enable_grad():  # disabled in the backward pass
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
        raise AssertionError(f"no backward pass runs through the second forward pass, which keeps {nothing}")


def recomputed(layer: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Return `layer(hidden)`, and keep only `hidden` for the backward pass; the layer must be deterministic."""
    this = _Pass(layer, hidden)
    with saved_tensors_hooks(this.save, this.load):
        return layer(hidden)


VOCABULARY = 256  # a token is a byte
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A sequence of layers and a loss.

    `forward(inputs, targets)` returns the sum of the loss terms, and without targets the output of the last layer, for
    a user's own loss. With `recompute` a layer keeps only its input for the backward pass.
    """

    divisible = True  # whether the losses of a batch's parts add up to the loss of the batch

    def __init__(self, name: str, layers: list[nn.Module], loss: nn.Module, *, recompute: bool = False) -> None:
        super().__init__()
        self.name = name
        self.recompute = recompute
        self.layers = nn.ModuleList(layers)
        self.loss = loss
        self.dropouts: Dropouts | None = None  # None: no dropout

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
        """Draw all weights in place: the same numbers in every process, drawn in float32 for every dtype.

        Matrices are normal with a deviation of 0.02 in gpt (Radford et al. 2019, section 2.3) and 1/sqrt(inputs) in
        mlp. Gains are one, biases zero. All weights of line are zero, as in its lesson.
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
        """Return the size of each parameter, in order of registration; a tied parameter counts once."""
        return [parameter.numel() for parameter in self.parameters()]

    def describe(self) -> str:
        """Return a description for headings: 'gpt, 1.7M parameters'."""
        count = self.num_parameters()
        short = f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.1f}k" if count >= 1e3 else str(count)
        return f"{self.name}, {short} parameters"


class UserModel(Model):
    """A user's module as layers and a loss (user_model.py)."""

    def __init__(self, spec: str, seed: int, *, recompute: bool = False) -> None:
        self.spec = spec
        loss = SummedLoss(user_model.find_in_file(spec, "loss"))
        super().__init__(spec, user_model.layers_of(user_model.make_user_model(spec, seed)), loss, recompute=recompute)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Copy the weights of a new model that the user's function makes from `seed`."""
        fresh = nn.ModuleList(user_model.layers_of(user_model.make_user_model(self.spec, seed)))
        for parameter, drawn in zip(self.layers.parameters(), fresh.parameters(), strict=True):
            parameter.copy_(drawn)


class Embedding(nn.Module):
    """Map bytes to vectors: the token's embedding plus the position's.

    `positions` [S] are the positions of the input tokens; None means 0, 1, 2, ...
    """

    def __init__(self, seq: int, width: int) -> None:
        super().__init__()
        self.positions: Tensor | None = None
        # `from_pretrained` draws no numbers: on the meta device the draw of nn.Embedding imports sympy and 800 other
        # modules, which delays each rank's start by a second.
        self.token = nn.Embedding.from_pretrained(torch.empty(VOCABULARY, width), freeze=False)
        self.position = nn.Embedding.from_pretrained(torch.empty(seq, width), freeze=False)

    def forward(self, tokens: Tensor) -> Tensor:
        at = slice(tokens.shape[1]) if self.positions is None else self.positions
        hidden: Tensor = self.token(tokens) + self.position.weight[at]
        return hidden  # [B, S, D]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention; all tensors are [B, heads, S, head_dim]."""
    mixed: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed


class Attention(nn.Module):
    """Causal self-attention; the projections determine the number of heads (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.attend: Attend = causal

    def forward(self, hidden: Tensor) -> Tensor:
        # The number of heads follows from the projections' output: a tensor-parallel rank has only its own heads.
        q, k, v = (
            project(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )  # [B, heads, S, head_dim]
        out: Tensor = self.o(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        return out  # [B, S, D]


class MLP(nn.Module):
    """Two linear layers with a hidden width of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(hidden)))
        return out


class Block(nn.Module):
    """A layer of gpt: attention and an MLP, each after a norm and with a residual (pre-LN, Xiong et al. 2020)."""

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
    """Map vectors to a score for each byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.project(self.norm(hidden))
        return scores  # [B, S, V]


def build_model(config: Config, seed: int) -> Model:
    """Return LAB_MODEL in float32 on the CPU, with weights that depend only on `seed`."""
    model = _layers(config)
    model.initialise(seed)
    return model


def dropping(model: Model, config: Config, share: float) -> Model:
    """Add dropout with the probability `share` to the outputs of attention and MLP in each block; returns the model."""
    shape = (config.seq, config.width) if model.name == "gpt" else (config.width,)
    model.dropouts = Dropouts(list(model.layers), share, config.seed, shape) if share else None
    return model


@lru_cache(maxsize=32)  # a run calls it more than 200 times, and it takes 2 to 6 ms
def outline(config: Config) -> Model:
    """Return the model on the meta device, without numbers, for counting; it is shared and must not be changed."""
    if user_model.is_own(config.model):  # its function may use a random generator of the CPU
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
    """Return the bytes of the model's buffers, with floating point in `dtype`; the lab's models have none."""
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
