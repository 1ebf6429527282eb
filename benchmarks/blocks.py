"""Time fine-tuning of a linear layer by block rotations, relative to full fine-tuning and to PEFT's OFT and BOFT."""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.timing import compare, save
from hypersphere.rotation import rotate_

SIZES, BLOCKS, TOKENS = (1024, 2048), (32, 256), (64, 1024, 4096)
# Of full fine-tuning, by block size and number of tokens.
TARGETS = {(32, 64): 1.3, (32, 1024): 1.05, (32, 4096): 1.0, (256, 1024): 1.6}


def step_of(model: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], object]:
    """Return one training step: forward, backward and AdamW."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        x.grad = None
        model(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


def adapted(model: nn.Module, method: str, block: int, factors: int = 1) -> nn.Module:
    """Return a copy of the model with PEFT's adapter."""
    import peft
    from peft.tuners.boft import layer as boft

    if method == "oft":
        config = peft.OFTConfig(r=0, oft_block_size=block, target_modules=["0"])
    else:
        # PEFT has its butterfly factors as an extension for CUDA only. These are the same operations in torch.
        boft.get_fbd_cuda = lambda: True
        boft.FastBlockDiag = type("BlockDiagonal", (), {"apply": staticmethod(_block_diagonal)})
        config = peft.BOFTConfig(
            boft_block_size=block, boft_block_num=0, boft_n_butterfly_factor=factors, target_modules=["0"]
        )
    return peft.get_peft_model(copy.deepcopy(model), config)


def _block_diagonal(blocks: Tensor) -> Tensor:
    return torch.stack([torch.block_diag(*factor) for factor in blocks])


def kept_for_backward(model: nn.Module, x: Tensor) -> int:
    """Return the bytes of the tensors that the forward pass keeps, apart from parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(x)
    return sum(kept.values())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="./run bench blocks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--record", action="store_true", help="write benchmarks/results")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    tables, targets, notes = {}, {}, []
    for d in SIZES:
        for block in BLOCKS:
            for tokens in TOKENS:
                torch.manual_seed(0)
                plain = nn.Sequential(nn.Linear(d, d, bias=False))
                x, grad = torch.randn(tokens, d, requires_grad=True), torch.randn(tokens, d)
                models = {
                    "full fine-tuning": copy.deepcopy(plain),
                    "PEFT OFT": adapted(plain, "oft", block),
                    "rotate_": rotate_(copy.deepcopy(plain), block_size=block, output=True),
                }
                kept = {name: kept_for_backward(model, x) / 2**20 for name, model in models.items()}
                steps = {name: step_of(model, x, grad) for name, model in models.items()}
                title = f"d = {d}, block {block}, {tokens:,} tokens"
                tables[title] = compare(steps, baseline="full fine-tuning", rounds=options.rounds)
                limit = TARGETS.get((block, tokens))
                targets[title] = {} if limit is None else {"rotate_": limit}
                of_peft = tables[title]["rotate_"].ratio / tables[title]["PEFT OFT"].ratio
                notes.append(
                    f"{title}: {of_peft:.2f} of PEFT's time (target ≤ 0.9); kept for backward "
                    f"{kept['rotate_']:.1f} MB, PEFT {kept['PEFT OFT']:.1f} MB, full {kept['full fine-tuning']:.1f} MB"
                )
    for d, block, factors in ((1024, 32, 3), (1024, 8, 4)):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(d, d, bias=False))
        x, grad = torch.randn(1024, d, requires_grad=True), torch.randn(1024, d)
        steps = {
            "PEFT BOFT": step_of(adapted(plain, "boft", block, factors), x, grad),
            "rotate_": step_of(rotate_(copy.deepcopy(plain), block_size=block, factors=factors, output=True), x, grad),
        }
        title = f"BOFT, d = {d}, block {block}, {factors} factors, 1,024 tokens"
        tables[title] = compare(steps, baseline="PEFT BOFT", rounds=max(3, options.rounds // 3))
        targets[title] = {"rotate_": 0.5}
    if options.record:
        save("blocks", "Fine-tuning of a linear layer by block rotations", tables, targets, notes)
    else:
        for title, table in tables.items():
            print(title, {name: round(t.ratio, 2) for name, t in table.items()})
        print("\n".join(notes))


if __name__ == "__main__":
    main()
