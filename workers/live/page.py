"""The page: one document that fetches nothing but snapshots of its own server, and holds nothing that acts on a run.

What a rank wrote reaches it as JSON and becomes text, never markup (script.py). The policy names the script and the
style by their hashes, so that nothing else on the page could run.
"""

import base64
import hashlib

from workers.live.script import SCRIPT
from workers.report.style import STYLE

OWN_STYLE = """
header.waiting, header.running { --tone: var(--accent); }
tr.lost td { background: var(--bad-back); }
tr.lost .phase { color: var(--bad); }
tr.ended td, tr.unseen td { color: var(--soft); }
#ranks td, #ranks th { padding-right: 1.1rem; }
#ranks .rank, #ranks .step, #ranks .since, #ranks .sends { white-space: nowrap; }
#chart { width: 100%; height: 15rem; display: block; }
#chart text { fill: var(--soft); font-size: .75rem; }
#chart .grid { stroke: var(--line); }
#chart polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
.c0 { --hue: #2563eb; } .c1 { --hue: #d9480f; } .c2 { --hue: #2b8a3e; } .c3 { --hue: #ae3ec9; }
.c4 { --hue: #0b7285; } .c5 { --hue: #c2255c; } .c6 { --hue: #866118; } .c7 { --hue: #5f6b7a; }
#chart polyline { stroke: var(--hue); } .key i { background: var(--hue); }
footer { color: var(--soft); font-size: .9rem; }
@media (prefers-color-scheme: dark) {
  .c0 { --hue: #74a9ff; } .c1 { --hue: #ff8a4c; } .c2 { --hue: #63d083; } .c3 { --hue: #e08df5; }
  .c4 { --hue: #4fc7dd; } .c5 { --hue: #ff7faa; } .c6 { --hue: #d9b45b; } .c7 { --hue: #a9b4c2; }
}
@media (prefers-reduced-motion: no-preference) { #ranks td { transition: background-color .3s; } }
@media (max-width: 40rem) {
  #ranks, #ranks tbody { display: block; min-width: 0; }
  #ranks thead { position: absolute; clip-path: inset(50%); }
  #ranks tr { display: grid; grid-template-columns: 1fr 1fr; border-bottom: 1px solid var(--line); padding: .4rem 0; }
  #ranks td { border: 0; padding: .15rem .4rem; white-space: normal !important; }
  #ranks td:empty { display: none; }
  #ranks .phase, #ranks .sends, #ranks .host { grid-column: 1 / -1; }
  #ranks td[data-label]::before { content: attr(data-label) " "; color: var(--soft); }
}
"""
LOOK = STYLE + OWN_STYLE


def hashed(text: str) -> str:
    """How a policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {hashed(SCRIPT)}; style-src {hashed(LOOK)}; img-src data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

BODY = """
<header id="top" class="waiting">
<p class="verdict" role="status" aria-live="polite"><span id="word" class="chip soft">waiting</span>
<span id="sentence"></span></p>
<h1 id="run">ranklab</h1>
<p class="sub" id="sub">waiting for a run to begin</p>
<noscript><p>This page needs JavaScript; /state has the same as JSON.</p></noscript>
</header>
<section aria-labelledby="h-ranks"><h2 id="h-ranks">Ranks</h2>
<div class="scroll" tabindex="0"><table id="ranks"><thead><tr><th>rank<th>state<th>variant<th>step<th>phase<th>for
<th>waits for<th>sends<th>host</tr></thead><tbody></tbody></table></div></section>
<section aria-labelledby="h-loss"><h2 id="h-loss">Loss</h2>
<p class="note">Of the whole batch, in the timed pass.</p>
<div class="key" id="key"></div><svg id="chart" role="img" aria-label="no loss yet"></svg></section>
<section aria-labelledby="h-bytes"><h2 id="h-bytes">Bytes by peer</h2>
<p class="note">What the sockets of a row's rank have sent to each other rank since the run began.</p>
<div class="scroll matrix" tabindex="0"><table id="bytes"><thead></thead><tbody></tbody></table></div></section>
<section id="unread" hidden><h2>Not shown</h2><ul id="faults"></ul></section>
<footer id="foot">This page reads what the ranks write, and can do nothing else.</footer>
"""


def page() -> str:
    """The whole document."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">',
            f"<title>ranklab live</title>\n<style>{LOOK}</style>\n</head>\n<body>\n<main>",
            f"{BODY}</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )
