"""Views drawn by the Triton kernel against those drawn by torch.

Without a GPU, Triton's interpreter runs the kernel on the CPU, one view in some 50 ms. Without Triton, what needs none
is tested.
"""

import numpy as np
import pytest
import torch

from fedthe import rng
from fedthe.data import augment
from fedthe.data.augment import augmix, augmix_rows, read_draws
from fedthe.errors import InputError
from fedthe.kernels.augmix_recipe import OPS, WORDS
from helpers import make_images
from stacked_layers import CUDA, TRITON

if TRITON:
    import triton
    import triton.language as tl

    from fedthe.kernels.augmix import _words, draw_views

    @triton.jit
    def write_words(keys, items, out, views):
        """The words of a view from one key."""
        image, view = tl.program_id(0), tl.program_id(1)
        words = _words(tl.load(keys), tl.load(keys + 1), tl.load(items + image), view)
        tl.store(out + (image * views + view) * 16 + tl.arange(0, 16), words.to(tl.int64))


DEVICE = "cuda" if CUDA else "cpu"
PATH = (5, "views", 0)
# The interpreter rounds a product before it adds to it, where a GPU and torch on most CPUs do not: a value that is
# nearly whole may be cut to the level above or below it, and a later operation may make more of a level.
OFF = 1e-3

needs_triton = pytest.mark.skipif(not TRITON, reason="Triton is not installed")


def make_keys(paths: list[tuple[int | str, ...]]) -> torch.Tensor:
    """[paths, 2]"""
    return torch.tensor([rng.key(*path, "augmix") for path in paths], dtype=torch.int64).view(-1, 2)


def draw(images: torch.Tensor, items: torch.Tensor, views: int) -> torch.Tensor:
    """[n, views, h, w, c] by the kernel, copied to the CPU"""
    keys = make_keys([PATH]).expand(len(images), 2)
    return draw_views(images.to(DEVICE), keys.to(DEVICE), items.to(DEVICE), views).cpu()


def make_items(n: int) -> torch.Tensor:
    """Some need more than 32 bits."""
    return torch.arange(n) * 7 + (torch.arange(n) % 2) * (2**40 + 2**31)


def expect(images: torch.Tensor, items: torch.Tensor, views: int) -> torch.Tensor:
    return augment._draw_key(images, rng.key(*PATH, "augmix"), items, views).movedim(2, 4)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for a few pixels; views as [..., h, w, c]"""
    assert found.shape == expected.shape
    gap = (found - expected).abs() * 127.5
    assert (gap > 1e-3).float().mean() < OFF
    assert (gap.flatten(-3).amax(-1) == 0).float().mean() > 0.9  # of the views


@needs_triton
@pytest.mark.parametrize(
    ("shape", "n"), [((16, 16, 3), 6), ((16, 16, 1), 3), ((32, 32, 3), 2), ((28, 28, 1), 2), ((9, 33, 3), 2)]
)
def test_views_are_those_that_torch_draws(shape, n):
    n, views = (200, 48) if CUDA else (n, 12)
    images, items = make_images(n, *shape, noise=20), make_items(n)
    images[0] //= 64  # few levels: what equalize and autocontrast stumble on
    images[-1] = 77
    assert_near(draw(images, items, views), expect(images, items, views))


def test_every_operation_occurs_at_every_step():
    """In the first case above, which would prove little otherwise."""
    draws = read_draws(rng.words(rng.key(*PATH, "augmix"), make_items(6).numpy(), 12 * WORDS).reshape(-1, WORDS))
    live = np.arange(3) < draws.depth[..., None]
    seen = {(step, op) for _, _, step, op in zip(*np.nonzero(live), draws.op[live], strict=True)}
    assert seen == {(step, op) for step in range(3) for op in range(len(OPS))}


@needs_triton
@pytest.mark.parametrize("side", [pytest.param(64, id="64 x 64"), pytest.param(8, id="8 x 8")])
def test_the_largest_and_the_smallest(side):
    images, items = make_images(1, side, side, 3), torch.tensor([3])
    assert_near(draw(images, items, 3), expect(images, items, 3))


@needs_triton
def test_words_are_those_of_rng():
    items, views = torch.tensor([0, 1, 2**31 + 3, 2**32 - 1, 2**40 + 5, 2**62 + 7]), 5
    for path in (PATH, (1, "x"), (2,)):
        found = torch.empty(len(items), views * WORDS, dtype=torch.int64, device=DEVICE)
        write_words[(len(items), views)](make_keys([path]).to(DEVICE), items.to(DEVICE), found, views)
        expected = rng.words(rng.key(*path, "augmix"), items.numpy(), views * WORDS)
        assert torch.equal(found.cpu(), torch.from_numpy(expected))


@needs_triton
def test_a_sample_has_its_own_views_whatever_its_neighbours_and_their_number():
    images, items = make_images(3, 16, 16, 3), torch.tensor([4, 2**33, 9])
    whole = draw(images, items, 5)
    order = torch.tensor([2, 0])
    assert torch.equal(draw(images[order], items[order], 5), whole[order])
    assert torch.equal(draw(images[1:2], items[1:2], 2)[0], whole[1, :2])
    spread = images.new_zeros(3, 32, 32, 6)[:, ::2, ::2, ::2].copy_(images)
    assert torch.equal(draw(spread, items, 2), whole[:, :2])


@needs_triton
def test_views_are_float32_from_minus_1_to_1():
    images, items = make_images(2, 16, 8, 3), torch.arange(2)
    found = draw(images, items, 3)
    assert found.dtype == torch.float32
    assert found.abs().max() <= 1
    assert draw(images[:0], items[:0], 3).shape == (0, 3, 16, 8, 3)


@needs_triton
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_cuda_graph_can_hold_it():
    images, items = make_images(64, 32, 32, 3).cuda(), torch.arange(64).cuda()
    keys = make_keys([PATH]).expand(64, 2).contiguous().cuda()
    expected = augmix_rows(images, keys, items, 6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = augmix_rows(images, keys, items, 6)
    images.copy_(images.flip(0))
    items.copy_(items.flip(0))
    graph.replay()
    assert torch.equal(found, expected.flip(0))


@pytest.mark.parametrize("device", [DEVICE])
def test_rows_with_keys_of_their_own_are_drawn_as_by_key(device):
    paths = [PATH, (5, "views", 1), PATH, (6,), (5, "views", 1)]
    images, items = make_images(5, 16, 24, 3).to(device), torch.tensor([3, 3, 2**40, 0, 1], device=device)
    found = augmix_rows(images, make_keys(paths).to(device), items, 4)
    assert found.shape == (5, 4, 3, 16, 24)
    assert found.movedim(2, 4).is_contiguous()
    for row, path in enumerate(paths):
        assert torch.equal(found[row], augmix(images[row : row + 1], path, items[row : row + 1], 4)[0])
    assert augmix_rows(images[:0], make_keys([]).to(device), items[:0], 4).shape == (0, 4, 3, 16, 24)


@needs_triton
def test_rows_go_through_the_kernel_where_there_is_one(monkeypatch):
    paths = [PATH, (6,), PATH]
    images, items = make_images(3, 16, 16, 3), torch.tensor([3, 3, 2**40])
    by_torch = augmix_rows(images, make_keys(paths), items, 4)
    monkeypatch.setattr("fedthe.kernels.interpreting", not CUDA)
    if CUDA:
        images, items = images.cuda(), items.cuda()
    found = augmix_rows(images, make_keys(paths), items, 4)
    assert found.movedim(2, 4).is_contiguous()
    assert_near(found.cpu().movedim(2, 4), by_torch.movedim(2, 4))
    for row, path in enumerate(paths):
        assert torch.equal(found[row], augmix(images[row : row + 1], path, items[row : row + 1], 4)[0])


@pytest.mark.parametrize(
    "keys", [torch.zeros(2, 2), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)]
)
def test_keys_that_do_not_fit_are_refused(keys):
    with pytest.raises(InputError, match="a key of two int64 words"):
        augmix_rows(torch.zeros(2, 8, 8, 3, dtype=torch.uint8), keys, torch.arange(2), 4)
