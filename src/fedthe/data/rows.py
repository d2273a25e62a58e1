"""Labelled rows as users have them: arrays of NumPy or torch, a torch Dataset, or an object with columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from ..foreign import explain
from ..text import clean, flatten

# Columns of the usual names, the first that is there; more than one is refused.
X_COLUMNS = ("x", "image", "img", "images", "features", "input_ids", "tokens", "pixel_values")
Y_COLUMNS = ("y", "label", "labels", "target", "targets", "fine_label")


@dataclass(frozen=True)
class Rows:
    where: str  # whose they are, for messages
    x: np.ndarray  # uint8 [n, h, w, 1 or 3], float32 [n, ...] or int64 [n, ...]
    y: np.ndarray  # whole numbers or strings [n]


def read_rows(where: str, given: Any) -> Rows:
    """One client's rows, checked."""
    x, y = _find_columns(where, given)
    return Rows(where, *_match(where, read_x(where, _as_array(where, x)), _read_y(where, _as_array(where, y))))


def read_x(where: str, x: np.ndarray) -> np.ndarray:
    """Pictures as uint8 [n, h, w, 1 or 3], features as float32, tokens as int64."""
    if x.ndim == 0 or 0 in x.shape:
        raise InputError(f"{where} has no rows: x is {x.dtype} {list(x.shape)}.")
    if x.dtype == np.uint8:
        x = x[..., None] if x.ndim == 3 else x
        if x.ndim == 4 and x.shape[3] not in (1, 3) and x.shape[1] in (1, 3):
            raise InputError(f"{where} has pictures {list(x.shape)}; put channels last, as in x.permute(0, 2, 3, 1).")
        if x.ndim != 4 or x.shape[3] not in (1, 3):
            raise InputError(
                f"{where}: x of uint8 must be pictures [n, h, w] or [n, h, w, 1 or 3], but is {list(x.shape)}; "
                "make features float and tokens int64."
            )
        return x
    if x.dtype.kind in "iu":
        if x.dtype.kind == "u" and x.max() > np.iinfo(np.int64).max:
            raise InputError(f"{where} has tokens up to {x.max()}, too large for int64.")
        return x.astype(np.int64)
    if x.dtype.kind not in "fb":
        raise InputError(f"{where}: x must be numbers, but is {x.dtype} {list(x.shape)}.")
    with np.errstate(over="ignore"):
        features = x.astype(np.float32)
    if not np.isfinite(features).all():
        row = int(np.argwhere(~np.isfinite(features))[0][0])
        raise InputError(f"{where} has a feature that is not finite, in row {row}; remove or fill it.")
    return features


def _read_y(where: str, y: np.ndarray) -> np.ndarray:
    if y.dtype.kind == "f" and (y == np.round(y)).all():
        y = y.astype(np.int64)
    if y.ndim != 1 or y.dtype.kind not in "iuU":
        raise InputError(f"{where}: labels must be whole numbers or names [n], but are {y.dtype} {list(y.shape)}.")
    return y


def _match(where: str, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(x) != len(y):
        raise InputError(f"{where} has {len(x)} samples and {len(y)} labels; there must be as many.")
    return x, y


def _find_columns(where: str, given: Any) -> tuple[Any, Any]:
    if isinstance(given, tuple | list) and len(given) == 2:
        return given[0], given[1]
    names = (
        list(given) if isinstance(given, Mapping) else getattr(given, "column_names", getattr(given, "columns", None))
    )
    names = names if names is None or isinstance(names, str) else _list(names)
    if isinstance(names, list):
        return given[_pick(where, names, X_COLUMNS, "samples")], given[_pick(where, names, Y_COLUMNS, "labels")]
    if hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, str | np.ndarray):
        return _read_items(where, given)
    raise InputError(
        f"{where} must be (x, y), a torch Dataset, or an object with columns, not a {type(given).__name__}."
    )


def _list(names: Any) -> Any:
    try:
        return list(names)
    except TypeError:
        return None


def _pick(where: str, names: Sequence[Any], wanted: Sequence[str], what: str) -> str:
    found = [name for name in wanted if name in names]
    if len(found) != 1:
        listed = flatten(", ".join(clean(str(name)) for name in names), 200)
        raise InputError(
            f"{where} has {'several columns' if found else 'no column'} of {what} (its columns are {listed}); "
            f"give (x, y), or name it {wanted[0]!r}."
        )
    return found[0]


def _read_items(where: str, given: Any) -> tuple[list[Any], list[Any]]:
    """A torch Dataset, of which item i is (x, y)."""
    xs, ys = [], []
    for i in range(len(given)):
        item = given[i]
        if not (isinstance(item, tuple | list) and len(item) == 2):
            raise InputError(f"{where}: item {i} must be (x, y), not a {type(item).__name__}.")
        xs.append(_as_array(where, item[0]))
        ys.append(item[1] if isinstance(item[1], int | str) else _as_array(where, item[1])[()])
    return xs, ys


def _as_array(where: str, value: Any) -> np.ndarray:
    """From NumPy, torch, a picture of Pillow, or a list of them."""
    if hasattr(value, "detach"):  # a tensor
        with explain(f"{where} is not a dense tensor of numbers that NumPy has", "convert it to float32 or int64"):
            value = value.detach().cpu().numpy()
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"{where} is a masked array; fill or remove what is masked.")
    if isinstance(value, list) and value and (hasattr(value[0], "detach") or hasattr(value[0], "getbands")):
        value = [_as_array(where, each) for each in value]
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:  # samples of different shapes
        raise InputError(f"{where} is not an array ({flatten(error, 100)}); all samples need one shape.") from None
    if array.dtype.kind == "O":
        raise InputError(f"{where} holds objects, not numbers; all samples need one shape and type.")
    return array
