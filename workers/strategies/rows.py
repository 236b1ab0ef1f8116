"""What sequence parallelism needs beside its region: rows come first in what a model works on, for they are sliced."""

from torch import Tensor, nn

from workers.parallel.sequence import Sequence
from workers.workload.model import Attention, Embedding, Model


def rows_first(model: Model, region: Sequence) -> None:
    """Turn what the model works on: [B, S, ...] becomes [S, B, ...] in gpt, whose rows between blocks are sliced.

    The rows of mlp are its samples, and come first already: they are sliced where they come in, and the targets too.
    """
    if model.name != "gpt":
        model.register_forward_pre_hook(lambda _, batch: tuple(region.own(rows) for rows in batch))
        return
    model.register_forward_pre_hook(lambda _, batch: tuple(rows.t() for rows in batch))
    rows_inside(model, region)


def rows_inside(model: Model, region: Sequence) -> None:
    """The layers of gpt take [S, B, ...] and give it; who runs them turns what comes in."""
    for part in list(model.modules()):
        if isinstance(part, Attention):  # between its projections it knows no other order than [B, S, D]
            for project in (part.q, part.k, part.v):
                project.register_forward_hook(lambda _, __, out: out.transpose(0, 1))
            part.o.register_forward_pre_hook(lambda _, args: args[0].transpose(0, 1))
    first = model.layers[0]
    assert isinstance(first, Embedding)
    model.layers[0] = RowsEmbedding(first, region)


class RowsEmbedding(nn.Module):
    """Bytes [S, B] to this rank's rows of vectors, [S/tp, B, D]."""

    def __init__(self, embedding: Embedding, region: Sequence) -> None:
        super().__init__()
        self.token, self.position, self.region = embedding.token, embedding.position, region
        self.positions = embedding.positions

    def forward(self, tokens: Tensor) -> Tensor:
        at = slice(len(tokens)) if self.positions is None else self.positions
        hidden: Tensor = self.token(tokens)
        return hidden + self.region.own(self.position.weight[at])[:, None]
