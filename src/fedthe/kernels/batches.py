"""Cut the batches of all clients from their images at once."""

from __future__ import annotations

import torch
from torch import Tensor

from .compiler import Block, constexpr, jit, tl
from .shapes import cdiv

BATCH_BLOCK = 1024  # values of a batch per program


@jit
def _cut_kernel(
    images: Block,
    rows: Block,
    down: Block,
    right: Block,
    mirrored: Block,
    out: Block,
    step: Block,
    batch: Block,
    H: constexpr,
    W: constexpr,
    C: constexpr,
    PAD: constexpr,
    BLOCK: constexpr,
) -> None:
    """One program: a block of values of one image of the batch."""
    tiles = (H * W * C + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    which = (pid // tiles).to(tl.int64)  # image, over all clients' batches
    at = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    real = at < H * W * C
    y = at // (W * C) + tl.load(down + which).to(tl.int32) - PAD
    z = at // C % W + tl.load(right + which).to(tl.int32) - PAD
    ok = real & (y >= 0) & (y < H) & (z >= 0) & (z < W)
    z = tl.where(tl.load(mirrored + which) != 0, W - 1 - z, z)  # flipped first, then cut
    source = images + which // batch * step + tl.load(rows + which).to(tl.int64) * (H * W * C)
    value = tl.load(source + ((y * W + z) * C + at % C), mask=ok, other=0).to(tl.float32)
    value = value * (1 / 127.5) - 1
    tl.store(out + (which * (H * W * C) + at), value.to(out.dtype.element_ty), mask=real)


def cut_batches(
    images: Tensor, rows: Tensor, down: Tensor, right: Tensor, mirrored: Tensor, pad: int, out: Tensor
) -> None:
    """uint8 images [S, n, h, w, c] to out [S, b, h, w, c] in [-1, 1], with the bits of `fit.cut_batches_plainly`.

    The others are [S, b]: `rows` picks images, `mirrored` says which to flip first, and `down` and `right`, from 0 to
    2 pad, where to cut them from a frame of `pad` black pixels.
    """
    stack, _, height, width, c = images.shape
    batch = rows.shape[1]
    images = images.contiguous()
    if not out.is_contiguous() or out.shape != (stack, batch, height, width, c):
        raise ValueError("out must be contiguous [S, b, h, w, c].")
    grid = (stack * batch * cdiv(height * width * c, BATCH_BLOCK),)
    cuts = (rows.contiguous(), down.contiguous(), right.contiguous(), mirrored.contiguous().view(torch.uint8))
    shape = {"H": height, "W": width, "C": c, "PAD": pad, "BLOCK": BATCH_BLOCK}
    with torch.cuda.device_of(images):
        # Without fusion the product is rounded before 1 is subtracted, as in torch.
        _cut_kernel[grid](images, *cuts, out, images[0].numel(), batch, **shape, enable_fp_fusion=False)
