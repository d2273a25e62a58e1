"""`fedthe export`, `fedthe predict` and `fedthe personalize`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import InputError
from ..text import count
from .common import Json, bars, print_grid, print_rich

if TYPE_CHECKING:
    from ..deploy.online import Online, Prediction

Out = Annotated[Path, typer.Option("--out", "-o", help="The folder of the bundle; one that is there is replaced.")]
Sign = Annotated[Path | None, typer.Option(metavar="KEY", help="Sign it with this Ed25519 private key.")]
Verify = Annotated[Path | None, typer.Option(metavar="KEY", help="The public key that must have signed it.")]


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run, such as demo.")],
    out: Out = Path("bundle"),
    method: Annotated[str | None, typer.Option(help="The method; may be left out where the run has one.")] = None,
    client: Annotated[int | None, typer.Option(help="The client, by its number from 0 on.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All clients, each in a folder of its own below OUT.")] = False,
    shared: Annotated[bool, typer.Option("--global", help="For new clients: `fedthe personalize` takes it.")] = False,
    seed: Annotated[int | None, typer.Option(help="The seed; may be left out where the run has one.")] = None,
    sign: Sign = None,
    format: Annotated[
        Literal["bundle", "onnx", "web"],
        typer.Option(help="A bundle, one ONNX file, or a folder with a page that answers in the browser."),
    ] = "bundle",
    onnxruntime: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="For --format web: onnxruntime-web, unpacked. Without it, npm brings it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write what a client of a run deploys to a folder: its bundle.

    A bundle needs nothing else: `fedthe predict` answers with it, and so does `fedthe.load_bundle` in Python.
    """
    from ..deploy import export as exporting

    if (client is not None) + every + shared != 1:
        raise InputError("say whose bundle it is: --client NUMBER, --all, or --global for new clients.")
    if onnxruntime is not None and format != "web":
        raise InputError("--onnxruntime is for --format web alone.")
    if format != "bundle":
        if client is None or sign is not None:
            what = "an ONNX file" if format == "onnx" else "a page"
            raise InputError(f"{what} is of one client, --client NUMBER, and has no signature.")
        if format == "onnx":
            return _export_onnx(run, out, method, client, seed)
        return _export_page(run, out, method, client, seed, onnxruntime)
    with bars():
        if every:
            places = exporting.export_all(exporting.open_run(run, method, seed), out, sign)
        else:
            places = [exporting.export(run, out, method=method, client=client, seed=seed, sign=sign)]
    if as_json:
        return print(json.dumps([str(place) for place in places]))
    many = f"{len(places)} bundles are in {out}" if every else f"the bundle is {out}"
    print(f"{many}; {places[0] / 'card.md'} describes {'the first' if every else 'it'}.")
    if shared:
        return print(f"A new client makes it its own: fedthe personalize {out} --data IMAGES -o mine")
    return print(f"Try it: fedthe predict {places[0]} IMAGE...")


def _export_onnx(run: Path, out: Path, method: str | None, client: int, seed: int | None) -> None:
    from ..deploy.export import export_graph

    place = export_graph(run, out if out.suffix == ".onnx" else out / "model.onnx", method, client, seed)
    print(
        f"the model is {place}; fedthe.runtime.load({str(place)!r}).predict(image) needs NumPy and onnxruntime alone."
    )


def _export_page(
    run: Path, out: Path, method: str | None, client: int, seed: int | None, onnxruntime: Path | None
) -> None:
    from ..deploy.web import export_page

    place = export_page(run, out, method, client, seed, onnxruntime)
    print(f"the page is {place}; open it in a browser, or put its folder on any web server.")


def predict(
    bundle: Annotated[Path, typer.Argument(help="The folder of a bundle.")],
    samples: Annotated[
        list[Path],
        typer.Argument(help="Images in the order of the stream, folders of them (by name), or one npz file."),
    ],
    state: Annotated[Path | None, typer.Option(help="A file to continue the stream from, and to keep it in.")] = None,
    verify: Verify = None,
    monitor: Annotated[bool, typer.Option(help="Watch the stream for drift and collapse.")] = True,
    as_json: Json = False,
) -> None:
    """Answer samples with the model of a bundle, in order.

    Answers depend on the samples before. With --state FILE, the stream goes on in the next call.
    """
    from ..deploy.online import load_bundle
    from ..deploy.samples import read_samples
    from ..foreign import read_file, show_path
    from ..store import write_bytes

    predictor = load_bundle(bundle, verify=verify, monitor=monitor)
    if state is not None and state.exists():
        predictor.restore(read_file(state, 2**30))
    names, rows = read_samples(samples, predictor.bundle.input)
    answers = predictor.predict_batch(rows)
    if state is not None:
        write_bytes(state, predictor.state())
    if as_json:
        return print(json.dumps([{"sample": name} | _as_dict(each) for name, each in zip(names, answers, strict=True)]))
    _print_answers(predictor, [show_path(name) for name in names], answers)
    return None


def _as_dict(answer: Prediction) -> dict[str, Any]:
    told = {name: getattr(answer, name) for name in ("label", "index", "probability", "weight", "status", "why")}
    return told | {"probabilities": answer.probabilities.tolist()}


def _print_answers(predictor: Online, names: Sequence[str], answers: Sequence[Prediction]) -> None:
    two = answers[0].weight is not None
    head = ["sample", "answer", "probability", *(["weight of the global head"] if two else []), "stream"]
    rows = [
        [
            name,
            each.label,
            f"{each.probability:.2f}",
            *([] if each.weight is None else [f"{each.weight:.2f}"]),
            each.status,
        ]
        for name, each in zip(names, answers, strict=True)
    ]
    print_grid(head, rows, names=2)
    print_rich(f"{count(predictor.position, 'sample')} of this stream so far. The last answer: {answers[-1].why}.")


def personalize(
    bundle: Annotated[Path, typer.Argument(help="A bundle that `fedthe export --global` wrote.")],
    data: Annotated[
        Path,
        typer.Option(help="Your rows: a folder per class, or pictures alone if they have no labels; or an npz file."),
    ],
    out: Out = Path("bundle"),
    epochs: Annotated[int | None, typer.Option(help="Of training your part.", show_default="20")] = None,
    verify: Verify = None,
    sign: Sign = None,
) -> None:
    """Make the bundle of a client that took no part in training, in seconds.

    With labels, it trains what is the client's own. Without, the global model answers, with statistics of the
    client's rows and an estimate of its mix of classes.
    """
    from ..deploy.join import EPOCHS, personalize

    with bars():
        place = personalize(bundle, data, out, epochs=EPOCHS if epochs is None else epochs, verify=verify, sign=sign)
    print(f"the bundle is {place}; {place / 'card.md'} describes it.")
    print(f"Try it: fedthe predict {place} IMAGE...")
