"""Convert all ranks' dumps to check's RankState and Call, so that its rules judge them like a live run.

A call's number is its `collective_seq_id`, its place comes from the recorder's frames by the rules of a live run. It is
open until the recorder says that it has ended: by `state`, or for gloo, whose state is always "scheduled", by
`retired`. The recorder keeps only the last calls: if some are missing, ended messages have no number and are left out.
It has no reduce operations, roots and tags, and for gloo no sends and receives: a rank in one of these, or in the
creation of a group, is known by its stack.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from distlab.tools.check.dump.reading import Dump, Group
from distlab.tools.check.judge.rank_state import MADE, Call, CallPlace, Frame, GroupKey, Kind, RankState, Wait
from distlab.tools.check.watch.places import PACKAGES, Places

DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Short": "int16",
    "Char": "int8", "Byte": "uint8",
}  # fmt: skip
SUFFIXES = ("_base", "_oop", "_coalesced", "_into_tensor", "_tensor", "_single")  # suffixes of one operation's names
BY_OUTPUT = ("scatter", "recv")  # the result's size is equal on all ranks
DEFAULT = "default_pg"  # torch's description of the group of all ranks
UNCOUNTED = -1  # for a call known by a stack: the number of earlier ones is unknown
NO_GROUP = GroupKey(())  # until all dumps are read
MOST_ENTRIES = 200  # entries, to find the script's folder
C10D = "torch/distributed/distributed_c10d.py"
# Functions of torch that wait and are in no dump, by the name in a stack.
UNRECORDED = ("send", "recv", "new_group", "monitored_barrier", "init_process_group")


Line = tuple[str, int, str]  # of a stack: file, number, function
AS_LINE = itemgetter("filename", "line", "name")


class DumpPlaces(Places):
    """Places of stacks from another machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(cast("Any", None), folder)
        self._code_of: dict[tuple[str, str], SimpleNamespace] = {}  # what Places looks at in the code of a frame
        self._place_of: dict[tuple[Line, ...], CallPlace] = {}

    def kind(self, file: str) -> str:
        """Return a file's owner, if Python and torch are in other folders than here."""
        found = super().kind(file)
        elsewhere = "/lib/python3" in file or ("/torch/" in file and not any(each in file for each in PACKAGES))
        return "library" if found == "user" and elsewhere else found

    def of(self, lines: tuple[Line, ...]) -> CallPlace:
        """Return the place of a stack, innermost line first."""
        if lines not in self._place_of:
            frame: Any = None
            for file, number, function in reversed(within_script(lines)):
                code = SimpleNamespace(co_filename=file, co_name=function)
                frame = SimpleNamespace(
                    f_code=self._code_of.setdefault((file, function), code), f_lineno=number, f_back=frame
                )
            in_thread = any(name == "_bootstrap" and file.endswith("threading.py") for file, _, name in lines)
            self._place_of[lines] = CallPlace(*self._values(self._stack(frame), in_thread, by_starter=False))
        return self._place_of[lines]


def within_script(lines: Sequence[Line]) -> Sequence[Line]:
    """Return the stack without the frames that run the script."""
    runner = (
        at for at, line in enumerate(lines) if line[0] in ("<frozen runpy>", "<string>") or "/runpy.py" in line[0]
    )
    return lines[: next(runner, len(lines))]


def folder_of(lines: Sequence[Line]) -> Path | None:
    """Return the script's folder: that of a module-level line outside of libraries."""
    own = [file for file, _, name in within_script(lines) if name == "<module>" and not library(file)]
    return Path(own[-1]).parent if own else None


def library(file: str) -> bool:
    return file.startswith("<") or "-packages/" in file or "/lib/python3" in file


class DumpedJob:
    """All ranks of the job: `add` each dump, then `resolve`."""

    def __init__(self) -> None:
        self.states: list[RankState] = []
        self.calls: list[Call] = []  # of all ranks
        self.backends: set[str] = set()
        self.has_messages = False
        self.malformed = 0  # entries in an unknown format
        self.written_s: dict[int, float] = {}  # of each rank with a dump
        self.truncated: set[int] = set()  # ranks whose recorder has dropped their first calls
        self.groups_without_ranks: set[str] = set()  # groups whose ranks are in no dump
        self.has_lines = False
        self.by_stack: dict[int, Call] = {}  # waits that are in no dump
        self.positions: dict[int, CallPlace] = {}  # by the stacks
        self._by_rank: dict[int, RankState] = {}
        self._configured: dict[str, Group] = {}
        self.groups_of: dict[int, dict[str, Group]] = {}  # the groups in each rank's dump
        self._of_group: dict[tuple[str, str], dict[int, list[Call]]] = {}  # by name and description, by rank
        self._kinds: dict[str, Kind] = {}
        self._keys: dict[GroupKey, GroupKey] = {}  # one object each, for fast comparison
        self._places: DumpPlaces | None = None

    def waited_s(self, wait: Wait) -> float:
        """Return how long it had waited when its rank's dump was written; 0 if unknown."""
        written_s = self.written_s.get(wait.call.rank, -math.inf) if wait.call is not None else -math.inf
        return max(0.0, written_s - wait.since_s)

    def add(self, dump: Dump) -> None:
        """Add the calls from one rank's dump."""
        state = self._by_rank[dump.rank] = RankState(dump.rank, 0)
        self.written_s[dump.rank] = dump.written_s
        self.groups_of[dump.rank] = dump.groups
        self._configured |= dump.groups
        if self._places is None:
            stacks = (entry.get("frames") or () for entry in dump.entries[:MOST_ENTRIES])
            folders = (folder_of(list(map(AS_LINE, frames))) for frames in stacks)
            if (folder := next(filter(None, folders), None)) is not None:
                self._places, self.has_lines = DumpPlaces(folder), True
        if dump.entries and dump.entries[0].get("record_id"):
            self.truncated.add(dump.rank)
        groups: dict[tuple[str, str], dict[int, Call]] = {}
        for entry in dump.entries:
            try:
                self._add_entry(state, entry, groups)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError):
                self.malformed += 1
        for (name, description), calls in groups.items():
            self._of_group.setdefault((str(name), str(description)), {})[dump.rank] = list(calls.values())

    def _add_entry(
        self, state: RankState, entry: Mapping[str, Any], groups: dict[tuple[str, str], dict[int, Call]]
    ) -> None:
        """Add it to `groups`, by name and description; collectives have their sequence number there, messages a
        negative one."""
        name, number, frames = entry["profiling_name"], entry["collective_seq_id"], entry.get("frames") or ()
        calls = groups.setdefault(tuple(entry["process_group"]), {})
        if message := " " in name:
            number = -1 - len(calls)
        elif entry.get("is_p2p") is True:
            return  # encloses messages that are sent together
        ended = entry["state"] == "completed" or (entry.get("retired") is True and name.startswith("gloo"))
        if (earlier := calls.get(number)) is not None:  # a part of one coalesced call
            if ended:
                state.open.pop(id(earlier), None)
            return
        kind = self._kind(name, entry)
        place = self._places.of(tuple(map(AS_LINE, frames))) if self._places is not None else CallPlace()
        began_ns = entry["time_created_ns"]
        call = Call(state.rank, place, NO_GROUP, kind, -1 if message else number - 1, 0, began_ns / 1e9)
        if ended:
            call.ended_s = (entry.get("time_discovered_completed_ns") or began_ns) / 1e9
        else:
            state.open[id(call)] = call
        calls[number] = state.last = call
        state.num_calls += 1

    def _kind(self, name: str, entry: Mapping[str, Any]) -> Kind:
        """Return operation and tensors of the entry; the peer is a rank of the group until `resolve`."""
        key = f"{name}{entry['input_sizes']}{entry['output_sizes']}{entry['input_dtypes']}"
        found = self._kinds.get(key)
        if found is None:
            backend, _, text = name.partition(":")
            op, _, two = text.partition(" ")
            self.backends.add(backend)
            self.has_messages |= bool(two)
            op, peer = named_operation(op), int(re.split("->|<-", two)[1]) if two else -1
            sides = ("output", "input") if op in BY_OUTPUT else ("input", "output")
            sizes, dtypes = (entry[f"{sides[0]}_{what}"] or entry[f"{sides[1]}_{what}"] for what in ("sizes", "dtypes"))
            dims = tuple(tuple(map(int, shape)) for shape in sizes) if op != "barrier" else ()
            types = tuple(dict.fromkeys(DTYPES.get(each, str(each).lower()) for each in dtypes))
            splits: tuple[tuple[int, ...], ...] = ()
            if op == "all_to_all" and len(sizes) > 1:
                splits = tuple(tuple(map(math.prod, entry[f"{side}_sizes"])) for side in ("input", "output"))
            found = self._kinds[key] = Kind(op, dims, types, peer=peer, splits=splits)
        return found

    def resolve(self, stacks: Mapping[int, Sequence[Sequence[Frame]]]) -> None:
        """After all dumps: give each call its group and each rank its stack."""
        named = [rank for _, ranks in self._configured.values() for rank in ranks]
        size = max([*named, *self._by_rank, *stacks], default=-1) + 1
        self.states = [self._by_rank.get(rank) or RankState(rank, 0) for rank in range(size)]
        for state in self.states:
            state.world_size, state.cpu_share = size, 0.0
            if state.rank not in self._by_rank:
                state.missing = "left no dump (its process had ended, or nobody collected it)"
        for (name, description), calls in self._of_group.items():
            for rank, of_rank in calls.items():
                ranks = self._ranks(rank, name, description, calls)
                key = GroupKey(ranks, "" if description == DEFAULT else name)
                number(of_rank, self._keys.setdefault(key, key), all_kept=rank not in self.truncated)
                self.calls += [call for call in of_rank if call.seq >= 0]
        for rank, threads in stacks.items():
            if rank < size and threads:
                self._set_stack(self.states[rank], threads)

    def _ranks(self, rank: int, name: str, description: str, calls: Mapping[int, Sequence[Call]]) -> tuple[int, ...]:
        """Return the group's ranks from a member's dump, else from any dump; else those that have called in it."""
        if (found := self.groups_of[rank].get(name) or self._configured.get(name)) is not None and rank in found[1]:
            return found[1]
        if description == DEFAULT:
            return tuple(range(len(self.states)))
        self.groups_without_ranks.add(name)
        return tuple(sorted(calls))

    def _set_stack(self, state: RankState, threads: Sequence[Sequence[Frame]]) -> None:
        """Set the rank's place; for a call outside dumps, such as a new group, also its wait."""
        main = main_thread(threads)
        state.stacks = {0: list(main)}
        self._places = self._places or DumpPlaces(folder_of(main) or Path("/"))
        position = self.positions[state.rank] = self._places.of(tuple(main))
        inside = [line.function for line in main if line.file.endswith(C10D)]
        op = next((each for each in inside if each in UNRECORDED), "")
        recorded = op in ("send", "recv") and self.has_messages
        if not op or recorded or state.missing:
            return
        world = tuple(range(len(self.states)))
        others = [rank for rank in world if rank != state.rank]
        if op in ("send", "recv"):
            key, kind = GroupKey(world), Kind(op, peer=others[0] if len(others) == 1 else -1)
        else:  # ranks at one line form one group
            key, kind = GroupKey(world, position.line, MADE), Kind(op)
        call = Call(state.rank, position, key, kind, UNCOUNTED, 0, math.inf)
        self.by_stack[state.rank] = call
        self.calls.append(call)


def named_operation(op: str) -> str:
    """Return the operation in check's terms: "all_gather" for "_all_gather_base"."""
    if op.endswith("barrier") and op != "monitored_barrier":
        return "barrier"
    op = op.removeprefix("_").replace("allgather", "all_gather").replace("allreduce", "all_reduce")
    for ending in SUFFIXES:
        op = op.removesuffix(ending)
    return "all_to_all" if op.startswith(("all_to_all", "alltoall")) else op


def number(calls: Sequence[Call], key: GroupKey, *, all_kept: bool) -> None:
    """Set the group of one rank's calls, and number messages among those of the same ends."""
    next_seq = Counter[tuple[str, int]]()
    for call in calls:
        call.group = key
        if call.kind.op in ("send", "recv"):
            local = call.kind.peer
            call.kind = call.kind._replace(peer=key.ranks[local] if 0 <= local < len(key.ranks) else local)
            if all_kept or call.ended_s is None:
                call.seq = next_seq[call.kind.op, local]
                next_seq[call.kind.op, local] += 1


def main_thread(threads: Sequence[Sequence[Frame]]) -> Sequence[Frame]:
    """Return the thread of the script, which faulthandler writes last and py-spy first."""
    whole = [thread for thread in threads if any(frame.function == "<module>" for frame in thread)]
    return whole[-1] if whole else threads[0]
