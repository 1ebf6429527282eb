"""Draw the picture of the front page: digits on the sphere, under softmax and under A-Softmax (SphereFace).

    python docs/draw_sphere.py

Two networks with a 3-dimensional feature are trained on the 8×8 digits of scikit-learn, in less than a minute on one
core. Each dot is the direction of the feature of one test image, which neither network has seen. The picture is one SVG
that follows the colour scheme of the reader.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

import hypersphere as hs

RADIUS, WIDTH, HEIGHT = 200.0, 960.0, 500.0
COLORS = (
    "#4269d0",
    "#e09b1a",
    "#e2483b",
    "#3fa79b",
    "#3ca951",
    "#e86fa6",
    "#9b6dd6",
    "#4a9fd8",
    "#a5713f",
    "#8d95a5",
)
STYLE = (
    "text{font-family:system-ui,sans-serif;fill:#333}.small{font-size:15px;fill:#666}"
    ".name{font-size:20px;font-weight:600}.ball{fill:#f4f5f8;stroke:#b9bdc9}.grid{fill:none;stroke:#cdd1db}"
    ".label{font-size:19px;font-weight:700;text-anchor:middle;stroke:#fff;stroke-width:4px;paint-order:stroke}"
    "@media (prefers-color-scheme:dark){text{fill:#e4e6eb}.small{fill:#a9aebb}"
    ".ball{fill:#242833;stroke:#565c6b}.grid{stroke:#3d4350}.label{stroke:#1b1e26}}"
)


def train_and_embed(
    head: hs.heads.AngularHead, epochs: int = 40
) -> tuple[Tensor, Tensor, float]:
    """Train a small network with this head; return test features, labels and accuracy."""
    train, test = hs.data.digits("train"), hs.data.digits("test")
    torch.manual_seed(0)
    model = hs.models.ToyCNN(1, 8, feature_dim=3, widths=(32, 64))
    head.reset_parameters()
    batches = hs.data.Batches(
        train.images, train.labels, 64, torch.Generator().manual_seed(0)
    )
    optimizer = torch.optim.AdamW(
        [*model.parameters(), *head.parameters()], lr=3e-3, weight_decay=1e-4
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=epochs * len(batches)
    )
    hs.training.fit(
        model, head, batches, epochs=epochs, optimizer=optimizer, scheduler=schedule
    )
    features, labels = hs.training.embed(
        model, hs.data.Batches(test.images, test.labels, 500)
    )
    accuracy = (hs.training.predict(head, features) == labels).float().mean().item()
    return features, labels, accuracy


def view(directions: Tensor) -> Tensor:
    """Return the rotation that turns the fullest hemisphere towards the reader: (x right, y up, z to the reader)."""
    candidates = hs.sphere.normalize(
        torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    )
    front = candidates[(directions @ candidates.T > 0.35).float().mean(0).argmax()]
    right = hs.sphere.normalize(
        torch.linalg.cross(torch.tensor([0.0, 0.0, 1.0]), front)
    )
    return torch.stack([right, torch.linalg.cross(front, right), front])


def circle(points: Tensor, cx: float, cy: float) -> str:
    """Return the front half of a circle of the graticule as a path."""
    path, drawing = "", False
    for x, y, z in points.tolist():
        if z > 0:
            path += (
                f"{'L' if drawing else 'M'}{cx + RADIUS * x:.1f} {cy - RADIUS * y:.1f}"
            )
        drawing = z > 0
    return f'<path class="grid" d="{path}"/>' if path else ""


def graticule(turn: Tensor, cx: float, cy: float) -> list[str]:
    """Return parallels and meridians every 30 degrees."""
    t = torch.linspace(0, 2 * math.pi, 121)
    paths = []
    for degrees in range(-60, 61, 30):
        latitude = math.radians(degrees)
        ring = torch.stack(
            [
                math.cos(latitude) * t.cos(),
                math.cos(latitude) * t.sin(),
                math.sin(latitude) + 0 * t,
            ],
            1,
        )
        paths.append(circle(ring @ turn.T, cx, cy))
    for degrees in range(0, 180, 30):
        longitude = math.radians(degrees)
        ring = torch.stack(
            [t.cos() * math.cos(longitude), t.cos() * math.sin(longitude), t.sin()], 1
        )
        paths.append(circle(ring @ turn.T, cx, cy))
    return paths


def panel(
    name: str, note: str, features: Tensor, labels: Tensor, cx: float
) -> list[str]:
    """Return one sphere with its dots, back side first and faint."""
    cy = HEIGHT / 2 - 24
    directions = hs.sphere.normalize(features)
    turn = view(directions)
    points = directions @ turn.T
    parts = [f'<circle class="ball" cx="{cx}" cy="{cy}" r="{RADIUS}"/>']
    order = points[:, 2].argsort()
    grid_drawn = False
    for index in order.tolist():
        x, y, z = points[index].tolist()
        if z > 0 and not grid_drawn:  # between the far and the near side
            parts += graticule(turn, cx, cy)
            grid_drawn = True
        opacity = 0.85 if z > 0 else 0.22
        parts.append(
            f'<circle cx="{cx + RADIUS * x:.1f}" cy="{cy - RADIUS * y:.1f}" r="{3.4 + 0.8 * z:.1f}" '
            f'fill="{COLORS[int(labels[index])]}" fill-opacity="{opacity}"/>'
        )
    for digit in range(10):
        x, y, z = hs.sphere.normalize(points[labels == digit].mean(0)).tolist()
        if (
            z > 0.1
        ):  # the label stands a little outside of its cluster, away from the centre of the picture
            reach = 1.0 + 0.12 * (1 - z)
            left, top = cx + RADIUS * reach * x, cy - RADIUS * reach * y + 7
            parts.append(
                f'<text class="label" x="{left:.1f}" y="{top:.1f}">{digit}</text>'
            )
    parts.append(
        f'<text class="name" x="{cx}" y="{HEIGHT - 42}" text-anchor="middle">{name}</text>'
    )
    parts.append(
        f'<text class="small" x="{cx}" y="{HEIGHT - 16}" text-anchor="middle">{note}</text>'
    )
    return parts


def main() -> None:
    """Train both networks and write docs/assets/sphere.svg."""
    annealing = hs.heads.Annealing(start=100, gamma=5, end=0)
    heads = {
        "softmax": hs.heads.softmax(3, 10),
        "A-Softmax (SphereFace), m = 4": hs.heads.a_softmax(
            3, 10, m=4, annealing=annealing
        ),
    }
    parts = []
    for (name, head), cx in zip(heads.items(), (WIDTH / 4, 3 * WIDTH / 4), strict=True):
        features, labels, accuracy = train_and_embed(head)
        within = math.degrees(
            hs.evaluation.class_angles(features, labels).positive.mean
        )
        note = f"mean angle within a class {within:.1f}°, accuracy {accuracy:.1%}"
        print(name, note, sep=": ")
        parts += panel(name, note, features, labels, cx)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img">'
        f"<title>Test digits as 3-d features on the unit sphere, under softmax and under A-Softmax</title>"
        f"<style>{STYLE}</style>" + "\n".join(parts) + "</svg>\n"
    )
    (Path(__file__).parent / "assets" / "sphere.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
