"""The proof on one rank, top to bottom: one process on rank 0, then the file's own steps on all, then who is off.

Everything that ranks send each other for the sake of the proof is unseen by the doctor: what it counts, compares and
times is the file's alone.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.check.handles import Waits
from distlab.check.recorder import Recorder, Telling
from distlab.check.script import Job, enter
from distlab.config import Config
from distlab.mesh.grid import Mesh
from distlab.prove import reference, user_file
from distlab.prove.compare import Deviation, Draw, Draws, Passes, Step, compared, parted
from distlab.prove.options import Options
from distlab.prove.reference import STEPS, Dealing, Dense, Rows, by_own_samples, names_of, one_process
from distlab.prove.trainee import Grid, LocatedTensor, OfStrategy, Stepped, Trainee, Unseen
from distlab.prove.user_file import NAMES, Refused, UserFile, from_names, load
from distlab.prove.verdict import Everything, Mine, Teller, tell
from distlab.transport import store
from distlab.workload.reference import Snapshot

# What the file's own steps send: the sockets' counters over each step, without what the proof sends meanwhile.
#
# A proof sends more than what it proves: one process's numbers to all, everyone's tensors to each other, and inside
# of a step the whole of a sharded gradient, as the optimizer is about to step. All of that runs in `unseen`, and what
# the sockets sent in it is taken away again. Collectives are over when a step returns, so its bytes are with the
# kernel.

Sent: TypeAlias = Counter[tuple[tuple[str, int], tuple[str, int]]]  # bytes by the two ends of a connection


class Wire:
    """Counts the steps of one rank; `tell` at the end. Where the system has no counters, nothing is told."""

    def __init__(self, telling: Telling, recorder: Recorder, waits: Waits) -> None:
        self._telling, self._recorder, self._waits = telling, recorder, waits
        self._steps = 0
        self._sent: Sent = Counter()
        self._inside = False
        telling.say("counting", False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of the file's: its calls and its bytes count."""
        before = self._now()
        self._inside = True
        self._telling.say("counting", True)
        try:
            yield
        finally:
            self._telling.say("counting", False)
            self._inside = False
        self._steps += 1
        self._add(before, self._now(), 1)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is called meanwhile is the proof's own: it is not told, and its bytes do not count."""
        outermost = self._inside and not self._recorder.hidden()
        before = self._now() if outermost else Counter()
        with self._recorder.unseen():
            yield
        if outermost:
            self._add(before, self._now(), -1)

    def tell(self) -> None:
        """All steps, to the doctor."""
        found = [(near, far, nbytes) for (near, far), nbytes in self._sent.items()]
        self._telling.say("wire", self._steps, found)

    def _now(self) -> Sent:
        return Counter(self._waits.sent())

    def _add(self, before: Sent, after: Sent, sign: int) -> None:
        for ends, sent in after.items():
            self._sent[ends] += sign * (sent - before[ends])


SENT = (Dense, Snapshot, reference.Buffers, Mine, Deviation, Rows, LocatedTensor, Draw)  # what ranks send each other


def play(job: Job, telling: Telling, recorder: Recorder, waits: Waits, config: Config) -> None:
    """In the place of a script: prove the file, tell what was found."""
    enter(job)
    try:
        theirs = load(job.script, config)
        dist.init_process_group("gloo")
        wire = Wire(telling, recorder, waits)
        Proof(theirs, telling, wire.unseen, wire.step).run()
        wire.tell()
    except Refused as refused:
        telling.say("refused", str(refused))
        raise SystemExit(2) from None
    dist.destroy_process_group()


class Proof:
    """One rank's part."""

    def __init__(self, theirs: UserFile, telling: Teller, unseen: Unseen, stepping: Unseen = nullcontext) -> None:
        self.theirs, self.telling, self.unseen, self.stepping = theirs, telling, unseen, stepping
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.seed = theirs.config.seed
        self.grid = Grid(theirs.axes(self.world_size))
        self.dealing = Dealing(theirs, self.grid.axes.get("dp", 1))
        with unseen():
            self.ours = dist.new_group()  # for what the proof itself sends

    def run(self) -> None:
        """One process, then all; rank 0 tells."""
        model = self.theirs.model(self.seed)
        user_file.refuse(model)
        canonical = names_of(model)
        digests = self.everyone(user_file.digest(model, *self.dealing.whole(0)[:2]))
        user_file.refuse_other_beginnings(digests, self.seed)
        draws = Draws()
        with draws.installed():
            dense = self.from_rank_0(one_process(self.theirs, self.dealing) if self.rank == 0 else None)
            self._say_what_is_proven(model)
            torch.manual_seed(1000 * self.seed + self.grid.index(self.rank, "dp"))  # the lab's; a file may seed anew
            trainee = self._trainee(model, dense)
            trained = trainee.module if isinstance(trainee, Stepped) else model
            draws.watch(trained)
            carried = self._buffers(trained)
            passes = Passes()
            with passes.watched(trained):
                steps, drawn = self._train(trainee, draws)
            refuse_strangers(steps[0], canonical)
            offs = compared(self.rank, steps, dense, canonical, self.theirs.found.get("clip"))
            rows = {name: each.rows for name, each in steps[0].weights.items()}
            mine = Mine(
                offs,
                rows,
                dict(trainee.misfits),
                [step.share for step in steps],
                drawn,
                self._kept(trained, carried, dense),
                bool("strategy" in self.theirs),
            )
            everything = Everything(self.theirs, self.dealing, self.grid, dense, canonical, self.everyone(mine))
            first = everything.first()
            tensors = self.everyone(None if first is None else everything.tensors_of(steps, first))
            parts = self.everyone(self._parted(passes) if everything.is_wrong() else "")
            if self.rank == 0:
                tell(everything, first, tensors, parts, self.telling)

    def _buffers(self, trained: nn.Module) -> dict[str, Tensor]:
        with self.unseen():
            return reference.copy_buffers(trained)

    def _kept(self, trained: nn.Module, start: dict[str, Tensor], dense: Dense) -> reference.Buffers:
        """This rank's buffers, and what one process would make of its samples."""
        shard = self.grid.index(self.rank, "dp")
        own = by_own_samples(self.theirs, dense, [self.dealing.dealt(step, shard) for step in range(STEPS)])
        uncompared = ""
        if self.rank and isinstance(trained, DistributedDataParallel) and trained.broadcast_buffers:
            uncompared = "DDP gives them rank 0's before each step"
        elif "strategy" in self.theirs:
            uncompared = "a strategy may train a copy of the model"
        return reference.Buffers(start, self._buffers(trained), own, uncompared)

    def _parted(self, passes: Passes) -> str:
        """Where this rank's forward pass parts from one process's."""
        return parted(self.theirs, passes, self.dealing.dealt(0, self.grid.index(self.rank, "dp"))[0])

    def _trainee(self, model: nn.Module, dense: Dense) -> Trainee:
        many = "mesh" in self.theirs
        if "strategy" in self.theirs:
            world: Any = dist.group.WORLD
            return OfStrategy(self.theirs, model, Mesh.grid(self.grid.axes, world), self.unseen)
        if many and "train_step" not in self.theirs and set(self.grid.axes) != {"dp"}:
            raise Refused(f"mesh has the axes {', '.join(self.grid.axes)}: write train_step or strategy beside it")
        group: Any = dist.group.WORLD
        if many:
            axes = self.grid.axes
            group = dist.device_mesh.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        return Stepped(self.theirs, model, group, dense.start, self.unseen)

    def _train(self, trainee: Trainee, draws: Draws) -> tuple[list[Step], list[Any]]:
        """All steps, and the draws of the first."""
        steps: list[Step] = []
        drawn: list[Any] = []
        for number in range(STEPS):
            microbatches = self.dealing.dealt(number, self.grid.index(self.rank, "dp"))
            with self.stepping():
                share = trainee.step(microbatches)
            if number == 0:
                drawn = list(draws.drawn)
            steps.append(Step(share, trainee.gradients(), trainee.weights()))
        return steps, drawn

    def _say_what_is_proven(self, model: nn.Module) -> None:
        if self.rank:
            return
        count = sum(each.numel() for each in model.parameters())
        axes = " x ".join(f"{axis} {size}" for axis, size in self.grid.axes.items())
        self.telling.say("said", "prove", f"{self.theirs.described} · {count:,} parameters · {axes}")
        sizes = self.dealing.sizes(len(self.dealing.whole(0).inputs))
        shown = " | ".join("+".join(map(str, each)) for each in sizes)
        self.telling.say(
            "said", "deal", f"{STEPS} steps in float64, plain SGD; samples by shard and microbatch: {shown}"
        )

    def everyone(self, mine: Any) -> list[Any]:
        """What each rank has, on all."""
        with self.unseen():
            return store.all_gather_plain(mine, self.ours, SENT)

    def from_rank_0(self, dense: Dense | None) -> Dense:
        """One process's numbers, on all."""
        found = self.everyone(dense)[0]
        assert isinstance(found, Dense)
        return found


def refuse_strangers(step: Step, canonical: Mapping[str, str]) -> None:
    """Raises Refused where a strategy gives a tensor by a name that the model does not have."""
    strange = sorted({*step.gradients, *step.weights} - set(canonical))
    if strange:
        raise Refused(f"the strategy's full() gives {strange[0]!r}, which is no parameter of the model")


# A proof inside of a test: the same as `distlab prove`, in the ranks that are there already.


class ProofFindings:
    """What a proof has found."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def say(self, kind: str, *values: Any) -> None:
        """Keep the findings."""
        if kind == "finding":
            check, sentence, _ = values
            self.sentences.append(f"{check}: {sentence}")


def same_as_one_process(*, seed: int = 1, microbatches: int = 2, **own: Any) -> None:
    """Raise AssertionError on every rank, with the sentence of the proof, unless all ranks compute what one does.

    `own` are the names of a file for `distlab prove`: model, loss, batch, train_step, prepare, strategy, mesh, ...
    Raises TypeError for another name, and ValueError for what cannot be proven.
    """
    strange = sorted(set(own) - set(NAMES))
    if strange:
        raise TypeError(f"same_as_one_process has no {', '.join(strange)}: allowed are {', '.join(NAMES)}")
    environ = {"WORLD_SIZE": "1", "LAB_SEED": str(seed), "LAB_MICROBATCHES": str(microbatches)}
    config = Config.read(environ, options=Options)
    config = config.model_copy(update={"world_size": dist.get_world_size()})
    heard = ProofFindings()
    try:
        proof = Proof(from_names(own, config, "same_as_one_process(...)"), heard, nullcontext)
        proof.run()
    except Refused as refused:
        raise ValueError(str(refused)) from None
    sentences: list[str] = proof.everyone(heard.sentences)[0]
    assert not sentences, "\n".join(sentences)
