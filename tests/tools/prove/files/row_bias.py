"""text-generation-inference issue 1036: every rank adds the bias of a row-parallel layer before the sum."""

from axes import Row, Sum, cut
from net import batch, loss, model
from torch.nn import functional as F

__all__ = ["batch", "loss", "model"]
mesh = {"tp": -1}


class Eager(Row):
    def forward(self, hidden):
        return Sum.apply(F.linear(hidden, self.weight, self.bias), self.group)  # planted


def prepare(model, mesh):
    return cut(model, mesh.get_group("tp"), Eager)


def train_step(model, optimizer, microbatches, mesh):
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets, share in microbatches:
        found = loss(model, inputs, targets) * share
        found.backward()
        total += found.item()
    optimizer.step()
    return total
