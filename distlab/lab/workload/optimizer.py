"""The optimizer of LAB_OPTIMIZER with its state by name, and base classes of strategies that step a model's parameters:
passes, update, and clipping by the global norm.

SGD is plain, without momentum: its update is proportional to the gradient, so a wrong scale shows. AdamW divides by the
gradient's size and hides a wrong scale, so the proof uses SGD, and AdamW in a separate step. A rank may store the whole
model or a part of it, under the names of the dense model, so that proofs and checkpoints can read it directly.
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
    """Update w to w - lr·g, bitwise equal to torch.optim.SGD without momentum.

    Making any optimizer of torch.optim imports torch.compile, 800 modules that take 0.8 s on each rank.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self.parameters = list(parameters)
        self.param_groups: list[dict[str, Any]] = [{"params": self.parameters, "lr": lr}]  # as in torch's optimizers
        self.state: dict[Tensor, dict[str, Any]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        lr: float = self.param_groups[0]["lr"]
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-lr)

    def zero_grad(self) -> None:
        """Remove all gradients."""
        for parameter in self.parameters:
            parameter.grad = None


Optimizer = PlainSGD | torch.optim.Optimizer


def make_optimizer(parameters: Iterable[nn.Parameter], config: Config) -> Optimizer:
    """Return a new optimizer over `parameters`, with the learning rate of `config`."""
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=config.learning_rate)
    return PlainSGD(parameters, config.learning_rate)


def prime(optimizer: Optimizer) -> None:
    """Create AdamW's initial state, zeros, so that a checkpoint can be loaded into it before the first step."""
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
    """Yield this rank's "gradients", "weights" or "optimizer" state under dense names ('exp_avg.<parameter>', ...), in
    the same order on every rank."""
    for name, parameter in model.named_parameters():
        for key, tensor in tensors_of(kind, optimizer, parameter).items():
            yield f"{key}.{name}" if key else name, tensor


def tensors_of(
    kind: str, optimizer: Optimizer, stepped: nn.Parameter, summed: nn.Parameter | None = None
) -> dict[str, Tensor]:
    """Return the gradient or weights of one parameter under "", or its optimizer state by key; AdamW's number of steps
    is a scalar. `summed` is the parameter with the gradient, if it is another one."""
    if kind == "optimizer":
        return {key: value for key, value in optimizer.state[stepped].items() if isinstance(value, Tensor)}
    tensor = stepped.detach() if kind == "weights" else (stepped if summed is None else summed).grad
    return {} if tensor is None else {"": tensor}


def live_state(named: Iterable[tuple[str, Tensor]], optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the state of these parameters for a checkpoint: the live tensors, no copies."""
    prime(optimizer)
    state: dict[str, Tensor] = {}
    for name, parameter in named:
        state[f"weights.{name}"] = parameter.detach()
        state |= {f"optimizer.{key}.{name}": value for key, value in optimizer.state[parameter].items()}
    return state


def forward_backward(
    forward: Callable[..., Any], microbatch: Microbatch, number: int, scale: float | None = None
) -> Tensor:
    """Run both passes of microbatch `number` and return its part of the loss; the backward pass starts from `scale`
    times the loss."""
    inputs, targets, share = microbatch
    with phase("forward", str(number)):
        loss: Tensor = forward(inputs, targets) * share
    with phase("backward", str(number)):
        (loss if scale is None else loss * scale).backward()
    return loss.detach()


class StepsParameters:
    """The part of a Strategy that needs only `model` and its optimizer."""

    def __init__(self, model: Model, config: Config) -> None:
        self.model, self.config = model, config
        self.optimizer = make_optimizer(model.parameters(), config)

    def update(self) -> None:
        """Clip by the norm of this rank's gradients, and take a step."""
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()

    def held(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's tensors, in the same order on every rank."""
        return named_tensors(self.model, self.optimizer, kind)

    def state_dict(self) -> dict[str, Any]:
        """Return all live parameters, and the optimizer's state of each."""
        return dict(live_state(self.model.named_parameters(), self.optimizer))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is left to do: the state was filled in place."""


class LayersStrategy(StepsParameters):
    """The same for a model whose layers, or parts of them, run one by one on this rank."""

    @property
    def layers(self) -> dict[int, nn.Module]:
        """Return all layers by number."""
        return dict(enumerate(self.model.layers))


class PartitionedStrategy:
    """A Strategy whose ranks partition the model.

    Each rank stores some parameters or pieces of them, `named` by their dense names, with an optimizer for these;
    `layers` are the layers that it runs, by number.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], layers: Mapping[int, nn.Module], group: dist.ProcessGroup,
        config: Config,
    ) -> None:  # fmt: skip
        self.named, self.layers, self.group, self.config = dict(named), layers, group, config
        self.peers = Peers(group)
        self.optimizer = make_optimizer(self.named.values(), config)

    def counts(self, name: str, tensor: Tensor) -> bool:
        """Return whether this rank is the first of those that store `tensor` of the parameter `name`."""
        raise NotImplementedError

    def piece(self, name: str, tensor: Tensor) -> LocalShard:  # noqa: ARG002
        """Return the position of this rank's piece of a parameter, or of its state, in the dense tensor."""
        return whole_piece(tensor)

    def is_replicated(self, name: str) -> bool:  # noqa: ARG002
        """Return whether the parameter is equal on all ranks that store it."""
        return True

    def dense_names(self) -> Iterable[str]:
        """Return the names of all the model's parameters, in its order."""
        return self.named

    def held(self, kind: str) -> Iterator[tuple[str, str, Tensor]]:
        """Yield this rank's "gradients", "weights" or "optimizer" state: label, parameter's name and tensor."""
        for name, parameter in self.named.items():
            for key, tensor in tensors_of(kind, self.optimizer, parameter).items():
                yield f"{key}.{name}" if key else name, name, tensor

    def update(self) -> None:
        """Clip by the norm of all gradients, each counted on the first rank that stores it, and take a step."""
        if self.config.clip is not None:
            held = [(self.counts(name, tensor), local(tensor)) for _, name, tensor in self.held("gradients")]
            once = [gradient for counts, gradient in held if counts]
            clip_gradients(once, [gradient for _, gradient in held], self.config.clip, self.group)
        self.optimizer.step()

    def full(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the dense tensors on rank 0, in the model's order; nothing on other ranks."""
        pieces = [(label, self.piece(name, each)) for label, name, each in self.held(kind) if self.counts(name, each)]
        return in_order(pieces, self.peers, self.dense_names())

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors that are equal on all ranks that store them."""
        return ((label, local(tensor)) for label, name, tensor in self.held(kind) if self.is_replicated(name))

    def state_dict(self) -> dict[str, Any]:
        """Return the state: a LocalShard for a partly stored parameter, else the tensor or DTensor itself."""
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
    """Yield the dense tensors of all ranks' `pieces` on rank 0, in the order of `names`; nothing on other ranks."""
    dense = dict(assembled(pieces, peers))
    order = {name: place for place, name in enumerate(names)}
    for label in sorted(dense, key=lambda label: order[label if label in order else label.split(".", 1)[1]]):
        yield label, dense[label]


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor, or the tensor itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


# Clipping by the global norm when no rank has all gradients.
#
# The norm covers all gradients of the model: each rank adds up the squares of its own, an all_reduce sums them, and
# every rank scales by the same factor. A gradient on several ranks is counted on one of them. Clipping each rank's part
# by its own norm would change the direction of the gradient (Pascanu et al. 2013, section 3.2).

CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_, whose results ours must equal


@torch.no_grad()
def clip_gradients(
    once: Iterable[Tensor], every: Iterable[Tensor], max_norm: float, *groups: dist.ProcessGroup
) -> Tensor:
    """Scale `every` gradient of this rank in place, so that the global norm is at most `max_norm`; returns that norm.

    `once` are the gradients that count on this rank: each gradient of the model is in exactly one rank's `once`. The
    sum runs along each of the `groups`, the axes of a mesh, in turn.
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
