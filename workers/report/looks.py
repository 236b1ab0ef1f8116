"""How the marks of the picture look, on the page and in a file of its own.

Light bars with a strong edge are forward and dark ones backward, both in the colour of their microbatch: strong colours
hold 4.5:1 to white text and 3:1 to both grounds, and light ones are told by their edge. Of a backward pass in two parts
the inputs' gradient, which the stage before waits for, is dark, and what can wait, the weights', lies between.
"""

import re

from workers.report.panels import WIDTHS_PX
from workers.report.spans import KINDS, NUMBERED

# Of a microbatch: the ground of its forward, of its weights' gradients, and of its backward, which is the edge of all.
MICROBATCHES = {
    "blue": ("#bfdbfe", "#72a0f5", "#2563eb"), "orange": ("#fed7aa", "#f09a66", "#c2410c"),
    "teal": ("#99f6e4", "#54c4b4", "#0f766e"), "violet": ("#ddd6fe", "#b79bf8", "#7c3aed"),
    "pink": ("#fbcfe8", "#ea8cbc", "#be185d"), "olive": ("#d9f99d", "#97bf56", "#4d7c0f"),
    "sky": ("#bae6fd", "#62a9d4", "#0369a1"), "stone": ("#e7e5e4", "#a8a29e", "#57534e"),
}  # fmt: skip
LIGHT = {
    "--card": "#ffffff", "--ink": "#18202b", "--soft": "#566274", "--line": "#dfe4eb", "--hatch": "#c3ccd8",
}  # fmt: skip

LOOK = (
    "".join(
        f".{name}{{stroke:{strong}}}.forward.{name}{{fill:{light}}}.weight.{name}{{fill:{middle}}}"
        f".backward.{name},.input.{name}{{fill:{strong}}}"
        for name, (light, middle, strong) in MICROBATCHES.items()
    )
    + "".join(f"rect.{kind}{{stroke-width:.8}}" for kind in NUMBERED)
    + "rect.chunk{stroke-dasharray:3 2;stroke:#18202b}"
    + "".join(f"rect.{kind}{{fill:{hue}}}" for kind, (_, hue, _) in KINDS.items() if kind not in NUMBERED)
    + "".join(f"text.{kind}{{font-size:11px;text-anchor:middle;pointer-events:none}}" for kind in NUMBERED)
    + "text.forward,text.weight{fill:#18202b}text.backward,text.input{fill:#fff}"
    + "rect.idle{fill:url(#hatch)}.hatch{stroke:var(--hatch);stroke-width:1.4}.tip-of{fill:var(--soft)}"
    + ".band rect{fill:#8b4fd8}.band line{stroke:#8b4fd8;stroke-width:1}.band circle{fill:#8b4fd8}"
    + ".message{stroke:var(--soft);stroke-width:1;marker-end:url(#head);opacity:.8}"
)

# On the page alone: what is played, and which numbers have room.
PAGE_LOOK = (
    ".picture{position:relative}"
    ".stage{display:grid;grid-template-columns:auto 1fr;gap:0 .5rem;outline-offset:4px;border-radius:8px}"
    ".ranks{font-size:.72rem;color:var(--soft);text-align:right;white-space:nowrap}"
    ".ranks div{display:flex;align-items:center;justify-content:flex-end}"
    ".tracks{overflow-x:auto;min-width:0}.track{container-type:inline-size;position:relative}"
    ".variant{position:sticky;left:0;width:max-content;max-width:100%;font-size:.85rem;height:1.5rem;white-space:nowrap;"
    "overflow:hidden;text-overflow:ellipsis}.variant span{color:var(--soft);margin-left:.5rem}"
    "svg.panel{display:block;width:100%;overflow:hidden}svg.axis{display:block;width:100%;height:1.4rem}"
    ".axis line,.axis path{stroke:var(--line)}.axis text{font-size:11px;fill:var(--soft)}"
    "svg.ideal{display:none}.ideal svg.ideal{display:block;opacity:.85}.ideal svg.measured{display:none}"
    ".controls{display:flex;flex-wrap:wrap;gap:.3rem .6rem;align-items:center;font-size:.85rem;margin:.4rem 0}"
    ".controls button{font:inherit;color:var(--ink);background:var(--paper);border:1px solid var(--line);"
    "border-radius:8px;padding:.2rem .7rem;cursor:pointer;min-height:1.9rem}"
    ".controls .moment{flex:1 1 8rem;accent-color:var(--accent)}"
    ".later{fill:var(--card);opacity:.82;pointer-events:none}"
    ".head{stroke:var(--accent);stroke-width:2;pointer-events:none}.dot{fill:var(--accent);pointer-events:none}"
    ".tip{position:absolute;z-index:2;background:var(--card);color:var(--ink);border:1px solid var(--soft);"
    "border-radius:8px;padding:.2rem .6rem;font-size:.82rem;pointer-events:none;max-width:22rem}"
    ".told{font-size:.8rem;color:var(--soft);min-height:1.2rem}"
    ".key svg{width:.9rem;height:.9rem;vertical-align:-.1rem;margin-right:.35rem}"
    + "".join(f"@container (max-width:{width - 1}px){{.w{width}{{display:none}}}}" for width in WIDTHS_PX[1:])
)


def resolved(style: str) -> str:
    """With the colours of the light page in the place of its variables, which a file has not."""
    return re.sub(r"var\((--\w+)\)", lambda name: LIGHT[name[1]], style)
