"""The timeline of a run, as the page and a file of its own show it: all variants on one axis of time, a row a rank."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from workers.report import panels
from workers.report.claims import Run
from workers.report.judge import PROOF, SCRIPT
from workers.report.panels import Rows
from workers.report.records import Ranks
from workers.report.scene import Scene, scenes
from workers.report.spans import KINDS, NUMBERED
from workers.report.units import human_bytes, milliseconds, round_step

MOST_TICKS = 8
MOST_MARKS = 4500  # of all variants of a run of four ranks; more ranks may have more


class Panel(NamedTuple):
    """One variant: what is told beside its name, its marks, and those of its schedule on paper, if there is one."""

    variant: str
    told: str
    marks: Markup
    ideal: Markup


class Timeline(NamedTuple):
    """All that is drawn, and said of it."""

    heading: str
    num_ranks: int
    longest_s: float
    rows: Rows
    panels: list[Panel]
    ticks: list[tuple[str, str]]  # where along the axis, and the label
    key: list[tuple[str, str]]  # class and name of each kind of mark
    bands: bool
    arrows: bool
    note: str


def timeline(run: Run, records: Ranks, rows: Rows | None = None) -> Timeline | None:
    """What is drawn of a run, None where no step was recorded."""
    found = scenes(run, records, MOST_MARKS * max(4, min(32, run["world_size"])) // 4)
    if not found:
        return None
    longest_s = max(scene.step_s for scene in found)
    rows = rows or rows_of(run["world_size"], len(found))
    return Timeline(
        heading(run, found),
        run["world_size"],
        longest_s,
        rows,
        [
            Panel(
                scene.variant,
                " · ".join(filter(None, [f"{milliseconds(scene.step_s)} ms", idle_words(run, scene)])),
                Markup(panels.panel(scene, rows, longest_s)),
                Markup(panels.ideal(scene.ideal, rows, longest_s)),
            )
            for scene in found
        ],
        [(panels.percent(at_s, longest_s), name) for at_s, name in ticks(longest_s)],
        key(found),
        any(scene.bands for scene in found),
        any(scene.arrows for scene in found),
        " ".join(notes(run, found)),
    )


def rows_of(num_ranks: int, num_variants: int) -> Rows:
    """Rows that let all variants be seen at once, and each still be read."""
    height = max(9.0, min(20.0, 360 / (num_ranks * num_variants)))
    return Rows(round(height, 1), 6 if height > 12 else 3)


def heading(run: Run, found: Sequence[Scene]) -> str:
    """What is seen."""
    ranks = f"{run['world_size']} rank{'s' if run['world_size'] > 1 else ''}"
    if run["run_mode"] in (SCRIPT, PROOF):
        return f"What {ranks} call, by the lines of the script"
    return f"What {ranks} do: {len(found)} variants on one axis of time" if len(found) > 1 else f"What {ranks} do"


def idle_words(run: Run, scene: Scene) -> str:
    """How much of the ranks' time is bubble, as run.json has it; else what is idle of the step that is drawn; of one
    that computes nothing there is none."""
    for claim in run["comparisons"]:
        if (claim["variant"], claim["name"]) == (scene.variant, "bubble"):
            return f"idle {claim['measured']:.0%}, {claim['predicted']:.0%} by {claim['formula'] or 'the formula'}"
    return f"idle {scene.idle:.0%}" if scene.computes else ""


def ticks(longest_s: float) -> list[tuple[float, str]]:
    """Round milliseconds along the axis."""
    longest_ms = 1000 * longest_s
    step_ms = round_step(longest_ms or 1.0, MOST_TICKS)
    return [
        (tick * step_ms / 1000, f"{tick * step_ms:g} ms" if tick else "0")
        for tick in range(int(longest_ms / step_ms) + 1)
    ]


def key(found: Sequence[Scene]) -> list[tuple[str, str]]:
    """(class, name) of all that is drawn."""
    used = {span.kind for scene in found for spans in scene.of_ranks for span in spans}
    names = {kind: KINDS[kind][0] for kind in KINDS if kind in used and kind not in (*NUMBERED, "receive", "wait")}
    entries = [(f"{kind} blue", KINDS[kind][0]) for kind in NUMBERED if kind in used]
    entries += list(names.items())
    entries += [("wait", "waits")] if used & {"receive", "wait"} else []
    return [*entries, ("idle", "idle")]


def notes(run: Run, found: Sequence[Scene]) -> Iterator[str]:
    """From what it was drawn, how many bytes it holds beside those of the sockets, and what was cut."""
    if run["run_mode"] in (SCRIPT, PROOF):
        yield "From the first call on; the lines stand under the pointer."
        return
    sockets = {variant["name"]: variant["wire_bytes"] for variant in run["variants"]}
    yield (
        "One recorded step of each variant, of three the one of median length, on rank 0's clock; no timed step is"
        " recorded."
    )
    for scene in found:
        wire, sent = sockets.get(scene.variant, [None])[0], scene.sent_bytes[0]
        if sent:
            counted = f", and its sockets {human_bytes(wire * scene.steps)}" if wire else ""
            counted += f" in {scene.steps} steps" if scene.steps > 1 else ""
            yield f"{scene.variant}: rank 0 sends {human_bytes(sent)}{counted}."
    yield from (f"{scene.variant}: {scene.cut}." for scene in found if scene.cut)
