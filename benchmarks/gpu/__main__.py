"""One card, one call: what of the lab holds on it and how fast it is, in at most 7 minutes.

    python3 -m benchmarks.gpu [--out FOLDER] [--limit SECONDS] [--only WORD,...]

from the top of the repository. It needs python3 with torch, and what the lab itself imports (pydantic,
pydantic-settings, msgspec, jinja2, pygal); what is missing it says in one sentence. It writes FOLDER/gpu.json, gpu.md
and gpu.log (default runs/gpu), anew after each part, so that a part that hangs, which is ended at its bound, or a call
that is cut off costs no other's result. With LAB_DEVICE=cpu the same parts are run small, without a card.
`distlab plan --calibrate FOLDER/gpu.json` calculates with what was measured. The exit code is 1 where something does
not hold.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu import parts
from benchmarks.gpu.parts import ON_CARD, Ended, Part, Row, ended

NEEDED = ("torch", "numpy", "pydantic", "pydantic_settings", "msgspec", "jinja2", "pygal")
AT_ONCE, SLOWER = (5, 1) if ON_CARD else (1, 8)  # parts at once, and how much longer they may take
STEP_WITHIN = 0.10
WORDS = {None: "info", True: "held", False: "NOT "}


def missing() -> str:
    """A sentence for what cannot be imported; empty where all is there."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}; `pip install -e .` in the repository installs all that it needs"
    import torch

    if ON_CARD and not torch.cuda.is_available():
        return "torch sees no GPU here: with LAB_DEVICE=cpu the same parts run without one"
    return ""


class Report:
    """What was found, written anew after each part; parts come from several threads."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.rows: list[tuple[str, float, Row]] = []
        self.measured: dict[str, Any] = {}
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu.log").write_text("")

    def add(self, part: str, seconds: float, rows: list[Row], output: str) -> None:
        with self._lock:
            self.rows += [(part, seconds, row) for row in rows]
            with (self.folder / "gpu.log").open("a") as log:
                log.write(f"===== {part} ({seconds:.0f} s)\n{output[-60_000:]}\n")
            self.write()
        for row in rows:
            print(f"{WORDS[row.held]}  {row.what}: {row.told}", flush=True)

    def write(self) -> None:
        rows = [{"part": part, "seconds": round(seconds, 1), **row._asdict()} for part, seconds, row in self.rows]
        found = self.about | self.measured | {"rows": rows}
        (self.folder / "gpu.json").write_text(json.dumps(found, indent=1))
        (self.folder / "gpu.md").write_text("\n".join(markdown(self.about, self.measured, self.rows)) + "\n")


def markdown(about: dict[str, Any], measured: dict[str, Any], rows: list[tuple[str, float, Row]]) -> Iterator[str]:
    """The tables."""
    yield f"{about['card']}, {about['date']}, torch {about['torch']}, `{about['command']}`\n"
    if "card" in measured:
        yield from card_table(measured["card"])
    if measured.get("steps"):
        yield from steps_table(measured["steps"])
    yield "| part | s | held | |\n|---|---|---|---|"
    for _, seconds, row in rows:
        held = "info" if row.held is None else "yes" if row.held else "**no**"
        yield f"| {row.what} | {seconds:.0f} | {held} | {row.told.replace('|', '/')} |"


def card_table(card: dict[str, Any]) -> Iterator[str]:
    square = [each for each in card["products"] if each[0] == each[1] == each[2]]
    yield "| bf16 product n x n x n | TFLOP/s | share of peak |\n|---|---|---|"
    yield from (f"| {n} | {flops / 1e12:.1f} | {flops / card['peak']:.1%} |" for n, _, _, flops in square)
    yield "\n| causal attention of positions | forward TFLOP/s | backward TFLOP/s |\n|---|---|---|"
    yield from (f"| {s} | {forward / 1e12:.1f} | {back / 1e12:.1f} |" for s, forward, back in card["attention"])
    numbers = ", ".join(f"{kind} {seconds * 1e12:.3g}" for kind, seconds in card["number_s"].items())
    yield f"\nMemory {card['memory'] / 1e12:.2f} TB/s by a copy, read and written; ps a number: {numbers}.\n"


def steps_table(steps: list[dict[str, Any]]) -> Iterator[str]:
    yield "| layers, width, positions, samples | parameters | ms a step | predicted | off | MFU | peak GB |"
    yield "|---|---|---|---|---|---|---|"
    for each in steps:
        if "error" in each:
            yield f"| {each['shape']} | | {each['error']} | | | | |"
            continue
        shape = ", ".join(str(each[name]) for name in ("layers", "width", "positions", "samples"))
        times = f"{each['step_s'] * 1e3:.1f} | {each['predicted_s'] * 1e3:.1f} | {each['off']:+.1%}"
        yield (
            f"| {shape} | {each['parameters'] / 1e9:.2f}B | {times} | {each['mfu']:.1%} |"
            f" {each['peak_bytes'] / 1e9:.2f} |"
        )
    yield ""


def measured_card(report: Report) -> Part:
    """The card by itself and the GPT steps on it, alone."""

    def find(folder: Path, bound_s: float) -> Iterator[Row]:
        path = folder / "card.json"
        settings = {"LAB_DEVICE": parts.DEVICE, "OMP_NUM_THREADS": "1"}
        found: Ended = ended(["-m", "benchmarks.gpu.measured_card", str(path)], settings, folder, bound_s)
        report.measured |= json.loads(path.read_text()) if path.exists() else {}
        yield Row("the card is measured", found.code == 0, f"exit code {found.code}: {parts.telling(found.output)}")
        for each in report.measured.get("steps", ()):
            if "off" in each:
                what = f"step of {each['layers']} layers, {each['width']} wide, {each['positions']} positions"
                told = f"{each['step_s'] * 1e3:.1f} ms, predicted {each['predicted_s'] * 1e3:.1f} ({each['off']:+.1%})"
                yield Row(what, abs(each["off"]) <= STEP_WITHIN if ON_CARD else None, f"{told}, MFU {each['mfu']:.1%}")

    return Part("card", 120, find, alone=True)


def all_parts(report: Report) -> list[Part]:
    """The longest first, so that none is left at the end."""
    gloo = [each for each in parts.modes() if each.limit_s > 100]
    rest = [each for each in parts.modes() if each.limit_s <= 100]
    peaks = [parts.peaks(name) for name in ("dp", "fsdp")]
    return [measured_card(report), *rest, *peaks, *parts.faults(), *parts.commands(), *gloo]


def run(part: Part, report: Report, until: float, scratch: Path) -> None:
    """Make its rows within its bound, or within what is left of the whole."""
    left_s, began = until - time.monotonic(), time.monotonic()
    if left_s < 5:
        report.add(part.name, 0.0, [Row(part.name, False, "no time was left for it")], "")
        return
    folder = Path(tempfile.mkdtemp(dir=scratch))
    try:
        rows = list(part.find(folder, min(part.limit_s * SLOWER, left_s)))
    except Exception as error:  # one part's, and no other's
        rows = [Row(part.name, False, f"{type(error).__name__}: {error}")]
    output = folder / "output"
    report.add(part.name, time.monotonic() - began, rows, output.read_text(errors="replace") if output.exists() else "")


def main(words: list[str]) -> int:
    """Run all parts; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="where gpu.json, gpu.md and gpu.log go")
    parser.add_argument("--limit", type=float, default=420.0 * SLOWER, help="seconds in all")
    parser.add_argument("--only", default="", help="parts whose names have one of these words, separated by commas")
    options = parser.parse_args(words)
    if reason := missing():
        print(f"refused    {reason}")
        return 2
    import torch

    name = torch.cuda.get_device_name() if ON_CARD else "no card (LAB_DEVICE=cpu)"
    command = " ".join(["python3 -m benchmarks.gpu", *words])
    about = {"card": name, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "command": command}
    report, until = Report(options.out, {"device": about["card"]} | about), time.monotonic() + options.limit
    chosen = [part for part in all_parts(report) if any(word in part.name for word in options.only.split(","))]
    with tempfile.TemporaryDirectory(prefix="distlab-gpu-") as scratch:
        for part in chosen:
            if part.alone:
                run(part, report, until, Path(scratch))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda part: run(part, report, until, Path(scratch)), [p for p in chosen if not p.alone]))
    wrong = [row.what for _, _, row in report.rows if row.held is False]
    held = f"{len(report.rows) - len(wrong)} of {len(report.rows)} held or informational"
    print(f"{held}; written: {options.out}/gpu.json, gpu.md, gpu.log")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
