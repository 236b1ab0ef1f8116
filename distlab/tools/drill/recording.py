"""In the process of a rank: write down each step as it begins, and fail as the drill says.

A step has a line of JSON, written before its update, so a killed rank leaves all that it did. Weights, optimizer state
and random state are checksums; samples are those that reached a model in training, not those that were read and
skipped. The recorder is that of `distlab prove`.
"""

import json
import os
import random
import resource
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from distlab.lab.cluster.departure import handled_signals
from distlab.lab.measure.tensors import raw
from distlab.tools.check.watch.patches import Function, Patch, before, harmless, put, step_hook
from distlab.tools.check.watch.recorder import Recorder
from distlab.tools.check.watch.replicas import checksum
from distlab.tools.prove.script_ledger import states_of
from distlab.tools.prove.script_samples import Samples, rows_in, tensors_in
from distlab.tools.prove.script_steps import Proving, ScriptSteps, is_made_by_checkpoint, piece

KILL, TERM, DISK = "kill", "term", "disk"
MOST_BYTES = 1 << 28  # of weights that are kept whole
ALLOWED = ("/dev/", "/proc/", "/sys/")  # where a script may write beside its working folder


class Fault(NamedTuple):
    """What comes, to which rank, and when; `kind` empty: nothing."""

    kind: str = ""
    rank: int = 0
    step: int = 0  # steps done before it comes
    file: int = 0  # of the files that this rank writes between that step and the next, the how-manieth
    limit_bytes: int = 0  # of the file, that are written; 0: it comes in the step


class Drilled(NamedTuple):
    """What a rank's process is told: where it writes, where it works, and its fault."""

    folder: str
    work: str
    rank: int
    world_size: int
    fault: Fault


def watch(recorder: Recorder, told: str, *, by_optimizer: bool = True) -> "Facts":
    """Record the script that begins after this, and put its fault in place; its steps by what the optimizer does, or as
    `step_begins` and `end` are called."""
    *places, fault = json.loads(told)
    drilled = Drilled._make([*places, Fault._make(fault)])
    folder = Path(drilled.folder)
    log = os.open(folder / f"rank{drilled.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tempfile.tempdir = None  # that of the drill's own process
    for number in handled_signals():  # by that process
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    steps = ScriptSteps(recorder, Proving(str(folder), "ranks", drilled.rank, drilled.world_size), most=0)
    steps.install()
    facts = Facts(steps, drilled, (folder / f"rank{drilled.rank}.jsonl").open("a"))
    samples = TrainedSamples(steps)
    samples.install()
    facts.install(samples)
    if by_optimizer:
        facts.heed_optimizers()
    imported: Any = sys.modules["distlab"]  # by the script
    imported.batch = samples.batch
    return facts


class Read(NamedTuple):
    """A batch that was read: its epoch by the sampler (-1: it has none), its samples, and its tensors."""

    epoch: int
    samples: list[Any]
    tensors: list[Tensor]


class TrainedSamples(Samples):
    """The samples of the batches that a model is trained on."""

    def __init__(self, steps: ScriptSteps) -> None:
        super().__init__(steps)
        self.trained: list[Read] = []  # since the last step
        self._pending: list[Read] = []
        self._last: Read | None = None  # that was trained on
        self._seen: list[Read] = []  # by a model, since the last backward pass
        self._epoch = -1
        self.pads = False  # a DistributedSampler deals every sample, and some of them twice

    def install(self) -> None:
        super().install()
        self.steps.on_input.append(self._entered)
        put(Patch(torch.autograd, "backward", before(self._went_back)))

    def _next(self, method: Function, loading: Any) -> Any:
        sampler = innermost(loading._index_sampler)
        drops = getattr(loading._index_sampler, "drop_last", True) or getattr(sampler, "drop_last", True)
        self.pads = isinstance(sampler, torch.utils.data.DistributedSampler) and not drops
        epoch = getattr(sampler, "epoch", -1)
        self._epoch = epoch if isinstance(epoch, int) else -1
        return super()._next(method, loading)

    @harmless
    def _record(self, mine: dict[str, Any], batch: Any, indices: Any) -> None:
        known = isinstance(indices, list | tuple) and all(isinstance(each, int) for each in indices)
        chosen = mine["indices"][-len(indices) :] if known and mine["indices"] else None
        samples = (chosen or list(indices)) if known else contents(batch)
        self._pending.append(Read(self._epoch, samples, tensors_in(batch)))

    def _entered(self, given: list[Tensor]) -> None:
        for read in [*self._pending, *([self._last] if self._last else [])]:
            if any(is_of(each, mine) for each in given for mine in read.tensors):
                self._seen += [] if any(each is read for each in self._seen) else [read]
                return

    @harmless
    def _went_back(self, *_: Any, **__: Any) -> None:
        """What a model saw was trained on; where its inputs are no batch's, the batch that was read last."""
        if torch._C._current_graph_task_id() >= 0:
            return
        for read in self._seen or self._pending[-1:]:
            if read is not self._last:
                self.trained.append(read)
                where = next((index for index, each in enumerate(self._pending) if each is read), -1)
                self._pending = self._pending[where + 1 :]
                self._last = read
        self._seen = []


def innermost(sampler: Any) -> Any:
    """Return the sampler inside of batch samplers, some of which wrap each other (accelerate's do)."""
    inner = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
    return sampler if inner is None or inner is sampler else innermost(inner)


def is_of(given: Tensor, read: Tensor) -> bool:
    """Whether a model's input is a tensor of a batch, or a copy of it."""
    if given.untyped_storage().data_ptr() == read.untyped_storage().data_ptr():
        return True
    return given.shape == read.shape and given.dtype == read.dtype and torch.equal(given.cpu(), read.cpu())


def contents(batch: Any) -> list[str]:
    """A name for each sample of a batch, by its content."""
    found = [0] * rows_in(batch)
    for tensor in tensors_in(batch):
        if tensor.dim() and len(tensor) == len(found):
            found = [zlib.crc32(raw(row), name) for row, name in zip(tensor, found, strict=True)]
    return [f"{name:08x}" for name in found]


class Facts:
    """What one rank does, a line each; `install` once."""

    def __init__(self, steps: ScriptSteps, drilled: Drilled, out: TextIO) -> None:
        self.steps, self._drilled, self._out = steps, drilled, out
        self.recorder = steps.recorder
        self._places = steps.recorder.places
        self._saved = 0  # files since the last step
        self._opened: list[dict[str, Any]] = []
        self._moved: dict[str, str] = {}
        self._kept_bytes = 0
        self._in_ours = False

    def install(self, samples: TrainedSamples) -> None:
        from torch.optim.lr_scheduler import LRScheduler

        self.samples = samples

        def does(what: str) -> Function:
            return before(lambda *_, **__: self._did(what))

        put(
            Patch(torch, "load", does("loads a file")),
            Patch(nn.Module, "load_state_dict", does("loads the weights")),
            Patch(torch.optim.Optimizer, "load_state_dict", does("loads the optimizer")),
            Patch(LRScheduler, "load_state_dict", does("loads the schedule")),
            Patch(torch, "set_rng_state", does("loads the random state")),
            Patch(torch.random, "set_rng_state", does("loads the random state")),
            Patch(torch, "save", self._save),
        )
        sys.addaudithook(self._heard)

    # Steps

    def heed_optimizers(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(step_hook(self._before_step))
        self.steps.recorder.at_end.append(self.end)

    @harmless
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not is_made_by_checkpoint():
            self.step_begins(states_of(optimizer), [float(each.get("lr", 0.0)) for each in optimizer.param_groups])

    def step_begins(self, states: list[Tensor], rates: list[float]) -> None:
        number, fault = self.steps.number, self._drilled.fault
        self._tell_sizes()
        self._write(
            self._facts()
            | {"state": [checksum(states)], "rates": rates, "step": number, "line": self._places.line_of(1)}
        )
        if number == 0 or self._saved:
            self._keep(number)
        self._saved = 0
        if (fault.kind, fault.step, fault.limit_bytes) == (KILL, number, 0):
            os.kill(os.getpid(), signal.SIGKILL)

    def _facts(self) -> dict[str, Any]:
        numpy: Any = sys.modules.get("numpy")
        read = [[each.epoch, each.samples] for each in self.samples.trained]
        self.samples.trained = []
        drawn = torch.get_rng_state(), str(random.getstate()), str(numpy.random.get_state()) if numpy else ""
        return {
            "weights": checksum(list(self.steps.parameters.values())), "read": read,
            "random": [checksum([each]) for each in drawn],  # of torch, Python and numpy
            "passes": len(self.samples.passes), "pads": self.samples.pads,
        }  # fmt: skip

    def _keep(self, number: int) -> None:
        """The weights as they are, for a comparison with other numbers of ranks."""
        kept = {name: piece(each) for name, each in self.steps.parameters.items()}
        self._kept_bytes += sum(tensor.numel() * tensor.element_size() for _, _, tensor in kept.values())
        if self._kept_bytes < MOST_BYTES:
            with self._unlimited():
                torch.save(kept, Path(self._drilled.folder) / f"rank{self._drilled.rank}-{number}.pt")

    @harmless
    def end(self) -> None:
        """The training is over."""
        self._tell_sizes()
        self._write(self._facts() | {"ended": self.steps.number})
        self._kept_bytes = 0
        self._keep(self.steps.number)

    def _did(self, what: str) -> None:
        if not self._in_ours:
            self._write({"did": what, "at": self._places.line_of(1), "after": self.steps.number})

    def _write(self, fact: dict[str, Any]) -> None:
        with self._unlimited():
            self._out.write(json.dumps(fact, default=str) + "\n")
            self._out.flush()

    @contextmanager
    def _unlimited(self) -> Iterator[None]:
        """What is written here is the drill's own: it is no save, and meets no limit."""
        limits, in_ours = resource.getrlimit(resource.RLIMIT_FSIZE), self._in_ours
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[1], limits[1]))
        self._in_ours = True
        try:
            yield
        finally:
            self._in_ours = in_ours
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    # Files

    def _save(self, save: Function, obj: Any, f: Any, *args: Any, **named: Any) -> None:
        if isinstance(f, str | os.PathLike) and not self._in_ours:
            self._will_write(os.fsdecode(f))  # in C++, of which no audit hook hears
        save(obj, f, *args, **named)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes) and not self._in_ours:
            if isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
                self._will_write(os.fsdecode(args[0]), appends=bool(args[2] & os.O_APPEND))
        elif event == "os.rename" and not self._in_ours:
            self._moved[real(args[0])] = real(args[1])

    def _will_write(self, name: str, *, appends: bool = False) -> None:
        """A file is about to be written; raises PermissionError where it is not in the working folder."""
        path, drilled = real(name), self._drilled
        if not path.startswith((f"{drilled.work}/", *ALLOWED)) and not is_cache(path):
            self._write({"outside": path, "at": self._places.line_of(1)})
            raise PermissionError(f"{path} is outside of the drill's working folder")
        if appends or not self.steps.number or path.startswith(ALLOWED) or is_cache(path):
            return
        self._opened.append({"saves": path, "after": self.steps.number, "file": self._saved})
        self._write(self._opened[-1])
        fault = drilled.fault
        mine = fault.limit_bytes and (fault.step, fault.file) == (self.steps.number, self._saved)
        self._saved += 1
        if mine:
            self._write({"fault": fault.kind})
            self._fail(fault)

    def _fail(self, fault: Fault) -> None:
        """Let the file end in its middle: by a limit of the process, at which the kernel kills it, or a write fails."""
        if fault.kind == TERM and signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if fault.kind != DISK:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.limit_bytes, hard))

    def _tell_sizes(self) -> None:
        """How large the files are that were written since the last step."""
        for each in self._opened:
            now = Path(each["saves"])
            for old, new in self._moved.items():  # the file, or a folder that it is in
                now = Path(new, now.relative_to(old)) if now.is_relative_to(old) else now
            if now.is_file():
                self._write({"size": now.stat().st_size, "after": each["after"], "file": each["file"]})
        self._opened, self._moved = [], {}


def real(name: Any) -> str:
    return os.path.realpath(os.fsdecode(name))


def is_cache(path: str) -> bool:
    """Whether a file is a library's own, of which no checkpoint is made."""
    return "__pycache__" in path or "site-packages/" in path or path.startswith(f"{Path.home()}/.")
