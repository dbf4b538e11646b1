// What a byte is and where it comes from: the digits of manifests and the strided runs of plans, read backwards.
// Knows no element of the page. All numbers are below 2^53, where division of doubles is exact enough to floor.

class Transfer {
  constructor(document) {
    this.document = document;
    this.request = document.request;
    this.prefill = document.prefill.map((r, i) => new Side(document, r, i, "prefill"));
    this.decode = document.decode.map((r, i) => new Side(document, r, i, "decode"));
    this.tables = { prefill: expand(this.request.prefill), decode: expand(this.request.decode) };
    this.places = { prefill: placesOf(this.tables.prefill), decode: placesOf(this.tables.decode) };
    this.moves = this.decode.map(() => null);
  }

  side(name, rank) {
    return this[name][rank];
  }

  // Runs of one decode rank, ready to be read backwards from either side.
  movesOf(consumer) {
    if (!this.moves[consumer]) {
      const { once } = this.document;
      const plan = this.document.plans[consumer];
      const lanes = once.lanes ? once.lanes[plan.lanes] : [];
      const out = { all: [], into: [] };
      const add = (grain, spans, flow) => {
        const [tokens, runs] = once.grains[grain];
        for (const run of runs) {
          const move = new Move(this, consumer, flow, tokens, run, lanes, once.spans[spans]);
          out.all.push(move);
          (out.into[move.dst.region] ||= []).push(move);
        }
      };
      for (const [source, srcGroup, dstGroup, need, grain, spans] of plan.edges) {
        add(grain, spans, { source: plan.sources[source], srcGroup, dstGroup, need });
      }
      for (const [group, need, grain, spans] of plan.fills) {
        add(grain, spans, { source: null, srcGroup: group, dstGroup: group, need });
      }
      this.moves[consumer] = out;
    }
    return this.moves[consumer];
  }

  // Where a decode rank's byte comes from in this request: {kind: "copy" | "fill" | "none", ...}.
  origin(consumer, region, offset) {
    for (const move of this.movesOf(consumer).into[region] || []) {
      const found = move.fromDestination(region, offset);
      if (found) return found;
    }
    return { kind: "none" };
  }

  // Where a prefill rank's byte goes in one decode rank, or null.
  target(producer, consumer, region, offset) {
    for (const move of this.movesOf(consumer).all) {
      if (move.flow.source !== producer) continue;
      const found = move.fromSource(region, offset);
      if (found) return found;
    }
    return null;
  }

  // All decode ranks that read a prefill rank's byte.
  readers(producer, region, offset) {
    const out = [];
    this.document.plans.forEach((plan, consumer) => {
      if (!plan.sources.includes(producer)) return;
      const found = this.target(producer, consumer, region, offset);
      if (found) out.push(found);
    });
    return out;
  }

  // The block table position of a block of a group, or undefined where the request does not hold it.
  place(side, group, block) {
    return this.places[side].get(group)?.get(block);
  }

  // The first byte that a decode rank reads from a prefill rank, in a given layer if that is possible; or null.
  firstFrom(producer, consumer, layer) {
    let spare = null;
    for (const move of this.movesOf(consumer).all) {
      if (move.flow.source !== producer || !move.spans.length) continue;
      const offset = move.dst.offset + move.dst.steps(this.tables.decode.get(move.dst.group.id), move.spans[0][0], move.tokens);
      const meaning = this.meaning("decode", consumer, move.dst.region, offset);
      if (meaning && meaning.part.layer.name === layer) return { region: move.dst.region, offset };
      spare = spare || { region: move.dst.region, offset };
    }
    return spare;
  }

  // What a byte means on its own side, for the group that holds its block in this request. In a block that no group holds
  // any group may speak; in one that is held, what only other groups would use is padding.
  meaning(sideName, rank, region, offset) {
    const side = this.side(sideName, rank);
    let spare = null;
    for (const part of side.partsOf(region)) {
      const found = part.at(offset);
      if (!found) continue;
      const place = this.place(sideName, part.group.id, found.block);
      if (place !== undefined) return this.placed(part, found, place);
      spare = spare || this.placed(part, found, undefined);
    }
    const taken = spare && side.partsOf(region).some((part) => (
      part.blockStride === spare.part.blockStride && this.place(sideName, part.group.id, spare.block) !== undefined));
    return taken ? null : spare;
  }

  placed(part, found, place) {
    const tokens = part.group.paging.tokens || 0;
    const out = { part, block: found.block, place, axes: found.axes, byte: found.byte, scratch: found.scratch };
    if (tokens && place !== undefined) {
      out.token = place * tokens + found.entry * part.perEntry;
    }
    out.entry = found.entry;
    return out;
  }
}

// One rank's memory: regions, groups, layers, and parts whose digits can be read backwards.
class Side {
  constructor(document, packed, ordinal, name) {
    const { once } = document;
    this.name = name;
    this.ordinal = ordinal;
    [this.tp, this.tpSize, this.pp, this.ppSize] = packed.rank;
    this.regions = once.regions[packed.regions].map(([label, length, memory]) => ({ label, length, memory }));
    this.groups = new Map(once.groups[packed.groups].map((g) => [g.id, g]));
    this.shapes = once.shapes[packed.shapes];
    this.packedLayers = once.layers[packed.layers];
    this.built = null;
  }

  get label() {
    return this.ppSize > 1 ? `tp${this.tp} pp${this.pp}` : `tp${this.tp}`;
  }

  get layers() {
    if (!this.built) {
      this.built = new Map();
      this.byRegion = this.regions.map(() => []);
      for (const [name, group, reach, required, parts] of this.packedLayers) {
        const layer = { name, group: this.groups.get(group), reach, required, parts: [] };
        parts.forEach((part, i) => {
          const placed = new Part(layer, i, part, this.shapes[part[1]]);
          layer.parts.push(placed);
          this.byRegion[placed.region].push(placed);
        });
        this.built.set(name, layer);
      }
    }
    return this.built;
  }

  partsOf(region) {
    return this.layers && this.byRegion[region];
  }

  // The bytes [start, stop) around one layer's block in a region: up to the next slot, or to the next block.
  page(layer, region, block) {
    const mine = layer.parts.filter((p) => p.region === region);
    const stride = mine[0].blockStride;
    const inside = this.partsOf(region).every((p) => p.blockStride === stride && p.offset + p.span <= stride);
    let start = Math.min(...mine.map((p) => p.offset));
    let stop = Math.max(...mine.map((p) => p.offset + p.span));
    if (inside) {
      const others = this.partsOf(region).map((p) => [p.offset, p.offset + p.span]).sort((a, b) => a[0] - b[0]);
      let grown = true;
      while (grown) {
        grown = false;
        for (const [low, high] of others) {
          if (low < stop && high > start && (low < start || high > stop)) {
            start = Math.min(start, low);
            stop = Math.max(stop, high);
            grown = true;
          }
        }
      }
      const after = others.map(([low]) => low).filter((low) => low >= stop);
      stop = after.length ? Math.min(...after) : stride;
    }
    const base = block * stride;
    return { start: base + start, stop: Math.min(base + stop, this.regions[region].length) };
  }
}

class Part {
  constructor(layer, index, [name, , region, offset, blockStride], shape) {
    Object.assign(this, { layer, index, name, region, offset, blockStride, shape, group: layer.group });
    this.perEntry = shape.token ? shape.token.per_entry : 0;
    this.bytes = shape.element.bytes;
    const digits = [{ count: this.group.blocks, stride: blockStride, to: "block", weight: 1 }];
    shape.axes.forEach((axis, i) => digits.push(...weighted(axis.digits, i)));
    if (shape.token) digits.push(...weighted(shape.token.digits, "token"));
    this.digits = new Digits(digits, this.bytes);
    this.span = this.digits.reach + 1 - (this.group.blocks - 1) * blockStride;
    this.strides = digits.slice(1).filter((d) => d.count > 1).map((d) => d.stride);
  }

  // The element that a byte of the region belongs to, or null.
  at(offset) {
    const found = this.digits.solve(offset - this.offset);
    if (!found) return null;
    const axes = this.shape.axes.map((a) => ({ name: a.name, index: a.start, size: a.size, start: a.start, stop: a.stop }));
    let block = 0;
    let entry = 0;
    this.digits.list.forEach((digit, i) => {
      const value = found.values[i] * digit.weight;
      if (digit.to === "block") block += value;
      else if (digit.to === "token") entry += value;
      else axes[digit.to].index += value;
    });
    const scratch = this.shape.axes.some((a, i) => a.live !== null && a.live !== undefined && axes[i].index >= a.live);
    return { block, entry, axes, byte: found.rest, scratch };
  }
}

// A strided run of one flow, with the digits of both sides.
class Move {
  constructor(transfer, consumer, flow, tokens, run, lanes, spans) {
    const [srcRegion, srcOffset, dstRegion, dstOffset, length, repeats, srcLane, dstLane] = run;
    Object.assign(this, { transfer, consumer, flow, tokens, length, spans, repeats });
    const here = transfer.decode[consumer];
    const there = flow.source === null ? here : transfer.prefill[flow.source];
    const [theirs, ours] = [1, 2].map((side) => repeats.map((repeat) => [repeat[0], repeat[side]]));
    this.dst = new End(dstRegion, dstOffset, lanes[dstLane], here.groups.get(flow.dstGroup), ours, length);
    this.src = new End(srcRegion, srcOffset, lanes[srcLane], there.groups.get(flow.srcGroup), theirs, length);
  }

  fromDestination(region, offset) {
    return this.follow(region, offset, this.dst, this.src, "decode");
  }

  fromSource(region, offset) {
    return this.follow(region, offset, this.src, this.dst, "prefill");
  }

  follow(region, offset, near, far, nearName) {
    if (near.region !== region) return null;
    const found = near.digits.solve(offset - near.offset);
    if (!found) return null;
    let block = 0;
    let tile = 0;
    let moved = far.offset + found.rest;
    near.digits.list.forEach((digit, i) => {
      if (digit.to === "block") block += found.values[i];
      else if (digit.to === "tile") tile += found.values[i] * digit.weight;
      else moved += found.values[i] * this.repeats[digit.to][nearName === "decode" ? 1 : 2];
    });
    const place = this.transfer.place(nearName, near.group.id, block);
    if (place === undefined) return null;
    const token = this.tokens ? place * near.group.paging.tokens + tile * this.tokens : 0;
    if (!this.spans.some(([low, high]) => low <= token && token < high)) return null;
    const out = { consumer: this.consumer, group: this.flow.dstGroup, tokens: this.tokens, length: this.length };
    if (this.flow.source === null) return { kind: "fill", ...out };
    const farName = nearName === "decode" ? "prefill" : "decode";
    moved += far.steps(this.transfer.tables[farName].get(far.group.id), token, this.tokens);
    return { kind: "copy", ...out, source: this.flow.source, region: far.region, offset: moved };
  }
}

// One side of a strided run: where it begins, and how it moves from block to block and from tile to tile.
class End {
  constructor(region, offset, [blockStride, lane], group, repeats, length) {
    const digits = [{ count: group.blocks, stride: blockStride, to: "block", weight: 1 }, ...weighted(lane, "tile")];
    repeats.forEach(([count, stride], i) => digits.push({ count, stride, to: i, weight: 1 }));
    Object.assign(this, { region, offset, blockStride, lane, group, digits: new Digits(digits, length) });
  }

  // How far the tile that begins with a token lies from tile 0 of block 0.
  steps(table, token, tokens) {
    const size = this.group.paging.tokens || 0;
    let moved = table[size ? Math.floor(token / size) : 0] * this.blockStride;
    let rest = size ? (token % size) / tokens : 0;
    for (let i = this.lane.length - 1; i >= 0; i--) {
      const [count, stride] = this.lane[i];
      const digit = i ? rest % count : rest;
      moved += digit * stride;
      rest = (rest - digit) / count;
    }
    return moved;
  }
}

function weighted(digits, to) {
  let weight = 1;
  const out = [];
  for (const [count, stride] of [...digits].reverse()) {
    out.push({ count, stride, to, weight });
    weight *= count;
  }
  return out;
}

// Digits of several strides over runs of `length` bytes: finds the digits' values that make up an offset.
class Digits {
  constructor(digits, length) {
    this.length = length;
    this.list = digits.filter((d) => d.count > 1).sort((a, b) => b.stride - a.stride);
    this.after = new Array(this.list.length + 1);
    this.after[this.list.length] = length - 1;
    for (let i = this.list.length - 1; i >= 0; i--) {
      this.after[i] = this.after[i + 1] + (this.list[i].count - 1) * this.list[i].stride;
    }
    this.reach = this.after[0];
    this.values = new Array(this.list.length);
  }

  solve(offset) {
    if (offset < 0 || offset > this.reach) return null;
    const rest = this.step(0, offset);
    return rest < 0 ? null : { values: this.values, rest };
  }

  // Strides that do not nest may leave a choice: the one that comes out even is taken.
  step(i, rest) {
    if (i === this.list.length) return rest < this.length ? rest : -1;
    const { count, stride } = this.list[i];
    const least = Math.max(0, Math.ceil((rest - this.after[i + 1]) / stride));
    for (let value = Math.min(count - 1, Math.floor(rest / stride)); value >= least; value--) {
      const left = this.step(i + 1, rest - value * stride);
      if (left >= 0) {
        this.values[i] = value;
        return left;
      }
    }
    return -1;
  }
}

function expand(tables) {
  const out = new Map();
  for (const [group, runs] of Object.entries(tables)) {
    const ids = [];
    for (const [first, count] of runs) for (let i = 0; i < count; i++) ids.push(first < 0 ? -1 : first + i);
    out.set(Number(group), ids);
  }
  return out;
}

function placesOf(tables) {
  const out = new Map();
  for (const [group, ids] of tables) {
    const places = new Map();
    ids.forEach((id, place) => id >= 0 && places.set(id, place));
    out.set(group, places);
  }
  return out;
}
