"use strict";

/* A chart of one plan or run: which row is where, which op is under the pointer, and how it is all drawn.
 * Knows canvas contexts, no document: page.js gives it one, with sizes, colours and the part of time to show. */

const GUTTER = 92, AXIS = 22;
const HEIGHT = { head: 20, compute: 24, transfer: 16, memory: 38, space: 8 };
const NARROW = 3;  // px: an op this far from the pointer is still meant

/** The first index of ascending values with a value above x. */
function above(values, x) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > x) high = middle; else low = middle + 1;
  }
  return low;
}

/** A time in ms, with no more digits than a reader needs. */
function ms(time) {
  return `${Number(time.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 6 })} ms`;
}

/** Bytes in decimal units, three digits. */
function bytes(size) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(size) < 999.5) return `${Number(size.toPrecision(3))} ${unit}`;
    size /= 1000;
  }
  return `${Number(size.toPrecision(4))} TB`;
}

/** Steps of the axis: 1, 2 or 5 times a power of ten, at least `least` apart. */
function tickStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= least * 0.999999);
}

class Chart {
  constructor(data, kinds) {
    this.data = data;
    this.kinds = kinds;
    this.ops = data.ops;
    this.count = data.ops.kind.length;
    this.rows = [];
    this.rowOf = new Int32Array(this.count).fill(-1);
    this.deviceOf = new Int32Array(this.count).fill(-1);
    this.ofMicrobatch = new Map();
    this.index = new Map();
    // Which of its device's stages each stage is, from 0.
    this.chunk = new Map(data.devices.flatMap((device) => device.stages.map((stage, n) => [stage, n])));
    for (let op = 0; op < this.count; op++) {
      this.index.set(this.key(op), op);
      const microbatch = this.ops.microbatch[op];
      if (!this.ofMicrobatch.has(microbatch)) this.ofMicrobatch.set(microbatch, []);
      this.ofMicrobatch.get(microbatch).push(op);
    }
    this.height = this.layOut();
  }

  /** Rows from top to bottom; the height of all of them. */
  layOut() {
    let y = AXIS;
    const row = (type, height, rest) => {
      this.rows.push({ type, y, height, ...rest });
      y += height;
    };
    this.data.devices.forEach((device, number) => {
      row("head", HEIGHT.head, { device: number });
      device.lanes.forEach((lane) => {
        this.place(lane.ops, this.rows.length, number);
        const height = lane.name === "compute" ? HEIGHT.compute : HEIGHT.transfer;
        row("lane", height, { device: number, lane: this.sorted(lane), idle: lane.name === "compute" });
      });
      row("memory", HEIGHT.memory, { device: number });
      y += HEIGHT.space;
    });
    if (this.data.shared.length) {
      row("head", HEIGHT.head, { text: "shared channels" });
      this.data.shared.forEach((lane) => row("lane", HEIGHT.transfer, { lane: this.sorted(lane), idle: false }));
      y += HEIGHT.space;
    }
    return y;
  }

  place(ops, row, device) {
    for (const op of ops) {
      this.rowOf[op] = row;
      this.deviceOf[op] = device;
    }
  }

  sorted(lane) {
    const ends = Float64Array.from(lane.ops, (op) => this.ops.end[op]);
    for (let n = 1; n < ends.length; n++) ends[n] = Math.max(ends[n], ends[n - 1]);
    return { name: lane.name, ops: lane.ops, ends };
  }

  key(op) {
    return `${this.ops.kind[op]},${this.ops.stage[op]},${this.ops.microbatch[op]}`;
  }

  label(op) {
    return `${this.kinds[this.ops.kind[op]].name}(${this.ops.stage[op]},${this.ops.microbatch[op]})`;
  }

  /** What the op waits for last, in words. */
  waitsFor(op) {
    const before = this.ops.before[op];
    if (before < 0) return "nothing";
    const label = this.label(before), why = this.ops.why[op];
    if (why === 2) return `${label}, which is done first here`;
    if (why === 3) return `memory, which ${label} frees`;
    return this.deviceOf[before] === this.deviceOf[op] ? label : `${label} on device ${this.deviceOf[before]}`;
  }

  /** The horizontal place of a time, for a view {t0, t1} on a canvas of a width. */
  x(time, view, width) {
    return GUTTER + ((time - view.t0) * (width - GUTTER)) / (view.t1 - view.t0);
  }

  time(x, view, width) {
    return view.t0 + ((x - GUTTER) * (view.t1 - view.t0)) / (width - GUTTER);
  }

  rowAt(y) {
    return this.rows.find((row) => y >= row.y && y < row.y + row.height);
  }

  /** What is at a place (y counts from the top of all rows): {op}, {idle}, {memory}, or null. */
  at(x, y, view, width) {
    const row = this.rowAt(y);
    if (!row || x < GUTTER) return null;
    const time = this.time(x, view, width);
    if (row.type === "memory") return { memory: this.levelAt(row.device, time), device: row.device, time };
    if (row.type !== "lane") return null;
    const { ops, ends } = row.lane, next = above(ends, time);
    const reach = (NARROW * (view.t1 - view.t0)) / (width - GUTTER);
    if (next < ops.length && this.ops.start[ops[next]] <= time) return { op: ops[next] };
    if (next < ops.length && this.ops.start[ops[next]] - time <= reach) return { op: ops[next] };
    if (next > 0 && time - ends[next - 1] <= reach) return { op: ops[next - 1] };
    if (!row.idle || time < this.data.start || time > this.data.end) return null;
    const from = next > 0 ? ends[next - 1] : this.data.start;
    const until = next < ops.length ? this.ops.start[ops[next]] : this.data.end;
    return { idle: [from, until], next: next < ops.length ? ops[next] : -1, device: row.device };
  }

  levelAt(device, time) {
    const curve = this.data.devices[device].memory, next = above(curve.time, time);
    return next ? curve.bytes[next - 1] : 0;
  }

  /** The rectangle of an op on the canvas: {x, y, width, height}. */
  box(op, view, width, scroll) {
    const row = this.rows[this.rowOf[op]];
    const x = this.x(this.ops.start[op], view, width);
    const right = this.x(this.ops.end[op], view, width);
    return { x, y: row.y - scroll + 2, width: Math.max(right - x, 1), height: row.height - 4 };
  }

  /** Everything but the pointer. `look`: {view, width, height, scroll, colours, microbatch, critical}. */
  draw(context, look) {
    const { width, height, scroll, colours } = look;
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, width, height);
    context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    context.textBaseline = "middle";
    for (const row of this.rows) {
      const y = row.y - scroll;
      if (y + row.height < 0 || y > height) continue;
      if (row.type === "head") this.drawHead(context, row, y, look);
      else if (row.type === "lane") this.drawLane(context, row, y, look);
      else this.drawMemory(context, row, y, look);
    }
    if (look.critical) this.drawPath(context, look);
    this.drawAxis(context, look);
  }

  drawHead(context, row, y, { colours }) {
    context.fillStyle = colours.ink;
    context.textAlign = "left";
    if (row.text) return context.fillText(row.text, 6, y + row.height / 2);
    const device = this.data.devices[row.device];
    const stages = `stage${device.stages.length > 1 ? "s" : ""} ${device.stages.join(", ")}`;
    const budget = device.budget === null ? "no limit" : `budget ${bytes(device.budget)}`;
    const busy = `busy ${(100 * device.busy).toFixed(0)}%`;
    const text = `${device.name}   ${stages} · ${busy} · peak ${bytes(device.peak)}, ${budget}`;
    return context.fillText(text, 6, y + row.height / 2);
  }

  drawLane(context, row, y, look) {
    const { view, width, colours } = look, { ops, ends } = row.lane;
    this.name(context, row.lane.name, y + row.height / 2, look);
    const inside = [this.x(this.data.start, view, width), this.x(this.data.end, view, width)];
    const [left, right] = [Math.max(GUTTER, inside[0]), Math.min(width, inside[1])];
    if (row.idle && right > left) {
      context.fillStyle = colours.bubble;
      context.fillRect(left, y + 2, right - left, row.height - 4);
      context.fillStyle = look.hatch || colours.bubble;
      context.fillRect(left, y + 2, right - left, row.height - 4);
    } else {
      context.fillStyle = colours.line;
      context.fillRect(GUTTER, y + row.height / 2, width - GUTTER, 1);
    }
    let drawn = -1;
    for (let n = above(ends, view.t0); n < ops.length && this.ops.start[ops[n]] < view.t1; n++) {
      const op = ops[n], chosen = look.microbatch === null || this.ops.microbatch[op] === look.microbatch;
      const from = Math.max(GUTTER, this.x(this.ops.start[op], view, width));
      const to = Math.min(width, this.x(this.ops.end[op], view, width));
      // Whole pixels: what is narrower than one is not blended with its neighbours. Of several in one column the first
      // stands for all, but the chosen microbatch is always seen.
      const right = Math.max(Math.round(to), Math.round(from) + 1);
      if (right <= drawn && !(chosen && look.microbatch !== null)) continue;
      const left = Math.min(Math.max(Math.round(from), drawn), right - 1), wide = right - left;
      drawn = right;
      const kind = this.kinds[this.ops.kind[op]];
      context.globalAlpha = chosen ? 1 : 0.15;
      context.fillStyle = kind.fill;
      context.fillRect(left, y + 2, wide > 4 ? wide - 1 : wide, row.height - 4);
      const chunk = this.chunk.get(this.ops.stage[op]);
      if (row.idle && chunk && wide > 2) {
        context.fillStyle = look.colours.later;
        context.fillRect(left, y + 2, wide > 4 ? wide - 1 : wide, Math.min(3 * chunk, 9));
      }
      if (wide > 9 && row.height > 12) this.drawLabel(context, kind, op, left, wide, y + row.height / 2);
    }
    context.globalAlpha = 1;
  }

  drawLabel(context, kind, op, from, wide, y) {
    const text = kind.letter + this.ops.microbatch[op], room = wide - 3;
    // Measured once a kind; all digits are equally wide.
    kind.wide ??= context.measureText(kind.letter).width;
    this.digit ??= context.measureText("0").width;
    const whole = kind.wide + (text.length - kind.letter.length) * this.digit;
    const shown = whole <= room ? text : kind.wide <= room ? kind.letter : "";
    if (!shown) return;
    context.fillStyle = kind.ink;
    context.textAlign = "center";
    context.fillText(shown, from + wide / 2, y + 0.5);
  }

  drawMemory(context, row, y, look) {
    const { view, width, colours } = look, device = this.data.devices[row.device], { time, bytes: level } = device.memory;
    this.name(context, "memory", y + row.height / 2, look);
    const full = Math.max(device.budget || 0, device.peak, 1), bottom = y + row.height - 2, tall = row.height - 6;
    const up = (size) => bottom - (tall * size) / full;
    context.fillStyle = colours.level;
    context.beginPath();
    let first = Math.max(above(time, view.t0) - 1, 0), held = first < time.length && time[first] <= view.t0 ? level[first] : 0;
    context.moveTo(GUTTER, bottom);
    context.lineTo(GUTTER, up(held));
    let column = -1, most = 0;
    const flush = () => {
      // Within one column of pixels: up to the highest level, then on to the last.
      if (column >= 0) { context.lineTo(column, up(most)); context.lineTo(column, up(held)); }
    };
    for (let n = first; n < time.length && time[n] < view.t1; n++) {
      if (time[n] < view.t0) { held = level[n]; continue; }
      const x = Math.round(2 * this.x(time[n], view, width)) / 2;
      if (x !== column) { flush(); context.lineTo(x, up(held)); column = x; most = held; }
      held = level[n];
      most = Math.max(most, held);
    }
    flush();
    context.lineTo(width, up(held));
    context.lineTo(width, bottom);
    context.fill();
    if (device.budget !== null) this.line(context, up(device.budget), look, colours.budget, [5, 3]);
    context.fillStyle = colours.line;
    context.fillRect(GUTTER, bottom, width - GUTTER, 1);
  }

  line(context, y, { width }, colour, dash) {
    context.strokeStyle = colour;
    context.lineWidth = 1;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(GUTTER, y + 0.5);
    context.lineTo(width, y + 0.5);
    context.stroke();
    context.setLineDash([]);
  }

  name(context, text, y, { colours }) {
    context.fillStyle = colours.muted;
    context.textAlign = "right";
    context.fillText(text.length > 14 ? `${text.slice(0, 13)}…` : text, GUTTER - 8, y);
  }

  drawPath(context, look) {
    const { view, width, height, scroll, colours } = look;
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, width - GUTTER, height - AXIS);
    context.clip();
    context.strokeStyle = colours.path;
    context.lineWidth = 1.5;
    context.beginPath();
    let last = null;
    for (const op of this.data.critical) {
      const box = this.box(op, view, width, scroll);
      if (box.x + box.width > GUTTER - 40 && box.x < width + 40) {
        context.rect(box.x, box.y - 1, box.width, box.height + 2);
        if (last) { context.moveTo(last[0], last[1]); context.lineTo(box.x, box.y + box.height / 2); }
      }
      last = [box.x + box.width, box.y + box.height / 2];
    }
    context.stroke();
    context.restore();
  }

  drawAxis(context, { view, width, colours }) {
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, width, AXIS);
    context.fillStyle = colours.line;
    context.fillRect(0, AXIS - 1, width, 1);
    const step = tickStep(((view.t1 - view.t0) * 80) / Math.max(width - GUTTER, 80));
    context.textAlign = "center";
    for (let n = Math.ceil(view.t0 / step); n * step <= view.t1; n++) {
      const x = this.x(n * step, view, width);
      context.fillStyle = colours.line;
      context.fillRect(x, AXIS - 6, 1, 6);
      context.fillStyle = colours.muted;
      const text = Number((n * step).toPrecision(10)).toLocaleString("en", { maximumFractionDigits: 9 });
      if (x > GUTTER - 1 && x < width - 16) context.fillText(text, x, AXIS / 2 - 1);
    }
    context.fillStyle = colours.muted;
    context.textAlign = "right";
    context.fillText("ms", GUTTER - 32, AXIS / 2 - 1);
  }

  /** What the pointer is on, above the rest: the op, its microbatch, and what it waits for. */
  drawPointer(context, op, look) {
    const { view, width, height, scroll, colours } = look;
    context.clearRect(0, 0, width, height);
    if (op === null || op === undefined) return;
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, width - GUTTER, height - AXIS);
    context.clip();
    context.strokeStyle = colours.ink;
    context.lineWidth = 1;
    for (const other of this.ofMicrobatch.get(this.ops.microbatch[op]) || []) {
      const box = this.box(other, view, width, scroll);
      context.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
    }
    context.lineWidth = 3;
    const box = this.box(op, view, width, scroll), before = this.ops.before[op];
    context.strokeRect(box.x - 1, box.y - 1, box.width + 2, box.height + 2);
    if (before >= 0) {
      const from = this.box(before, view, width, scroll);
      context.lineWidth = 2;
      context.setLineDash([4, 2]);
      context.strokeRect(from.x - 1, from.y - 1, from.width + 2, from.height + 2);
      context.beginPath();
      context.moveTo(from.x + from.width, from.y + from.height / 2);
      context.lineTo(box.x, box.y + box.height / 2);
      context.stroke();
    }
    context.restore();
  }
}

if (typeof module !== "undefined") module.exports = { Chart, above, bytes, ms, tickStep, GUTTER, AXIS };
