"""Encoded images, read without trusting them: only formats that datasets use, and up to a number of pixels."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..errors import InputError
from ..foreign import explain

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")

# The content decides, not the file's name. None of these starts another program, as EPS does (Ghostscript).
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
PIXELS = 80_000_000  # of one image, according to its header
BYTES = 1 << 28  # of one file


def decode_image(name: str, read: Callable[[], bytes], use: Callable[[Image], Result]) -> Result:
    """`use` of the image that `read` returns, or of its first frame; errors call the image `name`."""
    from PIL import Image, UnidentifiedImageError

    with explain(f"{name} is not a readable image", "replace or remove it"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd metadata; the pixels may still be fine
        warnings.simplefilter("error", Image.DecompressionBombWarning)  # of a lower limit that the user has set
        try:
            with Image.open(io.BytesIO(read()), formats=FORMATS) as image:
                if image.width * image.height > PIXELS:
                    raise Image.DecompressionBombError
                if not image.width * image.height:
                    raise ValueError("it has no pixels")
                image.load()
                return use(image)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise InputError(f"{name} has too many pixels to be opened safely; make it smaller or remove it.") from None
        except (UnidentifiedImageError, KeyError):  # their messages name an object in memory, or a decoder
            known = ", ".join(FORMATS)
            raise InputError(f"{name} is not a readable image (no {known}); convert, replace or remove it.") from None
