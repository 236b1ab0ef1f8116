"""Format a cell's results: outputs by rank, equal ones once; faults with the cell's lines at which ranks wait."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from distlab.lab.cluster import name_ranks
from distlab.lab.report.export import picture
from distlab.lab.report.records import Ranks, Start, Timeline
from distlab.lab.report.units import counted, human_bytes
from distlab.lab.report.verdict import SCRIPT
from distlab.tools.check.judge.rank_state import HANG, MATCH
from distlab.tools.check.judge.report import format_tables, spans_of, traffic
from distlab.tools.check.watch.places import PACKAGES
from distlab.tools.notebook.rank import Frame, RankResult
from distlab.tools.notebook.session import Result

NEWEST = 8  # names of a rank that are listed
AROUND = 2  # lines of the cell before and after a marked one
RED, BOLD, PLAIN = "\x1b[31m", "\x1b[1m", "\x1b[0m"


def grouped(texts: Mapping[int, str]) -> Iterator[tuple[str, list[int]]]:
    """Yield each text once, with its ranks, in the order of the first; empty ones are left out."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        if text.strip():
            ranks.setdefault(text, []).append(rank)
    yield from ranks.items()


def name(ranks: Sequence[int], world_size: int) -> str:
    return f"all {world_size} ranks" if len(ranks) == world_size > 1 else name_ranks(ranks)


def outputs(result: Result) -> Iterator[str]:
    """Yield what ranks printed and their last values, after the ranks' names."""
    world_size = len(result.outcome.printed)
    values = {rank: f"= {each.value}" if each.value else "" for rank, each in result.ended.items()}
    for texts in (result.outcome.printed, values):
        for text, ranks in by_line(texts):
            yield from (f"{name(ranks, world_size)} | {line}" for line in text.rstrip("\n").splitlines())


def by_line(texts: Mapping[int, str]) -> Iterator[tuple[str, list[int]]]:
    """Yield equal texts once; if ranks have as many lines, equal lines once, in their order."""
    lines = {rank: text.splitlines() for rank, text in texts.items() if text.strip()}
    if len(lines) > 1 and len({len(each) for each in lines.values()}) == 1:
        for each in zip(*lines.values(), strict=True):
            yield from grouped(dict(zip(lines, each, strict=True)))
    else:
        yield from grouped(texts)


# What went wrong.


class CellFailed(Exception):
    """Raised if a cell failed; a notebook shows the sentences and marked lines in place of a traceback."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(re.sub(r"\x1b\[\d+m", "", lines[0]) if lines else "the cell failed")
        self.lines = list(lines)

    def _render_traceback_(self) -> list[str]:
        return self.lines


def failure(result: Result, source: str) -> CellFailed:
    """Return the report of a failed cell, the sentence first."""
    outcome, world_size = result.outcome, len(result.outcome.printed)
    sentences = [f"rank {rank} {how}" for rank, how in outcome.lost.items()]
    # A rank whose process ended has no exception to show below.
    found = [
        each for each in outcome.findings if each.check in (HANG, MATCH) or result.ended.keys().isdisjoint(each.ranks)
    ]
    sentences += [each.sentence for each in found]
    if result.interrupted:
        sentences.append("interrupted")
    marks = {rank: line for each in found for rank, line in places(each.rows, result.file)}
    if result.interrupted and result.coordinator is not None:
        marks = {each.rank: line for each in result.coordinator.states if (line := line_in(each.frames(), result.file))}
    lines = [f"{BOLD}{RED}{sentence}{PLAIN}" for sentence in map(without_path, sentences)]
    if marks:
        lines += ["", *mark_lines(source, marks, world_size)]
    if not (found or outcome.lost):  # ranks' exceptions then follow from it
        raised = {rank: result.ended[rank] for rank in outcome.raised() or outcome.failed}
        lines += list(tracebacks(raised, result.file, source, world_size))
    if result.restarted:
        lines += ["", restart_sentence(result.restarted)]
    elif found or result.interrupted:
        lines += ["", "all ranks have kept the results of earlier cells"]
    return CellFailed(lines)


def restart_sentence(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} restarted and lost the results of earlier cells; all other ranks have kept theirs"


def without_path(sentence: str) -> str:
    """Return the sentence with the cell's name in place of its file and line."""
    return re.sub(r"(?:\S*/)?cell_(\d+)\.py:(\d+)", r"cell \1, line \2", sentence)


def places(rows: Iterable[Sequence[str]], file: str) -> Iterator[tuple[int, int]]:
    """Yield rank and line of each row with a rank's position in the cell."""
    for row in rows:
        text = " ".join(row)
        rank, line = re.search(r"\brank (\d+)", text), re.search(rf"{re.escape(Path(file).name)}:(\d+)", text)
        if rank and line:
            yield int(rank[1]), int(line[1])


def line_in(frames: Iterable[object], file: str) -> int:
    """Return the cell's line in its innermost frame; 0 without one."""
    return next((each.line for each in frames if each.file == file), 0)  # type: ignore[attr-defined]


def mark_lines(source: str, marks: Mapping[int, int], world_size: int) -> Iterator[str]:
    """Yield the cell's lines around the marked ones, with the ranks at them."""
    lines = source.splitlines()
    ranks_at: dict[int, list[int]] = {}
    for rank, line in sorted(marks.items()):
        ranks_at.setdefault(line, []).append(rank)
    width = max(len(name(ranks, world_size)) for ranks in ranks_at.values())
    near = {each for line in ranks_at for each in range(line - AROUND, line + AROUND + 1)}
    drawn = [number for number in range(1, len(lines) + 1) if number in near]
    for before, number in zip([0, *drawn], drawn, strict=False):
        if before and number > before + 1:
            yield f"{'':>{width}}       ..."
        ranks = name(ranks_at[number], world_size) if number in ranks_at else ""
        arrow = "-->" if ranks else "   "
        text = f"{ranks:>{width}} {arrow} {number:>3} {lines[number - 1]}"
        yield f"{BOLD}{text}{PLAIN}" if ranks else text


def tracebacks(raised: Mapping[int, RankResult], file: str, source: str, world_size: int) -> Iterator[str]:
    """Yield each exception once, with its ranks, the frames below the cell, and the cell's line marked."""
    by_error: dict[tuple[str, tuple[Frame, ...]], list[int]] = {}
    for rank, each in sorted(raised.items()):
        by_error.setdefault((each.text, tuple(Frame(*frame) for frame in each.frames)), []).append(rank)
    for (text, frames), ranks in by_error.items():
        yield f"{BOLD}{RED}{text.partition(':')[0]}{PLAIN} on {name(ranks, world_size)}"
        for number, frame in enumerate(frames, 1):
            if number < len(frames) and any(each in frame.file for each in (*PACKAGES, "/distlab/")):
                continue  # between the cell and where it was raised
            if frame.file == file:
                where = without_path(f"{Path(file).name}:{frame.line}")
                yield f"{where}, in {frame.function}" if frame.function not in ("", "<module>") else where
                yield from mark_lines(source, dict.fromkeys(ranks, frame.line), world_size)
            else:
                yield f"{without_path(f'{frame.file}:{frame.line}')}, in {frame.function}"
        yield f"{BOLD}{text}{PLAIN}"


# Measurements of a cell, if requested.


def wire_table(result: Result) -> str:
    """Return the bytes sent per pair of ranks in this cell, and its calls."""
    states = result.coordinator.states if result.coordinator is not None else []
    return "\n".join(format_tables(traffic(list(states)))) or "nothing was sent: no rank communicated"


def names(defined: Sequence[str]) -> str:
    """Return the number of names on a rank, and the newest."""
    listed = ", ".join([*["..."] * (len(defined) > NEWEST), *defined[-NEWEST:]])
    return f"{counted(len(defined), 'names')}: {listed}" if defined else "no names yet"


def memory_table(result: Result) -> str:
    rows = [
        f"rank {rank}   {human_bytes(each.before_bytes)} before the cell, {human_bytes(each.peak_bytes)} at the peak"
        f" (+{human_bytes(max(0, each.peak_bytes - each.before_bytes))})"
        for rank, each in sorted(result.ended.items())
    ]
    return "\n".join(["Memory of each rank's process", *rows])


def spans(result: Result) -> list[list[tuple[str, str, float, float]]]:
    """Return each rank's calls, in seconds since the first of all."""
    found = [spans_of(lines)[0] for lines in result.reports]
    began_s = min((start_s for of_rank in found for _, _, start_s, _ in of_rank), default=0.0)
    return [[(kind, label, start - began_s, end - began_s) for kind, label, start, end in of_rank] for of_rank in found]


def timeline(result: Result) -> str:
    """Return a report's timeline as SVG; empty if no rank communicated."""
    found = spans(result)
    if not any(found):
        return ""
    run = {"run_mode": SCRIPT, "world_size": len(found), "comparisons": [], "by_torch": []}
    what = without_path(f"{Path(result.file).name}:0").partition(",")[0]
    by_rank: Ranks = {
        rank: [
            Start(rank, "", SCRIPT, len(found), "", config={}, repeat={}, versions={}, title=what),
            Timeline(what, 0, [list(span) for span in of_rank]),
        ]
        for rank, of_rank in enumerate(found)
    }
    title = f"The calls of {counted(len(found), 'ranks')} over time"
    return picture(run, by_rank, title, "All calls of the cell, each from its begin to its end")
