"""What goes wrong without hanging: each fact that a rank tells goes to whoever looks at its kind.

A finding is certain; what only looks wrong is asked as a question, and decides nothing.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from workers.check.casebook import Call, Case, Place, words
from workers.check.dropouts import Dropouts
from workers.check.finding import AT_REST, DEVICES, WAITED, Finding
from workers.check.gradients import Gradients
from workers.check.replicas import Replicas
from workers.check.samples import Samples
from workers.cluster import name_ranks


class Quiet:
    """All facts of a run so far."""

    def __init__(self, world_size: int, mesh: Sequence[tuple[str, int]] = ()) -> None:
        self._replicas, self._samples = Replicas(), Samples(world_size)
        self._gradients, self._dropouts = Gradients(world_size), Dropouts(world_size, mesh)
        self._handles: dict[tuple[str, Place, Place | None], tuple[str, list[int]]] = {}
        self._devices: dict[tuple[int, str], list[int]] = defaultdict(list)
        self._takers = {
            "weights": self._replicas.take_weights,
            "input": self._samples.take_input,
            "batch": self._samples.take_batch,
            "batches": self._samples.take_count,
            "gradient": self._gradients.take,
            "mesh": self._dropouts.take_mesh,
            "dropout": self._dropouts.take,
            "device": self._take_device,
            "unwaited": self._take_unwaited,
            "written": self._take_written,
        }

    def take(self, case: Case, fact: list[Any]) -> Iterator[Finding]:
        """One fact of one rank; what is wrong with it at once."""
        kind, *values = fact
        if kind == "module":
            yield from self._replicas.take_module(case, *values)
        elif kind in self._takers:
            taker: Any = self._takers[kind]
            taker(case, *values)

    def _take_device(self, case: Case, device: int, host: str) -> None:
        self._devices[device, host].append(case.rank)

    def _take_unwaited(self, case: Case, call: Call) -> None:
        self._handles.setdefault(("unwaited", call.place, None), (words(call), []))[1].append(case.rank)

    def _take_written(self, case: Case, call: Call, waited_at: Place) -> None:
        self._handles.setdefault(("written", call.place, waited_at), (words(call), []))[1].append(case.rank)

    def handles(self) -> Iterator[Finding]:
        """Calls whose handles or tensors were not left alone, each line once."""
        for (kind, place, waited_at), (called, of_ranks) in self._handles.items():
            ranks = sorted(set(of_ranks))
            s = "s" if len(ranks) == 1 else ""
            if kind == "unwaited":
                yield Finding(
                    WAITED,
                    f"{name_ranks(ranks)} never wait{s} for {called} of {place}: its tensor may be read or freed before"
                    " the call has ended; keep the handle and call wait()",
                    tuple(ranks),
                )
            else:
                yield Finding(
                    AT_REST,
                    f"{name_ranks(ranks)} write{s} into the tensor of {called} between its call at {place} and the wait"
                    f" at {waited_at}: what is sent or summed is neither the old value nor the new one",
                    tuple(ranks),
                )

    def at_end(self) -> Iterator[Finding]:
        """What can be said once all scripts have ended."""
        yield from self._replicas.drifted()
        yield from self._samples.shared()
        yield from self._dropouts.apart()
        for (device, host), ranks in self._devices.items():
            if len(ranks) > 1:
                yield Finding(
                    DEVICES,
                    f"{name_ranks(ranks)} compute on one device, cuda:{device} of {host}: call"
                    " torch.cuda.set_device(LOCAL_RANK) before anything else",
                    tuple(ranks),
                )

    def questions(self) -> Iterator[str]:
        """What looks wrong and may be right."""
        yield from self._gradients.questions()
        yield from self._samples.questions()
