"""In the process of a rank: record each step as it begins, and cause the fault.

Each step is one line of JSON, written before the update, so the records of a killed rank are complete. Weights,
optimizer state and random state are recorded as checksums. Samples are those that a model was trained on, without those
that were read and skipped. The recorder is that of `distlab prove`.
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
from distlab.tools.prove.script_steps import ProofSettings, ScriptSteps, is_made_by_checkpoint, piece

KILL, TERM, DISK = "kill", "term", "disk"
MOST_BYTES = 1 << 28  # of weights that are saved in full
ALLOWED = ("/dev/", "/proc/", "/sys/")  # where a script may write, besides its working folder


class Fault(NamedTuple):
    """A fault, its rank and its time; an empty `kind` means none."""

    kind: str = ""
    rank: int = 0
    step: int = 0  # steps done before the fault
    file: int = 0  # index among the files that this rank writes between that step and the next
    limit_bytes: int = 0  # bytes of the file that are written; 0: the fault comes in the step


class RankSettings(NamedTuple):
    """The settings of a rank's process: the folder of its records, its working folder, and its fault."""

    folder: str
    work: str
    rank: int
    world_size: int
    fault: Fault


def watch(recorder: Recorder, settings_json: str, *, by_optimizer: bool = True) -> "Facts":
    """Record the script that begins after this, and prepare its fault. A step is one call of an optimizer, or, without
    `by_optimizer`, one call of `step_begins`."""
    *places, fault = json.loads(settings_json)
    settings = RankSettings._make([*places, Fault._make(fault)])
    folder = Path(settings.folder)
    log = os.open(folder / f"rank{settings.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tempfile.tempdir = None  # inherited from the parent process
    for number in handled_signals():  # by the parent process
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    steps = ScriptSteps(recorder, ProofSettings(str(folder), "ranks", settings.rank, settings.world_size), most=0)
    steps.install()
    facts = Facts(steps, settings, (folder / f"rank{settings.rank}.jsonl").open("a"))
    samples = TrainedSamples(steps)
    samples.install()
    facts.install(samples)
    if by_optimizer:
        facts.hook_optimizers()
    imported: Any = sys.modules["distlab"]  # by the script
    imported.batch = samples.batch
    return facts


class ReadBatch(NamedTuple):
    """A batch from a loader: the sampler's epoch (-1 if it has none), the samples, and the tensors."""

    epoch: int
    samples: list[Any]
    tensors: list[Tensor]


class TrainedSamples(Samples):
    """The samples of the batches that a model is trained on."""

    def __init__(self, steps: ScriptSteps) -> None:
        super().__init__(steps)
        self.trained: list[ReadBatch] = []  # since the last step
        self._pending: list[ReadBatch] = []
        self._last: ReadBatch | None = None  # that was trained on
        self._seen: list[ReadBatch] = []  # by a model, since the last backward pass
        self._epoch = -1
        self.pads = False  # a DistributedSampler yields every sample, and some of them twice

    def install(self) -> None:
        super().install()
        self.steps.on_input.append(self._on_input)
        put(Patch(torch.autograd, "backward", before(self._on_backward)))

    def _next(self, method: Function, loading: Any) -> Any:
        sampler = innermost(loading._index_sampler)
        drops = getattr(loading._index_sampler, "drop_last", True) or getattr(sampler, "drop_last", True)
        self.pads = isinstance(sampler, torch.utils.data.DistributedSampler) and not drops
        epoch = getattr(sampler, "epoch", -1)
        self._epoch = epoch if isinstance(epoch, int) else -1
        return super()._next(method, loading)

    @harmless
    def _record(self, record: dict[str, Any], batch: Any, indices: Any) -> None:
        known = isinstance(indices, list | tuple) and all(isinstance(each, int) for each in indices)
        chosen = record["indices"][-len(indices) :] if known and record["indices"] else None
        samples = (chosen or list(indices)) if known else contents(batch)
        self._pending.append(ReadBatch(self._epoch, samples, tensors_in(batch)))

    def _on_input(self, inputs: list[Tensor]) -> None:
        for read in [*self._pending, *([self._last] if self._last else [])]:
            if any(is_copy_of(each, tensor) for each in inputs for tensor in read.tensors):
                self._seen += [] if any(each is read for each in self._seen) else [read]
                return

    @harmless
    def _on_backward(self, *_: Any, **__: Any) -> None:
        """Record the batches that a model saw as trained on; if its inputs are no batch's, the batch read last."""
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


def is_copy_of(found: Tensor, read: Tensor) -> bool:
    """Return whether a model's input is this tensor of a batch, or a copy of it."""
    if found.untyped_storage().data_ptr() == read.untyped_storage().data_ptr():
        return True
    return found.shape == read.shape and found.dtype == read.dtype and torch.equal(found.cpu(), read.cpu())


def contents(batch: Any) -> list[str]:
    """Return a name for each sample of a batch: a checksum of its content."""
    found = [0] * rows_in(batch)
    for tensor in tensors_in(batch):
        if tensor.dim() and len(tensor) == len(found):
            found = [zlib.crc32(raw(row), name) for row, name in zip(tensor, found, strict=True)]
    return [f"{name:08x}" for name in found]


class Facts:
    """Writes what one rank does, one line per fact; `install` once."""

    def __init__(self, steps: ScriptSteps, settings: RankSettings, out: TextIO) -> None:
        self.steps, self._settings, self._out = steps, settings, out
        self.recorder = steps.recorder
        self._places = steps.recorder.places
        self._num_files = 0  # opened since the last step
        self._opened: list[dict[str, Any]] = []
        self._renamed: dict[str, str] = {}
        self._kept_bytes = 0
        self._is_own_write = False

    def install(self, samples: TrainedSamples) -> None:
        from torch.optim.lr_scheduler import LRScheduler

        self.samples = samples

        def does(what: str) -> Function:
            return before(lambda *_, **__: self._write_action(what))

        put(
            Patch(torch, "load", does("loads a file")),
            Patch(nn.Module, "load_state_dict", does("loads the weights")),
            Patch(torch.optim.Optimizer, "load_state_dict", does("loads the optimizer")),
            Patch(LRScheduler, "load_state_dict", does("loads the schedule")),
            Patch(torch, "set_rng_state", does("loads the random state")),
            Patch(torch.random, "set_rng_state", does("loads the random state")),
            Patch(torch, "save", self._save),
        )
        sys.addaudithook(self._on_audit_event)

    # Steps

    def hook_optimizers(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(step_hook(self._before_step))
        self.steps.recorder.at_end.append(self.end)

    @harmless
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not is_made_by_checkpoint():
            self.step_begins(states_of(optimizer), [float(each.get("lr", 0.0)) for each in optimizer.param_groups])

    def step_begins(self, states: list[Tensor], rates: list[float]) -> None:
        number, fault = self.steps.number, self._settings.fault
        self._write_sizes()
        self._write(
            self._facts()
            | {"state": [checksum(states)], "rates": rates, "step": number, "line": self._places.line_of(1)}
        )
        if number == 0 or self._num_files:
            self._save_weights(number)
        self._num_files = 0
        if (fault.kind, fault.step, fault.limit_bytes) == (KILL, number, 0):
            os.kill(os.getpid(), signal.SIGKILL)

    def _facts(self) -> dict[str, Any]:
        numpy: Any = sys.modules.get("numpy")
        read = [[each.epoch, each.samples] for each in self.samples.trained]
        self.samples.trained = []
        random_states = torch.get_rng_state(), str(random.getstate()), str(numpy.random.get_state()) if numpy else ""
        return {
            "weights": checksum(list(self.steps.parameters.values())), "read": read,
            "random": [checksum([each]) for each in random_states],  # of torch, Python and numpy
            "passes": len(self.samples.passes), "pads": self.samples.pads,
        }  # fmt: skip

    def _save_weights(self, number: int) -> None:
        """Save the current weights, for comparison with other numbers of ranks."""
        kept = {name: piece(each) for name, each in self.steps.parameters.items()}
        self._kept_bytes += sum(tensor.numel() * tensor.element_size() for _, _, tensor in kept.values())
        if self._kept_bytes < MOST_BYTES:
            with self._unlimited():
                torch.save(kept, Path(self._settings.folder) / f"rank{self._settings.rank}-{number}.pt")

    @harmless
    def end(self) -> None:
        """Record the end of the training."""
        self._write_sizes()
        self._write(self._facts() | {"ended": self.steps.number})
        self._kept_bytes = 0
        self._save_weights(self.steps.number)

    def _write_action(self, what: str) -> None:
        if not self._is_own_write:
            self._write({"did": what, "at": self._places.line_of(1), "after": self.steps.number})

    def _write(self, fact: dict[str, Any]) -> None:
        with self._unlimited():
            self._out.write(json.dumps(fact, default=str) + "\n")
            self._out.flush()

    @contextmanager
    def _unlimited(self) -> Iterator[None]:
        """Mark what is written inside as the recorder's own: it counts as no save, and has no size limit."""
        limits, is_own_write = resource.getrlimit(resource.RLIMIT_FSIZE), self._is_own_write
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[1], limits[1]))
        self._is_own_write = True
        try:
            yield
        finally:
            self._is_own_write = is_own_write
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    # Files

    def _save(self, save: Function, obj: Any, f: Any, *args: Any, **named: Any) -> None:
        if isinstance(f, str | os.PathLike) and not self._is_own_write:
            self._will_write(os.fsdecode(f))  # it is written in C++, without an audit event
        save(obj, f, *args, **named)

    def _on_audit_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes) and not self._is_own_write:
            if isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
                self._will_write(os.fsdecode(args[0]), appends=bool(args[2] & os.O_APPEND))
        elif event == "os.rename" and not self._is_own_write:
            self._renamed[real(args[0])] = real(args[1])

    def _will_write(self, name: str, *, appends: bool = False) -> None:
        """Record a file that is about to be written; raises PermissionError if it is outside the working folder."""
        path, settings = real(name), self._settings
        if not path.startswith((f"{settings.work}/", *ALLOWED)) and not is_cache(path):
            self._write({"outside": path, "at": self._places.line_of(1)})
            raise PermissionError(f"{path} is outside the working folder of this run")
        if appends or not self.steps.number or path.startswith(ALLOWED) or is_cache(path):
            return
        self._opened.append({"saves": path, "after": self.steps.number, "file": self._num_files})
        self._write(self._opened[-1])
        fault = settings.fault
        is_target = fault.limit_bytes and (fault.step, fault.file) == (self.steps.number, self._num_files)
        self._num_files += 1
        if is_target:
            self._write({"fault": fault.kind})
            self._fail(fault)

    def _fail(self, fault: Fault) -> None:
        """Limit the size of the process's files, so that the kernel kills it in the middle of one, or a write fails."""
        if fault.kind == TERM and signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if fault.kind != DISK:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.limit_bytes, hard))

    def _write_sizes(self) -> None:
        """Record the sizes of the files that were written since the last step."""
        for each in self._opened:
            now = Path(each["saves"])
            for old, new in self._renamed.items():  # the file, or a folder that it is in
                now = Path(new, now.relative_to(old)) if now.is_relative_to(old) else now
            if now.is_file():
                self._write({"size": now.stat().st_size, "after": each["after"], "file": each["file"]})
        self._opened, self._renamed = [], {}


def real(name: Any) -> str:
    return os.path.realpath(os.fsdecode(name))


def is_cache(path: str) -> bool:
    """Return whether a file is a library's cache, and so no checkpoint."""
    return "__pycache__" in path or "site-packages/" in path or path.startswith(f"{Path.home()}/.")
