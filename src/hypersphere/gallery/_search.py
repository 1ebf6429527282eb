r"""Exact search: matrix products with blocks of rows give candidates, which get exact scores at the end.

1. A *candidate pass* computes cosines of all rows, block by block, and keeps the best `depth` > k of each query. These
   cosines have a rounding error up to a known tolerance, and a matrix product may round the cosines of equal rows
   differently.
2. The candidates are *rescored* with float64 dot products. Equal rows get equal scores, so ties can be broken by the
   number of the entry.
3. If the last candidate is within the tolerance of the k-th, there may be better rows or ties outside
   the list, for example if a gallery holds a thousand copies of one row. Such queries are searched again, with a more
   precise pass or with float64 dot products of all rows within the tolerance.

Memory is bounded by one block of scores and the candidates, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from hypersphere import _numerics
from hypersphere.gallery._rows import BLOCK_ROWS, WORD_BYTES, Rows

__all__ = ["RESCORED", "SLACK", "nearest", "rescore"]

QUERY_ROWS = 64  # queries per block of scores, which has 8 MB
FEW_QUERIES = 4  # largest number of queries for which a product with bfloat16 queries is faster than the others
SLACK = 16  # candidates beyond k, so that only many equal rows need a second pass
RESCORED = 4  # candidates per result if the candidate pass is coarse
GROUPS = 512  # groups of columns in a block of scores
UNMERGED = 1 << 20  # candidates of all queries and blocks that are stored before the best are chosen
PAIRS = 32_768  # pairs of a query and a candidate that are rescored at a time

ScoredEntries: TypeAlias = tuple[Float64[Tensor, "queries k"], Int64[Tensor, "queries k"]]
Candidates: TypeAlias = tuple[Float[Tensor, "queries depth"], Int64[Tensor, "queries depth"]]


def nearest(rows: Rows, x: Float64[Tensor, "queries dim"], k: int, full: Rows | None = None) -> ScoredEntries:
    """Return the cosines and numbers of the k best rows of each unit query, best first; ties by number.

    Args:
        rows: the rows to search.
        x: unit queries in float64.
        k: number of results, at most the number of rows.
        full: the same rows in float32, with which candidates are rescored; `rows` if None. Only max(4k, k + 16)
            candidates are rescored, so a row that its encoding ranks lower is missed.
    """
    if k == 0 or len(x) == 0:
        return x.new_empty(len(x), k), torch.empty(len(x), k, dtype=torch.int64)
    parts = [_nearest(rows, part, k, full) for part in x.split(QUERY_ROWS)]
    return torch.cat([scores for scores, _ in parts]), torch.cat([entries for _, entries in parts])


def _nearest(rows: Rows, x: Tensor, k: int, full: Rows | None) -> ScoredEntries:
    """Search a block of queries, with a coarse candidate pass if there is one."""
    coarse_depth = min(len(rows), max(RESCORED * k, k + SLACK))
    if rows.dtype == "binary":
        return rescore(rows if full is None else full, x, _hamming(rows, x, coarse_depth), k)
    coarse = _coarse_pass(rows, x)
    if full is not None:
        kernel = _multiply(rows, x) if coarse is None else coarse.kernel
        return rescore(full, x, _candidates(rows, x, coarse_depth, kernel)[1], k)
    if coarse is None:
        return _nearest_precise(rows, x, k)
    approximate, entries = _candidates(rows, x, coarse_depth, coarse.kernel)
    scores, best = rescore(rows, x, entries, k)
    if coarse_depth < len(rows):
        # A row outside the list can be among the k best only if the two errors exceed its distance to the k-th.
        worst, kth = approximate[:, -1] * coarse.scales, approximate[:, k - 1] * coarse.scales
        error = coarse.query_errors + kth.abs() * coarse.relative_error
        uncertain = (worst >= kth - 2 * error).nonzero().flatten()
        if len(uncertain):
            scores[uncertain], best[uncertain] = _nearest_precise(rows, x[uncertain], k)
    return scores, best


def _nearest_precise(rows: Rows, x: Tensor, k: int) -> ScoredEntries:
    """Search with float32 cosines of all rows."""
    depth = min(len(rows), k + SLACK)
    tolerance = _numerics.tie_tolerance(torch.float32)
    approximate, entries = _candidates(rows, x, depth, _multiply(rows, x))
    scores, best = rescore(rows, x, entries, k)
    if depth < len(rows):
        thresholds = approximate[:, k - 1] - tolerance
        for query in (approximate[:, -1] >= thresholds).nonzero().flatten().tolist():
            part = slice(query, query + 1)
            scores[part], best[part] = _rescore_above(rows, x[part], thresholds[part], k)
    return scores, best


def rescore(
    rows: Rows, x: Float64[Tensor, "queries dim"], entries: Int64[Tensor, "queries depth"], k: int
) -> ScoredEntries:
    """Return the k best of the candidates by their float64 cosines, ties by number. A candidate −1 means none."""
    entries = entries.sort(1).values  # a stable sort by score then keeps the order of numbers among ties
    scores = x.new_empty(entries.shape)
    for part in torch.arange(len(x)).split(max(1, PAIRS // max(1, entries.shape[1]))):
        candidates = rows.gather(entries[part].flatten().clamp_(min=0)).double()
        scores[part] = torch.bmm(candidates.view(len(part), -1, rows.dim), x[part].unsqueeze(2)).squeeze(2)
    scores.masked_fill_(entries < 0, -torch.inf)
    # Scores are reported in float32, so ties are decided there.
    order = scores.float().sort(dim=1, descending=True, stable=True).indices[:, :k]
    return scores.gather(1, order), entries.gather(1, order)


def _candidates(rows: Rows, x: Tensor, depth: int, kernel: Callable[[Any], Tensor]) -> Candidates:
    """Return the best `depth` rows of each query by the cosines of `kernel`, best first."""
    best: list[Tensor] = []
    entries: list[Tensor] = []
    for number, block in enumerate(rows.blocks):
        values, index = _largest(kernel(block), depth)
        best.append(values)
        entries.append(index.add_(number * BLOCK_ROWS))
        # For a single query, merging after each block would take longer than the matrix product.
        if len(best) > 1 and len(x) * depth * len(best) > UNMERGED:
            best, entries = ([part] for part in _merge(best, entries, depth))
    return _merge(best, entries, depth)


def _merge(best: list[Tensor], entries: list[Tensor], depth: int) -> Candidates:
    """Return the best `depth` candidates of several blocks, best first."""
    values, order = torch.cat(best, 1).sort(dim=1, descending=True)
    return values[:, :depth], torch.cat(entries, 1).gather(1, order[:, :depth])


def _largest(scores: Float[Tensor, "queries columns"], count: int) -> Candidates:
    """Return the `count` largest scores of each row, or all if there are fewer, and their columns, in any order."""
    queries, columns = scores.shape
    if queries < 4 or columns % GROUPS or 2 * count > GROUPS:
        return scores.topk(min(count, columns), dim=1, sorted=False)
    # The `count` largest scores are in the `count` groups with the largest maxima. `topk` of all scores takes about as
    # long as the matrix product; maxima of groups are much faster.
    grouped = scores.view(queries, -1, GROUPS)  # group g has the columns g, g + GROUPS, g + 2·GROUPS, …
    groups = grouped.amax(1).topk(count, dim=1, sorted=False).indices
    members = grouped.gather(2, groups.unsqueeze(1).expand(-1, grouped.shape[1], -1)).flatten(1)
    values, index = members.topk(count, dim=1, sorted=False)
    return values, index // count * GROUPS + groups.gather(1, index % count)


def _multiply(rows: Rows, x: Tensor) -> Callable[[Any], Tensor]:
    """Return a function of a block that returns its float32 cosines. Each call overwrites the previous result."""
    queries = x.float()
    height = min(BLOCK_ROWS, len(rows))
    # The user may have changed the default dtype of torch.
    scores = torch.empty(len(x) * height, dtype=torch.float32)
    buffer = torch.empty(height, rows.dim, dtype=torch.float32)

    def kernel(block: dict[str, Tensor]) -> Tensor:
        count = len(next(iter(block.values())))
        out = scores[: len(x) * count].view(len(x), count)
        with _numerics.autocast_disabled(queries):
            return rows.encoding.multiply(queries, block, out, buffer[:count])

    return kernel


class _CoarsePass(NamedTuple):
    """A candidate pass with rounded queries x̃, which is faster and less accurate than one in float32."""

    kernel: Callable[[Any], Tensor]  # maps a block to its cosines divided by `scales`, (queries, rows)
    scales: Tensor  # (queries,) or a scalar: positive factors, which do not change the order of the rows
    query_errors: Tensor  # (queries,) ‖x − x̃‖, which bounds the error of the cosine with any unit row
    relative_error: float  # of a cosine, from rounding the result


def _coarse_pass(rows: Rows, x: Tensor) -> _CoarsePass | None:
    """Return a faster candidate pass over int8 rows, or None if this processor has none.

    The time of one query is that of reading the rows, and int8 rows are a quarter of the size of float32 rows. For many
    queries arithmetic dominates. An int8 product is then faster if the processor has an instruction for it (VNNI);
    otherwise it is faster to widen the rows and compute a float32 product.
    """
    if rows.dtype != "int8":
        return None
    return _few_queries(rows, x) if len(x) <= FEW_QUERIES else _many_queries(rows, x)


def _few_queries(rows: Rows, x: Tensor) -> _CoarsePass | None:
    """Return a pass with queries in bfloat16."""
    # A private function of torch for quantised language models, which some versions lack. It reads up to 16 entries at
    # a time and checks neither bounds nor alignment.
    product = getattr(torch, "_weight_int8pack_mm", None)
    if product is None or rows.dim % 16 or any(block["values"].data_ptr() % 16 for block in rows.blocks):
        return None
    queries, ones = x.bfloat16(), torch.ones(BLOCK_ROWS, dtype=torch.bfloat16)

    def kernel(block: dict[str, Tensor]) -> Tensor:
        values = block["values"]
        # Pass ones and apply the scales of the rows in float32, because bfloat16 scales would add to the error.
        return product(queries, values, ones[: len(values)]).float().mul_(block["scales"])

    rounding = _numerics.machine_epsilon(torch.bfloat16) / 2
    return _CoarsePass(kernel, x.new_ones(()), (x - queries).norm(dim=1), rounding)


def _many_queries(rows: Rows, x: Tensor) -> _CoarsePass | None:
    """Return a pass with queries in int8, whose products with the rows are exact integers."""
    product, has_instruction = getattr(torch, "_int_mm", None), getattr(torch.cpu, "_is_vnni_supported", None)
    if product is None or has_instruction is None or not has_instruction():
        return None
    # `_int_mm` is wrong for a single column. In more dimensions than this, a sum of 127·127 would overflow int32.
    if not 2 <= rows.dim <= (2**31 - 1) // 127**2:
        return None
    steps = x.abs().amax(1, keepdim=True) / 127
    levels = (x / steps).nan_to_num_(0.0).round_()  # 0/0 for a zero query
    queries = levels.to(torch.int8)
    scores = torch.empty(len(x) * min(BLOCK_ROWS, len(rows)), dtype=torch.float32)

    def kernel(block: dict[str, Tensor]) -> Tensor:
        values = block["values"]
        out = scores[: len(x) * len(values)].view(len(x), -1)
        return out.copy_(product(queries, values.mT)).mul_(block["scales"])

    rounding = _numerics.machine_epsilon(torch.float32)
    return _CoarsePass(kernel, steps.squeeze(1), (x - levels * steps).norm(dim=1) + rounding, rounding)


def _rescore_above(rows: Rows, x: Float64[Tensor, "1 dim"], threshold: Tensor, k: int) -> ScoredEntries:
    """Search one query with float64 cosines of all rows whose float32 cosine reaches the threshold."""
    kernel = _multiply(rows, x)
    scores, entries = x.new_empty(1, 0), torch.empty(1, 0, dtype=torch.int64)
    for number, block in enumerate(rows.blocks):
        index = (kernel(block)[0] >= threshold).nonzero().flatten()
        if len(index):
            block_scores, block_entries = rescore(rows, x, (index + number * BLOCK_ROWS).unsqueeze(0), k)
            scores, entries = torch.cat([scores, block_scores], 1), torch.cat([entries, block_entries], 1)
            # Earlier blocks come first, so the stable sort prefers their entries among ties.
            order = scores.float().sort(dim=1, descending=True, stable=True).indices[:, :k]
            scores, entries = scores.gather(1, order), entries.gather(1, order)
    return scores, entries


def _hamming(rows: Rows, x: Tensor, depth: int) -> Int64[Tensor, "queries depth"]:
    """Return the `depth` rows of each query with the fewest different signs, ties by number."""
    queries = rows.encoding.encode(x.float())["bits"].numpy().view(np.uint64)
    best = torch.empty(len(x), 0, dtype=torch.int64)
    for number, block in enumerate(rows.blocks):
        words = block["bits"].numpy().view(np.uint64)
        distances = np.zeros((len(queries), len(words)), np.int32)
        for word in range(queries.shape[1]):
            distances += _count_bits(queries[:, word, None] ^ words[:, word])
        # The key distance·BLOCK_ROWS + row orders by distance first and by row second.
        keys = torch.from_numpy(distances)
        if rows.dim * BLOCK_ROWS >= 2**31:  # int32 is faster, but overflows
            keys = keys.long()
        keys = keys.mul_(BLOCK_ROWS).add_(torch.arange(len(words), dtype=keys.dtype))
        keys = keys.topk(min(depth, len(words)), dim=1, largest=False).values.long()
        # Replace the row in the block by the row in the gallery.
        distance, row = keys // BLOCK_ROWS, keys % BLOCK_ROWS
        best = torch.cat([best, distance * len(rows) + number * BLOCK_ROWS + row], 1)
        best = best.topk(min(depth, best.shape[1]), dim=1, largest=False).values
    return best % len(rows)


def _count_bits(words: Any) -> Any:
    """Return the number of one bits in each uint64."""
    if hasattr(np, "bitwise_count"):  # since NumPy 2.0
        return np.bitwise_count(words)
    table = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)
    return table[words.view(np.uint8).reshape(*words.shape, WORD_BYTES)].sum(-1, dtype=np.uint8)
