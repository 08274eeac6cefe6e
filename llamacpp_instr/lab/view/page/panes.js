// Matrices side by side, each on a canvas, at the same place and scale.
//
// Tiles come from the server, level by level, as on a map: a cell of level k covers 2^k by 2^k
// weights. What has not arrived is drawn from a coarser level meanwhile.

import { colorOf, onTheme, paint } from "./colors.js";

const SIDE = 256; // cells of a side of a tile
const KEPT = 300; // tiles
const AT_ONCE = 4; // requests
const LEFT = 46, TOP = 18; // pixels of the rulers
const NUMBERS = 46, GRID = 9, BLOCKS = 1.5; // the least pixels of a weight with which these are drawn
const LARGEST = 64; // pixels of a weight

export class Panes {
  // `fetchTile(which, level, row, column)` returns a promise of {cells, rows, columns};
  // `moved(panes)` is called after each drawing.
  constructor(fetchTile, moved) {
    this.fetchTile = fetchTile;
    this.moved = moved;
    this.panes = [];
    this.tiles = new Map();
    this.wanted = [];
    this.loading = new Set();
    this.chosen = this.pointed = null;
    this.pointers = new Map();
    this.sizes = new ResizeObserver(() => this.draw());
    onTheme(() => {
      for (const tile of this.tiles.values()) tile.picture = null;
      this.draw();
    });
  }

  // Show a matrix of `shape` {rows, columns, top} on each pane {canvas, which, block, sub_block,
  // limits}.
  show(panes, shape) {
    this.clear();
    Object.assign(this, { panes, shape });
    for (const pane of panes) {
      this.listen(pane.canvas);
      this.sizes.observe(pane.canvas);
    }
    // the beginning of a very long matrix, because the whole would be as thin as a hair
    const short = Math.min(shape.rows, shape.columns);
    this.place(Math.min(LARGEST, Math.max(this.least, 80 / short)), 0, 0);
  }

  // Show nothing.
  clear() {
    this.sizes.disconnect();
    this.tiles.clear();
    this.generation = (this.generation ?? 0) + 1;
    Object.assign(this, { panes: [], chosen: null, pointed: null, wanted: [] });
  }

  get level() {
    const finest = Math.ceil(-Math.log2(this.scale * (devicePixelRatio || 1)) - 0.01);
    return Math.max(0, Math.min(this.shape.top, finest));
  }

  // The scale at which the whole is seen.
  get least() {
    const { rows, columns } = this.shape, { width, height } = this.room();
    return Math.min(width / columns, height / rows, LARGEST);
  }

  whole() {
    this.place(this.least, 0, 0);
  }

  // Zoom to a weight; without a row or a column, to the whole column or row.
  goTo(row, column) {
    const { rows, columns } = this.shape;
    this.chosen = { row: row ?? null, column: column ?? null };
    const scale = row === null || column === null ? 12 : LARGEST;
    this.place(scale, (column ?? Math.min(columns / 2, this.x)) + 0.5, (row ?? Math.min(rows / 2, this.y)) + 0.5);
  }

  zoom(factor, at = null) {
    const { width, height } = this.room();
    const [dx, dy] = at ? [at.x - width / 2, at.y - height / 2] : [0, 0];
    const scale = Math.max(this.least, Math.min(LARGEST, this.scale * factor));
    this.place(scale, this.x + dx / this.scale - dx / scale, this.y + dy / this.scale - dy / scale);
  }

  pan(dx, dy) {
    this.place(this.scale, this.x + dx / this.scale, this.y + dy / this.scale);
  }

  place(scale, x, y) {
    const { rows, columns } = this.shape, { width, height } = this.room();
    const inside = (at, room, n) => {
      const half = room / 2 / scale;
      return 2 * half >= n ? n / 2 : Math.max(half, Math.min(n - half, at));
    };
    Object.assign(this, { scale, x: inside(x, width, columns), y: inside(y, height, rows) });
    this.draw();
  }

  room() {
    const canvas = this.panes[0].canvas;
    return { width: Math.max(1, canvas.clientWidth - LEFT), height: Math.max(1, canvas.clientHeight - TOP) };
  }

  // Draw before the next frame.
  draw() {
    this.tell(true);
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (!this.panes.length) return;
      this.wanted = [];
      for (const pane of this.panes) this.drawPane(pane);
      this.load();
      this.moved(this);
      this.tell(this.loading.size > 0);
    });
  }

  // Whether the pictures are still incomplete.
  tell(busy) {
    for (const { canvas } of this.panes) canvas.ariaBusy = busy;
  }

  drawPane(pane) {
    const canvas = pane.canvas, dpr = devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * dpr)) canvas.width = Math.round(width * dpr);
    if (canvas.height !== Math.round(height * dpr)) canvas.height = Math.round(height * dpr);
    const context = canvas.getContext("2d");
    context.setTransform(dpr, 0, 0, dpr, 0, 0);
    context.clearRect(0, 0, width, height);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP, width - LEFT, height - TOP);
    context.clip();
    context.imageSmoothingEnabled = false;
    const { scale, level } = this, see = this.seen();
    const px = (column) => LEFT + (column - see.left) * scale;
    const py = (row) => TOP + (row - see.top) * scale;
    const side = SIDE << level;
    for (let r = Math.floor(see.row / side); r * side < see.bottom; r++) {
      for (let c = Math.floor(see.column / side); c * side < see.right; c++) {
        this.drawTile(context, pane, level, r, c, px, py);
      }
    }
    if (scale >= BLOCKS) this.drawBlocks(context, pane, see, px, py);
    if (scale >= NUMBERS) this.drawNumbers(context, pane, see, px, py);
    if (this.chosen) {
      const { row, column } = this.chosen, { rows, columns } = this.shape;
      context.strokeStyle = getComputedStyle(canvas).color;
      context.lineWidth = 2;
      context.strokeRect(px(column ?? 0), py(row ?? 0), (column === null ? columns : 1) * scale,
        (row === null ? rows : 1) * scale);
    }
    context.restore();
    this.drawRulers(context, canvas, see, px, py);
  }

  // What is on a pane, in weights: `left` and `top` may be outside of the matrix.
  seen() {
    const { width, height } = this.room(), { x, y, scale } = this, { rows, columns } = this.shape;
    const left = x - width / 2 / scale, top = y - height / 2 / scale;
    return {
      left, top, column: Math.max(0, Math.floor(left)), row: Math.max(0, Math.floor(top)),
      right: Math.min(columns, Math.ceil(left + width / scale)), bottom: Math.min(rows, Math.ceil(top + height / scale)),
    };
  }

  drawTile(context, pane, level, row, column, px, py) {
    const key = (k) => `${pane.which}/${k}/${row >> k - level}/${column >> k - level}`;
    for (let k = level; k <= this.shape.top; k++) {
      const tile = this.tiles.get(key(k));
      if (!tile && k === level) this.wanted.push({ key: key(k), which: pane.which, level, row, column });
      if (!tile) continue;
      this.tiles.delete(key(k)); // the latest one is dropped last
      this.tiles.set(key(k), tile);
      tile.picture ??= paint(tile.cells, tile.rows, tile.columns, pane.limits[k]);
      const share = SIDE >> k - level, mask = (1 << k - level) - 1;
      const [sx, sy] = [(column & mask) * share, (row & mask) * share];
      const [w, h] = [Math.min(share, tile.columns - sx), Math.min(share, tile.rows - sy)];
      if (w <= 0 || h <= 0) return;
      const left = column * SIDE * 2 ** level, top = row * SIDE * 2 ** level, cell = 2 ** k * this.scale;
      context.drawImage(tile.picture, sx, sy, w, h, px(left), py(top), w * cell, h * cell);
      return;
    }
  }

  drawBlocks(context, pane, see, px, py) {
    const { block, sub_block: sub } = pane;
    const lines = (from, to, step, alpha, width, ends) => {
      context.globalAlpha = alpha;
      context.lineWidth = width;
      context.beginPath();
      for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
        const [first, last] = ends(at);
        context.moveTo(...first);
        context.lineTo(...last);
      }
      context.stroke();
    };
    const columns = (step, alpha, width) => {
      if (step * this.scale < 6) return;
      lines(see.column, see.right, step, alpha, width, (c) => [[px(c), py(see.row)], [px(c), py(see.bottom)]]);
    };
    context.strokeStyle = getComputedStyle(pane.canvas).color;
    if (sub < block) columns(sub, 0.35, 1);
    if (block > 1) columns(block, 0.9, 1.5);
    if (this.scale >= GRID) {
      columns(1, 0.12, 1);
      // a block has weights of one row
      lines(see.row, see.bottom, 1, block > 1 ? 0.5 : 0.12, 1, (r) => [[px(see.column), py(r)], [px(see.right), py(r)]]);
    }
    context.globalAlpha = 1;
  }

  drawNumbers(context, pane, see, px, py) {
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let row = see.row; row < see.bottom; row++) {
      for (let column = see.column; column < see.right; column++) {
        const value = this.value(pane.which, row, column);
        if (value === null) continue;
        context.fillStyle = colorOf(value, pane.limits[0]).ink;
        context.fillText(short(value), px(column + 0.5), py(row + 0.5), this.scale - 4);
      }
    }
  }

  drawRulers(context, canvas, see, px, py) {
    context.fillStyle = getComputedStyle(canvas).color;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const n = Math.max(this.shape.rows, this.shape.columns);
    const label = 7 * String(n).length + 12;
    context.textAlign = "center";
    for (const at of ticks(see.column, see.right, label / this.scale)) {
      const x = px(at + 0.5);
      if (x > LEFT + label / 2 - 6 && x < canvas.clientWidth - label / 2 + 6) context.fillText(at, x, TOP / 2);
    }
    context.textAlign = "right";
    for (const at of ticks(see.row, see.bottom, 20 / this.scale)) {
      const y = py(at + 0.5);
      if (y > TOP + 5 && y < canvas.clientHeight - 5) context.fillText(at, LEFT - 5, y);
    }
  }

  // What the cell of a level shows that covers a weight; null if its tile is not loaded.
  value(which, row, column, level = 0) {
    const [r, c] = [row >> level, column >> level];
    const tile = this.tiles.get(`${which}/${level}/${r >> 8}/${c >> 8}`);
    return tile ? tile.cells[(r & 255) * tile.columns + (c & 255)] : null;
  }

  load() {
    while (this.loading.size < AT_ONCE && this.wanted.length) {
      const { key, which, level, row, column } = this.wanted.shift();
      if (this.tiles.has(key) || this.loading.has(key)) continue;
      const generation = this.generation;
      this.loading.add(key);
      this.fetchTile(which, level, row, column).then((tile) => {
        this.loading.delete(key);
        if (generation === this.generation && tile) {
          this.tiles.set(key, tile);
          for (const oldest of this.tiles.keys()) {
            if (this.tiles.size <= KEPT) break;
            this.tiles.delete(oldest);
          }
        }
        if (tile) this.draw();
        else this.tell(this.loading.size > 0);
      });
    }
  }

  // The place of an event: pixels from the corner of the matrix's room, and the weight there.
  at(canvas, event) {
    const box = canvas.getBoundingClientRect(), see = this.seen();
    const x = event.clientX - box.left - LEFT, y = event.clientY - box.top - TOP;
    const column = Math.floor(see.left + x / this.scale), row = Math.floor(see.top + y / this.scale);
    const inside = x >= 0 && y >= 0 && row >= 0 && column >= 0 && row < this.shape.rows && column < this.shape.columns;
    return { x, y, weight: inside ? { row, column } : null };
  }

  listen(canvas) {
    let travelled = 0;
    canvas.onwheel = (event) => {
      event.preventDefault();
      const lines = event.deltaMode === 1 ? 16 : 1;
      this.zoom(Math.exp(-event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.002)), this.at(canvas, event));
    };
    canvas.onpointerdown = (event) => {
      canvas.setPointerCapture(event.pointerId);
      if (!this.pointers.size) travelled = 0;
      this.pointers.set(event.pointerId, event);
    };
    canvas.onpointermove = (event) => {
      const before = this.pointers.get(event.pointerId);
      if (!before) {
        this.pointed = this.at(canvas, event).weight;
        this.moved(this);
        return;
      }
      const [dx, dy] = [event.clientX - before.clientX, event.clientY - before.clientY];
      travelled += Math.abs(dx) + Math.abs(dy);
      const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
      this.pointers.set(event.pointerId, event);
      if (other) {
        const far = (of) => Math.hypot(of.clientX - other.clientX, of.clientY - other.clientY) || 1;
        this.zoom(far(event) / far(before), this.at(canvas, other));
      } else if (travelled > 3) {
        this.pan(-dx, -dy);
      }
    };
    canvas.onpointerup = canvas.onpointercancel = (event) => {
      this.pointers.delete(event.pointerId);
      if (event.type === "pointerup" && travelled <= 3) {
        this.chosen = this.at(canvas, event).weight;
        this.draw();
      }
    };
    canvas.onpointerleave = () => {
      this.pointed = null;
      this.moved(this);
    };
    canvas.ondblclick = (event) => this.zoom(4, this.at(canvas, event));
    canvas.onkeydown = (event) => this.key(event);
  }

  key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (moves[event.key]) this.pan(...moves[event.key].map((step) => step * Math.max(60, this.scale)));
    else if (event.key === "+" || event.key === "=") this.zoom(1.5);
    else if (event.key === "-") this.zoom(1 / 1.5);
    else if (event.key === "0") this.whole();
    else return;
    event.preventDefault();
  }
}

// Round numbers between two, at least `least` apart.
function ticks(from, to, least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  const step = Math.max(1, [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least));
  const found = [];
  for (let at = Math.ceil(from / step) * step; at < to; at += step) found.push(at);
  return found;
}

// Three digits.
export function short(value) {
  return Number.isFinite(value) ? String(Number(value.toPrecision(3))) : String(value);
}

// Enough digits to read the same float32 back.
export function exact(value) {
  return Number.isFinite(value) ? String(Number(value.toPrecision(9))) : String(value);
}
