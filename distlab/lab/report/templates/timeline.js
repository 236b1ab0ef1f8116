// Describes the mark under the pointer of the timeline, and plays the step at a hundredth of its speed.
// It reads the drawing: a bar's place is its time, a line's ends are its message. Keys work while the timeline has the
// focus: left and right move the moment, space plays, + and - zoom, i shows the schedule on paper.
for (const figure of document.querySelectorAll('.picture')) {
  const find = name => figure.querySelector(name), all = name => [...figure.querySelectorAll(name)];
  const longest = +figure.dataset.ms, slider = find('.moment'), play = find('.play'), status = find('.status');
  const tracks = find('.tracks'), track = find('.track'), tip = find('.tip');
  const names = {recv: 'receive'}, at = value => parseFloat(value) / 100 * longest;
  const ms = value => value.toPrecision(3) + ' ms';
  const size = n => n < 1e3 ? n + ' B' : n < 1e6 ? (n / 1e3).toPrecision(3) + ' kB' : (n / 1e6).toPrecision(3) + ' MB';
  const get = (mark, name) => mark.getAttribute(name);
  let zoom = 1, playing = 0;

  function what(mark) {
    if (mark.matches('.message')) {
      const [from, to] = mark.dataset.r.split(',');
      return `rank ${from} to rank ${to}: ${size(+mark.dataset.b)} in ${ms(at(get(mark, 'x2')) - at(get(mark, 'x1')))}`;
    }
    const band = mark.closest('.band');
    if (band) return band.dataset.l;
    const rank = mark.closest('g').dataset.r, kind = mark.classList[0], label = mark.dataset.l;
    const length = ms(at(get(mark, 'width')));
    if (kind === 'idle') return `rank ${rank}: ${figure.dataset.rest}`;
    const whose = /ward$/.test(kind) ? ' of microbatch ' : ' ';
    return `rank ${rank}: ${kind}${label ? whose + label : ''}, ${length}`;
  }

  // --- under the pointer ---
  tracks.addEventListener('pointermove', event => {
    const mark = event.target.closest('rect, line, circle');
    tip.hidden = !mark || mark.matches('.later, .head');
    if (tip.hidden) return;
    tip.textContent = what(mark);
    const box = figure.getBoundingClientRect();
    tip.style.left = Math.min(event.clientX - box.left + 12, box.width - tip.offsetWidth - 4) + 'px';
    tip.style.top = event.clientY - box.top + 16 + 'px';
  });
  tracks.addEventListener('pointerleave', () => { tip.hidden = true; });

  // --- the moment ---
  const SVG = 'http://www.w3.org/2000/svg';
  const make = (panel, tag, look) => {
    const part = document.createElementNS(SVG, tag);
    part.setAttribute('class', look);
    panel.append(part);
    return part;
  };
  const panels = all('svg.panel').map(panel => ({
    later: make(panel, 'rect', 'later'), head: make(panel, 'line', 'head'), panel, dots: [],
    rows: [...panel.querySelectorAll('g[data-r]')].map(row => [row.dataset.r, [...row.querySelectorAll('rect')]]),
    messages: [...panel.querySelectorAll('.message')].map(line =>
      ['x1', 'x2', 'y1', 'y2'].map(name => parseFloat(get(line, name)))),
  }));
  function show(percent) {
    const x = percent + '%', shown = percent < 100;
    for (const {panel, later, head, messages, dots} of panels) {
      for (const [name, value] of [['x', x], ['y', 0], ['width', 100 - percent + '%'], ['height', '100%']])
        later.setAttribute(name, value);
      for (const [name, value] of [['x1', x], ['x2', x], ['y1', 0], ['y2', '100%']]) head.setAttribute(name, value);
      head.style.display = later.style.display = shown ? '' : 'none';
      const flying = shown ? messages.filter(([from, to]) => from <= percent && percent < to) : [];
      while (dots.length < flying.length) dots.push(make(panel, 'circle', 'dot'));
      dots.forEach((dot, index) => {
        dot.style.display = index < flying.length ? '' : 'none';
        if (index >= flying.length) return;
        const [from, to, up, down] = flying[index], share = (percent - from) / (to - from || 1);
        dot.setAttribute('cx', x); dot.setAttribute('cy', up + share * (down - up)); dot.setAttribute('r', 4);
      });
    }
    slider.value = percent;
    slider.setAttribute('aria-valuetext', ms(percent / 100 * longest));
  }
  function report() {
    const percent = +slider.value;
    const inside = rect => parseFloat(get(rect, 'x')) <= percent
      && percent < parseFloat(get(rect, 'x')) + parseFloat(get(rect, 'width'));
    const lines = panels.filter(({panel}) => panel.dataset.v).map(({panel, rows}) => panel.dataset.v + ': '
      + rows.map(([rank, rects]) => { const mark = rects.filter(inside).pop();
          return mark ? what(mark) : `rank ${rank} is done`; }).join('; '));
    status.textContent = percent < 100 ? `${ms(percent / 100 * longest)}. ${lines.join('. ')}` : '';
  }
  function stop() { cancelAnimationFrame(playing); playing = 0; play.textContent = '▶ 1/100 speed'; report(); }
  function start() {
    let last = performance.now(), percent = +slider.value >= 100 ? 0 : +slider.value;
    play.textContent = '❚❚ stop'; status.textContent = '';
    const frame = now => {
      percent = Math.min(100, percent + (now - last) / 100 / longest * 100); last = now;
      show(percent);
      if (percent < 100) playing = requestAnimationFrame(frame); else stop();
    };
    playing = requestAnimationFrame(frame);
  }
  play.addEventListener('click', () => playing ? stop() : start());
  slider.addEventListener('input', () => { if (playing) stop(); show(+slider.value); report(); });

  // --- the figure elsewhere: as a trace for Perfetto ---
  function trace() {  // the format of chrome://tracing: a process per variant, a thread per rank, microseconds
    const events = [];
    all('svg.panel[data-v]').forEach((panel, pid) => {
      events.push({ph: 'M', pid, name: 'process_name', args: {name: panel.dataset.v}});
      panel.querySelectorAll('g[data-r]').forEach(row => row.querySelectorAll('rect:not(.idle)').forEach(bar => {
        const name = bar.classList[0] + (bar.dataset.l ? ' ' + bar.dataset.l : '');
        events.push({ph: 'X', pid, tid: +row.dataset.r, name, ts: 1000 * at(get(bar, 'x')), dur: 1000 * at(get(bar, 'width'))});
      }));
    });
    return new TextEncoder().encode(JSON.stringify({traceEvents: events})).buffer;
  }
  find('.perfetto').addEventListener('click', () => {
    const site = 'https://ui.perfetto.dev', opened = window.open(site);
    if (!opened) return;
    const ask = setInterval(() => opened.closed ? clearInterval(ask) : opened.postMessage('PING', site), 100);
    window.addEventListener('message', function answer(event) {
      if (event.source !== opened || event.origin !== site || event.data !== 'PONG') return;
      clearInterval(ask);
      window.removeEventListener('message', answer);
      opened.postMessage({perfetto: {buffer: trace(), title: document.title}}, site);
    });
  });

  // --- zoom, the schedule on paper, keys ---
  function wider(times) {
    const middle = (tracks.scrollLeft + tracks.clientWidth / 2) / track.clientWidth;
    zoom = Math.min(32, Math.max(1, zoom * times));
    track.style.width = 100 * zoom + '%';
    tracks.scrollLeft = middle * track.clientWidth - tracks.clientWidth / 2;
  }
  find('.in').addEventListener('click', () => wider(2));
  find('.out').addEventListener('click', () => wider(0.5));
  const paper = find('.paper');
  if (paper) paper.addEventListener('change', () => figure.classList.toggle('ideal', paper.checked));
  find('.stage').addEventListener('keydown', event => {
    const keys = {
      ArrowRight: () => { show(Math.min(100, (+slider.value >= 100 ? 0 : +slider.value) + 1)); report(); },
      ArrowLeft: () => { show(Math.max(0, +slider.value - 1)); report(); },
      Home: () => { show(0); report(); }, End: () => { show(100); report(); },
      ' ': () => play.click(), '+': () => wider(2), '-': () => wider(0.5), i: () => paper && paper.click(),
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  show(100);
}
