"""Turn an exception into one sentence: what happened, where, and what to change; with a key for similar ones.

PyTorch's messages assume that you know PyTorch. For some we add what to write instead.
"""

import re
import signal
from collections.abc import Callable

from distlab.tools.check.judge.rank_state import Raised

MOST = 400  # characters of the message
Remedy = str | Callable[[re.Match[str]], str]


def how_it_ended(exit_code: int) -> str:
    """Return the end in words that follow "rank 2 "."""
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"called os._exit({exit_code})"


def describe_exception(raised: Raised, place: str) -> str:
    """Return what the script raised, in words that follow "rank 2 "; `at` is one line or several."""
    if raised.kind == "SystemExit":
        what = f"called sys.exit with {raised.text}"
    elif raised.kind == "Exited":  # has its own place
        return raised.text
    else:
        message, remedy = first_informative_line(raised.text), remedy_of(raised.text)
        message = message.partition(". ")[0] if remedy else message
        what = f"raised {raised.kind}: {message}".rstrip(": ")
        return (f"{what} at {place}" if place else what) + (f": {remedy}" if remedy else "")
    return f"{what} at {place}" if place else what


def first_informative_line(text: str) -> str:
    """Return the first informative line, shortened at a word; for another process's traceback its last line."""
    lines = [line.strip() for line in without_addresses(text).splitlines() if line.strip()]
    if not lines:
        return ""
    child = re.match(r"-- Process (\d+) terminated with the following error", lines[0])
    if child and len(lines) > 1:
        return shorten(f"process {child[1]} raised {lines[-1]}")
    return shorten(lines[0])


def shorten(text: str, most: int = MOST) -> str:
    """Return the text, or its first words."""
    return text if len(text) <= most else f"{text[: most - 4].rpartition(' ')[0] or text[: most - 4]} ..."


def without_addresses(text: str) -> str:
    """Return the text without addresses of objects."""
    return re.sub(r"<(?:\w+\.)*(\w+)(?: object)? at 0x[0-9a-fA-F]+>", r"<\1>", text)


def failure_key(text: str, rank: int) -> str:
    """Return a key for ranks that failed in the same way: without addresses, ports, process ids, times and rank."""
    text = re.sub(r"0x[0-9a-fA-F]+", "0x", without_addresses(text))
    text = re.sub(rf"\b([Rr]anks?|[Rr]ank:|cuda:|process|Process) ?{rank}\b", r"\1 <own>", text)
    text = re.sub(r"(?<=[:\]])\d{4,5}\b", "<port>", text)
    return re.sub(r"\b(pid|PID|port|thread)([ :=]+)\d+", r"\1\2<number>", text)


def unused(found: re.Match[str]) -> str:
    which = found["names"].strip()
    which = f"parameters {', '.join(which.split())} of the module" if re.fullmatch(r"[\d ]+", which) else which
    return (
        f"{which} got no gradient on rank {found['rank']}: use each parameter in the loss on each rank, or"
        " pass find_unused_parameters=True to DistributedDataParallel"
    )


REMEDIES: tuple[tuple[str, Remedy], ...] = (
    (
        r"Global rank \d+ is not part of group",
        "src and dst are ranks of the world, also in a group: pass a rank that is in the group (group_src=0 and"
        " group_dst=0 count inside the group)",
    ),
    (r"Parameter(?:s| indices) which did not receive grad for rank (?P<rank>\d+): (?P<names>[^\n]*)", unused),
    (
        r"Expected to have finished reduction in the prior iteration",
        "a parameter got no gradient on a rank: use each in the loss on each rank, or pass"
        " find_unused_parameters=True to DistributedDataParallel (TORCH_DISTRIBUTED_DEBUG=INFO names them)",
    ),
    (
        r"Default process group has not been initialized",
        "call torch.distributed.init_process_group() before it",
    ),
)


def remedy_of(text: str) -> str:
    """Return what to change, if that is known for this message; else empty."""
    for words, remedy in REMEDIES:
        found = re.search(words, text)
        if found:
            return remedy if isinstance(remedy, str) else remedy(found)
    return ""
