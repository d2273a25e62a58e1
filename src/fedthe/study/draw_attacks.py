"""What is left of accuracy under attack, by server rule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import draw


def draw_attacks(measured: Mapping[str, Any], path: Path) -> None:
    """A panel for each attack: the average over tests by rule and method. Error bars: one standard deviation."""
    cases, config = measured["data"]["cases"], measured["config"]
    looks = draw.look_up(config["methods"])
    figure, panels = draw.make_panels(len(cases), columns=3, width=4.2, height=2.8)
    for panel, (attack, rules) in zip(panels, cases.items(), strict=False):
        wide = 0.84 / len(looks)
        for i, (method, (name, colour)) in enumerate(looks.items()):
            found = [of_rule[method].get("average") or {"mean": None, "std": None} for of_rule in rules.values()]
            means, stds = (np.array([each[kind] for each in found], float) for kind in ("mean", "std"))
            x = np.arange(len(rules)) + (i - (len(looks) - 1) / 2) * wide
            lines = {"elinewidth": 0.8, "ecolor": "#444444"}
            panel.bar(x, means, 0.92 * wide, yerr=stds, color=colour, label=name, error_kw=lines)
            for at in x[np.isnan(means)]:
                panel.text(at, 1, "diverged", rotation=90, ha="center", va="bottom", fontsize=7, color="#444444")
        panel.set_title(attack, fontsize=10)
        panel.set_xticks(range(len(rules)), [rule.replace(" ", "\n") for rule in rules], fontsize=8)
        panel.set_xlim(-0.6, len(rules) - 0.4)
        panel.set_ylim(0, 100)
        panel.set_ylabel("accuracy, %")
        panel.grid(axis="y", color="#e5e5e5", lw=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    draw.put_legend(figure, *panels[0].get_legend_handles_labels())
    several = len(config["seeds"]) > 1
    note = "average over tests; lines: one standard deviation over seeds" if several else "average over tests; one seed"
    draw.finish(figure, measured, path, note)
