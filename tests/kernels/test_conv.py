"""The kernels of convolutions, on their own."""

import dataclasses
import itertools

import pytest

from fedthe.kernels.conv_tiles import Tiles, conv_tiles, weight_grad_tiles
from fedthe.kernels.shapes import Geometry
from stacked_layers import BF16, CONVOLUTIONS, assert_close, by_kernels, conv_layer, draw


@by_kernels
def test_any_tiles_give_the_same(place):
    from fedthe.kernels.conv import conv, conv_input_grad
    from fedthe.kernels.conv_weight_grad import conv_weight_grad

    x, w = draw(2, 2, 16, 6, 6, device=place), draw(2, 24, 16, 3, 3, device=place)
    how = Geometry((3, 3), (2, 2), (1, 1), (6, 6))
    g = draw(2, 2, 24, 3, 3, device=place)
    want = [conv(x, w, how), conv_input_grad(g, w, how), conv_weight_grad(x, g, how)[0]]
    for tiles, splits in (((64, 16, 16, 4, 2), 2), ((64, 32, 32, 4, 2), 1), ((32, 32, 64, 8, 3), 3)):
        cut = Tiles(*tiles)
        got = [conv(x, w, how, cut), conv_input_grad(g, w, how, cut)]
        assert_close([*got, *conv_weight_grad(x, g, how, cut, splits)], want)


@pytest.mark.parametrize("pixels", [2, 4])
@pytest.mark.parametrize("case", [case for case in CONVOLUTIONS if case[1] != 32])
@by_kernels
def test_pixels_side_by_side_in_one_row_give_the_same(case, pixels, place):
    from fedthe.kernels.conv import conv, conv_input_grad
    from fedthe.kernels.conv_weight_grad import conv_weight_grad

    n, _, h, w, o, kernel, stride, padding = case
    how = Geometry(kernel, stride, padding, (h, w))
    x, weight = conv_layer(case, 2, place)
    g = draw(2, n, o, *how.out, seed=3, device=place)
    how = dataclasses.replace(how, bias=True)

    def every(cut, splits):
        gradients = conv_weight_grad(x, g, how, cut, splits)
        return conv(x, weight, how, cut), conv_input_grad(g, weight, how, cut), *gradients

    want = every(None, None)
    for k, splits in ((16, 1), (64, 2)):
        assert_close(every(Tiles(32, 16, k, 4, 1, pixels), splits), want)


def test_few_registers_only_where_sums_leave_room():
    for c, o in itertools.product((4, 16, 32), (8, 16, 32, 48, 64, 128)):
        for tiles in (conv_tiles(2**14, c, o, 9, BF16, 2), weight_grad_tiles(2**14, c, o, 9, BF16, 2)):
            sums = tiles.m * tiles.n // (32 * tiles.warps)
            assert tiles.registers is None or tiles.registers >= 2 * sums


@by_kernels
def test_results_lie_with_channels_last(place):
    from fedthe.kernels.conv import conv, conv_input_grad

    x, w = draw(2, 2, 4, 4, 4, device=place), draw(2, 8, 4, 1, 1, device=place)
    how = Geometry((1, 1), (1, 1), (0, 0), (4, 4))
    y = conv(x, w, how)
    assert y.permute(0, 1, 3, 4, 2).is_contiguous()
    assert conv_input_grad(y, w, how).permute(0, 1, 3, 4, 2).is_contiguous()
