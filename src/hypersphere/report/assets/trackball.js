// Rotations as unit quaternions [w, x, y, z]; x points right, y up, z towards the viewer.
const STILL = [1, 0, 0, 0];

function turnAbout([x, y, z], angle) {
  const s = Math.sin(angle / 2);
  return [Math.cos(angle / 2), x * s, y * s, z * s];
}

// The rotation b followed by a, renormalised so that rounding errors of a long drag do not accumulate.
function compose(a, b) {
  const w = a[0] * b[0] - a[1] * b[1] - a[2] * b[2] - a[3] * b[3];
  const x = a[0] * b[1] + a[1] * b[0] + a[2] * b[3] - a[3] * b[2];
  const y = a[0] * b[2] - a[1] * b[3] + a[2] * b[0] + a[3] * b[1];
  const z = a[0] * b[3] + a[1] * b[2] - a[2] * b[1] + a[3] * b[0];
  const length = Math.hypot(w, x, y, z) || 1;
  return [w / length, x / length, y / length, z / length];
}

// The rotation matrix, row by row.
function matrixOf([w, x, y, z]) {
  return [
    1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
    2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
    2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
  ];
}

// The point of the ball under the pointer, in units of its radius. A hyperbola continues the ball beyond its rim
// (Holroyd's trackball), so that the sphere neither slips nor jumps there.
function underPointer(x, y) {
  const squared = x * x + y * y;
  const z = squared <= 0.5 ? Math.sqrt(1 - squared) : 0.5 / Math.sqrt(squared);
  const length = Math.hypot(x, y, z);
  return [x / length, y / length, z / length];
}

// The smallest rotation from one unit vector to another, as an axis and an angle.
function turnBetween(from, to) {
  const axis = [
    from[1] * to[2] - from[2] * to[1],
    from[2] * to[0] - from[0] * to[2],
    from[0] * to[1] - from[1] * to[0],
  ];
  const sine = Math.hypot(...axis);
  if (sine < 1e-9) return { axis: [0, 1, 0], angle: 0 };
  const cosine = from[0] * to[0] + from[1] * to[1] + from[2] * to[2];
  return { axis: axis.map((part) => part / sine), angle: Math.atan2(sine, cosine) };
}
