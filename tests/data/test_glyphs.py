from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fedthe.data import glyphs
from fedthe.errors import InputError

FEW = {"n": 200, "n_shift": 60}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDTHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def forget(home):
    """Empties the cache."""

    def forget() -> None:
        for file in (home / "cache").iterdir():
            file.unlink()

    return forget


def same(left, right) -> bool:
    pairs = [(left.pool, right.pool), (left.natural["unseen-typefaces"], right.natural["unseen-typefaces"])]
    return all(np.array_equal(a.x, b.x) and np.array_equal(a.labels, b.labels) for a, b in pairs)


def test_shapes_names_and_balance():
    data = glyphs.load(**FEW)
    assert data.pool.name == "glyphs"
    assert list(data.natural) == ["unseen-typefaces"]
    for pool, n in ((data.pool, 200), (data.natural["unseen-typefaces"], 60)):
        assert pool.x.shape == (n, 32, 32, 3)
        assert pool.classes == glyphs.CLASSES
        assert np.bincount(pool.labels).tolist() == [n // 10] * 10
        assert not (pool.labels[:10] == pool.labels[10:20]).all()


def test_the_default_is_balanced_too():
    labels = glyphs._labels(glyphs.rng.key(0, "glyphs", "glyphs", "label"), 10_000)
    assert np.bincount(labels).tolist() == [1000] * 10


def test_the_same_twice_and_another_seed_differs(forget):
    first = glyphs.load(**FEW)
    forget()
    assert same(first, glyphs.load(**FEW))
    other = glyphs.load(seed=1, **FEW)
    assert (first.pool.x != other.pool.x).any(axis=(1, 2, 3)).all()


def test_an_image_does_not_depend_on_how_many_there_are(monkeypatch):
    few = glyphs.load(n=7, n_shift=3)
    monkeypatch.setattr(glyphs, "CHUNK", 64)
    many = glyphs.load(**FEW)
    assert np.array_equal(few.pool.x, many.pool.x[:7])
    assert np.array_equal(few.pool.labels, many.pool.labels[:7])
    shifts = few.natural["unseen-typefaces"], many.natural["unseen-typefaces"]
    assert np.array_equal(shifts[0].x, shifts[1].x[:3])


def test_the_cache_gives_what_was_made(home, monkeypatch):
    fresh = glyphs.load(**FEW)
    assert len(list((home / "cache").iterdir())) == 2
    monkeypatch.setattr(glyphs, "_render", None)  # whoever draws now fails
    assert same(fresh, glyphs.load(**FEW))


@pytest.mark.parametrize("damage", [lambda whole: whole[:-200], lambda whole: b"", lambda whole: b"x" * len(whole)])
def test_a_damaged_file_is_made_again(home, damage):
    fresh = glyphs.load(**FEW)
    for file in (home / "cache").iterdir():
        file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(UserWarning, match="is damaged .* It is computed again"):
        assert same(fresh, glyphs.load(**FEW))
    assert same(fresh, glyphs.load(**FEW))


def test_what_determines_an_image_is_in_the_key(home, monkeypatch):
    glyphs.load(n=10, n_shift=10)
    seen = 2
    for name, value in (("VERSION", 0), ("NOISE", (0.0, 0.0)), ("CLASSES", tuple("bcdfgijlno"))):
        monkeypatch.setattr(glyphs, name, value)
        glyphs.load(n=10, n_shift=10)
        seen += 2
        assert len(list((home / "cache").iterdir())) == seen


def test_no_family_of_the_shift_is_in_the_pool():
    def family(name: str) -> str:
        return "cm" if name.startswith("cm") else name.split("-")[0].removesuffix("Ita").removesuffix("Bol")[:11]

    pool, shift = ({family(name) for name in names} for names in (glyphs.POOL_TYPEFACES, glyphs.SHIFT_TYPEFACES))
    assert pool == {"DejaVuSans", "DejaVuSerif", "DejaVuSansM"}
    assert shift == {"STIXGeneral", "cm"}
    used = [file.stem for file in glyphs._font_files(glyphs.POOL_TYPEFACES)]
    assert used == list(glyphs.POOL_TYPEFACES)
    assert not set(used) & set(glyphs.SHIFT_TYPEFACES)


def test_every_typeface_has_every_character():
    # A font draws the same box for all the characters it lacks.
    for font in glyphs._font_files(glyphs.POOL_TYPEFACES + glyphs.SHIFT_TYPEFACES):
        drawn = [np.asarray(glyphs._character(font, character, 0)) for character in glyphs.CLASSES]
        for i, one in enumerate(drawn):
            assert one.max() == 255
            assert not one[[0, -1]].any()  # nothing is cut off at the edge
            assert not one[:, [0, -1]].any()
            rows, columns = np.flatnonzero(one.any(1)), np.flatnonzero(one.any(0))
            assert 62 <= max(np.ptp(rows), np.ptp(columns)) + 1 <= 67
            assert all((one != other).mean() > 0.02 for other in drawn[:i])


def test_pixels_are_varied():
    pool = glyphs.load(**FEW).pool
    assert pool.x.min() < 10
    assert pool.x.max() > 245
    assert 100 < pool.x.mean() < 155
    spread = pool.x.std(axis=(1, 2)).max(1)  # of the channel that shows most
    assert spread.min() > 4
    assert 20 < np.median(spread) < 70
    assert not (pool.x[..., 0] == pool.x[..., 1]).all(axis=(1, 2)).any()


def test_without_disturbances_an_image_is_the_plain_character(monkeypatch):
    still = {"TURN": 0.0, "SLANT": 0.0, "REACH": (1.0, 1.0), "WANDER": 0.0, "STROKES": (0,), "CONTRAST": (1.0, 1.0)}
    still |= {"TINT": 0.0, "TEXTURE": (0.0, 0.0), "BLUR": 0.0, "NOISE": (0.0, 0.0)}
    for name, value in still.items():
        monkeypatch.setattr(glyphs, name, value)
    monkeypatch.setattr(glyphs, "POOL_TYPEFACES", ("DejaVuSans",))
    pool = glyphs.load(n=10, n_shift=1).pool
    (font,) = glyphs._font_files(("DejaVuSans",))
    for image, label in zip(pool.x, pool.labels, strict=True):
        middle = glyphs._character(font, pool.classes[label], 0).crop((16, 16, 80, 80))
        plain = np.asarray(middle.resize((32, 32), Image.Resampling.BOX), dtype=int)
        assert (image == image[..., :1]).all()
        error = min(np.abs(image[..., 0] - plain).max(), np.abs(255 - image[..., 0] - plain).max())
        assert error <= 1


@pytest.mark.parametrize(("size", "channels"), [(28, 3), (48, 3)])
def test_other_sizes(size, channels):
    data = glyphs.load(size=size, n=20, n_shift=10)
    assert data.pool.x.shape[1:] == (size, size, channels)


@pytest.mark.parametrize("wrong", [{"size": 4}, {"n": 0}, {"n_shift": 0}])
def test_refusals(wrong):
    with pytest.raises(InputError, match="glyphs needs"):
        glyphs.load(**wrong)


def test_missing_fonts_are_named():
    with pytest.raises(InputError, match="install matplotlib again"):
        glyphs._font_files(("NoSuchFont",))
