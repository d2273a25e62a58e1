"""Pictures of a federation: which classes each client holds, and what each test distribution looks like."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .corruptions import CORRUPTIONS
from .data.partition import say_partition
from .data.plan import Federation
from .data.shifts import Stream
from .names import name_test
from .store import whole_file
from .text import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 14  # example images in a row


def title_of(test: str, federation: Federation) -> str:
    """The display name of a test distribution; a natural shift is named after its pool."""
    if test not in federation.dataset.natural:
        return name_test(test).replace(" ", "\n")
    name = federation.dataset.natural[test].name
    return clean(test, 30) if name == test else f"natural:\n{clean(name, 30)}"


def draw_clients(federation: Federation, path: Path) -> None:
    """A heat map of the number of rows of each class that each client holds."""
    from matplotlib.figure import Figure

    counts = federation.class_counts.T  # [classes, clients]
    classes, clients = counts.shape
    cell = 0.42 if clients <= 40 else 16 / clients
    tall = 0.34 if classes <= 40 else 14 / classes
    names = [clean(name, 30) for name in federation.pool.classes]
    wide = 2.8 + 0.12 * max(map(len, names)) + cell * clients
    figure = Figure(figsize=(wide, 1.9 + tall * classes), layout="constrained")
    axes = figure.add_subplot()
    shares = counts / counts.sum(0, keepdims=True)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    if clients <= 40 and classes <= 40:
        for c, k in np.argwhere(counts):
            shade = "white" if shares[c, k] > 0.55 else "#333333"
            axes.text(k, c, str(counts[c, k]), ha="center", va="center", fontsize=6.5, color=shade)
    if classes <= 100:
        axes.set_yticks(range(classes), names, fontsize=8 if classes <= 40 else 5, parse_math=False)
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    if clients <= 40:
        axes.set_xticks(range(clients))
    axes.set_xlabel("client")
    s = federation.settings
    axes.set_title(
        f"{clean(federation.pool.name)}: rows of each class by client\n"
        f"{say_partition(s.partition, s.dirichlet, s.shards)}, seed {s.seed}",
        fontsize=10,
        parse_math=False,
    )
    figure.colorbar(image, ax=axes, label="share of the client's rows", fraction=0.05, pad=0.02)
    save(figure, path)


def draw_tests(federation: Federation, path: Path, client: int | None = None) -> None:
    """Samples of one client under every test distribution, each with its class (and its corruption)."""
    from matplotlib.figure import Figure

    k = pick_client(federation) if client is None else client
    tests = {name: stream for name, streams in federation.tests.items() if (stream := streams[k]) is not None}
    figure = Figure(figsize=(1.6 + 0.92 * COLUMNS, 0.5 + 1.24 * len(tests)), layout="constrained")
    grid = figure.subplots(len(tests), COLUMNS, squeeze=False)
    for cells, (name, stream) in zip(grid, tests.items(), strict=True):
        # of a stream in time, samples from its beginning to its end
        last = len(stream) - 1 if name in federation.streams else min(len(stream), COLUMNS) - 1
        shown = stream.take(np.unique(np.linspace(0, last, COLUMNS).round().astype(int)))
        images, captions = federation.inputs(shown), _caption(federation, shown)
        label = f"{title_of(name, federation)}\n({len(stream)})"
        cells[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9, parse_math=False)
        for i, cell in enumerate(cells):
            cell.set(xticks=[], yticks=[], frame_on=False)
            if i < len(shown):
                cell.imshow(images[i].squeeze(), cmap="gray", vmin=0, vmax=255)
                cell.set_xlabel(captions[i], fontsize=6.5, labelpad=1, parse_math=False)
    s = federation.settings
    title = f"{clean(federation.pool.name)}: what client {k} is tested on (severity {s.severity})"
    figure.suptitle(title, fontsize=11, parse_math=False)
    save(figure, path)


def pick_client(federation: Federation) -> int:
    """The first client that has every test distribution, or client 0."""
    complete = (k for k, streams in enumerate(zip(*federation.tests.values(), strict=True)) if None not in streams)
    return next(complete, 0)


def _caption(federation: Federation, stream: Stream) -> list[str]:
    captions = []
    for kind, severity, label in zip(stream.kind, stream.severity, federation.labels(stream), strict=True):
        caption = clean(federation.pool.classes[label], 14) if label >= 0 else "unknown"
        if kind >= 0:
            name = CORRUPTIONS[kind].removesuffix("_transform").removesuffix("_compression")
            grade = "" if severity == federation.settings.severity else f" {severity}"
            caption += "\n" + name.replace("_", " ") + grade
        captions.append(caption)
    return captions


def save(figure: Figure, path: Path) -> None:
    with whole_file(path) as part, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as a box
        figure.savefig(part, format="png", dpi=130)
