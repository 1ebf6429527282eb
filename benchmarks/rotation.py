"""Time rotated weights relative to the product V·Rᵀ, and training steps of rotated CNN-6 relative to plain ones."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.timing import compare, save
from hypersphere.functions.orthogonal import ORTHOGONALS
from hypersphere.rotation import Stochastic, rotate_

SIZES = ((576, 128), (1152, 256))
TARGETS = {
    576: {"cayley": 6.0, "gram_schmidt": 11.0, "lowdin": 22.0, "exponential": 60.0},
    1152: {"cayley": 4.5, "gram_schmidt": 10.0, "lowdin": 22.0, "exponential": 60.0},
}
STEP_TARGETS = {"cayley": 1.15, "stochastic": 1.08}


def weights(d: int, n: int, peers: bool) -> dict[str, Callable[[], object]]:
    """Return forward and backward passes of W for every map near the identity, with `peers` also torch's functions."""
    random = torch.Generator().manual_seed(0)
    v, g = torch.randn(n, d, generator=random) * (2 / d) ** 0.5, torch.randn(n, d, generator=random)
    square = torch.randn(d, d, generator=random) * d**-0.5

    def contender(weight: Callable[[Tensor], Tensor], free: Tensor) -> Callable[[], object]:
        leaf = free.clone().requires_grad_()
        return lambda: torch.autograd.grad(weight(leaf), leaf, g)

    def by_qr(p: Tensor) -> Tensor:
        q, r = torch.linalg.qr(p)
        return (v * r.diagonal().sign()) @ q.mT

    def by_svd(p: Tensor) -> Tensor:
        u, _, vh = torch.linalg.svd(p)
        return v @ (u @ vh).mT

    def by_solve(p: Tensor) -> Tensor:
        a, eye = p.tril(-1), torch.eye(d)
        return v @ torch.linalg.solve(eye - (a - a.mT), eye + (a - a.mT)).mT

    def by_matrix_exp(p: Tensor) -> Tensor:
        a = p.tril(-1)
        return v @ torch.linalg.matrix_exp(a - a.mT).mT

    contenders = {"plain": contender(lambda r: v @ r.mT, square)}
    for name, entry in ORTHOGONALS.items():
        method = entry()
        free = method.identity(d)
        free = free + (0.5 if free.ndim == 1 else 0.1) * d**-0.5 * torch.randn(free.shape, generator=random)
        contenders[name] = contender(lambda f, method=method: method(f, v), free)
    if peers:
        contenders["torch qr"] = contender(by_qr, square)
        contenders["torch svd"] = contender(by_svd, square)
        contenders["torch solve"] = contender(by_solve, 0.5 * square)
        contenders["torch matrix_exp"] = contender(by_matrix_exp, 0.5 * square)
    return contenders


def cnn6() -> nn.Sequential:
    """CNN-6 of the OPT paper, 64/64/64, with batch normalisation."""
    layers: list[nn.Module] = []
    for stage in range(3):
        for i in (3 if stage == 0 else 64, 64):
            layers += [nn.Conv2d(i, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 100))


def steps(batch: int) -> dict[str, Callable[[], object]]:
    """Return training steps: plain, hidden layers rotated by Cayley or Gram–Schmidt, a quarter of their dimensions."""
    torch.manual_seed(0)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(100, (batch,))
    start = cnn6()

    def contender(convert: Callable[[nn.Module], object]) -> Callable[[], object]:
        model = copy.deepcopy(start)
        stochastic = convert(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if isinstance(stochastic, Stochastic):
                stochastic.step(optimizer)

        return step

    return {
        "plain": contender(lambda model: None),
        "cayley": contender(lambda model: rotate_(model, "cayley")),
        "gram_schmidt": contender(lambda model: rotate_(model, "gram_schmidt")),
        "stochastic": contender(lambda model: Stochastic(model, 0.25, every=10)),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="./run bench rotation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peers", action="store_true", help="also time torch's QR, SVD, solve and matrix_exp")
    parser.add_argument("--only", choices=("weights", "steps"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    if options.only != "steps":
        for d, n in SIZES:
            table = compare(weights(d, n, options.peers), baseline="plain", rounds=options.rounds, clock=clock)
            title = f"Forward and backward of a rotated weight, d = {d}, n = {n}, float32"
            save(f"rotation_{d}", title, {f"ratio to V·Rᵀ with R free, d = {d}, n = {n}": table}, TARGETS[d])
    if options.only != "weights":
        table = compare(steps(options.batch), baseline="plain", rounds=options.rounds, warmup=1, clock=clock)
        title = f"A training step of CNN-6, batch {options.batch}, 32×32, float32"
        save("rotation_step", title, {"ratio to the plain step": table}, STEP_TARGETS)
