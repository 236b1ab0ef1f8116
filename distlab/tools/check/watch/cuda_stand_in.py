"""Run a script for GPUs on a machine without one: map what has a CPU equivalent, with a notice, and refuse the rest.

The order, ranks and shapes of calls are the same on a CPU. So CUDA devices become the CPU, a rank's device is only a
number, and autocast computes in bfloat16. `is_available` is False at first, since most scripts have a CPU path; a
script that has none, and exits before it creates a group, is run again with True. Streams, graphs and kernels have no
equivalent and end with a message, as does any error of torch about a missing GPU. A torch function costs 2 us more in a
script that names CUDA; other scripts are unaffected.
"""

import contextlib
import importlib.abc
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from distlab.tools.check.watch.patches import Function, Patch, before, put
from distlab.tools.check.watch.recorder import Recorder
from distlab.tools.check.watch.script_error import place_of

MAPPED = "device='cuda', .cuda(), set_device, autocast (in bfloat16), events and synchronize"
NO_OPS = (
    "synchronize", "empty_cache", "empty_host_cache", "ipc_collect", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "reset_accumulated_memory_stats",
)  # fmt: skip
RANDOM = ("set_rng_state", "set_rng_state_all")  # random numbers come from the CPU, whose state a script sets as well
MARKS = ("range_push", "range_pop", "mark")  # of a profiler
ZERO = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
IN_CUDA = "/torch/cuda/"
NAMES = re.compile(r"cuda|torch\.accelerator|import accelerator")
NO_GPU = re.compile("cuda|gpu|accelerator|NoneType", re.IGNORECASE)  # in an exception's message about a missing GPU
NEEDS_GPU = re.compile(
    r"not compiled with CUDA|requires CUDA|dummy base class|NVIDIA driver|no attribute '_cuda|CUDA is not available"
)
HALF = (None, torch.float16, torch.bfloat16)
GPUS = ("device_ids", "output_device")  # of a DDP
MOST_BYTES = 1_000_000  # of a file that is searched
FOR_CPU = {"ACCELERATE_USE_CPU": "true"}  # variables that frameworks need to start ranks without a GPU


def on_cpu(device: Any) -> Any:
    """Return the CPU for a device that names CUDA, also by number; anything else unchanged."""
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    names_cuda = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    return "cpu" if names_cuda else device


class OnCpu(TorchFunctionMode):
    """Maps the devices in all torch functions that this thread calls."""

    def __init__(self, note_use: Callable[[], None]) -> None:
        super().__init__()
        self._note_use = note_use

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            self._note_use()
            return args[0]
        if kwargs and (device := kwargs.get("device")) is not None and (mapped := on_cpu(device)) is not device:
            self._note_use()
            kwargs = {**kwargs, "device": mapped}
        if func is torch.Tensor.to and len(args) > 1 and (mapped := on_cpu(args[1])) is not args[1]:
            self._note_use()
            args = args[0], mapped, *args[2:]
        return func(*args, **(kwargs or {}))


class Event:
    """Replaces torch.cuda.Event: the CPU has finished everything before it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at_s = 0.0

    def record(self, stream: Any = None) -> None:  # noqa: ARG002
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end._at_s - self._at_s)

    def synchronize(self, *_: Any) -> None:
        pass

    wait = synchronize

    def query(self) -> bool:
        return True


class CudaStandIn:
    """Of this process; `install` once, before the script begins."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._reporter = recorder, recorder.reporter
        self._device, self._notice_sent = 0, False
        self._query_at = ""  # the script's line that asked for a GPU and got none
        self._has_group = False  # whether it has created a group nevertheless
        self._shows_gpus = False  # whether the script sees GPUs

    def prepare_rerun(self, error: BaseException | None) -> bool:
        """Return whether the script has ended, by this or normally, after it saw no GPU; then set it to see one per
        rank, to be run again."""
        other = isinstance(error, Exception) and NO_GPU.search(str(error)) is None
        if not self._query_at or self._has_group or self._shows_gpus or other or isinstance(error, KeyboardInterrupt):
            return False
        self._shows_gpus = True
        self._reporter.send(
            "changed",
            f"the script asks for a GPU at {self._query_at} and ends without one: check runs it again, with the CPU"
            " in place of one GPU per rank",
        )
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name != "__main__" and file and self._recorder.places.kind(file) == "user":
                del sys.modules[name]
        return True

    def refuse(self, error: Exception) -> None:
        """Raise SystemExit(2) with a message if torch raised this error because there is no GPU."""
        raised = traceback.extract_tb(error.__traceback__)[-1]
        by_script = self._recorder.places.kind(raised.filename) == "user" and str(raised.line).startswith("raise")
        if NEEDS_GPU.search(str(error)) and not by_script:
            self._refuse(f"{type(error).__name__} at {place_of(error)}, '{str(error).partition(chr(10))[0]}',")

    def _refuse(self, what: str) -> NoReturn:
        self._reporter.send(
            "refused",
            f"{what} needs a GPU, and this machine has none: on the CPU check runs {MAPPED}, and nothing else of CUDA",
        )
        raise SystemExit(2)

    def install(self) -> None:
        self._map_cuda()
        self._map_accelerator()
        self._map_modules()
        mode: Any = OnCpu(self._note_use)
        mode.__enter__()

    def _note_use(self) -> None:
        if not self._notice_sent and not torch.compiler.is_compiling():
            self._notice_sent = True
            self._reporter.send(
                "changed", f"this machine has no GPU: check runs the script's CUDA calls on the CPU ({MAPPED})"
            )

    def _map_cuda(self) -> None:
        cuda: Any = torch.cuda
        self._map_counts(cuda)
        put(Patch(cuda, "is_available", partial(self._availability, True)))
        put(Patch(cuda, "_lazy_init", self._lazy_init, traced=True))
        cuda.set_device = self._with_notice(self._set_device)
        cuda.current_device = self._with_notice(lambda: self._device)
        cuda.device = self._with_notice(lambda device: contextlib.nullcontext(device))
        cuda.is_bf16_supported = self._with_notice(lambda *_, **__: True)
        cuda.get_device_name = self._with_notice(lambda *_, **__: "the CPU in place of a GPU")
        cuda.Event = self._with_notice(Event)
        for place in (cuda, cuda.random):
            for name in RANDOM:
                setattr(place, name, self._with_notice(lambda *_, **__: None))
            place.get_rng_state = self._with_notice(lambda *_, **__: torch.get_rng_state())
            place.get_rng_state_all = self._with_notice(lambda: [torch.get_rng_state()])
            place.initial_seed = self._with_notice(torch.initial_seed)
        for name in MARKS:
            setattr(cuda.nvtx, name, self._with_notice(lambda *_, **__: None))

    def _map_accelerator(self) -> None:
        accelerator: Any = torch.accelerator
        self._map_counts(accelerator)
        put(
            Patch(accelerator, "is_available", partial(self._availability, True)),
            Patch(accelerator, "current_accelerator", partial(self._availability, torch.device("cuda"))),
        )
        for name in ("set_device_index", "set_device_idx"):
            setattr(accelerator, name, self._with_notice(self._set_device))
        for name in ("current_device_index", "current_device_idx"):
            setattr(accelerator, name, self._with_notice(lambda: self._device))
        accelerator.device_index = self._with_notice(lambda device: contextlib.nullcontext(device))

    def _map_counts(self, module: Any) -> None:
        """Map the functions that torch.cuda and torch.accelerator have in common."""
        for name in NO_OPS:
            if hasattr(module, name):
                setattr(module, name, self._with_notice(lambda *_, **__: None))
        for name in ZERO:
            setattr(module, name, self._with_notice(lambda *_, **__: 0))
        put(Patch(module, "device_count", self._count))

    def _map_modules(self) -> None:
        module: Any = torch.nn.Module
        module.cuda = self._with_notice(lambda model, device=None: model)  # noqa: ARG005
        initial: Any = importlib.import_module("torch.distributed.fsdp._init_utils")
        initial._check_module_states_for_sync_module_states = lambda module: None  # noqa: ARG005  gloo sends them, too
        fsdp = importlib.import_module("torch.distributed.fsdp").FullyShardedDataParallel
        first, of_mesh = partial(self._map_device, 0, "device"), partial(self._map_device, 0, "device_type")
        groups = partial(self._drop_arguments, ("device_id",), 99)
        rows: list[tuple[Any, str, Function]] = [
            (module, "to", partial(self._map_device, 1, "device")),
            (torch.nn.parallel.DistributedDataParallel, "__init__", partial(self._drop_arguments, GPUS, 2)),
            (fsdp, "__init__", self._on_cpu),
            (torch.amp.autocast_mode.autocast, "__init__", self._in_bfloat16),
            (torch, "load", self._map_location),
            (torch, "set_default_device", first),
            (dist.device_mesh.DeviceMesh, "__init__", partial(self._map_device, 1, "device_type")),
            *((place, "init_device_mesh", of_mesh) for place in (dist, dist.device_mesh)),
            *((place, "init_process_group", groups) for place in (dist, dist.distributed_c10d)),
        ]
        put(*(Patch(*row, traced=True) for row in rows))
        put(*(Patch(place, "init_process_group", before(self._note_group)) for place in (dist, dist.distributed_c10d)))

    def _with_notice(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(*args: Any, **named: Any) -> Any:
            self._note_use()
            return function(*args, **named)

        return noticed

    def _note_group(self, *_: Any, **__: Any) -> None:
        self._has_group = True

    def _set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        self._device = index if index is not None else self._device

    def _by_user(self) -> bool:
        """Return whether the script itself called a function of torch.cuda."""
        frame: Any = sys._getframe(2)
        while frame is not None and (
            self._recorder.places.kind(frame.f_code.co_filename) == "passed on" or IN_CUDA in frame.f_code.co_filename
        ):
            frame = frame.f_back
        return frame is not None and self._recorder.places.kind(frame.f_code.co_filename) == "user"

    def _availability(self, answer: Any, original: Function, *args: Any, **named: Any) -> Any:
        """Answer whether there is a GPU, or which: none for torch, and none for the script before it may see one."""
        if not self._queried_by_user():
            return original(*args, **named)
        self._query_at = self._query_at or self._recorder.places.line_of(2)
        return answer if self._shows_gpus else original(*args, **named)

    def _queried_by_user(self) -> bool:
        """Return whether the script's own line called this function's caller: torch asks too, for other reasons."""
        return self._recorder.places.kind(sys._getframe(3).f_code.co_filename) == "user"

    def _count(self, original: Function) -> int:
        """Return one GPU per rank of this machine to the script's own lines."""
        if not self._queried_by_user():
            return int(original())
        self._note_use()
        self._reporter.send("counts", self._recorder.places.here(2)[0])
        return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))

    def _lazy_init(self, original: Function) -> None:
        if self._by_user():
            self._refuse(f"torch.cuda's {sys._getframe(2).f_code.co_name} at {self._recorder.places.line_of(2)}")
        original()  # raises: a library checks for a GPU

    def _map_device(self, position: int, name: str, function: Function, *args: Any, **named: Any) -> Any:
        """Wrap a function that takes a device at this position, or by this name."""
        device = args[position] if len(args) > position else named.get(name)
        mapped = on_cpu(device)
        if mapped is not device:
            self._note_use()
            if len(args) > position:
                args = *args[:position], mapped, *args[position + 1 :]
            else:
                named = named | {name: mapped}
        return function(*args, **named)

    def _drop_arguments(self, names: Sequence[str], position: int, method: Function, *args: Any, **named: Any) -> Any:
        """Drop arguments that name a GPU, from this position on."""
        if len(args) > position or any(named.get(name) is not None for name in names):
            self._note_use()
        kept = {name: value for name, value in named.items() if name not in names}
        positional = tuple(None if position <= at < position + len(names) else each for at, each in enumerate(args))
        return method(*positional, **kept)

    def _on_cpu(self, method: Function, *args: Any, **named: Any) -> None:
        """Wrap FSDP, which wants a device_id if there is no GPU."""
        method(*args, **named | {"device_id": torch.device("cpu")})

    def _in_bfloat16(
        self, method: Function, autocast: Any, device_type: str, dtype: Any = None, *args: Any, **named: Any
    ) -> None:
        if str(device_type).startswith("cuda"):
            self._note_use()
            device_type, dtype = "cpu", torch.bfloat16 if dtype in HALF else dtype
        method(autocast, device_type, dtype, *args, **named)

    def _map_location(self, load: Function, f: Any, map_location: Any = None, *args: Any, **named: Any) -> Any:
        where = "cpu" if isinstance(map_location, dict) else on_cpu(map_location)
        return load(f, where, *args, **named)


def names_cuda(script: Path) -> bool:
    """Return whether the script, or a module next to it that it imports, names CUDA or the accelerator."""
    text = text_of(script)
    near = [script.parent / f"{name}.py" for name in re.findall(r"^\s*(?:from|import) +(\w+)", text, re.MULTILINE)]
    return any(NAMES.search(each) for each in (text, *map(text_of, near)))


def text_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size < MOST_BYTES:
            return path.read_text(errors="replace")
    return ""


class Frameworks(importlib.abc.MetaPathFinder):
    """Prints which variable was set for a framework when that is imported; it finds no modules itself."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._set = [name for name in FOR_CPU if name not in os.environ]
        os.environ.update({name: FOR_CPU[name] for name in self._set})

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:  # noqa: ARG002
        for name in self._set:
            if fullname == name.partition("_")[0].lower():
                self._report(f"check sets {name}={FOR_CPU[name]}: without it {fullname} trains each rank alone on CPU")


def install(recorder: Recorder, script: Path) -> CudaStandIn | None:
    """Install the stand-in on a machine without GPUs, for a script that names them."""
    if torch.cuda.is_available():
        return None
    sys.meta_path.insert(0, Frameworks(lambda sentence: recorder.reporter.send("changed", sentence)))
    if not names_cuda(script):
        return None
    stand_in = CudaStandIn(recorder)
    stand_in.install()
    return stand_in
