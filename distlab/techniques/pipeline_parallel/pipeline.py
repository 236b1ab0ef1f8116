"""The pipeline: runs the actions of any schedule with real layers.

Each rank works through its list of actions. A forward receives its input from the previous stage, keeps input and
output for the backward pass, and sends the output to the next stage. A backward receives the gradient of that output,
runs autograd through the stage, and sends the gradient of the input back. If the schedule splits backward passes, the
first part sends that gradient and the second adds those of the weights. The backward frees what the forward kept, so
the schedule's order alone decides how much a rank stores. The caller's function returns the loss of a microbatch,
weighted by its share of the batch: microbatches of any sizes add up to the gradient of the whole.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.lab.workload.model import fast_backward
from distlab.techniques.collectives.phases import phase
from distlab.techniques.collectives.point_to_point import Message, Peers, sendable
from distlab.techniques.pipeline_parallel.schedules import Action, consumer_of, producer_of
from distlab.techniques.pipeline_parallel.zero_bubble import Deferred, SplitBackward, finish

# (microbatch, output of the last stage) -> the scalar that is differentiated
Loss = Callable[[int, Tensor], Tensor]


class Pipeline:
    """One rank of a pipeline; gradients are added to those that the parameters have already.

    Args:
        stages: this rank's stages by number; every rank has as many. Dimension 0 of all tensors between stages counts
            samples. Where the schedule splits backward passes, their linear layers are changed to do so.
        actions: this rank's part of a schedule.
        group: the ranks of the pipeline.
        owners: the rank of each stage; by default stage s is on rank s % p.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], actions: Sequence[Action], group: dist.ProcessGroup,
        owners: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.stages, self.actions = stages, actions
        self.last = len(stages) * group.size() - 1
        self.boundaries = Boundaries(Peers(group), owners or [*range(group.size())] * len(stages))
        splits_backward = any(action.kind == "weight" for action in actions)
        self.splits = {number: SplitBackward(stage) for number, stage in stages.items()} if splits_backward else {}
        self.agreed = False
        self.most_in_flight = 0  # the most so far between forward and backward, each chunk's counted separately

    def step(self, inputs: Sequence[Tensor], loss: Loss) -> Tensor | None:
        """Run forward and backward of all microbatches; return the sum of losses, detached, on the last stage's rank.

        Every rank gets the `inputs` of all microbatches, but after the first stage only their sizes count. A failed
        message raises RuntimeError with the peer's rank.
        """
        if not self.agreed:
            self.boundaries.agree(self.stages, inputs[0][:1])
            self.agreed = True
        self._inputs, self._loss = inputs, loss
        self._saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (stage, microbatch): input and output
        self._deferred: dict[tuple[int, int], list[Deferred]] = {}  # work that is left for the weights
        self._losses: list[Tensor] = []
        self.boundaries.begin(self.actions, [len(microbatch) for microbatch in inputs])
        for action in self.actions:
            if action.kind == "forward":
                self._forward(action)
            elif action.kind == "weight":
                self._weight(action)
            else:
                self._backward(action)
        self.boundaries.finish()
        losses = self._losses
        del self._inputs, self._loss, self._losses  # do not keep the batch between steps
        return torch.stack(losses).sum() if losses else None

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        hidden = self.boundaries.receive_for(action).requires_grad_() if stage else self._inputs[microbatch]
        with phase("forward", str(microbatch)):
            output: Tensor = self.stages[stage](hidden)
            if stage == self.last:
                output = self._loss(microbatch, output)
                self._losses.append(output.detach())
        self._saved[stage, microbatch] = hidden, output
        if self.splits:
            self._deferred[stage, microbatch] = self.splits[stage].pop_deferred()
        # With split backward passes the parts are kept longer than inputs and outputs.
        self.most_in_flight = max(self.most_in_flight, len(self._deferred if self.splits else self._saved))
        self.boundaries.send_result(action, output.detach())

    def _backward(self, action: Action) -> None:
        gradient = self.boundaries.receive_for(action) if action.stage < self.last else None
        hidden, output = self._saved.pop((action.stage, action.microbatch))
        with phase(action.kind, str(action.microbatch)):
            fast_backward((output,), (torch.ones_like(output) if gradient is None else gradient,))
        if hidden.grad is not None:
            self.boundaries.send_result(action, hidden.grad)

    def _weight(self, action: Action) -> None:
        with phase("weight", str(action.microbatch)):
            finish(self._deferred.pop((action.stage, action.microbatch)))


# Boundaries: the messages between stages, activations forward and gradients back.
#
# In gloo a send ends when its receive was posted and filled, so these rules avoid waiting. Receives are posted before
# they are needed, `AHEAD` of them, each with its own tag, so that transfers run while the rank computes. A send is
# waited for only when it must be over: the gradient of a microbatch comes back after its activation was sent. The
# remaining sends are waited for at the end of the step.
#
# NCCL runs messages in launch order and has no tags. There a receive is launched together with the send before it, as
# Megatron does; otherwise two ranks that both send would wait for each other. Tests prove this rule on the schedules,
# as they do gloo's; it never ran on GPUs. It does not support `interleaved`: ranks would wait in a circle.

# Receives posted ahead: their memory does not grow with m. 4, or all 8 of `python -m benchmarks.pp`, were not
# measurably faster.
AHEAD = 2
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Boundaries:
    """The messages that one rank exchanges at the ends of its stages; stage s is on rank `owners[s]` of the group."""

    def __init__(self, peers: Peers, owners: Sequence[int]) -> None:
        self.peers, self.owners, self.num_stages = peers, owners, len(owners)
        self._sent: dict[Action, Message] = {}  # by the action that receives it
        self._samples: dict[tuple[str, int], Tensor] = {}  # a sample of each tensor that a stage receives

    def agree(self, stages: Mapping[int, nn.Module], sample: Tensor) -> None:
        """Exchange all shapes, once: each stage runs on a sample [1, ...] and sends the shape of its output."""
        self.device = sample.device
        carrier = self.device if self.peers.batched else torch.device("cpu")  # gloo sends no tensor that lives on a GPU
        outline = torch.empty(16, dtype=torch.long, device=carrier)  # dtype, number of dimensions, dimensions
        sent: list[Message] = []
        for stage in sorted(stages):
            before, after = (self._owner(neighbour) for neighbour in (stage - 1, stage + 1))
            if stage:
                if before is not None:
                    self.peers.receive(stage, before, outline).wait()
                sample = self._samples["forward", stage] = zeros_like_outline(outline, self.device)
            with torch.no_grad():
                output = stages[stage](sample)
            self._samples["back", stage] = output
            outline = outlined(output).to(carrier)
            if after is not None:
                sent.append(self.peers.send(stage + 1, after, outline.clone()))
        for message in sent:
            message.wait()
        # Keep shapes and dtypes for all later steps: one number each.
        self._samples = {end: sample.new_zeros(()).expand(sample.shape) for end, sample in self._samples.items()}

    def begin(self, actions: Sequence[Action], sizes: Sequence[int]) -> None:
        """Begin a step of this rank's `actions`, on microbatches of these `sizes`: post the first receives."""
        self.sizes = sizes
        sources = ((action, self._peer(producer_of(action, self.num_stages))) for action in actions)
        self._unposted = deque((action, source) for action, source in sources if source is not None)  # receives to post
        self._following = dict(pairwise(action for action in actions if action.kind != "weight"))  # weights get none
        self._posted: dict[Action, tuple[Message, Tensor]] = {}
        self._local_results: dict[Action, Tensor] = {}  # from a stage of this rank to the next one on this rank
        self._post_ahead()

    def receive_for(self, action: Action) -> Tensor:
        """Return the input of the stage of `action`, or the gradient of its output."""
        if action in self._local_results:
            return self._local_results.pop(action)
        if action not in self._posted:
            self._receive()
        message, tensor = self._posted.pop(action)
        self._post_ahead()
        with phase("receive", str(action.microbatch)):
            message.wait()
        answered = Action("forward", action.stage + 1, action.microbatch)
        if action.kind != "forward" and answered in self._sent:
            self._sent.pop(answered).wait()  # its gradient is here, so it has arrived: free the activation
        return tensor.to(self.device)

    def send_result(self, action: Action, tensor: Tensor) -> None:
        """Send the result of `action` to the neighbouring stage that needs it; it must not be changed afterwards."""
        consumer = consumer_of(action, self.num_stages)
        if consumer is None:
            return
        peer = self._peer(consumer)
        if peer is None:
            self._local_results[consumer] = tensor
            return
        with phase("send", str(action.microbatch)):
            outgoing = sendable(tensor, self.peers)
            if self.peers.batched and self._unposted and self._unposted[0][0] == self._following.get(action):
                self._sent[consumer] = self._receive([(peer, outgoing)])[0]
            else:
                self._sent[consumer] = self.peers.send(self.tag(consumer), peer, outgoing)

    def finish(self) -> None:
        """End the step: wait for all sends that are not known to be over."""
        with phase("wait"):
            while self._sent:
                self._sent.popitem()[1].wait()

    def tag(self, action: Action) -> int:
        """Return the tag of what `action` receives: unique per direction, stage and microbatch."""
        return 2 * (action.stage * len(self.sizes) + action.microbatch) + (action.kind != "forward")

    def _peer(self, action: Action | None) -> int | None:
        """Return the other rank that does `action`; None if there is no such action or it is this rank's."""
        return None if action is None else self._owner(action.stage)

    def _owner(self, stage: int) -> int | None:
        """Return the other rank that has `stage`; None if there is no such stage or it is this rank's."""
        rank = self.owners[stage] if 0 <= stage < self.num_stages else self.peers.rank
        return None if rank == self.peers.rank else rank

    def _post_ahead(self) -> None:
        """Post receives ahead, except with NCCL, where a receive delays everything launched after it."""
        while self._unposted and len(self._posted) < AHEAD and not self.peers.batched:
            self._receive()

    def _receive(self, together_with: Sequence[tuple[int, Tensor]] = ()) -> list[Message]:
        """Post the next receive in turn, with NCCL in one launch with a send; return the sends."""
        action, source = self._unposted.popleft()
        buffer = self._buffer(action)
        received, sent = self.peers.post(self.tag(action), [(source, buffer)], together_with)
        self._posted[action] = received[0], buffer
        return sent

    def _buffer(self, action: Action) -> Tensor:
        """Return memory for the tensor that `action` receives [samples, ...]; for gloo on the host."""
        sample = self._samples["forward" if action.kind == "forward" else "back", action.stage]
        device = self.device if self.peers.batched else "cpu"
        return sample.new_empty([self.sizes[action.microbatch], *sample.shape[1:]], device=device)


def outlined(tensor: Tensor) -> Tensor:
    """Return the dtype and the shape of a tensor of up to 14 dimensions, as 16 numbers."""
    numbers = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(numbers + [0] * (16 - len(numbers)))


def zeros_like_outline(outline: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of zeros with the dtype and the shape from `outlined`."""
    dtype, dim, *shape = outline.tolist()
    return torch.zeros(shape[:dim], dtype=DTYPES[dtype], device=device)
