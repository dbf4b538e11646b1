// The page: what is chosen, and the views that show it. Decides nothing about bytes: Transfer says what they are.

const byId = (id) => document.getElementById(id);
const number = (value) => value.toLocaleString("en-US");
const many = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "path", "text", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  const shown = at && value < 100 ? value.toFixed(1) : number(Math.round(value));
  return `${shown} ${units[at]}`;
}

const HUES = [212, 28, 150, 338, 265, 185, 48, 0, 100, 300];
function tint(index, shade = 0) {
  const hue = index < HUES.length ? HUES[index] : (index * 137.5) % 360;
  const dark = document.documentElement.dataset.theme === "dark";
  const light = dark ? [58, 46, 36][shade % 3] : [44, 58, 71][shade % 3];
  return `hsl(${hue} ${dark ? 55 : 62}% ${light}%)`;
}

// Paler than the tints of sources, which mean something else.
function kindTint(index) {
  const dark = document.documentElement.dataset.theme === "dark";
  return `hsl(${(95 + index * 77) % 360} ${dark ? 22 : 34}% ${dark ? 32 - (index % 2) * 6 : 82 - (index % 2) * 6}%)`;
}

function swatch(kind, colour) {
  const element = make("span", { class: `swatch ${kind}` });
  if (colour) element.style.background = colour;
  return element;
}

const legendItem = (mark, text) => make("li", {}, mark, text);

function reachWords(reach) {
  if (reach.type === "window") return `the last ${number(reach.tokens)} tokens`;
  if (reach.type === "chunk") return `the current chunk of ${number(reach.tokens)} tokens`;
  return "every earlier token";
}

const partsWords = (layer) => layer.parts.map((p) => p.name).join(" ");

function kindOf(layer) {
  if (!layer.group.paging.tokens) return `${partsWords(layer)}, one state`;
  return `${partsWords(layer)}, ${reachWords(layer.reach)}`;
}

// A radio group with one stop for the Tab key.
function roving(items, choose) {
  const usable = () => items.filter((item) => !item.disabled);
  items.forEach((item) => {
    item.addEventListener("click", () => choose(items.indexOf(item)));
    item.addEventListener("keydown", (event) => {
      const all = usable();
      const at = all.indexOf(item);
      const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
      if (event.key === " " || event.key === "Enter") choose(items.indexOf(item));
      else if (to === undefined) return;
      else if (all[to]) {
        all[to].focus();
        choose(items.indexOf(all[to]));
      }
      event.preventDefault();
    });
  });
}

class Page {
  constructor(transfer) {
    this.transfer = transfer;
    this.document = transfer.document;
    this.consumer = 0;
    this.producer = null;
    this.layer = null;
    this.row = 0;
    this.token = 0;
    this.crossing = new Crossing(this);
    this.walk = new Walk(this);
    this.panes = { prefill: new Pane(this, "prefill"), decode: new Pane(this, "decode") };
    byId("panes").append(this.panes.prefill.root, make("div", { class: "arrow", "aria-hidden": "true" }, "→"), this.panes.decode.root);
    this.kinds = [];
    for (const side of transfer.decode) {
      for (const layer of side.layers.values()) if (!this.kinds.includes(kindOf(layer))) this.kinds.push(kindOf(layer));
    }
    this.names = layerNames(transfer.decode);
    byId("goto").addEventListener("submit", (event) => {
      event.preventDefault();
      this.goTo();
    });
    this.head();
    this.costs();
    this.chooseConsumer(0);
  }

  get plan() {
    return this.document.plans[this.consumer];
  }

  get here() {
    return this.transfer.decode[this.consumer];
  }

  sourceTint(producer, shade = 0) {
    return tint(Math.max(0, this.plan.sources.indexOf(producer)), shade);
  }

  head() {
    const { title, plans, prefill, decode, request } = this.document;
    byId("model").textContent = title.model;
    byId("sides").append(
      "prefill ", make("code", {}, title.prefill), " → decode ", make("code", {}, title.decode),
      make("span", { class: "apart" }, `${many(prefill.length, "rank")} → ${many(decode.length, "rank")}`), make("span", { class: "proved" }, "✓ proved"),
    );
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    const moved = sum(plans.map((p) => sum(p.bytes)));
    const sources = plans.map((p) => p.sources.length);
    const [least, most] = [Math.min(...sources), Math.max(...sources)];
    const from = least === most ? many(most, "prefill rank") : `${least} to ${most} prefill ranks`;
    const subject = plans.length === 1 ? "The one decode rank reads" : `Each of the ${plans.length} decode ranks reads`;
    byId("summary").textContent = `${subject} from ${from}. For a prompt of ${many(request.tokens + 1, "token")}, `
      + `${bytes(moved)} in ${many(sum(plans.map((p) => sum(p.runs))), "run")} are moved for ${many(request.tokens - request.start, "token")}; `
      + `the last token is computed again by decode. ${bytes(sum(plans.map((p) => p.filled)))} of loaded blocks are filled with zeros, `
      + "so that nothing stale remains in them.";
  }

  chooseConsumer(index) {
    this.consumer = index;
    this.producer = this.plan.sources.length ? this.plan.sources[0] : null;
    this.crossing.draw();
    this.walk.build();
    this.layerStrip();
    const held = [...this.here.layers.keys()];
    const select = byId("goto-region");
    select.replaceChildren(...this.here.regions.map((r, i) => make("option", { value: i }, `${r.label} (${bytes(r.length)})`)));
    if (held.length) this.chooseLayer(this.here.layers.has(this.layer) ? this.layer : held[0]);
    this.costs();
  }

  chooseProducer(index) {
    this.producer = index;
    const read = this.document.plans.findIndex((p) => p.sources.includes(index));
    if (!this.plan.sources.includes(index) && read >= 0) {
      this.chooseConsumer(read);
      this.producer = index;
    }
    this.crossing.draw();
    const first = this.transfer.firstFrom(index, this.consumer, this.layer);
    const layer = [...this.transfer.prefill[index].layers.values()][0];
    if (first) this.showDecode(first.region, first.offset);
    else if (layer) this.showPrefill(index, layer.parts[0].region, this.firstByte(layer.parts[0], 1 % layer.group.blocks, 0));
  }

  layerStrip() {
    const strip = byId("layers");
    const focused = strip.contains(document.activeElement);
    const buttons = this.names.map(({ name, short }) => {
      const layer = this.here.layers.get(name);
      const button = make("button", {
        type: "button", role: "radio", "aria-label": layer ? `${name}: ${kindOf(layer)}` : `${name}: held by other ranks`,
        title: layer ? `${name}: ${kindOf(layer)}` : `${name}: not on this rank`, "data-layer": name,
      }, short);
      button.disabled = !layer;
      if (layer) button.style.background = kindTint(this.kinds.indexOf(kindOf(layer)));
      return button;
    });
    strip.replaceChildren(...buttons);
    roving(buttons, (i) => this.chooseLayer(this.names[i].name));
    this.layerButtons = buttons;
    const counts = new Map();
    for (const layer of this.here.layers.values()) counts.set(kindOf(layer), (counts.get(kindOf(layer)) || 0) + 1);
    byId("kinds").replaceChildren(...[...counts].map(([kind, count]) => legendItem(
      swatch("", kindTint(this.kinds.indexOf(kind))), `${kind} (${many(count, "layer")})`)));
    if (focused) this.markLayer(true);
  }

  markLayer(focus) {
    this.layerButtons.forEach((button) => {
      const chosen = button.dataset.layer === this.layer;
      button.setAttribute("aria-checked", chosen);
      button.tabIndex = chosen ? 0 : -1;
      if (chosen && focus) button.focus();
    });
  }

  chooseLayer(name) {
    this.layer = name;
    this.markLayer(false);
    const layer = this.here.layers.get(name);
    const table = this.transfer.tables.decode.get(layer.group.id) || [];
    const tokens = layer.group.paging.tokens;
    this.walk.follow(layer);
    const at = this.walk.loaded(layer);
    if (tokens && at !== null) this.token = at;
    const place = tokens ? Math.floor(this.token / tokens) : 0;
    const block = table[place] >= 0 ? table[place] : 0;
    this.panes.decode.visit(this.consumer, name, layer.parts[0].region, block);
    this.showDecode(layer.parts[0].region, this.firstByte(layer.parts[0], block, tokens ? this.token % tokens : 0));
  }

  firstByte(part, block, slot) {
    let offset = part.offset + block * part.blockStride;
    let rest = part.perEntry ? Math.floor(slot / part.perEntry) : 0;
    if (part.shape.token) {
      for (const [count, stride] of [...part.shape.token.digits].reverse()) {
        offset += (rest % count) * stride;
        rest = Math.floor(rest / count);
      }
    }
    return offset;
  }

  // A byte of the chosen decode rank, and where it comes from.
  showDecode(region, offset) {
    const { transfer } = this;
    const meaning = transfer.meaning("decode", this.consumer, region, offset);
    const origin = transfer.origin(this.consumer, region, offset);
    if (meaning && meaning.part.layer.name !== this.layer) {
      this.layer = meaning.part.layer.name;
      this.markLayer(false);
    }
    this.panes.decode.point(this.consumer, region, offset, meaning);
    if (origin.kind === "copy") {
      const source = transfer.meaning("prefill", origin.source, origin.region, origin.offset);
      if (this.producer !== origin.source) {
        this.producer = origin.source;
        this.crossing.mark();
      }
      this.panes.prefill.point(origin.source, origin.region, origin.offset, source);
    } else this.panes.prefill.none(origin.kind === "fill" ? "nowhere: zeros are written here" : "nowhere: this request leaves it alone");
    if (meaning && meaning.token !== undefined && meaning.place !== undefined) this.walk.move(meaning.token, meaning.part.layer);
    this.join(meaning, origin);
  }

  // A byte of a prefill rank, and where the chosen decode rank puts it.
  showPrefill(producer, region, offset) {
    const { transfer } = this;
    const target = transfer.target(producer, this.consumer, region, offset);
    if (target) {
      this.showDecode(target.region, target.offset);
      return;
    }
    const meaning = transfer.meaning("prefill", producer, region, offset);
    this.panes.prefill.point(producer, region, offset, meaning);
    const readers = transfer.readers(producer, region, offset).map((r) => transfer.decode[r.consumer].label);
    this.panes.decode.none(readers.length ? `decode ${readers.join(", ")}, not ${this.here.label}` : "nowhere: nobody reads this byte");
    byId("join").textContent = readers.length
      ? `This byte is read by decode ${readers.join(", ")}; ${this.here.label} holds another slice, or reads a replica.`
      : meaning ? "No decode rank reads this byte for this request." : "Padding between parts: never moved.";
  }

  join(meaning, origin) {
    const line = byId("join");
    line.dataset.kind = origin.kind;
    const what = meaning ? `${meaning.part.layer.name} ${meaning.part.name}, ${placeWords(meaning)}: ` : "";
    const say = (text) => {
      line.textContent = what + text;
    };
    if (origin.kind === "copy") {
      const source = this.transfer.meaning("prefill", origin.source, origin.region, origin.offset);
      const same = source && meaning && sameMeaning(meaning, source);
      say(`copied from prefill ${this.transfer.prefill[origin.source].label} in a run of ${many(origin.length, "byte")}`
        + `${origin.tokens ? ` for every ${origin.tokens === 1 ? "token" : `${origin.tokens} tokens`}` : ""}, neighbours merged where they touch. `
        + `${same ? "Both manifests give the two bytes the same meaning." : "The manifests give the two bytes different meanings."}`);
    } else if (origin.kind === "fill") {
      say(meaning && meaning.scratch
        ? "filled with zeros, as scratch that prefill never writes."
        : "filled with zeros; the block is loaded, but this is not copied for this request.");
    } else if (!meaning) say("Padding: no part of the request lies here; never moved, never filled.");
    else if (meaning.place === undefined) say(`left alone; the request does not hold block ${meaning.block}.`);
    else say("left alone; these tokens are not loaded by this request.");
  }

  goTo() {
    const region = Number(byId("goto-region").value);
    const field = byId("goto-offset");
    const offset = Number(field.value.trim());
    const bad = !Number.isInteger(offset) || offset < 0 || offset >= this.here.regions[region].length;
    field.setCustomValidity(bad ? `A whole number below ${this.here.regions[region].length}` : "");
    if (bad) {
      field.reportValidity();
      return;
    }
    this.showDecode(region, offset);
  }

  colours() {
    const items = this.plan.sources.map((s) => legendItem(swatch("", this.sourceTint(s)), `from prefill ${this.transfer.prefill[s].label}`));
    const parts = this.here.layers.has(this.layer) ? this.here.layers.get(this.layer).parts.map((p) => p.name) : [];
    if (items.length > 12) items.splice(12, items.length, legendItem("", `and ${this.plan.sources.length - 12} more`));
    byId("colours").replaceChildren(
      ...items,
      ...(parts.length > 1 ? [legendItem("", "shades:"), ...parts.slice(0, 6).map((name, i) => legendItem(swatch("", tint(0, i)), name))] : []),
      legendItem(swatch("zero"), "filled with zeros"),
      legendItem(swatch("other"), "held, not touched by this rank's load"),
      legendItem(swatch("pad"), "padding"),
    );
  }

  costs() {
    byId("strategies").replaceChildren(...this.document.strategies.map(({ name, meaning, measures }) => make("table", {},
      make("caption", {}, make("b", {}, name), ` ${meaning}`),
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, ""), make("th", { scope: "col" }, `decode ${this.here.label}`),
        make("th", { scope: "col" }, "all ranks"))),
      make("tbody", {}, ...measures.map((m) => {
        const shown = (value) => (m.unit === "B" ? bytes(value) : number(value));
        return make("tr", {}, make("td", {}, m.label, make("small", {}, m.meaning)), make("td", {}, shown(m.ranks[this.consumer])),
          make("td", {}, shown(m.ranks.reduce((a, b) => a + b, 0))));
      })))));
  }

  redraw() {
    this.crossing.draw();
    this.walk.draw();
    this.layerStrip();
    this.markLayer(false);
    this.panes.prefill.draw();
    this.panes.decode.draw();
    this.colours();
  }
}

function placeWords({ token, axes }) {
  const found = axes.map((a) => `${a.name} ${a.index}`);
  return [...(token === undefined ? [] : [`token ${token}`]), ...found].join(", ");
}

function sameMeaning(one, other) {
  const axes = new Map(other.axes.map((a) => [a.name, a.index]));
  return one.part.layer.name === other.part.layer.name && one.part.name === other.part.name && one.byte === other.byte
    && one.token === other.token && one.axes.every((a) => axes.get(a.name) === a.index);
}

// All layers in the model's order, with the number that stands in their name.
function layerNames(sides) {
  const names = [...new Set(sides.flatMap((side) => side.packedLayers.map((layer) => layer[0])))];
  const of = (name) => (name.match(/\d+/) || [""])[0];
  return names.map((name, i) => ({ name, short: of(name) || String(i), at: i }))
    .sort((a, b) => Number(of(a.name) || 0) - Number(of(b.name) || 0) || a.at - b.at);
}

// Two rows of ranks and the reads between them.
class Crossing {
  constructor(page) {
    this.page = page;
    this.root = byId("crossing");
  }

  banks(width) {
    const { transfer } = this.page;
    const most = Math.max(transfer.prefill.length, transfer.decode.length);
    const gaps = Math.max(transfer.prefill[0].ppSize, transfer.decode[0].ppSize) - 1;
    const inner = Math.max(width - 76, most * 13);
    const box = Math.min(168, (inner - gaps * 10) / most);
    const places = (sides) => {
      const total = sides.length * box + (sides[0].ppSize - 1) * 10;
      return sides.map((s, i) => 70 + (inner - total) / 2 + i * box + s.pp * 10);
    };
    return { box, inner, prefill: places(transfer.prefill), decode: places(transfer.decode) };
  }

  draw() {
    const { transfer, document: { plans } } = this.page;
    const width = this.root.clientWidth || 1000;
    const { box, inner, ...places } = this.banks(width);
    const tall = box > 60 ? 46 : 30;
    const [top, bottom] = [20, 20 + tall + 120];
    const svg = make("svg", { width: inner + 76, height: bottom + tall + 22, role: "group", "aria-label": "Ranks of both sides" });
    const centre = (name, i) => places[name][i] + (box - 3) / 2;
    const curve = (from, to) => {
      const [x, y] = [centre("prefill", from), centre("decode", to)];
      return `M${x.toFixed(1)} ${top + tall}C${x.toFixed(1)} ${top + tall + 60} ${y.toFixed(1)} ${bottom - 60} ${y.toFixed(1)} ${bottom}`;
    };
    svg.append(make("path", { class: "links", d: plans.map((p, to) => p.sources.map((from) => curve(from, to)).join("")).join("") }));
    this.lit = make("g");
    svg.append(this.lit, make("text", { class: "side", x: 0, y: top + tall / 2 + 4 }, "prefill"),
      make("text", { class: "side", x: 0, y: bottom + tall / 2 + 4 }, "decode"));
    this.boxes = {};
    for (const [name, y, choose] of [["prefill", top, (i) => this.page.chooseProducer(i)], ["decode", bottom, (i) => this.page.chooseConsumer(i)]]) {
      const group = make("g", { role: "radiogroup", "aria-label": `${name} ranks` });
      this.boxes[name] = transfer[name].map((side, i) => this.box(side, places[name][i], y, box, tall));
      group.append(...this.boxes[name]);
      roving(this.boxes[name], (i) => {
        choose(i);
        this.boxes[name][i].focus();
      });
      svg.append(group, ...this.stages(transfer[name], places[name], box, name === "prefill" ? top - 7 : bottom + tall + 15));
    }
    this.curve = curve;
    this.root.replaceChildren(svg);
    this.mark();
    this.list();
  }

  box(side, x, y, box, tall) {
    const item = make("g", { class: "rank", role: "radio", tabindex: -1, "aria-label": `${side.name} ${side.label}` },
      make("title", {}, `${side.name} ${side.label}: ${many(side.packedLayers.length, "layer")}`),
      make("rect", { x, y, width: Math.max(3, box - 3), height: tall, rx: Math.min(6, box / 4) }));
    const middle = x + (box - 3) / 2;
    if (box > 60) {
      item.append(make("text", { x: middle, y: y + 20 }, side.label), make("text", { x: middle, y: y + 36 }, many(side.packedLayers.length, "layer")));
    } else if (box >= 12) item.append(make("text", { class: box < 20 ? "tiny" : "", x: middle, y: y + tall / 2 + 4 }, String(side.tp)));
    return item;
  }

  stages(sides, places, box, y) {
    if (sides[0].ppSize === 1) return [];
    const out = [];
    for (let pp = 0; pp < sides[0].ppSize; pp++) {
      const mine = places.filter((_, i) => sides[i].pp === pp);
      const wide = mine.length * box;
      out.push(make("text", { x: mine[0] + wide / 2 - 2, y }, wide > 70 ? `stage ${pp}` : wide > 14 ? String(pp) : ""));
    }
    return out;
  }

  mark() {
    const { page } = this;
    const { plan } = page;
    const most = Math.max(1, ...plan.bytes);
    this.lit.replaceChildren(...plan.sources.map((from, i) => {
      const path = make("path", { class: "link", d: this.curve(from, page.consumer), "stroke-width": 1.5 + 9 * plan.bytes[i] / most });
      path.style.stroke = page.sourceTint(from);
      return path;
    }));
    for (const [name, chosen] of [["prefill", page.producer], ["decode", page.consumer]]) {
      this.boxes[name].forEach((item, i) => {
        item.classList.toggle("chosen", i === chosen);
        item.setAttribute("aria-checked", i === chosen);
        item.setAttribute("tabindex", i === (chosen === null ? 0 : chosen) ? 0 : -1);
        const read = name === "prefill" && plan.sources.includes(i);
        item.querySelector("rect").style.fill = read ? `color-mix(in srgb, ${page.sourceTint(i)} 40%, var(--card))`
          : name === "decode" && i === chosen ? "var(--accent-soft)" : "";
        item.classList.toggle("idle", name === "prefill" && !page.document.plans.some((p) => p.sources.includes(i)));
      });
    }
  }

  list() {
    const { page } = this;
    const { plan, here, document: { reads }, transfer } = page;
    const total = plan.bytes.reduce((a, b) => a + b, 0);
    const lines = reads[page.consumer].map(([from, layers, example, parts, extents]) => make("p", {},
      swatch("", page.sourceTint(from)), ` prefill ${transfer.prefill[from].label}: ${parts.join(" ")} of ${many(layers, "layer")} `,
      make("small", {}, `(${layers > 1 ? `${example}, …` : example})`), ` ${extents}`));
    const told = plan.tells.length ? [make("p", {}, `tells prefill ${plan.tells.map((r) => transfer.prefill[r].label).join(", ")}, which nobody reads, that the request is done`)] : [];
    byId("reads").replaceChildren(make("h3", {}, `decode ${here.label} reads ${bytes(total)} from ${many(plan.sources.length, "prefill rank")}`), ...lines, ...told);
  }
}

// Rows of tokens: what each set of layers needs, through the block tables of both sides.
class Walk {
  constructor(page) {
    this.page = page;
    this.root = byId("rows");
    this.lens = byId("lens").firstElementChild;
    this.draw = () => soon(this.paintAll);
    this.paintAll = () => this.paintRows();
    this.root.addEventListener("keydown", (event) => this.key(event));
    byId("walk-legend").replaceChildren(
      legendItem(swatch("copied"), "copied"), legendItem(swatch("zero"), "filled with zeros"),
      legendItem(swatch("hole"), "no block kept"), legendItem(swatch("again"), "end of what is loaded: the next token is decode's own"));
  }

  build() {
    const { page } = this;
    const { plan, here, document: { once }, transfer } = page;
    const needs = once.needs ? once.needs[plan.needs] : [];
    const rows = new Map();
    const row = (group, need, srcGroup) => {
      const key = `${group} ${need}`;
      if (!rows.has(key)) {
        rows.set(key, { group: here.groups.get(group), need: need === null ? null : needs[need], srcGroup: null, copied: [], filled: [] });
      }
      const found = rows.get(key);
      if (srcGroup !== undefined && !found.srcGroup) found.srcGroup = srcGroup;
      return found;
    };
    for (const [source, srcGroup, dstGroup, need, , spans] of plan.edges) {
      row(dstGroup, need, transfer.prefill[plan.sources[source]].groups.get(srcGroup)).copied = once.spans[spans];
    }
    for (const [group, need, , spans] of plan.fills) {
      if (need !== null) row(group, need).filled = once.spans[spans];
      else if (![...rows.values()].some((r) => r.group.id === group)) row(group, null).filled = once.spans[spans];
    }
    this.rows = [...rows.values()];
    this.active = Math.min(page.row, Math.max(0, this.rows.length - 1));
    const { tokens } = transfer.request;
    const ends = this.rows.map((r) => (r.group.paging.tokens ? Math.ceil(tokens / r.group.paging.tokens) * r.group.paging.tokens : 0));
    this.stop = Math.max(1, Math.min(Math.max(tokens + 1, ...ends), Math.ceil((tokens + 1) * 1.25)));
    this.root.replaceChildren(...this.rows.map((r, i) => this.element(r, i)));
    this.root.setAttribute("aria-valuemax", tokens);
    this.draw();
    this.tell();
  }

  element(row, index) {
    const canvas = make("canvas", { "aria-hidden": "true" });
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return Math.max(0, Math.min(this.stop - 1, Math.floor((event.clientX - box.left) / box.width * this.stop)));
    };
    canvas.addEventListener("pointermove", (event) => this.set(row.group.paging.tokens ? at(event) : this.page.token, index));
    canvas.addEventListener("click", () => this.open());
    row.canvas = canvas;
    const { tokens } = row.group.paging;
    const layers = row.need ? many(row.need.layers.length, "layer") : "layers of decode alone";
    const how = row.need && tokens ? reachWords(row.need.reach) : "";
    const from = row.srcGroup && row.srcGroup.paging.tokens;
    const blocks = !tokens ? "the state after the last loaded token"
      : !from || from === tokens ? `blocks of ${number(tokens)} tokens` : `blocks of ${number(from)} → ${number(tokens)} tokens`;
    const layer = row.need && this.page.here.layers.get(row.need.layers[0]);
    row.element = make("div", { class: "row" }, make("p", {}, make("b", {}, `group ${row.group.id}`), ` ${layers}: ${layer ? partsWords(layer) : ""}`,
      make("small", {}, [how, blocks].filter(Boolean).join("; "))), canvas);
    return row.element;
  }

  paintRows() {
    this.rows.forEach((row, i) => {
      row.element.classList.toggle("active", i === this.active);
      this.paint(row.canvas, row, 0, this.stop, false);
    });
    const row = this.rows[this.active];
    byId("lens").hidden = !row || !row.group.paging.tokens;
    if (!byId("lens").hidden) {
      const wide = 40;
      const low = Math.max(0, Math.min(this.page.token - wide / 2, this.stop - wide));
      this.paint(this.lens, row, low, low + wide, true);
    }
  }

  paint(canvas, row, low, high, close) {
    const { transfer, token } = this.page;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth || 600, canvas.clientHeight || 38];
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "11px ui-monospace, 'DejaVu Sans Mono', monospace";
    pen.textBaseline = "middle";
    const band = close ? 24 : 13;
    const [upper, lower] = close ? [14, height - band - 14] : [1, height - band - 1];
    if (!row.group.paging.tokens) {
      this.paintState(pen, row, width, upper, lower, band);
      return;
    }
    const x = (at) => (at - low) / (high - low) * width;
    const cut = (at) => Math.max(low, Math.min(high, at));
    const box = (from, to, y, tall) => pen.fillRect(x(cut(from)), y, x(cut(to)) - x(cut(from)), tall);
    const { tokens } = transfer.request;
    for (const [name, group, y] of [["prefill", row.srcGroup, upper], ["decode", row.group, lower]]) {
      if (!group) continue;
      const size = group.paging.tokens;
      const table = transfer.tables[name].get(group.id) || [];
      const wide = size / (high - low) * width;
      const step = Math.max(1, Math.floor(0.7 / wide));
      for (let place = Math.floor(low / size); place < table.length && place * size < high; place += step) {
        const [from, to] = [x(cut(place * size)), x(cut((place + 1) * size))];
        if (table[place] < 0) {
          pen.strokeStyle = themed("--soft");
          pen.setLineDash([2, 3]);
          pen.strokeRect(from + 0.5, y + 0.5, Math.max(1, to - from - 1), band - 1);
          pen.setLineDash([]);
          continue;
        }
        pen.fillStyle = themed(place % 2 ? "--block-b" : "--block-a");
        pen.fillRect(from, y, Math.max(0.5, to - from - (wide > 4 ? 1 : 0)), band);
      }
    }
    pen.fillStyle = themed("--accent");
    for (const [from, to] of row.copied) {
      if (to <= low || from >= high) continue;
      pen.globalAlpha = 0.22;
      box(from, to, upper + band, lower - upper - band);
      pen.globalAlpha = close ? 0.5 : 0.75;
      box(from, to, upper + band - 4, 4);
      box(from, to, lower, band);
      pen.globalAlpha = 1;
    }
    pen.fillStyle = hatch(pen, themed("--zero"));
    for (const [from, to] of row.filled) if (to > low && from < high) box(from, to, lower, band);
    if (close) this.paintClose(pen, row, low, high, x, upper, lower, band, height);
    if (tokens >= low && tokens < high) {
      pen.fillStyle = themed("--bad");
      pen.fillRect(x(tokens) - 1, 0, 2, height);
    }
    pen.strokeStyle = themed("--cursor");
    pen.lineWidth = close ? 2 : 1;
    if (close) pen.strokeRect(x(token) + 1, upper - 2, x(token + 1) - x(token) - 2, lower + band - upper + 4);
    else {
      pen.fillStyle = themed("--cursor");
      pen.fillRect(x(token + 0.5) - 0.75, 0, 1.5, height);
    }
  }

  paintClose(pen, row, low, high, x, upper, lower, band, height) {
    const { transfer } = this.page;
    pen.fillStyle = themed("--ink");
    for (const [name, group, y] of [["prefill", row.srcGroup, upper], ["decode", row.group, lower]]) {
      if (!group) continue;
      const size = group.paging.tokens;
      const table = transfer.tables[name].get(group.id) || [];
      pen.strokeStyle = themed("--card");
      pen.lineWidth = 1;
      for (let at = low; at <= high; at++) {
        pen.beginPath();
        pen.moveTo(x(at), y);
        pen.lineTo(x(at), y + band);
        pen.stroke();
      }
      for (let place = Math.floor(low / size); place < table.length && place * size < high; place++) {
        const from = Math.max(place * size, low);
        const text = table[place] < 0 ? `${name}: no block` : `${name} block ${table[place]}`;
        if (x(Math.min((place + 1) * size, high)) - x(from) > 7 * text.length) pen.fillText(text, x(from) + 4, name === "prefill" ? 6 : height - 6);
        if (place * size >= low) pen.fillRect(x(place * size) - 1, y - 3, 2, band + 6);
      }
    }
    pen.fillStyle = themed("--soft");
    pen.textAlign = "center";
    for (let at = Math.ceil(low); at < high; at++) if (at % 4 === 0 && at <= transfer.request.tokens) pen.fillText(String(at), x(at + 0.5), (upper + band + lower) / 2);
    pen.textAlign = "start";
  }

  paintState(pen, row, width, upper, lower, band) {
    const { transfer } = this.page;
    const moved = row.copied.length > 0;
    const box = Math.min(160, width / 3);
    const text = (name, group, y) => {
      const ids = group ? transfer.tables[name].get(group.id) || [] : [];
      pen.fillStyle = themed("--block-b");
      pen.fillRect(0, y, box, band);
      if (moved) {
        pen.fillStyle = themed("--accent");
        pen.globalAlpha = 0.45;
        pen.fillRect(0, y, box, band);
        pen.globalAlpha = 1;
      }
      pen.fillStyle = themed("--ink");
      pen.fillText(`${name} block ${ids[0] === undefined ? "none" : ids[0]}`, 6, y + band / 2 + 1);
    };
    if (moved) {
      pen.fillStyle = themed("--accent");
      pen.globalAlpha = 0.22;
      pen.fillRect(0, upper + band, box, lower - upper - band);
      pen.globalAlpha = 1;
    }
    text("prefill", row.srcGroup, upper);
    text("decode", row.group, lower);
  }

  set(token, index) {
    if (token === this.page.token && index === this.active) return;
    this.page.token = token;
    this.active = this.page.row = index;
    this.draw();
    this.tell();
  }

  // The memory below has moved to a token of a layer.
  move(token, layer) {
    this.page.token = token;
    this.follow(layer);
    this.draw();
    this.tell();
  }

  follow(layer) {
    const index = this.rows.findIndex((r) => r.group.id === layer.group.id && r.need && r.need.layers.includes(layer.name));
    if (index >= 0) this.active = this.page.row = index;
    this.draw();
    this.tell();
  }

  // The chosen token if the layer's row copies it; else the first one that it does copy, or null.
  loaded(layer) {
    const row = this.rows[this.active];
    const { token } = this.page;
    if (!row || row.group.id !== layer.group.id || row.copied.some(([low, high]) => low <= token && token < high)) return null;
    return row.copied.length ? row.copied[0][0] : row.filled.length ? row.filled[0][0] : null;
  }

  open() {
    const row = this.rows[this.active];
    if (!row) return;
    const { page } = this;
    const chosen = page.here.layers.get(page.layer);
    const own = row.need ? row.need.layers : [...page.here.layers.values()].filter((l) => l.group.id === row.group.id).map((l) => l.name);
    const names = own.filter((name) => page.here.layers.has(name));
    if (names.length) page.chooseLayer(chosen && names.includes(chosen.name) ? chosen.name : names[0]);
  }

  key(event) {
    const row = this.rows[this.active];
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    const { tokens } = this.page.transfer.request;
    const block = row.group.paging.tokens || 1;
    const at = this.page.token;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageDown: at + block, PageUp: at - block, Home: 0, End: tokens }[event.key];
    const other = { ArrowUp: this.active - 1, ArrowDown: this.active + 1 }[event.key];
    if (to !== undefined) this.set(Math.max(0, Math.min(tokens, to)), this.active);
    else if (other !== undefined && this.rows[other]) {
      this.set(at, other);
      this.rows[other].element.scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter") this.open();
    else if (other === undefined) return;
    event.preventDefault();
  }

  tell() {
    const row = this.rows[this.active];
    const text = row ? this.words(row, this.page.token) : "This rank holds no layers.";
    byId("token").textContent = text;
    this.root.setAttribute("aria-valuenow", Math.min(this.page.token, this.page.transfer.request.tokens));
    this.root.setAttribute("aria-valuetext", text);
  }

  why(row, token) {
    const { tables, request } = this.page.transfer;
    if (!row.srcGroup) return "no prefill rank has these layers";
    const kept = tables.prefill.get(row.srcGroup.id) || [];
    if (kept[Math.floor(token / row.srcGroup.paging.tokens)] < 0) {
      return `prefill keeps no block for it, and these layers look back to token ${number(firstNeeded(row.need.reach, request.tokens))} only`;
    }
    return row.need.per_entry > 1 ? `its entry of ${row.need.per_entry} tokens is not complete` : "these layers do not look back so far";
  }

  // A block that is not whole must not become findable.
  found(row, token) {
    const place = Math.floor(token / row.group.paging.tokens);
    const lost = this.page.plan.unhashable[row.group.id] || [];
    return lost.some(([low, high]) => low <= place && place < high) ? " The block is not whole, so it is kept from being found by its hash." : "";
  }

  words(row, token) {
    const { transfer } = this.page;
    const { tokens, start } = transfer.request;
    const held = (name, group) => {
      const size = group.paging.tokens;
      const id = (transfer.tables[name].get(group.id) || [])[size ? Math.floor(token / size) : 0];
      if (id === undefined) return null;
      return id < 0 ? `${name} keeps no block for it` : size ? `${name} block ${id}, slot ${token % size}` : `${name} block ${id}`;
    };
    const inside = (spans) => spans.some(([low, high]) => low <= token && token < high);
    const set = row.need ? `group ${row.group.id}, ${many(row.need.layers.length, "layer")}` : `group ${row.group.id}`;
    if (!row.group.paging.tokens) {
      return row.copied.length ? `State of ${set}: as it is after ${many(tokens, "token")}, from ${held("prefill", row.srcGroup)} to ${held("decode", row.group)}.`
        : `State of ${set}: nothing is copied; ${held("decode", row.group)} is filled with zeros.`;
    }
    const lead = `Token ${number(token)}, ${set}: `;
    if (inside(row.copied)) {
      const entry = row.need && row.need.per_entry > 1 ? ` One entry stands for ${row.need.per_entry} tokens.` : "";
      const needed = firstNeeded(row.need.reach, tokens);
      const extra = token < needed && !this.found(row, token) ? ` These layers look back to token ${number(needed)} only; the block is completed because others may find it by its hash.` : "";
      return `${lead}copied from ${held("prefill", row.srcGroup)} to ${held("decode", row.group)}.${entry}${extra}${this.found(row, token)}`;
    }
    if (token > tokens) return `${lead}past the prompt: ${inside(row.filled) ? "the rest of a loaded block, filled with zeros." : "nothing is loaded."}`;
    if (token === tokens) return `${lead}the prompt's last one; decode computes it itself. ${inside(row.filled) ? "Until then its slot holds zeros." : ""}`;
    if (inside(row.filled)) return `${lead}filled with zeros in ${held("decode", row.group)}: ${this.why(row, token)}.${this.found(row, token)}`;
    if (token < start) return `${lead}decode has it already.`;
    const first = row.need ? firstNeeded(row.need.reach, tokens) : 0;
    return `${lead}not loaded. ${token < first ? `These layers look back to token ${number(first)} only.` : "No block is kept for it."}`;
  }
}

function firstNeeded(reach, tokens) {
  if (reach.type === "window") return Math.max(0, tokens - reach.tokens + 1);
  if (reach.type === "chunk") return Math.floor(tokens / reach.tokens) * reach.tokens;
  return 0;
}

// One side's memory: its pages, the bytes of one page, and the facts of one byte.
class Pane {
  constructor(page, name) {
    this.page = page;
    this.name = name;
    this.rank = 0;
    this.block = 0;
    this.region = null;
    this.window = null;
    const [pages, cells] = [make("canvas"), make("canvas", { id: `bytes-${name}` })];
    this.title = make("h3");
    this.where = make("p", { class: "where" });
    this.pagesLabel = make("span");
    this.bytesLabel = make("span");
    this.tabs = make("span", { class: "tabs" });
    this.facts = make("dl", { class: "facts", id: `facts-${name}` });
    const closer = make("button", { type: "button", "aria-label": "look closer", onclick: () => this.zoom(1) }, "+");
    const back = make("button", { type: "button", "aria-label": "step back", onclick: () => this.zoom(-1) }, "−");
    this.buttons = { closer, back };
    this.root = make("div", { class: "pane", id: `pane-${name}` }, this.title, this.where,
      make("div", { class: "caption" }, this.pagesLabel), pages,
      make("div", { class: "caption" }, this.bytesLabel, make("span", { class: "tabs" }, this.tabs, back, closer)), cells, this.facts);
    this.pages = new Grid(pages, { label: `Pages of the ${name} rank`, onpoint: (cell) => this.choosePage(cell) });
    this.cells = new Grid(cells, { label: `Bytes of a page of the ${name} rank`, onpoint: (cell) => this.chooseByte(cell), onzoom: (by) => this.zoom(by) });
  }

  get side() {
    return this.page.transfer.side(this.name, this.rank);
  }

  // Show the page of a layer's block.
  visit(rank, layer, region, block) {
    const side = this.page.transfer.side(this.name, rank);
    const found = side.layers.get(layer);
    const same = this.rank === rank && this.layer === layer && this.region === region && this.block === block && this.window;
    if (same && this.consumer === this.page.consumer) return;
    const level = this.window ? this.window.length / (this.whole.stop - this.whole.start) : 1;
    Object.assign(this, { rank, layer, region, block, consumer: this.page.consumer });
    this.whole = side.page(found, region, block);
    this.window = { start: this.whole.start, length: this.whole.stop - this.whole.start, level };
    this.draw();
  }

  point(rank, region, offset, meaning) {
    const inside = this.window && this.rank === rank && this.region === region && offset >= this.whole.start && offset < this.whole.stop;
    if (meaning && (!inside || meaning.part.layer.name !== this.layer || meaning.block !== this.block)) {
      this.visit(rank, meaning.part.layer.name, region, meaning.block);
    } else if (!inside) this.visitPadding(rank, region, offset);
    else if (this.consumer !== this.page.consumer) this.visit(this.rank, this.layer, this.region, this.block);
    this.offset = offset;
    if (offset < this.window.start || offset >= this.window.start + this.window.length) this.centre(offset, this.window.length);
    this.cells.mark(Math.floor((offset - this.window.start) / this.window.per));
    this.tell(meaning);
  }

  visitPadding(rank, region, offset) {
    const side = this.page.transfer.side(this.name, rank);
    const parts = side.partsOf(region);
    const part = parts.filter((p) => p.offset <= offset % p.blockStride).pop() || parts[0];
    this.visit(rank, part.layer.name, region, Math.floor(offset / part.blockStride));
  }

  none(why) {
    this.cells.mark(null);
    this.root.classList.toggle("empty", !this.window);
    this.where.textContent = why;
    this.facts.replaceChildren();
  }

  centre(offset, length) {
    const whole = this.whole.stop - this.whole.start;
    const wanted = Math.min(whole, length);
    const { per, columns } = rowsFor(wanted, this.strides(), 96, 64);
    const row = per * columns;
    const rows = Math.min(Math.ceil(wanted / row), Math.ceil(whole / row));
    const first = Math.max(0, Math.min(Math.ceil(whole / row) - rows, Math.floor((offset - this.whole.start) / row) - Math.floor(rows / 2)));
    this.window = { start: this.whole.start + first * row, length: Math.min(rows * row, whole - first * row) };
    this.drawBytes();
  }

  zoom(by) {
    const whole = this.whole.stop - this.whole.start;
    const at = this.offset === undefined || this.offset < this.whole.start || this.offset >= this.whole.stop ? this.whole.start : this.offset;
    const to = by > 0 ? Math.max(512, Math.ceil(this.window.length / 8)) : this.window.length * 8;
    if (by > 0 && this.window.per === 1) return;
    if (to >= whole) {
      this.window = { start: this.whole.start, length: whole };
      this.drawBytes();
    } else this.centre(at, to);
    this.cells.mark(Math.floor((at - this.window.start) / this.window.per));
  }

  strides() {
    return this.side.partsOf(this.region).filter((p) => p.layer.name === this.layer).flatMap((p) => p.strides);
  }

  draw() {
    if (!this.window) return;
    this.root.classList.remove("empty");
    this.title.replaceChildren(`${this.name} ${this.side.label}`);
    if (this.name === "prefill") this.title.prepend(swatch("", this.page.sourceTint(this.rank)));
    this.page.colours();
    this.drawPages();
    this.drawTabs();
    this.drawBytes();
  }

  drawPages() {
    const layer = this.side.layers.get(this.layer);
    const { blocks } = layer.group;
    const owners = this.page.transfer.places[this.name];
    const per = Math.max(1, Math.ceil(blocks / 1024));
    const [mine, others] = [themed("--accent"), themed("--other")];
    const overlaid = [...owners].filter(([id]) => id !== layer.group.id && [...this.side.layers.values()].some((l) => l.group.id === id && l.parts.some((p) => p.region === this.region)));
    const free = themed("--pad");
    const colour = (cell) => {
      for (let id = cell * per; id < Math.min(blocks, (cell + 1) * per); id++) {
        if (owners.get(layer.group.id)?.has(id)) return mine;
      }
      for (let id = cell * per; id < Math.min(blocks, (cell + 1) * per); id++) if (overlaid.some(([, places]) => places.has(id))) return others;
      return free;
    };
    this.perPage = per;
    this.pagesLabel.textContent = `${many(blocks, "page")} in ${this.side.regions[this.region].label}`
      + `${per > 1 ? `, ${per} a cell` : ""}: ${number(owners.get(layer.group.id)?.size || 0)} of this request for this layer, in blue`;
    this.pages.show({ count: Math.ceil(blocks / per), columns: 64, colour, largest: 9, tallest: 9 });
    this.pages.mark(Math.floor(this.block / per));
  }

  drawTabs() {
    const layer = this.side.layers.get(this.layer);
    const regions = [...new Set(layer.parts.map((p) => p.region))];
    this.tabs.replaceChildren(...(regions.length < 2 ? [] : regions.map((region) => make("button", {
      type: "button", "aria-pressed": region === this.region,
      onclick: () => this.choose(region, this.page.firstByte(layer.parts.find((p) => p.region === region), this.block, 0)),
    }, layer.parts.filter((p) => p.region === region).map((p) => p.name).join(" ")))));
  }

  drawBytes() {
    const { start, length } = this.window;
    const { per, columns } = rowsFor(length, this.strides(), 96, 64);
    this.window.per = per;
    const { page, name, rank, region } = this;
    const other = themed("--other");
    const pad = themed("--pad");
    const decode = (offset) => {
      const origin = page.transfer.origin(rank, region, offset);
      if (origin.kind === "fill") return "zero";
      const meaning = page.transfer.meaning(name, rank, region, offset);
      if (!meaning) return pad;
      return origin.kind === "copy" ? page.sourceTint(origin.source, meaning.part.index) : other;
    };
    const prefill = (offset) => {
      const meaning = page.transfer.meaning(name, rank, region, offset);
      if (!meaning) return pad;
      return page.transfer.target(rank, page.consumer, region, offset) ? page.sourceTint(rank, meaning.part.index) : other;
    };
    const colour = name === "decode" ? decode : prefill;
    const whole = this.whole.stop - this.whole.start;
    this.bytesLabel.textContent = `block ${number(this.block)}: ${length === whole ? `page of ${many(whole, "byte")}` : `bytes ${number(start - this.whole.start)} to ${number(start - this.whole.start + length)} of ${number(whole)}`}`
      + `, ${many(per, "byte")} a cell`;
    this.buttons.closer.disabled = per === 1;
    this.buttons.back.disabled = length === whole;
    this.cells.show({
      count: Math.ceil(length / per), columns, largest: 16, tallest: 16,
      colour: (cell) => colour(start + cell * per), gutter: (row) => `+${number(start - this.whole.start + row * columns * per)}`,
    });
  }

  choosePage(cell) {
    const id = cell * this.perPage;
    const { transfer } = this.page;
    for (const layer of this.side.layers.values()) {
      const part = layer.parts.find((p) => p.region === this.region);
      if (part && transfer.place(this.name, layer.group.id, id) !== undefined) {
        this.choose(this.region, this.page.firstByte(part, id, 0));
        this.pages.mark(cell);
        return;
      }
    }
    const layer = this.side.layers.get(this.layer);
    this.choose(this.region, this.page.firstByte(layer.parts.find((p) => p.region === this.region), id, 0));
    this.pages.mark(cell);
  }

  chooseByte(cell) {
    this.choose(this.region, this.window.start + cell * this.window.per);
  }

  choose(region, offset) {
    if (this.name === "decode") this.page.showDecode(region, offset);
    else this.page.showPrefill(this.rank, region, offset);
  }

  tell(meaning) {
    const region = this.side.regions[this.region];
    this.where.textContent = `${region.label}, byte ${number(this.offset)}`;
    this.facts.dataset.rank = this.rank;
    this.facts.dataset.region = this.region;
    this.facts.dataset.offset = this.offset;
    const fact = (term, text) => [make("dt", {}, term), make("dd", { "data-fact": term }, text)];
    if (!meaning) {
      this.facts.replaceChildren(...fact("layer", "none: padding"));
      return;
    }
    const { part } = meaning;
    const { tokens } = part.group.paging;
    const element = part.shape.element.opaque ? `opaque cell '${part.shape.element.opaque}'` : part.shape.element.dtype;
    const axes = meaning.axes.map((a) => `${a.name} ${a.index}${a.stop - a.start < a.size ? ` of [${a.start}, ${a.stop})` : ""}`);
    const place = meaning.place === undefined ? "not held by this request" : tokens ? `place ${meaning.place} of the table` : "the request's state";
    this.facts.replaceChildren(
      ...fact("layer", part.layer.name),
      ...fact("part", `${part.name}, byte ${meaning.byte} of ${part.bytes} (${element})`),
      ...fact("axes", axes.join(", ") || "none"),
      ...(tokens ? fact("token", meaning.token === undefined ? `entry ${meaning.entry} of its block`
        : part.perEntry > 1 ? `${meaning.token} to ${meaning.token + part.perEntry - 1}, one entry` : String(meaning.token)) : []),
      ...fact("block", `${meaning.block} of group ${part.group.id}, ${place}`),
    );
  }
}

function start() {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const button = byId("theme");
  let page = null;
  const paint = (theme) => {
    root.dataset.theme = theme;
    palette.clear();
    button.textContent = theme === "dark" ? "light theme" : "dark theme";
    button.setAttribute("aria-pressed", theme === "dark");
    if (page) page.redraw();
  };
  paint(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => paint(dark.matches ? "dark" : "light"));
  button.addEventListener("click", () => paint(root.dataset.theme === "dark" ? "light" : "dark"));
  page = new Page(new Transfer(JSON.parse(byId("document").textContent)));
  globalThis.kvferry = page;
  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => page.redraw(), 120);
  });
  root.dataset.ready = "yes";
}

window.addEventListener("error", (event) => {
  byId("trouble").hidden = false;
  byId("trouble").textContent = `This page has failed: ${event.message}`;
});
start();
