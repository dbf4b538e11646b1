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
    const untold = plan.tells.length > 6 ? many(plan.tells.length, "prefill rank") : `prefill ${plan.tells.map((r) => transfer.prefill[r].label).join(", ")}`;
    const told = plan.tells.length ? [make("p", {}, `also tells ${untold}, which nobody reads, when the request is done`)] : [];
    byId("reads").replaceChildren(make("h3", {}, `decode ${here.label} reads ${bytes(total)} from ${many(plan.sources.length, "prefill rank")}`), ...lines, ...told);
  }
}
