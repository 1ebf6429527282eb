// One picture: a translucent ball (or a circle) with points on it and class vectors through it. The view draws itself
// for a given rotation and finds the point under the pointer; spheres.js handles the interaction.
const LEVELS = 24;          // steps of depth; points are sorted and styled by step
const REACH = 1.17;         // class vectors end this far from the centre
const MARGIN = 1.29;        // half the canvas, in radii
const MOST_LABELS = 40;     // with more class vectors only the highlighted one is labelled
const MOST_RINGED = 2500;   // with more points, thin rings are omitted, because they cost as much as the discs
const FULL_TURN = 2 * Math.PI;

// Circles of longitude and latitude every 30 degrees, as polylines on the unit sphere.
const GRATICULE = (() => {
  const steps = 72;
  const line = (at) => Array.from({ length: steps + 1 }, (_, i) => at((i / steps) * FULL_TURN));
  const meridians = [0, 1, 2, 3, 4, 5].map((i) => (i * Math.PI) / 6).map((longitude) =>
    line((t) => [Math.cos(t) * Math.cos(longitude), Math.sin(t), Math.cos(t) * Math.sin(longitude)]));
  const parallels = [-2, -1, 0, 1, 2].map((i) => (i * Math.PI) / 6).map((latitude) =>
    line((t) => [Math.cos(latitude) * Math.cos(t), Math.sin(latitude), Math.cos(latitude) * Math.sin(t)]));
  return [...meridians, ...parallels];
})();

class SphereView {
  constructor(canvas, drawing, legend) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.legend = legend;                                   // { classes, colors }
    this.flat = drawing.dimension === 2;
    this.labels = drawing.labels;
    this.count = drawing.labels.length;
    this.points = new Float32Array(this.count * 3);
    for (let i = 0; i < this.count; i++) {
      for (let k = 0; k < drawing.dimension; k++) this.points[3 * i + k] = drawing.points[drawing.dimension * i + k];
    }
    this.vectors = drawing.vectors.map((v) => v && [v[0], v[1], v[2] ?? 0]);
    this.angles = drawing.angles;                           // angles in the original space if the points are projections
    this.start = this.flat ? STILL : compose(turnAbout([1, 0, 0], 0.42), turnAbout([0, 1, 0], -0.5));
    this.rotation = this.start;
    this.zoom = 1;
    this.screen = new Float32Array(this.count * 3);         // x, y in css pixels, and depth
    this.slot = new Uint32Array(this.count);
    this.order = new Uint32Array(this.count);
  }

  measure() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const density = Math.min(window.devicePixelRatio || 1, 3);
    if (!width || !height) return;
    this.size = Math.min(width, height);
    this.density = density;
    this.center = [width / 2, height / 2];
    this.canvas.width = Math.round(width * density);
    this.canvas.height = Math.round(height * density);
  }

  get radius() { return (this.size / 2 / MARGIN) * this.zoom; }

  readTheme() {
    const style = getComputedStyle(this.canvas);
    const names = ["ball-light", "ball", "ball-edge", "rim", "grid", "ink", "paper", "dim"];
    this.theme = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    const dark = document.documentElement.dataset.theme === "dark";
    this.colors = dark ? this.legend.colors.map(lifted) : this.legend.colors;
    this.font = style.fontFamily;
  }

  draw(highlight, withVectors) {
    if (!this.size) this.measure();
    if (!this.size) return;
    if (!this.theme) this.readTheme();
    const context = this.context;
    context.setTransform(this.density, 0, 0, this.density, 0, 0);
    context.lineCap = "round";
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.matrix = matrixOf(this.rotation);
    this.place();
    const vectors = withVectors ? this.placedVectors(highlight) : [];
    this.chooseLabels(vectors, highlight);
    const behind = vectors.filter((v) => v.depth < 0);
    const before = vectors.filter((v) => v.depth >= 0);

    // Paint from back to front. The tip of a class vector is outside the ball, its shaft inside.
    this.paintBall(1);
    if (!this.flat) this.paintGrid(false);
    for (const vector of behind) this.paintSpike(vector);
    this.paintPoints(0, LEVELS / 2, highlight);
    for (const vector of behind) this.paintLabel(vector);
    for (const vector of vectors) this.paintShaft(vector);
    if (!this.flat) { this.paintBall(0.34); this.paintGrid(true); } else this.paintTicks();
    this.paintPoints(LEVELS / 2, LEVELS, highlight);
    for (const vector of before) { this.paintSpike(vector); this.paintLabel(vector); }
  }

  turned(x, y, z) {
    const m = this.matrix;
    return [m[0] * x + m[1] * y + m[2] * z, m[3] * x + m[4] * y + m[5] * z, m[6] * x + m[7] * y + m[8] * z];
  }

  // Rotate all points, and sort them by depth level and class with a counting sort.
  place() {
    const { points, labels, screen, slot, order, radius, count, matrix: m } = this;
    const [cx, cy] = this.center;
    const classes = this.colors.length;
    const starts = new Uint32Array(LEVELS * classes + 1);
    for (let i = 0, j = 0; i < count; i++, j += 3) {
      const x = points[j], y = points[j + 1], z = points[j + 2];
      const depth = m[6] * x + m[7] * y + m[8] * z;
      screen[j] = cx + radius * (m[0] * x + m[1] * y + m[2] * z);
      screen[j + 1] = cy - radius * (m[3] * x + m[4] * y + m[5] * z);
      screen[j + 2] = depth;
      const level = Math.max(0, Math.min(LEVELS - 1, Math.floor(((depth + 1) / 2) * LEVELS)));
      slot[i] = level * classes + labels[i];
      starts[slot[i] + 1]++;
    }
    for (let k = 1; k < starts.length; k++) starts[k] += starts[k - 1];
    this.starts = starts.slice();
    for (let i = 0; i < count; i++) order[starts[slot[i]]++] = i;
  }

  pointRadius() {
    const crowd = Math.min(1.25, Math.max(0.8, Math.sqrt(1500 / Math.max(this.count, 1))));
    return Math.max(1.5, (this.size / 2) * 0.0175 * crowd) * Math.sqrt(this.zoom);
  }

  // Circles are drawn one by one, which is faster than images or one long path. The points are sorted, so the style
  // changes only once per class and level.
  paintPoints(fromLevel, toLevel, highlight) {
    const { context, screen, order, starts, colors } = this;
    const largest = this.pointRadius();
    const ringed = this.count <= MOST_RINGED;
    context.strokeStyle = this.theme.paper;
    context.lineWidth = 0.5;
    for (let level = fromLevel; level < toLevel; level++) {
      const near = (level + 0.5) / LEVELS;                  // 0 at the far pole, 1 at the near one
      const front = level >= LEVELS / 2;
      const radius = largest * (0.6 + 0.4 * near);
      for (let label = 0; label < colors.length; label++) {
        const slot = level * colors.length + label;
        const dimmed = highlight !== null && highlight !== label;
        context.globalAlpha = (front ? 0.62 + 0.33 * near : 0.2 + 0.3 * near) * (dimmed ? 0.22 : 1);
        context.fillStyle = dimmed ? this.theme.dim : colors[label];
        for (let k = starts[slot]; k < starts[slot + 1]; k++) {
          context.beginPath();
          context.arc(screen[3 * order[k]], screen[3 * order[k] + 1], radius, 0, FULL_TURN);
          context.fill();
          if (ringed && front && !dimmed) context.stroke();
        }
      }
    }
    context.globalAlpha = 1;
  }

  paintBall(strength) {
    const { context, radius, theme } = this;
    const [x, y] = this.center;
    const shade = context.createRadialGradient(x - 0.36 * radius, y - 0.42 * radius, radius * 0.05, x, y, radius);
    shade.addColorStop(0, theme["ball-light"]);
    shade.addColorStop(0.62, theme.ball);
    shade.addColorStop(1, theme["ball-edge"]);
    context.globalAlpha = strength;
    context.fillStyle = this.flat ? theme.ball : shade;
    context.beginPath();
    context.arc(x, y, radius, 0, FULL_TURN);
    context.fill();
    context.globalAlpha = 1;
    context.strokeStyle = theme.rim;
    context.lineWidth = this.flat ? 1.4 : 1;
    context.stroke();
  }

  paintGrid(front) {
    const { context, radius, theme } = this;
    const [cx, cy] = this.center;
    context.beginPath();
    for (const line of GRATICULE) {
      let pen = false;
      for (const place of line) {
        const [x, y, z] = this.turned(...place);
        if ((z >= 0) !== front) { pen = false; continue; }
        if (pen) context.lineTo(cx + radius * x, cy - radius * y); else context.moveTo(cx + radius * x, cy - radius * y);
        pen = true;
      }
    }
    context.strokeStyle = theme.grid;
    context.globalAlpha = front ? 0.85 : 0.4;
    context.lineWidth = 0.8;
    context.stroke();
    context.globalAlpha = 1;
  }

  paintTicks() {
    const { context, radius, theme } = this;
    const [cx, cy] = this.center;
    context.beginPath();
    for (let i = 0; i < 12; i++) {
      const [x, y] = this.turned(Math.cos((i * Math.PI) / 6), Math.sin((i * Math.PI) / 6), 0);
      context.moveTo(cx + 0.94 * radius * x, cy - 0.94 * radius * y);
      context.lineTo(cx + radius * x, cy - radius * y);
    }
    context.strokeStyle = theme.rim;
    context.lineWidth = 1;
    context.stroke();
  }

  // Class vectors in screen coordinates, far ones first.
  placedVectors(highlight) {
    const [cx, cy] = this.center;
    const placed = [];
    this.vectors.forEach((vector, label) => {
      if (!vector) return;
      const [x, y, depth] = this.turned(...vector);
      const at = (length) => [cx + this.radius * length * x, cy - this.radius * length * y];
      const dimmed = highlight !== null && highlight !== label;
      const color = dimmed ? this.theme.dim : this.colors[label];
      placed.push({ label, depth, lean: x, at, color, strength: (dimmed ? 0.3 : 1) * (depth < 0 ? 0.5 : 1) });
    });
    return placed.sort((a, b) => a.depth - b.depth);
  }

  paintStroke(vector, from, to, width) {
    const { context } = this;
    context.globalAlpha = vector.strength;
    context.strokeStyle = vector.color;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(...vector.at(from));
    context.lineTo(...vector.at(to));
    context.stroke();
    context.globalAlpha = 1;
  }

  paintShaft(vector) { this.paintStroke(vector, 0, 1, 1.2); }

  paintSpike(vector) { this.paintStroke(vector, 1, REACH, 2.4); }

  // Place the labels, the highlighted one and near ones first, and leave out those that would overlap another one.
  chooseLabels(vectors, highlight) {
    const { context } = this, placed = [];
    const height = Math.max(14, Math.min(18, this.size * 0.052));
    context.font = `600 ${height * 0.66}px ${this.font}`;
    const rank = (vector) => (vector.label === highlight ? 2 : vector.depth);
    for (const vector of [...vectors].sort((a, b) => rank(b) - rank(a))) {
      vector.box = null;
      if (this.vectors.length > MOST_LABELS && vector.label !== highlight) continue;
      const text = this.legend.short[vector.label];
      const width = Math.max(height, context.measureText(text).width + height * 0.6);
      const [tipX, y] = vector.at(REACH);
      const outwards = tipX + ((width - height) / 2) * vector.lean;   // a long name starts where the spike ends
      const x = Math.max(width / 2 + 2, Math.min(2 * this.center[0] - width / 2 - 2, outwards));
      const touches = (box) => Math.abs(box.x - x) < (box.width + width) / 2 && Math.abs(box.y - y) < height;
      if (placed.some(touches)) continue;
      vector.box = { text, x, y, width, height };
      placed.push(vector.box);
    }
    this.labelled = placed.map((box) => box.text);
  }

  paintLabel(vector) {
    if (!vector.box) return;
    const { context, theme } = this, { text, x, y, width, height } = vector.box;
    context.font = `600 ${height * 0.66}px ${this.font}`;
    context.globalAlpha = Math.min(1, vector.strength + 0.2);
    context.fillStyle = vector.color;
    context.strokeStyle = theme.paper;
    context.lineWidth = 1.6;
    context.beginPath();
    context.roundRect(x - width / 2, y - height / 2, width, height, height / 2);
    context.stroke();
    context.fill();
    context.fillStyle = readableOn(vector.color);
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, x, y + height * 0.03);
    context.globalAlpha = 1;
  }

  // The index of the closest point on the front side within `reach` pixels, or -1.
  pick(x, y, reach, highlight) {
    let best = -1, bestSquared = reach * reach;
    for (let i = 0, j = 0; i < this.count; i++, j += 3) {
      if (this.screen[j + 2] < 0 || (highlight !== null && this.labels[i] !== highlight)) continue;
      const squared = (this.screen[j] - x) ** 2 + (this.screen[j + 1] - y) ** 2;
      if (squared < bestSquared) { best = i; bestSquared = squared; }
    }
    return best;
  }

  // The angle between a feature and its class vector in degrees, or null.
  angleToOwnVector(i) {
    const vector = this.vectors[this.labels[i]];
    if (!vector) return null;
    if (this.angles) return this.angles[i];
    const dot = vector.reduce((sum, part, k) => sum + part * this.points[3 * i + k], 0);
    return (Math.acos(Math.max(-1, Math.min(1, dot))) * 180) / Math.PI;
  }
}

// A lighter version of a colour #rrggbb, as .swatch in the dark theme.
function lifted(color) {
  const parts = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  return `#${parts.map((part) => Math.round(part + 0.2 * (255 - part)).toString(16).padStart(2, "0")).join("")}`;
}

// White or black, whichever has more contrast to a colour #rrggbb.
function readableOn(color) {
  const [r, g, b] = [1, 3, 5].map((i) => (parseInt(color.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.3 ? "#101318" : "#ffffff";
}
