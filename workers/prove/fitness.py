"""What no number of ranks can compute as one process does, refused in a sentence before anything is trained."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from workers.cluster import name_ranks
from workers.measure.hashing import digest_of
from workers.prove.theirs import Refused


def refuse(model: nn.Module) -> None:
    """Raises Refused for a model that sees which samples stand beside each other, or draws where nobody can look."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise Refused(
                f"{name} is a SyncBatchNorm, which torch runs on GPUs alone, and each microbatch would still be"
                " normalised by itself: use GroupNorm, or put it into eval()"
            )
        if isinstance(module, _BatchNorm) and module.training:
            raise Refused(
                f"{name} is a {type(module).__name__}, whose output depends on which samples stand beside each other:"
                " no number of ranks or microbatches is one process; use GroupNorm, or put it into eval()"
            )
        if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.training:
            raise Refused(f"{name} drops inside of C++, which a proof cannot leave out: set its dropout to 0")
    if not any(each.requires_grad for each in model.parameters()):
        raise Refused("the model has no parameter that is trained")


def digest(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[str]:
    """Checksums of what every rank has to begin with alike: the model, and the first batch."""
    return [digest_of(model.parameters()), digest_of([inputs, targets])]


def refuse_other_beginnings(digests: Sequence[Sequence[str]], seed: int) -> None:
    """Raises Refused where a seed gives ranks another model, or another batch."""
    calls: list[Any] = [f"model({seed})", f"batch({seed}, 0)"]
    for index, call in enumerate(calls):
        odd = [rank for rank, each in enumerate(digests) if each[index] != digests[0][index]]
        if odd:
            raise Refused(f"{call} gives other numbers on {name_ranks(odd)} than on rank 0: draw them from the seed")
