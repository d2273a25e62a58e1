"""The corruptions against their literal versions, and what must hold for any image."""

import numpy as np
import pytest
import torch
from PIL import Image

import oracles
from fedthe.corruptions import CORRUPTIONS, corrupt, corrupt_mixed
from fedthe.corruptions.frost import SIZE, make_frost
from fedthe.corruptions.table import TABLE
from fedthe.data.frost import load_frost
from fedthe.errors import InputError
from helpers import make_images

SEED = 5
FROST = [texture.numpy() for texture in make_frost()]
CONSTANT = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")  # nothing is drawn
# The share of values that may be off, by one level each: results are cut to whole levels, so the least difference shows
# where a value is nearly whole. Blurs here have weights of 16 bits; the rest differs by float32 against float64.
# What is not listed is equal bit for bit: tables, whole numbers, or Pillow itself.
OFF = {
    "gaussian_noise": 1e-3,
    "defocus_blur": 2e-2,  # at severity 4 a fifth of the sums would be whole, but for weights of 4e-6
    "glass_blur": 5e-3,
    "motion_blur": 2e-3,
    "zoom_blur": 2e-3,
    "snow": 3e-2,  # a flake that is cut one level lower takes its trail along
    "frost": 1e-3,
    "fog": 1e-3,
    "brightness": 1e-3,
    "contrast": 1e-3,
    "elastic_transform": 1e-3,
}


def judge(images: torch.Tensor, name: str, severity: int, items: torch.Tensor) -> torch.Tensor:
    pairs = zip(images.numpy(), items.tolist(), strict=True)
    return torch.from_numpy(
        np.stack([oracles.corrupt_one(image, name, severity, item, SEED, FROST) for image, item in pairs])
    )


def change(images: torch.Tensor, other: torch.Tensor) -> float:
    return (images.float() - other.float()).abs().mean().item()


SHAPES = [(32, 32, 3), (28, 28, 1), (48, 48, 3)]


@pytest.mark.parametrize("severity", range(1, 6))
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_agrees_with_the_literal_version(name: str, severity: int) -> None:
    for shape in SHAPES:
        images = make_images(2, *shape)
        items = torch.tensor([7, 2**40 + 3])
        off = (corrupt(images, name, severity, items, SEED).int() - judge(images, name, severity, items).int()).abs()
        assert off.max() <= (name in OFF), f"{shape}: off by {off.max()}"
        assert (off > 0).float().mean() <= OFF.get(name, 0), f"{shape}: {(off > 0).float().mean():.5f} are off"


SQUARE = ("zoom_blur", "snow")  # their literal versions take no other images


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name not in SQUARE])
def test_agrees_on_oblong_images(name: str) -> None:
    images, items = make_images(2, 16, 24, 3), torch.tensor([0, 1])
    off = (corrupt(images, name, 4, items, SEED).int() - judge(images, name, 4, items).int()).abs()
    assert off.max() <= (name in OFF)
    assert (off > 0).float().mean() <= OFF.get(name, 0)


@pytest.mark.parametrize("shape", [(8, 8, 3), (9, 20, 1), (33, 17, 3), (96, 96, 3)])
def test_takes_any_size_from_eight(shape: tuple[int, int, int]) -> None:
    images, items = make_images(2, *shape), torch.arange(2)
    for name in CORRUPTIONS:
        out = corrupt(images, name, 5, items, SEED)
        assert out.shape == images.shape
        assert out.dtype == torch.uint8
        assert not torch.equal(out, images)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_neighbours_do_not_matter(name: str) -> None:
    """Bit for bit: one at a time, all at once, in another order, in parts that fill no vector, on two threads."""
    images = make_images(37, 32, 32, 3)
    items = torch.arange(37) * 1001 + 5
    order = torch.from_numpy(np.random.default_rng(0).permutation(37))
    together = corrupt(images, name, 5, items, SEED)
    for size in (1, 5):
        parts = zip(images.split(size), items.split(size), strict=True)
        assert torch.equal(together, torch.cat([corrupt(image, name, 5, item, SEED) for image, item in parts]))
    assert torch.equal(together[order], corrupt(images[order], name, 5, items[order], SEED))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(together, corrupt(images, name, 5, items, SEED))
    finally:
        torch.set_num_threads(threads)


def test_long_runs_are_the_same_as_short_ones() -> None:
    """More images than are worked on at a time."""
    images, items = make_images(150, 32, 32, 3), torch.arange(150)
    for name in CORRUPTIONS:
        assert torch.equal(
            corrupt(images, name, 5, items, SEED)[140:], corrupt(images[140:], name, 5, items[140:], SEED)
        )


def test_mixed_gives_each_image_its_own() -> None:
    images, items = make_images(30, 32, 32, 3), torch.arange(30) + 100
    kinds = torch.arange(30) * 7 % 15
    mixed = corrupt_mixed(images, kinds, 3, items, SEED)
    for i, kind in enumerate(kinds.tolist()):
        assert torch.equal(mixed[i], corrupt(images[i : i + 1], CORRUPTIONS[kind], 3, items[i : i + 1], SEED)[0])


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_draws_follow_seed_and_item(name: str) -> None:
    images, items = make_images(1, 32, 32, 3).expand(4, -1, -1, -1), torch.arange(4)
    out = corrupt(images, name, 5, items, SEED)
    assert torch.equal(out, corrupt(images, name, 5, items, SEED))
    assert torch.equal(out[0], out[1]) == (name in CONSTANT)
    assert torch.equal(out, corrupt(images, name, 5, items, SEED + 1)) == (name in CONSTANT)


def test_inputs_are_left_alone() -> None:
    images, items = make_images(3, 32, 32, 3), torch.arange(3)
    before = images.clone()
    for name in CORRUPTIONS:
        corrupt(images, name, 5, items, SEED)
        assert torch.equal(images, before), name


# By the constants of CIFAR-10-C, these do not change an image more and more: elastic_transform has its strongest affine
# part at severity 1, glass_blur smooths more from 2 to 3 and from 4 to 5, frost darkens what it whitens from 3 on.
UNSTEADY = ("glass_blur", "frost", "elastic_transform")


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name not in UNSTEADY])
def test_strength_grows_with_severity(name: str) -> None:
    images, items = make_images(48, 32, 32, 3), torch.arange(48)
    changes = [change(images, corrupt(images, name, severity, items, SEED)) for severity in range(1, 6)]
    assert changes == sorted(changes), changes


@pytest.mark.parametrize("name", UNSTEADY)
def test_strength_goes_up_and_down_as_in_the_literal_version(name: str) -> None:
    images, items = make_images(24, 32, 32, 3), torch.arange(24)
    changes = [change(images, corrupt(images, name, severity, items, SEED)) for severity in range(1, 6)]
    literal = [change(images, judge(images, name, severity, items)) for severity in range(1, 6)]
    assert changes == pytest.approx(literal, abs=0.01)
    assert np.argsort(changes).tolist() == np.argsort(literal).tolist() != [0, 1, 2, 3, 4]


def test_noise_has_the_right_moments() -> None:
    images, items = torch.full((64, 32, 32, 3), 102, dtype=torch.uint8), torch.arange(64)
    for name, spread in (("gaussian_noise", 0.1 * 255), ("shot_noise", (0.4 / 50) ** 0.5 * 255)):
        values = corrupt(images, name, 5, items, SEED).float()
        assert values.mean().item() == pytest.approx(101.5, abs=0.3)  # cutting takes half a level, give or take
        assert values.std().item() == pytest.approx(spread, rel=0.01)
    values = corrupt(images, "impulse_noise", 5, items, SEED)
    for value in (0, 255):
        assert (values == value).float().mean().item() == pytest.approx(0.035, rel=0.05)


def test_brightness_never_darkens() -> None:
    images, items = make_images(8, 32, 32, 3), torch.arange(8)
    assert (corrupt(images, "brightness", 1, items, SEED) >= images).all()


def test_contrast_keeps_the_mean() -> None:
    images, items = make_images(8, 32, 32, 3), torch.arange(8)
    after = corrupt(images, "contrast", 5, items, SEED).float().mean((1, 2))
    assert (after + 0.5 - images.float().mean((1, 2))).abs().max() < 0.5


FLAT = ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "contrast", "elastic_transform", "pixelate")


@pytest.mark.parametrize("name", [*FLAT, "jpeg_compression"])
def test_flat_images_stay_flat(name: str) -> None:
    levels = torch.arange(0, 256, dtype=torch.uint8)[:, None, None, None].expand(-1, 16, 16, 3)
    out = corrupt(levels, name, 5, torch.arange(256), SEED)
    assert (out.int() - levels.int()).abs().max() <= (name == "jpeg_compression")
    assert torch.equal(out, out[:, :1, :1].expand_as(out))


def test_motion_goes_along_its_angle() -> None:
    """A point leaves a trail of the same light in all, on the side that looks towards it, within 45 degrees."""
    images = torch.zeros((16, 33, 33, 1), dtype=torch.uint8)
    images[:, 16, 16] = 255
    out = corrupt(images, "motion_blur", 5, torch.arange(16), SEED)[..., 0].float()
    assert (out[:, :, 17:] == 0).all()
    assert (out.sum((1, 2)) - 255).abs().max() < 7  # a dozen roundings
    y, x = torch.meshgrid(torch.arange(33.0), torch.arange(33.0), indexing="ij")
    assert ((y - 16).abs() <= 16 - x + 1)[(out > 0).any(0)].all()


def test_frost_textures_look_like_frost() -> None:
    textures = make_frost()
    assert textures.shape == (5, SIZE, SIZE, 3)
    for texture in textures.float():
        assert 100 < texture.mean() < 140
        assert 40 < texture.std() < 80
        red, _, blue = texture.mean((0, 1)).tolist()
        assert blue > red
    assert len({texture.numpy().tobytes() for texture in textures}) == 5


def test_frost_photographs_are_read_and_used(tmp_path) -> None:
    random = np.random.default_rng(0)
    for number, suffix in enumerate(("png", "png", "png", "jpg", "jpg", "jpg")):
        pixels = random.integers(0, 256, (300 + 50 * number, 250, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"frost{number + 1}.{suffix}")
    (tmp_path / "notes.txt").write_text("not a photograph")
    textures = load_frost(tmp_path)
    assert [texture.shape for texture in textures] == [(60 + 10 * number, 50, 3) for number in range(5)]
    middle = np.asarray(Image.open(tmp_path / "frost1.png"))[2::5, 2::5]  # the centre of each five by five
    assert np.array_equal(textures[0].numpy(), middle)
    images, items = make_images(12, 32, 32, 3), torch.arange(12)
    arrays = [texture.numpy() for texture in textures]
    expected = [oracles.corrupt_one(images[i].numpy(), "frost", 5, i, SEED, arrays) for i in range(12)]
    assert change(corrupt(images, "frost", 5, items, SEED, textures), torch.from_numpy(np.stack(expected))) < 1e-3
    with pytest.raises(InputError, match="must be larger than the images"):
        corrupt(make_images(1, 64, 64, 3), "frost", 5, items[:1], SEED, textures)


def test_frost_photographs_that_are_not_there(tmp_path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        load_frost(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no png or jpg"):
        load_frost(tmp_path)
    (tmp_path / "frost1.png").write_bytes(b"not an image")
    with pytest.raises(InputError, match="is not a readable image"):
        load_frost(tmp_path)


def test_bad_input_is_refused() -> None:
    images, items = make_images(2, 32, 32, 3), torch.arange(2)
    with pytest.raises(InputError, match="did you mean motion_blur"):
        corrupt(images, "motionblur", 5, items, SEED)
    for severity in (0, 6, 2.5):
        with pytest.raises(InputError, match="1, 2, 3, 4 or 5"):
            corrupt(images, "fog", severity, items, SEED)
    for wrong in (images.float(), images[0], images[..., :2], images[:, :7]):
        with pytest.raises(InputError, match="images to corrupt must be uint8"):
            corrupt(wrong, "fog", 1, items, SEED)
    for wrong in (items[:1], items.int()):
        with pytest.raises(InputError, match="one int64 item per image"):
            corrupt(images, "fog", 1, wrong, SEED)
    with pytest.raises(InputError, match="one kind per image"):
        corrupt_mixed(images, torch.tensor([0, 15]), 1, items, SEED)


def test_every_corruption_is_in_the_table_in_order() -> None:
    assert tuple(TABLE) == CORRUPTIONS
    assert all(len(values) == 5 for entry in TABLE.values() for values in entry.settings.values())


def test_no_images_are_no_trouble() -> None:
    nothing = torch.empty((0, 32, 32, 3), dtype=torch.uint8)
    for name in CORRUPTIONS:
        assert corrupt(nothing, name, 5, torch.arange(0), SEED).shape == nothing.shape
