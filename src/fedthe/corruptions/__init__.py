"""The fifteen corruptions of CIFAR-10-C, for batches of images.

Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions and perturbations", ICLR 2019,
https://arxiv.org/abs/1903.12261. The constants are those of CIFAR-10-C.

`table.py` lists each corruption with its function and its settings. To add one, write its function in the module of its
kind, add it to that table, and append its name to CORRUPTIONS below. (Every test row then draws its corruption anew.)

The result for an image does not depend on the rest of the batch, the batch size, the order or the number of threads:
- every draw is keyed only by (seed, "corrupt", name) and the image's item;
- where a library picks the order of a sum, the terms are integers below 2**24, which float32 holds exactly;
- all other arithmetic is one rounded elementwise operation at a time, so that nothing is fused on one path only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..parallel import map_in_threads
from ..progress.events import track
from ..text import find_nearest

if TYPE_CHECKING:
    from torch import Tensor

CORRUPTION_VERSION = 1  # raise it when pixels change, so that cached images are computed again
# The order is part of the benchmark: a test row draws its corruption by position. Only names, so torch is not needed.
CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)


def corrupt(
    images: Tensor, name: str, severity: int, items: Tensor, seed: int, frost: Iterable[Tensor] | None = None
) -> Tensor:
    """Apply the corruption `name` at `severity` 1 to 5 to `images`, uint8 [n, height, width, 1 or 3].

    `items`, int64 [n], identifies the sample behind each image; random draws depend on it. `frost` holds textures,
    uint8 [height, width, 3] each (see `data.frost.load_frost`); by default, they are generated.
    """
    import torch

    from .frost import enlarge_frost, make_frost
    from .shared import GROUPED, ItemDraws, check_images, values_at_a_time
    from .table import TABLE

    if name not in TABLE:
        raise InputError(f"there is no corruption {name!r}; {find_nearest(str(name), CORRUPTIONS)}")
    if severity not in range(1, 6):
        raise InputError(f"the severity of a corruption is 1, 2, 3, 4 or 5, not {severity!r}.")
    check_images(images, items, "corrupt")
    entry = TABLE[name]
    setting: dict[str, Any] = {key: values[severity - 1] for key, values in entry.settings.items()}
    if name == "frost":
        textures = enlarge_frost(make_frost(), max(images.shape[1:3])) if frost is None else frost
        setting["textures"] = [texture.to(images.device) for texture in textures]
    step = max(1, (GROUPED if entry.grouped else values_at_a_time(images.device)) // max(1, images[:1].numel()))
    done = torch.empty_like(images, memory_format=torch.contiguous_format)
    for start in range(0, len(images), step):
        part = slice(start, start + step)
        draws = ItemDraws((seed, "corrupt", name), items[part].to(images.device))
        done[part] = entry.apply(images[part].contiguous(), draws, **setting)
    return done


def corrupt_mixed(
    images: Tensor, kinds: Tensor, severity: int, items: Tensor, seed: int, frost: Iterable[Tensor] | None = None
) -> Tensor:
    """Apply CORRUPTIONS[kinds[i]] to image i; `kinds` is int [n]."""
    import torch

    present: list[int] = torch.unique(kinds).tolist()
    if kinds.shape != images.shape[:1] or any(not 0 <= kind < len(CORRUPTIONS) for kind in present):
        raise InputError(f"there must be one kind per image, from 0 to {len(CORRUPTIONS) - 1}.")
    done = torch.empty_like(images)

    def corrupt_kind(kind: int) -> None:
        rows = (kinds == kind).nonzero().flatten().to(images.device)
        own = items[rows.to(items.device)]
        done[rows] = corrupt(images[rows], CORRUPTIONS[kind], severity, own, seed, frost)

    threads = torch.get_num_threads() if images.device.type == "cpu" else 1
    for _ in track("corrupting the test images", map_in_threads(corrupt_kind, present, threads), len(present)):
        pass
    return done
