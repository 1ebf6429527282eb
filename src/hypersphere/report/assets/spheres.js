// A group of pictures with one legend: pointer, keyboard, highlighting and slow rotation.
const KEY_STEP = Math.PI / 24;
const SLOW = 0.00016;        // speed of the slow rotation, in radians per millisecond
const FRICTION = 260;        // milliseconds for a spin to lose two thirds of its speed
const ZOOM = [0.7, 4];

class SphereGroup {
  constructor(element) {
    const data = JSON.parse(element.querySelector("script").textContent);
    this.element = element;
    this.legend = data;
    this.views = [...element.querySelectorAll("canvas")].map((canvas, i) => new SphereView(canvas, data.spheres[i], data));
    this.link = element.querySelector("[name=link]");
    this.withVectors = element.querySelector("[name=vectors]");
    this.slow = element.querySelector("[name=slow]");
    this.pinned = null;
    this.hovered = null;
    this.spin = null;          // { view, axis, speed } after a drag ends
    this.lastTouched = this.views[0];
    this.visible = true;
    this.stale = new Set(this.views);
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.slow.checked = !this.calm.matches;
    if (this.views.length < 2) this.link.parentElement.hidden = true;
    if (!this.views.some((view) => view.vectors.length)) this.withVectors.parentElement.hidden = true;
    this.listen();
    this.request();
  }

  get highlight() { return this.hovered ?? this.pinned; }

  listen() {
    for (const view of this.views) this.listenTo(view);
    for (const button of this.element.querySelectorAll("[data-class]")) {
      const label = Number(button.dataset.class);
      button.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") this.hover(label); });
      button.addEventListener("pointerleave", () => this.hover(null));
      button.addEventListener("click", () => this.pin(this.pinned === label ? null : label));
    }
    this.element.addEventListener("keydown", (event) => { if (event.key === "Escape") this.pin(null); });
    this.link.addEventListener("change", () => {
      if (this.link.checked) this.adopt(this.lastTouched);
    });
    this.withVectors.addEventListener("change", () => this.redraw());
    this.slow.addEventListener("change", () => { this.spin = null; this.request(); });
    this.element.querySelector("[name=reset]").addEventListener("click", () => this.reset());

    const resized = new ResizeObserver((entries) => {
      for (const { target } of entries) {
        const view = this.views.find((candidate) => candidate.canvas === target);
        view.measure();
        this.stale.add(view);
      }
      this.paint();            // immediately, because a resized canvas is blank
    });
    for (const view of this.views) resized.observe(view.canvas);
    new IntersectionObserver((entries) => {
      this.visible = entries.at(-1).isIntersecting;
      this.request();
    }).observe(this.element);
    addEventListener("themechange", () => {
      for (const view of this.views) view.readTheme();
      this.stale = new Set(this.views);
      this.paint();
    });
  }

  listenTo(view) {
    const { canvas } = view;
    let last = null, lastTime = 0, travelled = 0;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const onBall = ([x, y]) => {
      const [u, v] = [(x - view.center[0]) / view.radius, (view.center[1] - y) / view.radius];
      if (!view.flat) return underPointer(u, v);
      const length = Math.hypot(u, v) || 1;
      return [u / length, v / length, 0];
    };

    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      canvas.setPointerCapture(event.pointerId);
      this.touched(view);
      [last, lastTime, travelled] = [place(event), event.timeStamp, 0];
      canvas.classList.add("held");
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = place(event);
      if (!last) { if (event.pointerType === "mouse") this.showTip(view, now, 9); return; }
      this.hideTips();
      const { axis, angle } = turnBetween(onBall(last), onBall(now));
      const elapsed = Math.max(1, event.timeStamp - lastTime);
      travelled += Math.hypot(now[0] - last[0], now[1] - last[1]);
      this.turn(view, turnAbout(axis, angle));
      this.spin = { view, axis, speed: angle / elapsed };
      [last, lastTime] = [now, event.timeStamp];
    });
    const letGo = (event) => {
      if (!last) return;
      last = null;
      canvas.classList.remove("held");
      if (travelled < 4) this.showTip(view, place(event), 18);
      if (this.calm.matches || event.timeStamp - lastTime > 60) this.spin = null;
      this.request();
    };
    canvas.addEventListener("pointerup", letGo);
    canvas.addEventListener("pointercancel", letGo);
    canvas.addEventListener("pointerleave", () => this.hideTips());
    canvas.addEventListener("blur", () => this.hideTips());
    canvas.addEventListener("keydown", (event) => this.key(view, event));
  }

  key(view, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const sideways = view.flat ? [0, 0, 1] : [0, 1, 0];
    const upwards = view.flat ? [0, 0, 1] : [1, 0, 0];
    const actions = {
      ArrowLeft: () => this.turn(view, turnAbout(sideways, -KEY_STEP)),
      ArrowRight: () => this.turn(view, turnAbout(sideways, KEY_STEP)),
      ArrowUp: () => this.turn(view, turnAbout(upwards, -KEY_STEP)),
      ArrowDown: () => this.turn(view, turnAbout(upwards, KEY_STEP)),
      "+": () => this.scale(view, 1.15),
      "=": () => this.scale(view, 1.15),
      "-": () => this.scale(view, 1 / 1.15),
      0: () => this.reset(),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    this.touched(view);
    action();
  }

  touched(view) {
    this.lastTouched = view;
    this.slow.checked = false;
    this.spin = null;
    this.hideTips();
  }

  linkedWith(view) {
    return this.link.checked ? this.views.filter((other) => other.flat === view.flat) : [view];
  }

  turn(view, rotation) {
    for (const other of this.linkedWith(view)) {
      other.rotation = compose(rotation, other.rotation);
      this.stale.add(other);
    }
    this.request();
  }

  scale(view, factor) {
    const zoom = Math.max(ZOOM[0], Math.min(ZOOM[1], view.zoom * factor));
    for (const other of this.linkedWith(view)) other.zoom = zoom;
    this.redraw();
  }

  adopt(view) {
    for (const other of this.linkedWith(view)) [other.rotation, other.zoom] = [view.rotation, view.zoom];
    this.redraw();
  }

  reset() {
    this.touched(this.lastTouched);
    for (const view of this.views) [view.rotation, view.zoom] = [view.start, 1];
    this.redraw();
  }

  hover(label) { this.hovered = label; this.redraw(); }

  pin(label) {
    this.pinned = label;
    for (const button of this.element.querySelectorAll("[data-class]")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.class) === label));
    }
    this.redraw();
  }

  showTip(view, [x, y], reach) {
    const tip = view.canvas.parentElement.querySelector(".tip");
    const i = view.pick(x, y, reach, this.pinned);
    tip.hidden = i < 0;
    if (i < 0) return;
    const angle = view.angleToOwnVector(i);
    const name = this.legend.classes[view.labels[i]];
    tip.textContent = angle === null ? name : `${name} · ${angle.toFixed(1)}° from its vector`;
    tip.style.setProperty("--class", this.legend.colors[view.labels[i]]);
    const half = tip.offsetWidth / 2;
    tip.style.left = `${Math.max(half, Math.min(view.canvas.clientWidth - half, view.screen[3 * i]))}px`;
    tip.style.top = `${view.screen[3 * i + 1]}px`;
  }

  hideTips() { for (const tip of this.element.querySelectorAll(".tip")) tip.hidden = true; }

  redraw() { this.stale = new Set(this.views); this.request(); }

  request() {
    if (this.pending) return;
    this.pending = requestAnimationFrame((time) => { this.pending = 0; this.frame(time); });
  }

  frame(time) {
    const elapsed = Math.min(50, time - (this.lastFrame ?? time));
    this.lastFrame = time;
    const held = this.element.querySelector("canvas.held");
    if (this.slow.checked && this.visible && !held) {
      for (const view of this.views) {
        view.rotation = compose(turnAbout(view.flat ? [0, 0, 1] : [0, 1, 0], SLOW * elapsed), view.rotation);
        this.stale.add(view);
      }
      this.hideTips();
    } else if (this.spin && !held) {
      const { view, axis, speed } = this.spin;
      this.turn(view, turnAbout(axis, speed * elapsed));
      this.spin.speed *= Math.exp(-elapsed / FRICTION);
      if (Math.abs(this.spin.speed) < 2e-5) this.spin = null;
    }
    this.paint();
    if ((this.slow.checked && this.visible) || (this.spin && !held)) this.request();
    else this.lastFrame = undefined;
  }

  paint() {
    for (const view of this.stale) view.draw(this.highlight, this.withVectors.checked);
    this.stale.clear();
  }
}

for (const element of document.querySelectorAll(".spheres")) element.group = new SphereGroup(element);
