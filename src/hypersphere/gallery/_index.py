"""Approximate faiss indexes: a graph (HNSW) or inverted lists (IVF) that propose candidates for exact rescoring.

The index holds a copy of the embeddings with 8 bits per entry. Each embedding has a *serial*, a number
that increases with every enrolment and is never reused. Removed embeddings stay in the index until half of it has been
removed; the gallery ignores their serials.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from hypersphere._numerics import evenly_spaced
from hypersphere._validation import require_package
from hypersphere.gallery._rows import Rows

__all__ = ["EFFORTS", "MIN_INDEXED", "ApproximateIndex"]

EFFORTS = {"hnsw": 64, "ivf": 32}  # default size of the candidate list of HNSW, and number of lists that IVF reads
MIN_INDEXED = 2048  # a smaller gallery is searched exactly, which is as fast
LINKS = 16  # links per node in each layer of the graph
BUILD_EFFORT = 80  # candidates considered for the links of a new node
TRAINING_ROWS = 65_536  # rows from which the ranges of the 8-bit codes and the lists are computed
GROWTH = 4  # inverted lists are recomputed if the gallery has grown by this factor


class ApproximateIndex:
    """A faiss index of the rows of a gallery, updated on demand.

    Args:
        kind: "hnsw" or "ivf".
        dim: dimension of the embeddings.
    """

    def __init__(self, kind: str, dim: int) -> None:
        self._faiss = require_package("faiss", "faiss-cpu", "gallery")
        self.kind, self.dim = kind, dim
        self._index: Any = None
        self._serials = torch.empty(0, dtype=torch.int64)  # of the indexed embeddings, ascending
        self._trained_on = 0

    def update(self, rows: Rows, serials: Int64[Tensor, " rows"]) -> None:
        """Add new rows to the index. Rebuild it if half of its rows were removed or its lists have grown too long."""
        indexed = 0
        if len(self._serials):
            indexed = int(torch.searchsorted(serials, self._serials[-1], right=True))
        has_outgrown_lists = self.kind == "ivf" and len(rows) > GROWTH * self._trained_on
        if self._index is None or 2 * indexed < len(self._serials) or has_outgrown_lists:
            self._build(rows)
            indexed, self._serials = 0, serials[:0]
        if indexed < len(rows):
            for chunk in torch.arange(indexed, len(rows)).split(TRAINING_ROWS):  # bounds the memory
                self._index.add(rows.gather(chunk).numpy())
            self._serials = torch.cat([self._serials, serials[indexed:]])

    def _build(self, rows: Rows) -> None:
        """Create an empty index, and compute the ranges of its codes and the lists of IVF from a sample of the rows."""
        faiss = self._faiss
        code, metric = faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        if self.kind == "hnsw":
            self._index = faiss.IndexHNSWSQ(self.dim, code, LINKS, metric)
            self._index.hnsw.efConstruction = BUILD_EFFORT
        else:
            lists = max(1, min(int(4 * len(rows) ** 0.5), len(rows) // 40))  # k-means needs about 40 rows per centre
            centres = faiss.IndexFlatIP(self.dim)
            # Without residuals, the ranges of the codes are the same in all lists.
            self._index = faiss.IndexIVFScalarQuantizer(centres, self.dim, lists, code, metric, False)
            # The index frees `centres`; without this, Python would free it too.
            self._index.own_fields = True
            centres.this.disown()
        # Evenly spaced rows: the first ones may belong to a few people.
        sample = evenly_spaced(len(rows), TRAINING_ROWS)
        self._index.train(rows.gather(sample).numpy())
        self._trained_on = len(rows)

    def search(self, x: Float[Tensor, "queries dim"], count: int, effort: int | None) -> Int64[Tensor, "queries count"]:
        """Return the serials of approximately the `count` nearest embeddings, padded with −1 if fewer are found."""
        effort = EFFORTS[self.kind] if effort is None else effort
        if self.kind == "hnsw":
            options = self._faiss.SearchParametersHNSW(efSearch=max(effort, count))
        else:
            options = self._faiss.SearchParametersIVF(nprobe=min(effort, self._index.nlist))
        # `faiss.contrib.torch_utils`, which pytorch-metric-learning imports, replaces `search` by a method without
        # `params` and keeps the original under this name.
        search = getattr(self._index, "search_numpy", self._index.search)
        positions = torch.from_numpy(search(x.numpy(), count, params=options)[1])
        return torch.where(positions < 0, positions, self._serials[positions.clamp(min=0)])

    @property
    def next_serial(self) -> int:
        """The first serial after those of the index, which may hold embeddings that were removed from the gallery."""
        return int(self._serials[-1]) + 1 if len(self._serials) else 0

    def state(self) -> dict[str, Tensor]:
        """Return the index as tensors; empty before the first `update`."""
        if self._index is None:
            return {}
        content = np.asarray(self._faiss.serialize_index(self._index))
        trained_on = torch.tensor([self._trained_on])
        return {"index": torch.from_numpy(content), "indexed_serials": self._serials, "trained_on": trained_on}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state`; raise a `ValueError` if it is not an index of this dimension."""
        if state:
            try:
                index = self._faiss.deserialize_index(state["index"].numpy())
            except RuntimeError as error:
                raise ValueError(f"faiss cannot read the index: {str(error).splitlines()[-1]}") from None
            if (index.d, index.ntotal) != (self.dim, len(state["indexed_serials"])):
                raise ValueError(
                    f"the index must have {len(state['indexed_serials'])} embeddings of dimension {self.dim}, "
                    f"not {index.ntotal} of dimension {index.d}"
                )
            self._index, self._serials = index, state["indexed_serials"]
            self._trained_on = int(state["trained_on"])
