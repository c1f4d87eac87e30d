// A chart of curves over events or time. Each pixel shows the highest point that falls on it,
// found in a tree of maxima, so that drawing costs the width of the screen, not the data.
class Extremes {
  constructor(values) {
    this.values = values;
    this.levels = [];
    let below = null;
    for (let count = values.length; count > 1; ) {
      const next = (count + 3) >> 2;
      const level = new Int32Array(next);
      for (let i = 0; i < next; i++) {
        let best = below ? below[4 * i] : 4 * i;
        for (let j = 4 * i + 1; j < Math.min(4 * i + 4, count); j++) {
          const at = below ? below[j] : j;
          if (values[at] > values[best]) best = at;
        }
        level[i] = best;
      }
      this.levels.push(level);
      below = level;
      count = next;
    }
  }
  // The first index of the highest value in [low, high), high > low.
  highest(low, high) {
    const { values, levels } = this;
    let best = low;
    const keep = (at) => { if (values[at] > values[best] || (values[at] === values[best] && at < best)) best = at; };
    for (let depth = -1; low < high; depth++) {
      const row = depth < 0 ? null : levels[depth];
      if (depth + 1 >= levels.length || high - low < 8) {
        for (let i = low; i < high; i++) keep(row ? row[i] : i);
        break;
      }
      while (low & 3 && low < high) { keep(row ? row[low] : low); low++; }
      while (high & 3 && low < high) { high--; keep(row ? row[high] : high); }
      low >>= 2; high >>= 2;
    }
    return best;
  }
}

// The number of values in a rising column that are <= x.
function upTo(values, x) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1; else high = middle;
  }
  return low;
}

function niceStep(range, parts, binary) {
  const rough = range / Math.max(parts, 1);
  if (binary) {
    let unit = 1;
    while (rough / unit >= 1024) unit *= 1024;
    for (const n of [1, 2, 5, 10, 20, 50, 100, 200, 256, 512, 1024]) if (n * unit >= rough) return n * unit;
    return 1024 * unit;
  }
  const unit = 10 ** Math.floor(Math.log10(Math.max(rough, 1e-9)));
  for (const n of [1, 2, 5, 10]) if (n * unit >= rough) return Math.max(n * unit, 1);
}

class Chart {
  // model: axes {name: column}, top (what the peak tree is of), bands and needs (other bands), lines, gaps, ribbons, peak, describe
  constructor(host, model) {
    this.model = model;
    this.axis = Object.keys(model.axes)[0];
    this.top = new Extremes(model.top);
    this.lineTrees = model.lines.map((line) => new Extremes(line.values));
    this.low = new Extremes(model.top.map((v) => -v));
    this.fit = false;
    this.cursor = null;
    this.canvas = make("canvas", { class: "main", tabindex: "0", role: "img", "aria-label": model.label,
      "aria-keyshortcuts": "ArrowLeft ArrowRight + - 0 p f t u" });
    this.strip = make("canvas", { class: "strip", "aria-hidden": "true" });
    this.readout = make("div", { class: "readout" });
    this.where = make("span", { class: "where" });
    this.fitButton = make("button", { type: "button", "aria-pressed": "false", title: "key: f", onclick: () => this.toggleFit() }, "fit height");
    const controls = make("div", { class: "controls" });
    if (Object.keys(model.axes).length > 1) {
      this.axisButton = make("button", { type: "button", title: "key: t", onclick: () => this.toggleAxis() }, "over time");
      controls.append(this.axisButton);
    }
    if (model.needs.length) {
      this.useButton = make("button", { type: "button", "aria-pressed": "false", title: "key: u", onclick: () => this.toggleUse() }, "by use");
      controls.append(this.useButton);
    }
    if (model.blocks) {
      this.blockButton = make("button", { type: "button", "aria-pressed": "false", title: "key: b", onclick: () => this.toggleBlocks() }, "by block");
      controls.append(this.blockButton);
    }
    controls.append(this.fitButton,
      make("button", { type: "button", title: "key: p", onclick: () => this.toPeak() }, "to the peak"),
      make("button", { type: "button", title: "key: 0", onclick: () => this.reset() }, "whole"),
      make("button", { type: "button", title: "key: +", "aria-label": "zoom in", onclick: () => this.zoom(0.5) }, "+"),
      make("button", { type: "button", title: "key: -", "aria-label": "zoom out", onclick: () => this.zoom(2) }, "−"),
      this.where);
    this.block = make("div", { class: "block", "aria-live": "polite" });
    host.replaceChildren(controls, make("div", { class: "plot" }, this.canvas, this.strip), this.block, this.readout);
    this.reset(false);
    this.listen();
    this.onRedraw = () => this.draw();
    redraws.push(this.onRedraw);
    this.draw();
  }
  get xs() { return this.model.axes[this.axis]; }
  get bands() { return this.byUse ? this.model.needs : this.model.bands; }
  reset(draw = true) {
    const xs = this.xs;
    this.from = xs[0];
    this.to = Math.max(xs[xs.length - 1], xs[0] + 1);
    this.full = [this.from, this.to];
    if (draw) this.later();
  }
  later() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }
  // Show [from, to], kept inside the data.
  show(from, to) {
    const [first, last] = this.full;
    const least = Math.min(this.axis === "events" ? 12 : (last - first) / 1e6, last - first);
    let span = Math.min(Math.max(to - from, least), last - first);
    from = Math.min(Math.max(from, first), last - span);
    this.from = from;
    this.to = from + span;
    this.later();
  }
  zoom(factor, around = this.cursorX() ?? (this.from + this.to) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }
  cursorX() {
    if (this.cursor == null) return null;
    const x = this.xs[this.cursor];
    return x >= this.from && x <= this.to ? x : null;
  }
  pan(part) {
    const by = (this.to - this.from) * part;
    this.show(this.from + by, this.to + by);
  }
  toPeak() {
    const x = this.xs[this.model.peak];
    const span = Math.min(this.to - this.from, (this.full[1] - this.full[0]) / 8);
    this.cursor = this.model.peak;
    this.show(x - span / 2, x + span / 2);
    say(this.describe(this.cursor));
  }
  toggleFit() {
    this.fit = !this.fit;
    this.fitButton.setAttribute("aria-pressed", this.fit);
    this.later();
  }
  // Colour by category, or by what the memory is needed for.
  toggleUse() {
    if (!this.useButton) return;
    this.byUse = !this.byUse;
    this.useButton.setAttribute("aria-pressed", this.byUse);
    this.values = null;
    this.readout.replaceChildren();
    this.later();
  }
  async toggleBlocks() {
    if (!this.blockButton) return;
    this.blocks ??= await this.model.blocks();
    this.byBlock = !this.byBlock;
    this.blockButton.setAttribute("aria-pressed", this.byBlock);
    this.choose(-1);
  }
  // Show a block's stack, size and life, and its need at a position; -1 for none.
  choose(block, position = null) {
    this.blocks.chosen = block;
    const drawn = whole(this.blocks.length) + " of " + whole(this.blocks.total);
    if (!this.byBlock) this.block.replaceChildren();
    else if (block < 0) this.block.replaceChildren(make("p", {}, "Click a block for its stack, or press ↑ and ↓. " +
      (this.blocks.length < this.blocks.total ? "The largest " + drawn + " blocks are drawn one by one, the others in grey." : drawn + " blocks.")));
    else this.block.replaceChildren(...this.blocks.describe(block, this.model, position).filter(Boolean));
    this.later();
  }
  // The position that is drawn at a place of the canvas; null where nothing is known.
  positionAt(px) {
    const at = this.picks?.[Math.min(Math.max(Math.floor(px), 0), this.picks.length - 1)];
    return at == null || at < 0 ? null : this.model.axes.events[at];
  }
  clicked(event) {
    if (!this.byBlock) return;
    const box = this.canvas.getBoundingClientRect(), { top, bottom, base, most } = this.view;
    const position = this.positionAt(event.clientX - box.left - this.left);
    const bytes = base + ((bottom - (event.clientY - box.top)) / (bottom - top)) * (most - base);
    this.choose(position == null || bytes < 0 ? -1 : this.blocks.hit(position, bytes), position);
  }
  // Choose the next block up or down at the cursor.
  step(by) {
    if (!this.byBlock) return false;
    const position = this.model.axes.events[this.cursor ?? this.model.peak], found = this.blocks.at(position);
    if (!found.length) return true;
    const before = found.indexOf(this.blocks.chosen);
    const next = before < 0 ? found.reduce((best, b, i) => (this.blocks.size[b] > this.blocks.size[found[best]] ? i : best), 0) : before + by;
    this.choose(found[Math.min(Math.max(next, 0), found.length - 1)], position);
    return true;
  }
  toggleAxis() {
    if (!this.axisButton) return;
    const first = Math.max(0, upTo(this.xs, this.from) - 1), last = upTo(this.xs, this.to) - 1;
    const all = this.from <= this.full[0] && this.to >= this.full[1];
    const names = Object.keys(this.model.axes);
    const next = names[(names.indexOf(this.axis) + 1) % names.length];
    this.axisButton.textContent = "over " + this.axis;
    this.axis = next;
    this.reset();
    if (!all) this.show(this.xs[first], this.xs[last]);
  }
  listen() {
    const { canvas, strip } = this;
    const scale = () => (this.to - this.from) / this.width();
    const toX = (event) => this.from + (event.clientX - canvas.getBoundingClientRect().left - this.left) * scale();
    const pointers = new Map();
    let pinch = 0;
    let moved = 0;
    canvas.addEventListener("click", (event) => { if (moved < 4) this.clicked(event); });
    canvas.addEventListener("pointerdown", (event) => {
      moved = 0;
      canvas.focus({ preventScroll: true });
      pointers.set(event.pointerId, event.clientX);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (before == null) { this.hover(toX(event)); return; }
      pointers.set(event.pointerId, event.clientX);
      if (pointers.size === 1) {
        moved += Math.abs(event.clientX - before);
        canvas.classList.add("drag");
        const by = (before - event.clientX) * scale();
        if (by) this.show(this.from + by, this.to + by);
      } else {
        const [a, b] = [...pointers.values()], apart = Math.max(Math.abs(a - b), 8);
        if (pinch) this.zoom(pinch / apart, toX({ clientX: (a + b) / 2 }));
        pinch = apart;
      }
    });
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, (event) => { pointers.delete(event.pointerId); pinch = 0; canvas.classList.remove("drag"); });
    }
    canvas.addEventListener("dblclick", (event) => this.zoom(event.shiftKey ? 4 : 0.25, toX(event)));
    canvas.addEventListener("wheel", (event) => {
      // Without a key the page scrolls, unless the chart was chosen by a click or Tab.
      const chosen = event.ctrlKey || event.metaKey || document.activeElement === canvas;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
        event.preventDefault();
        const by = (event.deltaX || event.deltaY) * scale();
        this.show(this.from + by, this.to + by);
      } else if (chosen) {
        event.preventDefault();
        this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.004), toX(event));
      }
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const act = {
        ArrowLeft: () => (event.shiftKey ? this.pan(-0.5) : this.move(-1)), ArrowRight: () => (event.shiftKey ? this.pan(0.5) : this.move(1)),
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.reset(), Home: () => this.reset(),
        ArrowUp: this.byBlock && (() => this.step(1)), ArrowDown: this.byBlock && (() => this.step(-1)), b: () => this.toggleBlocks(), u: this.useButton && (() => this.toggleUse()),
        p: () => this.toPeak(), f: () => this.toggleFit(), t: () => this.toggleAxis(),
        PageUp: () => this.pan(-0.9), PageDown: () => this.pan(0.9),
      }[event.key];
      if (act) { event.preventDefault(); event.stopPropagation(); act(); }
    });
    let grip = null;
    const place = (event) => {
      const box = strip.getBoundingClientRect();
      return this.full[0] + ((event.clientX - box.left - this.left) / this.width()) * (this.full[1] - this.full[0]);
    };
    strip.addEventListener("pointerdown", (event) => {
      strip.setPointerCapture(event.pointerId);
      const x = place(event);
      const wholeShown = this.to - this.from >= (this.full[1] - this.full[0]) * 0.999;
      grip = wholeShown || x < this.from || x > this.to ? { start: x } : { hold: x - this.from };
    });
    strip.addEventListener("pointermove", (event) => {
      if (!grip) return;
      const x = place(event);
      if (grip.start != null) this.show(Math.min(grip.start, x), Math.max(grip.start, x));
      else this.show(x - grip.hold, x - grip.hold + (this.to - this.from));
    });
    strip.addEventListener("pointerup", () => { grip = null; });
    strip.addEventListener("dblclick", () => this.reset());
    new ResizeObserver(() => this.later()).observe(canvas.parentElement);
  }
  hover(x) {
    this.cursor = Math.max(0, upTo(this.xs, x) - 1);
    this.later();
  }
  move(by) {
    const pixel = (this.to - this.from) / this.width();
    let at = this.cursorX() == null ? upTo(this.xs, (this.from + this.to) / 2) - 1 : this.cursor;
    const target = this.xs[at] + by * pixel * 4;
    const next = upTo(this.xs, target) - 1;
    at = Math.min(Math.max(next === at ? at + by : next, 0), this.xs.length - 1);
    this.cursor = at;
    const x = this.xs[at];
    if (x < this.from || x > this.to) this.show(x - (this.to - this.from) / 2, x + (this.to - this.from) / 2);
    this.later();
    clearTimeout(this.saying);
    this.saying = setTimeout(() => say(this.describe(at)), 300);
  }
  describe(at) { return this.model.describe(at) + ": " + human(this.model.top[at]); }
  width() { return Math.max(this.canvas.clientWidth - this.left - 8, 10); }

  size(canvas, height) {
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    const wide = canvas.clientWidth;
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = height + "px";
    }
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, wide, height);
    return g;
  }
  // For each pixel the index of its highest point; -1 where nothing is known.
  sample(from, to, wide) {
    const found = new Int32Array(wide), xs = this.xs, per = (to - from) / wide;
    let first = upTo(xs, from) - 1;
    for (let px = 0; px < wide; px++) {
      const right = from + (px + 1) * per;
      let end = first + 1;
      if (end < xs.length && xs[end] <= right) end = upTo(xs, right);
      if (first < 0) { found[px] = end > 0 ? this.top.highest(0, end) : -1; }
      else if (end > first + 1) found[px] = this.top.highest(first + 1, end);
      else found[px] = this.axis === "time" && this.model.ends[first] && from + px * per > xs[first] ? -1 : first;
      first = end - 1;
    }
    return found;
  }
  draw() {
    const started = performance.now();
    this.left = this.canvas.clientWidth < 520 ? 68 : 76;
    this.drawMain();
    this.drawStrip();
    this.report();
    this.cost = performance.now() - started;
  }
  drawMain() {
    const { model, left } = this, wide = Math.floor(this.width());
    const ribbonHeight = model.ribbons.length * 20, height = (this.canvas.clientWidth < 520 ? 240 : 320) + ribbonHeight;
    const g = this.size(this.canvas, height);
    const fg = color("fg"), dim = color("dim"), rule = color("rule");
    const top = ribbonHeight + 8, bottom = height - 24;
    const picks = this.sample(this.from, this.to, wide);
    let most = 0, least = Infinity;
    for (const at of picks) if (at >= 0) {
      most = Math.max(most, model.top[at]);
      least = Math.min(least, model.top[at]);
    }
    const first = Math.max(0, upTo(this.xs, this.from) - 1), end = Math.max(upTo(this.xs, this.to), first + 1);
    least = Math.min(least, model.top[this.low.highest(first, end)]);
    if (!this.fit) model.lines.forEach((line, i) => { most = Math.max(most, line.values[this.lineTrees[i].highest(0, line.values.length)]); });
    let base = 0;
    if (this.fit) {
      const room = Math.max((most - least) * 0.06, 1);
      base = Math.max(0, least - room);
      most += room;
    } else most = Math.max(most * 1.04, 1);
    const y = (value) => bottom - ((Math.max(value, base) - base) / (most - base)) * (bottom - top);
    g.font = "12px system-ui, sans-serif";
    // the grid
    const step = niceStep(most - base, Math.floor((bottom - top) / 52), true);
    g.textAlign = "right";
    g.textBaseline = "middle";
    for (let value = Math.ceil(base / step) * step; value <= most; value += step) {
      g.fillStyle = rule;
      g.fillRect(left, Math.round(y(value)), wide, 1);
      g.fillStyle = dim;
      g.fillText(human(value), left - 6, y(value));
    }
    // blocks, or bands, from the bottom
    this.picks = picks;
    this.view = { left, top, bottom, wide, base, most, picks };
    if (this.byBlock) this.blocks.paint(this, g, this.view);
    const sums = new Float64Array(wide);
    for (const band of this.byBlock ? [] : this.bands) {
      g.fillStyle = color(band.name);
      g.beginPath();
      let open = false;
      for (let px = 0; px < wide; px++) {
        const at = picks[px];
        if (at < 0) continue;
        const low = y(sums[px]), high = y((sums[px] += band.values[at]));
        if (low - high > 0.05) { g.rect(left + px, high, 1.02, low - high); open = true; }
      }
      if (open) g.fill();
    }
    // lines: from the highest to the lowest of each pixel
    [...model.lines.keys()].reverse().forEach((index) => {
      const line = model.lines[index];
      const tree = this.lineTrees[index];
      g.strokeStyle = line.color === "fg" ? fg : color(line.color);
      g.lineWidth = line.width;
      g.setLineDash(line.dash || []);
      g.beginPath();
      let up = false, before = upTo(this.xs, this.from) - 1;
      const per = (this.to - this.from) / wide;
      for (let px = 0; px < wide; px++) {
        const after = upTo(this.xs, this.from + (px + 1) * per) - 1;
        const at = picks[px];
        const known = at >= 0 && line.values[at] >= 0;
        if (!known) { up = false; before = after; continue; }
        const best = after > before ? line.values[tree.highest(before + 1, after + 1)] : line.values[at];
        if (up) g.lineTo(left + px + 0.5, y(best)); else g.moveTo(left + px, y(best));
        if (after > before && line.values[after] !== best) g.lineTo(left + px + 0.5, y(line.values[after]));
        up = true;
        before = after;
      }
      g.stroke();
      g.setLineDash([]);
    });
    this.drawRibbons(g, wide);
    this.drawAxis(g, wide, bottom, height);
    // the peak and the cursor
    const mark = (at, style, label) => {
      const x = this.xs[at];
      if (x < this.from || x > this.to) return;
      const px = Math.round(left + ((x - this.from) / (this.to - this.from)) * wide);
      g.fillStyle = style;
      g.fillRect(px, ribbonHeight, 1, bottom - ribbonHeight);
      if (label) {
        g.textBaseline = "top";
        g.font = "600 12px system-ui, sans-serif";
        const room = g.measureText(label).width + 12;
        const onLeft = px + room > left + wide;
        g.textAlign = onLeft ? "right" : "left";
        g.fillStyle = color("bg");
        g.globalAlpha = 0.85;
        g.fillRect(onLeft ? px - room : px + 1, ribbonHeight + 2, room, 16);
        g.globalAlpha = 1;
        g.fillStyle = style;
        g.fillText(label, px + (onLeft ? -6 : 6), ribbonHeight + 3);
      }
    };
    mark(model.peak, color("bad"), "peak " + human(model.top[model.peak]));
    if (this.cursor != null) mark(this.cursor, fg);
  }
  drawRibbons(g, wide) {
    const { model, left } = this;
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    g.textAlign = "left";
    model.ribbons.forEach((ribbon, row) => {
      const starts = ribbon.starts[this.axis], ends = ribbon.ends[this.axis];
      let from = Math.max(upTo(starts, this.from) - 1, 0), covered = -1;
      for (let i = from; i < starts.length && starts[i] <= this.to; i++) {
        const a = Math.max(0, ((starts[i] - this.from) / (this.to - this.from)) * wide);
        const b = Math.min(wide, ((ends[i] - this.from) / (this.to - this.from)) * wide);
        if (b <= covered || b <= 0) continue; // smaller than a pixel, and that pixel is drawn
        covered = Math.ceil(b);
        g.fillStyle = color(ribbon.colors[i]);
        g.fillRect(left + a, row * 20 + 1, Math.max(b - a - 1, 1), 18);
        if (b - a > 28) {
          g.save();
          g.beginPath();
          g.rect(left + a, row * 20, b - a - 3, 20);
          g.clip();
          g.fillStyle = color("fg");
          g.fillText(ribbon.names[i], left + a + 4, row * 20 + 10.5);
          g.restore();
        }
      }
      g.fillStyle = color("dim");
      g.textAlign = "right";
      g.fillText(ribbon.title, left - 6, row * 20 + 10.5);
      g.textAlign = "left";
    });
  }
  drawAxis(g, wide, bottom, height) {
    const step = niceStep(this.to - this.from, Math.floor(wide / 110), false);
    g.fillStyle = color("dim");
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "alphabetic";
    g.textAlign = "center";
    const zero = this.axis === "time" ? this.full[0] : 0;
    for (let value = Math.ceil((this.from - zero) / step) * step; value + zero <= this.to; value += step) {
      const px = this.left + ((value + zero - this.from) / (this.to - this.from)) * wide;
      g.fillRect(Math.round(px), bottom, 1, 4);
      const text = this.axis === "time" ? duration(value) : whole(value);
      if (px > this.left + 24 && px < this.left + wide - 24) g.fillText(text, px, height - 7);
    }
    g.fillRect(this.left, bottom, wide, 1);
  }
  drawStrip() {
    const g = this.size(this.strip, 38), { left } = this, wide = Math.floor(this.width());
    const picks = this.sample(this.full[0], this.full[1], wide);
    const most = this.model.top[this.model.peak] || 1;
    g.fillStyle = color("less");
    for (let px = 0; px < wide; px++) if (picks[px] >= 0) {
      const tall = (this.model.top[picks[px]] / most) * 34;
      g.fillRect(left + px, 38 - tall, 1, tall);
    }
    const span = this.full[1] - this.full[0];
    const a = left + ((this.from - this.full[0]) / span) * wide, b = left + ((this.to - this.full[0]) / span) * wide;
    g.fillStyle = color("accent");
    g.globalAlpha = 0.18;
    g.fillRect(a, 0, Math.max(b - a, 2), 38);
    g.globalAlpha = 1;
    g.fillRect(a, 0, 2, 38);
    g.fillRect(Math.max(b - 2, a + 2), 0, 2, 38);
  }
  // The values at the cursor, else at the peak: the legend at the same time.
  report() {
    const at = this.cursor ?? this.model.peak, { model } = this;
    if (!this.values) {
      this.when = make("div", { class: "when" });
      this.values = new Map();
      this.readout.append(this.when);
      const add = (key, label, swatch) => {
        const value = make("b");
        this.values.set(key, value);
        this.readout.append(make("div", { class: "value" }, swatch, make("span", {}, label), value));
      };
      for (const line of model.lines) {
        const swatch = make("span", { class: "swatch stroke" });
        this.values.set("swatch:" + line.name, [swatch, line.color]);
        add(line.name, line.name, swatch);
      }
      for (const band of [...this.bands].reverse()) {
        const swatch = make("span", { class: "swatch" });
        this.values.set("swatch:" + band.name, [swatch, band.name]);
        add(band.name, kindWords(band.name), swatch);
      }
    }
    for (const [key, value] of this.values) if (key.startsWith("swatch:")) {
      const [swatch, name] = value;
      if (swatch.classList.contains("stroke")) swatch.style.borderTopColor = color(name); else swatch.style.background = color(name);
    }
    this.when.textContent = (this.cursor == null ? "At the peak: " : "") + model.describe(at);
    for (const line of model.lines) this.values.get(line.name).textContent = line.values[at] < 0 ? "unknown" : human(line.values[at]);
    for (const band of this.bands) this.values.get(band.name).textContent = human(band.values[at]);
    const share = (this.to - this.from) / (this.full[1] - this.full[0]);
    this.where.textContent = share > 0.999 ? "" : "showing " + percent(this.to - this.from, this.full[1] - this.full[0]) + " of all";
  }
}
