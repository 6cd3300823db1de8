"use strict";

/* The page around the charts: reads the data, keeps one part of time for all charts, and answers to the pointer. */

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = data.charts.map((chart) => new Chart(chart, data.kinds));
  const panes = [];
  const whole = { t0: Math.min(...data.charts.map((c) => c.start)), t1: Math.max(...data.charts.map((c) => c.end)) };
  if (!(whole.t1 > whole.t0)) whole.t1 = whole.t0 + 1;
  const state = { view: { ...whole }, microbatch: null, critical: false, hovered: null };
  const shortest = (whole.t1 - whole.t0) / 1e6;
  const element = (id) => document.getElementById(id);
  const tip = element("tip");

  const make = (tag, text = "", className = "") => {
    const made = document.createElement(tag);
    made.textContent = text;
    made.className = className;
    return made;
  };

  // --- text -------------------------------------------------------------------------------------------------------

  const fact = (chart, name) => (chart.facts.find(([key]) => key === name) || ["", ""])[1];
  const first = data.charts[0];
  element("title").textContent = fact(first, "problem");
  element("summary").textContent = [fact(first, "size"), `makespan ${fact(first, "makespan")}`,
    fact(first, "proven bound") && `proven bound ${fact(first, "proven bound")} (gap ${fact(first, "gap")})`,
    `bubble ${fact(first, "bubble")}`, `found by ${fact(first, "found by")}`].filter(Boolean).join(" · ");
  first.words.forEach((line) => element("words").append(make("li", line)));

  const used = new Set(charts.flatMap((chart) => [...new Set(chart.ops.kind)]));
  data.kinds.forEach((kind, number) => {
    if (!used.has(number)) return;
    const key = make("span", "", "key"), swatch = make("span", kind.letter, "swatch");
    swatch.style.background = kind.fill;
    swatch.style.color = kind.ink;
    key.append(swatch, kind.meaning);
    element("legend").append(key);
  });
  const idle = make("span", "", "key");
  idle.append(make("span", "\u00a0", "swatch bubble"), "bubble");
  element("legend").append(idle);
  if (charts.some((chart) => chart.data.devices.some((device) => device.stages.length > 1))) {
    const later = make("span", "", "key");
    later.append(make("span", "\u00a0", "swatch later"), "band on top: a later stage of its device");
    element("legend").append(later);
  }
  const held = make("span", "", "key");
  held.append(make("span", "\u00a0", "swatch level"), "memory held");
  element("legend").append(held);
  if (charts.some((chart) => chart.data.devices.some((device) => device.budget !== null))) {
    const budget = make("span", "", "key");
    budget.append(make("span", "\u00a0", "swatch budget"), "budget");
    element("legend").append(budget);
  }

  const facts = make("table");
  const keys = [...new Set(data.charts.flatMap((chart) => chart.facts.map(([key]) => key)))];
  if (data.charts.length > 1) {
    const head = facts.insertRow();
    ["", ...data.charts.map((chart) => chart.label)].forEach((text) => head.append(make("th", text)));
  }
  keys.forEach((key) => {
    const row = facts.insertRow();
    [key, ...data.charts.map((chart) => fact(chart, key))].forEach((text) => { row.insertCell().textContent = text; });
  });
  element("facts").append(facts);

  // --- drawing ----------------------------------------------------------------------------------------------------

  const colours = () => {
    const style = getComputedStyle(document.documentElement);
    const names = ["paper", "ink", "muted", "line", "bubble", "hatch", "level", "budget", "path", "later"];
    return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  };

  const hatching = (context, colour) => {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.strokeStyle = colour;
    pen.beginPath();
    pen.moveTo(-1, 7); pen.lineTo(7, -1); pen.moveTo(-1, 1); pen.lineTo(1, -1); pen.moveTo(5, 7); pen.lineTo(7, 5);
    pen.stroke();
    return context.createPattern(tile, "repeat");
  };

  let waiting = false, pointerOnly = true;
  const redraw = (what = "all") => {
    pointerOnly = waiting ? pointerOnly && what === "pointer" : what === "pointer";
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; paint(pointerOnly); });
  };

  const paint = (onlyPointer = false) => panes.forEach((pane) => {
    const look = lookOf(pane);
    if (!onlyPointer) {
      look.hatch = hatching(pane.main, look.colours.hatch);
      pane.chart.draw(pane.main, look);
    }
    const here = state.hovered === null ? null : pane.chart.index.get(state.hovered);
    pane.chart.drawPointer(pane.over, here, look);
  });

  const lookOf = (pane) => ({
    view: state.view, width: pane.width, height: pane.height, scroll: pane.scroll.scrollTop,
    colours: state.colours, microbatch: state.microbatch, critical: state.critical,
  });

  const resize = () => {
    const scale = window.devicePixelRatio || 1;
    panes.forEach((pane) => {
      pane.width = pane.scroll.clientWidth;
      pane.height = pane.scroll.clientHeight;
      for (const context of [pane.main, pane.over]) {
        context.canvas.width = Math.round(pane.width * scale);
        context.canvas.height = Math.round(pane.height * scale);
        context.canvas.style.width = `${pane.width}px`;
        context.canvas.style.height = `${pane.height}px`;
        context.setTransform(scale, 0, 0, scale, 0, 0);
      }
    });
    redraw();
  };

  // --- moving through time ----------------------------------------------------------------------------------------

  const show = (t0, t1) => {
    const length = Math.min(Math.max(t1 - t0, shortest), whole.t1 - whole.t0);
    const from = Math.min(Math.max(t0, whole.t0), whole.t1 - length);
    state.view = { t0: from, t1: from + length };
    redraw();
  };
  const zoom = (factor, around = (state.view.t0 + state.view.t1) / 2) => {
    const { t0, t1 } = state.view;
    show(around - (around - t0) / factor, around + (t1 - around) / factor);
  };
  const move = (part) => {
    const by = part * (state.view.t1 - state.view.t0);
    show(state.view.t0 + by, state.view.t1 + by);
  };
  const follow = (microbatch) => {
    state.microbatch = microbatch;
    element("microbatch").value = microbatch === null ? "" : microbatch;
    redraw();
  };

  // --- the pointer ------------------------------------------------------------------------------------------------

  const describe = (pane, found) => {
    const chart = pane.chart, { ops } = chart, lines = [];
    if (found.op !== undefined) {
      const op = found.op, kind = chart.kinds[ops.kind[op]];
      lines.push([`${chart.label(op)}: ${kind.meaning}`, "b"]);
      lines.push([`stage ${ops.stage[op]}, microbatch ${ops.microbatch[op]}, device ${chart.deviceOf[op]}`]);
      lines.push([`${ms(ops.start[op])} to ${ms(ops.end[op])}, takes ${ms(ops.end[op] - ops.start[op])}`]);
      lines.push([`waits for ${chart.waitsFor(op)}`]);
      panes.filter((other) => other !== pane).forEach((other) => {
        const twin = other.chart.index.get(chart.key(op));
        const times = other.chart.ops;
        lines.push([twin === undefined ? `${other.chart.data.label}: not there`
          : `${other.chart.data.label}: ${ms(times.start[twin])} to ${ms(times.end[twin])}, `
            + `takes ${ms(times.end[twin] - times.start[twin])}`, "span", "other"]);
      });
    } else if (found.idle) {
      const [from, until] = found.idle;
      lines.push([`device ${found.device} is idle: a bubble of ${ms(until - from)}`, "b"]);
      lines.push([`${ms(from)} to ${ms(until)}`]);
      if (found.next >= 0) lines.push([`until ${chart.label(found.next)}, which waits for ${chart.waitsFor(found.next)}`]);
    } else {
      const { budget } = chart.data.devices[found.device];
      lines.push([`device ${found.device} holds ${bytes(found.memory)}`, "b"]);
      lines.push([`at ${ms(found.time)}${budget === null ? "" : `; its budget is ${bytes(budget)}`}`]);
    }
    return lines.map(([text, tag = "div", className = ""]) => make(tag, text, className));
  };

  const hover = (pane, event) => {
    const place = pane.scroll.getBoundingClientRect();
    const x = event.clientX - place.left - pane.scroll.clientLeft;
    const inside = event.clientY - place.top - pane.scroll.clientTop;
    const found = inside < AXIS ? null : pane.chart.at(x, inside + pane.scroll.scrollTop, state.view, pane.width);
    const hovered = found && found.op !== undefined ? pane.chart.key(found.op) : null;
    if (hovered !== state.hovered) {
      state.hovered = hovered;
      redraw("pointer");
    }
    tip.hidden = !found;
    if (found) {
      tip.replaceChildren(...describe(pane, found));
      const box = tip.getBoundingClientRect();
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
      tip.style.top = `${Math.max(4, event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18)}px`;
    }
    return found;
  };

  const leave = () => {
    tip.hidden = true;
    state.hovered = null;
    redraw("pointer");
  };

  const listen = (pane) => {
    const { scroll } = pane;
    let drag = null;
    scroll.addEventListener("pointerdown", (event) => {
      if (event.button === 0 && event.offsetX < scroll.clientWidth) {
        drag = { x: event.clientX, y: event.clientY, t0: state.view.t0, t1: state.view.t1, top: scroll.scrollTop, moved: false };
        scroll.setPointerCapture(event.pointerId);
      }
    });
    scroll.addEventListener("pointermove", (event) => {
      if (!drag) return hover(pane, event);
      const by = event.clientX - drag.x;
      drag.moved = drag.moved || Math.hypot(by, event.clientY - drag.y) > 4;
      if (!drag.moved) return undefined;
      tip.hidden = true;
      const time = (by * (drag.t1 - drag.t0)) / (pane.width - GUTTER);
      scroll.scrollTop = drag.top - (event.clientY - drag.y);
      return show(drag.t0 - time, drag.t1 - time);
    });
    const drop = (event) => {
      const clicked = drag && !drag.moved;
      drag = null;
      if (!clicked || event.type !== "pointerup") return;
      const found = hover(pane, event);
      const microbatch = found && found.op !== undefined ? pane.chart.ops.microbatch[found.op] : null;
      follow(microbatch === state.microbatch ? null : microbatch);
    };
    scroll.addEventListener("pointerup", drop);
    scroll.addEventListener("pointercancel", drop);
    scroll.addEventListener("pointerleave", leave);
    scroll.addEventListener("scroll", () => redraw());
    scroll.addEventListener("dblclick", () => show(whole.t0, whole.t1));
    scroll.addEventListener("wheel", (event) => {
      const x = event.clientX - scroll.getBoundingClientRect().left;
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        zoom(Math.exp(-event.deltaY / 300), pane.chart.time(Math.max(x, GUTTER), state.view, pane.width));
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        move((event.deltaX || event.deltaY) / (pane.width - GUTTER));
      }
    }, { passive: false });
  };

  const KEYS = {
    "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: () => show(whole.t0, whole.t1),
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), Escape: () => follow(null),
  };
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (KEYS[event.key]) { event.preventDefault(); KEYS[event.key](); }
  });
  element("in").addEventListener("click", KEYS["+"]);
  element("out").addEventListener("click", KEYS["-"]);
  element("fit").addEventListener("click", KEYS[0]);
  element("critical").addEventListener("change", (event) => { state.critical = event.target.checked; redraw(); });
  element("microbatch").max = Math.max(...data.charts.map((chart) => chart.microbatches)) - 1;
  element("microbatch").addEventListener("input", (event) => {
    state.microbatch = event.target.value === "" ? null : Number(event.target.value);
    redraw();
  });

  // --- begin ------------------------------------------------------------------------------------------------------

  charts.forEach((chart) => {
    const box = make("div", "", "chart"), scroll = make("div", "", "scroll"), pane = make("div", "", "pane");
    if (charts.length > 1) box.append(make("h2", chart.data.label));
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "img");
    scroll.setAttribute("aria-label", `Gantt chart: ${chart.data.label}, ${chart.count} ops; the tables tell the rest`);
    scroll.style.height = `min(${chart.height + 4}px, ${charts.length > 1 ? 46 : 78}vh)`;
    const [main, over] = [make("canvas"), make("canvas")];
    const spacer = make("div");
    spacer.style.height = `${chart.height}px`;
    pane.append(main, over);
    scroll.append(pane, spacer);
    box.append(scroll);
    element("charts").append(box);
    panes.push({ chart, scroll, main: main.getContext("2d"), over: over.getContext("2d"), width: 0, height: 0 });
  });
  panes.forEach(listen);
  const restyle = () => { state.colours = colours(); redraw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
  restyle();
  resize();
  new ResizeObserver(resize).observe(element("charts"));
  paint();
  globalThis.report = { state, panes, show, zoom, move, follow, hover, paint };
})();
