"""From settings to methods and federations. Whatever is wrong with the settings is refused here."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ..config import Config
from ..data import load_dataset
from ..data.plan import build
from ..data.pool import Pool
from ..engine.pick import pick_engine
from ..engine.shards import Shards
from ..engine.visit import Run
from ..errors import Failed, InputError, code_of_a_method
from ..fingerprint import fingerprint
from ..methods.base import Method, describe, find_sender
from ..methods.make import check_methods, make_methods
from ..store import content_hash
from ..text import find_nearest, flatten
from .work import Work

get_engine = lru_cache(maxsize=1)(pick_engine)  # with its compiled programs, for the next runs of the process


def prepare(config: Config) -> tuple[dict[str, Method], list[Work]]:
    """The methods, and the federation of every seed."""
    engine = get_engine(config.engine, config.device, config.precision, config.threads)
    check_methods(config)
    dataset = load_dataset(config.dataset, natural=config.natural, size=config.size)
    moments = dataset.pool.moments if config.standardize else None
    methods = make_methods(config, len(dataset.pool.classes), *_check_images(dataset.pool, config), moments)
    federations = [build(dataset, config.settings(seed)) for seed in config.seeds]
    tests = pick_tests(config, federations[0].tests)
    every = [each for name, method in methods.items() for each in _check_method(name, method)]
    code = {method: found for method in every if (found := fingerprint(method))}
    if code:
        engine.release()  # what was compiled may be of code that has been edited since
    return methods, [
        Work(config, config.folder, engine, each, Run(each.settings.seed, Shards(each, engine.device)), tests, code)
        for each in federations
    ]


def _check_method(name: str, method: Method) -> tuple[Method, Method]:
    """A method and what it trains as, if both can be told apart from others and be filed."""
    try:
        with code_of_a_method():
            parts = method, method.trains_as()
            find_sender(method)
        for part in parts:
            content_hash(describe(part))
    except (Failed, TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be filed by its hyperparameters: {flatten(error, 200)}.") from None
    for part in parts:
        if "__eq__" not in vars(type(part)) and "__annotations__" in vars(type(part)):
            raise InputError(f"{name}: {type(part).__name__} has fields, so it must be a dataclass with eq.")
    return parts


def _check_images(pool: Pool, config: Config) -> tuple[int, int]:
    """The channels and the side of the pool's images, if networks can take them."""
    _, height, width, channels = pool.images.shape
    if height != width:
        raise InputError(f"{pool.name} has images of {height} x {width}; networks need square ones, so set size.")
    if config.crop >= height:
        raise InputError(f"crop must be less than the {height} pixels of a side, but is {config.crop}.")
    return channels, height


def pick_tests(config: Config, known: Iterable[str]) -> list[str]:
    """Those of the known tests that an experiment asks for, in their order."""
    known = list(known)
    for test in config.tests or ():
        if test not in known:
            raise InputError(f"there is no test {test!r} here; {find_nearest(test, known)}")
    return [test for test in known if config.tests is None or test in config.tests]
