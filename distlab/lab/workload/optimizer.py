"""The optimizer of LAB_OPTIMIZER with its state by name, and what strategies share whose optimizer steps a model's
parameters: the passes, the update, clipping by the global norm.

SGD is plain, without momentum: its update is the gradient, so that nothing hides a wrong scale. AdamW divides by the
gradient's own size and does hide it, which is why the proof uses SGD (and a step of AdamW apart). A rank may hold all
of the model or a part of it, under the dense model's names, so that a proof or a checkpoint reads it as it stands.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.config import Config
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Model
from distlab.techniques.collectives.phases import phase
from distlab.techniques.collectives.point_to_point import Peers
from distlab.techniques.collectives.sharded_tensor import LocalShard, assembled, whole_piece


class PlainSGD:
    """w becomes w - lr·g: what torch.optim.SGD does without momentum, to the bit.

    Any optimizer of torch.optim imports torch.compile's machinery when it is made, 800 modules: 0.8 s of each rank.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self.parameters = list(parameters)
        self.param_groups: list[dict[str, Any]] = [
            {"params": self.parameters, "lr": lr}
        ]  # where torch's keep their rate
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        lr: float = self.param_groups[0]["lr"]
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-lr)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None


Optimizer = PlainSGD | torch.optim.Optimizer


def make_optimizer(parameters: Iterable[nn.Parameter], config: Config) -> Optimizer:
    """A fresh optimizer over `parameters`, with the learning rate of `config`."""
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=config.learning_rate)
    return PlainSGD(parameters, config.learning_rate)


def prime(optimizer: Optimizer) -> None:
    """Give AdamW the state that it makes itself in its first step: zeros, which a checkpoint is loaded into."""
    if isinstance(optimizer, PlainSGD):
        return
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def named_tensors(model: nn.Module, optimizer: Optimizer, kind: str) -> Iterator[tuple[str, Tensor]]:
    """This rank's "gradients", "weights" or "optimizer" state under dense names ('exp_avg.<parameter>', ...), in the
    same order on every rank."""
    for name, parameter in model.named_parameters():
        for key, tensor in tensors_of(kind, optimizer, parameter).items():
            yield f"{key}.{name}" if key else name, tensor


def tensors_of(
    kind: str, optimizer: Optimizer, stepped: nn.Parameter, summed: nn.Parameter | None = None
) -> dict[str, Tensor]:
    """The gradient or weights of one parameter under "", or its optimizer state by key; AdamW's number of steps is a
    scalar. The gradient is that of `summed`, where it is not the parameter itself that it is summed for."""
    if kind == "optimizer":
        return {key: value for key, value in optimizer.state[stepped].items() if isinstance(value, Tensor)}
    tensor = stepped.detach() if kind == "weights" else (stepped if summed is None else summed).grad
    return {} if tensor is None else {"": tensor}


def live_state(named: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> dict[str, Tensor]:
    """What a checkpoint holds of these parameters, as they are trained on."""
    prime(optimizer)
    state: dict[str, Tensor] = {}
    for name, parameter in named:
        state[f"weights.{name}"] = parameter.detach()
        state |= {f"optimizer.{key}.{name}": value for key, value in optimizer.state[parameter].items()}
    return state


def forward_backward(
    forward: Callable[..., Any], microbatch: Microbatch, number: int, scale: float | None = None
) -> Tensor:
    """Both passes of microbatch `number`; returns its share of the loss, `scale` times which is differentiated."""
    inputs, targets, share = microbatch
    with phase("forward", str(number)):
        loss: Tensor = forward(inputs, targets) * share
    with phase("backward", str(number)):
        (loss if scale is None else loss * scale).backward()
    return loss.detach()


class StepsParameters:
    """The part of a Strategy that needs nothing but `model` and its optimizer."""

    def __init__(self, model: Model, config: Config) -> None:
        self.model, self.config = model, config
        self.optimizer = make_optimizer(model.parameters(), config)

    def update(self) -> None:
        """Clip by the norm of all gradients here, and step."""
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()

    def held(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """This rank's tensors, in the same order on every rank."""
        return named_tensors(self.model, self.optimizer, kind)

    def state_dict(self) -> dict[str, Any]:
        """All parameters and the optimizer's state of each, as they are trained on."""
        return dict(live_state(self.model.named_parameters(), self.optimizer))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is left to do: the state was filled in place."""


class LayersStrategy(StepsParameters):
    """The same of a model whose layers run one by one on this rank, in whole or in part."""

    @property
    def layers(self) -> dict[int, nn.Module]:
        """All layers, by number."""
        return dict(enumerate(self.model.layers))


class PartitionedStrategy:
    """A Strategy whose ranks hold the model together: each some parameters, `named` by their dense names, whole or a
    piece of each, and an optimizer over what it has; `layers` are those that it runs, by number."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], layers: Mapping[int, nn.Module], group: dist.ProcessGroup,
        config: Config,
    ) -> None:  # fmt: skip
        self.named, self.layers, self.group, self.config = dict(named), layers, group, config
        self.peers = Peers(group)
        self.optimizer = make_optimizer(self.named.values(), config)

    def counts(self, name: str, tensor: Tensor) -> bool:
        """Whether this rank is the first that holds what it has in `tensor` of the parameter `name`."""
        raise NotImplementedError

    def piece(self, name: str, tensor: Tensor) -> LocalShard:  # noqa: ARG002
        """Where what this rank has of a parameter, or of its state, stands in the dense tensor."""
        return whole_piece(tensor)

    def is_replicated(self, name: str) -> bool:  # noqa: ARG002
        """Whether all ranks that hold the parameter hold the same of it."""
        return True

    def dense_names(self) -> Iterable[str]:
        """Those of all parameters of the model, in its order."""
        return self.named

    def held(self, kind: str) -> Iterator[tuple[str, str, Tensor]]:
        """This rank's "gradients", "weights" or "optimizer" state: label, parameter's name and tensor."""
        for name, parameter in self.named.items():
            for key, tensor in tensors_of(kind, self.optimizer, parameter).items():
                yield f"{key}.{name}" if key else name, name, tensor

    def update(self) -> None:
        """Clip by the norm of all gradients, each counted on the first rank that holds it, and take a step."""
        if self.config.clip is not None:
            held = [(self.counts(name, tensor), local(tensor)) for _, name, tensor in self.held("gradients")]
            once = [gradient for counts, gradient in held if counts]
            clip_gradients(once, [gradient for _, gradient in held], self.config.clip, self.group)
        self.optimizer.step()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Dense tensors on rank 0, in the model's order; nothing elsewhere."""
        pieces = [(label, self.piece(name, each)) for label, name, each in self.held(kind) if self.counts(name, each)]
        return in_order(pieces, self.peers, self.dense_names())

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """What every rank that holds it holds alike."""
        return ((label, local(tensor)) for label, name, tensor in self.held(kind) if self.is_replicated(name))

    def state_dict(self) -> dict[str, Any]:
        """Of a parameter that this rank holds a part of its piece; a whole tensor, or a DTensor, as it is."""
        prime(self.optimizer)
        state: dict[str, Any] = {}
        for kind in ("weights", "optimizer"):
            for label, name, tensor in self.held(kind):
                piece = self.piece(name, tensor)
                state[f"{kind}.{label}"] = tensor if tensor.shape == piece.shape else piece
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is left to do: the state was filled in place."""


def in_order(
    pieces: Sequence[tuple[str, LocalShard]], peers: Peers, names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """The dense tensors of all ranks' `pieces` on rank 0, in the order of the parameters `names`; nothing elsewhere."""
    dense = dict(assembled(pieces, peers))
    order = {name: place for place, name in enumerate(names)}
    for label in sorted(dense, key=lambda label: order[label if label in order else label.split(".", 1)[1]]):
        yield label, dense[label]


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds; any other tensor is itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


# Clipping by the global norm, where no rank holds all gradients.
#
# The norm of a model is that of all its gradients together, so each rank adds up the squares of what is its own, the
# sums are summed over the ranks, and every rank scales by the same factor. A gradient that several ranks hold counts
# on one of them alone: clipping each rank's part by its own norm would turn the gradient's direction (Pascanu et al.
# 2013, section 3.2).

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm, and what is ours has to equal it


@torch.no_grad()
def clip_gradients(
    once: Iterable[Tensor], every: Iterable[Tensor], max_norm: float, *groups: dist.ProcessGroup
) -> Tensor:
    """Scale `every` gradient of this rank in place, so that the global norm is at most `max_norm`; returns that norm.

    `once` are those that count on this rank: over all ranks each gradient of the model in exactly one of them. The
    `groups` of a mesh are its axes: what was summed along one is summed along the next.
    """
    every = list(every)
    squares = torch.zeros((), dtype=torch.float64, device=every[0].device if every else None)
    for gradient in once:
        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
    for group in groups:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    scale = min(1.0, max_norm / (norm.item() + CLIP_EPSILON))
    if scale < 1.0:
        for gradient in every:
            gradient.mul_(scale)
    return norm
