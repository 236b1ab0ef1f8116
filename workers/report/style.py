"""How the pages look: one style sheet, light and dark by the reader's own setting, from a phone to a wide screen.

What a chart is made of is styled by charts.py, the picture by looks.py.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #f4f6f9; --card: #ffffff; --ink: #18202b; --soft: #566274; --line: #dfe4eb; --accent: #2563eb;
  --good: #0b6b38; --good-back: #dff5e7; --bad: #b01e1e; --bad-back: #fde5e3; --warn: #80500a; --warn-back: #fdf0d5;
  --hatch: #c3ccd8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #0d1117; --card: #151b24; --ink: #e6ebf2; --soft: #a0adbd; --line: #2a3442; --accent: #6ba4ff;
    --good: #6fdd9c; --good-back: #123524; --bad: #ff9a92; --bad-back: #431a1a; --warn: #f0c069; --warn-back: #3a2c0e;
    --hatch: #3d4a5c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: break-word;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
}
main { max-width: 70rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: .7rem 0 .2rem; letter-spacing: -.015em; }
h2 { font-size: 1.15rem; margin: 0 0 .6rem; letter-spacing: -.01em; }
h3 { font-size: .95rem; margin: 1rem 0 .4rem; }
p { margin: .4rem 0; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .875em; }
pre { margin: .4rem 0; overflow-x: auto; line-height: 1.45; }
header, section {
  background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 1.2rem 1.3rem; margin: 0 0 1rem;
}
header { border-top: 6px solid var(--tone); }
header.pass { --tone: var(--good); } header.fail { --tone: var(--bad); }
header.lost, header.refused { --tone: var(--warn); } header.plain { --tone: var(--accent); }
.note, .sub { color: var(--soft); font-size: .9rem; max-width: 62rem; }
.note { margin: -.3rem 0 .8rem; }
.verdict { display: flex; flex-wrap: wrap; align-items: center; gap: .6rem; }
.mistake { border-left: 4px solid var(--warn); margin: .8rem 0; padding: 0 0 0 .8rem; }
.chip {
  display: inline-block; padding: .08rem .6rem; border-radius: 99px; font-size: .82rem; font-weight: 600;
  white-space: nowrap;
}
.chip.good { color: var(--good); background: var(--good-back); }
.chip.bad { color: var(--bad); background: var(--bad-back); }
.chip.warn { color: var(--warn); background: var(--warn-back); }
.chip.soft { color: var(--soft); border: 1px solid var(--line); }
.verdict .chip { font-size: 1rem; padding: .2rem .9rem; letter-spacing: .04em; }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 11rem), 1fr)); gap: .8rem;
  margin: 1.1rem 0;
}
.tiles.two { grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)); }
.two b { overflow-wrap: anywhere; }
.tile { border: 1px solid var(--line); border-radius: 10px; padding: .7rem .9rem; background: var(--paper); }
.tile b {
  display: block; font-size: 1.45rem; line-height: 1.3; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums;
}
.tile > span:not(.chip) { color: var(--soft); font-size: .85rem; display: block; }
.command {
  background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem;
  white-space: pre-wrap; user-select: all;
}
.said { border-left: 3px solid var(--line); padding-left: .9rem; margin: .7rem 0; }
.said b { color: var(--soft); font-size: .78rem; text-transform: uppercase; letter-spacing: .06em; }
summary { cursor: pointer; color: var(--accent); font-size: .9rem; padding: .3rem 0; }
.scroll { overflow-x: auto; margin: .3rem 0; }
table {
  border-collapse: collapse; min-width: min(100%, 34rem); font-size: .9rem; font-variant-numeric: tabular-nums;
}
th, td { text-align: left; padding: .38rem 2rem .38rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; font-size: .82rem; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
td.w { min-width: 13rem; }
td.n, th.n { text-align: right; white-space: nowrap; }
td:last-child, th:last-child { padding-right: 0; }
b.bad { color: var(--bad); }
.grid {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--column, 19rem)), 1fr));
  gap: 1.2rem 1.6rem;
}
figure { margin: 0; min-width: 0; }
figure table { min-width: 0; }
figcaption { font-weight: 600; font-size: .92rem; }
.matrix table {
  width: 100%; font-size: .76rem; table-layout: fixed; border-collapse: separate; border-spacing: 2px;
  min-width: var(--least);
}
.matrix th, .matrix td { padding: .22rem .25rem; border: 0; text-align: right; }
.matrix tbody th { font-weight: 600; }
.matrix td {
  background: color-mix(in srgb, var(--accent) var(--share, 0%), transparent); border-radius: 4px;
  white-space: nowrap;
}
.key {
  display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .85rem; color: var(--soft);
  margin-bottom: .5rem;
}
.key i {
  display: inline-block; width: .8rem; height: .8rem; border-radius: 3px; margin-right: .4rem;
  vertical-align: -.08rem;
}
.key i.idle { border: 1px solid var(--line); }
/* charts */
.chart { min-width: 0; max-width: 44rem; margin: .2rem 0; }
.paper-only { display: none; }
@media print {
  @page { size: A4; margin: 12mm; }
  :root { color-scheme: light; }
  body { background: none; font-size: 10.5px; }
  main { max-width: none; padding: 0; zoom: .76; }
  header, section { border: 0; padding: 0 0 .5rem; margin: 0 0 .5rem; }
  h1 { font-size: 1.3rem; } h2 { font-size: 1rem; }
  .evidence, .own, .controls, .told, .tip { display: none; }
  .paper-only { display: block; } tbody tr:nth-child(n + 11) { display: none; }
  .scroll, .tracks { overflow: visible; }
  table { font-size: .95em; } th, td { padding: .12rem .8rem .12rem 0; }
  section { break-inside: auto; } .picture { break-inside: avoid; }
}
@media (max-width: 40rem) {
  main { padding: .7rem .6rem 3rem; }
  header, section { padding: 1rem .9rem; border-radius: 12px; }
  h1 { font-size: 1.35rem; }
  .tiles { grid-template-columns: 1fr 1fr; }
  th, td { padding-right: 1.1rem; }
}
"""
