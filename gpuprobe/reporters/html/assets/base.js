"use strict";
// Shared by all charts: data, numbers for people, elements, theme.
const data = JSON.parse(document.getElementById("data").textContent);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

// Kept the same as gpuprobe.model.text.human_bytes: binary units, one decimal.
function human(count) {
  let size = Math.abs(count);
  const sign = count < 0 ? "-" : "";
  if (size < 1024) return sign + size + " B";
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    size /= 1024;
    if (size < 1023.95 || unit === "TiB") return sign + size.toFixed(1) + " " + unit;
  }
}
const whole = (count) => count.toLocaleString("en-US");
function duration(us) {
  if (us < 1000) return us.toFixed(0) + " µs";
  if (us < 1e6) return (us / 1000).toFixed(1) + " ms";
  return (us / 1e6).toFixed(2) + " s";
}
const percent = (part, total) => (total ? ((100 * part) / total).toFixed(part * 1000 < total ? 2 : 1) + "%" : "");
const say = (text) => { document.getElementById("say").textContent = text; };

// A column: base 64, deflated, eight planes of the differences' bytes.
async function unpack(text) {
  if (text == null) return null;
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = planes.length / 8;
  const values = new Float64Array(count);
  let sum = 0;
  for (let i = 0; i < count; i++) {
    const low = (planes[i] | (planes[count + i] << 8) | (planes[2 * count + i] << 16) | (planes[3 * count + i] << 24)) >>> 0;
    const high = planes[4 * count + i] | (planes[5 * count + i] << 8) | (planes[6 * count + i] << 16) | (planes[7 * count + i] << 24);
    sum += high * 4294967296 + low;
    values[i] = sum;
  }
  return values;
}
async function unpackAll(columns) {
  const names = Object.keys(columns);
  const found = await Promise.all(names.map((name) => unpack(columns[name])));
  return Object.fromEntries(names.map((name, i) => [name, found[i]]));
}

// The category order of a stack: what stays at the bottom, what comes and goes on top.
const CATEGORIES = ["parameter", "gathered_parameter", "buffer", "kv_cache", "optimizer_state", "gradient", "gradient_bucket",
  "weight_cast", "workspace", "input", "activation", "autograd_detail", "temporary", "other", "unknown"];
// The needs, those of gpuprobe.model.needs: what could go is on top.
const NEEDS = {
  not_traced: "not traced", open: "kept at the end", needed_later: "needed later", in_use: "in use now", not_used_yet: "not used yet",
  never_used_again: "never used again", never_used: "never used",
};
const isKind = (name) => CATEGORIES.includes(name) || name in NEEDS;
const KINDS = { kv_cache: "KV cache", autograd_detail: "backward temporary" }; // as model/memory.py
const kindWords = (name) => NEEDS[name] ?? KINDS[name] ?? name.replaceAll("_", " ");
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}
const HUES = ["parameter", "activation", "optimizer_state", "gradient", "weight_cast", "autograd_detail", "buffer", "workspace", "temporary", "input"];
function hashed(text) {
  let hash = 0;
  for (let i = 0; i < text.length; i++) hash = (hash * 31 + text.charCodeAt(i)) | 0;
  return HUES[Math.abs(hash) % HUES.length];
}

// What is to be drawn again when the theme, the width or the medium changes.
const redraws = [];
let pending = 0;
function redraw() {
  if (pending) return;
  pending = requestAnimationFrame(() => { pending = 0; for (const draw of redraws) draw(); });
}
function redrawNow() { for (const draw of redraws) draw(); }

const isDark = () => document.documentElement.dataset.theme
  ? document.documentElement.dataset.theme === "dark"
  : matchMedia("(prefers-color-scheme: dark)").matches;
function toggleTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  redraw();
}
