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
    this.rows = [...rows.values()].sort((a, b) => a.group.id - b.group.id);
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
    if (row) this.reveal(row.element);
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

  // Scrolls the rows, never the page: somebody may be pointing at something else.
  reveal(element) {
    const [outer, inner] = [this.root.getBoundingClientRect(), element.getBoundingClientRect()];
    if (inner.top < outer.top) this.root.scrollTop -= outer.top - inner.top;
    else if (inner.bottom > outer.bottom) this.root.scrollTop += inner.bottom - outer.bottom;
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
    else if (other !== undefined && this.rows[other]) this.set(at, other);
    else if (event.key === "Enter") this.open();
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
    if (token >= tokens && inside(row.copied)) {
      const what = token === tokens ? "the prompt's last one; decode computes it itself" : "past the prompt";
      return `${lead}${what}. Its slot is moved all the same, from ${held("prefill", row.srcGroup)} to ${held("decode", row.group)}: the block is one run, and to cut it would cost more.`;
    }
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
