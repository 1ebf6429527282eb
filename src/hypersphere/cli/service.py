"""The HTTP application of `hypersphere serve`: it maps images to embeddings, names and probabilities.

Requests cannot name files on this machine. Images are sent as parts of a form, and are decoded only after their numbers
of bytes and pixels were checked. Requests that are too large are refused before they are read completely.
"""

# Annotations are evaluated by FastAPI, so they must not be postponed.
import threading
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from hypersphere import __version__, evaluation
from hypersphere._validation import require_package
from hypersphere.cli.opening import LoadedRun
from hypersphere.data import BrokenSample, TensorSource
from hypersphere.data.images import decode_image
from hypersphere.gallery import Gallery
from hypersphere.training import RunCalibration

__all__ = ["Service", "make_app"]

MAX_MATCHES = 100  # per request
Message = MutableMapping[str, Any]


@dataclass(frozen=True, eq=False)
class Service:
    """A network, a gallery of its embeddings, and the calibration of the network, if it has one."""

    opened: LoadedRun
    gallery: Gallery
    calibration: RunCalibration | None
    max_pixels: int
    lock: threading.Lock = field(default_factory=threading.Lock)  # the network embeds one image at a time

    @classmethod
    def of(cls, opened: LoadedRun, gallery: Gallery, *, max_pixels: int) -> "Service":
        """Return the service; raise a `ValueError` if the gallery has embeddings of another network."""
        opened.require_images("serve")
        gallery.search([[1.0] * gallery.dim], 1, fingerprint=opened.fingerprint)  # checks the fingerprint
        return cls(opened, gallery, opened.calibration(), max_pixels)

    def embed(self, content: bytes, name: str) -> Tensor:
        """Return the embedding (d,) of an encoded image; raise `BrokenSample` if it cannot be decoded."""
        channels, height, width = self.opened.shape
        image = decode_image(
            content,
            name,
            size=(height, width),
            grey=channels == 1,
            fit=self.opened.fit,
            fast=True,
            max_pixels=self.max_pixels,
        )
        source = TensorSource(image[None], torch.zeros(1, dtype=torch.int64), ("",))
        with self.lock:
            return self.opened.embed(source)[0][0]

    def interpret(self, cosine: float) -> dict[str, Any]:
        """Return a cosine and, with a calibration, its log-likelihood ratio and probability."""
        if self.calibration is None:
            return {"cosine": cosine}
        fitted = self.calibration.calibration
        return {"cosine": cosine, "llr": float(fitted.llr(cosine)), "probability": float(fitted.probability(cosine))}

    def search(self, x: Any, k: int, per_name: bool) -> dict[str, Any]:
        """Return the best matches of one embedding."""
        matches = self.gallery.search([x] if isinstance(x, list) else x[None], k, per_name=per_name)
        pairs = zip(matches.names[0], matches.scores[0].tolist(), strict=True)
        if not self.gallery.scores_are_cosines:  # the calibration does not hold for cosines with signs
            return {"matches": [{"name": name, "cosine": score} for name, score in pairs]}
        return {"matches": [{"name": name, **self.interpret(score)} for name, score in pairs]}


def make_app(service: Service, *, max_bytes: int, hosts: Sequence[str] | None) -> Any:
    """Return the FastAPI application.

    Args:
        service: computes the answers.
        max_bytes: largest request.
        hosts: accepted values of the header `Host`, so that web pages cannot reach a local service by another name;
            None for all.
    """
    require_package("fastapi", "fastapi", "serve")
    from fastapi import FastAPI, HTTPException, Query, UploadFile
    from pydantic import BaseModel
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    # The interactive pages of FastAPI load scripts from the network, so they are off.
    app = FastAPI(title="hypersphere", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_bytes=max_bytes)
    if hosts is not None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
    Count = Annotated[int, Query(ge=1, le=MAX_MATCHES)]
    gallery, model = service.gallery, {"fingerprint": service.opened.fingerprint}

    class Embedding(BaseModel):
        embedding: list[float]
        fingerprint: str

    def embed_upload(image: UploadFile) -> Tensor:
        try:
            return service.embed(image.file.read(), image.filename or "image")
        except BrokenSample as error:
            raise HTTPException(422, str(error)) from None

    @app.get("/health")
    def health() -> dict[str, Any]:
        names = len(set(gallery.names))
        calibrated = service.calibration is not None
        return {"photos": len(gallery), "names": names, "dim": gallery.dim, "calibrated": calibrated, **model}

    @app.post("/embed")
    def embed(image: UploadFile) -> dict[str, Any]:
        return {"embedding": embed_upload(image).tolist(), **model}

    @app.post("/search")
    def search(image: UploadFile, k: Count = 5, per_name: bool = True) -> dict[str, Any]:
        return service.search(embed_upload(image), k, per_name) | model

    @app.post("/search/embedding")
    def search_embedding(query: Embedding, k: Count = 5, per_name: bool = True) -> dict[str, Any]:
        if query.fingerprint != model["fingerprint"]:
            raise HTTPException(
                409, "the fingerprint is that of another model, whose embeddings cannot be compared with this gallery"
            )
        try:
            return service.search(query.embedding, k, per_name) | model
        except ValueError as error:
            raise HTTPException(422, str(error)) from None

    @app.post("/verify")
    def verify(first: UploadFile, second: UploadFile) -> dict[str, Any]:
        pair = [embed_upload(image)[None] for image in (first, second)]
        result = service.interpret(float(evaluation.cosine_scores(*pair)))
        if service.calibration is not None:
            accepted = {
                str(far): result["cosine"] >= threshold for far, threshold in service.calibration.thresholds.items()
            }
            result["accepted_at_far"] = accepted
        return result | model

    return app


class BodyLimit:
    """Answer with status code 413 if a request has more than `max_bytes`, also without the header `Content-Length`."""

    def __init__(self, app: Callable[..., Awaitable[None]], max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        """Forward a request, and count the bytes of its body."""
        from starlette.exceptions import HTTPException
        from starlette.responses import JSONResponse

        reason = f"a request must have at most {self.max_bytes} bytes"
        announced = dict(scope.get("headers", ())).get(b"content-length", b"0")
        if scope["type"] == "http" and (not announced.isdigit() or int(announced) > self.max_bytes):
            await JSONResponse({"detail": reason}, 413)(scope, receive, send)
            return
        total = 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self.max_bytes:
                raise HTTPException(413, reason)
            return message

        await self.app(scope, counted, send)
