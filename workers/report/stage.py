"""The picture as a section of the page: all panels on one axis, what plays them, and what is said below."""

from collections.abc import Iterator, Sequence

from workers.report import panels
from workers.report.claims import Run
from workers.report.frame import DEFINED, drawn_scenes, key, rows_of, ticks, told
from workers.report.judge import PROOF, SCRIPT
from workers.report.looks import LOOK, PAGE_LOOK
from workers.report.markup import Markup, section, text
from workers.report.panels import Rows
from workers.report.player import PLAYER
from workers.report.records import Ranks
from workers.report.scene import Scene
from workers.report.units import human_bytes

ICON = '<svg viewBox="0 0 14 14">'
KEYS = "Keys: left and right move the moment, space plays, + and - zoom"


def stage(run: Run, records: Ranks) -> Markup:
    """The section, or nothing where no step was recorded."""
    found = drawn_scenes(run, records)
    if not found:
        return Markup()
    longest_s = max(scene.step_s for scene in found)
    rows = rows_of(run["world_size"], len(found))
    body = Markup(
        f'<div class="picture" data-ms="{1000 * longest_s:.6g}"><style>{LOOK}{PAGE_LOOK}</style>'
        f'<svg width="0" height="0" aria-hidden="true" style="position:absolute">{DEFINED}</svg>'
        f'{shown_key(found)}<div class="stage" tabindex="0" role="group" aria-label="{text(KEYS)}">'
        f'<div class="ranks" aria-hidden="true">{ranks(found, rows)}</div><div class="tracks"><div class="track">'
        f"{''.join(part for scene in found for part in variant(run, scene, rows, longest_s))}{axis(longest_s)}"
        f"</div></div></div>{controls(found)}"
        f'<div class="told" aria-live="polite"></div><div class="tip" hidden></div></div><script>{PLAYER}</script>'
    )
    return section(heading(run, found), body, *notes(run, found))


def heading(run: Run, found: Sequence[Scene]) -> str:
    """What is seen."""
    ranks = f"{run['world_size']} rank{'s' if run['world_size'] > 1 else ''}"
    if run["run_mode"] in (SCRIPT, PROOF):
        return f"What {ranks} call, by the lines of the script"
    return f"What {ranks} do: {len(found)} variants on one axis of time" if len(found) > 1 else f"What {ranks} do"


def shown_key(found: Sequence[Scene]) -> str:
    """The colours that were used, what is hatched, and what lines are."""
    shown = "".join(
        f'<span>{ICON}<rect class="{look}" x="1" y="1" width="12" height="12"/></svg>{text(name)}</span>'
        for look, name in key(found)
    )
    bands, arrows = any(scene.bands for scene in found), any(scene.arrows for scene in found)
    if bands:
        dot = '<g class="band"><rect y="9" width="14" height="3"/><circle cx="9" cy="10" r="3"/></g>'
        shown += f"<span>{ICON}{dot}</svg>a collective, the dot who came last</span>"
    if arrows:
        shown += f'<span>{ICON}<line class="message" x1="1" y1="1" x2="12" y2="12"/></svg>a message</span>'
    return f'<div class="key">{shown}</div>'


def ranks(found: Sequence[Scene], rows: Rows) -> str:
    """The names of the rows, beside the tracks so that they stay while these are scrolled."""
    one = "".join(
        f'<div style="height:{rows.height + rows.gap:g}px">rank {rank}</div>' for rank in range(len(found[0].of_ranks))
    )
    return "".join(f'<div style="height:1.5rem"></div>{one}<div style="height:2px"></div>' for _ in found)


def variant(run: Run, scene: Scene, rows: Rows, longest_s: float) -> Iterator[str]:
    """A variant's line of words, its panel, and its schedule on paper where there is one."""
    height = rows.whole(len(scene.of_ranks))
    name = text(scene.variant)
    yield f'<div class="variant"><b>{name}</b><span>{text(told(run, scene))}</span></div>'
    has_ideal = " measured" if scene.ideal else ""
    yield (
        f'<svg class="panel{has_ideal}" data-v="{name}" height="{height:g}" role="img"'
        f' aria-label="what each rank did in a step of {name}">{panels.panel(scene, rows, longest_s)}</svg>'
    )
    if scene.ideal:
        drawing = panels.ideal(scene.ideal, rows, longest_s)
        yield f'<svg class="panel ideal" height="{height:g}" role="img" aria-label="{name} on paper">{drawing}</svg>'


def axis(longest_s: float) -> str:
    """Round milliseconds below all panels."""
    marks = "".join(
        f'<line x1="{panels.percent(at_s, longest_s)}" x2="{panels.percent(at_s, longest_s)}" y1="0" y2="5"/>'
        f'<text x="{panels.percent(at_s, longest_s)}" y="17" dx="{0 if not at_s else -8}">{text(name)}</text>'
        for at_s, name in ticks(longest_s)
    )
    return f'<svg class="axis" aria-hidden="true">{marks}</svg>'


def controls(found: Sequence[Scene]) -> str:
    """What plays, zooms, and shows the schedule on paper."""
    paper = (
        '<label><input type="checkbox" class="paper"> the schedule on paper, if no message took time</label>'
        if any(scene.ideal for scene in found)
        else ""
    )
    return (
        '<div class="controls"><button type="button" class="play">▶ 1/100 speed</button>'
        '<input type="range" class="moment" min="0" max="100" step="0.1" value="100" aria-label="moment of the step">'
        '<button type="button" class="out" aria-label="zoom out">-</button>'
        f'<button type="button" class="in" aria-label="zoom in">+</button>{paper}</div>'
    )


def notes(run: Run, found: Sequence[Scene]) -> Iterator[Markup]:
    """From what it was drawn, how many bytes it holds beside those of the sockets, and what was cut."""
    if run["run_mode"] in (SCRIPT, PROOF):
        yield Markup('<p class="note">From the first call on; the lines stand under the pointer.</p>')
        return
    sockets = {variant["name"]: variant["wire_bytes"] for variant in run["variants"]}
    parts = [
        "One recorded step of each variant, of three the one of median length, on rank 0's clock; no timed step is"
        " recorded."
    ]
    for scene in found:
        wire, sent = sockets.get(scene.variant, [None])[0], scene.sent_bytes[0]
        if sent:
            counted = f", and its sockets {human_bytes(wire * scene.steps)}" if wire else ""
            counted += f" in {scene.steps} steps" if scene.steps > 1 else ""
            parts.append(f"{scene.variant}: rank 0 sends {human_bytes(sent)}{counted}.")
    parts += [f"{scene.variant}: {scene.cut}." for scene in found if scene.cut]
    yield Markup(f'<p class="note">{text(" ".join(parts))}</p>')
