r"""Templates: one embedding for a set of images and videos of a person, as in IJB-B and IJB-C."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from hypersphere import sphere
from hypersphere._validation import require
from hypersphere.evaluation._arrays import Array, as_features, as_labels, as_scores, blocks

__all__ = ["templates"]


@torch.no_grad()
def templates(
    features: Array,
    template_ids: Array,
    media_ids: Array,
    quality: Array | None = None,
    *,
    unit: bool = False,
) -> Float[Tensor, "templates dim"]:
    r"""Pool embeddings to templates: the mean within each medium, then over the media, then normalised.

    A medium is a photograph or a video. The frames of a video together count as much as one photograph. With a quality
    qᵢ, the mean within a medium of n images is (1/n)·Σ qᵢxᵢ, so that poor images count less within their medium and
    poor media count less within their template. This is what insightface does with detector scores.

    Args:
        features: (N, d) embeddings of images. Longer embeddings count more, unless `unit` is True.
        template_ids: (N,) integers, the template of each image.
        media_ids: (N,) integers, the medium of each image. Equal numbers in different templates are different media.
        quality: (N,) numbers >= 0, not all zero in any template.
        unit: normalise the embeddings first.

    Returns:
        One unit row per template, in ascending order of the template ids: row i belongs to
        `np.unique(template_ids)[i]`. Float32, or float64 for float64 features.

    Example:
        >>> templates([[2.0, 0.0], [4.0, 0.0], [0.0, 4.0]], [7, 7, 7], [0, 0, 1])
        tensor([[0.6000, 0.8000]], dtype=torch.float64)
    """
    x = as_features("features", features)
    template = as_labels("template_ids", template_ids, len(x), x.device)
    medium = as_labels("media_ids", media_ids, len(x), x.device)
    # One column per medium of a template: the template and the medium.
    media, medium_of_image, images = torch.stack([template, medium]).unique(
        dim=1, return_inverse=True, return_counts=True
    )
    ids, template_of_medium = media[0].unique(return_inverse=True)
    weights = 1 / images[medium_of_image].double()
    if quality is not None:
        image_quality = as_scores("quality", quality).to(x.device)
        require(len(image_quality) == len(x), "quality", f"a vector of {len(x)} numbers", tuple(image_quality.shape))
        require(bool((image_quality >= 0).all()), "quality", "numbers >= 0", float(image_quality.min()))
        best_quality = torch.zeros(len(ids), dtype=torch.float64, device=x.device)
        best_quality.scatter_reduce_(0, template_of_medium[medium_of_image], image_quality, "amax")
        for template_id in ids[best_quality == 0][:1].tolist():  # the first template without a usable image
            raise ValueError(
                f"quality must be positive for an image of each template, but is 0 in template {template_id}"
            )
        weights *= image_quality
    # The mean over media differs from their sum by a factor, which the direction does not depend on.
    template_of_image = template_of_medium[medium_of_image]
    sums = torch.zeros(len(ids), x.shape[1], dtype=torch.float64, device=x.device)
    for start, rows in blocks(x):
        part = slice(start, start + len(rows))
        embeddings = (sphere.row_directions(rows) if unit else rows).double()
        sums.index_add_(0, template_of_image[part], embeddings * weights[part, None])
    return sphere.row_directions(sums).to(torch.promote_types(x.dtype, torch.float32))
