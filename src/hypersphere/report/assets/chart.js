// Charts are drawn by Vega. This script adds toggles to the legend, a read-out that follows the pointer or the keys, and
// fits each chart to its column.
class Chart {
  constructor(element) {
    const { spec, about } = JSON.parse(element.querySelector(":scope > script").textContent);
    this.element = element;
    this.about = about;
    this.colors = about.colors;
    this.plot = element.querySelector(".plot");
    this.view = element.querySelector(".view");
    this.rows = (spec.data ?? spec.layer?.[0]?.data)?.values ?? [];
    this.hidden = new Set();
    this.place = null;                       // position of the read-out: a number, or [row, column]
    this.ready = this.embed(spec).then(() => this.listen());
  }

  get size() {
    const width = Math.max(this.view.clientWidth, 120);
    return [width, this.about.square ? Math.round(width * this.about.square) + (this.about.kind === "cells" ? 46 : 30) : this.height];
  }

  async embed(spec) {
    this.height = spec.height ?? 280;
    const single = "mark" in spec || "layer" in spec;   // concatenated charts keep their own sizes
    if (single) [spec.width, spec.height] = this.size;
    if (single) spec.autosize = { type: "fit", contains: "padding" };
    const options = { ast: true, renderer: "svg", actions: false, tooltip: false };
    this.vega = (await vegaEmbed(this.view, spec, options)).view;
    this.view.setAttribute("role", "img");
    const svg = this.view.querySelector("svg");
    svg.setAttribute("aria-hidden", "true");            // the alternative text is on the view
    for (const part of svg.querySelectorAll("[role], [aria-label]")) ["role", "aria-label", "aria-roledescription"].forEach((name) => part.removeAttribute(name));
    if (!single) return;
    new ResizeObserver(() => {
      const [width, height] = this.size;
      if (width === this.vega.width()) return;
      this.hide();
      this.vega.width(width).height(height).resize().runAsync();
    }).observe(this.view);
  }

  listen() {
    for (const button of this.element.querySelectorAll("[data-name]")) {
      button.addEventListener("click", () => this.toggle(button.dataset.name, button));
    }
    if (!this.about.kind) return;
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "application");
    this.plot.setAttribute("aria-label", "Arrow keys read values, Escape ends");
    this.readout = this.add("readout");
    this.readout.setAttribute("aria-live", "polite");
    this.hide();
    const read = (event) => {
      const box = this.view.getBoundingClientRect(), [left, top] = this.vega.origin();
      this.show(this.under(event.clientX - box.left - left, event.clientY - box.top - top));
    };
    this.plot.addEventListener("pointermove", read);
    this.plot.addEventListener("pointerdown", read);
    this.plot.addEventListener("pointerleave", () => this.hide());
    this.plot.addEventListener("blur", () => this.hide());
    this.plot.addEventListener("focus", () => { if (this.plot.matches(":focus-visible")) this.show(this.place ?? this.first()); });
    this.plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") return this.hide();
      const next = this.step(event.key);
      if (next === undefined) return;
      event.preventDefault();
      this.show(next);
    });
  }

  add(kind) {
    const element = document.createElement("div");
    element.className = kind;
    this.plot.append(element);
    return element;
  }

  toggle(name, button) {
    const off = !this.hidden.has(name);
    this.hidden[off ? "add" : "delete"](name);
    button.setAttribute("aria-pressed", String(!off));
    this.vega.signal("hidden", [...this.hidden]).runAsync();
    if (this.readout) this.hide();
  }

  hide() {
    if (!this.readout) return;
    this.readout.hidden = true;
    for (const old of this.plot.querySelectorAll(".guide, .dot, .frame")) old.remove();
  }

  // Fill the read-out with a heading and lines [colour, name, value], next to a position in pixels.
  say(head, lines, x, y) {
    const line = (...parts) => {
      const paragraph = document.createElement("p");
      paragraph.append(...parts);
      return paragraph;
    };
    const made = lines.map(([color, name, value]) => {
      const dot = document.createElement("i"), bold = document.createElement("b");
      dot.style.setProperty("--class", color ?? "transparent");
      bold.textContent = value;
      return line(...(color ? [dot] : []), name, bold);
    });
    this.readout.replaceChildren(line(head), ...made);
    this.readout.hidden = false;
    const { clientWidth: width, clientHeight: height } = this.plot;
    const { offsetWidth, offsetHeight } = this.readout;
    const left = x > width / 2 ? x - offsetWidth - 14 : x + 14;
    this.readout.style.left = `${Math.max(0, Math.min(left, width - offsetWidth))}px`;
    this.readout.style.top = `${Math.max(0, Math.min(y + 10, height - offsetHeight))}px`;
  }
}

// Values of several series over one axis: curves and histograms.
class PointChart extends Chart {
  visible() { return this.rows.filter((row) => row.text !== undefined && row.y !== null && !this.hidden.has(row.series)); }

  at(row) { return row.at ?? row.x; }

  places() { return [...new Set(this.visible().map((row) => this.at(row)))].sort((a, b) => a - b); }

  first() { return this.places().at(-1); }

  pixel(place) { return this.vega.scale("x")(place); }

  under(x) {
    const distance = (place) => Math.abs(this.pixel(place) - x);
    return this.places().reduce((best, place) => (best === undefined || distance(place) < distance(best) ? place : best), undefined);
  }

  step(key) {
    const places = this.places(), now = places.indexOf(this.place), last = places.length - 1;
    const far = Math.max(1, Math.round(places.length / 10));
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - far, PageDown: now + far, Home: 0, End: last }[key];
    return next === undefined ? undefined : places[Math.max(0, Math.min(last, next))];
  }

  show(place) {
    this.hide();
    if (place === undefined) return;
    this.place = place;
    const [left, top] = this.vega.origin(), x = left + this.pixel(place);
    const guide = this.add("guide");
    Object.assign(guide.style, { left: `${x}px`, top: `${top}px`, height: `${this.vega.signal("height")}px` });
    const nearest = new Map();               // of each series: the closest point within 2 % of the axis
    const reach = 0.02 * this.vega.signal("width");
    for (const row of this.visible()) {
      const away = Math.abs(this.pixel(this.at(row)) - this.pixel(place));
      if (away <= (nearest.get(row.series)?.away ?? reach)) nearest.set(row.series, { away, row });
    }
    const lines = [];
    for (const [name, { row }] of nearest) {
      const dot = this.add("dot hue");
      dot.style.setProperty("--class", this.colors[name]);
      Object.assign(dot.style, { left: `${left + this.pixel(this.at(row))}px`, top: `${top + this.vega.scale("y")(row.y)}px` });
      lines.push([this.colors[name], name, row.text]);
    }
    this.say(`${this.about.axis} ${Number(place.toPrecision(5))}`.trim(), lines, x, top);
  }
}

// The cells of a heat map.
class CellChart extends Chart {
  first() { return [0, 0]; }

  get names() { return ["y", "x"].map((axis) => this.vega.scale(axis).domain()); }

  limit(row, column) {
    return [row, column].map((place, side) => Math.max(0, Math.min(this.names[side].length - 1, place)));
  }

  under(x, y) {
    const [rows, columns] = this.names;
    const [width, height] = ["width", "height"].map((name) => this.vega.signal(name));
    return this.limit(Math.floor((y / height) * rows.length), Math.floor((x / width) * columns.length));
  }

  step(key) {
    const [row, column] = this.place ?? [0, -1];
    const next = {
      ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column], ArrowDown: [row + 1, column],
      Home: [row, 0], End: [row, Infinity],
    }[key];
    return next && this.limit(...next);
  }

  show(place) {
    this.hide();
    this.place = place;
    const [rows, columns] = this.names, [row, column] = [rows[place[0]], columns[place[1]]];
    const [left, top] = this.vega.origin(), x = this.vega.scale("x"), y = this.vega.scale("y");
    const frame = this.add("frame");
    Object.assign(frame.style, {
      left: `${left + x(column)}px`, top: `${top + y(row)}px`, width: `${x.bandwidth()}px`, height: `${y.bandwidth()}px`,
    });
    const cell = this.rows.find((candidate) => candidate.row === row && candidate.column === column);
    this.say(`${row.trim()} · ${column.trim()}`, [[null, this.about.name, cell?.text ?? "–"]], left + x(column) + x.bandwidth() / 2, top + y(row) + y.bandwidth());
  }
}

const charts = [...document.querySelectorAll(".chart")].filter((element) => element.querySelector(":scope > script"));
window.chartsReady = Promise.all(charts.map((element) => {
  const kind = JSON.parse(element.querySelector(":scope > script").textContent).about.kind;
  return new ({ points: PointChart, cells: CellChart }[kind] ?? Chart)(element).ready;
})).then(() => document.documentElement.classList.add("drawn"));
