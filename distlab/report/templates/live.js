// The live page: a snapshot comes four times a second, and what differs from the one before is written anew.
// Text is set as text, never as markup. A table's cells stay the same elements, so that a reader's selection and the
// place of a screen reader stay too.
"use strict";
const byId = id => document.getElementById(id);
const CHIPS = {running: "good", waiting: "warn", lost: "bad", out: "bad", ended: "soft", unseen: "soft", pass: "good", fail: "bad",
               refused: "warn"};
const COLUMNS = ["rank", "how", "variant", "step", "phase", "since", "waits", "sends", "host"];
const LABELS = {variant: "variant", step: "step", since: "for", waits: "waits for", sends: "sends"};
const RATE_S = 2;     // a rate is that of so many seconds
const seen = [];      // the snapshots of these

function write(node, text) { if (node.textContent !== text) node.textContent = text; }

function dress(node, name) { if (node.getAttribute("class") !== name) node.setAttribute("class", name); }

function add(parent, tag, name) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  parent.append(node);
  return node;
}

// As many children as there are things to show: those that are there stay.
function children(parent, count, make) {
  while (parent.children.length > count) parent.lastElementChild.remove();
  while (parent.children.length < count) make(parent);
  return [...parent.children];
}

function bytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (count >= size) return (count / size).toPrecision(3) + " " + unit;
  return Math.round(count) + " B";
}

function show(now) {
  seen.push(now);
  while (seen.length > 2 && (now.clock_s - seen[0].clock_s > RATE_S || seen[0].run_id !== now.run_id)) seen.shift();
  const over = !["waiting", "running"].includes(now.verdict);
  dress(byId("top"), now.verdict);
  dress(byId("word"), "chip " + (now.verdict === "running" ? "soft" : CHIPS[now.verdict] || "warn"));
  write(byId("word"), over ? now.verdict.toUpperCase() : now.verdict);
  write(byId("sentence"), now.sentence);
  write(byId("run"), now.run_id || "distlab");
  write(byId("sub"), now.run_id ? `${now.run_mode} on ${now.ranks.length} ranks` : "waiting for a run to begin");
  byId("progress").hidden = !now.progress;
  write(byId("left"), now.progress);
  const bar = byId("bar");
  if (now.share === null) bar.removeAttribute("value"); else bar.value = now.share;
  showRanks(now);
  showLosses(now.losses);
  showBytes(now.sent_bytes);
  byId("unread").hidden = !now.faults.length;
  children(byId("faults"), now.faults.length, list => add(list, "li")).forEach((item, i) => write(item, now.faults[i]));
}

function showRanks(now) {
  const makeRow = body => { const row = add(body, "tr"); COLUMNS.forEach(name => {
    const cell = add(row, "td", name);
    if (LABELS[name]) cell.dataset.label = LABELS[name];
    if (name === "how") add(cell, "span"); }); };
  children(byId("ranks").tBodies[0], now.ranks.length, makeRow).forEach((row, i) => {
    const rank = now.ranks[i], gone = ["lost", "out", "ended", "unseen"].includes(rank.how);
    const text = {
      rank: "rank " + rank.rank, variant: rank.variant,
      step: rank.host ? rank.step + (rank.work === rank.variant ? " of " + rank.steps : "") : "",
      phase: rank.reason || [rank.work === rank.variant ? "" : rank.work, rank.phase].filter(Boolean).join(": "),
      since: gone ? "" : rank.phase_s.toFixed(2) + " s",
      waits: gone ? "" : rank.waits_for.map(other => "rank " + other).join(", "),
      sends: gone ? "" : sends(now, i), host: rank.host && `${rank.host}, process ${rank.pid}`};
    dress(row, rank.how);
    COLUMNS.forEach((name, column) => {
      const cell = row.children[column];
      if (name !== "how") return write(cell, text[name]);
      write(cell.firstChild, rank.how);
      dress(cell.firstChild, "chip " + CHIPS[rank.how]);
    });
  });
}

// What a rank sends to each other one, a second.
function sends(now, rank) {
  const then = seen[0], passed_s = now.clock_s - then.clock_s;
  const rates = now.sent_bytes[rank].map((sent, peer) =>
    sent === null || !passed_s ? 0 : (sent - ((then.sent_bytes[rank] || [])[peer] || 0)) / passed_s);
  return rates.map((rate, peer) => rate > 0 ? `→${peer} ${bytes(rate)}/s` : "").filter(Boolean).join("  ");
}

function showBytes(sent) {
  const most = Math.max(1, ...sent.flat().map(count => count || 0));
  const rows = [["from", ...sent.map((_, peer) => "to " + peer)], ...sent.map((row, rank) => ["rank " + rank,
    ...row.map(count => count === null ? "-" : bytes(count))])];
  const head = children(byId("bytes").tHead, 1, part => add(part, "tr"));
  const body = children(byId("bytes").tBodies[0], sent.length, part => add(part, "tr"));
  [...head, ...body].forEach((row, i) => children(row, rows[i].length, parent => add(parent,
    i === 0 || !parent.children.length ? "th" : "td")).forEach((cell, j) => {
      write(cell, rows[i][j]);
      if (i && j) cell.style.setProperty("--share", 40 * (sent[i - 1][j - 1] || 0) / most + "%");
    }));
}

function showLosses(losses) {
  const names = Object.keys(losses).filter(name => losses[name].some(point => point[1] !== null));
  const last = name => losses[name].filter(point => point[1] !== null).at(-1);
  byId("loss").hidden = !names.length;
  children(byId("key"), names.length, key => { const entry = add(key, "span"); add(entry, "i"); add(entry, "span"); })
    .forEach((entry, i) => { dress(entry, "c" + i % 8);
      write(entry.lastChild, `${names[i]} ${last(names[i])[1].toPrecision(4)}`); });
  byId("chart").setAttribute("aria-label", names.map(name => `${name}: ${last(name)[1]} at step ${last(name)[0]}`)
    .join("; ") || "no loss yet");
  draw(byId("chart"), names.map(name => losses[name]));
}

function svg(parent, tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(attributes).forEach(([name, value]) => node.setAttribute(name, value));
  if (text !== undefined) node.textContent = text;
  parent.append(node);
}

function draw(chart, curves) {
  const width = chart.clientWidth, height = chart.clientHeight, left = 52, bottom = 22, top = 8, right = 8;
  const points = curves.flat().filter(point => point[1] !== null);
  chart.replaceChildren();
  if (!points.length || !width) return;
  const values = points.map(point => point[1]), low = Math.min(...values), high = Math.max(...values, low + 1e-9);
  const end = Math.max(1, ...points.map(point => point[0]));
  const x = step => left + (width - left - right) * step / end;
  const y = loss => top + (height - top - bottom) * (high - loss) / (high - low);
  for (const loss of [low, (low + high) / 2, high]) {
    svg(chart, "line", {class: "grid", x1: left, x2: width - right, y1: y(loss), y2: y(loss)});
    svg(chart, "text", {x: left - 6, y: y(loss) + 4, "text-anchor": "end"}, loss.toPrecision(3));
  }
  svg(chart, "text", {x: left, y: height - 5}, "step 0");
  svg(chart, "text", {x: width - right, y: height - 5, "text-anchor": "end"}, "step " + end);
  const placed = part => part.map(([step, loss]) => `${x(step).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
  curves.forEach((curve, i) => stretches(curve).forEach(part =>
    svg(chart, "polyline", {class: "c" + i % 8, points: placed(part)})));
}

// A curve without the steps at which the loss was no number: where there is one, the line breaks.
function stretches(curve) {
  const parts = [[]];
  curve.forEach(point => point[1] === null ? parts.push([]) : parts.at(-1).push(point));
  return parts.filter(part => part.length);
}

const source = new EventSource("events");
source.onmessage = event => show(JSON.parse(event.data));
source.onerror = () => write(byId("foot"), "The server of this page does not answer; what is shown is as old as that.");
source.addEventListener("end", event => {
  source.close();
  show(JSON.parse(event.data));
  write(byId("foot"), "This page has ended with its server. The run's own report is report.html in its folder.");
});
