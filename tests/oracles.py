"""Slow, literal versions of the algorithms, which judge the fast ones. Randomness is data: same draws, other code."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import cv2
import mpmath
import numpy as np
import torch
from PIL import Image, ImageOps
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


# FedTHE: Algorithm 2 of the paper, one sample at a time, by autograd and torch.optim.Adam in float64


def head_ensemble_stream(
    features,
    global_logits,
    local_logits,
    global_descriptor,
    local_descriptor,
    alpha=0.1,
    beta=0.1,
    steps=20,
    lr=0.1,
    weighting="slw",
    history=None,
):
    """The answers [n, classes], the weights e [n] and the last history [d] of a stream."""
    tensors = (features, global_logits, local_logits, global_descriptor, local_descriptor)
    features, global_logits, local_logits, h_g, h_l = (t.double() for t in tensors)
    answers, weights = [], []
    for h, y_g, y_l in zip(features, global_logits, local_logits, strict=True):
        if history is None:
            history = h
        h_prime = beta * h + (1 - beta) * history
        p_g, p_l = torch.softmax(y_g, 0), torch.softmax(y_l, 0)
        lam = {"slw": (p_g @ p_l) / (p_g.norm() * p_l.norm()), "fa": 0.0, "em": 1.0, "half": 0.5}[weighting]
        scalars = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([scalars], lr=lr, betas=(0.9, 0.999), eps=1e-8)
        for _ in range(steps):
            e = torch.softmax(scalars, 0)[0]
            log_p = torch.log_softmax(e * y_g + (1 - e) * y_l, 0)  # not log(p), which is -inf where p is 0
            entropy = -(log_p.exp() * log_p).sum()
            alignment = e * (h_prime - h_g).norm() + (1 - e) * (h_prime - h_l).norm()
            optimizer.zero_grad()
            (lam * entropy + (1 - lam) * alignment).backward()
            optimizer.step()
        e = torch.softmax(scalars.detach(), 0)[0]
        history = alpha * h + (1 - alpha) * history
        weights.append(e)
        answers.append(e * y_g + (1 - e) * y_l)
    return torch.stack(answers), torch.stack(weights), history


def head_ensemble_in_batches(
    features, global_logits, local_logits, h_g, h_l, rows, stop=1e-5, alpha=0.1, beta=0.1, steps=20, lr=0.1
):
    """FedTHE as its authors' code runs it, in float64: the weights e [n], and how many steps each batch took."""
    weights, taken, last = [], [], None
    for first in range(0, len(features), rows):
        h, y_g, y_l = (t[first : first + rows].double() for t in (features, global_logits, local_logits))
        histories = [h[0] if last is None else last]  # of a later batch, without its first sample
        for each in h[1:]:
            histories.append(alpha * each + (1 - alpha) * histories[-1])
        last = histories[-1]
        scalars = torch.ones(len(h), 2, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([scalars], lr=lr)
        for step in range(steps + 1):
            losses = []
            for i, history in enumerate(histories):
                h_prime = beta * h[i] + (1 - beta) * history
                e, rest = torch.softmax(scalars[i], 0)
                p_g, p_l = torch.softmax(y_g[i], 0), torch.softmax(y_l[i], 0)
                lam = torch.nn.functional.cosine_similarity(p_g, p_l, dim=0)
                log_p = torch.log_softmax(e * y_g[i] + rest * y_l[i], 0)
                alignment = e * (h_prime - h_g.double()).norm() + rest * (h_prime - h_l.double()).norm()
                losses.append(-lam * (log_p.exp() * log_p).sum() + (1 - lam) * alignment)
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            if step == steps or scalars.grad.norm() < stop:
                break
            optimizer.step()
        taken.append(step)
        weights.extend(torch.softmax(scalars.detach(), 1)[:, 0])
    return torch.stack(weights), taken


# The same in 60 digits, number by number: at large scales float64 loses what decides between the heads


def head_ensemble_exact(features, global_logits, local_logits, global_descriptor, local_descriptor) -> torch.Tensor:
    """The weights e [n] of a stream, by the default settings."""
    with mpmath.workdps(60):
        tensors = (features, global_logits, local_logits, global_descriptor[None], local_descriptor[None])
        rows = [[[mpmath.mpf(x) for x in row] for row in tensor.tolist()] for tensor in tensors]
        return torch.tensor(exact_weights(*rows[:3], rows[3][0], rows[4][0]), dtype=torch.float64)


def exact_weights(features, global_logits, local_logits, h_g, h_l) -> list[float]:
    alpha, beta, history, weights = mpmath.mpf(0.1), mpmath.mpf(0.1), features[0], []
    for h, y_g, y_l in zip(features, global_logits, local_logits, strict=True):
        h_prime = [beta * x + (1 - beta) * y for x, y in zip(h, history, strict=True)]
        p_g, p_l = exact_softmax(y_g), exact_softmax(y_l)
        lam = exact_dot(p_g, p_l) / mpmath.sqrt(exact_dot(p_g, p_g) * exact_dot(p_l, p_l))
        far = [[x - y for x, y in zip(h_prime, descriptor, strict=True)] for descriptor in (h_g, h_l)]
        gap = mpmath.sqrt(exact_dot(far[0], far[0])) - mpmath.sqrt(exact_dot(far[1], far[1]))
        weights.append(float(exact_search(y_g, y_l, lam, gap)))
        history = [alpha * x + (1 - alpha) * y for x, y in zip(h, history, strict=True)]
    return weights


def exact_search(y_g, y_l, lam, gap, steps=20, lr=0.1):
    """Adam on two scores, which stay opposite: s and -s."""
    beta1, beta2, s, m, v = mpmath.mpf(0.9), mpmath.mpf(0.999), mpmath.mpf(0), mpmath.mpf(0), mpmath.mpf(0)
    for t in range(1, steps + 1):
        e = 1 / (1 + mpmath.exp(-2 * s))
        z = [e * x + (1 - e) * y for x, y in zip(y_g, y_l, strict=True)]
        p, moves = exact_softmax(z), [x - y for x, y in zip(y_g, y_l, strict=True)]
        by_e = [q * (move - exact_dot(p, moves)) for q, move in zip(p, moves, strict=True)]  # of p
        of_entropy = -exact_dot(by_e, [x - max(z) for x in z])  # log p but for a constant, and by_e adds up to 0
        gradient = (lam * of_entropy + (1 - lam) * gap) * e * (1 - e)
        m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
        s -= mpmath.mpf(lr) * m / (1 - beta1**t) / (mpmath.sqrt(v / (1 - beta2**t)) + mpmath.mpf(1e-8))
    return 1 / (1 + mpmath.exp(-2 * s))


def exact_softmax(z):
    powers = [mpmath.exp(x - max(z)) for x in z]
    return [power / mpmath.fsum(powers) for power in powers]


def exact_dot(x, y):
    return mpmath.fsum(a * b for a, b in zip(x, y, strict=True))


# Test-time methods, one sample at a time. Networks come in as functions `logits(params, x)` of flat dicts of tensors.


def t3a_stream(features: np.ndarray, head: np.ndarray, m: int) -> list[np.ndarray]:
    """Iwasawa and Matsuo's Algorithm 1 with lists; features [n, d], head [classes, d]."""

    def doubt(h: np.ndarray) -> float:
        z = head @ h
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        return -sum(float(q * np.log(q)) for q in p if q > 0)

    supports = [[(doubt(row), row / np.linalg.norm(row))] for row in head]
    answers = []
    for h in features:
        c = int(np.argmax(head @ h))
        supports[c].append((doubt(h), h / max(np.linalg.norm(h), 1e-12)))
        supports[c] = sorted(supports[c], key=lambda support: support[0])[:m]  # a stable sort
        sums = [sum(h for _, h in held) for held in supports]
        answers.append(np.array([h @ total / max(np.linalg.norm(total), 1e-12) for total in sums]))
    return answers


def knn_probabilities(h, store, labels, classes: int, k: int, scale: float) -> np.ndarray:
    """h [d], store [rows, d]: only real rows."""
    near = sorted((float(np.sqrt(((h - other) ** 2).sum())), row) for row, other in enumerate(store))[:k]
    p = np.zeros(classes)
    for distance, row in near:
        p[labels[row]] += np.exp(-(distance - near[0][0]) / scale)  # a common factor: far neighbours still count
    return p / p.sum()


def knn_lambda(near: list[np.ndarray], model: list[np.ndarray], labels: Sequence[int], grid: float) -> float:
    best, chosen = -1, 0.0
    for step in range(round(1 / grid) + 1):
        lam = step / round(1 / grid)
        right = 0
        for p, q, y in zip(near, model, labels, strict=True):
            right += int(np.argmax(lam * p + (1 - lam) * q)) == y
        if right > best:  # not >=: of equally good ones the smallest
            best, chosen = right, lam
    return chosen


def marginal_entropy_of(logits: torch.Tensor) -> torch.Tensor:
    """logits [views, classes]"""
    mean = sum(one.softmax(0) for one in logits) / len(logits)
    return -(mean * mean.log()).sum()


def memo_answer(logits, params: dict, x, views, lr: float, tuned_names=None) -> tuple[torch.Tensor, dict]:
    """One SGD step for each row of views [steps, views, c, h, w], on all parameters or the named ones."""
    tuned = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    chosen = [leaf for name, leaf in tuned.items() if tuned_names is None or name in tuned_names]
    optimizer = torch.optim.SGD(chosen, lr)
    for seen in views:
        optimizer.zero_grad()
        marginal_entropy_of(logits(tuned, seen)).backward()
        optimizer.step()
    tuned = {name: leaf.detach() for name, leaf in tuned.items()}
    return logits(tuned, x), tuned


def ttt_stream(rotation_logits, logits, params: dict, x, lr: float, steps: int) -> tuple[torch.Tensor, dict]:
    """All parameters that rotation_logits depends on are trained on every sample in turn, and stay so."""
    params = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    optimizer = torch.optim.SGD(params.values(), lr)
    answers = []
    for one in x:
        for _ in range(steps):
            optimizer.zero_grad()
            turned, image = [], one
            for _ in range(4):
                turned.append(image)
                image = image.flip(-1).transpose(-1, -2)  # a quarter to the left
            total = sum(-rotation_logits(params, t[None])[0].log_softmax(0)[way] for way, t in enumerate(turned))
            (total / 4).backward()
            optimizer.step()
        with torch.no_grad():
            answers.append(logits(params, one[None]))
    return torch.cat(answers), {name: leaf.detach() for name, leaf in params.items()}


def tsa_weight(of_global: torch.Tensor, of_personal: torch.Tensor, steps: int, lr: float) -> float:
    """Both heads' logits [2, classes] on two views; two free scores, softmax, Adam on the negative similarity."""
    scores = torch.ones(2, dtype=of_global.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([scores], lr)
    for _ in range(steps):
        optimizer.zero_grad()
        weight = scores.softmax(0)
        p, q = (weight[0] * of_global + weight[1] * of_personal).softmax(1)
        (-(p @ q) / (p.norm() * q.norm())).backward()
        optimizer.step()
    return float(scores.detach().softmax(0)[0])


# Training of the personalized methods, on a model that can be written out: a body [d, pixels] and a head [classes, d],
# logits tanh(x body') head'. `batches` is a list of (x, y), in the order of training.


def tiny_logits(body, head, x):
    return torch.tanh(x.flatten(1).double() @ body.T) @ head.T


def mean_nll(logits, y):
    rows = [torch.log(torch.exp(row).sum()) - row[int(label)] for row, label in zip(logits, y, strict=True)]
    return sum(rows) / len(rows)


def descend(params, loss, batches, lr, weight_decay=0.0):
    """Plain SGD over a list of tensors; loss(params, x, y)."""
    params = [p.clone().requires_grad_() for p in params]
    for x, y in batches:
        gradients = torch.autograd.grad(loss(params, x, y), params)
        params = [
            (p - lr * (g + weight_decay * p)).detach().requires_grad_() for p, g in zip(params, gradients, strict=True)
        ]
    return [p.detach() for p in params]


def fine_tune(body, head, batches, lr, weight_decay, log_counts=0.0):
    return descend(
        [body, head], lambda p, x, y: mean_nll(tiny_logits(p[0], p[1], x) + log_counts, y), batches, lr, weight_decay
    )


def gma_step(shared, uploads, threshold):
    """One leaf, number by number: shared [...], uploads a list of [...]."""
    out = np.zeros(shared.shape)
    for at in np.ndindex(*shared.shape):
        moves = [float(upload[at]) - float(shared[at]) for upload in uploads]
        up, down = sum(move > 0 for move in moves), sum(move < 0 for move in moves)
        agreement = abs(up - down) / len(moves)
        mask = 1.0 if agreement >= threshold else agreement
        out[at] = float(shared[at]) + mask * sum(moves) / len(moves)
    return out


def apfl_mixture(alpha, v, w):
    return [alpha * mine + (1 - alpha) * theirs for mine, theirs in zip(v, w, strict=True)]


def apfl_gradient(alpha, v, w, x, y):
    """<v - w, gradient of the mean loss at the mixture>"""
    mixture = [p.detach().requires_grad_() for p in apfl_mixture(alpha, v, w)]
    gradients = torch.autograd.grad(mean_nll(tiny_logits(*mixture, x), y), mixture)
    return float(sum(((a - b) * g).sum() for a, b, g in zip(v, w, gradients, strict=True)))


def apfl_gradient_by_difference(alpha, v, w, x, y, width=1e-5):
    ends = [float(mean_nll(tiny_logits(*apfl_mixture(a, v, w), x), y)) for a in (alpha - width, alpha + width)]
    return (ends[1] - ends[0]) / (2 * width)


def apfl_round(alpha, v, w, x, y, batches, lr, weight_decay):
    """alpha by one clipped step on all rows x, y; then v by steps at the mixture."""
    alpha = min(1.0, max(0.0, alpha - lr * apfl_gradient(alpha, v, w, x, y)))
    v = descend(v, lambda p, x, y: mean_nll(tiny_logits(*apfl_mixture(alpha, p, w), x), y), batches, lr, weight_decay)
    return alpha, v


def ditto_round(v, w, batches, lr, lam):
    """The pull written as its gradient, lam * (v - w)."""
    for x, y in batches:
        v = [p.detach().requires_grad_() for p in v]
        gradients = torch.autograd.grad(mean_nll(tiny_logits(*v, x), y), v)
        v = [p.detach() - lr * (g + lam * (p.detach() - a)) for p, g, a in zip(v, gradients, w, strict=True)]
    return v


def fedrep_round(body, head, head_batches, body_batches, lr, weight_decay):
    """The head on the frozen body, and then the body under that head."""
    (head,) = descend([head], lambda p, x, y: mean_nll(tiny_logits(body, p[0], x), y), head_batches, lr, weight_decay)
    (body,) = descend([body], lambda p, x, y: mean_nll(tiny_logits(p[0], head, x), y), body_batches, lr, weight_decay)
    return head, body


def fedrod_personal(body, head, personal, batches, lr, weight_decay):
    """Two linear heads on the same features add up to one whose weights are the sum."""
    return descend(
        [personal], lambda p, x, y: mean_nll(tiny_logits(body, head + p[0], x), y), batches, lr, weight_decay
    )[0]


def tuned_rod(body, head, personal, batches, lr, weight_decay, log_counts):
    """Body and head by balanced softmax; in the same step, the personal head by what both heads say together."""
    for batch in batches:
        before = body, head
        (personal,) = descend(
            [personal],
            lambda p, x, y, b=before: mean_nll(tiny_logits(b[0], b[1] + p[0], x), y),
            [batch],
            lr,
            weight_decay,
        )
        body, head = fine_tune(body, head, [batch], lr, weight_decay, log_counts)
    return body, head, personal


def logit_apfl_round(alpha, v, w, x, y, batches, lr, weight_decay):
    """alpha by one clipped step on all rows x, y, its gradient by a difference. Then, step by step, v by the mixture of
    logits, and w by its own."""

    def lose(alpha, v, w, x, y):
        return mean_nll(alpha * tiny_logits(*v, x) + (1 - alpha) * tiny_logits(*w, x), y)

    width = 1e-5
    rise = (float(lose(alpha + width, v, w, x, y)) - float(lose(alpha - width, v, w, x, y))) / (2 * width)
    alpha = min(1.0, max(0.0, alpha - lr * rise))
    for batch in batches:
        before = w
        v = descend(v, lambda p, x, y, w=before: lose(alpha, p, w, x, y), [batch], lr, weight_decay)
        w = fine_tune(*w, [batch], lr, weight_decay)
    return alpha, v, w


def tilted_mean(losses, tilt):
    return float(np.log(np.mean([np.exp(tilt * float(loss)) for loss in losses])) / tilt)


def maml_gradient(params, inner, outer, inner_lr, first_order):
    """Of the outer loss after the inner step: (I - inner_lr * Hessian of the inner loss) times the gradient there."""
    params = [p.detach().requires_grad_() for p in params]
    gradients = torch.autograd.grad(mean_nll(tiny_logits(*params, inner[0]), inner[1]), params, create_graph=True)
    ahead = [(p - inner_lr * g).detach().requires_grad_() for p, g in zip(params, gradients, strict=True)]
    there = torch.autograd.grad(mean_nll(tiny_logits(*ahead, outer[0]), outer[1]), ahead)
    if first_order:
        return list(there)
    bent = torch.autograd.grad(sum((s * g).sum() for s, g in zip(gradients, there, strict=True)), params)
    return [g - inner_lr * b for g, b in zip(there, bent, strict=True)]


def per_fedavg_local(params, batches, lr, weight_decay, inner_lr, first_order):
    """Rows 0, 2, 4, ... of a batch for the inner step, the others for the outer loss; a single row for both."""
    for x, y in batches:
        inner, outer = (x[::2], y[::2]), ((x[1::2], y[1::2]) if len(y) > 1 else (x, y))
        gradients = maml_gradient(params, inner, outer, inner_lr, first_order)
        params = [p - lr * (g + weight_decay * p) for p, g in zip(params, gradients, strict=True)]
    return params


def fedprox_local(w, batches, lr, weight_decay, mu):
    """Algorithm 2 of the paper, with SGD as the local solver: the proximal term as its gradient."""
    y = w
    for x, labels in batches:
        y = [p.detach().requires_grad_() for p in y]
        gradients = torch.autograd.grad(mean_nll(tiny_logits(*y, x), labels), y)
        y = [
            p.detach() - lr * (g + weight_decay * p.detach() + mu * (p.detach() - a))
            for p, g, a in zip(y, gradients, w, strict=True)
        ]
    return y


def ttt_fine_tune(body, head, rotation, batches, lr, weight_decay):
    """Body and both heads: the classes of images, and how each was turned, by its place in the batch."""

    def loss(params, x, y):
        body, head, rotation = params
        total = 0.0
        for i, (image, label) in enumerate(zip(x, y, strict=True)):
            turned = image
            for _ in range(i % 4):
                turned = turned.flip(-1).transpose(-1, -2)  # a quarter to the left
            total = total + mean_nll(tiny_logits(body, head, image[None]), label[None])
            total = total + mean_nll(tiny_logits(body, rotation, turned[None]), torch.tensor([i % 4]))
        return total / len(x)

    return descend([body, head, rotation], loss, batches, lr, weight_decay)


def fedbabu_local(body, head, batches, lr, weight_decay):
    """The head has a learning rate of 0."""
    return descend([body], lambda p, x, y: mean_nll(tiny_logits(p[0], head, x), y), batches, lr, weight_decay)[0]


def pfedme_local(w, batches, eta, lam, inner_lr, inner_steps):
    """Algorithm 1 of the paper: for a batch, theta by steps on loss + lam / 2 ||theta - w||^2, then w towards it."""
    for x, y in batches:
        theta = w
        for _ in range(inner_steps):
            theta = [p.detach().requires_grad_() for p in theta]
            gradients = torch.autograd.grad(mean_nll(tiny_logits(*theta, x), y), theta)
            theta = [
                p.detach() - inner_lr * (g + lam * (p.detach() - a))
                for p, g, a in zip(theta, gradients, w, strict=True)
            ]
        w = [a - eta * lam * (a - p) for a, p in zip(w, theta, strict=True)]
    return w


# Views: one view of one image, uint8 [h, w, c], by Pillow, in the order of MEMO's code


def augmix_one(image: np.ndarray, key_path: tuple[int | str, ...], item: int, view: int) -> np.ndarray:
    """float64 [h, w, c] in [-1, 1]"""
    drawn = rng.words(rng.key(*key_path, "augmix"), np.array([item], dtype=np.int64), 16 * (view + 1))[0]
    words = [int(word) for word in drawn[16 * view :]]
    uniform = [((word >> 9) + 0.5) / 2**23 for word in words]
    h, w, _ = image.shape

    down, rest = divmod(words[0] * 9, 2**32)
    right, rest = divmod(rest * 9, 2**32)
    start = ImageOps.expand(Image.fromarray(image.squeeze()), 4, 0).crop((right, down, right + w, down + h))
    if rest * 2 >= 2**32:
        start = ImageOps.mirror(start)

    cuts = sorted(uniform[2:4])
    weights = np.diff([0.0, *cuts, 1.0])
    mix = np.zeros((h, w, image.shape[2]))
    for chain in range(3):
        picture = start.copy()
        for step in range(1 + words[4 + chain] * 3 // 2**32):
            op, rest = divmod(words[7 + 3 * chain + step] * 9, 2**32)
            sign, rest = divmod(rest * 2, 2**32)
            level = 0.1 + 0.9 * ((rest >> 9) + 0.5) / 2**23
            picture = AUGMENT[op](picture, level, -1 if sign else 1)
        mix += weights[chain] * np.asarray(picture).reshape(mix.shape)
    keep = uniform[1]
    return (keep * np.asarray(start).reshape(mix.shape) + (1 - keep) * mix) / 127.5 - 1


def transform(picture: Image.Image, *matrix: float) -> Image.Image:
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


AUGMENT = [
    lambda picture, level, sign: ImageOps.autocontrast(picture),
    lambda picture, level, sign: ImageOps.equalize(picture),
    lambda picture, level, sign: picture.rotate(sign * int(level * 30 / 10), Image.Resampling.BILINEAR),
    lambda picture, level, sign: ImageOps.solarize(picture, 256 - int(level * 256 / 10)),
    lambda picture, level, sign: transform(picture, 1, sign * level * 0.3 / 10, 0, 0, 1, 0),
    lambda picture, level, sign: transform(picture, 1, 0, 0, sign * level * 0.3 / 10, 1, 0),
    lambda picture, level, sign: transform(picture, 1, 0, sign * int(level * (picture.width / 3) / 10), 0, 1, 0),
    lambda picture, level, sign: transform(picture, 1, 0, 0, 0, 1, sign * int(level * (picture.height / 3) / 10)),
    lambda picture, level, sign: ImageOps.posterize(picture, 4 - int(level * 4 / 10)),
]


# FedTHE and FedTHE+ as whole methods on the CNN: rounds, deployment and test time, written out with plain functions


def cnn_features(body, x):
    for name in ("conv1", "conv2"):
        x = torch.max_pool2d(torch.relu(torch.conv2d(x, body[name])), 2)
    return torch.relu(x.flatten(1) @ body["fc"].T)


def descend_by_name(params, loss, batches, lr, decay):
    """Plain SGD with weight decay; params and gradients by name."""
    for batch in batches:
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        gradients = torch.autograd.grad(loss(leaves, batch).mean(), list(leaves.values()))
        steps = zip(leaves.items(), gradients, strict=True)
        params = {name: (value - lr * (gradient + decay * value)).detach() for (name, value), gradient in steps}
    return params


def nll(logits, y):
    return -logits.log_softmax(1)[torch.arange(len(y)), y]


def fedthe_personalize(body, personal, images, batches, lr, decay):
    """The personal head after an epoch on the received, frozen extractor, and the mean feature under it."""

    def loss(p, b):
        return nll(cnn_features(body, b.x) @ p["w"].T, b.y)

    trained = descend_by_name({"w": personal}, loss, batches, lr, decay)
    return trained["w"], cnn_features(body, images).mean(0)


def fedthe_local(body, head, labels, classes, batches, lr, decay):
    """Extractor and global head after local training with the balanced softmax of the client's own counts."""
    prior = torch.log(torch.bincount(labels, minlength=classes) + 1.0)
    trained = descend_by_name(
        body | {"head": head}, lambda p, b: nll(cnn_features(p, b.x) @ p["head"].T + prior, b.y), batches, lr, decay
    )
    return {name: trained[name] for name in body}, trained["head"]


def fedthe_plus_stream(body, head, personal, descriptor, own_descriptor, x, views, lr=0.0005):
    """x [n, c, h, w] in order, their views [n, steps, views, c, h, w] -> answers [n, classes] and e [n], in float64."""
    tensors = (head, personal, x, views)
    head, personal, x, views = (value.double() for value in tensors)
    body = {name: value.double() for name, value in body.items()}
    h = cnn_features(body, x)
    _, weights, _ = head_ensemble_stream(h, h @ head.T, h @ personal.T, descriptor, own_descriptor)
    answers = []
    for one, seen_of_one, e in zip(x, views, weights, strict=True):
        params = body | {"global": head, "personal": personal}  # every sample starts from the same weights
        for seen in seen_of_one:
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
            features = cnn_features(leaves, seen)
            logits = e * (features @ leaves["global"].T) + (1 - e) * (features @ leaves["personal"].T)
            p = logits.softmax(1).mean(0)
            gradients = torch.autograd.grad(-(p * p.log()).sum(), list(leaves.values()))
            params = {n: (v - lr * g).detach() for (n, v), g in zip(leaves.items(), gradients, strict=True)}
        features = cnn_features(params, one[None])
        answers.append(e * (features @ params["global"].T) + (1 - e) * (features @ params["personal"].T))
    return torch.cat(answers), weights
