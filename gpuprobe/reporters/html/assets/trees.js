// Treemap and flame graph over flat trees: parents before children, parents[0] is -1.
class Tree {
  constructor(flat) {
    Object.assign(this, flat);
    this.children = this.name.map(() => []);
    for (let i = 1; i < this.name.length; i++) this.children[this.parents[i]].push(i);
  }
  key(i) { return this.names[this.name[i]]; }
  label(i) { const key = this.key(i); return isKind(key) ? kindWords(key) : key; }
  path(i) {
    const found = [];
    for (let at = i; at >= 0; at = this.parents[at]) found.unshift(at);
    return found;
  }
  describe(i) {
    return human(this.bytes[i]) + " (" + percent(this.bytes[i], this.bytes[0]) + ") in " + whole(this.blocks[i]) + (this.blocks[i] === 1 ? " block" : " blocks");
  }
  matching(text) {
    if (!text) return null;
    const wanted = text.toLowerCase(), found = new Set();
    this.names.forEach((name, i) => { if (name.toLowerCase().includes(wanted)) found.add(i); });
    return found;
  }
  // Bytes at or below the outermost matching nodes, so that none counts twice.
  heldBy(matches) {
    let total = 0;
    const left = [0];
    while (left.length) {
      const i = left.pop();
      if (matches.has(this.name[i])) total += this.bytes[i]; else left.push(...this.children[i]);
    }
    return total;
  }
}
const brief = (text) => text.replace(/^.*[\/\\](?=[^\/\\]*:\d)/, "");

// Squarified: rows of rectangles as near to squares as they get. After Bruls, Huizing and
// van Wijk, "Squarified treemaps" (2000).
function squarify(items, x, y, wide, tall, place) {
  let total = items.reduce((sum, item) => sum + item.size, 0);
  let at = 0;
  while (at < items.length && total > 0 && wide > 0.5 && tall > 0.5) {
    const side = Math.min(wide, tall), area = (wide * tall) / total;
    let end = at, held = 0, worst = Infinity;
    while (end < items.length) {
      const next = held + items[end].size, thick = (next * area) / side;
      const ratio = (size) => { const length = (size * area) / thick; return Math.max(length / thick, thick / length); };
      const now = Math.max(ratio(items[at].size), ratio(items[end].size));
      if (now > worst) break;
      worst = now;
      held = next;
      end++;
    }
    const thick = (held * area) / side;
    let along = 0;
    for (let i = at; i < end; i++) {
      const length = (items[i].size / held) * side;
      if (wide >= tall) place(items[i], x, y + along, thick, length); else place(items[i], x + along, y, length, thick);
      along += length;
    }
    if (wide >= tall) { x += thick; wide -= thick; } else { y += thick; tall -= thick; }
    total -= held;
    at = end;
  }
}

class TreeView {
  constructor(host, trees, kind) {
    this.host = host;
    this.kind = kind;
    this.trees = trees;
    this.zoomed = 0;
    this.found = make("span", { class: "where", role: "status" });
    this.search = make("input", { type: "search", placeholder: "search  ( / )", "aria-label": "search in this chart",
      oninput: () => this.draw(), onkeydown: (event) => { if (event.key === "Escape") { this.search.value = ""; this.draw(); this.search.blur(); event.stopPropagation(); } } });
    this.area = make("div", { class: kind === "flame" ? "frames" : "boxes", role: "group", "aria-label": kind === "flame" ? "flame graph" : "treemap" });
    this.detail = make("div", { class: "detail" });
    this.buttons = Object.keys(trees).length < 2 ? [] : Object.keys(trees).map((name) =>
      make("button", { type: "button", "aria-pressed": "false", "data-name": name, onclick: () => this.choose(name) }, (kind === "flame" ? "" : "by ") + name));
    this.back = make("button", { type: "button", onclick: () => this.zoom(Math.max(this.tree.parents[this.zoomed], 0)) }, "back");
    host.replaceChildren(make("div", { class: "controls" }, ...this.buttons, this.back, this.search, this.found), this.area, this.detail);
    this.area.addEventListener("click", (event) => { const i = this.node(event); if (i >= 0) this.zoom(i, true); });
    this.area.addEventListener("mouseover", (event) => { const i = this.node(event); if (i >= 0) this.describe(i); });
    this.area.addEventListener("focusin", (event) => { const i = this.node(event); if (i >= 0) this.describe(i); });
    this.area.addEventListener("keydown", (event) => this.key(event));
    this.choose(Object.keys(trees)[0]);
    redraws.push(() => this.draw());
  }
  choose(name) {
    this.chosen = name;
    this.tree = this.trees[name];
    this.zoomed = 0;
    this.buttons.forEach((button) => button.setAttribute("aria-pressed", button.dataset.name === name));
    this.draw();
    this.describe(0);
  }
  node(event) {
    const box = event.target.closest("[data-node]");
    return box ? Number(box.dataset.node) : -1;
  }
  zoom(i, focus = false) {
    const { tree } = this;
    if (!tree.children[i].length && this.kind !== "flame") { this.describe(i); return; }
    // A single way down: go to where there is something to choose.
    if (this.kind !== "flame" && i > this.zoomed) while (tree.children[i].length === 1 && tree.children[tree.children[i][0]].length) i = tree.children[i][0];
    this.zoomed = i;
    this.draw();
    this.describe(i);
    const box = this.shown.get(i) || this.area.querySelector("button");
    if (focus && box) box.focus({ preventScroll: true });
  }
  describe(i) {
    const { tree } = this;
    this.detail.replaceChildren(make("b", {}, tree.path(i).slice(this.kind === "flame" ? -1 : 1).map((at) => tree.label(at)).join(" › ") || tree.label(0)),
      make("br"), tree.describe(i) + (this.kind === "flame" ? ", of which " + human(tree.own[i]) + " was allocated here" : ""));
  }
  key(event) {
    const { tree } = this, i = this.node(event);
    if (event.key === "Escape" || event.key === "Backspace") {
      event.preventDefault();
      event.stopPropagation();
      this.zoom(Math.max(tree.parents[this.zoomed], 0), true);
      return;
    }
    if (i < 0) return;
    let to = -1;
    const all = i ? tree.children[tree.parents[i]] : [0];
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") to = all[all.indexOf(i) + (event.key === "ArrowRight" ? 1 : -1)] ?? -1;
    else if (event.key === "ArrowDown") to = tree.children[i].find((child) => this.shown.has(child)) ?? -1;
    else if (event.key === "ArrowUp") to = tree.parents[i];
    else return;
    event.preventDefault();
    if (this.shown.has(to)) this.shown.get(to).focus();
  }
  box(i, x, y, wide, tall, fill, classes = "") {
    const { tree } = this, label = tree.label(i);
    const box = make("button", { type: "button", "data-node": i, class: classes, "aria-label": label + ", " + tree.describe(i), title: label + "\n" + tree.describe(i) });
    Object.assign(box.style, { left: x + "px", top: y + "px", width: Math.max(wide, 1) + "px", height: Math.max(tall, 1) + "px", background: color(fill) });
    if (this.matches) box.classList.add(this.matches.has(tree.name[i]) ? "hit" : "miss");
    this.shown.set(i, box);
    this.made.append(box);
    return box;
  }
  draw() {
    const { tree } = this;
    this.matches = tree.matching(this.search.value);
    this.found.textContent = this.matches ? human(tree.heldBy(this.matches)) + " (" + percent(tree.heldBy(this.matches), tree.bytes[0]) + ") in " + this.matches.size + " matching names" : "";
    this.back.disabled = this.zoomed === 0;
    this.made = document.createDocumentFragment();
    this.shown = new Map();
    if (this.kind === "flame") this.flame(); else this.treemap();
    this.area.replaceChildren(this.made);
  }
  flame() {
    const { tree, zoomed } = this, wide = this.area.clientWidth - 2, row = 21;
    const scale = tree.bytes[zoomed] ? wide / tree.bytes[zoomed] : 0, start = tree.path(zoomed).length - 1;
    let lowest = 0;
    const add = (i, x, length, depth, above) => {
      const box = this.box(i, x, depth * row + 2, length, 20, i ? hashed(tree.label(i)) : "less", above ? "above" : "");
      if (length > 34) box.textContent = brief(tree.label(i)); else box.style.padding = "0";
      lowest = Math.max(lowest, depth);
    };
    // Of a deep stack above, only what is next to it.
    const above = tree.path(zoomed).slice(0, -1), skipped = Math.max(0, above.length - 4);
    above.slice(skipped).forEach((i, n) => add(i, 0, wide, n, true));
    const left = [[zoomed, 0, start - skipped]];
    while (left.length) {
      const [i, x, depth] = left.pop();
      add(i, x, tree.bytes[i] * scale, depth, false);
      if (depth > 400) continue;
      let at = x;
      for (const child of tree.children[i]) {
        if (tree.bytes[child] * scale >= 1.5) left.push([child, at, depth + 1]);
        at += tree.bytes[child] * scale;
      }
    }
    this.area.style.height = (lowest + 1) * row + 6 + "px";
  }
  treemap() {
    const { tree, zoomed } = this, wide = this.area.clientWidth - 2, tall = this.area.clientHeight - 2;
    const items = (i) => {
      const found = tree.children[i].filter((child) => tree.bytes[child] > 0).map((child) => ({ node: child, size: tree.bytes[child] }));
      if (tree.own[i] && found.length) found.push({ node: -1, size: tree.own[i] });
      return found.sort((a, b) => b.size - a.size);
    };
    const hue = (i) => {
      const path = tree.path(i);
      const top = tree.key(path[1] ?? 0), inner = path.map((at) => tree.key(at)).findLast((key) => isKind(key));
      if (isKind(top)) return top;
      if (inner) return inner;
      return hashed(tree.label(path[Math.min(path.length - 1, tree.path(zoomed).length)] ?? 0));
    };
    const leaf = (i, x, y, w, h) => {
      const box = this.box(i, x, y, w, h, hue(i));
      if (w > 30 && h > 15) {
        box.append(make("span", {}, brief(tree.label(i))));
        if (h > 34) box.append(make("span", {}, human(tree.bytes[i])));
      } else box.style.padding = "0";
    };
    const top = tree.children[zoomed].length ? items(zoomed) : [{ node: zoomed, size: tree.bytes[zoomed] }];
    squarify(top, 0, 0, wide, tall, (item, x, y, w, h) => {
      if (item.node < 0 || w < 2 || h < 2) return;
      const inner = items(item.node);
      if (!inner.length || w < 60 || h < 44 || item.node === zoomed) { leaf(item.node, x, y, w, h); return; }
      const group = this.box(item.node, x, y, w, h, hue(item.node), "group");
      group.append(make("span", {}, brief(tree.label(item.node)) + "  " + human(tree.bytes[item.node])));
      squarify(inner, x + 3, y + 20, w - 6, h - 23, (child, cx, cy, cw, ch) => {
        if (child.node >= 0 && cw >= 3 && ch >= 3) leaf(child.node, cx, cy, cw, ch);
      });
    });
  }
}
