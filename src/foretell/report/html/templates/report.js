"use strict";
// Draws the plots of a report from the data in the page. Text reaches the page as text only, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const text = (code) => data.texts[code];
  const space = document.querySelector("svg").namespaceURI;
  const tip = document.getElementById("tip");

  // --- small helpers ---

  function svg(name, attributes = {}, ...children) {
    const made = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  function html(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  function scaled(value, step, units) {
    let i = 0;
    while (Math.abs(value) >= step * 0.9995 && i < units.length - 1) { value /= step; i += 1; }
    return `${Number(value.toPrecision(3))} ${units[i]}`.trim();
  }
  const inTime = (s) => scaled(s * 1e9, 1000, ["ns", "µs", "ms", "s"]);
  const inBytes = (b) => scaled(b, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
  const prefixes = ["", "k", "M", "G", "T", "P", "E"];
  const inRate = (v, unit) => v < 1 ? `${Number(v.toPrecision(3))} ${unit}/s` : scaled(v, 1000, prefixes.map((p) => `${p}${unit}/s`));
  function inShare(value) {
    const percent = 100 * value;
    return percent === 0 ? "0 %" : percent < 0.1 ? "< 0.1 %" : percent < 9.95 ? `${percent.toFixed(1)} %` : `${Math.round(percent)} %`;
  }

  // --- what is said of the mark under the pointer, or under the keyboard's focus ---

  let anchor = () => [0, 0]; // where on the screen the mark is; it moves when the page is scrolled
  function say(lines, where) {
    tip.replaceChildren(html("b", {}, lines[0]), ...lines.slice(1).filter(Boolean).map((line) => html("div", {}, line)));
    tip.hidden = false;
    anchor = where;
    settle();
  }
  function settle() {
    if (tip.hidden) return;
    const [x, y] = anchor();
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), Math.max(8, document.documentElement.clientWidth - box.width - 8));
    const above = y - box.height - 14;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 4 ? above : Math.min(y + 18, window.innerHeight - box.height - 4)}px`;
  }
  const hush = () => { tip.hidden = true; };
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hush(); });
  window.addEventListener("scroll", settle, { passive: true });

  // A drawing with marks that pointer and keyboard walk over. `marks`: {x, y, r, node, lines(), order}.
  function walk(picture, marks, options = {}) {
    let current = -1;
    const show = (i, scroll) => {
      if (current >= 0) { marks[current].node?.classList.remove("on"); options.leave?.(marks[current]); }
      current = i;
      if (i < 0) return hush();
      const mark = marks[i], box = picture.getBoundingClientRect();
      mark.node?.classList.add("on");
      options.enter?.(mark);
      if (scroll && (box.top + mark.y < 0 || box.top + mark.y > window.innerHeight)) {
        picture.scrollIntoView({ block: "nearest" });
      }
      say(mark.lines(), () => {
        const now = picture.getBoundingClientRect();
        return [now.left + mark.x, now.top + mark.y];
      });
    };
    const nearest = (event) => {
      const box = picture.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      let best = -1, distance = options.reach ?? 22;
      marks.forEach((mark, i) => {
        const d = options.distance ? options.distance(mark, x, y) : Math.hypot(mark.x - x, mark.y - y) - mark.r;
        if (d < distance) { distance = d; best = i; }
      });
      return best;
    };
    picture.addEventListener("pointermove", (event) => { const i = nearest(event); if (i !== current) show(i); });
    picture.addEventListener("pointerdown", (event) => show(nearest(event)));
    picture.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") show(-1); });
    picture.addEventListener("blur", () => show(-1));
    picture.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
      if (event.key === "Escape") { show(-1); return; }
      if (!marks.length) return;
      if (step) show(Math.min(marks.length - 1, Math.max(0, current < 0 ? options.start ?? 0 : current + step)), true);
      else if (event.key === "Home") show(0, true);
      else if (event.key === "End") show(marks.length - 1, true);
      else return;
      event.preventDefault();
    });
  }

  // --- axes ---

  function decades(low, high) {
    const all = [];
    for (let e = Math.ceil(Math.log10(low) - 1e-9); e <= Math.log10(high) + 1e-9; e += 1) all.push(10 ** e);
    if (all.length <= 3) return all.flatMap((v) => [v, 2 * v, 5 * v]).filter((v) => v <= high * 1.0001);
    const keep = Math.ceil(all.length / 6);
    return all.filter((_, i) => i % keep === 0);
  }
  const logScale = (low, high, from, to) => (v) => from + (Math.log(v / low) / Math.log(high / low)) * (to - from);
  function roundTicks(high, count, binary) {
    let unit = 1;
    if (binary) while (high / unit >= 1024) unit *= 1024;
    const raw = high / unit / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) * unit;
    const all = [];
    for (let i = 0; i * step <= high * 1.0001; i += 1) all.push(i * step);
    return all;
  }
  const axisText = (x, y, anchor, words, extra = "") => svg("text", { x, y, "text-anchor": anchor, class: `quiet ${extra}` }, words);

  // --- roofline ---

  function marksOf(columns, share, device) {
    return columns.x.map((x, i) => ({
      value: x, height: columns.y[i], family: columns.family[i], share: columns.time[i] / share,
      lines: () => {
        const several = columns.ops[i] > 1 ? ` and ${(columns.ops[i] - 1).toLocaleString("en")} like it` : "";
        return [`${text(columns.name[i])}${several}`, text(columns.module[i]), `writes ${text(columns.shape[i])}`,
          `${inTime(columns.time[i])}, ${inShare(columns.time[i] / share)} of the step`,
          columns.y.length
            ? `${inRate(columns.y[i], "FLOP")} at ${Number(x.toPrecision(3))} FLOP/B`
            : `${inRate(x, "B")}${device.roofline.bandwidth ? `, ${inShare(x / device.roofline.bandwidth)} of the bandwidth` : ""}`];
      },
    }));
  }
  const radius = (share, width) => Math.max(3, Math.sqrt(share) * (width < 500 ? 26 : 38));

  function roofline(place, device, hidden) {
    const r = device.roofline, marks = marksOf(r.counted, device.time, device).filter((m) => !hidden.has(m.family));
    const width = place.clientWidth, height = width < 500 ? 300 : 400;
    const box = { left: 62, right: width - 14, top: 26, bottom: height - 44 };
    const xs = r.counted.x, ys = r.counted.y, top = r.roofs.length ? r.roofs[0].flops_per_s : Math.max(...ys, 1);
    if (!xs.length) { place.replaceChildren(html("p", { class: "quiet" }, "No op of this step has arithmetic that is counted.")); return; }
    const lowX = 10 ** Math.floor(Math.log10(Math.min(...xs, r.ridge ?? 1) * 0.7)), highX = 10 ** Math.ceil(Math.log10(Math.max(...xs, r.ridge ?? 1) * 1.4));
    const lowY = 10 ** Math.floor(Math.log10(Math.min(...ys, top) * 0.7)), highY = 10 ** Math.ceil(Math.log10(Math.max(...ys, top) * 1.05));
    const X = logScale(lowX, highX, box.left, box.right), Y = logScale(lowY, highY, box.bottom, box.top);
    const picture = svg("svg", {
      height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "group",
      "aria-roledescription": "scatter plot", "aria-label": `Roofline: ${xs.length} marks. Arrow keys walk over them, dearest first.`,
    });
    let beside = -100;
    for (const x of decades(lowX, highX)) {
      picture.append(svg("line", { class: "grid", x1: X(x), x2: X(x), y1: box.top, y2: box.bottom }));
      const last = X(x) > box.right - 16;
      if (X(x) - beside < (last ? 52 : 34)) continue;
      beside = X(x);
      const words = x >= 1e4 || x < 0.01 ? `10${superscript(Math.round(Math.log10(x)))}` : `${x}`;
      picture.append(axisText(X(x), box.bottom + 17, last ? "end" : "middle", words));
    }
    for (const y of decades(lowY, highY)) {
      picture.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: Y(y), y2: Y(y) }),
        axisText(box.left - 6, Y(y) + 4, "end", scaled(y, 1000, prefixes)));
    }
    picture.append(axisText(box.right, height - 8, "end", "FLOP per byte of traffic"), axisText(4, 14, "start", "FLOP/s"));
    const levels = r.roofs.filter((roof, i) => i === 0 || Y(roof.flops_per_s) - Y(r.roofs[i - 1].flops_per_s) > 16);
    levels.forEach((roof, i) => {
      const from = r.bandwidth ? Math.min(Math.max(roof.flops_per_s / r.bandwidth, lowX), highX) : lowX;
      picture.append(svg("line", { class: `roof${i ? " lower" : ""}`, x1: X(from), x2: box.right, y1: Y(roof.flops_per_s), y2: Y(roof.flops_per_s) }));
    });
    const labels = [];
    if (r.bandwidth && r.ridge) {
      const start = Math.max(lowX, lowY / r.bandwidth);
      picture.append(svg("line", { class: "roof", x1: X(start), y1: Y(start * r.bandwidth), x2: X(Math.min(r.ridge, highX)), y2: Y(Math.min(r.ridge, highX) * r.bandwidth) }));
      picture.append(svg("circle", { class: "peak", cx: X(r.ridge), cy: Y(top), r: 4 }));
    }
    for (const mark of marks.slice().sort((a, b) => b.share - a.share)) {
      mark.x = X(mark.value); mark.y = Y(mark.height); mark.r = radius(mark.share, width);
      mark.node = svg("circle", { class: `mark k${mark.family}`, cx: mark.x.toFixed(1), cy: mark.y.toFixed(1), r: mark.r.toFixed(1) });
      picture.append(mark.node);
    }
    levels.forEach((roof) => {
      labels.push(svg("text", { x: box.right, y: Y(roof.flops_per_s) - 5, "text-anchor": "end", class: "halo" }, `${roof.name} ${inRate(roof.flops_per_s, "FLOP")}`));
    });
    if (r.bandwidth && r.ridge) {
      const x = X(r.ridge), before = x > (box.left + box.right) / 2;
      picture.insertBefore(svg("line", { class: "grid", x1: x, x2: x, y1: Y(top), y2: box.bottom, "stroke-dasharray": "3 4" }), picture.firstChild);
      labels.push(svg("text", { x: before ? x - 5 : x + 5, y: box.bottom - 7, "text-anchor": before ? "end" : "start", class: "quiet halo" }, `ridge ${Number(r.ridge.toPrecision(3))} FLOP/B`));
      // The slope's name lies along it, where there is room.
      const start = Math.max(lowX, lowY / r.bandwidth), end = Math.min(r.ridge, highX);
      const x1 = X(start), y1 = Y(start * r.bandwidth), x2 = X(end), y2 = Y(end * r.bandwidth);
      const angle = (Math.atan2(y2 - y1, x2 - x1) * 180) / Math.PI, long = Math.hypot(x2 - x1, y2 - y1);
      if (long > 150) {
        const cx = x1 + (x2 - x1) * 0.45, cy = y1 + (y2 - y1) * 0.45;
        labels.push(svg("text", { x: cx, y: cy - 8, "text-anchor": "middle", class: "halo", transform: `rotate(${angle.toFixed(1)} ${cx.toFixed(1)} ${cy.toFixed(1)})` }, `memory ${inRate(r.bandwidth, "B")}`));
      }
    }
    picture.append(...labels);
    walk(picture, marks);
    place.replaceChildren(picture);
  }
  const superscript = (n) => String(n).replace(/./g, (c) => ({ "-": "⁻" })[c] ?? "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)]);

  // Ops without counted arithmetic: one axis, the traffic they reach; dots are set above each other where they meet.
  function traffic(place, device, hidden) {
    const r = device.roofline, marks = marksOf(r.uncounted, device.time, device).filter((m) => !hidden.has(m.family));
    if (!r.uncounted.x.length) { place.replaceChildren(); return; }
    const width = place.clientWidth, left = 14, right = width - 14;
    const values = r.uncounted.x.concat(r.bandwidth ?? []);
    const low = 10 ** Math.floor(Math.log10(Math.max(Math.min(...values) * 0.8, Math.max(...values) / 1e6))), high = 10 ** (Math.ceil(Math.log10(Math.max(...values)) * 4 + 0.4) / 4);
    const X = logScale(low, high, left, right);
    const rows = [];
    for (const mark of marks) {
      mark.x = X(Math.max(mark.value, low)); mark.r = Math.min(radius(mark.share, width), 22);
      let level = 0;
      const meets = (other) => Math.abs(other.level - level) < mark.r + other.r + 1 && Math.abs(other.x - mark.x) < mark.r + other.r && Math.hypot(other.level - level, other.x - mark.x) < mark.r + other.r;
      for (let tries = 0; tries < 24 && rows.some(meets); tries += 1) level = (tries % 2 ? 1 : -1) * Math.ceil((tries + 1) / 2) * 4;
      mark.level = level;
      rows.push(mark);
    }
    const half = Math.max(26, ...rows.map((m) => Math.abs(m.level) + m.r + 2)), middle = 34 + half, height = middle + half + 40;
    const picture = svg("svg", {
      height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "group", "aria-roledescription": "strip plot",
      "aria-label": `Ops without counted arithmetic, by their traffic: ${rows.length} marks. Arrow keys walk over them.`,
    });
    picture.append(svg("text", { x: 4, y: 14 }, width < 560 ? "Ops without counted arithmetic" : "Ops without counted arithmetic, by the traffic they reach"));
    let last = -100;
    for (const x of decades(low, high)) {
      if (X(x) - last < 66) continue;
      last = X(x);
      const at = X(x), anchor = at > right - 30 ? "end" : at < left + 30 ? "start" : "middle";
      picture.append(svg("line", { class: "grid", x1: at, x2: at, y1: 38, y2: middle + half }), axisText(at, middle + half + 16, anchor, inRate(x, "B")));
    }
    if (r.bandwidth) {
      const at = X(r.bandwidth);
      picture.append(svg("line", { class: "roof", x1: at, x2: at, y1: 36, y2: middle + half }),
        svg("text", { x: at, y: 31, "text-anchor": at > width / 2 ? "end" : "start", class: "halo" }, `memory ${inRate(r.bandwidth, "B")}`));
    }
    for (const mark of rows) {
      mark.y = middle + mark.level;
      mark.node = svg("circle", { class: `mark k${mark.family}`, cx: mark.x.toFixed(1), cy: mark.y.toFixed(1), r: mark.r.toFixed(1) });
      picture.append(mark.node);
    }
    walk(picture, marks);
    place.replaceChildren(picture);
  }

  // --- memory over time ---

  function memory(place, device) {
    const m = device.memory;
    if (!m) { place.replaceChildren(html("p", { class: "quiet" }, "How long memory is held is unknown for this step.")); return; }
    const width = place.clientWidth, height = width < 500 ? 230 : 270;
    const box = { left: 66, right: width - 14, top: 30, bottom: height - 40 };
    const most = m.bytes[m.peak], near = m.capacity && m.capacity < 2.2 * most;
    const high = (near ? Math.max(m.capacity, most) : most) * 1.08 || 1;
    const end = m.end || 1;
    const X = (t) => box.left + (t / end) * (box.right - box.left), Y = (b) => box.bottom - (b / high) * (box.bottom - box.top);
    const picture = svg("svg", {
      height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "group", "aria-roledescription": "area plot",
      "aria-label": `Allocated memory over the step, peak ${inBytes(most)}. Arrow keys walk through the step, starting at the peak.`,
    });
    for (const b of roundTicks(high, 4, true)) {
      picture.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: Y(b), y2: Y(b) }), axisText(box.left - 6, Y(b) + 4, "end", inBytes(b)));
    }
    for (const t of roundTicks(end, width < 500 ? 3 : 6)) {
      const at = X(t);
      picture.append(axisText(at, box.bottom + 17, at > box.right - 24 ? "end" : "middle", inTime(t)));
    }
    picture.append(axisText(box.right, height - 6, "end", "time since the step began"), axisText(4, 14, "start", "allocated"));
    let d = `M${box.left} ${box.bottom}`;
    m.time.forEach((t, i) => { d += `L${X(t).toFixed(1)} ${Y(m.bytes[i]).toFixed(1)}H${X(m.time[i + 1] ?? end).toFixed(1)}`; });
    picture.append(svg("path", { class: "area", d: `${d}V${box.bottom}Z` }));
    let after = -100;
    for (const phase of m.phases) {
      const at = X(phase.time);
      picture.append(svg("line", { class: "grid", x1: at, x2: at, y1: box.top, y2: box.bottom }));
      if (at - after > 68 && box.right - at > 70) { picture.append(axisText(at + 4, box.bottom - 6, "start", phase.phase, "halo")); after = at; }
    }
    if (m.capacity && near) {
      picture.append(svg("line", { class: "capacity", x1: box.left, x2: box.right, y1: Y(m.capacity), y2: Y(m.capacity) }),
        svg("text", { x: box.left + 4, y: Y(m.capacity) - 5, class: "halo" }, `the device has ${inBytes(m.capacity)}`));
    }
    const at = X(m.time[m.peak]), over = at > width / 2;
    const fit = Math.max(8, Math.floor((over ? at - 86 : width - at - 20) / 7.4) - 14), name = text(m.name[m.peak]);
    const label = `peak ${inBytes(most)}: ${name.length > fit ? `${name.slice(0, fit - 1)}…` : name}`;
    picture.append(svg("circle", { class: "peak", cx: at, cy: Y(most), r: 5 }),
      svg("text", { x: over ? at - 9 : at + 9, y: Math.max(Y(most) - 7, 14), "text-anchor": over ? "end" : "start", class: "halo" }, label));
    const cross = svg("line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
    picture.append(cross);
    const marks = m.time.map((t, i) => ({
      x: (X(t) + X(m.time[i + 1] ?? end)) / 2, y: Y(m.bytes[i]), r: 0,
      lines: () => [inBytes(m.bytes[i]), `op ${m.op[i]}: ${text(m.name[i])}`, text(m.module[i]), `${inTime(t)} into the step`],
    }));
    walk(picture, marks, {
      reach: Infinity,
      distance: (mark, x) => Math.abs(mark.x - x),
      enter: (mark) => { cross.setAttribute("x1", mark.x); cross.setAttribute("x2", mark.x); cross.setAttribute("visibility", "visible"); },
      leave: () => cross.setAttribute("visibility", "hidden"),
      start: m.peak, // walking begins where it matters
    });
    place.replaceChildren(picture);
  }

  // --- time by module ---

  function icicle(place, device, state) {
    const t = device.icicle, children = t.name.map(() => []);
    t.parent.forEach((parent, i) => { if (parent >= 0) children[parent].push(i); });
    const width = place.clientWidth, row = 30, picture = svg("svg", {
      tabindex: 0, role: "group", "aria-roledescription": "icicle plot",
      "aria-label": "Time by module. Arrow keys walk over it, Enter zooms into a module, Backspace zooms out.",
    });
    const cells = [];
    let deepest = 0;
    const lines = (i) => [text(t.name[i]), `${inTime(t.time[i])}, ${inShare(t.time[i] / device.time)} of the step`,
      `${t.ops[i].toLocaleString("en")} op${t.ops[i] === 1 ? "" : "s"}, mostly limited by ${data.bounds[t.bound[i]]}`];
    const layer = svg("g");
    function put(i, left, right, depth) {
      if (right - left < 0.4 || depth > 14) return;
      deepest = Math.max(deepest, depth);
      const cell = { i, depth, x: left + (right - left) / 2, left, right, y: depth * row + row / 2, r: 0, lines: () => lines(i) };
      const group = svg("g", { class: `cell b${t.bound[i]}` }, svg("rect", { x: left.toFixed(2), y: depth * row, width: (right - left).toFixed(2), height: row - 1 }));
      const fit = Math.floor((right - left - 10) / 7.4), name = text(t.name[i]);
      if (fit >= 3) {
        const words = name.length <= fit ? name : `${name.slice(0, fit - 1)}…`;
        const more = fit - words.length > 9 && depth > 0 ? ` ${inShare(t.time[i] / device.time)}` : "";
        group.append(svg("text", { x: (left + 5).toFixed(2), y: depth * row + 19 }, words + more));
      }
      cell.node = group;
      cells.push(cell);
      layer.append(group);
      let from = left;
      for (const child of children[i]) {
        const to = from + ((right - left) * t.time[child]) / (t.time[i] || 1);
        put(child, from, Math.min(to, right), depth + 1);
        from = to;
      }
    }
    put(state.root, 0, width, 0);
    const height = (deepest + 1) * row;
    picture.setAttribute("height", height);
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.append(layer);

    const zoom = (i) => {
      const focused = document.activeElement === picture;
      state.root = i;
      icicle(place, device, state);
      hush();
      if (focused) place.querySelector("svg").focus();
    };
    const path = [];
    for (let i = state.root; i >= 0; i = t.parent[i]) path.unshift(i);
    const crumbs = html("ol", { class: "crumbs", "aria-label": "Zoomed to" });
    path.forEach((i, n) => {
      const words = i === 0 ? "whole step" : text(t.name[i]);
      if (n === path.length - 1) crumbs.append(html("li", { "aria-current": "true" }, words));
      else {
        const button = html("button", { type: "button" }, words);
        button.addEventListener("click", () => zoom(i));
        crumbs.append(html("li", {}, button));
      }
    });
    let current = -1;
    const show = (n) => {
      if (current >= 0) cells[current].node.classList.remove("on");
      current = n;
      if (n < 0) return hush();
      const cell = cells[n];
      cell.node.classList.add("on");
      layer.append(cell.node);
      say(cell.lines(), () => {
        const box = picture.getBoundingClientRect();
        return [box.left + Math.min(cell.x, cell.left + 60), box.top + cell.y - row / 2];
      });
    };
    const at = (event) => {
      const box = picture.getBoundingClientRect(), x = event.clientX - box.left, depth = Math.floor((event.clientY - box.top) / row);
      return cells.findIndex((c) => c.depth === depth && c.left <= x && x < c.right);
    };
    picture.addEventListener("pointermove", (event) => { const n = at(event); if (n !== current) show(n); });
    picture.addEventListener("pointerleave", () => show(-1));
    picture.addEventListener("blur", () => show(-1));
    picture.addEventListener("click", (event) => {
      const n = at(event);
      if (n < 0) return;
      const i = cells[n].i;
      if (i === state.root) { if (t.parent[i] >= 0) zoom(t.parent[i]); } else if (children[i].length) zoom(i);
    });
    const among = (test) => {
      const found = cells.map((c, n) => [c, n]).filter(([c]) => test(c));
      return found.length ? found[0][1] : -1;
    };
    picture.addEventListener("keydown", (event) => {
      const here = current < 0 ? null : cells[current];
      const same = here && cells.map((c, n) => [c, n]).filter(([c]) => c.depth === here.depth).sort((a, b) => a[0].left - b[0].left).map(([, n]) => n);
      let next = -2;
      if (["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "Home", "Enter", " "].includes(event.key) && !here) next = 0;
      else if (event.key === "ArrowRight") next = same[same.indexOf(current) + 1] ?? current;
      else if (event.key === "ArrowLeft") next = same[same.indexOf(current) - 1] ?? current;
      else if (event.key === "ArrowDown") { const n = among((c) => t.parent[c.i] === here.i); next = n < 0 ? current : n; }
      else if (event.key === "ArrowUp") { const n = among((c) => c.i === t.parent[here.i]); next = n < 0 ? current : n; }
      else if (event.key === "Home") next = 0;
      else if (event.key === "Enter" || event.key === " ") { if (children[here.i].length) zoom(here.i); }
      else if (event.key === "Backspace") { if (t.parent[state.root] >= 0) zoom(t.parent[state.root]); }
      else if (event.key === "Escape") next = -1;
      else return;
      event.preventDefault();
      if (next > -2) show(next);
    });
    place.replaceChildren(crumbs, picture);
  }

  // --- putting it on the page ---

  const articles = [...document.querySelectorAll("article[data-device]")];
  for (const article of articles) {
    const device = data.devices[Number(article.dataset.device)], hidden = new Set(), state = { root: 0 };
    const draw = {
      roofline: (place) => roofline(place, device, hidden), traffic: (place) => traffic(place, device, hidden),
      memory: (place) => memory(place, device), icicle: (place) => icicle(place, device, state),
    };
    const places = [...article.querySelectorAll("[data-plot]")];
    const legend = article.querySelector("[data-legend]");
    const used = new Set(device.roofline.counted.family.concat(device.roofline.uncounted.family));
    [...used].sort((a, b) => a - b).forEach((family) => {
      const key = svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("circle", { cx: 5, cy: 5, r: 4.5, class: `k${family}` }));
      const button = html("button", { type: "button", "aria-pressed": "true" }, key, data.families[family]);
      button.addEventListener("click", () => {
        if (!hidden.delete(family)) hidden.add(family);
        button.setAttribute("aria-pressed", String(!hidden.has(family)));
        places.filter((p) => ["roofline", "traffic"].includes(p.dataset.plot)).forEach((p) => draw[p.dataset.plot](p));
      });
      legend.append(html("li", {}, button));
    });
    for (const place of places) {
      let width = 0;
      new ResizeObserver(() => {
        if (place.clientWidth === width || place.clientWidth === 0) return;
        width = place.clientWidth;
        draw[place.dataset.plot](place);
      }).observe(place);
    }
  }

  // One device at a time, if there are several.
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  function select(n, focus) {
    tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === n));
      tab.tabIndex = i === n ? 0 : -1;
      articles[i].hidden = i !== n;
    });
    if (focus) tabs[n].focus();
  }
  if (tabs.length) {
    select(0);
    tabs.forEach((tab, i) => {
      tab.addEventListener("click", () => select(i));
      tab.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        select((i + step + tabs.length) % tabs.length, true);
      });
    });
    document.querySelectorAll("[data-show]").forEach((link) => link.addEventListener("click", () => select(Number(link.dataset.show))));
  }
})();
