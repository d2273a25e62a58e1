"""glyphs: ten characters in many typefaces, rendered from the fonts that matplotlib ships. Nothing is downloaded.

The natural shift has the same characters, drawn in the same way, in typefaces that the pool lacks. Image i depends only
on the seed and on i, and everything around the rasterizer is rational arithmetic (no sine, no exponential), so the same
Pillow and the same fonts give the same bytes on every machine.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import PIL
from PIL import Image, ImageDraw, ImageFont, features

from .. import rng
from ..errors import InputError
from ..foreign import check_room
from ..progress.events import track
from ..store import cached, content_hash
from .pool import Dataset, Pool

VERSION = 1  # raise it when the code below draws another image from the same settings
# No character is the mirror image of another (as b is of d), because training flips images. Some resemble each other
# (h, k, m, r, x), and some differ in shape between typefaces (x, y, &).
CLASSES = ("e", "h", "k", "m", "r", "t", "x", "y", "4", "&")

POOL_TYPEFACES = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
)
SHIFT_TYPEFACES = (
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmti10", "cmss10", "cmtt10"),
)

# The difficulty, tuned so that the CNN, trained centrally, has an accuracy of about 90 %, and 10 to 20 points less in
# unseen typefaces (benchmarks/glyphs.py).
TURN = 0.25  # tangent of half the largest rotation, which is 28 degrees
SLANT = 0.2
REACH = (0.45, 0.8)  # longest side of the character, as a share of the image's side
WANDER = 0.12  # offset from the middle, as a share of the image's side
STROKES = (0, 0, 1, 2, 4)  # added around the outline, in 64ths of the character
CONTRAST = (0.12, 0.6)  # between character and background, in luminance
TINT = 0.25  # how far a colour departs from grey
TEXTURE = (0.0, 0.8)  # how far the background varies, as a share of the contrast
BLUR = 1.0  # 1 is the mean of three pixels
NOISE = (0.0, 0.2)  # its standard deviation

CHUNK = 500  # images drawn at once
_SIDE = 64  # of a rasterized character
_CANVAS = 96


def load(path: Path | None = None, size: int = 32, seed: int = 0, n: int = 10_000, n_shift: int = 2_000) -> Dataset:
    """The pool, and the natural shift "unseen-typefaces". `path` is ignored: there is no file to read."""
    if size < 8 or n < 1 or n_shift < 1:
        raise InputError(
            f"glyphs needs 8 pixels or more and at least one image of each kind, "
            f"but size is {size}, n {n} and n_shift {n_shift}."
        )
    check_room(f"{n:,} glyphs of {size} x {size}", (n + n_shift) * size * size * 3, "set a smaller size")
    shift = _cached_pool("unseen-typefaces", SHIFT_TYPEFACES, n_shift, size, seed)
    return Dataset(_cached_pool("glyphs", POOL_TYPEFACES, n, size, seed), {shift.name: shift})


def _cached_pool(name: str, typefaces: tuple[str, ...], n: int, size: int, seed: int) -> Pool:
    fonts = _font_files(typefaces)
    settings = [CLASSES, TURN, SLANT, REACH, WANDER, STROKES, CONTRAST, TINT, TEXTURE, BLUR, NOISE]
    drawn_by = [VERSION, PIL.__version__, str(features.version("freetype2"))]
    shapes = [content_hash(np.frombuffer(font.read_bytes(), np.uint8)) for font in fonts]

    def make() -> dict[str, np.ndarray]:
        labels = _labels(rng.key(seed, "glyphs", name, "label"), n)
        chunks = track(f"drawing {name}", [np.arange(i, min(i + CHUNK, n)) for i in range(0, n, CHUNK)])
        images = [_render(items, labels[items], fonts, size, seed, name) for items in chunks]
        return {"images": np.concatenate(images), "labels": labels}

    arrays = cached("glyphs", content_hash(name, n, size, seed, settings, drawn_by, shapes), make)
    return Pool(name, arrays["images"], arrays["labels"], CLASSES)


def _font_files(typefaces: tuple[str, ...]) -> tuple[Path, ...]:
    spec = importlib.util.find_spec("matplotlib")  # finds the package without running it
    if spec is None or spec.origin is None:
        raise InputError("glyphs are drawn with matplotlib's fonts; install matplotlib.")
    files = tuple(Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / f"{name}.ttf" for name in typefaces)
    for file in files:
        if not file.is_file():
            raise InputError(
                f"glyphs are drawn with matplotlib's fonts, but {file} is missing; install matplotlib again."
            )
    return files


def _labels(key: rng.Key, n: int) -> np.ndarray:
    """Each run of ten images has every class once, in its own order, so classes are balanced for any n."""
    decks = np.arange(-(-n // len(CLASSES)))
    return rng.words(key, decks, len(CLASSES)).argsort(1, kind="stable").reshape(-1)[:n]


@cache
def _character(font: Path, character: str, stroke: int) -> Image.Image:
    """The character in white on black, in the middle of 96 x 96 pixels; its longest side is 64 before the stroke."""

    def ink(points: float, stroke: int) -> tuple[Image.Image, tuple[int, int, int, int]]:
        # the basic layout, because the other one needs a library that may be missing
        sized = ImageFont.truetype(font, points, layout_engine=ImageFont.Layout.BASIC)
        image = Image.new("L", (4 * _CANVAS, 4 * _CANVAS))
        ImageDraw.Draw(image).text((_CANVAS, _CANVAS), character, fill=255, font=sized, stroke_width=stroke)
        return image, image.getbbox() or (0, 0, 1, 1)

    _, (left, top, right, bottom) = ink(100, 0)  # the box of the pixels drawn: the font's getbbox adds margins
    points = 100 * _SIDE / max(right - left, bottom - top)
    _, (left, top, right, bottom) = ink(points, 0)
    left, top = (left + right - _CANVAS) // 2, (top + bottom - _CANVAS) // 2
    return ink(points, stroke)[0].crop((left, top, left + _CANVAS, top + _CANVAS))


def _render(
    items: np.ndarray, labels: np.ndarray, fonts: tuple[Path, ...], size: int, seed: int, name: str
) -> np.ndarray:
    """uint8 [items, size, size, 3]"""

    def draw(purpose: str, count: int = 1) -> np.ndarray:
        """Uniform in (0, 1): [items, count], or [items] for one."""
        drawn = rng.uniform(rng.key(seed, "glyphs", name, purpose), items, count)
        return drawn[:, 0] if count == 1 else drawn

    def between(purpose: str, low: float, high: float) -> np.ndarray:
        return low + (high - low) * draw(purpose)

    def pick(purpose: str, count: int) -> np.ndarray:
        return rng.integers(rng.key(seed, "glyphs", name, purpose), items, 1, 0, count)[:, 0]

    # The character: the coverage of each pixel, in [0, 1]
    font, stroke = pick("typeface", len(fonts)), pick("stroke", len(STROKES))
    turn, slant = between("turn", -TURN, TURN), between("slant", -SLANT, SLANT)
    reach, wander = between("reach", *REACH), WANDER * (2 * draw("wander", 2) - 1)
    cos, sin = (1 - turn**2) / (1 + turn**2), 2 * turn / (1 + turn**2)
    fine = 2 * size  # rasterize at twice the resolution
    zoom = _SIDE / (reach * fine)
    cover = np.empty((len(items), fine, fine), np.uint8)
    for i in range(len(items)):
        # From a pixel (x, y) of the result back to the character: shift, rotate, slant, zoom
        a, b = zoom[i] * (cos[i] + slant[i] * sin[i]), zoom[i] * (slant[i] * cos[i] - sin[i])
        d, e = zoom[i] * sin[i], zoom[i] * cos[i]
        x, y = fine * (0.5 + wander[i])
        inverse = (a, b, _CANVAS / 2 - a * x - b * y, d, e, _CANVAS / 2 - d * x - e * y)
        image = _character(fonts[font[i]], CLASSES[labels[i]], STROKES[stroke[i]])
        image = image.transform((fine, fine), Image.Transform.AFFINE, inverse, Image.Resampling.BILINEAR)
        cover[i] = np.asarray(image)
    alpha = cover.reshape(-1, size, 2, size, 2).mean((2, 4)) / 255

    # The background: one colour mixed with a second, in stripes (the widest are gradients) and clouds
    y, x = np.meshgrid(*[(np.arange(size) + 0.5) / size] * 2, indexing="ij")
    ramp = _each(8 * draw("frequency") ** 2) * (_each(between("across", -1, 1)) * x + _each(between("down", -1, 1)) * y)
    ramp += _each(draw("phase"))
    stripes = np.abs(2 * (ramp - np.floor(ramp)) - 1)
    clouds = _clouds(draw("clouds", 25).reshape(-1, 5, 5), size)
    share = _each(np.clip(2 * draw("share") - 0.5, 0, 1))
    texture = stripes * share + clouds * (1 - share)

    # The colours: two luminances that differ by the contrast, in either order, and tints that do not change them
    contrast = between("contrast", *CONTRAST)
    dark = (1 - contrast) * draw("dark")
    above = draw("above") < 0.5
    ground = np.where(above, dark, dark + contrast)[:, None] + _tint(draw("ground", 3))
    ink = np.where(above, dark + contrast, dark)[:, None] + _tint(draw("ink", 3))
    drift = (between("texture", *TEXTURE) * contrast)[:, None] * (2 * draw("drift", 3) - 1)
    back = ground[:, None, None] + drift[:, None, None] * (2 * texture[..., None] - 1)
    image = back + (ink[:, None, None] - back) * alpha[..., None]

    # The camera: blur, then nearly normal grain: the sum of the four bytes of a word, one word per pixel
    blur = (BLUR / 3 * draw("blur"))[:, None, None, None]
    for axis in (1, 2):
        padded = np.pad(image, [(1, 1) if i == axis else (0, 0) for i in range(4)], mode="edge")
        before, after = (padded.take(range(i, i + size), axis) for i in (0, 2))
        image = image + blur * (before + after - 2 * image)
    words = rng.words(rng.key(seed, "glyphs", name, "grain"), items, size * size).reshape(-1, size, size, 1)
    grain = ((words & 255) + (words >> 8 & 255) + (words >> 16 & 255) + (words >> 24) - 510) / 147.8
    image = image + between("noise", *NOISE)[:, None, None, None] * grain
    return np.asarray(np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)


def _each(values: np.ndarray) -> np.ndarray:
    return values[:, None, None]


def _clouds(grid: np.ndarray, size: int) -> np.ndarray:
    """Values on a coarse grid, interpolated smoothly: [n, k, k] -> [n, size, size]."""
    place = (np.arange(size) + 0.5) / size * (grid.shape[1] - 1)
    cell = place.astype(np.int64)
    step = place - cell
    step = step * step * (3 - 2 * step)
    rows = grid[:, cell] + (grid[:, cell + 1] - grid[:, cell]) * step[:, None]
    return np.asarray(rows[:, :, cell] + (rows[:, :, cell + 1] - rows[:, :, cell]) * step)


def _tint(drawn: np.ndarray) -> np.ndarray:
    """A colour without luminance: [n, 3]."""
    colour = TINT * (2 * drawn - 1)
    return np.asarray(colour - (0.299 * colour[:, :1] + 0.587 * colour[:, 1:2] + 0.114 * colour[:, 2:]))
