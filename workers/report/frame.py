"""What the picture is framed by, on the page and in a file of its own: its rows, its axis, its key and its words."""

from collections.abc import Sequence

from workers.report.claims import Run
from workers.report.panels import Rows
from workers.report.records import Ranks
from workers.report.scene import Scene, scenes
from workers.report.spans import KINDS, NUMBERED
from workers.report.units import milliseconds

MOST_TICKS = 8
MOST_MARKS = 4500  # of all variants of a run of four ranks; more ranks may have more
# What idle time is hatched with, and the head of an arrow; once in a document.
DEFINED = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V6" class="hatch"/></pattern><marker id="head" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5"'
    ' markerHeight="5" orient="auto"><path d="M0 0L6 3L0 6z" class="tip-of"/></marker></defs>'
)


def drawn_scenes(run: Run, records: Ranks) -> list[Scene]:
    """What is drawn of a run."""
    return scenes(run, records, MOST_MARKS * max(4, min(32, run["world_size"])) // 4)


def rows_of(num_ranks: int, num_variants: int) -> Rows:
    """Rows that let all variants be seen at once, and each still be read."""
    height = max(9.0, min(20.0, 360 / (num_ranks * num_variants)))
    return Rows(round(height, 1), 6 if height > 12 else 3)


def idle_words(run: Run, scene: Scene) -> str:
    """How much of the ranks' time is bubble, as run.json has it; else what is idle of the step that is drawn; of one
    that computes nothing there is none."""
    for claim in run["comparisons"]:
        if (claim["variant"], claim["name"]) == (scene.variant, "bubble"):
            return f"idle {claim['measured']:.0%}, {claim['predicted']:.0%} by {claim['formula'] or 'the formula'}"
    return f"idle {scene.idle:.0%}" if scene.computes else ""


def told(run: Run, scene: Scene) -> str:
    """Beside a variant's name: its length and its idle share."""
    return " · ".join(filter(None, [f"{milliseconds(scene.step_s)} ms", idle_words(run, scene)]))


def ticks(longest_s: float) -> list[tuple[float, str]]:
    """Round milliseconds along the axis."""
    longest_ms = 1000 * longest_s
    step_ms = next(
        step
        for power in range(-4, 9)
        for step in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)
        if longest_ms / step <= MOST_TICKS
    )
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
