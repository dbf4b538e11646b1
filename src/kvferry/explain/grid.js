// Drawing waits for the next frame, once however often it is asked for.
const due = new Set();
function soon(draw) {
  if (!due.size) {
    requestAnimationFrame(() => {
      const now = [...due];
      due.clear();
      now.forEach((each) => each());
    });
  }
  due.add(draw);
}

// A canvas of equal cells that can be pointed at, walked with the keyboard and looked into.

class Grid {
  constructor(canvas, { label, onpoint, onzoom }) {
    this.canvas = canvas;
    this.base = document.createElement("canvas");
    this.cursor = null;
    this.shown = null;
    this.onpoint = onpoint;
    this.draw = () => this.paint();
    this.blit = () => this.stamp();
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    canvas.setAttribute("aria-label", label);
    canvas.addEventListener("pointermove", (e) => this.pointed(e));
    canvas.addEventListener("pointerdown", (e) => this.pointed(e));
    canvas.addEventListener("click", () => onzoom && this.cursor !== null && onzoom(1));
    canvas.addEventListener("keydown", (e) => this.key(e, onzoom));
  }

  // {count, columns, colour(cell), gutter(row)}; a gutter's text says where the row begins.
  show(shown) {
    this.shown = shown;
    soon(this.draw);
  }

  paint() {
    if (!this.shown) return;
    const { count, columns, colour, gutter } = this.shown;
    const ratio = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth || 500;
    const rows = Math.max(1, Math.ceil(count / columns));
    this.left = gutter ? 86 : 0;
    this.cell = Math.min(this.shown.largest, (width - this.left - 2) / columns);
    this.height = Math.max(5, Math.min(this.shown.tallest, Math.floor(320 / rows)));
    for (const canvas of [this.canvas, this.base]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round((rows * this.height + 2) * ratio);
    }
    this.canvas.style.height = `${rows * this.height + 2}px`;
    const pen = this.base.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "10px ui-monospace, 'DejaVu Sans Mono', monospace";
    pen.textBaseline = "middle";
    const soft = themed("--soft");
    const every = Math.ceil(13 / this.height);
    const gap = this.cell > 4 && this.height > 4 ? 1 : 0;
    const zero = hatch(pen, themed("--zero"));
    for (let row = 0; row < rows; row++) {
      if (gutter && row % every === 0) {
        pen.fillStyle = soft;
        pen.fillText(gutter(row), 0, Math.max(6, row * this.height + this.height / 2 + 1));
      }
      for (let column = 0; column < columns && row * columns + column < count; column++) {
        const found = colour(row * columns + column);
        if (!found) continue;
        const [from, to] = [column, column + 1].map((at) => this.left + Math.round(at * this.cell));
        pen.fillStyle = found === "zero" ? zero : found;
        pen.fillRect(from, 1 + row * this.height, to - from - gap, this.height - gap);
      }
    }
    this.stamp();
  }

  stamp() {
    const ratio = window.devicePixelRatio || 1;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.drawImage(this.base, 0, 0);
    if (this.cursor === null || !this.shown || !this.cell || this.cursor >= this.shown.count) return;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const [x, y] = this.corner(this.cursor);
    pen.lineWidth = 2;
    pen.strokeStyle = themed("--card");
    pen.strokeRect(x - 2, y - 2, this.cell + 3, this.height + 3);
    pen.strokeStyle = themed("--cursor");
    pen.strokeRect(x - 1, y - 1, this.cell + 1, this.height + 1);
  }

  corner(cell) {
    const { columns } = this.shown;
    return [this.left + Math.round((cell % columns) * this.cell), 1 + Math.floor(cell / columns) * this.height];
  }

  mark(cell) {
    this.cursor = cell;
    soon(this.blit);
  }

  pointed(event) {
    if (!this.shown || !this.cell) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - this.left) / this.cell);
    const row = Math.floor((event.clientY - box.top - 1) / this.height);
    if (column < 0 || column >= this.shown.columns || row < 0) return;
    this.point(row * this.shown.columns + column);
  }

  point(cell) {
    if (cell < 0 || cell >= this.shown.count || cell === this.cursor) return;
    this.mark(cell);
    this.onpoint(cell);
  }

  key(event, onzoom) {
    if (!this.shown || event.ctrlKey || event.metaKey || event.altKey) return;
    const { columns, count } = this.shown;
    const at = this.cursor === null ? 0 : this.cursor;
    const steps = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, PageUp: -8 * columns, PageDown: 8 * columns,
    };
    const zooms = { Enter: 1, "+": 1, "=": 1, Escape: -1, "-": -1 };
    if (event.key in steps) {
      const to = at + steps[event.key];
      if (to >= 0 && to < count) this.point(to);
      else if (event.key.startsWith("Page")) this.point(to < 0 ? at % columns : count - 1);
    } else if (event.key === "Home") this.point(0);
    else if (event.key === "End") this.point(count - 1);
    else if (onzoom && event.key in zooms) onzoom(zooms[event.key]);
    else return;
    event.preventDefault();
  }
}

// Colours of the theme, asked for once: a canvas needs thousands.
const palette = new Map();
function themed(name) {
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return palette.get(name);
}

const hatches = new Map();
function hatch(pen, colour) {
  if (!hatches.has(colour)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const ink = tile.getContext("2d");
    ink.strokeStyle = colour;
    ink.lineWidth = 1.6;
    for (const x of [-6, 0, 6]) {
      ink.beginPath();
      ink.moveTo(x, 6);
      ink.lineTo(x + 6, 0);
      ink.stroke();
    }
    hatches.set(colour, tile);
  }
  return pen.createPattern(hatches.get(colour), "repeat");
}

// Rows that follow a stride of the bytes shown, so that the picture has the memory's own columns; but not at the price of
// cells that are more than twice as coarse as they need be.
function rowsFor(length, strides, widest, tallest) {
  let finest = 1;
  while (Math.ceil(length / (finest * 64)) > tallest) finest *= 2;
  for (const stride of [...new Set(strides)].sort((a, b) => a - b)) {
    if (stride > length || Math.ceil(length / stride) > tallest) continue;
    for (let columns = Math.min(widest, stride); columns >= 16; columns--) {
      if (stride % columns === 0 && stride / columns <= 2 * finest) return { per: stride / columns, columns };
    }
  }
  return { per: finest, columns: 64 };
}
