// Charts are static HTML; this script adds toggles to the legend and a read-out that follows the pointer or the keys.
class Chart {
  constructor(element) {
    this.element = element;
    this.hidden = new Set();
    for (const button of element.querySelectorAll("[data-toggle]")) {
      button.addEventListener("click", () => this.toggle(Number(button.dataset.toggle), button));
    }
    const script = element.querySelector(":scope > script");
    this.area = element.querySelector(".area");
    if (!script || !this.area) return;
    this.data = JSON.parse(script.textContent);
    this.place = null;                       // position of the read-out: an index, or [row, column]
    this.area.tabIndex = 0;
    this.area.setAttribute("role", "application");
    this.area.setAttribute("aria-label", "Arrow keys read values, Escape ends");
    this.readout = this.add("readout");
    this.readout.setAttribute("aria-live", "polite");
    this.readout.hidden = true;
    this.listen();
  }

  add(kind) {
    const element = document.createElement("div");
    element.className = kind;
    this.area.append(element);
    return element;
  }

  listen() {
    const read = (event) => {
      const box = this.area.getBoundingClientRect();
      this.show(this.under((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height));
    };
    this.area.addEventListener("pointermove", read);
    this.area.addEventListener("pointerdown", read);
    this.area.addEventListener("pointerleave", () => this.hide());
    this.area.addEventListener("blur", () => this.hide());
    this.area.addEventListener("focus", () => { if (this.area.matches(":focus-visible")) this.show(this.place ?? this.first()); });
    this.area.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") return this.hide();
      const next = this.step(event.key);
      if (next === undefined) return;
      event.preventDefault();
      this.show(next);
    });
  }

  toggle(series, button) {
    const off = !this.hidden.has(series);
    this.hidden[off ? "add" : "delete"](series);
    button.setAttribute("aria-pressed", String(!off));
    for (const mark of this.element.querySelectorAll(`[data-series="${series}"]`)) mark.classList.toggle("off", off);
    if (this.readout) this.hide();
  }

  hide() {
    this.readout.hidden = true;
    for (const old of this.area.querySelectorAll(".guide, .dot, .frame")) old.remove();
  }

  // Fill the read-out with a heading and lines [colour, name, value], next to a position in fractions of the area.
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
    const { clientWidth: width, clientHeight: height } = this.area;
    const { offsetWidth, offsetHeight } = this.readout;
    const left = x > 0.5 ? x * width - offsetWidth - 14 : x * width + 14;
    const top = Math.min(y * height + 10, height - offsetHeight);
    this.readout.style.left = `${Math.max(-30, Math.min(left, width - offsetWidth + 10))}px`;
    this.readout.style.top = `${Math.max(0, top)}px`;
  }
}

// Values of several series over one axis; x is in [0, 1000], y in [0, 280] pixels.
class PointChart extends Chart {
  // The positions at which a visible series has a value.
  known() {
    const places = new Set();
    this.data.series.forEach((series, i) => { if (!this.hidden.has(i)) for (const at of series.at) places.add(at); });
    return [...places].sort((a, b) => a - b);
  }

  first() { return this.known().at(-1); }

  under(x) {
    const distance = (at) => Math.abs(this.data.x[at] - 1000 * x);
    return this.known().reduce((best, at) => (best === undefined || distance(at) < distance(best) ? at : best), undefined);
  }

  step(key) {
    const known = this.known(), now = known.indexOf(this.place), last = known.length - 1;
    const far = Math.max(1, Math.round(known.length / 10));
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - far, PageDown: now + far, Home: 0, End: last }[key];
    return next === undefined ? undefined : known[Math.max(0, Math.min(last, next))];
  }

  show(place) {
    this.hide();
    if (place === undefined) return;
    this.place = place;
    const x = this.data.x[place];
    this.add("guide").style.left = `${x / 10}%`;
    const lines = [];
    this.data.series.forEach((series, i) => {
      const nearest = this.hidden.has(i) ? -1 : this.nearest(series, place);
      if (nearest < 0) return;
      const dot = this.add("dot");
      dot.classList.add("hue");
      dot.style.setProperty("--class", series.color);
      dot.style.left = `${this.data.x[series.at[nearest]] / 10}%`;
      dot.style.top = `${(100 * series.y[nearest]) / 280}%`;
      lines.push([series.color, series.name, series.text[nearest]]);
    });
    this.say(this.data.heads[place], lines, x / 1000, 0);
  }

  // The point of a series closest to a position (the last one of equals), or -1 if it is more than 2 % of the axis away.
  nearest(series, place) {
    const away = (k) => Math.abs(this.data.x[series.at[k]] - this.data.x[place]);
    let best = -1;
    for (let k = 0; k < series.at.length; k++) if (best < 0 || away(k) <= away(best)) best = k;
    return best >= 0 && away(best) <= 20 ? best : -1;
  }
}

// The cells of a map.
class CellChart extends Chart {
  first() { return [0, 0]; }

  limit(row, column) {
    const { rows, columns } = this.data;
    return [Math.max(0, Math.min(rows.length - 1, row)), Math.max(0, Math.min(columns.length - 1, column))];
  }

  under(x, y) { return this.limit(Math.floor(y * this.data.rows.length), Math.floor(x * this.data.columns.length)); }

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
    const [row, column] = place, { rows, columns, text } = this.data;
    const frame = this.add("frame");
    frame.style.left = `${(100 * column) / columns.length}%`;
    frame.style.top = `${(100 * row) / rows.length}%`;
    frame.style.width = `${100 / columns.length}%`;
    frame.style.height = `${100 / rows.length}%`;
    this.say(`${rows[row]} · ${columns[column]}`, [[null, this.data.name, text[row * columns.length + column]]],
      (column + 0.5) / columns.length, (row + 1) / rows.length);
  }
}

for (const element of document.querySelectorAll(".chart")) {
  const script = element.querySelector(":scope > script");
  const kind = script && JSON.parse(script.textContent).kind;
  new (kind === "points" ? PointChart : kind === "cells" ? CellChart : Chart)(element);
}
