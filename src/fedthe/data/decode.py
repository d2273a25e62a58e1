"""Encoded images, read without trusting them: by formats that datasets use, and only up to a number of pixels."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..errors import InputError
from ..foreign import say_error

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")

# What is in the file decides, not its name. None of these starts another program, as EPS does (Ghostscript).
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
PIXELS = 80_000_000  # of one image, told by its header
BYTES = 1 << 28  # of one file


def decode_image(name: str, read: Callable[[], bytes], use: Callable[[Image], Result]) -> Result:
    """What `use` makes of the image that `read` gives, the first frame if it has several; `name` takes the blame."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata; the pixels still count
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # of a lower limit that the user has set
            with Image.open(io.BytesIO(read()), formats=FORMATS) as image:
                if image.width * image.height > PIXELS:
                    raise Image.DecompressionBombError
                if not image.width * image.height:
                    raise ValueError("it has no pixels")
                image.load()
                return use(image)
    except InputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InputError(f"{name} has too many pixels to be opened safely; make it smaller or remove it.") from None
    except (
        UnidentifiedImageError,
        KeyError,
    ):  # their texts name an object in memory, or a decoder
        known = ", ".join(FORMATS)
        raise InputError(f"{name} is not a readable image (no {known}); convert, replace or remove it.") from None
    except Exception as error:  # Pillow's decoders raise whatever a damaged file leads them to
        raise InputError(f"{name} is not a readable image ({say_error(error)}); replace or remove it.") from None
