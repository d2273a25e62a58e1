"""The kernels of norms, on their own."""

from fedthe.kernels.shapes import Norm
from stacked_layers import assert_close, by_kernels, draw, norm_layer


@by_kernels
def test_group_norm_in_blocks_of_pixels_and_of_images(place, monkeypatch):
    from fedthe.kernels import norm

    x, weight, bias = norm_layer((3, 6, 5, 7, 3), 2, place)
    g, residual = (draw(2, 3, 6, 5, 7, seed=seed, device=place) for seed in (3, 4))
    for how, more in ((Norm(3, 1e-5), None), (Norm(3, 1e-5, residual=True, relu=True), residual)):
        made = norm.group_norm(x, weight, bias, more, how)

        def both(tiles, made=made, more=more, how=how):
            seen = (*made[1:], made[0] if how.relu else None)
            there = norm.group_norm(x, weight, bias, more, how, tiles)
            return [*there, *norm.group_norm_grad(g, x, weight, bias, *seen, how, tiles)]

        want = both(None)
        assert len(want) == 6 + how.residual
        assert all(t.permute(0, 1, 3, 4, 2).is_contiguous() for t in (want[0], want[3], *want[6:]))
        assert want[1].shape == want[2].shape == (2, 3, 3)
        assert want[4].is_contiguous()  # as weight and bias are: an update of all leaves at once wants that
        assert want[5].is_contiguous()
        with monkeypatch.context() as patch:
            patch.setattr(norm, "IMAGES_BLOCK", 2)
            for tiles in (norm.NormTiles(8, 1), norm.NormTiles(32, 4)):
                assert_close(both(tiles), want)
