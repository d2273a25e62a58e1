"""Bundles to serve, and the server."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import InputError
from ..foreign import say_error, show_path
from .bundle import FACTS, Bundle, read_bundle

if TYPE_CHECKING:
    from .service.store import Store


def pick_bundles(paths: Sequence[Path], verify: Path | str | None = None) -> dict[str, Bundle]:
    """Bundles by the names of their folders: of these folders, or of the folders in them."""
    folders: list[Path] = []
    for path in paths:
        if (path / FACTS).exists() or not path.is_dir():
            folders.append(path)  # what is no bundle is refused when it is read
        else:
            inside = sorted(each for each in path.iterdir() if (each / FACTS).exists())
            if not inside:
                raise InputError(f"{show_path(path)} holds no bundle; `fedthe export` writes one.")
            folders += inside
    found: dict[str, Bundle] = {}
    for folder in folders:
        name = folder.resolve().name
        if name in found:
            raise InputError(f"two bundles are named {show_path(name)}; rename one of the folders.")
        found[name] = read_bundle(folder, verify=verify)
        if found[name].kind != "client":
            raise InputError(f"{show_path(folder)} is for clients to join with; `fedthe personalize` makes one's own.")
    return found


def listen(
    bundles: Mapping[str, Bundle],
    store: Store,
    *,
    host: str,
    port: int,
    tokens: bool,
    rate: float,
    threads: int,
    together: int,
    expire: timedelta | None = None,
) -> None:
    """Serve until the process is told to stop."""
    try:
        import uvicorn

        from .service.app import make_app
        from .service.limits import Limits
    except ImportError as error:
        raise InputError(f"{error.name} is missing; install it with: pip install 'fedthe[serve]'.") from None
    torch.set_num_threads(threads)
    app = make_app(bundles, store, limits=Limits(rate=rate), tokens=tokens, together=together, expire=expire)
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, timeout_keep_alive=5, server_header=False
    )
    server = uvicorn.Server(config)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=config.backlog)
    except (OSError, OverflowError) as error:
        raise InputError(f"{host} port {port} cannot be used ({say_error(error)}); choose another --port.") from None
    shown = f"[{host}]" if ":" in host else host
    print(f"serving {', '.join(bundles)} at http://{shown}:{sock.getsockname()[1]}/", file=sys.stderr, flush=True)
    server.run(sockets=[sock])
