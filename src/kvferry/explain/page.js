// The page: what is chosen, and the views that show it. Decides nothing about bytes: Transfer says what they are.

class Page {
  constructor(transfer) {
    this.transfer = transfer;
    this.document = transfer.document;
    this.consumer = 0;
    this.producer = null;
    this.layer = null;
    this.row = 0;
    this.token = 0;
    this.legend = () => this.colours();
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
