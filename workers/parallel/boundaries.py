"""Boundaries: the tensors that pass between stages, activations forward and gradients back.

gloo ends a send when its receive was posted and filled, so the rules here are about not waiting. Receives are posted
before they are needed, `AHEAD` of them, each under a tag of its own, so that a transfer runs while the rank computes. A
send is waited for only when something proves that it is over: the gradient of a microbatch comes back after its
activation went out. What nothing proves is waited for at the end of the step.

NCCL runs messages in the order of their launch and knows no tags. There a receive is launched together with the send
that goes before it, as Megatron does, or two ranks that both send would wait for each other. Tests prove this rule on
the schedules, as they do gloo's; on GPUs it was never run. `interleaved` it does not serve: ranks would wait in a
circle.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from workers.parallel.peers import Message, Peers
from workers.parallel.phases import phase
from workers.parallel.schedules import Action, gives, needs

# Posted receives: their memory does not grow with m, and 4, or all 8 of `python -m benchmarks.pp`, were not faster
# beyond its spread.
AHEAD = 2
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Boundaries:
    """What one rank exchanges at the ends of its stages; stage s is on rank `owners[s]` of the group."""

    def __init__(self, peers: Peers, owners: Sequence[int]) -> None:
        self.peers, self.owners, self.num_stages = peers, owners, len(owners)
        self._sent: dict[Action, Message] = {}  # by the action that takes what is sent
        self._samples: dict[tuple[str, int], Tensor] = {}  # what a stage takes forward and back: one sample of it

    def agree(self, stages: Mapping[int, nn.Module], sample: Tensor) -> None:
        """Learn all shapes, once: `sample` [1, ...] goes through the first stage, and its shape alone on to the
        next."""
        self.device = sample.device
        wire = self.device if self.peers.batched else torch.device("cpu")  # gloo sends no tensor that lives on a GPU
        outline = torch.empty(16, dtype=torch.long, device=wire)  # dtype, number of dimensions, dimensions
        sent: list[Message] = []
        for stage in sorted(stages):
            before, after = (self._owner(neighbour) for neighbour in (stage - 1, stage + 1))
            if stage:
                if before is not None:
                    self.peers.post(stage, receives=[(before, outline)])[0][0].wait()
                sample = self._samples["forward", stage] = drawn(outline, self.device)
            with torch.no_grad():
                output = stages[stage](sample)
            self._samples["back", stage] = output
            outline = outlined(output).to(wire)
            if after is not None:
                sent += self.peers.post(stage + 1, sends=[(after, outline.clone())])[1]
        for message in sent:
            message.wait()
        # Shapes and types, for all the steps to come: a number each.
        self._samples = {end: known.new_zeros(()).expand(known.shape) for end, known in self._samples.items()}

    def begin(self, actions: Sequence[Action], sizes: Sequence[int]) -> None:
        """Begin a step of this rank's `actions`, on microbatches of so many samples: post its first receives."""
        self.sizes = sizes
        sources = ((action, self._peer(needs(action, self.num_stages))) for action in actions)
        self._due = deque((action, source) for action, source in sources if source is not None)  # receives to post
        self._following = dict(pairwise(action for action in actions if action.kind != "weight"))  # those take nothing
        self._posted: dict[Action, tuple[Message, Tensor]] = {}
        self._handed: dict[Action, Tensor] = {}  # from a stage of this rank to the next one, which is here too
        self._post_ahead()

    def take(self, action: Action) -> Tensor:
        """What `action` works on: the input of its stage, or the gradient of its output."""
        if action in self._handed:
            return self._handed.pop(action)
        if action not in self._posted:
            self._receive()
        message, tensor = self._posted.pop(action)
        self._post_ahead()
        with phase("receive", str(action.microbatch)):
            message.wait()
        answered = Action("forward", action.stage + 1, action.microbatch)
        if action.kind != "forward" and answered in self._sent:
            self._sent.pop(answered).wait()  # its gradient is here, so it has arrived: let go of the activation
        return tensor.to(self.device)

    def give(self, action: Action, tensor: Tensor) -> None:
        """Pass the result of `action` on, if a neighbouring stage takes it; nobody may change it afterwards."""
        taker = gives(action, self.num_stages)
        if taker is None:
            return
        peer = self._peer(taker)
        if peer is None:
            self._handed[taker] = tensor
            return
        with phase("send", str(action.microbatch)):
            outgoing = [(peer, sendable(tensor, self.peers))]
            if self.peers.batched and self._due and self._due[0][0] == self._following.get(action):
                self._sent[taker] = self._receive(outgoing)[0]
            else:
                self._sent[taker] = self.peers.post(self.tag(taker), sends=outgoing)[1][0]

    def finish(self) -> None:
        """End the step: wait for the sends that nothing has answered."""
        with phase("wait"):
            while self._sent:
                self._sent.popitem()[1].wait()

    def tag(self, action: Action) -> int:
        """The tag of what `action` takes: another for each direction, stage and microbatch."""
        return 2 * (action.stage * len(self.sizes) + action.microbatch) + (action.kind != "forward")

    def _peer(self, action: Action | None) -> int | None:
        """The other rank that does `action`; None if there is no such action, or if it is this rank's own."""
        return None if action is None else self._owner(action.stage)

    def _owner(self, stage: int) -> int | None:
        """The other rank that has `stage`; None if there is no such stage, or if it is this rank's own."""
        rank = self.owners[stage] if 0 <= stage < self.num_stages else self.peers.rank
        return None if rank == self.peers.rank else rank

    def _post_ahead(self) -> None:
        """With NCCL a receive holds up all that is launched behind it: none is posted before it is needed."""
        while self._due and len(self._posted) < AHEAD and not self.peers.batched:
            self._receive()

    def _receive(self, together_with: Sequence[tuple[int, Tensor]] = ()) -> list[Message]:
        """Post the next receive that is due, and for NCCL a send in the same launch; returns the sends."""
        action, source = self._due.popleft()
        buffer = self._buffer(action)
        received, sent = self.peers.post(self.tag(action), [(source, buffer)], together_with)
        self._posted[action] = received[0], buffer
        return sent

    def _buffer(self, action: Action) -> Tensor:
        """Memory for what `action` takes [samples, ...], for gloo on the host."""
        sample = self._samples["forward" if action.kind == "forward" else "back", action.stage]
        device = self.device if self.peers.batched else "cpu"
        return sample.new_empty([self.sizes[action.microbatch], *sample.shape[1:]], device=device)


def sendable(tensor: Tensor, peers: Peers) -> Tensor:
    """`tensor` as it can be sent: in one piece, and for gloo on the host."""
    return tensor.contiguous() if peers.batched else tensor.cpu().contiguous()


def outlined(tensor: Tensor) -> Tensor:
    """The dtype and the shape of a tensor of up to 14 dimensions, as 16 numbers."""
    numbers = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(numbers + [0] * (16 - len(numbers)))


def drawn(outline: Tensor, device: torch.device) -> Tensor:
    """A tensor of zeros with the dtype and the shape that `outlined` wrote down."""
    dtype, dim, *shape = outline.tolist()
    return torch.zeros(shape[:dim], dtype=DTYPES[dtype], device=device)
