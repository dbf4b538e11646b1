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
    soon(this.page.legend);
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
