"""Write the page: that of the service, with the model and onnxruntime-web in place of a server.

Everything is a classic script or inside one, since a browser loads no modules and fetches no files for a page that was
opened from a folder: a double click is enough, and so is any host of files.
"""

from __future__ import annotations

import base64
import json
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from ... import runtime, store
from ...errors import InputError
from ...experiment.results import Results
from ...foreign import show_path
from ...names import name_method
from ..bundle import Bundle
from ..export import bundle_client, open_run, write_graph
from .package import VERSION, read_onnxruntime

OWN = ("fit.js", "here.js")
SHARED = ("page.css", "page.js")  # with the page of the service
# The page can reach nothing: not even the place that it came from.
POLICY = (
    "default-src 'none'; script-src 'self' blob: 'wasm-unsafe-eval'; style-src 'self'; img-src blob: data:; "
    "base-uri 'none'; form-action 'none'"
)
CHANGES = {
    '<meta charset="utf-8">': f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
    '<script defer src="static/page.js"></script>': "\n".join(
        f'<script defer src="static/{name}"></script>'
        for name in ("model.js", "onnxruntime.js", "fit.js", "here.js", "page.js")
    ),
    "Images are sent to this server only.": "Images do not leave this page: the model is part of it. "
    f"It runs on onnxruntime-web {VERSION} (Microsoft, MIT licence).",
}


def export_page(
    run: Path | str | Results,
    to: Path,
    method: str | None,
    client: int,
    seed: int | None = None,
    onnxruntime: Path | None = None,
) -> Path:
    """Write one client of a run as a folder with a page; return the page. onnxruntime: a folder with
    onnxruntime-web; without it, npm brings it."""
    check_place(to)
    return write_folder(bundle_client(open_run(run, method, seed), client), to, onnxruntime)


def write_folder(bundle: Bundle, to: Path, onnxruntime: Path | None = None) -> Path:
    """Write it whole, or not at all."""
    check_place(to)
    if not bundle.input.is_picture:
        raise InputError("a page takes pictures, and this client takes numbers; use --format onnx.")
    script, wasm = read_onnxruntime(onnxruntime)
    scripts = {
        "model.js": ("MODEL", describe(bundle)),
        "onnxruntime.js": ("ONNXRUNTIME", {"script": script.decode(), "wasm": _encode(wasm)}),
    }
    with store.whole_folder(to) as folder:
        (folder / "index.html").write_text(write_page(), encoding="utf-8")
        static = folder / "static"
        static.mkdir()
        for name in SHARED:
            (static / name).write_bytes(_read("service", "page", name))
        for name in OWN:
            (static / name).write_bytes(_read("web", name))
        for name, (constant, value) in scripts.items():  # JSON is in ASCII, so no character ends a script early
            (static / name).write_text(f"const {constant} = {json.dumps(value)};\n", encoding="ascii")
    return to / "index.html"


def check_place(to: Path) -> None:
    """Refuse, before any work, to replace what is no such page."""
    if to.exists() and not (to / "static" / "model.js").exists() and not (to.is_dir() and not any(to.iterdir())):
        raise InputError(f"{show_path(to)} exists and is no exported page; name another folder.")
    store.check_folder(to.absolute().parent)


def write_page() -> str:
    page = _read("service", "page", "index.html").decode()
    for old, new in CHANGES.items():
        assert page.count(old) == 1, f"the page of the service has changed: {old}"
        page = page.replace(old, new)
    return page


def describe(bundle: Bundle) -> dict[str, Any]:
    """What the page knows of its model, and the model."""
    takes = {"dtype": bundle.input.dtype, "shape": list(bundle.input.shape), "square": bundle.input.square}
    with tempfile.TemporaryDirectory() as temporary:
        file = write_graph(bundle, Path(temporary) / "model.onnx")
        graph, facts = runtime.read_sealed(file), runtime.load(file).facts
    return {
        "name": f"client {bundle.client}",
        "method": name_method(bundle.name),
        "classes": list(bundle.classes),
        "input": takes,
        "weighs": facts.weighs,
        "state": json.loads(facts.write())["state"],
        "onnx": _encode(graph),
    }


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _read(*names: str) -> bytes:
    return resources.files("fedthe.deploy").joinpath(*names).read_bytes()
