"""A gallery: named embeddings that can be searched by cosine, saved, and migrated to another model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from hypersphere import _numerics, sphere
from hypersphere._validation import is_integer, printable, require, warn_user
from hypersphere.gallery._folder import DamagedGallery, GalleryContent, read_folder, write_folder
from hypersphere.gallery._index import MIN_INDEXED, ApproximateIndex
from hypersphere.gallery._rows import BLOCK_ROWS, ENCODINGS, Rows
from hypersphere.gallery._search import RESCORED, SLACK, nearest, rescore

__all__ = ["Gallery", "Matches", "Migration"]

INDEXES = ("exact", "hnsw", "ivf")
NORMALIZED_ROWS = 65_536  # rows that are normalised in float64 at a time
SHOWN_QUERIES, SHOWN_MATCHES = 10, 5  # rows of a printed table

Array: TypeAlias = Tensor | np.ndarray | Sequence[Any]


@dataclass(frozen=True, eq=False)
class Matches:
    """Result of `Gallery.search`: the best entries of each query, best first.

    Attributes:
        scores: cosines in [−1, 1].
        names: the name of each match, one tuple per query.
        entries: the position of each match in `Gallery.names`.
    """

    scores: Float32[Tensor, "queries k"]
    names: tuple[tuple[str, ...], ...]
    entries: Int64[Tensor, "queries k"]

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        lines = [("query", "rank", "cosine", "name")]
        for query, (names, scores) in enumerate(zip(self.names[:SHOWN_QUERIES], self.scores.tolist(), strict=False)):
            for rank, (name, score) in enumerate(zip(names[:SHOWN_MATCHES], scores, strict=False), 1):
                lines.append((str(query) if rank == 1 else "", str(rank), f"{score:.4f}", printable(name)))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.rjust, line[:3], widths)) + f"  {line[3]}" for line in lines]
        return "\n".join([f"{len(self)} queries, {self.scores.shape[1]} matches each", *table])


@dataclass(frozen=True, eq=False)
class Migration:
    """Result of `Gallery.migrate`.

    Attributes:
        rotation: orthogonal matrix R. An embedding w of the old model became wR.
        cosine_before: mean cosine of the pairs without the rotation.
        cosine_after: mean cosine of the rotated old embeddings and the new ones, for the pairs that R was fitted to.
    """

    rotation: Float64[Tensor, "dim dim"]
    cosine_before: float
    cosine_after: float

    def __repr__(self) -> str:
        return f"Migration(mean cosine of the pairs {self.cosine_before:.4f} before, {self.cosine_after:.4f} after)"


@dataclass(frozen=True)
class _Entries:
    """An immutable snapshot. A change of the gallery makes a new one, so concurrent searches see a consistent state."""

    rows: Rows
    full: Rows | None  # with `keep_full`: the same rows in float32
    names: list[str]  # shared with later snapshots, so only the first `len(rows)` belong to this one
    serials: Tensor | None  # with an approximate index: one ascending number per row, see `_index`

    @property
    def rescoring(self) -> Rows:
        """The most precise rows."""
        return self.rows if self.full is None else self.full


class Gallery:
    r"""An index of embeddings on the unit sphere.

    Embeddings are normalised when they are enrolled, and the score of a query is its cosine with the stored vector. The
    gallery is in CPU memory.

    | dtype | bytes per embedding | scores |
    |---|---|---|
    | "float32" | 4d | exact |
    | "float16" | 2d | error about 10⁻⁴ |
    | "int8" | d + 4 | error about 10⁻³ |
    | "binary" | d/8 | candidates by the signs; without `keep_full`, the score is the cosine with sign(w)/√d |

    A name may have several embeddings, for example one per photo. By default a search lists embeddings, so that a name
    can occur several times; `per_name=True` lists each name once, with its best embedding. Equal scores are ordered by
    enrolment.

    Search may run in other threads while one thread enrols or removes.

    Args:
        dim: dimension d of the embeddings.
        dtype: how embeddings are stored.
        index: "exact" compares queries with all embeddings. "hnsw" (a graph) and "ivf" (inverted lists) use faiss,
            which the extra `gallery` installs, to find candidates; they need more memory, d + 150 and d + 8 bytes per
            embedding, and may miss some matches. They are built at the first search of at least 2048 embeddings.
        fingerprint: identifies the model of the embeddings, see `fingerprint_of`. None if unknown.
        keep_full: also keep the embeddings in float32. The compact embeddings then select about 4k candidates, and
            their scores are those of the float32 embeddings, which are memory-mapped after `load`.

    Example:
        >>> gallery = Gallery(3)
        >>> gallery.enroll(["ada", "emmy", "ada"], [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.9, 0.0, 0.1]])
        >>> gallery.search([[1.0, 0.5, 0.0]], k=3)
        1 queries, 3 matches each
        query  rank  cosine  name
            0     1  0.8944  ada
                  2  0.8890  ada
                  3  0.4472  emmy
        >>> gallery.search([[1.0, 0.5, 0.0]], k=3, per_name=True).names
        (('ada', 'emmy'),)
        >>> gallery.remove(["ada"]), len(gallery)
        (2, 1)
    """

    def __init__(
        self,
        dim: int,
        dtype: str = "float32",
        index: str = "exact",
        fingerprint: str | None = None,
        *,
        keep_full: bool = False,
    ) -> None:
        require(is_integer(dim, 1), "dim", "an integer >= 1", dim)
        require(dtype in ENCODINGS, "dtype", f"one of {', '.join(ENCODINGS)}", dtype)
        require(index in INDEXES, "index", f"one of {', '.join(INDEXES)}", index)
        require(index == "exact" or dtype != "binary", "index", "'exact' if dtype is 'binary'", index)
        require(fingerprint is None or isinstance(fingerprint, str), "fingerprint", "a string or None", fingerprint)
        accepted = "False if dtype is 'float32', which has full precision"
        require(isinstance(keep_full, bool), "keep_full", "True or False", keep_full)
        require(not keep_full or dtype != "float32", "keep_full", accepted, keep_full)
        self.dim, self.dtype, self.index = int(dim), dtype, index
        self.fingerprint, self.keep_full = fingerprint, keep_full
        self._approximate = None if index == "exact" else ApproximateIndex(index, self.dim)
        self._lock = threading.Lock()  # guards the approximate index, which searches update
        self._next_serial = 0
        self._entries = _Entries(
            Rows(self.dim, dtype),
            Rows(self.dim, "float32") if keep_full else None,
            [],
            None if self._approximate is None else torch.empty(0, dtype=torch.int64),
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy gets its own lock, and rebuilds an approximate index at its first search.
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_approximate")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()
        self._approximate = None if self.index == "exact" else ApproximateIndex(self.index, self.dim)

    def __copy__(self) -> Gallery:
        return copy.deepcopy(self)  # two galleries must not write to the same rows

    def __len__(self) -> int:
        return len(self._entries.rows)

    def __repr__(self) -> str:
        full = ", keep_full=True" if self.keep_full else ""
        model = "" if self.fingerprint is None else f" of model {self.fingerprint}"
        settings = f"dim={self.dim}, dtype={self.dtype!r}, index={self.index!r}{full}"
        return f"Gallery({len(self)} embeddings{model}, {settings})"

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each embedding, in the order of enrolment."""
        entries = self._entries
        return tuple(entries.names[: len(entries.rows)])

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded embeddings, without names, the index and the float32 rows of `keep_full`."""
        return self._entries.rows.nbytes

    @property
    def scores_are_cosines(self) -> bool:
        """Whether scores are cosines of embeddings, up to rounding, so that thresholds and calibrations hold for them.

        They are not if only the signs of the embeddings are stored: dtype "binary" without `keep_full`.
        """
        return self.dtype != "binary" or self.keep_full

    # --- changes

    def enroll(self, names: Sequence[str], embeddings: Array, *, fingerprint: str | None = None) -> None:
        """Add embeddings at the end. If an argument is invalid, nothing is added.

        Args:
            names: one string per embedding. Names may repeat.
            embeddings: (N, d) finite numbers, or (d,) for a single name. Their norms do not matter. The cosine of a
                zero vector is 0; a binary gallery, which stores signs, rejects it.
            fingerprint: that of the model of the embeddings; None skips the check. An empty gallery without a
                fingerprint adopts it.

        Raises:
            ValueError: if the fingerprint is not that of the gallery.
        """
        entries = self._entries
        adopts = fingerprint is not None and self.fingerprint is None and not len(self)
        if not adopts:
            self._check_fingerprint(fingerprint)
        names = _as_names(names)
        directions = self._directions("embeddings", embeddings).float()
        zero = (directions == 0).all(1).nonzero().flatten()
        if self.dtype == "binary" and len(zero):
            raise ValueError(f"embeddings must not be zero in a binary gallery, but row {int(zero[0])} is")
        count = len(directions)
        require(len(names) == count, "names", f"{count} names, one per embedding", f"{len(names)} names")
        rows, full, serials = (
            entries.rows.copy(),
            None if entries.full is None else entries.full.copy(),
            entries.serials,
        )
        rows.append(directions)
        if full is not None:
            full.append(directions)
        if serials is not None:
            serials = torch.cat([serials, torch.arange(self._next_serial, self._next_serial + count)])
        # Earlier snapshots share this list, and read only as many names as they have rows.
        entries.names.extend(map(str, names))
        self._next_serial += count
        self._entries = _Entries(rows, full, entries.names, serials)
        if adopts:
            self.fingerprint = fingerprint

    def remove(self, names: Sequence[str] | str) -> int:
        """Remove all embeddings of these names, and return the number of removed embeddings.

        Raises:
            ValueError: if a name is not in the gallery. Nothing is removed in this case.
        """
        entries = self._entries
        unwanted = set(_as_names([names] if isinstance(names, str) else names))
        missing = sorted(unwanted.difference(entries.names), key=str)
        if missing:
            raise ValueError(f"names must be in the gallery, but {missing[0]!r} is not")
        keeps = [name not in unwanted for name in entries.names]
        mask = torch.tensor(keeps, dtype=torch.bool)
        rows, full = entries.rows.copy(), None if entries.full is None else entries.full.copy()
        rows.keep(mask)
        if full is not None:
            full.keep(mask)
        remaining = [name for name, keep in zip(entries.names, keeps, strict=True) if keep]
        self._entries = _Entries(rows, full, remaining, None if entries.serials is None else entries.serials[mask])
        return len(keeps) - len(remaining)

    def migrate(self, pairs: tuple[Array, Array], *, fingerprint: str | None = None) -> Migration:
        r"""Rotate all embeddings into the space of another model, without the original inputs.

        The rotation R minimises ‖AR − B‖ over orthogonal matrices, where the rows of A and B are the normalised
        embeddings of the same inputs by the old and by the new model (orthogonal Procrustes problem): R = UVᵀ with
        AᵀB = UΣVᵀ. Cosines within the gallery do not change. The embeddings of two models differ by more than a
        rotation, so test the gallery on pairs that were not used here, and enrol again where inputs are available.

        Args:
            pairs: embeddings (N, d) of the old and of the new model. N should be several times d.
            fingerprint: that of the new model, or None if unknown. It replaces the fingerprint of the gallery.

        Example:
            >>> gallery = Gallery(2)
            >>> gallery.enroll(["ada"], [[1.0, 0.0]])
            >>> old = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
            >>> gallery.migrate((old, old.flip(1)))
            Migration(mean cosine of the pairs 0.4800 before, 1.0000 after)
            >>> gallery.search([[0.0, 1.0]]).scores
            tensor([[1.]])
        """
        is_pair = isinstance(pairs, (tuple, list)) and len(pairs) == 2
        require(is_pair, "pairs", "a tuple of the old and the new embeddings", type(pairs).__name__)
        require(fingerprint is None or isinstance(fingerprint, str), "fingerprint", "a string or None", fingerprint)
        old, new = self._directions("pairs[0]", pairs[0]), self._directions("pairs[1]", pairs[1])
        require(len(old) == len(new) > 0, "pairs", "as many old as new embeddings, at least one", (len(old), len(new)))
        entries = self._entries
        # Signs cannot be rotated.
        can_rotate = self.dtype != "binary" or self.keep_full or not len(self)
        require(can_rotate, "dtype", "float32, float16, int8, or binary with keep_full=True, to migrate", self.dtype)
        if len(old) < self.dim:
            warn_user(
                f"{len(old)} pairs do not determine a rotation in {self.dim} dimensions; pass at least {self.dim}"
            )
        u, _, vh = torch.linalg.svd(old.mT @ new)
        rotation = u @ vh
        rows, full = Rows(self.dim, self.dtype), Rows(self.dim, "float32") if self.keep_full else None
        for block in entries.rescoring.decoded():
            rotated = (block.double() @ rotation).float()
            rows.append(rotated)
            if full is not None:
                full.append(rotated)
        with self._lock:
            if self._approximate is not None:
                self._approximate = ApproximateIndex(self.index, self.dim)
            self._entries = replace(entries, rows=rows, full=full)
        self.fingerprint = fingerprint
        before, after = ((x * new).sum(1).mean().item() for x in (old, old @ rotation))
        return Migration(rotation, before, after)

    # --- search

    def search(
        self,
        embeddings: Array,
        k: int = 10,
        *,
        per_name: bool = False,
        fingerprint: str | None = None,
        effort: int | None = None,
    ) -> Matches:
        """Return the k best matches of each query, or all if there are fewer; no matches for an empty gallery.

        Args:
            embeddings: (Q, d) queries, or a single one (d,). Their norms do not matter.
            k: number of matches.
            per_name: list each name once, with its best embedding.
            fingerprint: that of the model of the queries; None skips the check.
            effort: for an approximate index, the size of the candidate list of "hnsw" (default 64) or the number of
                lists that "ivf" reads (default 32). A larger number misses less and takes longer.

        Raises:
            ValueError: if the fingerprint is not that of the gallery.
        """
        self._check_fingerprint(fingerprint)
        require(is_integer(k, 1), "k", "an integer >= 1", k)
        require(effort is None or is_integer(effort, 1), "effort", "an integer >= 1 or None", effort)
        x = self._directions("embeddings", embeddings)
        snapshot = self._entries
        if per_name:
            scores, entries = self._best_per_name(snapshot, x, int(k), effort)
        else:
            scores, entries = self._nearest(snapshot, x, min(int(k), len(snapshot.rows)), effort)
        names = tuple(tuple(snapshot.names[entry] for entry in row) for row in entries.tolist())
        return Matches(scores.float().clamp_(-1, 1), names, entries)

    def _nearest(self, state: _Entries, x: Tensor, k: int, effort: int | None) -> tuple[Tensor, Tensor]:
        """Return scores and entries of the k best embeddings, by the approximate index if the gallery is large."""
        count = max(RESCORED * k, k + SLACK)
        if (
            self._approximate is None
            or state.serials is None
            or len(state.rows) < max(MIN_INDEXED, 2 * count)
            or not len(x)
        ):
            return nearest(state.rows, x, k, state.full)
        with self._lock:
            self._approximate.update(state.rescoring, state.serials)
            serials = self._approximate.search(x.float(), count, effort)
        # Convert serials to positions, with −1 for embeddings that were removed.
        position = torch.searchsorted(state.serials, serials).clamp_(max=len(state.serials) - 1)
        candidates = position.masked_fill_(state.serials[position] != serials, -1)
        scores, entries = rescore(state.rescoring, x, candidates, k)
        # The index may find fewer than k embeddings, for example if the nearest ones were removed.
        incomplete = (entries < 0).any(1)
        if bool(incomplete.any()):
            scores[incomplete], entries[incomplete] = nearest(state.rows, x[incomplete], k, state.full)
        return scores, entries

    def _best_per_name(self, state: _Entries, x: Tensor, k: int, effort: int | None) -> tuple[Tensor, Tensor]:
        """Return scores and entries of the best embedding of each of the k best names."""
        total = len(state.rows)
        k = min(k, len(set(state.names[:total])))
        scores, entries = x.new_empty(len(x), k), torch.empty(len(x), k, dtype=torch.int64)
        pending, width = torch.arange(len(x)), k
        while len(pending) and k:
            # Search for more embeddings until they have k different names.
            width = min(total, RESCORED * width)
            all_scores, all_entries = self._nearest(state, x[pending], width, effort)
            incomplete = []
            for row, (query, candidates) in enumerate(zip(pending.tolist(), all_entries.tolist(), strict=True)):
                best_rank: dict[str, int] = {}
                for rank, entry in enumerate(candidates):
                    best_rank.setdefault(state.names[entry], rank)
                ranks = list(best_rank.values())[:k]
                if len(ranks) < k:
                    incomplete.append(query)
                    continue
                scores[query], entries[query] = all_scores[row, ranks], all_entries[row, ranks]
            pending = torch.tensor(incomplete, dtype=torch.int64)
        return scores, entries

    # --- files

    def save(self, folder: str | Path) -> None:
        """Write the gallery to a folder. If the process is killed, the folder holds the previous or the new content.

        Raises:
            ValueError: if the path is a file, or the folder holds a `gallery.json` of another program.
            OSError: if the disk is full or not writable; the previous content is not changed.
        """
        state = self._entries
        total = len(state.rows)
        tensors = {"rows": _tensors("rows", state.rows)}
        if state.full is not None:
            tensors["rows"] |= _tensors("full", state.full)
        if self._approximate is not None and state.serials is not None:
            with self._lock:
                tensors["index"] = {"serials": state.serials, **self._approximate.state()}
        settings = {
            "dim": self.dim,
            "dtype": self.dtype,
            "index": self.index,
            "fingerprint": self.fingerprint,
            "keep_full": self.keep_full,
            "embeddings": total,
        }
        write_folder(Path(folder), GalleryContent(settings, state.names[:total], tensors))

    @classmethod
    def load(cls, folder: str | Path) -> Gallery:
        """Read the gallery of a folder and verify the checksums of its files. Rows of `keep_full` are memory-mapped.

        Raises:
            ValueError: if the folder holds no gallery, or one of another version.
            DamagedGallery: if a file is missing or is not what was written.
            ImportError: if the gallery has an approximate index and faiss is not installed.
        """
        content = read_folder(Path(folder))
        settings = content.settings
        try:
            arguments = (settings[name] for name in ("dim", "dtype", "index", "fingerprint"))
            gallery = cls(*arguments, keep_full=settings["keep_full"])
            total, names = settings["embeddings"], content.names
            is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
            require(is_list, "names", "a list of strings", names)
            rows = _rows("rows", content.tensors["rows"], gallery.dim, gallery.dtype)
            full = None
            if gallery.keep_full:
                full = _rows("full", content.tensors["rows"], gallery.dim, "float32", is_mapped=True)
            serials = None
            if gallery._approximate is not None:
                state = dict(content.tensors["index"])
                serials = state.pop("serials")
                gallery._approximate.load_state(state)
                last = int(serials[-1]) if len(serials) else -1
                gallery._next_serial = max(gallery._approximate.next_serial, last + 1)
            counts = [len(part) for part in (names, rows, full, serials) if part is not None]
            require(all(count == total for count in counts), "sizes of files", f"{total} embeddings each", counts)
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedGallery(f"{folder} is damaged: {error}") from None
        gallery._entries = _Entries(rows, full, names, serials)
        return gallery

    # --- checks

    def _check_fingerprint(self, fingerprint: str | None) -> None:
        if fingerprint is not None and fingerprint != self.fingerprint:
            model = "an unknown model" if self.fingerprint is None else f"the model {self.fingerprint!r}"
            reason = f"the gallery holds embeddings of {model}, and cosines between models have no meaning"
            raise ValueError(f"fingerprint must be that of the gallery, not {fingerprint!r}: {reason}")

    def _directions(self, argument: str, embeddings: Array) -> Float64[Tensor, "rows dim"]:
        """Return the directions of a finite (N, d) matrix in float64."""
        try:
            x = embeddings.detach().cpu() if isinstance(embeddings, Tensor) else torch.from_numpy(np.array(embeddings))
        except (TypeError, ValueError):
            raise ValueError(f"{argument} must be a matrix of numbers, not {type(embeddings).__name__}") from None
        if x.ndim == 1:
            x = x.reshape(-1, self.dim) if x.numel() in (0, self.dim) else x
        fits = x.ndim == 2 and x.shape[1] == self.dim and not x.is_complex()
        require(fits, argument, f"a matrix (N, {self.dim}) of real numbers", f"{x.dtype} {tuple(x.shape)}")
        _numerics.require_finite_rows(argument, x)
        # `polar` scales each row separately, so that equal rows have equal directions in every batch.
        return torch.cat([sphere.polar(part.double())[1] for part in x.split(NORMALIZED_ROWS)])


def _as_names(names: object) -> list[str]:
    """Return names as a list, after checking that all of them are strings."""
    accepted = "a list of strings, the first argument"
    require(isinstance(names, Iterable) and not isinstance(names, str), "names", accepted, names)
    listed = list(cast(Iterable[Any], names))
    invalid = [name for name in listed if not isinstance(name, str)]
    require(not invalid, "names", accepted, invalid[:1])
    return listed


def _tensors(kind: str, rows: Rows) -> dict[str, Tensor]:
    """Return the columns of all blocks by the name "kind.block.column"."""
    return {
        f"{kind}.{number}.{name}": column for number, block in enumerate(rows.blocks) for name, column in block.items()
    }


def _rows(kind: str, tensors: dict[str, Tensor], dim: int, dtype: str, *, is_mapped: bool = False) -> Rows:
    """Return the rows that `_tensors` stored; raise a `ValueError` if shapes or dtypes are wrong.

    Mapped rows stay in the file, unless it was written with blocks of another size. Other rows are copied to memory.
    """
    rows = Rows(dim, dtype)
    columns = rows.encoding.columns()
    blocks, number = [], 0
    while f"{kind}.{number}.{next(iter(columns))}" in tensors:
        block = {name: tensors[f"{kind}.{number}.{name}"] for name in columns}
        count = len(next(iter(block.values())))
        for name, (column_dtype, shape) in columns.items():
            fits = (block[name].dtype, tuple(block[name].shape)) == (column_dtype, (count, *shape))
            require(fits, name, f"{column_dtype} {(count, *shape)}", f"{block[name].dtype} {tuple(block[name].shape)}")
        blocks.append(block)
        number += 1
    if is_mapped and all(len(next(iter(block.values()))) == BLOCK_ROWS for block in blocks[:-1]):
        rows.blocks = blocks
    else:
        for block in blocks:
            rows.append_encoded(block)
    return rows
