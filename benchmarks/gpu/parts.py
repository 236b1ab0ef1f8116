"""The parts: what is run, within which bound, and what of its output decides.

Each part is processes of its own, ended at its bound with all that they started, so that one that hangs costs no other.
On a card ranks are of NCCL, one alone, or four of gloo that share it; with LAB_DEVICE=cpu the same of gloo.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

TOP = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
ON_CARD = os.environ.get("LAB_DEVICE", "cuda") == "cuda"
DEVICE, ALONE = ("cuda", "nccl") if ON_CARD else ("cpu", "gloo")
SMALL = {
    "LAB_STEPS": "4", "LAB_WIDTH": "64", "LAB_HEADS": "4", "LAB_DEPTH": "4", "LAB_SEQ": "32", "LAB_BATCH": "16",
    "LAB_LOG": "full",
}  # fmt: skip
TELLING = r"FAILED|refused|broken|failed at|stopped|lost|finding|Error|SIG|what\(\)|PASS |FAIL "
WITHIN = 0.05  # of a formula's peak the allocator's


class Row(NamedTuple):
    """What a part found; `held` is None if it is informational."""

    what: str
    held: bool | None
    told: str


class Part(NamedTuple):
    """`find` makes the rows, given a folder of its own; `alone` parts are timed, and have the card to themselves."""

    name: str
    limit_s: float
    find: Callable[[Path, float], Iterator[Row]]
    alone: bool = False


class Ended(NamedTuple):
    """A command that has ended; `code` is None where it was ended at its bound."""

    code: int | None
    output: str


def ended(command: Sequence[str], settings: Mapping[str, str], folder: Path, limit_s: float) -> Ended:
    """Run it to its end, or end it and all that it started."""
    here = [str(TOP), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LAB_")}
    environ |= {"PYTHONPATH": os.pathsep.join(here), "LAB_RUNS_DIR": str(folder / "runs"), "PYTHONUNBUFFERED": "1"}
    log = folder / "output"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *command], env=environ | dict(settings), cwd=TOP, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Ended(code, log.read_text(errors="replace"))


def telling(output: str, pattern: str = TELLING, most: int = 4) -> str:
    """The lines that say what became of it, without whose they are, each once."""
    lines = [re.sub(r"^rank \d+ \| ", "", line).strip() for line in output.splitlines() if re.search(pattern, line)]
    lines = [
        line.split(" · repeat")[0][:300] for line in dict.fromkeys(lines) if " passed" not in line or "PASS" in line
    ]
    failed = [line for line in lines if "FAILED" in line and "·" not in line]
    return " / ".join([*failed, *(line for line in lines if line not in failed)][:most])


def judged(name: str, found: Ended, code: int, sentence: str = "") -> Row:
    """Whether it ended with `code` and said `sentence`, a pattern."""
    said = re.search(sentence, found.output) if sentence else None
    held = found.code == code and (said is not None or not sentence)
    how = "ended at its bound" if found.code is None else f"exit code {found.code}"
    line = next((row for row in found.output.splitlines() if said and said[0].splitlines()[0] in row), "")
    return Row(name, held, f"{how}: {line.strip()[:300] if line else telling(found.output)}")


# --- runs of modes ---


NONE: Mapping[str, str] = {}


def mode(
    name: str, world_size: int, backend: str, settings: Mapping[str, str] = NONE, *, code: int = 0, sentence: str = "",
    limit_s: float = 100.0,
) -> Part:  # fmt: skip
    """One run of a mode, small unless `settings` say otherwise, that ends with `code` and says `sentence`."""
    title = f"{Path(name).stem}, {backend}, {world_size} rank{'s' * (world_size > 1)}"

    def find(folder: Path, bound_s: float) -> Iterator[Row]:
        asked = run_of(name, world_size, backend, settings)
        yield judged(title, ended(["-m", "workers"], asked, folder, bound_s), code, sentence)

    return Part(f"{backend}{world_size} {name}", limit_s, find)


def run_of(name: str, world_size: int, backend: str, settings: Mapping[str, str]) -> dict[str, str]:
    asked = {"RUN_MODE": name, "WORLD_SIZE": str(world_size), "LAB_BACKEND": backend, "LAB_DEVICE": DEVICE}
    return SMALL | asked | dict(settings)


TRAINED = (
    "dp", "fsdp", "tp", "pp", "mesh", "cp", "moe", "compress", "precision", "largebatch", "server", "comm", "train",
)  # fmt: skip


def modes() -> Iterator[Part]:
    """NCCL alone in every mode, and gloo's four ranks on one card; what is not possible there is refused."""
    for name in TRAINED:
        yield mode(name, 1, ALONE)
    for name in ("dp", "fsdp", "tp", "pp"):
        yield mode(name, 4, "gloo", limit_s=150)
    yield mode("mesh", 4, "gloo", {"LAB_MESH": "dp2,tp2"}, limit_s=150)
    if ON_CARD:
        yield mode("elastic", 1, ALONE, code=2, sentence=r"refused .*allowed: cpu")
        for name in ("comm", "server", "cp"):
            yield mode(name, 4, "gloo", code=2, sentence=r"refused .*LAB_BACKEND=gloo sends no")


# --- the peak of the memory ---

SIZED = {
    "LAB_WIDTH": "512", "LAB_HEADS": "8", "LAB_DEPTH": "6", "LAB_SEQ": "128", "LAB_BATCH": "16", "LAB_PROOF": "0",
}  # fmt: skip


def peaks(name: str) -> Part:
    """The allocator's peak of each variant by hand against the formula; without a card that of the tensors."""
    seen = "allocator peak bytes" if ON_CARD else "peak bytes"

    def find(folder: Path, bound_s: float) -> Iterator[Row]:
        asked = run_of(name, 1, ALONE, SIZED if ON_CARD else {"LAB_PROOF": "0"})
        found = ended(["-m", "workers"], asked, folder, bound_s)
        compared = comparisons(folder / "runs")
        formulas = {each["variant"]: each["predicted"] for each in compared if each["name"] == "peak bytes"}
        if not formulas:
            yield Row(f"peak of {name}", False, f"no formula in the run's records: {telling(found.output)}")
        for each in compared:
            if each["name"] == seen and each["variant"] in formulas:
                formula = formulas[each["variant"]]
                off = each["measured"] / formula - 1
                told = f"{each['measured'] / 1e6:.2f} MB where the formula has {formula / 1e6:.2f}: {off:+.1%}"
                yield Row(f"peak of {name} {each['variant']}", abs(off) <= WITHIN, told)

    return Part(f"peaks {name}", 150, find)


def comparisons(runs: Path) -> list[dict[str, Any]]:
    """Rank 0's, of the newest run."""
    files = sorted(runs.glob("*/rank0.jsonl"))
    lines = [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []
    return [line for line in lines if line.get("record") == "comparison"]


# --- check and prove ---


def command(
    title: str, words: Sequence[str], settings: Mapping[str, str], code: int, sentence: str = "", limit_s: float = 80.0
) -> Part:
    """One of the package's commands."""

    def find(folder: Path, bound_s: float) -> Iterator[Row]:
        yield judged(title, ended(["-m", "distlab", *words], settings, folder, bound_s), code, sentence)

    return Part(title, limit_s, find)


def commands() -> Iterator[Part]:
    """`check` and `prove` of scripts whose tensors are on the card."""
    one, two = {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}
    yield command("check mine/ddp.py", ["check", "mine/ddp.py"], one, 0)
    yield command("check sums.py", ["check", str(SCRIPTS / "sums.py")], two, 0)
    yield command("check skipped_sum.py, which waits", ["check", str(SCRIPTS / "skipped_sum.py")], two, 1, "rank 1")
    yield command("prove proven.py", ["prove", str(SCRIPTS / "proven.py")], two, 0)
    yield command("prove proven.py, wrong", ["prove", str(SCRIPTS / "proven.py")], two | {"WRONG": "1"}, 1)
    yield command("prove right_ddp.py", ["prove", "tests/tools/prove/files/right_ddp.py"], two, 0)


# --- what goes wrong ---


def faults() -> Iterator[Part]:
    """A rank that is killed, one that is paused, and what NCCL and a card say, each in a sentence."""
    long = {"LAB_STEPS": "200", "LAB_PROOF": "0", "LAB_VARIANT": "bucketed"}
    for name, fault, sentence in (
        ("killed rank", "kill:rank2@step5", r"rank 2 .*(killed|lost|gone|died)"),
        ("paused rank", "pause:rank1:30s@step5", r"rank 1 .*(silent|lost|paused|heard|stopped)"),
    ):
        yield mode("dp", 4, "gloo", long | {"LAB_FAULTS": fault}, code=3, sentence=sentence)._replace(name=name)
    lesson, ranks = str(SCRIPTS / "failing.py"), 1 if ON_CARD else 2
    for number, (name, place) in enumerate(
        {
            "wrong tensor": "in a sum of the CPU's",
            "hang": "in a sum that does not end",
            "too large": "in too large a tensor",
        }.items(),
        start=1,
    ):
        asked = {"LAB_SEED": str(number), "LAB_COLLECTIVE_TIMEOUT_S": "10"}
        sentence = f"at step {number} {place}"  # of the rank itself, or of who waited for it
        yield mode(lesson, ranks, ALONE, asked, code=1, sentence=sentence)._replace(name=name)
    if ON_CARD:
        crowded = r"refused .*1 GPU, and NCCL needs a GPU per rank"
        yield mode("dp", 4, "nccl", code=2, sentence=crowded)._replace(name="four on one card")
