// The largest blocks one by one, stacked in the order in which they were allocated: a block moves
// down when one below it is freed. A frame costs the width of the screen times the blocks that are
// allocated at once, whatever the number of events.
class Blocks {
  static async of(found) {
    const made = new Blocks();
    const { start, life, size, category, stack, module, phase } = await unpackAll(found.columns);
    Object.assign(made, { start, size, category, stack, module, phase }, { total: found.total, about: found });
    made.end = start.map((at, i) => at + life[i]);
    if (found.uses) {
      made.uses = await unpackAll(found.uses);
      // Where the spells of each block begin, and at the end their number.
      made.first = new Int32Array(start.length + 1);
      for (let i = 0; i < start.length; i++) made.first[i + 1] = made.first[i] + made.uses.spells[i];
    }
    made.parents = await unpack(found.parents);
    made.frames = await unpack(found.frames);
    made.alive = new Int32Array(start.length);
    made.chosen = -1;
    made.sheet = make("canvas");
    return made;
  }
  get length() { return this.start.length; }
  name(i) { return this.about.categories[this.category[i]]; }
  // What a block is needed for at a position; "" if its uses were not traced.
  needAt(i, position) {
    let need = -1;
    for (let at = this.first[i]; at < this.first[i + 1] && this.uses.at[at] <= position; at++) need = this.uses.need[at];
    return need < 0 ? "" : this.about.needs[need];
  }

  // Three shades of each kind, so that neighbours are told apart; then what marks the chosen one.
  shades(names) {
    const found = new Map();
    const number = (r, g, b, a = 255) => ((a << 24) | (b << 16) | (g << 8) | r) >>> 0;
    const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    const toward = (from, to, share) => from.map((value) => Math.round(value + (to - value) * share));
    for (const name of names) {
      const base = parts(color(name || "less"));
      found.set(name, [base, toward(base, 255, 0.14), toward(base, 0, 0.12)].map((rgb) => number(...rgb)));
    }
    const rest = parts(color("less"));
    return { of: found, chosen: number(...parts(color("fg"))), rest: number(...rest, 90), edge: number(...toward(parts(color("bg")), 0, 0.1), 255) };
  }

  // Draw the blocks at each pixel's point. `view`: left, top, bottom, wide, base, most, picks.
  paint(chart, g, view) {
    const { left, top, bottom, wide, base, most, picks } = view, ratio = g.getTransform().a;
    const width = Math.max(Math.round(wide * ratio), 1), height = Math.max(Math.round((bottom - top) * ratio), 1);
    if (this.sheet.width !== width || this.sheet.height !== height) {
      this.sheet.width = width;
      this.sheet.height = height;
      this.image = null;
    }
    const sheet = this.sheet.getContext("2d");
    if (!this.image) {
      this.image = sheet.createImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    const { pixels, alive, start, end, size, chosen } = this;
    pixels.fill(0);
    const events = chart.model.axes.events, allocated = chart.model.top;
    const byUse = chart.byUse && this.uses, scale = height / (most - base);
    const shades = this.shades(byUse ? ["", ...this.about.needs] : Object.values(this.about.categories));
    let count = 0, next = 0, last = -1, drawnAt = -1;
    for (let px = 0; px < wide; px++) {
      const at = picks[px], x0 = Math.round(px * ratio), x1 = Math.min(Math.round((px + 1) * ratio), width);
      if (at < 0) { last = -1; drawnAt = -1; continue; }
      const here = events[at];
      if (here !== last || drawnAt < 0) {
        if (here < last) { count = 0; next = 0; }
        let kept = 0;
        for (let i = 0; i < count; i++) if (end[alive[i]] > here) alive[kept++] = alive[i];
        count = kept;
        for (; next < start.length && start[next] <= here; next++) if (end[next] > here) alive[count++] = next;
        let sum = 0, edge = height;
        for (let i = 0; i < count && edge > 0; i++) {
          const block = alive[i];
          sum += size[block];
          const row = Math.max(0, Math.round(height - (sum - base) * scale));
          if (row >= edge) continue;
          const kind = byUse ? this.needAt(block, here) : this.name(block);
          const fill = block === chosen ? shades.chosen : shades.of.get(kind)[block % 3];
          for (let y = row; y < edge; y++) pixels[y * width + x0] = fill;
          if (edge - row > 4) pixels[row * width + x0] = shades.edge;
          edge = row;
        }
        const row = Math.max(0, Math.round(height - (allocated[at] - base) * scale));
        for (let y = row; y < edge; y++) pixels[y * width + x0] = shades.rest;
        drawnAt = x0;
        last = here;
      } else if (drawnAt !== x0) for (let y = 0; y < height; y++) pixels[y * width + x0] = pixels[y * width + drawnAt];
      for (let x = x0 + 1; x < x1; x++) for (let y = 0; y < height; y++) pixels[y * width + x] = pixels[y * width + x0];
    }
    sheet.putImageData(this.image, 0, 0);
    g.drawImage(this.sheet, left, top, width / ratio, height / ratio);
  }

  // The blocks at a position, from the bottom up.
  at(position) {
    const found = [];
    for (let i = 0; i < this.start.length && this.start[i] <= position; i++) if (this.end[i] > position) found.push(i);
    return found;
  }
  // The block that is drawn at a position and a height in bytes; -1 for none.
  hit(position, bytes) {
    let sum = 0;
    for (const block of this.at(position)) {
      sum += this.size[block];
      if (bytes < sum) return block;
    }
    return -1;
  }
  // The frames of a block, innermost first: [name, whether it is PyTorch's own or native].
  stackOf(block) {
    const found = [];
    for (let at = this.stack[block]; at > 0; at = this.parents[at]) found.push([this.about.names[this.frames[at]], this.about.plumbing[this.frames[at]] === 1]);
    return found;
  }
  // The uses of a block in a sentence, and what it is needed for at a position.
  usesOf(block, model, position) {
    const { uses } = this, text = (column) => this.about.strings[uses[column][block]];
    const now = position == null ? "" : this.needAt(block, position);
    if (uses.spells[block] === 0) return "its uses were not traced";
    const found = [];
    if (text("made_by")) found.push("made by " + text("made_by"));
    if (uses.first_at[block] >= 0) found.push("first used at " + model.place(uses.first_at[block]) + (text("first_by") ? " by " + text("first_by") : ""));
    if (uses.last_at[block] >= 0) found.push("last used at " + model.place(uses.last_at[block]) + " " + text("last_by"));
    else if (text("last_by")) found.push("used " + text("last_by"));
    else if (now !== "not_traced") found.push("not used in this step");
    return found.join("; ") + (now ? (found.length ? "; " : "") + "here: " + kindWords(now) : "");
  }
  // What is known of a block, as elements.
  describe(block, model, position) {
    const cwd = (data.report?.session?.cwd || "\n").replace(/\/$/, "") + "/";
    const { about } = this, frames = this.stackOf(block);
    const telling = frames.filter(([, plumbing]) => !plumbing), folded = telling.length ? telling : frames;
    const module = about.strings[this.module[block]], phase = about.strings[this.phase[block]];
    const facts = [kindWords(this.name(block)), module, phase && "phase " + phase].filter(Boolean).join(" · ");
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = color(this.name(block));
    const list = make("ol", { class: "stack" });
    const fill = (all) => list.replaceChildren(...(all ? frames : folded).map(([name, plumbing]) => make("li", { class: plumbing ? "dim" : "" }, name.startsWith(cwd) ? name.slice(cwd.length) : name)));
    fill(false);
    const more = frames.length - folded.length;
    const toggle = more ? make("button", { type: "button", "aria-pressed": "false", onclick: () => {
      const all = toggle.getAttribute("aria-pressed") !== "true";
      toggle.setAttribute("aria-pressed", all);
      fill(all);
    } }, "all frames (" + more + " of PyTorch and native code)") : null;
    return [
      make("p", {}, swatch, " ", make("b", {}, human(this.size[block])), " · " + facts),
      make("p", {}, model.life(this.start[block], this.end[block])),
      ...this.uses ? [make("p", {}, this.usesOf(block, model, position))] : [],
      frames.length ? list : make("p", {}, "no stack was recorded"),
      toggle,
    ];
  }
}
