"""A script that records facts about its rank's process; test_fork_servers.py compares them with torchrun's."""

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

DIFFERENT = {
    "torch": lambda: torch.rand(4).tolist(),
    "the seed of torch": torch.initial_seed,
    "numpy": lambda: np.random.rand(4).tolist(),
    "random": random.random,
    "the hash of a text": lambda: hash("replica"),
    "the order of a set": lambda: list({"full", "sliding", "chunked", "linear", "local", "global", "dilated"}),
    "the process": os.getpid,
}
EQUAL = {
    "name of the process": lambda: multiprocessing.current_process().name,
    "is a child": lambda: multiprocessing.parent_process() is not None,
    "may have children": lambda: not multiprocessing.current_process().daemon,
    "name of a child": lambda: multiprocessing.Process().name,
    "start method": lambda: multiprocessing.get_start_method(allow_none=True),
    "threads": lambda: [each.name for each in threading.enumerate()],
    "handlers": lambda: [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "hashes are random": lambda: sys.flags.hash_randomization,
}
OF_SCRIPT = {
    "is launched elastically": dist.is_torchelastic_launched,
    "threads of torch": torch.get_num_threads,
    "name of the module": lambda: __name__,
    "words": lambda: sys.argv,
    "first folder of imports": lambda: sys.path[0],
    "its place": lambda: [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
    "variables": lambda: sorted(os.environ),
}


def write_facts(folder: Path, rank: int, *, of_script: bool) -> None:
    """Write the facts to this rank's file: those that differ between ranks, and those that are equal."""
    kinds = [DIFFERENT, EQUAL | OF_SCRIPT if of_script else EQUAL]
    found = [{name: get() for name, get in facts.items()} for facts in kinds]
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    write_facts(Path(os.environ["FACTS_DIR"]), int(os.environ["RANK"]), of_script=True)
