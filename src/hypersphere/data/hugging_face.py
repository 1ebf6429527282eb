"""Images of a Hugging Face data set, decoded by this library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hypersphere._validation import require, require_package
from hypersphere.data.images import MAX_IMAGE_BYTES, BrokenSample, Size, read_image_file
from hypersphere.data.lists import LabelCodes
from hypersphere.data.sources import ImageSource, common_fingerprint, digest, spaced_positions


class HuggingFaceSource(ImageSource):
    """Images of a `datasets.Dataset`, such as one split that `datasets.load_dataset` returned.

    Args:
        dataset: the data set.
        image: column of the images.
        label: column of the labels, integers or text.
        size, grey, fit: see ImageSource.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        image: str = "image",
        label: str = "label",
        size: Size = None,
        grey: bool | None = None,
        fit: str = "stretch",
    ) -> None:
        datasets = require_package("datasets", "datasets", "data")
        for column in (image, label):
            require(column in dataset.column_names, "column", f"one of {', '.join(dataset.column_names)}", column)
        # Keep images encoded, so that decoding has the limits and error messages of all other sources.
        self.dataset = dataset.cast_column(image, datasets.Image(decode=False))
        self.image = image
        values = dataset[label]
        names = getattr(dataset.features[label], "names", None)
        if names is not None:
            labels, classes = torch.tensor(values, dtype=torch.int64), list(names)
        else:
            codes = LabelCodes()
            for value in values:
                codes.append(str(value))
            labels, classes = codes.labels()
        super().__init__(labels, classes, size=size, grey=grey, fit=fit)

    def name(self, index: int) -> str:
        """Return the position of an image; paths are not always stored."""
        return str(index)

    def read(self, index: int) -> bytes:
        """Return the bytes of an image."""
        encoded = self.dataset[int(index)][self.image] or {}  # an image may be missing
        content, path = encoded.get("bytes"), encoded.get("path")
        if content is None and path:
            return read_image_file(Path(path))
        if content is None or len(content) > MAX_IMAGE_BYTES:
            raise BrokenSample(self.name(index), f"it must have 1 to {MAX_IMAGE_BYTES} bytes")
        return bytes(content)

    def fingerprint(self) -> dict[str, Any]:
        """Return checksums of the labels, and of the sizes of up to 1,000 images."""
        images = (self.dataset[index][self.image] or {} for index in spaced_positions(len(self), 1000))
        sizes = [len(image.get("bytes") or b"") for image in images]
        return common_fingerprint(self.classes, self.labels) | {"content": digest(str(sizes).encode())}
