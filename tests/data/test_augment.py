"""The augmented views against Pillow, and what must hold for any of them."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import oracles
from fedthe import rng
from fedthe.data import augment
from fedthe.data.augment import augmix, crop_and_flip, look_up, make_plan, read_draws, warp
from fedthe.errors import InputError
from fedthe.kernels.augmix_recipe import LEVEL, OPS, WORDS
from helpers import make_images

PATH = (5, "views", 0)
SHAPES = [(32, 32, 3), (28, 28, 1), (24, 40, 3)]
# Pillow interpolates in double precision and cuts to whole levels; in float32, a value that is nearly whole may be cut
# to the level above or below it, and where a value is whole by design, Pillow's own rounding decides. So a few values
# may be off by one level, none by more; whole pixels are moved exactly where places are exact, at sides of 2**k.
OFF = 5e-3


def open_images(images: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray(image.squeeze(-1).numpy() if image.shape[-1] == 1 else image.numpy()) for image in images]


def to_planes(pictures: list[Image.Image]) -> torch.Tensor:
    """[n, c, h, w]"""
    arrays = [np.asarray(picture) for picture in pictures]
    return torch.from_numpy(np.stack([a[None] if a.ndim == 2 else a.transpose(2, 0, 1) for a in arrays]))


def make_odd_images(c: int) -> torch.Tensor:
    """Flat, two-valued, dark, nearly flat, and noise: what tables stumble on."""
    images = torch.zeros(9, 32, 32, c, dtype=torch.uint8)
    images[1], images[2, :16], images[3, 0, 0], images[4] = 200, 255, 1, 7
    images[4, 3, 5] = 9
    random = np.random.default_rng(c)
    images[5:] = torch.from_numpy(random.integers(0, 256, (4, 32, 32, c), dtype=np.uint8))
    images[6] //= 3
    images[7] = images[7] // 9 + 100
    images[8] = images[8] // 2 * 2
    return images


@pytest.mark.parametrize("c", [1, 3])
def test_autocontrast_and_equalize_are_pillows(c):
    for images in (
        make_odd_images(c),
        make_images(40, 32, 32, c),
        make_images(10, 28, 28, c),
        make_images(6, 24, 40, c),
    ):
        none = torch.empty(0, 1, 256, dtype=torch.uint8)
        planes, n = images.movedim(3, 1).contiguous(), len(images)
        pictures = open_images(images)
        assert torch.equal(look_up(planes, n, 0, none), to_planes([ImageOps.equalize(p) for p in pictures]))
        assert torch.equal(look_up(planes, 0, n, none), to_planes([ImageOps.autocontrast(p) for p in pictures]))


def test_autocontrast_is_pillows_for_all_pairs_of_darkest_and_brightest():
    low, high = (t.flatten() for t in torch.meshgrid(torch.arange(0, 256, 5), torch.arange(0, 256, 3), indexing="ij"))
    low, high = torch.minimum(low, high), torch.maximum(low, high)
    ramp = torch.linspace(0, 1, 256)[None] * (high - low)[:, None] + low[:, None]
    planes = ramp.round().to(torch.uint8).view(-1, 1, 16, 16)
    expected = [ImageOps.autocontrast(Image.fromarray(plane[0].numpy())) for plane in planes]
    found = look_up(planes, 0, len(planes), torch.empty(0, 1, 256, dtype=torch.uint8))
    assert torch.equal(found, to_planes(expected))


@pytest.mark.parametrize("c", [1, 3])
def test_solarize_and_posterize_are_pillows(c):
    images = make_images(1, 32, 32, c, noise=80)
    picture, planes = open_images(images)[0], images.movedim(3, 1).contiguous().expand(27, c, 32, 32)
    expected = [ImageOps.solarize(picture, 256 - level) for level in range(26)] + [ImageOps.posterize(picture, 4)]
    found = look_up(planes, 0, 0, torch.from_numpy(augment._POINT_TABLES)[:, None])
    assert torch.equal(found, to_planes(expected))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("op", "amounts"),
    [
        ("rotate", [*range(-30, 0), *range(1, 31), 90, -135]),
        ("shear_x", np.linspace(-0.3, 0.3, 60)),
        ("shear_y", np.linspace(-0.3, 0.3, 60)),
        ("translate_x", [*range(-10, 11), 100]),
        ("translate_y", [*range(-10, 11), 100]),
    ],
)
def test_warps_are_pillows(op, amounts, shape):
    images = make_images(4, *shape)
    matrix = {
        "shear_x": lambda a: (1, a, 0, 0, 1, 0),
        "shear_y": lambda a: (1, 0, 0, a, 1, 0),
        "translate_x": lambda a: (1, 0, a, 0, 1, 0),
        "translate_y": lambda a: (1, 0, 0, 0, 1, a),
    }
    for image, picture in zip(images.movedim(3, 1), open_images(images), strict=True):
        if op == "rotate":
            expected = to_planes([picture.rotate(a, Image.Resampling.BILINEAR) for a in amounts])
        else:
            expected = to_planes([oracles.transform(picture, *matrix[op](a)) for a in amounts])
        amount = np.array(amounts, dtype=np.float64)
        across, down = augment._look(np.full(len(amount), OPS.index(op)), amount, *shape[:2])
        found = warp(image.expand(len(amount), -1, -1, -1), torch.from_numpy(across) + torch.from_numpy(down))
        gap = (found.int() - expected.int()).abs()
        if op.startswith("translate") and shape == (32, 32, 3):
            assert gap.max() == 0
        assert gap.max() <= 1
        assert (gap > 0).float().mean() < OFF


def test_a_warp_keeps_flat_images_flat_and_black_outside():
    white = torch.full((1, 1, 32, 32), 255, dtype=torch.uint8)
    across, down = augment._look(np.array([OPS.index("rotate")]), np.array([30.0]), 32, 32)
    assert set(warp(white, torch.from_numpy(across) + torch.from_numpy(down)).unique().tolist()) == {0, 255}


@pytest.mark.parametrize("shape", SHAPES)
def test_crops_and_flips_are_pillows(shape):
    h, w, _ = shape
    images = make_images(2, *shape)
    down, right, mirrored = (t.flatten() for t in torch.meshgrid(*map(torch.arange, (9, 9, 2)), indexing="ij"))
    expected = []
    for picture in open_images(images):
        for y, x, flip in zip(down.tolist(), right.tolist(), mirrored.tolist(), strict=True):
            cut = ImageOps.expand(picture, 4, 0).crop((x, y, x + w, y + h))
            expected.append(ImageOps.mirror(cut) if flip else cut)
    found = crop_and_flip(images, down.repeat(2), right.repeat(2), mirrored.repeat(2))
    assert torch.equal(found, to_planes(expected))


@pytest.mark.parametrize("shape", SHAPES)
def test_views_are_those_of_the_literal_version(shape):
    images, items, views = make_images(5, *shape), torch.tensor([0, 1, 77, 2**40 + 5, 9]), 24
    found = augmix(images, PATH, items, views)
    pairs = list(zip(images.numpy(), items.tolist(), strict=True))
    expected = np.stack(
        [[oracles.augmix_one(image, PATH, item, view) for view in range(views)] for image, item in pairs]
    )
    gap = (found - torch.from_numpy(expected).movedim(4, 2)).abs() * 127.5
    # One level off in a warp (see OFF) is up to one level off in the mix. Rarely more, where a later operation makes
    # more of a level: solarize and posterize at their thresholds, autocontrast of a channel with few levels.
    assert (gap > 1e-3).float().mean() < OFF
    assert (gap > 1.01).float().mean() < 1e-4
    assert gap.mean() < 2e-3
    assert (gap.flatten(2).amax(2) < 1e-3).float().mean() > 0.5  # most views are equal but for float32


def test_shape_range_and_memory_order():
    found = augmix(make_images(3, 28, 32, 3), PATH, torch.arange(3), 5)
    assert found.shape == (3, 5, 3, 28, 32)
    assert found.dtype == torch.float32
    assert found.movedim(2, 4).is_contiguous()
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    weight = torch.ones(3, requires_grad=True)
    (found * weight[:, None, None]).square().sum().backward()  # autograd may keep the views
    for flat, end in ((0, -1), (255, 1)):
        images = torch.full((2, 32, 32, 3), flat, dtype=torch.uint8)
        assert augmix(images, PATH, torch.arange(2), 40).abs().max() == abs(end)
    assert augmix(make_images(2, 16, 16, 1)[:0], PATH, torch.arange(0), 4).shape == (0, 4, 1, 16, 16)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sample_has_its_own_views_whatever_its_neighbours(shape, monkeypatch):
    images, items = make_images(9, *shape), torch.arange(9) * 11
    whole = augmix(images, PATH, items, 6)
    assert torch.equal(whole, augmix(images, PATH, items, 6))
    order = torch.tensor([7, 2, 0, 8])
    assert torch.equal(augmix(images[order], PATH, items[order], 6), whole[order])
    for i in (0, 4):
        assert torch.equal(augmix(images[i : i + 1], PATH, items[i : i + 1], 6)[0], whole[i])
    assert torch.equal(augmix(images, PATH, items, 2), whole[:, :2])
    for size in (1, 20 * images[0].numel()):  # in other parts
        monkeypatch.setattr(augment, "_CACHED", size)
        assert torch.equal(augmix(images, PATH, items, 6), whole)
    spread = images.new_zeros(9, *(2 * side for side in shape))[:, ::2, ::2, ::2].copy_(images)
    assert torch.equal(augmix(spread, PATH, items, 6), whole)


def test_draws_follow_the_path_the_item_and_the_view():
    image = make_images(1, 32, 32, 3)
    seen = [augmix(image, path, torch.tensor([item]), 8)[0] for path in (PATH, (5, "views", 1)) for item in (0, 1)]
    views = torch.cat(seen).flatten(1)
    apart = torch.cdist(views, views) + 100 * torch.eye(len(views))
    assert apart.min() > 0.1


def test_draws_are_spread_as_they_should():
    n = 20_000
    draws = read_draws(rng.words(rng.key(3), np.arange(n, dtype=np.int64), WORDS))

    def is_even(values: np.ndarray, count: int) -> None:
        """Within five standard deviations of equal parts, each by each."""
        parts = np.bincount(values.ravel(), minlength=count) / values.size
        assert len(parts) == count
        assert np.abs(parts - 1 / count).max() < 5 * np.sqrt((count - 1) / count**2 / values.size)

    is_even(draws.op, len(OPS))
    is_even(draws.depth - 1, 3)
    is_even(draws.negative, 2)
    is_even(draws.mirrored, 2)
    is_even(draws.down * 9 + draws.right, 81)
    is_even((draws.op * 2 + draws.negative) * 5 + (draws.level - 2**24) * 5 // (9 << 24), 9 * 2 * 5)  # independent
    level = draws.level / LEVEL
    assert 0.1 < level.min() < 0.1001
    assert 0.9999 < level.max() < 1
    share = draws.share.astype(np.float64)
    keep, weights = share[0], share[1:] / (1 - share[0])
    np.testing.assert_allclose(share.sum(0), 1, atol=2e-7)
    assert share.min() >= 0
    assert abs(keep.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / n)
    # Dirichlet(1, 1, 1): mean 1/3, variance 1/18, correlation -1/2; each weight is Beta(1, 2)
    np.testing.assert_allclose(weights.mean(1), 1 / 3, atol=5 * np.sqrt(1 / 18 / n))
    np.testing.assert_allclose(np.corrcoef(weights), np.eye(3) * 1.5 - 0.5, atol=0.03)
    for weight in weights:
        assert np.abs(np.sort(1 - (1 - weight) ** 2) - (np.arange(n) + 0.5) / n).max() < 2 / np.sqrt(n)


def test_a_plan_does_every_step_of_every_chain_and_no_idle_one():
    draws = read_draws(rng.words(rng.key(4), np.arange(500, dtype=np.int64), WORDS))
    for h, w in ((32, 32), (28, 28)):
        plan = make_plan(draws, h, w)
        assert np.sum(plan.sizes) == len(plan.source)
        live = np.arange(3) < draws.depth[..., None]
        level = draws.level / LEVEL
        moves = {OPS.index("rotate"): 3, OPS.index("translate_x"): w / 30, OPS.index("translate_y"): h / 30}
        for op, largest in moves.items():
            live &= (draws.op != op) | (np.floor(level * largest) > 0)
        assert len(plan.source) == live.sum()
        assert sorted([*plan.source, *plan.result.ravel()]) == sorted(
            [*range(500)] * 3 + [*range(500, 500 + live.sum())]
        )


@pytest.mark.parametrize(
    ("images", "items", "views", "words"),
    [
        (torch.zeros(2, 8, 8, 3), torch.arange(2), 4, "uint8"),
        (torch.zeros(2, 8, 8, 2, dtype=torch.uint8), torch.arange(2), 4, "1 or 3"),
        (torch.zeros(2, 7, 8, 3, dtype=torch.uint8), torch.arange(2), 4, "at least 8 x 8"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), torch.arange(3), 4, "one int64 item per image"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), torch.arange(2).int(), 4, "one int64 item per image"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), torch.arange(2), 0, "at least one view"),
    ],
)
def test_what_cannot_be_augmented_is_refused(images, items, views, words):
    with pytest.raises(InputError, match=words):
        augmix(images, PATH, items, views)
