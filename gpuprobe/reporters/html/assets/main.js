// Puts the page together: charts, tables, keys.
const PHASE_COLORS = { forward: "p0", backward: "p1", optimizer: "p2", data: "p3", zero_grad: "p3" };

function ribbonOf(title, spans, times, at) {
  const timeAt = (x) => times ? times[Math.min(Math.max(upTo(at, x) - 1, 0), times.length - 1)] : 0;
  const starts = Float64Array.from(spans, (s) => s[0]), ends = Float64Array.from(spans, (s) => s[1]);
  return {
    title, names: spans.map((s) => s[2]), colors: spans.map((s) => s[3]),
    starts: { events: starts, time: starts.map(timeAt) }, ends: { events: ends, time: ends.map(timeAt) },
  };
}

async function timelineModel(track) {
  const columns = await unpackAll(track.columns), bands = await unpackAll(track.bands), needs = await unpackAll(track.needs);
  const { at, time_us: times, allocated, active, reserved } = columns;
  const hasTime = times.length > 1 && times[times.length - 1] > times[0];
  const ends = new Uint8Array(at.length);
  const chunkStarts = Float64Array.from(track.chunks, (c) => c[1]);
  for (const start of chunkStarts) { const i = upTo(at, start - 1) - 1; if (i >= 0) ends[i] = 1; }
  const ribbons = [];
  const steps = track.chunks.filter((c) => c[0] != null);
  if (steps.length) ribbons.push(ribbonOf("step", steps.map((c, i) => [c[1], c[1] + c[2], String(c[0]), i % 2 ? "p4" : "p0"]), times, at));
  const { names, spans } = track.phases;
  if (spans.length) ribbons.push(ribbonOf("phase", spans.map((s) => [s[0], s[1], names[s[2]], PHASE_COLORS[names[s[2]].split("/")[0]] || "p4"]), times, at));
  const lines = [{ name: "allocated", values: allocated, color: "fg", width: 1.2 }];
  let pendingBytes = false;
  for (let i = 0; i < at.length && !pendingBytes; i++) pendingBytes = active[i] !== allocated[i];
  if (pendingBytes) lines.push({ name: "active", values: active, color: "warn", width: 1 });
  if (reserved) lines.push({ name: "reserved", values: reserved, color: "accent", width: 1.6, dash: [6, 3] });
  const peak = upTo(at, track.peak.at) - 1;
  const place = (position) => {
    const chunk = track.chunks[Math.max(upTo(chunkStarts, position) - 1, 0)];
    return "event " + whole(Math.max(position - chunk[1], 0)) + (chunk[0] != null ? " of step " + chunk[0] : "");
  };
  const life = (start, end) => {
    const chunk = track.chunks[Math.max(upTo(chunkStarts, start) - 1, 0)], last = chunk[1] + chunk[2];
    const from = start <= chunk[1] ? "allocated before the trace" : "allocated at " + place(start);
    const to = end > last ? "not freed in this trace" : "freed at " + place(end);
    const spent = hasTime ? times[Math.max(upTo(at, Math.min(end, last)) - 1, 0)] - times[Math.max(upTo(at, start) - 1, 0)] : 0;
    return from + ", " + to + ": " + whole(Math.min(end, last) - start) + " events" + (spent > 0 ? ", about " + duration(spent) : "");
  };
  return {
    blocks: track.blocks && track.blocks.total ? () => Blocks.of(track.blocks) : null, life, place,
    axes: hasTime ? { events: at, time: times } : { events: at },
    top: allocated, lines, ribbons, ends, peak,
    bands: CATEGORIES.filter((name) => bands[name]).map((name) => ({ name, values: bands[name] })),
    needs: Object.keys(NEEDS).filter((name) => needs[name]).map((name) => ({ name, values: needs[name] })),
    label: "Allocated memory over " + whole(track.events) + " events; the peak is " + human(allocated[peak]) + ". Arrow keys move, plus and minus zoom.",
    describe: (i) => {
      const chunk = track.chunks[Math.max(upTo(chunkStarts, at[i]) - 1, 0)];
      const parts = ["event " + whole(Math.max(at[i] - chunk[1], 0)) + " of " + whole(chunk[2])];
      if (chunk[0] != null) parts.push("step " + chunk[0]);
      for (const ribbon of ribbons) if (ribbon.title === "phase") {
        const found = upTo(ribbon.starts.events, at[i]) - 1;
        if (found >= 0 && at[i] < ribbon.ends.events[found]) parts.push(ribbon.names[found]);
      }
      if (hasTime) parts.push(duration(times[i] - times[0]) + " after the start");
      return parts.join(" · ");
    },
  };
}

// The curve of the other side of a comparison, over this one's events: step by step, and within a
// step by the share of its events; where several of its points fall on one of these, the highest.
async function overlay(model, track, other) {
  const { at, allocated } = await unpackAll({ at: other.columns.at, allocated: other.columns.allocated });
  const here = model.axes.events, highest = new Extremes(allocated), values = new Float64Array(here.length).fill(-1);
  const pairs = track.chunks.map((chunk, i) => [chunk, other.chunks.find((o) => o[0] != null && o[0] === chunk[0]) ?? other.chunks[i]]);
  const mapped = (position, mine, theirs) => theirs[1] + ((position - mine[1]) / Math.max(mine[2], 1)) * theirs[2];
  let pair = 0;
  for (let i = 0; i < here.length; i++) {
    while (pair + 1 < pairs.length && here[i] >= pairs[pair + 1][0][1]) pair++;
    const [mine, theirs] = pairs[pair];
    if (!theirs) continue;
    const first = Math.max(upTo(at, mapped(here[i], mine, theirs)) - 1, 0);
    const inside = i + 1 < here.length && here[i + 1] <= mine[1] + mine[2];
    const end = inside ? Math.max(upTo(at, mapped(here[i + 1], mine, theirs)) - 1, first + 1) : first + 1;
    values[i] = allocated[highest.highest(first, end)];
  }
  model.lines[0].name = track.title;
  model.lines.push({ name: other.title, values, color: "bad", width: 1.6, dash: [2, 2] });
}

async function stepsModel(found) {
  const { index, duration_ns: spent, at_least: least, at_most: peakMost, reserved, end } = await unpackAll(found.columns);
  let peak = 0;
  for (let i = 1; i < least.length; i++) if (least[i] > least[peak]) peak = i;
  const some = (values) => values.some((value) => value >= 0);
  const bounded = least.some((value, i) => peakMost[i] !== value);
  return {
    axes: { steps: index }, top: least.map((v) => Math.max(v, 0)), bands: [], needs: [], ribbons: [], ends: new Uint8Array(index.length), peak,
    lines: [
      { name: bounded ? "peak allocated, at least" : "peak allocated", values: least, color: "fg", width: 1.6 },
      bounded && { name: "peak allocated, at most", values: peakMost, color: "autograd_detail", width: 1 },
      some(end) && { name: "allocated at the end", values: end, color: "optimizer_state", width: 1.6 },
      some(reserved) && { name: "peak reserved", values: reserved, color: "accent", width: 1.6, dash: [6, 3] },
    ].filter(Boolean),
    label: "Memory by step; the highest is " + human(Math.max(least[peak], 0)) + " in step " + index[peak],
    describe: (i) => "step " + whole(index[i]) + " · " + duration(spent[i] / 1000),
  };
}

const drawn = new Map();
async function charts() {
  const kinds = { timeline: [data.tracks, timelineModel], steps: [data.steps, stepsModel] };
  for (const host of document.querySelectorAll("[data-chart]")) {
    const [found, build] = kinds[host.dataset.chart];
    if (!found.length) continue;
    const inside = make("div");
    host.append(inside);
    const show = async (number) => {
      const model = await build(found[number]), before = drawn.get(host);
      const other = kinds.timeline[0] === found ? found.find((track) => track.title && track.title !== found[number].title && track.rank === found[number].rank && track.device === found[number].device) : null;
      if (other) await overlay(model, found[number], other);
      if (before) redraws.splice(redraws.indexOf(before.onRedraw), 1);
      drawn.set(host, new Chart(inside, model));
    };
    if (found.length > 1) {
      const select = make("select", { "aria-label": "which rank and device" });
      found.forEach((track, i) => select.append(make("option", { value: i }, (track.title ? track.title + ": " : "") + "rank " + track.rank + " · " + track.device)));
      const best = found[0].peak ? found.reduce((best, track, i) => (track.peak.bytes > found[best].peak.bytes ? i : best), 0) : 0;
      select.value = best;
      select.addEventListener("change", () => { show(Number(select.value)); });
      host.prepend(make("div", { class: "controls" }, select));
      await show(best);
    } else await show(0);
  }
}

function trees() {
  const found = Object.fromEntries(Object.entries(data.trees || {}).map(([name, flat]) => [name, new Tree(flat)]));
  for (const host of document.querySelectorAll("[data-tree]")) {
    const { stacks, "all frames": whole, ...maps } = found;
    if (host.dataset.tree === "flame") {
      if (stacks) new TreeView(host, whole ? { "your code": stacks, "all frames": whole } : { stacks }, "flame");
      continue;
    }
    if (Object.keys(maps).length) new TreeView(host, maps, "treemap");
  }
}

function tables() {
  for (const host of document.querySelectorAll(".table")) {
    const body = host.querySelector("tbody"), heads = [...host.querySelectorAll("thead th")];
    const value = (row, at) => row.children[at].dataset.v;
    heads.forEach((head, at) => head.firstElementChild?.addEventListener("click", () => {
      const number = head.classList.contains("n"), down = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : number;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows], sign = down ? -1 : 1;
      const shown = rows.filter((row) => !row.classList.contains("more")).length;
      rows.sort((a, b) => sign * (number ? value(a, at) - value(b, at) : value(a, at).localeCompare(value(b, at), "en", { numeric: true })));
      rows.forEach((row, i) => row.classList.toggle("more", i >= shown));
      body.replaceChildren(...rows);
    }));
    const all = host.querySelector("button.all"), filter = host.querySelector("input");
    all?.addEventListener("click", () => {
      const open = host.classList.toggle("open");
      all.textContent = open ? "show fewer" : "show all " + body.rows.length;
    });
    filter?.addEventListener("input", () => {
      const wanted = filter.value.toLowerCase();
      host.classList.toggle("open", Boolean(wanted) || all?.textContent === "show fewer");
      for (const row of body.rows) row.classList.toggle("out", !row.textContent.toLowerCase().includes(wanted));
    });
  }
}

const KEYS = [
  ["?", "this list"], ["d", "light or dark"], ["j  k", "next and previous section"], ["/", "search in the nearest chart or table"],
  ["← →", "in a chart: move the cursor; with Shift: the view"], ["+  −  0", "in a chart: zoom in, zoom out, show all"],
  ["p  f  t", "in a chart: to the peak, fit the height, events or time"],
  ["u", "in the timeline: colour by category, or by use: what the memory is needed for"],
  ["b", "in the timeline: single blocks; then click one, or ↑ and ↓: its stack, size and life"],
  ["Ctrl + wheel", "zoom; drag to move; double click to zoom in"], ["Enter  Esc", "in treemap and flame graph: look inside, go back"],
];
function keys() {
  const dialog = document.getElementById("keys");
  dialog.append(make("h2", {}, "Keys"), make("dl", {}, ...KEYS.flatMap(([key, what]) => [make("dt", {}, key), make("dd", {}, what)])),
    make("button", { type: "button", onclick: () => dialog.close() }, "close"));
  const help = () => (dialog.open ? dialog.close() : dialog.showModal());
  document.getElementById("help").addEventListener("click", help);
  document.getElementById("theme").addEventListener("click", toggleTheme);
  const sections = [...document.querySelectorAll("main > section")];
  const step = (by) => {
    const at = sections.findIndex((section) => section.getBoundingClientRect().top > 80);
    const now = at < 0 ? sections.length : at;
    const to = sections[Math.min(Math.max(by > 0 ? now : now - 2, 0), sections.length - 1)];
    to?.scrollIntoView({ block: "start" });
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const act = {
      "?": help, d: toggleTheme, j: () => step(1), k: () => step(-1),
      "/": () => {
        const boxes = [...document.querySelectorAll("input[type=search]")];
        const middle = innerHeight / 2, far = (box) => Math.abs(box.getBoundingClientRect().top - middle);
        boxes.sort((a, b) => far(a) - far(b))[0]?.focus();
      },
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const nav = document.getElementById("sections");
  for (const section of sections) {
    const title = section.querySelector("h2");
    if (section.id !== "answer" && title) nav.append(make("a", { href: "#" + section.id }, section.dataset.nav || title.textContent));
  }
}

tables();
keys();
trees();
const ready = charts();
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
// Paper is light.
let themeBefore;
addEventListener("beforeprint", () => {
  themeBefore = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  redrawNow();
});
addEventListener("afterprint", () => {
  if (themeBefore) document.documentElement.dataset.theme = themeBefore; else delete document.documentElement.dataset.theme;
  redraw();
});
