"""The page of the gallery: a filter, and a card a run, in one file that fetches nothing.

Its own are a style and twenty lines of script; without script all cards are there.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from workers.report.entry import Entry
from workers.report.markup import Markup, chip, document, text
from workers.report.spans import KINDS
from workers.report.units import human_bytes

STYLE = """
.filter label { display: inline-flex; align-items: center; gap: .4rem; margin: 0 1.1rem 0 0; min-height: 1.9rem; }
.filter fieldset { border: 0; margin: .5rem 0 0; padding: 0; }
.filter legend { padding: 0; font-size: .85rem; color: var(--soft); font-weight: 600; }
.filter input[type=search] {
  font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--soft); border-radius: 8px;
  padding: .4rem .6rem; width: min(100%, 30rem);
}
.filter [type=checkbox] { width: 1.1rem; height: 1.1rem; accent-color: var(--accent); }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
.cards {
  list-style: none; margin: 0; padding: 0; display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr));
}
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: .9rem 1rem; min-width: 0;
}
.card[hidden] { display: none; }
.card h2 { font-size: 1rem; margin: .5rem 0 .2rem; overflow-wrap: anywhere; }
.card p { font-size: .9rem; margin: .2rem 0; overflow-wrap: anywhere; }
.card .soft:not(.chip), .card figcaption { color: var(--soft); font-size: .82rem; font-weight: 400; }
.card .wrong { color: var(--bad); }
.card a { color: var(--accent); }
.picture {
  height: 112px; display: grid; align-items: center; background: var(--paper); border-radius: 8px; padding: 8px;
}
.picture svg { width: 100%; fill: none; stroke-width: 5; display: block; }
.picture polyline { stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.picture .idle { stroke: var(--line); }
.picture span { justify-self: center; font-size: 1.6rem; color: var(--soft); }
"""

# A card is shown if each word that was typed is in its text, and its verdict and its mode are ticked or none is.
SCRIPT = """
const cards = [...document.querySelectorAll('.card')], words = document.getElementById('words');
const told = cards.map(card => card.textContent.toLowerCase());
const ticked = name => [...document.querySelectorAll(`[name=${name}]:checked`)].map(box => box.value);
function filter() {
  const typed = words.value.toLowerCase().split(' ').filter(Boolean);
  const [verdicts, modes] = [ticked('verdict'), ticked('mode')];
  cards.forEach((card, index) => {
    card.hidden = !(typed.every(word => told[index].includes(word))
      && (!verdicts.length || verdicts.includes(card.dataset.verdict))
      && (!modes.length || modes.includes(card.dataset.mode)));
  });
  const shown = cards.filter(card => !card.hidden).length;
  document.getElementById('count').textContent = `${shown} of ${cards.length} runs shown`;
}
document.querySelector('.filter').addEventListener('input', filter);
filter();
"""


def gallery_page(entries: Sequence[Entry], others: Sequence[str], where: Path, path: Path) -> str:
    """The whole page as HTML; `where` are the runs, `others` what is there and is no run, and `path` where the page
    will lie, which links start from."""
    title = f"Runs in {where}"
    total = human_bytes(sum(entry.stored.nbytes for entry in entries))
    what = f"{len(entries)} {'run' if len(entries) == 1 else 'runs'}, {total} on the disk, the newest first"
    head = (
        f'<header class="plain"><h1>{text(title)}</h1><p class="sub">{text(what)}</p>{key()}{left_out(others)}</header>'
    )
    cards = "\n".join(card(entry, path) for entry in entries)
    return document(
        title,
        [
            f"<style>{STYLE}</style>",
            head,
            filters(entries) if entries else "<p>No run yet: the next one will be the first.</p>",
            f'<ol class="cards">\n{cards}\n</ol>',
            f"<script>{SCRIPT}</script>" if entries else "",
        ],
    )


def key() -> Markup:
    """What the colours of the pictures are."""
    names: dict[str, str] = {}  # by colour: receive and wait share theirs
    for name, hue, _ in KINDS.values():
        names[hue] = f"{names[hue]} or {name}" if hue in names else name
    marks = "".join(f'<span><i style="background:{hue}"></i>{name}</span>' for hue, name in names.items())
    return Markup(f'<div class="key">{marks}<span><i class="idle"></i>idle</span></div>')


def left_out(others: Sequence[str]) -> str:
    """What is in the folder and is no run."""
    return f'<p class="sub">Not here: {text("; ".join(others))}.</p>' if others else ""


def filters(entries: Sequence[Entry]) -> str:
    """The search, and a box a verdict and a mode, each with its number of runs."""
    return (
        '<section class="filter" role="search" aria-label="runs">'
        '<label for="words">Search</label><input type="search" id="words" autocomplete="off" '
        'placeholder="words such as ring LAB_WIDTH=32">'
        + boxes("verdict", (entry.verdict.word for entry in entries))
        + boxes("mode", (entry.verdict.mode or "unknown" for entry in entries))
        + f'<p class="sub" id="count" role="status">{len(entries)} runs</p></section>'
    )


def boxes(name: str, values: Iterable[str]) -> str:
    """A box for each value that there is, the most frequent first."""
    made = "".join(
        f'<label><input type="checkbox" name="{name}" value="{text(value)}">{text(value)} ({number})</label>'
        for value, number in Counter(values).most_common()
    )
    return f"<fieldset><legend>{name}</legend>{made}</fieldset>"


def card(entry: Entry, path: Path) -> str:
    """One run."""
    folder, verdict, drawing = entry.stored.folder, entry.verdict, entry.thumbnail
    size = f" · {verdict.world_size} {'rank' if verdict.world_size == 1 else 'ranks'}" if verdict.world_size else ""
    latest = ' <span class="chip soft">latest</span>' if entry.stored.latest else ""
    when = moment(entry.began_at)
    took = f"{when} · {entry.duration_s:.1f} s" if entry.duration_s is not None else f"last wrote {when}"
    mode = verdict.mode or "unknown mode"
    soft = [entry.title, ", ".join(verdict.variants), f"{took} · {human_bytes(entry.stored.nbytes)}"]
    return (
        f'<li class="card" data-verdict="{text(verdict.word)}" data-mode="{text(verdict.mode or "unknown")}">'
        f'<figure><div class="picture">{drawing.drawing}</div><figcaption>{text(drawing.told)}</figcaption></figure>'
        f"<h2>{name(folder, path)}</h2>"
        f"<p>{chip(verdict.word.upper())} {text(mode)}{size}{latest}</p>"
        f"<p>{text(verdict.told)}</p>"
        + "".join(f'<p class="wrong">{text(fault)}</p>' for fault in entry.faults)
        + "".join(f'<p class="soft">{text(line)}</p>' for line in soft if line)
        + (f'<p class="soft"><code>{text(" ".join(entry.settings))}</code></p>' if entry.settings else "")
        + "</li>"
    )


def moment(at: float) -> str:
    """A Unix time as a date, and what is none as a number."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return f"{at:g} s after 1970"


def name(folder: Path, path: Path) -> str:
    """The run's name, which leads to its report where there is one."""
    report = folder / "report.html"
    if not report.is_file():
        return f'{text(folder.name)} <span class="soft">no report.html</span>'
    link = quote(os.fsencode(os.path.relpath(report.resolve(), path.parent.resolve())))
    return f'<a href="{text(link)}">{text(folder.name)}</a>'
