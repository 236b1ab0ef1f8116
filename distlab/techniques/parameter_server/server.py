"""The parameter server as a state machine: weights, a clock per worker, and the rules for the next step.

A worker asks to start, computes a gradient with the weights that it receives, and pushes it. Meanwhile other workers
push theirs, so its gradient belongs to old weights: its staleness is the number of updates that were applied in
between. Without a bound this is asynchronous SGD (Dean et al. 2012, "Large Scale Distributed Deep Networks", section
4.1, Downpour). With a bound it is stale synchronous parallel (Ho et al. 2013, "More Effective Distributed ML via a
Stale Synchronous Parallel Parameter Server", section 2): a worker that has finished c steps may start the next one if
the slowest has finished at least c - s; s = 0 is lockstep.

The rules use no process, thread or time: they depend only on the order of calls, and the same order gives the same
weights. A run ends after a budget of steps, of which faster workers take more.

    weights   [P]  flat, changed in place
    update    [P]  a gradient, or the sum over several steps: w becomes w - lr·update
"""

import random
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.lab.config import Config
from distlab.lab.measure.tensors import digest_of
from distlab.lab.workload.data import Batches
from distlab.lab.workload.model import Model
from distlab.lab.workload.optimizer import forward_backward
from distlab.techniques.data_parallel.vectors import Vectors

START, PUSH, LEAVE = "start", "push", "leave"


class Event(NamedTuple):
    kind: str  # START, PUSH or LEAVE
    worker: int
    steps: int  # granted, delivered or lost
    number: int = 0  # of a push, counted per worker from 1
    loss: float = 0.0  # of a push: the worker's mean loss, if a recorder got it


class ParameterServer:
    """The weights and the rules. `staleness` None sets no bound; `budget` is the total number of steps of all
    workers."""

    def __init__(
        self, weights: Tensor, workers: Iterable[int], *, lr: float, budget: int, staleness: int | None = None
    ) -> None:
        self.weights, self.lr, self.budget, self.staleness = weights, lr, budget, staleness
        self.clocks = dict.fromkeys(workers, 0)  # steps that each present worker has finished
        self.history: list[Event] = []
        self._granted: dict[int, int] = {}  # steps under way
        self._numbers = dict.fromkeys(self.clocks, 0)  # pushes of each worker that were applied

    @property
    def spent(self) -> bool:
        return self.budget <= 0

    def lead(self, worker: int) -> int:
        """Return how many finished steps `worker` is ahead of the slowest."""
        return self.clocks[worker] - min(self.clocks.values())

    def may_start(self, worker: int) -> bool:
        """Return whether `start` may be answered now; at the end of the budget its answer is 0."""
        return self.spent or self.staleness is None or self.lead(worker) <= self.staleness

    def start(self, worker: int, most: int = 1) -> int:
        """Grant up to `most` steps from the present weights; 0 means that the run is over."""
        if worker in self._granted:
            raise ValueError(f"rank {worker} starts again before it has pushed its last steps")
        granted = min(most, self.budget)
        if granted > 0:
            self.budget -= granted
            self._granted[worker] = granted
            self.history.append(Event(START, worker, granted))
        return granted

    def may_push(self, worker: int) -> bool:  # noqa: ARG002  an order of events asks for the worker
        """Return whether `push` may be applied now: always, unless the order of events is fixed."""
        return True

    def push(self, worker: int, number: int, update: Tensor) -> None:
        """Apply the `number`-th update of `worker`; raises ValueError unless each comes exactly once, in order."""
        if worker not in self.clocks:
            raise ValueError(f"rank {worker} has left: its update is not applied")
        if number != self._numbers[worker] + 1 or worker not in self._granted:
            raise ValueError(f"rank {worker} pushes update {number} after {self._numbers[worker]}")
        self._numbers[worker] = number
        steps = self._granted.pop(worker)
        self.weights.add_(update, alpha=-self.lr)
        self.clocks[worker] += steps
        self.history.append(Event(PUSH, worker, steps, number))

    def may_finish(self) -> bool:
        """Return whether the weights are final: no steps are left to grant, and none under way."""
        return self.spent and not self._granted

    def leave(self, worker: int) -> None:
        """Continue without `worker`: its clock no longer counts, and its steps under way are lost."""
        if worker in self.clocks:
            self.history.append(Event(LEAVE, worker, self._granted.pop(worker, 0)))
            del self.clocks[worker]

    def behind(self) -> list[int]:
        """Return the workers that the others wait for: the slowest, and at the end those with steps under way."""
        slowest = min(self.clocks.values(), default=0)
        return [
            rank for rank, clock in self.clocks.items() if (rank in self._granted if self.spent else clock == slowest)
        ]


class Ordered(ParameterServer):
    """Accepts events only in the given order: workers still compute in parallel, and the result is reproducible."""

    def __init__(
        self, order: list[tuple[str, int]], weights: Tensor, workers: Iterable[int], *, lr: float, budget: int
    ) -> None:
        super().__init__(weights, workers, lr=lr, budget=budget)
        self.order = order

    def _is_next(self, kind: str, worker: int) -> bool:
        return len(self.history) < len(self.order) and self.order[len(self.history)] == (kind, worker)

    def may_start(self, worker: int) -> bool:
        return self.spent or self._is_next(START, worker)

    def may_push(self, worker: int) -> bool:
        return self._is_next(PUSH, worker)


def draw_order(seed: int, rules: ParameterServer, most: int = 1) -> list[tuple[str, int]]:
    """Return an order of events that `rules` allow, drawn by `seed`; all workers that may act are equally likely.

    `rules` are used up: their clocks have run when this returns.
    """
    draw = random.Random(seed)
    numbers: dict[int, int] = {}
    busy: set[int] = set()
    while not rules.may_finish():
        ready = [worker for worker in rules.clocks if worker in busy or (not rules.spent and rules.may_start(worker))]
        worker = draw.choice(ready)
        if worker in busy:
            numbers[worker] = numbers.get(worker, 0) + 1
            rules.push(worker, numbers[worker], torch.zeros_like(rules.weights))
        else:
            rules.start(worker, most)
        busy ^= {worker}
    return [(event.kind, event.worker) for event in rules.history]


# A running parameter server: the rules behind a lock, and a link with its own thread for each worker.
#
# The rules above know neither threads nor messages. Rank 0 is the server and also a worker, which calls directly. Each
# other worker has a link, a private gloo connection of two ends, so the death of a worker breaks only its own link.
#
#     header   [4] float64   request: kind, number of the push, most steps, loss; answer: the steps granted
#     vector   [P]           an update, or weights

REQUEST_START, REQUEST_PUSH, REQUEST_FINISH = 0, 1, 2
JOIN_S = 0.2  # interval for checking whether a worker has left


class Recorder:
    """Records the events at a server of `workers` in order, whatever its rules; called under the server's lock."""

    def __init__(self, workers: Iterable[int]) -> None:
        self.seen: list[Event] = []
        self.finished = dict.fromkeys(workers, 0)  # steps by worker, including those who left
        self._granted: dict[int, int] = {}

    def started(self, worker: int, steps: int) -> None:
        """Record that `worker` received the weights for `steps` steps."""
        self.seen.append(Event(START, worker, steps))
        self._granted[worker] = steps

    def pushed(self, worker: int, number: int, update: Tensor, loss: float) -> None:  # noqa: ARG002
        """Record that an update of `worker` was applied."""
        steps = self._granted.pop(worker)
        self.seen.append(Event(PUSH, worker, steps, number, loss))
        self.finished[worker] += steps

    def left(self, worker: int) -> None:
        """Record that `worker` has left, and that its steps under way are lost."""
        self.seen.append(Event(LEAVE, worker, self._granted.pop(worker, 0)))


class Server:
    """The rules behind a lock, for any thread. Every wait has a timeout, whose error names the slow ranks."""

    def __init__(self, rules: ParameterServer, timeout_s: float, recorder: Recorder) -> None:
        self.rules, self.timeout_s, self.recorder = rules, timeout_s, recorder
        self._changed = threading.Condition()

    def start(self, worker: int, most: int, weights: Tensor) -> int:
        """Wait until `worker` may start; fills `weights` and returns the steps granted, 0 at the end of the run."""
        with self._changed:
            self._wait(worker, lambda: self.rules.may_start(worker), "start a step")
            granted = self.rules.start(worker, most)
            weights.copy_(self.rules.weights)
            if granted:
                self.recorder.started(worker, granted)
            self._changed.notify_all()
            return granted

    def push(self, worker: int, number: int, update: Tensor, loss: float) -> None:
        with self._changed:
            self._wait(worker, lambda: self.rules.may_push(worker), "push")
            self.rules.push(worker, number, update)
            self.recorder.pushed(worker, number, update, loss)
            self._changed.notify_all()

    def finish(self, worker: int, weights: Tensor) -> None:
        """Wait until no update is under way; fills `weights` with the final ones."""
        with self._changed:
            self._wait(worker, self.rules.may_finish, "fetch the final weights")
            weights.copy_(self.rules.weights)

    def leave(self, worker: int) -> None:
        """Stop waiting for `worker`."""
        with self._changed:
            if worker in self.rules.clocks:
                self.recorder.left(worker)
            self.rules.leave(worker)
            self._changed.notify_all()

    def _wait(self, worker: int, ready: Callable[[], bool], what: str) -> None:
        def has_left() -> bool:
            return worker not in self.rules.clocks

        if not self._changed.wait_for(lambda: has_left() or ready(), self.timeout_s):
            ranks = ", ".join(f"rank {rank}" for rank in self.rules.behind())
            raise TimeoutError(f"rank {worker} could not {what} in {self.timeout_s:g} s: timed out waiting for {ranks}")
        if has_left():
            raise ConnectionError(f"rank {worker} was declared dead: its request came too late")


class Client(Protocol):
    """The server as one worker sees it, local or remote; calls as in `Server`."""

    def start(self, most: int, weights: Tensor) -> int: ...

    def push(self, number: int, update: Tensor, loss: float) -> None: ...

    def finish(self, weights: Tensor) -> None: ...


class Local:
    def __init__(self, server: Server, worker: int) -> None:
        self.server, self.worker = server, worker

    def start(self, most: int, weights: Tensor) -> int:
        return self.server.start(self.worker, most, weights)

    def push(self, number: int, update: Tensor, loss: float) -> None:
        self.server.push(self.worker, number, update.cpu(), loss)

    def finish(self, weights: Tensor) -> None:
        self.server.finish(self.worker, weights)


class Link:
    """One end of a two-ended connection; each message takes at most `timeout_s`, or raises RuntimeError."""

    def __init__(self, store: dist.Store, *, at_server: bool, timeout_s: float) -> None:
        self._other = int(at_server)
        self._gloo = dist.ProcessGroupGloo(store, 1 - self._other, 2, timedelta(seconds=timeout_s))

    def send(self, tensor: Tensor) -> None:
        self._gloo.send([tensor], self._other, 0).wait()  # type: ignore[attr-defined]

    def receive(self, tensor: Tensor) -> Tensor:
        self._gloo.recv([tensor], self._other, 0).wait()  # type: ignore[attr-defined]
        return tensor


class Remote:
    """The client on another rank. `like` is a flat vector of the size and dtype of the weights."""

    def __init__(self, link: Link, like: Tensor) -> None:
        self.link = link
        self._vector = torch.empty_like(like, device="cpu")

    def start(self, most: int, weights: Tensor) -> int:
        self.link.send(header(REQUEST_START, most=most))
        granted = int(self.link.receive(header())[0])
        if granted:
            weights.copy_(self.link.receive(self._vector))
        return granted

    def push(self, number: int, update: Tensor, loss: float) -> None:
        self.link.send(header(REQUEST_PUSH, number, loss=loss))
        self.link.send(self._vector.copy_(update))

    def finish(self, weights: Tensor) -> None:
        self.link.send(header(REQUEST_FINISH))
        weights.copy_(self.link.receive(self._vector))


def header(what: int = 0, number: int = 0, most: int = 0, loss: float = 0.0) -> Tensor:
    return torch.tensor([what, number, most, loss], dtype=torch.float64)


def serve(server: Server, link: Link, worker: int) -> None:
    """Answer one remote worker until it has its final weights."""
    vector = torch.empty_like(server.rules.weights)
    while True:
        what, number, most, loss = link.receive(header()).tolist()
        if what == REQUEST_START:
            granted = server.start(worker, int(most), vector)
            link.send(header(granted))
            if granted:
                link.send(vector)
        elif what == REQUEST_PUSH:
            server.push(worker, int(number), link.receive(vector), loss)
        else:
            server.finish(worker, vector)
            link.send(vector)
            return


class Threads:
    """A thread per link. If a link breaks its worker leaves; other errors are kept for `check`."""

    def __init__(self, server: Server, links: dict[int, Link]) -> None:
        self.server = server
        self._errors: list[Exception] = []
        self._threads = {
            worker: threading.Thread(
                target=self._run, args=(link, worker), name=f"server of rank {worker}", daemon=True
            )
            for worker, link in links.items()
        }
        for thread in self._threads.values():
            thread.start()

    def _run(self, link: Link, worker: int) -> None:
        try:
            serve(self.server, link, worker)
        except (RuntimeError, ConnectionError):  # the other end has closed, or was silent for too long
            self.server.leave(worker)
        except Exception as error:
            self._errors.append(error)
            self.server.leave(worker)

    def join(self) -> None:
        """Return once every present worker has its final weights; raises errors of the threads."""
        for worker, thread in self._threads.items():
            while thread.is_alive() and worker in self.server.rules.clocks:  # each of its waits has a timeout
                thread.join(JOIN_S)
        if self._errors:
            raise self._errors[0]


# A worker of an asynchronous run: it asks to start, takes some steps from the received weights, and pushes the sum of
# their gradients.


class Worker:
    """One worker's model and data, and a record of its steps; `on_step(step)` is called before each step."""

    def __init__(
        self, model: Model, config: Config, batches: Batches, rank: int, lr: float,
        on_step: Callable[[int], None] = lambda step: None,  # noqa: ARG005
    ) -> None:  # fmt: skip
        self.model, self.vectors = model, Vectors(model.parameters())
        self.batches, self.rank, self.num_workers, self.lr, self.on_step = batches, rank, config.world_size, lr, on_step
        self.steps = 0
        self.samples: list[str] = []  # digests of the samples behind each push
        self._used: list[Tensor] = []  # inputs and targets since the last push

    def train(self, client: Client, most: int) -> None:
        """Train until the server has no more steps to grant; the weights are the final ones then."""
        update = torch.zeros_like(self.vectors.weights)
        while granted := self.fetch(client, most):
            loss = self.accumulate(update, granted)
            client.push(len(self.samples), update, loss)
        client.finish(self.vectors.weights)

    def fetch(self, client: Client, most: int) -> int:
        """Fetch the server's weights for up to `most` steps; return how many it grants."""
        return client.start(most, self.vectors.weights)

    def accumulate(self, update: Tensor, steps: int) -> float:
        """Fill `update` with the sum of the gradients of `steps` steps, and return the mean loss.

        Each gradient is computed after the updates of those before it.
        """
        update.zero_()
        losses = []
        for _ in range(steps):
            self.on_step(self.steps)
            losses.append(self.backward())
            update += self.vectors.gradients
            self.vectors.weights.add_(self.vectors.gradients, alpha=-self.lr)
            self.steps += 1
        self.samples.append(digest_of(self._used))
        self._used = []
        return sum(losses) / len(losses)

    def backward(self) -> float:
        """Compute the gradient of this worker's next samples, weighted by their share; return their mean loss."""
        self.vectors.zero()
        microbatches, summed = self.batches.microbatches(self.steps, self.rank, self.num_workers), 0.0
        for index, part in enumerate(microbatches):
            summed += forward_backward(self.model, part, index).item()
            self._used += part[:2]
        return summed / sum(part.share * part.targets.numel() for part in microbatches)
