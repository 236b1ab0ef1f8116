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
from distlab.tools.prove.compare import Deviation, Draw, Draws, Passes, Step, compared, first_wrong_module
from distlab.tools.prove.locate import CPU, WHOLE, LocatedTensor, Misfit, Rows, local, locate_in_dense, named
from distlab.tools.prove.reference import STEPS, Dense, names_of
from distlab.tools.prove.user_file import NAMES, Refused, UserFile, from_names, load
from distlab.tools.prove.verdict import AllRecords, Grid, RankRecords, Report, report_all

# Bytes of the file's own steps: the sockets' counters over each step, without the proof's messages.
#
# A proof sends more than the file does: one process's tensors to all, everyone's tensors to each other, and during a
# step all of a sharded gradient, before the optimizer steps. All of that runs in `unseen`, and its bytes are
# subtracted. Collectives are over when a step returns, so the kernel has its bytes.

Sent: TypeAlias = Counter[tuple[tuple[str, int], tuple[str, int]]]  # bytes by the two ends of a connection


class ByteCounter:
    """Counts the bytes of one rank's steps; `report` at the end. Without the system's counters it reports none."""

    def __init__(self, reporter: Reporter, recorder: Recorder, waits: Waits) -> None:
        self._reporter, self._recorder, self._waits = reporter, recorder, waits
        self._steps = 0
        self._sent: Sent = Counter()
        self._inside = False
        reporter.send("counting", False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count calls and bytes of one step of the file."""
        before = self._sent_bytes()
        self._inside = True
        self._reporter.send("counting", True)
        try:
            yield
        finally:
            self._reporter.send("counting", False)
            self._inside = False
        self._steps += 1
        self._add(before, self._sent_bytes(), 1)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Hide the proof's own calls and bytes."""
        outermost = self._inside and not self._recorder.hidden()
        before = self._sent_bytes() if outermost else Counter()
        with self._recorder.unseen():
            yield
        if outermost:
            self._add(before, self._sent_bytes(), -1)

    def report(self) -> None:
        found = [(near, far, nbytes) for (near, far), nbytes in self._sent.items()]
        self._reporter.send("wire", self._steps, found)

    def _sent_bytes(self) -> Sent:
        return Counter(self._waits.sent_bytes())

    def _add(self, before: Sent, after: Sent, sign: int) -> None:
        for ends, sent in after.items():
            self._sent[ends] += sign * (sent - before[ends])


# What a rank trains: a prepared module with train_step, or a strategy. Each step returns what the proof compares.
#
# A hook takes gradients when the optimizer is about to step: after all processing in train_step, and before zero_grad.

Unseen: TypeAlias = Callable[[], AbstractContextManager[None]]  # hides calls that are not the file's


class TrainedModule:
    """The file's train_step, or the lab's, on the module that the file's prepare returned."""

    def __init__(
        self, file: UserFile, model: nn.Module, group: Any, start: Mapping[str, Tensor], unseen: Unseen
    ) -> None:
        self.file, self.group, self._unseen = file, group, unseen
        self._canonical = names_of(model)
        self.module = file["prepare"](model, group) if "prepare" in file else model
        if not isinstance(self.module, nn.Module):
            raise Refused(
                f"prepare(model, group) returned a {type(self.module).__name__}: expected the nn.Module that is trained"
            )
        trained = [each for each in self.module.parameters() if each.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
        self.optimizer.register_step_pre_hook(lambda *_: self._on_step())
        self._gradients: dict[str, LocatedTensor] = {}
        self._steps = 0
        self.misfits: dict[str, str] = {}  # parameters that are not the model's, with the reason
        with unseen():
            self._rows = self._locate(start)

    def _locate(self, start: Mapping[str, Tensor]) -> dict[str, Rows]:
        """Return the position of each of this rank's parameters, by its name here."""
        found = {}
        for name, parameter in named(self.module).items():
            if name not in self._canonical:
                raise Refused(
                    f"prepare(model, group) returned a module with a parameter {name!r}, which the model does not have:"
                    " keep the names when you shard or wrap parameters"
                )
            try:
                found[name] = locate_in_dense(local(parameter), start[self._canonical[name]])
            except Misfit as misfit:
                self.misfits[name] = str(misfit)
        return found

    def step(self, microbatches: list[Microbatch]) -> Step:
        """Run the file's train_step; raises Refused unless it steps its optimizer once."""
        before = self._steps
        if "train_step" in self.file:
            loss_part = self.file["train_step"](self.module, self.optimizer, microbatches, self.group)
        else:
            loss_part = train_step(self.file, self.module, self.optimizer, microbatches, self.group)
        if self._steps - before != 1:
            raise Refused(
                f"train_step called optimizer.step() {self._steps - before} times in a step: expected once, since a"
                " proof compares the gradients that the optimizer uses"
            )
        weights = self._located({name: each for name, each in named(self.module).items() if name in self._rows})
        return Step(None if loss_part is None else float(loss_part), self._gradients, weights)

    def _on_step(self) -> None:
        self._steps += 1
        trained = {name: each for name, each in named(self.module).items() if each.requires_grad}
        self._gradients = self._located({name: each.grad for name, each in trained.items() if name in self._rows})

    def _located(self, tensors: Mapping[str, Tensor | None]) -> dict[str, LocatedTensor]:
        with self._unseen():
            copies = {name: None if each is None else local(each) for name, each in tensors.items()}
        return {name: LocatedTensor(self._rows[name], each) for name, each in copies.items()}


class TrainedStrategy:
    """The file's strategy: the results of `full` on this rank."""

    def __init__(self, file: UserFile, model: nn.Module, mesh: Mesh, unseen: Unseen) -> None:
        self._unseen, self._clips = unseen, file.found.get("clip") is not None
        config = plain(file.config, clip=file.found.get("clip"), bucket=0.01)
        self.strategy = file["strategy"](model, mesh, config)
        self.misfits: dict[str, str] = {}

    def step(self, microbatches: list[Microbatch]) -> Step:
        loss_part = self.strategy.backward(microbatches)
        before = {} if self._clips else self._full("gradients")
        self.strategy.update()
        gradients = self._full("gradients") if self._clips else before  # clipping in `update` changes them
        return Step(None if loss_part is None else float(loss_part), gradients, self._full("weights"))

    def _full(self, kind: str) -> dict[str, LocatedTensor]:
        with self._unseen():
            full = self.strategy.full(kind)
            return {name: LocatedTensor(WHOLE, local(each)) for name, each in full if each.numel()}


def train_step(
    file: UserFile, model: nn.Module, optimizer: torch.optim.Optimizer, microbatches: list[Microbatch],
    group: dist.ProcessGroup,
) -> float:  # fmt: skip
    """Train a step as the lab does, if the file does not: each gradient is summed over all ranks."""
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets, share in microbatches:
        loss = file.loss(model, inputs, targets) * share
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # every rank must make the same calls
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
    clip = file.found.get("clip")
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    file.after_step(model)
    return total


# The proof on one rank, from the single process to the verdict.

EXCHANGED = (Dense, Snapshot, reference.Buffers, RankRecords, Deviation, Rows, LocatedTensor, Draw)  # types


def play(job: Job, reporter: Reporter, recorder: Recorder, waits: Waits, config: Config) -> None:
    """Prove the file, instead of running a script, and report the findings."""
    enter_script(job)
    observe_exits(raise_exited)
    try:
        with exits_raised():
            with bounded(config.join_timeout_s, partial(reporter.send, "refused")):
                file = load(job.script, config)
            dist.init_process_group("gloo")
            bytes_of_steps = ByteCounter(reporter, recorder, waits)
            Proof(file, reporter.send, bytes_of_steps.unseen, bytes_of_steps.step).run()
            bytes_of_steps.report()
    except Refused as refused:
        reporter.send("refused", str(refused))
        raise SystemExit(2) from None
    dist.destroy_process_group()


class Proof:
    """One rank's part of the proof."""

    def __init__(self, file: UserFile, report: Report, unseen: Unseen, stepping: Unseen = nullcontext) -> None:
        self.file, self.report, self.unseen, self.stepping = file, report, unseen, stepping
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.seed = file.config.seed
        self.grid = Grid(file.axes(self.world_size))
        with unseen():
            self.own_group = dist.new_group()  # for the proof's own messages

    def run(self) -> None:
        model = self.file.model(self.seed)
        user_file.refuse(model)
        self.device = next((each.device for each in model.parameters()), CPU)
        self.split = reference.BatchSplit(self.file, self.grid.axes.get("dp", 1), self.device)
        canonical = names_of(model)
        digests = self.gather(user_file.digest(model, *self.split.whole(0)[:2]))
        user_file.refuse_different_starts(digests, self.seed)
        draws = Draws()
        with draws.installed():
            dense: Dense = self.gather(reference.one_process(self.file, self.split) if self.rank == 0 else None)[0]
            self._report_setup(model)
            torch.manual_seed(1000 * self.seed + self.grid.index(self.rank, "dp"))  # the lab's; a file may seed anew
            trainee = self._trainee(model, dense)
            trained = trainee.module if isinstance(trainee, TrainedModule) else model
            draws.watch(trained)
            with self.unseen():
                start = reference.copy_buffers(trained)
            passes = Passes()
            with passes.watched(trained):
                steps, drawn = self._train(trainee, draws)
            refuse_unknown_names(steps[0], canonical)
            deviations = compared(self.rank, steps, dense, canonical, self.file.found.get("clip"))
            rows = {name: each.rows for name, each in steps[0].weights.items()}
            loss_parts, buffers = [step.loss_part for step in steps], self._buffers(trained, start, dense)
            mine = RankRecords(deviations, rows, trainee.misfits, loss_parts, drawn, buffers, "strategy" in self.file)
            all_records = AllRecords(self.file, self.split, self.grid, dense, canonical, self.gather(mine))
            first = all_records.first()
            tensors = self.gather(None if first is None else steps[first.step].of(first.kind).get(first.name))
            wrong = all_records.is_wrong()
            errors = self.gather(first_wrong_module(self.file, passes, self._microbatches(0)[0]) if wrong else "")
            if self.rank == 0:
                report_all(all_records, first, tensors, errors, self.report)

    def _microbatches(self, step: int) -> list[Microbatch]:
        return self.split.microbatches(step, self.grid.index(self.rank, "dp"))

    def _buffers(self, trained: nn.Module, start: dict[str, Tensor], dense: Dense) -> reference.Buffers:
        """Return this rank's buffers, and those of one process on its samples."""
        own = reference.by_own_samples(self.file, dense, [self._microbatches(step) for step in range(STEPS)])
        uncompared = ""
        if self.rank and isinstance(trained, DistributedDataParallel) and trained.broadcast_buffers:
            uncompared = "DDP overwrites them with rank 0's before each step"
        elif "strategy" in self.file:
            uncompared = "a strategy may train a copy of the model"
        with self.unseen():
            end = reference.copy_buffers(trained)
        return reference.Buffers(start, end, own, uncompared)

    def _trainee(self, model: nn.Module, dense: Dense) -> TrainedModule | TrainedStrategy:
        many = "mesh" in self.file
        if "strategy" in self.file:
            world: Any = dist.group.WORLD
            return TrainedStrategy(self.file, model, Mesh.grid(self.grid.axes, world), self.unseen)
        if many and "train_step" not in self.file and set(self.grid.axes) != {"dp"}:
            raise Refused(f"mesh has the axes {', '.join(self.grid.axes)}: also define train_step or strategy")
        group: Any = dist.group.WORLD
        if many:
            names, sizes = zip(*self.grid.axes.items(), strict=True)
            group = dist.device_mesh.init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        return TrainedModule(self.file, model, group, dense.start, self.unseen)

    def _train(self, trainee: TrainedModule | TrainedStrategy, draws: Draws) -> tuple[list[Step], list[Draw]]:
        steps: list[Step] = []
        drawn: list[Draw] = []
        for number in range(STEPS):
            microbatches = self._microbatches(number)
            with self.stepping():
                steps.append(trainee.step(microbatches))
            drawn = drawn if number else list(draws.drawn)
        return steps, drawn

    def _report_setup(self, model: nn.Module) -> None:
        if self.rank:
            return
        count = sum(each.numel() for each in model.parameters())
        axes = " x ".join(f"{axis} {size}" for axis, size in self.grid.axes.items())
        self.report("said", "prove", f"{self.file.described} · {count:,} parameters · {axes}")
        sizes = self.split.sizes(len(self.split.whole(0).inputs))
        shown = " | ".join("+".join(map(str, each)) for each in sizes)
        self.report("said", "batches", f"{STEPS} steps in float64, plain SGD; samples by shard and microbatch: {shown}")

    def gather(self, mine: Any) -> list[Any]:
        """Return each rank's value, on all ranks."""
        with self.unseen():
            return all_gather_plain(mine, self.own_group, EXCHANGED)


def refuse_unknown_names(step: Step, canonical: Mapping[str, str]) -> None:
    """Raises Refused if a strategy returns a tensor by a name that the model does not have."""
    unknown = sorted({*step.gradients, *step.weights} - set(canonical))
    if unknown:
        raise Refused(f"the strategy's full() returns {unknown[0]!r}, which is no parameter of the model")


# A proof inside a test: like `distlab prove`, on ranks that already run.


def same_as_one_process(*, seed: int = 1, microbatches: int = 2, **own: Any) -> None:
    """Raise AssertionError on every rank, with the proof's sentence, unless all ranks compute what one process does.

    `own` are the names of a `distlab prove` file: model, loss, batch, train_step, prepare, strategy, mesh, ... Raises
    TypeError for other names, and ValueError for what cannot be proven.
    """
    unknown = sorted(set(own) - set(NAMES))
    if unknown:
        raise TypeError(f"same_as_one_process has no {', '.join(unknown)}: allowed are {', '.join(NAMES)}")
    environ = {"WORLD_SIZE": "1", "LAB_SEED": str(seed), "LAB_MICROBATCHES": str(microbatches)}
    config = Config.read(environ, options=ProofOptions)
    config = config.model_copy(update={"world_size": dist.get_world_size()})
    found: list[str] = []

    def collect(kind: str, *values: Any) -> None:
        if kind == "finding":
            found.append(f"{values[0]}: {values[1]}")

    try:
        proof = Proof(from_names(own, config, "same_as_one_process(...)"), collect, nullcontext)
        proof.run()
    except Refused as refused:
        raise ValueError(str(refused)) from None
    sentences: list[str] = proof.gather(found)[0]
    assert not sentences, "\n".join(sentences)
