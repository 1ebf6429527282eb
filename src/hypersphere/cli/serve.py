"""`hypersphere serve`: answer searches in a gallery over HTTP, for programs on this machine or a trusted network."""

from __future__ import annotations

from typing import Annotated

import typer

from hypersphere.cli import options
from hypersphere.cli.output import print_line, warn

__all__ = ["serve"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_CONNECTIONS = 32  # at the same time; further ones get the status code 503


def serve(
    gallery: options.GalleryFolder,
    run: options.OfRun,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default accepts connections from this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8000,
    max_megabytes: Annotated[float, typer.Option(min=0.001, help="Largest request in MiB.")] = 10.0,
    max_megapixels: Annotated[float, typer.Option(min=0.001, help="Largest image in millions of pixels.")] = 16.0,
    step: options.Step = None,
    device: options.Device = None,
    threads: options.Threads = None,
    trust_code: options.TrustCode = False,
) -> None:
    """Serve /health, /embed, /search and /verify over HTTP, without access control: not for the open internet."""
    from hypersphere._validation import require_package
    from hypersphere.cli.opening import open_run
    from hypersphere.cli.service import Service, make_app
    from hypersphere.gallery import Gallery

    uvicorn = require_package("uvicorn", "uvicorn", "serve")
    for package, distribution in (("fastapi", "fastapi"), ("python_multipart", "python-multipart")):
        require_package(package, distribution, "serve")
    enrolled = Gallery.load(gallery)
    opened = open_run(run, step=step, device=device, with_data=False, trust_code=trust_code)
    service = Service.of(opened, enrolled, max_pixels=int(max_megapixels * 1e6))
    is_local = host in LOOPBACK
    app = make_app(service, max_bytes=int(max_megabytes * 2**20), hosts=LOOPBACK if is_local else None)
    if not is_local:
        warn(f"everyone who can reach {host} can search this gallery; there is no access control")
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", limit_concurrency=MAX_CONNECTIONS)
    with config.bind_socket() as listening:
        listening.listen()  # clients that connect once the address is printed wait until the server accepts them
        address = f"[{host}]" if ":" in host else host
        print_line(f"{len(enrolled)} photos at http://{address}:{listening.getsockname()[1]} (Ctrl-C stops)")
        uvicorn.Server(config).run(sockets=[listening])
