"""PyTorch's plan for the lab's layers: what `parallelize_module` makes DTensors of, and what has to be tied again."""

from typing import Any

from torch import nn

from workers.workload.model import Model


def plan(model: nn.Module) -> dict[str, Any]:
    """How each linear layer and embedding is parallelised, by its name."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles = {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel(),
        "up": ColwiseParallel(), "down": RowwiseParallel(),
        "project": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }  # fmt: skip
    names = [name for name, _ in model.named_modules()]
    return {name: styles[name.rpartition(".")[2]] for name in names if name.rpartition(".")[2] in styles}


def tie(model: Model) -> None:
    """Let gpt's ends share the weight again that each was given one of."""
    model.layers[-1].get_submodule("project").register_parameter("weight", model.get_parameter("layers.0.token.weight"))
