"""The words of an exception in a sentence: the line that says what happened, what to change, and what is alike of two.

Torch's own words are for who knows torch: some are followed here by what to write instead.
"""

import re
import signal
from collections.abc import Callable

from distlab.tools.check.judge.rank_state import Raised

MOST = 400  # characters of the words
Remedy = str | Callable[[re.Match[str]], str]


def how_it_ended(exit_code: int) -> str:
    """In words that follow "rank 2 "."""
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"left by os._exit({exit_code})"


def describe_exception(raised: Raised, at: str) -> str:
    """What the script did, behind "rank 2 "; `at` is where, one line or several."""
    if raised.kind == "SystemExit":
        what = f"called sys.exit with {raised.text}"
    elif raised.kind == "Exited":  # which says where by itself
        return raised.text
    else:
        said, remedy = first_words(raised.text), remedy_of(raised.text)
        said = said.partition(". ")[0] if remedy else said
        what = f"raised {raised.kind}: {said}".rstrip(": ")
        return (f"{what} at {at}" if at else what) + (f": {remedy}" if remedy else "")
    return f"{what} at {at}" if at else what


def first_words(text: str) -> str:
    """The first line that says something, cut between two words; of another process's traceback its last one."""
    lines = [line.strip() for line in shown(text).splitlines() if line.strip()]
    if not lines:
        return ""
    child = re.match(r"-- Process (\d+) terminated with the following error", lines[0])
    if child and len(lines) > 1:
        return cut(f"process {child[1]} raised {lines[-1]}")
    return cut(lines[0])


def cut(text: str, most: int = MOST) -> str:
    """The text, or its first words."""
    return text if len(text) <= most else f"{text[: most - 4].rpartition(' ')[0] or text[: most - 4]} ..."


def shown(text: str) -> str:
    """Without addresses of objects, which say nothing."""
    return re.sub(r"<(?:\w+\.)*(\w+)(?: object)? at 0x[0-9a-fA-F]+>", r"<\1>", text)


def folded(text: str, rank: int) -> str:
    """The same for ranks that failed alike: without addresses, ports, process ids, times, and their own number."""
    text = re.sub(r"0x[0-9a-fA-F]+", "0x", shown(text))
    text = re.sub(rf"\b([Rr]anks?|[Rr]ank:|cuda:|process|Process) ?{rank}\b", r"\1 <own>", text)
    text = re.sub(r"(?<=[:\]])\d{4,5}\b", "<port>", text)
    return re.sub(r"\b(pid|PID|port|thread)([ :=]+)\d+", r"\1\2<number>", text)


def unused(found: re.Match[str]) -> str:
    which = found["names"].strip()
    which = f"parameters {', '.join(which.split())} of the module" if re.fullmatch(r"[\d ]+", which) else which
    return (
        f"{which} got no gradient on rank {found['rank']}: let each parameter take part in the loss of"
        " each rank, or give DistributedDataParallel find_unused_parameters=True"
    )


REMEDIES: tuple[tuple[str, Remedy], ...] = (
    (
        r"Global rank \d+ is not part of group",
        "src and dst are ranks of the world, also in a group: name one of the group's own ranks (group_src=0 and"
        " group_dst=0 count inside of it)",
    ),
    (r"Parameter(?:s| indices) which did not receive grad for rank (?P<rank>\d+): (?P<names>[^\n]*)", unused),
    (
        r"Expected to have finished reduction in the prior iteration",
        "a parameter got no gradient on a rank: let each take part in the loss of each rank, or give"
        " DistributedDataParallel find_unused_parameters=True (TORCH_DISTRIBUTED_DEBUG=INFO names them)",
    ),
    (
        r"Default process group has not been initialized",
        "call torch.distributed.init_process_group() before it",
    ),
)


def remedy_of(text: str) -> str:
    """What to change, where that is known of these words; else empty."""
    for words, remedy in REMEDIES:
        found = re.search(words, text)
        if found:
            return remedy if isinstance(remedy, str) else remedy(found)
    return ""
