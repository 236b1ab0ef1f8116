"""A strategy as in distlab.contract: it sums each gradient as soon as it is ready."""

import torch
import torch.distributed as dist

__all__ = ["strategy"]


class Wave:
    """One all_reduce a parameter, started from its hook."""

    def __init__(self, model, mesh, config):
        self.model, self.group, self.lr = model, mesh.group, config.learning_rate
        self.handles = []
        self.last = False
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.sum)

    def sum(self, parameter):
        if self.last:
            self.handles.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))

    def backward(self, microbatches):
        self.model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for index, (inputs, targets, share) in enumerate(microbatches):
            self.last = index == len(microbatches) - 1
            loss = self.model(inputs, targets) * share
            loss.backward()
            total += loss.detach()
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
        return total

    @torch.no_grad()
    def update(self):
        for parameter in self.model.parameters():
            parameter.sub_(parameter.grad, alpha=self.lr)

    def full(self, kind):
        for name, parameter in self.model.named_parameters():
            if kind != "optimizer":
                yield name, parameter.grad if kind == "gradients" else parameter.detach()

    def state_dict(self):
        return {f"weights.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}

    def load_state_dict(self, state):
        """What is in it has been filled in place."""


def strategy(model, mesh, config):
    return Wave(model, mesh, config)
