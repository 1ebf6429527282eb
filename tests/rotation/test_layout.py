"""Blocks and butterfly factors, against dense matrices and against PEFT's BOFT."""

import pytest
import torch
from torch import nn

from hypersphere.rotation import BlockLayout, rotate_, rotated_layers

LAYOUTS = [
    BlockLayout(12, 3),
    BlockLayout(12, 3, shared=True),
    BlockLayout(16, 4, factors=2),
    BlockLayout(16, 4, factors=3),
    BlockLayout(24, 4, factors=3, shared=True),
]


def entries_of_blocks(layout, j):
    """Return the entries that each block of factor j acts on, counted by hand."""
    half = layout.block_size // 2
    if j == 0:
        return [list(range(i * 2 * half, (i + 1) * 2 * half)) for i in range(layout.blocks)]
    groups = [list(range(i * half, (i + 1) * half)) for i in range(layout.size // half)]
    chunk = 2 ** (j + 1)
    first_groups = [c + q for c in range(0, len(groups), chunk) for q in range(chunk // 2)]
    return [groups[q] + groups[q + chunk // 2] for q in first_groups]


def dense(layout, matrices):
    """Return R = B_{m−1}⋯B₀ as a d×d matrix, entry by entry."""
    result = torch.eye(layout.size, dtype=torch.float64)
    for j, blocks in enumerate(layout.of_factors(matrices)):
        factor = torch.zeros(layout.size, layout.size, dtype=torch.float64)
        for i, entries in enumerate(entries_of_blocks(layout, j)):
            for row, target in enumerate(entries):
                for column, source in enumerate(entries):
                    factor[target, source] = blocks[row, column] if layout.shared else blocks[i, row, column]
        result = factor @ result
    return result


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_layout_rotates_rows_and_inputs_as_the_dense_matrix_does(layout):
    shape = layout.expand(torch.zeros(layout.block_size, layout.block_size)).shape
    matrices, rows = torch.randn(shape, dtype=torch.float64), torch.randn(5, layout.size, dtype=torch.float64)
    r = dense(layout, matrices)
    torch.testing.assert_close(layout.rotate_rows(matrices, rows), rows @ r.mT)
    torch.testing.assert_close(layout.rotate_inputs(matrices, rows), rows @ r)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_layout_join_undoes_split(layout):
    rows = torch.randn(4, layout.size)
    for j in range(layout.factors):
        assert layout.join(layout.split(rows, j), 4, j).equal(rows)


def peft_boft(layer, block_size, factors, monkeypatch):
    """Return PEFT's BOFT of a layer. Its CUDA extension, which is required for more than one factor, is replaced."""
    peft = pytest.importorskip("peft")
    from peft.tuners.boft import layer as boft

    class BlockDiagonal:
        @staticmethod
        def apply(blocks):
            return torch.stack([torch.block_diag(*factor) for factor in blocks])

    monkeypatch.setattr(boft, "get_fbd_cuda", lambda: True)
    monkeypatch.setattr(boft, "FastBlockDiag", BlockDiagonal)
    config = peft.BOFTConfig(
        boft_block_size=block_size, boft_block_num=0, boft_n_butterfly_factor=factors, target_modules=["0"]
    )
    return peft.get_peft_model(nn.Sequential(layer), config)


@pytest.mark.parametrize(
    ("size", "block_size", "factors"),
    [(16, 4, 1), (16, 4, 2), (32, 4, 3), (48, 8, 2), (64, 2, 4), (96, 6, 3), (768, 8, 3), (688, 8, 2)],
)
def test_layout_factors_are_those_of_peft(size, block_size, factors, monkeypatch):
    torch.manual_seed(0)
    ours, theirs, x = nn.Linear(size, 5), nn.Linear(size, 5), torch.randn(3, size)
    theirs.load_state_dict(ours.state_dict())
    model = peft_boft(theirs, block_size, factors, monkeypatch)
    free = next(p for name, p in model.named_parameters() if "boft_R" in name)
    with torch.no_grad():
        free.normal_(std=0.2)
    # PEFT computes (I−A)(I+A)⁻¹ with A = (P−Pᵀ)/2, in the order of its own factors.
    a = (free.detach() - free.detach().mT).double() / 2
    eye = torch.eye(block_size, dtype=torch.float64)
    matrices = torch.linalg.solve(eye + a, eye - a, left=False).float()
    rotate_(ours, "free", block_size=block_size, factors=factors, output=True)
    ((_, _, rotation),) = rotated_layers(ours)
    with torch.no_grad():
        rotation.parameter.copy_(matrices.view_as(rotation.parameter))
    torch.testing.assert_close(ours(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("size", "block_size", "factors"), [(768, 8, 3), (4096, 32, 3), (11008, 16, 4), (11008, 2, 2)])
def test_layout_accepts_the_sizes_of_language_models(size, block_size, factors):
    layout = BlockLayout(size, size // block_size, factors=factors)
    rows = torch.arange(float(size)).unsqueeze(0)
    for j in range(factors):
        assert layout.join(layout.split(rows, j), 1, j).equal(rows)
    # Each factor reaches twice as many entries.
    reached = {0}
    for j in range(factors):
        blocks = layout.split(rows, j)[:, 0].int().tolist()
        reached = {entry for block in blocks if reached & set(block) for entry in block}
    assert len(reached) == block_size * 2 ** (factors - 1)
