"""The proof on one rank, in order: one process on rank 0, then the file's steps on all ranks, then the comparison.

The proof's own messages between ranks are hidden from the supervisor, which counts, compares and times only the file's.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.lab.config import Config
from distlab.lab.config.user_code import bounded, exits_raised, observe_exits, raise_exited
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.reference import LEARNING_RATE, Snapshot, plain
from distlab.techniques.collectives.plain_values import all_gather_plain
from distlab.techniques.mesh.grid import Mesh
from distlab.tools.check.start.command import ProofOptions
from distlab.tools.check.start.script import Job, enter_script
from distlab.tools.check.watch.handles import Waits
from distlab.tools.check.watch.recorder import Recorder
from distlab.tools.check.watch.reporter import Reporter
from distlab.tools.prove import reference, user_file
from distlab.tools.prove.compare import Deviation, Draw, Draws, Passes, Step, compared, parted
from distlab.tools.prove.locate import CPU, WHOLE, LocatedTensor, Misfit, Rows, local, locate_in_dense, named
from distlab.tools.prove.reference import STEPS, Dense, names_of
from distlab.tools.prove.user_file import NAMES, Refused, UserFile, from_names, load
from distlab.tools.prove.verdict import Everything, Grid, Mine, Say, tell

# Bytes of the file's own steps: the sockets' counters over each step, without the proof's messages.
#
# A proof sends more than the file does: one process's tensors to all, everyone's tensors to each other, and during a
# step all of a sharded gradient, before the optimizer steps. All of that runs in `unseen`, and its bytes are
# subtracted. Collectives are over when a step returns, so the kernel has its bytes.

Sent: TypeAlias = Counter[tuple[tuple[str, int], tuple[str, int]]]  # bytes by the two ends of a connection


class Wire:
    """Counts the steps of one rank; `tell` at the end. Without the system's counters it reports nothing."""

    def __init__(self, reporter: Reporter, recorder: Recorder, waits: Waits) -> None:
        self._reporter, self._recorder, self._waits = reporter, recorder, waits
        self._steps = 0
        self._sent: Sent = Counter()
        self._inside = False
        reporter.send("counting", False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count calls and bytes of one step of the file."""
        before = self._now()
        self._inside = True
        self._reporter.send("counting", True)
        try:
            yield
        finally:
            self._reporter.send("counting", False)
            self._inside = False
        self._steps += 1
        self._add(before, self._now(), 1)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Hide the proof's own calls and bytes."""
        outermost = self._inside and not self._recorder.hidden()
        before = self._now() if outermost else Counter()
        with self._recorder.unseen():
            yield
        if outermost:
            self._add(before, self._now(), -1)

    def tell(self) -> None:
        found = [(near, far, nbytes) for (near, far), nbytes in self._sent.items()]
        self._reporter.send("wire", self._steps, found)

    def _now(self) -> Sent:
        return Counter(self._waits.sent_bytes())

    def _add(self, before: Sent, after: Sent, sign: int) -> None:
        for ends, sent in after.items():
            self._sent[ends] += sign * (sent - before[ends])


# What a rank trains: a prepared module with train_step, or a strategy. Each step returns what the proof compares.
#
# A hook takes gradients when the optimizer is about to step: after all processing in train_step, and before zero_grad.

Unseen: TypeAlias = Callable[[], AbstractContextManager[None]]  # hides calls that are not the file's


class Stepped:
    """The file's train_step, or the lab's, on the module that the file's prepare returned."""

    def __init__(
        self, theirs: UserFile, model: nn.Module, group: Any, start: Mapping[str, Tensor], unseen: Unseen
    ) -> None:
        self.theirs, self.group, self._unseen = theirs, group, unseen
        self._canonical = names_of(model)
        self.module = theirs["prepare"](model, group) if "prepare" in theirs else model
        if not isinstance(self.module, nn.Module):
            raise Refused(
                f"prepare(model, group) returned a {type(self.module).__name__}: expected the nn.Module that is trained"
            )
        trained = [each for each in self.module.parameters() if each.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
        self.optimizer.register_step_pre_hook(lambda *_: self._seen())
        self._gradients: dict[str, LocatedTensor] = {}
        self._steps = 0
        self.misfits: dict[str, str] = {}  # parameters that are not the model's, with the reason
        with unseen():
            self._rows = self._placed(start)

    def _placed(self, start: Mapping[str, Tensor]) -> dict[str, Rows]:
        """Return the position of each of this rank's parameters, by its name here."""
        found = {}
        for name, parameter in named(self.module).items():
            if name not in self._canonical:
                raise Refused(
                    f"prepare(model, group) returned a module with a parameter {name!r}, which the model does not have:"
                    " names have to stay, whatever is cut or wrapped"
                )
            try:
                found[name] = locate_in_dense(local(parameter), start[self._canonical[name]])
            except Misfit as misfit:
                self.misfits[name] = str(misfit)
        return found

    def step(self, microbatches: list[Microbatch]) -> Step:
        """Run the file's train_step; raises Refused unless it steps its optimizer once."""
        before = self._steps
        if "train_step" in self.theirs:
            share = self.theirs["train_step"](self.module, self.optimizer, microbatches, self.group)
        else:
            share = train_step(self.theirs, self.module, self.optimizer, microbatches, self.group)
        if self._steps - before != 1:
            raise Refused(
                f"train_step called optimizer.step() {self._steps - before} times in a step: expected once, since a"
                " proof compares what the optimizer sees"
            )
        weights = self._located({name: each for name, each in named(self.module).items() if name in self._rows})
        return Step(None if share is None else float(share), self._gradients, weights)

    def _seen(self) -> None:
        self._steps += 1
        trained = {name: each for name, each in named(self.module).items() if each.requires_grad}
        self._gradients = self._located({name: each.grad for name, each in trained.items() if name in self._rows})

    def _located(self, tensors: Mapping[str, Tensor | None]) -> dict[str, LocatedTensor]:
        with self._unseen():
            copies = {name: None if each is None else local(each) for name, each in tensors.items()}
        return {name: LocatedTensor(self._rows[name], each) for name, each in copies.items()}


class OfStrategy:
    """The file's strategy: the results of `full` on this rank."""

    def __init__(self, theirs: UserFile, model: nn.Module, mesh: Mesh, unseen: Unseen) -> None:
        self._unseen, self._clips = unseen, theirs.found.get("clip") is not None
        config = plain(theirs.config, clip=theirs.found.get("clip"), bucket=0.01)
        self.strategy = theirs["strategy"](model, mesh, config)
        self.misfits: dict[str, str] = {}

    def step(self, microbatches: list[Microbatch]) -> Step:
        share = self.strategy.backward(microbatches)
        before = {} if self._clips else self._full("gradients")
        self.strategy.update()
        gradients = self._full("gradients") if self._clips else before  # clipping in `update` changes them
        return Step(None if share is None else float(share), gradients, self._full("weights"))

    def _full(self, kind: str) -> dict[str, LocatedTensor]:
        with self._unseen():
            full = self.strategy.full(kind)
            return {name: LocatedTensor(WHOLE, local(each)) for name, each in full if each.numel()}


def train_step(
    theirs: UserFile, model: nn.Module, optimizer: torch.optim.Optimizer, microbatches: list[Microbatch],
    group: dist.ProcessGroup,
) -> float:  # fmt: skip
    """Train a step as the lab does, if the file does not: each gradient is summed over all ranks."""
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets, share in microbatches:
        loss = theirs.loss(model, inputs, targets) * share
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # every rank must make the same calls
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
    clip = theirs.found.get("clip")
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    theirs.after_step(model)
    return total


# The proof on one rank, from the single process to the verdict.

SENT = (Dense, Snapshot, reference.Buffers, Mine, Deviation, Rows, LocatedTensor, Draw)  # types that ranks exchange


def play(job: Job, reporter: Reporter, recorder: Recorder, waits: Waits, config: Config) -> None:
    """Prove the file, in place of running a script, and report the findings."""
    enter_script(job)
    observe_exits(raise_exited)
    try:
        with exits_raised():
            with bounded(config.join_timeout_s, partial(reporter.send, "refused")):
                theirs = load(job.script, config)
            dist.init_process_group("gloo")
            wire = Wire(reporter, recorder, waits)
            Proof(theirs, reporter.send, wire.unseen, wire.step).run()
            wire.tell()
    except Refused as refused:
        reporter.send("refused", str(refused))
        raise SystemExit(2) from None
    dist.destroy_process_group()


class Proof:
    """One rank's part of the proof."""

    def __init__(self, theirs: UserFile, say: Say, unseen: Unseen, stepping: Unseen = nullcontext) -> None:
        self.theirs, self.say, self.unseen, self.stepping = theirs, say, unseen, stepping
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.seed = theirs.config.seed
        self.grid = Grid(theirs.axes(self.world_size))
        with unseen():
            self.ours = dist.new_group()  # for the proof's own messages

    def run(self) -> None:
        model = self.theirs.model(self.seed)
        user_file.refuse(model)
        self.device = next((each.device for each in model.parameters()), CPU)
        self.dealing = reference.Dealing(self.theirs, self.grid.axes.get("dp", 1), self.device)
        canonical = names_of(model)
        digests = self.everyone(user_file.digest(model, *self.dealing.whole(0)[:2]))
        user_file.refuse_other_beginnings(digests, self.seed)
        draws = Draws()
        with draws.installed():
            dense: Dense = self.everyone(reference.one_process(self.theirs, self.dealing) if self.rank == 0 else None)[
                0
            ]
            self._say_what_is_proven(model)
            torch.manual_seed(1000 * self.seed + self.grid.index(self.rank, "dp"))  # the lab's; a file may seed anew
            trainee = self._trainee(model, dense)
            trained = trainee.module if isinstance(trainee, Stepped) else model
            draws.watch(trained)
            with self.unseen():
                carried = reference.copy_buffers(trained)
            passes = Passes()
            with passes.watched(trained):
                steps, drawn = self._train(trainee, draws)
            refuse_strangers(steps[0], canonical)
            offs = compared(self.rank, steps, dense, canonical, self.theirs.found.get("clip"))
            rows = {name: each.rows for name, each in steps[0].weights.items()}
            shares, kept = [step.share for step in steps], self._kept(trained, carried, dense)
            mine = Mine(offs, rows, trainee.misfits, shares, drawn, kept, "strategy" in self.theirs)
            everything = Everything(self.theirs, self.dealing, self.grid, dense, canonical, self.everyone(mine))
            first = everything.first()
            tensors = self.everyone(None if first is None else steps[first.step].of(first.kind).get(first.name))
            wrong = everything.is_wrong()
            places = self.everyone(parted(self.theirs, passes, self._dealt(0)[0]) if wrong else "")
            if self.rank == 0:
                tell(everything, first, tensors, places, self.say)

    def _dealt(self, step: int) -> list[Microbatch]:
        return self.dealing.dealt(step, self.grid.index(self.rank, "dp"))

    def _kept(self, trained: nn.Module, start: dict[str, Tensor], dense: Dense) -> reference.Buffers:
        """Return this rank's buffers, and those of one process on its samples."""
        own = reference.by_own_samples(self.theirs, dense, [self._dealt(step) for step in range(STEPS)])
        uncompared = ""
        if self.rank and isinstance(trained, DistributedDataParallel) and trained.broadcast_buffers:
            uncompared = "DDP gives them rank 0's before each step"
        elif "strategy" in self.theirs:
            uncompared = "a strategy may train a copy of the model"
        with self.unseen():
            end = reference.copy_buffers(trained)
        return reference.Buffers(start, end, own, uncompared)

    def _trainee(self, model: nn.Module, dense: Dense) -> Stepped | OfStrategy:
        many = "mesh" in self.theirs
        if "strategy" in self.theirs:
            world: Any = dist.group.WORLD
            return OfStrategy(self.theirs, model, Mesh.grid(self.grid.axes, world), self.unseen)
        if many and "train_step" not in self.theirs and set(self.grid.axes) != {"dp"}:
            raise Refused(f"mesh has the axes {', '.join(self.grid.axes)}: write train_step or strategy beside it")
        group: Any = dist.group.WORLD
        if many:
            names, sizes = zip(*self.grid.axes.items(), strict=True)
            group = dist.device_mesh.init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        return Stepped(self.theirs, model, group, dense.start, self.unseen)

    def _train(self, trainee: Stepped | OfStrategy, draws: Draws) -> tuple[list[Step], list[Draw]]:
        steps: list[Step] = []
        drawn: list[Draw] = []
        for number in range(STEPS):
            microbatches = self._dealt(number)
            with self.stepping():
                steps.append(trainee.step(microbatches))
            drawn = drawn if number else list(draws.drawn)
        return steps, drawn

    def _say_what_is_proven(self, model: nn.Module) -> None:
        if self.rank:
            return
        count = sum(each.numel() for each in model.parameters())
        axes = " x ".join(f"{axis} {size}" for axis, size in self.grid.axes.items())
        self.say("said", "prove", f"{self.theirs.described} · {count:,} parameters · {axes}")
        sizes = self.dealing.sizes(len(self.dealing.whole(0).inputs))
        shown = " | ".join("+".join(map(str, each)) for each in sizes)
        self.say("said", "deal", f"{STEPS} steps in float64, plain SGD; samples by shard and microbatch: {shown}")

    def everyone(self, mine: Any) -> list[Any]:
        """Return each rank's value, on all ranks."""
        with self.unseen():
            return all_gather_plain(mine, self.ours, SENT)


def refuse_strangers(step: Step, canonical: Mapping[str, str]) -> None:
    """Raises Refused if a strategy returns a tensor by a name that the model does not have."""
    strange = sorted({*step.gradients, *step.weights} - set(canonical))
    if strange:
        raise Refused(f"the strategy's full() gives {strange[0]!r}, which is no parameter of the model")


# A proof inside a test: like `distlab prove`, on ranks that already run.


def same_as_one_process(*, seed: int = 1, microbatches: int = 2, **own: Any) -> None:
    """Raise AssertionError on every rank, with the proof's sentence, unless all ranks compute what one process does.

    `own` are the names of a `distlab prove` file: model, loss, batch, train_step, prepare, strategy, mesh, ... Raises
    TypeError for other names, and ValueError for what cannot be proven.
    """
    strange = sorted(set(own) - set(NAMES))
    if strange:
        raise TypeError(f"same_as_one_process has no {', '.join(strange)}: allowed are {', '.join(NAMES)}")
    environ = {"WORLD_SIZE": "1", "LAB_SEED": str(seed), "LAB_MICROBATCHES": str(microbatches)}
    config = Config.read(environ, options=ProofOptions)
    config = config.model_copy(update={"world_size": dist.get_world_size()})
    found: list[str] = []

    def keep(kind: str, *values: Any) -> None:
        if kind == "finding":
            found.append(f"{values[0]}: {values[1]}")

    try:
        proof = Proof(from_names(own, config, "same_as_one_process(...)"), keep, nullcontext)
        proof.run()
    except Refused as refused:
        raise ValueError(str(refused)) from None
    sentences: list[str] = proof.everyone(found)[0]
    assert not sentences, "\n".join(sentences)
