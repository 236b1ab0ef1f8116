"""torchtitan pull request 4332: a bias is divided so that every rank can add it, and so is its gradient."""

from axes import Row, Sum, cut
from net import batch, loss, model
from torch.nn import functional as F

__all__ = ["batch", "loss", "model"]
mesh = {"tp": -1}


class Divided(Row):
    def forward(self, hidden):
        return Sum.apply(F.linear(hidden, self.weight, self.bias / self.group.size()), self.group)  # planted


def prepare(model, mesh):
    return cut(model, mesh.get_group("tp"), Divided)


def train_step(model, optimizer, microbatches, mesh):
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets, share in microbatches:
        found = loss(model, inputs, targets) * share
        found.backward()
        total += found.item()
    optimizer.step()
    return total
