"""Figures as PNG. A method or a test has the same colour in all of them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.partition import say_partition
from ..names import PROBE_NAMES, name_method
from ..pictures import save
from ..text import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Measured = Mapping[str, Any]

TEST_COLOURS = {
    "original": "#0072b2",
    "corrupted": "#d55e00",
    "natural": "#009e73",
    "ooc": "#aa4499",
    "mixture": "#222222",
    "corrupted_ooc": "#b8860b",
}
OTHER_TEST_COLOURS = ("#117733", "#44aa99", "#999933")  # of all other tests, in turn
METHOD_COLOURS = {
    "fedavg": "#888888",
    "fedavg_ft": "#56b4e9",
    "memo_p": "#0072b2",
    "t3a": "#009e73",
    "fedrod": "#e69f00",
    "fedrep": "#cc79a7",
    "fedthe": "#d62728",
    "fedthe_plus": "#7b1113",
}
OTHER_COLOURS = ("#332288", "#88ccee", "#ddcc77", "#882255", "#661100", "#6699cc")  # of all other methods, in turn
LINES = {  # styles and widths that keep overlapping curves visible: methods of one training often overlap
    "fedavg_ft": ("-", 3.0),
    "memo_p": ("--", 1.4),
    "t3a": (":", 1.8),
    "fedrod": ("-.", 1.4),
    "fedthe": ("-", 3.0),
    "fedthe_plus": ("--", 1.4),
}
PROBE_COLOURS = {"lp": "#56b4e9", "ft": "#e69f00", "lpft": "#7b1113"}
CLAIM = (1.5, 2.5)  # times fewer rounds, according to the paper
LONGEST = 5.0  # bars are cut here: a speed-up of 20 would hide those of 2
DEFAULT = 0.1  # of alpha and beta
MARKERS = "o^sDvPX*"


def draw_curves(measured: Measured, path: Path) -> None:
    """A panel for each test, with bands of one standard deviation, and one for the speed-up of our methods."""
    data, titles = measured["data"], measured["tests"]
    curves, rounds = data["curves"], data["rounds"]
    tests = [test for test in titles if any(test in scores for scores in curves.values())]
    looks = look_up(curves)
    count = len(tests) + bool(data["speed"])
    figure, axes = make_panels(count, columns=4 if count > 6 else 3)
    for panel, test in zip(axes, tests, strict=False):
        for method, (name, colour) in looks.items():
            mean, std = (np.array(curves[method][test][kind], float) for kind in ("mean", "std"))
            style, width = LINES.get(method, ("-", 1.4))
            panel.plot(rounds, mean, style, color=colour, label=name, lw=width)
            panel.fill_between(rounds, mean - std, mean + std, color=colour, alpha=0.08, lw=0)
        head(panel, measured, test)
        panel.set(xlabel="rounds", ylabel="accuracy (%)")
    if data["speed"]:
        _draw_speed(axes[len(tests)], data["speed"], looks)
    put_legend(figure, *axes[0].get_legend_handles_labels())
    finish(figure, measured, path, _say_spread(measured, "bands"))


def _draw_speed(panel: Axes, speed: Measured, looks: Mapping[str, tuple[str, str]]) -> None:
    baselines = list(next(iter(speed.values())))
    high = 0.8 / len(speed)
    panel.axvspan(*CLAIM, color="#dddddd", lw=0)
    panel.axvline(1, color="#888888", lw=0.8)
    for i, (ours, row) in enumerate(speed.items()):
        for j, baseline in enumerate(baselines):
            each, y = row[baseline], j + (i - (len(speed) - 1) / 2) * high
            at = min(each["ratio"] or 0.0, LONGEST)
            panel.barh(y, at, 0.9 * high, color=looks[ours][1])
            panel.text(at + 0.1, y, _say_speed(each), va="center", fontsize=7)
    panel.set_yticks(range(len(baselines)), [looks[baseline][0] for baseline in baselines], fontsize=8)
    panel.set(xlim=(0, 1.6 * LONGEST), ylim=(len(baselines) - 0.5, -0.5), xticks=range(int(LONGEST) + 1))
    panel.set_xlabel("times fewer rounds")
    claim = f"(grey: the paper's {CLAIM[0]:g} to {CLAIM[1]:g} times fewer)"
    panel.set_title(f"rounds to a baseline's final accuracy on mixture\n{claim}", fontsize=8.5)
    panel.spines[["top", "right"]].set_visible(False)


def _say_speed(each: Measured) -> str:
    if each["ratio"] is None:
        return "not reached"
    less, more = ("≤", "≥") if each["first"] else ("", "")
    return f"{more}{each['ratio']:.1f}x ({less}{each['rounds']:.0f} rounds)"


def draw_gains(measured: Measured, path: Path) -> None:
    """Bars by test and method: the gain over a baseline, or over frozen splits."""
    gains, baseline = measured["data"]["gains"], measured["data"].get("baseline")
    bars = {name: (colour, gains[method]) for method, (name, colour) in look_up(gains).items()}
    _draw_bars(measured, bars, f"points above {name_method(baseline) if baseline else 'frozen splits'}", path)


def draw_probing(measured: Measured, path: Path) -> None:
    """Bars by test and kind of fine-tuning."""
    accuracy = measured["data"]["accuracy"]
    bars = {PROBE_NAMES[mode]: (PROBE_COLOURS[mode], scores) for mode, scores in accuracy.items()}
    seen = ", ".join(clean(name, 20) for name in measured["data"]["seen"][:12])
    note = f"; pre-trained on {seen}; clients hold the other classes"
    _draw_bars(measured, bars, "accuracy (%)", path, note, f"{measured['config']['personal_epochs']} epochs")


def _draw_bars(
    measured: Measured,
    bars: Mapping[str, tuple[str, Measured]],  # by name: colour and scores
    label: str,
    path: Path,
    note: str = "",
    trained: str = "",
) -> None:
    """Bars grouped by test; error bars are one standard deviation over seeds."""
    from matplotlib.figure import Figure

    tests = [test for test in measured["tests"] if any(test in scores for _, scores in bars.values())]
    figure = Figure(figsize=(max(6.5, 1.6 + len(tests) * (0.5 + 0.24 * len(bars))), 4.6), layout="constrained")
    panel, wide = figure.add_subplot(), 0.84 / len(bars)
    for i, (name, (colour, scores)) in enumerate(bars.items()):
        x = np.arange(len(tests)) + (i - (len(bars) - 1) / 2) * wide
        means, stds = (np.array([scores[test][kind] for test in tests], float) for kind in ("mean", "std"))
        lines = {"elinewidth": 0.8, "ecolor": "#444444"}
        panel.bar(x, means, 0.92 * wide, yerr=stds, color=colour, label=name, error_kw=lines)
    panel.axhline(0, color="#444444", lw=0.8)
    titles = (measured["tests"][test].replace("_", " ") for test in tests)  # long where they name a file
    folded = ["\n".join(textwrap.wrap(title, 15, break_on_hyphens=False)) for title in titles]
    panel.set_xticks(range(len(tests)), folded, parse_math=False)
    for tick, test in zip(panel.get_xticklabels(), tests, strict=True):
        tick.set_color(colour_of(test, measured["tests"]))
    panel.tick_params(axis="x", length=0)
    panel.set_ylabel(label)
    panel.grid(axis="y", color="#e5e5e5", lw=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    put_legend(figure, *panel.get_legend_handles_labels())
    finish(figure, measured, path, _say_spread(measured, "lines") + note, trained)


def draw_alpha_beta(measured: Measured, path: Path) -> None:
    """A heat map for each test; the defaults have a frame."""
    from matplotlib.patches import Rectangle

    data = measured["data"]
    alphas, betas = data["alpha"], data["beta"]
    tests = [test for test in measured["tests"] if test in data["accuracy"]]
    figure, axes = make_panels(len(tests), height=3.3)
    for panel, test in zip(axes, tests, strict=False):
        values = np.array(data["accuracy"][test]["mean"])  # [alpha, beta]
        image = panel.imshow(values, cmap="viridis", origin="lower", aspect="auto")
        dark = (values.min() + values.max()) / 2
        for i, j in np.ndindex(*values.shape):
            shade = "white" if values[i, j] <= dark else "black"
            panel.text(j, i, f"{values[i, j]:.1f}", ha="center", va="center", fontsize=7, color=shade)
        if DEFAULT in alphas and DEFAULT in betas:
            corner = betas.index(DEFAULT) - 0.5, alphas.index(DEFAULT) - 0.5
            panel.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="#d62728", lw=2))
        panel.set_xticks(range(len(betas)), [f"{beta:g}" for beta in betas])
        panel.set_yticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
        panel.set(xlabel="beta", ylabel="alpha")
        head(panel, measured, test, grid=False)
        figure.colorbar(image, ax=panel, fraction=0.05, pad=0.02)
    finish(figure, measured, path, "accuracy (%); each panel has its own colour scale; framed: the method's defaults")


def draw_interpolation(measured: Measured, path: Path) -> None:
    """A panel for each test: accuracy over e, the bound of each client's best e, and FedTHE."""
    data = measured["data"]
    tests = [test for test in measured["tests"] if test in data["shared"]]
    figure, axes = make_panels(len(tests))
    for panel, test in zip(axes, tests, strict=False):
        mean, std = (np.array(data["shared"][test][kind], float) for kind in ("mean", "std"))
        panel.fill_between(data["e"], mean - std, mean + std, color="#0072b2", alpha=0.12, lw=0)
        panel.plot(data["e"], mean, color="#0072b2", marker=".", ms=4, label="one e for all clients")
        best, ours = data["best"][test]["mean"], data["fedthe"][test]["mean"]
        panel.axhline(best, color="#444444", ls="--", lw=1.4, label="each client's best e (needs test labels)")
        panel.axhline(ours, color=METHOD_COLOURS["fedthe"], lw=1.6, label=f"{name_method('fedthe')} (an e per sample)")
        panel.set(xlabel="e: personal at 0, global at 1", ylabel="accuracy (%)", xlim=(0, 1))
        head(panel, measured, test)
    put_legend(figure, *axes[0].get_legend_handles_labels())
    finish(figure, measured, path, _say_spread(measured, "band"))


def draw_weights(measured: Measured, path: Path) -> None:
    """A panel for each test: the density of 1 - e with history (filled) and without (line)."""
    data = measured["data"]
    edges, names = np.array(data["edges"]), {"fedthe": "with history", "ablation_11": "without history"}
    tests = [test for test in measured["tests"] if test in data["weights"]["fedthe"]]
    figure, axes = make_panels(len(tests))
    for panel, test in zip(axes, tests, strict=False):
        colour = colour_of(test, measured["tests"])
        for method, name in names.items():
            each = data["weights"][method][test]
            filled = method == "fedthe"
            shade = colour if filled else "#333333"
            panel.stairs(each["density"], edges, fill=filled, color=shade, alpha=0.45 if filled else 1, lw=1.3)
            label = f"{name}, mean {each['mean']:.2f}"
            panel.axvline(each["mean"], color=shade, ls="-" if filled else ":", lw=1.6, label=label)
        # most samples are at the ends; the few in between differ
        panel.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))
        panel.set(xlabel="1 - e: global at 0, personal at 1", ylabel="density, root scale", xlim=(0, 1))
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=7, frameon=False, loc="best")
        head(panel, measured, test)
    finish(figure, measured, path, "filled: with history; line: without (ablation 11); vertical lines: means")


def draw_features(measured: Measured, path: Path) -> None:
    """Two t-SNE panels: colour is the test, shape the client."""
    from matplotlib.lines import Line2D

    data = measured["data"]
    tests = [test for test in measured["tests"] if test in data["test"]]
    clients = sorted(set(data["client"]))
    figure, axes = make_panels(2, columns=2, width=5.2, height=4.8)
    of_test, of_client = np.array(data["test"]), np.array(data["client"])
    kinds = {"without": "h, without history", "with": "h', with history"}
    for panel, (kind, title) in zip(axes, kinds.items(), strict=True):
        places = _embed(np.array(data[kind]))
        for test in tests:
            for marker, client in zip(MARKERS, clients, strict=False):
                x, y = places[(of_test == test) & (of_client == client)].T
                panel.scatter(x, y, 14, colour_of(test, measured["tests"]), marker=marker, alpha=0.65, linewidths=0)
        panel.set(xticks=[], yticks=[])
        panel.set_title(title, fontsize=10)
    names = {measured["tests"][test]: ("o", colour_of(test, measured["tests"])) for test in tests}
    names |= {f"client {k}": (marker, "#777777") for marker, k in zip(MARKERS, clients, strict=False)}
    handles = [Line2D([], [], ls="", marker=marker, color=colour) for marker, colour in names.values()]
    put_legend(figure, handles, list(names))
    shown = {**measured, "config": {**measured["config"], "seeds": [data["seed"]]}}
    finish(figure, shown, path, "t-SNE")


def _embed(features: np.ndarray) -> np.ndarray:
    """features [n, d] -> places [n, 2]"""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, max(1.0, (len(features) - 1) / 3))
    return np.asarray(TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(features))


def look_up(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The display name and the colour of each method."""
    others = iter(cycle(OTHER_COLOURS))
    return {method: (name_method(method), METHOD_COLOURS.get(method) or next(others)) for method in methods}


def colour_of(test: str, tests: Iterable[str]) -> str:
    """The colour of one of `tests`."""
    if test in TEST_COLOURS:
        return TEST_COLOURS[test]
    others = [each for each in tests if each not in TEST_COLOURS]
    return OTHER_TEST_COLOURS[others.index(test) % len(OTHER_TEST_COLOURS)]


def make_panels(count: int, columns: int = 3, width: float = 3.9, height: float = 3.0) -> tuple[Figure, Sequence[Axes]]:
    """A figure, and its first `count` panels row by row; the others are removed."""
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(6.5, width * columns), height * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for panel in axes[count:]:
        panel.remove()
    return figure, axes[:count]


def put_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Below the panels, in as many columns as fit."""

    def measure(columns: int) -> float:
        """Inches at this font size; a column is as wide as its longest label."""
        parts = np.array_split([len(label) for label in labels], columns)
        return float(sum(0.55 + 0.085 * part.max() for part in parts))

    fitting = (n for n in range(len(labels), 1, -1) if measure(n) <= figure.get_figwidth())
    figure.legend(handles, labels, loc="outside lower center", ncols=next(fitting, 1), frameon=False, fontsize=9)


def head(panel: Axes, measured: Measured, test: str, grid: bool = True) -> None:
    panel.set_title(measured["tests"][test], fontsize=10, color=colour_of(test, measured["tests"]), parse_math=False)
    if grid:
        panel.grid(color="#e5e5e5", lw=0.6)
        panel.spines[["top", "right"]].set_visible(False)


def describe_settings(config: Measured, trained: str = "", without: Iterable[str] = ()) -> str:
    """The settings that matter most, but for those of `without`. `trained` replaces the number of rounds."""
    kind, _, where = config["dataset"].partition(":")
    seeds = ("seeds " if len(config["seeds"]) > 1 else "seed ") + ", ".join(map(str, config["seeds"]))
    parts = {
        "dataset": clean(Path(where).stem or kind, 30),
        "net": config["net"],
        "clients": f"{config['clients']} clients",
        "dirichlet": _say_partition(config),
        "rounds": trained or f"{config['rounds']} round{'s' if config['rounds'] != 1 else ''}",
        "seeds": seeds,
    }
    if config.get("standardize"):  # missing in older files
        parts["standardize"] = "standardized images"
    if config["samples"]:
        parts["samples"] = f"at most {config['samples']} samples of each test"
    return ", ".join(said for key, said in parts.items() if key not in without)


def _say_partition(config: Measured) -> str:
    kind = config.get("partition")  # missing in older files
    if kind in (None, "balanced"):
        return f"Dirichlet {config['dirichlet']:g}"
    return say_partition(kind, config["dirichlet"], config.get("shards"))


def _say_spread(measured: Measured, what: str) -> str:
    """What bands or lines show; a single seed has none."""
    several = len(measured["config"]["seeds"]) > 1
    return f"{what}: one standard deviation over seeds" if several else "one seed"


def finish(
    figure: Figure, measured: Measured, path: Path, note: str = "", trained: str = "", without: Iterable[str] = ()
) -> None:
    """Add the title and the settings, and save. `trained` replaces the number of rounds."""
    said = [measured["title"], describe_settings(measured["config"], trained, without), note]
    letters = int(13 * figure.get_figwidth())  # per line at this font size
    lines = [line for part in said for line in textwrap.wrap(part, letters)]
    figure.suptitle("\n".join(lines), fontsize=9.5, parse_math=False)
    save(figure, path)
