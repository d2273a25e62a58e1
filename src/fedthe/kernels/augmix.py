"""The views of `data.augment` on a GPU: one program of a Triton kernel makes one view, from its draws to its pixels.

`data.augment` is the reference and gives the reasons. The host takes no part here, neither plan nor copy nor
synchronization, so a CUDA graph can capture it.

An image is a block of 32-bit words, one per pixel, whose bytes are the channels: one look-up moves all channels. The
sides of a block are powers of two; pixels beyond the image are never read. Blocks stay in registers; Triton's `gather`
moves pixels through shared memory.
"""

# Kernels have no types that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
from torch import Tensor

from . import augmix_recipe as recipe
from .compiler import constexpr, jit, tl, triton
from .shapes import power_of_two

LARGEST = 64  # pixels on a side: registers and shared memory hold blocks of 64 x 64 words well

# Kernels can read only those globals that are declared constants.
_WORDS = constexpr(recipe.WORDS)
_PAD = constexpr(recipe.PAD)
_CHAINS, _STEPS = constexpr(recipe.CHAINS), constexpr(recipe.STEPS)
_COUNT = constexpr(len(recipe.OPS))
_AUTOCONTRAST, _EQUALIZE, _ROTATE, _SOLARIZE, _SHEAR_X, _SHEAR_Y, _TRANSLATE_X, _TRANSLATE_Y, _POSTERIZE = map(
    constexpr, range(len(recipe.OPS))
)
_DUST = constexpr(recipe.DUST)
_SHEAR = constexpr(recipe.SHEAR)
# At severity 1 an image is rotated by one or two degrees; by -k, as in the reference, is by 360 - k: last bits differ.
_SIN_1, _SIN_2, _SIN_359, _SIN_358 = (constexpr(float(recipe.SINES[degrees])) for degrees in (1, 2, -1, -2))
_COS_1, _COS_2, _COS_359, _COS_358 = (constexpr(float(recipe.COSINES[degrees])) for degrees in (1, 2, -1, -2))


def draw_views(images: Tensor, keys: Tensor, items: Tensor, views: int) -> Tensor:
    """`views` augmented views of each image: float32 [n, views, h, w, c] in [-1, 1], contiguous.

    images: uint8 [n, h, w, 1 or 3], sides up to LARGEST. keys: int64 [n, 2], the two words of each image's key. items:
    int64 [n]. All on one device.
    """
    n, h, w, c = images.shape
    out = torch.empty((n, views, h, w, c), device=images.device)
    if n == 0:
        return out
    shape = {"H": h, "W": w, "C": c, "TALL": power_of_two(h), "WIDE": power_of_two(w)}
    # Without fusion a product is rounded before it is added, except where the kernel says `fma`.
    launch = {"num_warps": _choose_warps(shape["TALL"] * shape["WIDE"]), "enable_fp_fusion": False}
    given = (images.contiguous(), keys.contiguous(), items.contiguous())
    with torch.cuda.device_of(images):  # Triton launches on the current device
        _draw[(n * views,)](*given, out, views, **shape, **launch)
    return out


def _choose_warps(pixels: int) -> int:
    """Eight pixels per thread, and two warps at least: within one, `gather` compiles to thousands of shuffles."""
    return min(max(pixels // 256, 2), 8)


@triton.jit(do_not_specialize=["views"])  # else it is compiled again for 1 and for multiples of 16
def _draw(images, keys, items, out, views, H: constexpr, W: constexpr, C: constexpr, TALL: constexpr, WIDE: constexpr):
    """View `program % views` of image `program // views`."""
    program = tl.program_id(0)
    image = program // views
    words = _words(tl.load(keys + 2 * image), tl.load(keys + 2 * image + 1), tl.load(items + image), program % views)
    cropped = _crop_and_flip(images + image.to(tl.int64) * (H * W * C), _word(words, 0), H, W, C, TALL, WIDE)
    keep, one, two = _unit(_word(words, 1)), _unit(_word(words, 2)), _unit(_word(words, 3))
    low, high = tl.minimum(one, two), tl.maximum(one, two)
    others = 1 - keep

    weight = _weight(keep)
    first = _channel(cropped, 0).to(tl.float32) * weight
    second, third = first, first
    if C == 3:
        second = _channel(cropped, 1).to(tl.float32) * weight
        third = _channel(cropped, 2).to(tl.float32) * weight
    for chain in range(_CHAINS):
        x = cropped
        depth = 1 + tl.umulhi(_word(words, 4 + chain), tl.full([], _STEPS, tl.uint32)).to(tl.int32)
        for step in range(_STEPS):
            if step < depth:
                x = _operate(x, _word(words, 7 + _STEPS * chain + step), H, W, C, TALL, WIDE)
        part = tl.where(chain == 0, low, tl.where(chain == 1, high - low, 1 - high))
        weight = _weight(others * part)
        first += _channel(x, 0).to(tl.float32) * weight
        if C == 3:
            second += _channel(x, 1).to(tl.float32) * weight
            third += _channel(x, 2).to(tl.float32) * weight

    row, column = _rows_and_columns(TALL, WIDE)
    to = out + program.to(tl.int64) * (H * W * C) + (row * W + column) * C
    within = (row < H) & (column < W)
    tl.store(to, _end(first), mask=within)
    if C == 3:
        tl.store(to + 1, _end(second), mask=within)
        tl.store(to + 2, _end(third), mask=within)


@jit
def _rows_and_columns(TALL: constexpr, WIDE: constexpr):
    """The row and column of each pixel of a block."""
    at = tl.arange(0, TALL * WIDE)
    return at // WIDE, at % WIDE


@jit
def _within(H: constexpr, W: constexpr, TALL: constexpr, WIDE: constexpr):
    row, column = _rows_and_columns(TALL, WIDE)
    return (row < H) & (column < W)


@jit
def _channel(x, c):
    return (x >> (8 * c)) & 255


@jit
def _end(total):
    return tl.minimum(tl.maximum(total - 1, -1.0), 1.0)


# Draws: see `augment.read_draws`


@jit
def _words(key_0, key_1, item, view):
    """The view's words, uint32 [_WORDS]: `rng.words` of the item, from the view's first on."""
    lane = tl.arange(0, _WORDS)
    none = lane * 0
    low, high = none + (item & 0xFFFFFFFF).to(tl.uint32), none + (item >> 32).to(tl.uint32)
    block = (view * (_WORDS // 4) + lane // 4).to(tl.uint32)
    a, b, c, d = tl.philox(key_1 << 32 | key_0, block, none.to(tl.uint32), low, high)
    at = lane % 4
    return tl.where(at == 0, a, tl.where(at == 1, b, tl.where(at == 2, c, d)))


@jit
def _word(words, at):
    """One word as a scalar, as branches need it: a few shuffles, since every warp holds all words."""
    return tl.sum(tl.where(tl.arange(0, _WORDS) == at, words, 0), 0).to(tl.uint32)


@jit
def _split(word, parts: constexpr):
    """The first digit, below `parts`, as int32, and the word of the digits after it; see `augment._split`"""
    return tl.umulhi(word, tl.full([], parts, tl.uint32)).to(tl.int32), word * tl.full([], parts, tl.uint32)


@jit
def _unit(word):
    """float64 in (0, 1)"""
    return ((word >> 9).to(tl.float64) + 0.5) * (1.0 / 8388608)


@jit
def _weight(share):
    """The weight of levels, 0 to 255, whose share of the mix is float64 `share`; rounded as in the reference."""
    return tl.div_rn(share.to(tl.float32), tl.full([], 127.5, tl.float32))


@jit
def _crop_and_flip(image, word, H: constexpr, W: constexpr, C: constexpr, TALL: constexpr, WIDE: constexpr):
    """The block of `augment.crop_and_flip`."""
    down, rest = _split(word, 2 * _PAD + 1)
    right, rest = _split(rest, 2 * _PAD + 1)
    row, column = _rows_and_columns(TALL, WIDE)
    row += down - _PAD
    column = tl.where((rest >> 31) > 0, W - 1 - column, column) + (right - _PAD)
    within = (row >= 0) & (row < H) & (column >= 0) & (column < W)
    at = image + (row * W + column) * C
    x = tl.load(at, mask=within, other=0).to(tl.int32)
    for c in tl.static_range(1, C):
        x |= tl.load(at + c, mask=within, other=0).to(tl.int32) << (8 * c)
    return x


# Operations on blocks: int32 [TALL * WIDE], row by row


@jit
def _operate(x, word, H: constexpr, W: constexpr, C: constexpr, TALL: constexpr, WIDE: constexpr):
    """One step of a chain: the operation drawn."""
    op, rest = _split(word, _COUNT)
    level = 16777216 + 9 + 18 * ((rest >> 8) & 8388607).to(tl.int32)
    if op == _AUTOCONTRAST:
        x = _autocontrast(x, H, W, C, TALL, WIDE)
    elif op == _EQUALIZE:
        x = _equalize(x, H, W, C, TALL, WIDE)
    elif op == _SOLARIZE:
        x = _solarize(x, 256 - _size(level, 3 * 256), C)
    elif op == _POSTERIZE:
        x &= 0xF0F0F0
    else:
        x = _move(x, op, level, (rest >> 31) > 0, H, W, C, TALL, WIDE)
    return x


@jit
def _size(level, thrice_largest):
    """AugMix's int(level * largest / 10) in integers; `level` is in units of 1 / (10 << 24)."""
    return ((level.to(tl.int64) * thrice_largest) >> 24).to(tl.int32) // 300


@jit
def _solarize(x, threshold, C: constexpr):
    done = x
    for c in tl.static_range(C):
        done ^= tl.where(_channel(x, c) < threshold, 0, 255 << (8 * c))  # 255 - a level is its complement
    return done


@jit
def _autocontrast(x, H: constexpr, W: constexpr, C: constexpr, TALL: constexpr, WIDE: constexpr):
    done = _stretch(_channel(x, 0), H, W, TALL, WIDE)
    for c in tl.static_range(1, C):
        done |= _stretch(_channel(x, c), H, W, TALL, WIDE) << (8 * c)
    return done


@jit
def _stretch(level, H: constexpr, W: constexpr, TALL: constexpr, WIDE: constexpr):
    """As `augment._stretch`, in float64 with the same rounding."""
    within = _within(H, W, TALL, WIDE)
    low = tl.min(tl.where(within, level, 255), 0)
    high = tl.max(tl.where(within, level, 0), 0)
    scale = tl.full([], 255.0, tl.float64) / tl.maximum(high - low, 1).to(tl.float64)
    stretched = (level.to(tl.float64) * scale - low.to(tl.float64) * scale).to(tl.int32)
    return tl.where(low == high, level, stretched)


@jit
def _equalize(x, H: constexpr, W: constexpr, C: constexpr, TALL: constexpr, WIDE: constexpr):
    done = _flatten(_channel(x, 0), H, W, TALL, WIDE)
    for c in tl.static_range(1, C):
        done |= _flatten(_channel(x, c), H, W, TALL, WIDE) << (8 * c)
    return done


@jit
def _flatten(level, H: constexpr, W: constexpr, TALL: constexpr, WIDE: constexpr):
    """As `augment._equalize`, by integer division."""
    level = tl.where(_within(H, W, TALL, WIDE), level, 0)
    bins = tl.arange(0, 256)
    counts = tl.histogram(level, 256)
    counts -= tl.where(bins == 0, TALL * WIDE - H * W, 0)
    below = tl.cumsum(counts, 0) - counts
    step = tl.max(tl.where(counts > 0, below, 0), 0) // 255  # by how many are below the brightest level
    table = tl.minimum((below + step // 2) // tl.maximum(step, 1), 255)
    table = tl.where(step == 0, bins, table)
    return tl.gather(table, level, 0)


@jit
def _move(x, op, level, negative, H: constexpr, W: constexpr, C: constexpr, TALL: constexpr, WIDE: constexpr):
    """Rotate, shear or translate; `augment._look` explains the map of places."""
    none, one = tl.full([], 0.0, tl.float64), tl.full([], 1.0, tl.float64)
    across_u, across_v, across_1 = one, none, none
    down_u, down_v, down_1 = none, one, none
    live = True
    if (op == _SHEAR_X) | (op == _SHEAR_Y):
        amount = level.to(tl.float64) * tl.full([], _SHEAR, tl.float64)
        amount = tl.where(negative, -amount, amount)
        if op == _SHEAR_X:
            across_v = tl.full([], H / W, tl.float64) * amount
            across_1 = across_v
        else:
            down_u = tl.full([], W / H, tl.float64) * amount
            down_1 = down_u
    elif op == _ROTATE:
        size = _size(level, 3 * 30)
        live = size > 0
        sine, cosine = _turn(size, negative)
        across_u, down_v = cosine, cosine
        across_v = tl.full([], -(H / W), tl.float64) * sine
        down_u = tl.full([], W / H, tl.float64) * sine
    else:
        size = _size(level, tl.where(op == _TRANSLATE_X, W, H))
        live = size > 0
        amount = tl.where(negative, -size, size).to(tl.float64)
        if op == _TRANSLATE_X:
            across_1 = tl.full([], 2 / W, tl.float64) * amount
        else:
            down_1 = tl.full([], 2 / H, tl.float64) * amount
    if live:
        # in float64 for a row and a column, in float32 for all pixels
        u, v = _places(tl.arange(0, WIDE), W), _places(tl.arange(0, TALL), H)
        across = (across_u * u + across_1).to(tl.float32)[None, :] + (across_v * v).to(tl.float32)[:, None]
        down = (down_u * u + down_1).to(tl.float32)[None, :] + (down_v * v).to(tl.float32)[:, None]
        x = _warp(x, tl.reshape(across, [TALL * WIDE]), tl.reshape(down, [TALL * WIDE]), H, W, C, TALL, WIDE)
    return x


@jit
def _turn(size, negative):
    """Sine and cosine of `size` degrees, 1 or 2, or of -`size`."""
    two = size > 1
    sine = tl.where(two, tl.full([], _SIN_2, tl.float64), tl.full([], _SIN_1, tl.float64))
    cosine = tl.where(two, tl.full([], _COS_2, tl.float64), tl.full([], _COS_1, tl.float64))
    sine_of_minus = tl.where(two, tl.full([], _SIN_358, tl.float64), tl.full([], _SIN_359, tl.float64))
    cosine_of_minus = tl.where(two, tl.full([], _COS_358, tl.float64), tl.full([], _COS_359, tl.float64))
    return tl.where(negative, sine_of_minus, sine), tl.where(negative, cosine_of_minus, cosine)


@jit
def _places(at, SIDE: constexpr):
    """float64, from -1 to 1 between the outer edges"""
    twice = (2 * at + 1).to(tl.float64)
    if SIDE & (SIDE - 1) == 0:
        return twice * (1 / SIDE) - 1  # a power of two: as exact as the quotient, and cheaper
    else:  # noqa: RET505 (Triton compiles one or the other)
        return twice / SIDE - 1


@jit
def _warp(x, across, down, H: constexpr, W: constexpr, C: constexpr, TALL: constexpr, WIDE: constexpr):
    """As `augment.warp`, with the bits of torch's `grid_sample`, which also fuses products and sums."""
    inside = (tl.abs(across) < 1) & (tl.abs(down) < 1)
    column = tl.minimum(tl.maximum(tl.fma(across + 1, W / 2, -0.5), 0.0), W - 1.0)
    row = tl.minimum(tl.maximum(tl.fma(down + 1, H / 2, -0.5), 0.0), H - 1.0)
    left, top = column.to(tl.int32), row.to(tl.int32)
    to_left, to_top = column - left.to(tl.float32), row - top.to(tl.float32)
    to_right, to_bottom = 1 - to_left, 1 - to_top
    # beyond the last pixel the weight is 0: read that pixel again
    right, bottom = tl.minimum(left + 1, W - 1), tl.minimum(top + 1, H - 1)
    # one gather for all four corners: the image goes to shared memory once
    upper = tl.join(top * WIDE + left, top * WIDE + right)
    lower = tl.join(bottom * WIDE + left, bottom * WIDE + right)
    places = tl.reshape(tl.join(upper, lower), [TALL * WIDE * 4])
    seen = tl.reshape(tl.gather(x, places, 0), [TALL * WIDE, 2, 2])
    upper, lower = tl.split(seen)
    upper_left, upper_right = tl.split(upper)
    lower_left, lower_right = tl.split(lower)
    done = left * 0
    for c in tl.static_range(C):
        level = _channel(upper_left, c).to(tl.float32) * (to_right * to_bottom)
        level = tl.fma(_channel(upper_right, c).to(tl.float32), to_left * to_bottom, level)
        level = tl.fma(_channel(lower_left, c).to(tl.float32), to_right * to_top, level)
        level = tl.fma(_channel(lower_right, c).to(tl.float32), to_left * to_top, level)
        done |= (level + _DUST).to(tl.int32) << (8 * c)
    return tl.where(inside, done, 0)
