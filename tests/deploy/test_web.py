"""A client's page in a real browser, opened from its folder, with no server: it answers as Python does."""

import io
import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from PIL import Image

from conftest import REAL_HOME
from deployed import make_bundle
from fedthe.data.folder import fit_picture
from fedthe.deploy.online import Online
from helpers import fails

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
from fedthe.deploy.web import package
from fedthe.deploy.web.export import write_folder


@pytest.fixture(scope="session")
def onnxruntime_web():
    """The package, unpacked: npm brings it once."""
    cache = REAL_HOME / "onnxruntime-web" / package.VERSION
    if not cache.exists():
        if shutil.which("npm") is None and not os.environ.get("CI"):
            pytest.skip("there is no npm to bring onnxruntime-web")
        package.fetch(cache)
    return cache


@pytest.fixture(scope="session")
def folder_of(onnxruntime_web, tmp_path_factory):
    """A function from a method to the folder of its page."""
    made = {}

    def write(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("web") / name
            write_folder(make_bundle(name), made[name], onnxruntime_web)
        return made[name]

    return write


def draw_pictures(n, seed=0):
    """PNG files, of the model's size and of others."""
    draws = np.random.default_rng(seed)
    shape = make_bundle("fedthe").input.shape
    sizes = [shape[:2], (2 * shape[0], 2 * shape[1]), (37, 53), (20, 61)]
    files = []
    for i in range(n):
        file = io.BytesIO()
        Image.fromarray(draws.integers(0, 256, (*sizes[i % 4], 3)).astype(np.uint8)).save(file, "PNG")
        files.append(file.getvalue())
    return files


@contextmanager
def open_page(browser, folder):
    """The page, from its folder; whatever it asks the network for fails the test."""
    context = browser.new_context(offline=True)
    page = context.new_page()
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.goto((folder / "index.html").as_uri())
    page.locator("#about", has_text="client").wait_for()
    yield page
    context.close()
    assert not [url for url in asked if not url.startswith(("file:", "blob:", "data:"))]
    assert errors == []


def drop(page, files):
    page.set_input_files("#files", [{"name": "i.png", "mimeType": "image/png", "buffer": file} for file in files])


def wait_for(page, count):
    page.locator("#length", has_text=f"{count} sample").wait_for(timeout=60_000)
    return page.evaluate("streamOf(bundle.name).answers.map((each) => [each.label, each.probability, each.weight])")


@pytest.mark.parametrize("name", ["fedavg", "fedthe", "fedthe_regime"])
def test_the_page_answers_as_python_does(browser, folder_of, name):
    pictures = draw_pictures(8)
    expected = Online(make_bundle(name), monitor=False)
    with open_page(browser, folder_of(name)) as page:
        drop(page, pictures[:5])
        wait_for(page, 5)
        page.reload()  # the stream goes on
        drop(page, pictures[5:])
        given = wait_for(page, 8)
    for picture, (label, probability, weight) in zip(pictures, given, strict=True):
        answer = expected.predict(picture)
        assert label == answer.label
        assert probability == pytest.approx(answer.probability, abs=1e-5)
        assert weight == (None if answer.weight is None else pytest.approx(answer.weight, abs=1e-5))


def test_a_stream_is_reset_and_what_is_no_image_leaves_no_trace(browser, folder_of):
    pictures = draw_pictures(3)
    with open_page(browser, folder_of("fedthe_regime")) as page:
        drop(page, pictures[:1])
        first = wait_for(page, 1)
        drop(page, [b"no image", pictures[1]])
        wait_for(page, 2)
        assert "not an image" in page.locator("#trouble").inner_text()
        page.click("#reset")
        page.locator("#meaning", has_text="No samples yet").wait_for()
        drop(page, pictures[:1])
        assert wait_for(page, 1) == first


SIZES = [(32, 32, 32), (57, 91, 24), (91, 57, 24), (5, 7, 24), (120, 80, 32), (1, 40, 8)]  # height, width, new side


def test_pictures_are_fitted_as_pillow_does(browser, folder_of):
    draws = np.random.default_rng(0)
    with open_page(browser, folder_of("fedavg")) as page:
        for square, channels, (height, width, side) in product(("crop", "pad", "stretch"), (1, 3), SIZES):
            picture = draws.integers(0, 256, (height, width, 4)).astype(np.uint8)
            to = {"height": side, "width": side, "channels": channels, "square": square}
            made = page.evaluate(
                "([data, across, down, to]) => Array.from(fit(takeChannels(data, to.channels), across, down, to))",
                [picture.ravel().tolist(), width, height, to],
            )
            expected = fit_picture("it", Image.fromarray(picture[..., :3]), (side, side, channels), square)
            # one apart where Pillow takes the two directions in another order
            assert np.abs(np.reshape(made, expected.shape) - expected.astype(int)).max() <= (height > 1.4 * width)


READ = """async ([bytes, square]) => {
    const blob = new Blob([new Uint8Array(bytes)], { type: "image/png" });
    return Array.from(await readPicture(blob, { shape: [8, 8, 3], square }));
}"""


def test_transparent_pixels_are_on_white_and_exif_turns(browser, folder_of):
    with open_page(browser, folder_of("fedavg")) as page:
        clear = io.BytesIO()
        Image.new("RGBA", (9, 9), (255, 0, 0, 0)).save(clear, "PNG")
        turned, exif = io.BytesIO(), Image.Exif()
        exif[0x0112] = 6  # a quarter turn clockwise
        half = Image.new("RGB", (64, 64))
        half.paste((255, 255, 255), (0, 0, 64, 32))
        half.save(turned, "PNG", exif=exif)
        for file in (clear, turned):
            made = page.evaluate(READ, [list(file.getvalue()), None])
            expected = fit_picture("it", Image.open(file), (8, 8, 3), None)
            assert np.abs(np.reshape(made, (8, 8, 3)) - expected.astype(int)).max() <= 1


def test_a_page_is_whole_and_replaces_only_a_page(onnxruntime_web, folder_of, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    fails(lambda: write_folder(make_bundle("fedavg"), tmp_path / "mine", onnxruntime_web), "is no exported page")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    page = write_folder(make_bundle("fedavg"), tmp_path / "page", onnxruntime_web)
    page.write_text("older")
    assert write_folder(make_bundle("fedavg"), tmp_path / "page", onnxruntime_web) == page
    assert "Content-Security-Policy" in page.read_text()


def test_a_client_that_takes_numbers_has_no_page(onnxruntime_web, tmp_path):
    bundle = make_bundle("fedavg")
    takes = replace(bundle.input, dtype="float32", shape=(4,))
    fails(lambda: write_folder(replace(bundle, input=takes), tmp_path / "page", onnxruntime_web), "takes pictures")
    assert not (tmp_path / "page").exists()


def test_another_onnxruntime_is_refused(onnxruntime_web, tmp_path, monkeypatch):
    fails(lambda: package.read_onnxruntime(tmp_path), "has no dist/ort.wasm")
    shutil.copytree(onnxruntime_web, tmp_path / "ort")
    script = tmp_path / "ort" / "dist" / "ort.wasm.bundle.min.mjs"
    script.write_bytes(script.read_bytes() + b"fetch('//elsewhere')")
    fails(lambda: write_folder(make_bundle("fedavg"), tmp_path / "page", tmp_path / "ort"), "is not that of")
    assert not (tmp_path / "page").exists()
    monkeypatch.setenv("FEDTHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", "")
    fails(package.read_onnxruntime, "npm is missing")
