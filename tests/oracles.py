"""Slow, literal versions of the algorithms, which judge the fast ones. Randomness is data: same draws, other code."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import cv2
import numpy as np
from PIL import Image
from scipy.ndimage import map_coordinates, zoom
from scipy.stats import poisson
from skimage.color import hsv2rgb, rgb2hsv
from skimage.filters import gaussian

from fedthe import rng

# Corruptions: one image, uint8 [h, w, c], at a time, with the libraries that made CIFAR-10-C.
# ImageMagick's motion blur, which this project does not need otherwise, is written out.


def corrupt_one(
    image: np.ndarray, name: str, severity: int, item: int, seed: int, frost: Sequence[np.ndarray]
) -> np.ndarray:
    def draw(kind: str, what: str, *shape: int) -> np.ndarray:
        key, one = rng.key(seed, "corrupt", name, what), np.array([item], dtype=np.int64)
        return {"words": rng.words, "uniform": rng.uniform, "normal": rng.normal}[kind](
            key, one, int(np.prod(shape))
        ).reshape(shape)

    if name == "frost":
        return cut(add_frost(image, severity, draw, frost))
    return cut(CORRUPT[name](image, severity, draw))


def cut(levels: np.ndarray) -> np.ndarray:
    """To bytes without rounding, but for the dust of floating point."""
    return np.uint8(np.clip(np.asarray(levels, dtype=np.float64), 0, 255) + 2e-4)


def add_gaussian_noise(image, severity, draw):
    scale = [0.04, 0.06, 0.08, 0.09, 0.10][severity - 1]
    return np.clip(image / 255.0 + scale * draw("normal", "noise", *image.shape), 0, 1) * 255


def add_shot_noise(image, severity, draw):
    photons = [500, 250, 100, 75, 50][severity - 1]
    count = poisson.ppf(draw("uniform", "noise", *image.shape), image / 255.0 * photons)
    return np.clip(count / photons, 0, 1) * 255


def add_impulse_noise(image, severity, draw):
    amount = [0.01, 0.02, 0.03, 0.05, 0.07][severity - 1]
    u = draw("uniform", "noise", *image.shape)
    out = image / 255.0
    hit, salt = u < amount, u < amount / 2
    out[hit & salt] = 1
    out[hit & ~salt] = 0
    return out * 255


def blur_defocus(image, severity, draw):
    radius, rim = [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)][severity - 1]
    y, x = np.mgrid[-8:9, -8:9]
    disk = np.float32(x**2 + y**2 <= radius**2)
    kernel = cv2.GaussianBlur(disk / disk.sum(), (3, 3), sigmaX=rim)
    channels = [cv2.filter2D(image[..., k] / 255.0, -1, kernel) for k in range(image.shape[2])]
    return np.clip(np.stack(channels, -1), 0, 1) * 255


def blur_glass(image, severity, draw):
    sigma, passes = [(0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)][severity - 1]
    height, width, _ = image.shape
    words = draw("words", "shuffle", height, width)
    x = cut(gaussian(image / 255.0, sigma=sigma, channel_axis=-1) * 255)
    for i in range(passes):
        for h in range(height - 1, 1, -1):
            for w in range(width - 1, 1, -1):
                word = int(words[h, w])
                h2, w2 = h - (word >> (31 - 2 * i) & 1), w - (word >> (30 - 2 * i) & 1)
                x[h, w], x[h2, w2] = x[h2, w2], x[h, w]  # views: no swap comes of it
    return np.clip(gaussian(x / 255.0, sigma=sigma, channel_axis=-1), 0, 1) * 255


def blur_motion(image, severity, draw):
    radius, sigma = [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)][severity - 1]
    return trail(image, radius, sigma, -45 + pick_turn(draw))


def pick_turn(draw) -> float:
    """Degrees in (0, 90), in steps of 90 / 256."""
    return ((draw("words", "angle", 1)[0] >> 24) + 0.5) * 90 / 256


def trail(image: np.ndarray, radius: int, sigma: float, degrees: float) -> np.ndarray:
    """MotionBlurImage of ImageMagick: a one-sided kernel, whole-pixel offsets, border pixels held; rounds."""
    height, width, _ = image.shape
    taps = 2 * radius + 1
    kernel = [np.exp(-(i * i) / (2 * sigma * sigma)) for i in range(taps)]
    along, down = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    out = np.zeros(image.shape)
    for i in range(taps):
        dx, dy = int(np.ceil(i * along - 0.5)), int(np.ceil(i * down - 0.5))
        rows = np.clip(np.arange(height) + dy, 0, height - 1)
        columns = np.clip(np.arange(width) + dx, 0, width - 1)
        out += kernel[i] / sum(kernel) * image[rows][:, columns]
    return np.floor(out + 0.5).astype(np.uint8)


def magnify(image: np.ndarray, factor: float) -> np.ndarray:
    """The middle of a square [n, n, c] over the whole of it."""
    n = len(image)
    inner = int(np.ceil(n / factor))
    start = (n - inner) // 2
    big = zoom(image[start : start + inner, start : start + inner], (factor, factor, 1), order=1)
    extra = (len(big) - n) // 2
    return big[extra : extra + n, extra : extra + n]


def blur_zoom(image, severity, draw):
    factors = np.arange(1, [1.06, 1.11, 1.16, 1.21, 1.26][severity - 1], 0.01)
    x = np.float32(image / 255.0)
    total = x.copy()
    for factor in factors:
        total += magnify(x, factor)
    return np.clip(total / (len(factors) + 1), 0, 1) * 255


def add_snow(image, severity, draw):
    mean, spread, factor, floor, radius, sigma, keep = [
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ][severity - 1]
    x = np.float32(image) / 255
    layer = magnify(mean + spread * draw("normal", "flakes", *image.shape[:2])[..., None], factor)
    layer[layer < floor] = 0
    layer = trail(cut(np.clip(layer, 0, 1) * 255), radius, sigma, -135 + pick_turn(draw)) / 255
    grey = x if x.shape[2] == 1 else cv2.cvtColor(x, cv2.COLOR_RGB2GRAY)[..., None]
    x = keep * x + (1 - keep) * np.maximum(x, grey * 1.5 + 0.5)
    return np.clip(x + layer + np.rot90(layer, k=2), 0, 1) * 255


def add_frost(image, severity, draw, textures):
    keep, add = [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)][severity - 1]
    h, w, c = image.shape
    which, row, column = (int(word) for word in draw("words", "crop", 3))
    ice = textures[which * len(textures) >> 32]
    y, x = row * (ice.shape[0] - h) >> 32, column * (ice.shape[1] - w) >> 32
    ice = ice[y : y + h, x : x + w].astype(float)
    if c == 1:
        ice = (ice @ [0.299, 0.587, 0.114])[..., None]
    return np.clip(keep * image + add * ice, 0, 255)


def add_fog(image, severity, draw):
    thickness, decay = [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)][severity - 1]
    height, width, _ = image.shape
    side = 1
    while side < max(height, width):
        side *= 2
    x = image / 255.0
    brightest = x.max()
    x = x + thickness * draw_plasma(2 * draw("uniform", "plasma", side, side) - 1, decay)[:height, :width, None]
    return np.clip(x * brightest / (brightest + thickness), 0, 1) * 255


def draw_plasma(bumps: np.ndarray, decay: float) -> np.ndarray:
    """Diamond-square on a torus, point by point: squares of each size first, then diamonds."""
    side = len(bumps)
    plasma = np.zeros((side, side)).tolist()
    bump = bumps.tolist()
    step, wobble = side, 100.0
    while step >= 2:
        half = step // 2
        for y in range(half, side, step):
            for x in range(half, side, step):
                y0, y1, x0, x1 = y - half, (y + half) % side, x - half, (x + half) % side
                mean = (plasma[y0][x0] + plasma[y0][x1] + plasma[y1][x0] + plasma[y1][x1]) / 4
                plasma[y][x] = mean + wobble * wobble * bump[y][x]
        for y in range(0, side, half):
            for x in range((y // half + 1) % 2 * half, side, step):
                y0, y1, x0, x1 = y - half, (y + half) % side, x - half, (x + half) % side
                mean = (plasma[y0][x] + plasma[y1][x] + plasma[y][x0] + plasma[y][x1]) / 4
                plasma[y][x] = mean + wobble * wobble * bump[y][x]
        step, wobble = half, wobble / decay
    out = np.array(plasma)
    out -= out.min()
    return out / out.max()


def brighten(image, severity, draw):
    more = [0.05, 0.1, 0.15, 0.2, 0.3][severity - 1]
    x = image / 255.0
    if x.shape[2] == 1:
        return np.clip(x + more, 0, 1) * 255
    x = rgb2hsv(x)
    x[..., 2] = np.clip(x[..., 2] + more, 0, 1)
    return np.clip(hsv2rgb(x), 0, 1) * 255


def lower_contrast(image, severity, draw):
    keep = [0.75, 0.5, 0.4, 0.3, 0.15][severity - 1]
    x = image / 255.0
    mean = x.mean((0, 1), keepdims=True)
    return np.clip((x - mean) * keep + mean, 0, 1) * 255


def bend(image, severity, draw):
    size = min(image.shape[:2])
    push, sigma, jitter = [
        (size * 0, size * 0, size * 0.08),
        (size * 0.05, size * 0.2, size * 0.07),
        (size * 0.08, size * 0.06, size * 0.06),
        (size * 0.1, size * 0.04, size * 0.05),
        (size * 0.1, size * 0.03, size * 0.03),
    ][severity - 1]
    h, w, c = image.shape
    middle, arm = np.float32((h // 2, w // 2)), size // 3
    points = np.float32([middle + arm, [middle[0] + arm, middle[1] - arm], middle - arm])
    moved = points + np.float32(jitter * (2 * draw("uniform", "points", 3, 2) - 1))
    x = warp(np.float32(image) / 255, cv2.getAffineTransform(points, moved))
    noise = 2 * draw("uniform", "field", 2, h, w) - 1
    dx, dy = (np.float32(gaussian(layer, sigma, mode="reflect", truncate=3) * push) for layer in noise)
    row, column, channel = np.mgrid[:h, :w, :c]
    places = [row + dy[..., None], column + dx[..., None], channel]
    return np.clip(map_coordinates(x, places, order=1, mode="reflect"), 0, 1) * 255


def warp(image: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """cv2.warpAffine as it was until OpenCV 4: places in 1/32 pixel, by way of 1/1024; mirrored at the border."""
    h, w, c = image.shape
    back = cv2.invertAffineTransform(matrix)
    places = []
    for a, b, start in back:
        along = np.rint(a * np.arange(w) * 1024)[None, :]
        from_row = np.rint((b * np.arange(h) + start) * 1024)[:, None]
        places.append(np.floor((along + from_row + 16) / 32) / 32)
    x, y = places
    return np.stack([map_coordinates(image[..., k], [y, x], order=1, mode="mirror") for k in range(c)], -1)


def pixelate(image, severity, draw):
    share = [0.95, 0.9, 0.85, 0.75, 0.65][severity - 1]
    h, w, _ = image.shape
    picture = Image.fromarray(image.squeeze())
    small = picture.resize((int(w * share), int(h * share)), Image.Resampling.BOX)
    return np.asarray(small.resize((w, h), Image.Resampling.BOX)).reshape(image.shape)


def compress(image, severity, draw):
    file = BytesIO()
    Image.fromarray(image.squeeze()).save(file, "JPEG", quality=[80, 65, 58, 50, 40][severity - 1])
    return np.asarray(Image.open(file)).reshape(image.shape)


CORRUPT = {
    "gaussian_noise": add_gaussian_noise,
    "shot_noise": add_shot_noise,
    "impulse_noise": add_impulse_noise,
    "defocus_blur": blur_defocus,
    "glass_blur": blur_glass,
    "motion_blur": blur_motion,
    "zoom_blur": blur_zoom,
    "snow": add_snow,
    "fog": add_fog,
    "brightness": brighten,
    "contrast": lower_contrast,
    "elastic_transform": bend,
    "pixelate": pixelate,
    "jpeg_compression": compress,
}
