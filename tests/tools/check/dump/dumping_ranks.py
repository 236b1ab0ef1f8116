"""Run a script on gloo ranks that leave the files of a cluster's job: dumps of torch's flight recorder, stacks, logs.

    python -m tests.tools.check.dump.dumping_ranks SCRIPT FOLDER     as one rank, with RANK, WORLD_SIZE and MASTER_* set

A rank answers each line on its standard input: whether it moves, is still or has ended. On "dump" it writes its files. An
ended rank's process stays, so that the others hang as with NCCL instead of losing a connection. NCCL writes the ranks of
each group into a dump and gloo does not: here they are added from torch.distributed.
"""

import faulthandler
import json
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from distlab.lab.cluster.launch import free_port
from tests.launched import clean
from tests.warm import Warm

STILL_S = 1.0  # without a new frame or processor time
LOOK_S = 0.1
TIMEOUT_S = 60


class DumpingRank:
    """One rank."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.script, self.folder, self.rank = script, folder, os.environ["RANK"]
        self.state, self.groups = "moving", dict[str, dict[str, str]]()
        self._main = threading.main_thread().ident or 0

    def run(self) -> None:
        """Run the script to its end; the process stays."""
        os._exit = self._end  # type: ignore[assignment]
        dist.destroy_process_group = lambda *args, **named: None
        for each in (self._watch_progress, self._answer):
            threading.Thread(target=each, daemon=True).start()
        sys.argv, sys.path[0] = [str(self.script)], str(self.script.parent)
        code = 0
        try:
            runpy.run_path(str(self.script), run_name="__main__")
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            (self.folder / f"rank{self.rank}.log").write_text(traceback.format_exc())
            code = 1
        self._end(code)

    def _end(self, code: int = 0) -> NoReturn:
        self.note_groups()
        self.state = f"ended {code}"
        while True:
            time.sleep(TIMEOUT_S)

    def _watch_progress(self) -> None:
        """Watch without the recorder, which may wait for the interpreter's lock while it holds its own."""
        seen: Any = None
        since = time.monotonic()
        while not self.state.startswith("ended"):
            frame, frames = sys._current_frames().get(self._main), list[tuple[int, int]]()
            while frame is not None:
                frames.append((id(frame.f_code), frame.f_lasti))
                frame = frame.f_back
            now = frames, round(time.process_time() / STILL_S, 1)
            if now != seen:
                seen, since = now, time.monotonic()
            if not self.state.startswith("ended"):
                self.state = "still" if time.monotonic() - since > STILL_S else "moving"
            time.sleep(LOOK_S)

    def _answer(self) -> None:
        for line in sys.stdin:
            if line.strip() == "dump":
                self.note_groups()
                self.write()
            print(self.state, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)  # the launcher has exited

    def note_groups(self) -> None:
        """Note the groups of this rank as NCCL's dumps have them."""
        world: Any = dist.distributed_c10d._world
        with suppress(RuntimeError):  # one is created meanwhile
            for group, ranks in list(world.pg_group_ranks.items()):
                if group not in world.pg_names:
                    continue  # this rank is not in it
                name = world.pg_names[group]
                described = {"name": name, "desc": group.group_desc, "ranks": json.dumps(sorted(ranks))}
                self.groups[name] = described

    def write(self) -> None:
        """Write the dump, as pickle and as JSON, and the stacks."""
        c10d: Any = torch._C._distributed_c10d
        dump = pickle.loads(c10d._dump_fr_trace())  # ours
        for folder, value in (("pickle", dump), ("json", json.loads(c10d._dump_fr_trace_json()))):
            value["pg_config"] = self.groups
            data = pickle.dumps(value) if folder == "pickle" else json.dumps(value).encode()
            (self.folder / folder).mkdir(exist_ok=True)
            (self.folder / folder / f"dump_{self.rank}").write_bytes(data)
        with (self.folder / f"rank{self.rank}.stacks").open("w") as stacks:
            faulthandler.dump_traceback(file=stacks, all_threads=True)


def leave_dumps(script: Path, world_size: int, folder: Path) -> Path:
    """Run the script until all its ranks have ended or are still, and return the folder with their files: dumps of all
    if all ended well, else of those that are still."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {
        "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "2000",
        "PYTHONHASHSEED": "0",
    }  # fmt: skip
    ranks = [
        Warm(
            "tests.tools.check.dump.dumping_ranks", [str(script), str(folder)],
            clean(**own, RANK=str(rank), LOCAL_RANK=str(rank)), script.parent,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while "moving" in (states := [ask(rank, "?") for rank in ranks]):
            assert time.monotonic() < deadline, states
            time.sleep(LOOK_S)
        well = states == ["ended 0"] * world_size
        for rank, state in zip(ranks, states, strict=True):
            if well or state == "still":
                ask(rank, "dump")
    finally:
        for rank in ranks:
            rank.kill()
            with suppress(BrokenPipeError):
                rank.stdin.close()
            rank.stdout.close()
    codes = [(rank, int(state.split()[1])) for rank, state in enumerate(states) if state.startswith("ended")]
    lines = [f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 1)\n" for rank, code in codes]
    if not well:
        (folder / "torchrun.log").write_text("".join(lines))
    return folder


def ask(rank: Warm, what: str) -> str:
    """Return the rank's answer, as its script may print too; or how it ended if its process has exited."""
    with suppress(BrokenPipeError):
        rank.stdin.write(f"{what}\n")
        rank.stdin.flush()
    for line in rank.stdout:
        if line.strip() in ("moving", "still") or line.startswith("ended "):
            return line.strip()
    return f"ended {rank.wait(TIMEOUT_S)}"


if __name__ == "__main__":
    DumpingRank(Path(sys.argv[1]), Path(sys.argv[2])).run()
