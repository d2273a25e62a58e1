"""Text: what kind of package is this, by its one-line description?

Debian describes each of its packages in a line ("JSON parser library (development files)"), and tags many with a role:
a program, a library, documentation. Teams maintain them. Each of the 16 teams with the most tagged sources is a client,
with labels as uneven as they are: the Haskell team has documentation, the games team has programs and their data.
Orphaned packages, which any team may adopt, are the shift after deployment.

    python examples/descriptions.py           # on Debian, after apt-get update; or in a container:
    docker run --rm debian sh -c 'apt-get -qq update && apt-cache dumpavail' > packages.txt
    python examples/descriptions.py packages.txt
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

import fedthe
from fedthe.errors import InputError
from fedthe.foreign import explain, read_file

METHODS = ("fedavg", "fedavg_ft", "knn_per", "fedthe")
ROLES = ["program", "shared-lib", "devel-lib", "documentation", "app-data", "plugin"]
TEAMS, ORPHANED = 16, "Debian QA Group"  # clients, and who looks after packages that nobody maintains
WORDS, BUCKETS = 12, 4096  # longer descriptions are cut
Rows = tuple[np.ndarray, np.ndarray]  # tokens int64 [n, WORDS], labels [n]


class Package(NamedTuple):
    team: str
    source: str  # from which it was built, with others
    description: str
    role: int


class WordNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(BUCKETS, width, padding_idx=0)
        self.words.weight.data.mul_(0.1)  # words that were never seen in training add little noise
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, len(ROLES))

    def forward(self, x: Tensor) -> Tensor:  # [n, WORDS]; 0: no word
        mean = self.words(x).sum(1) / (x > 0).sum(1, keepdim=True).clamp(min=1)
        return self.head(torch.relu(self.hidden(mean)))


def read_packages(path: Path | None) -> list[Package]:
    """The packages with exactly one role, from a file or from apt's own lists."""
    with explain(f"{path or 'apt'} gives no list of packages", "the head of this file says how to get one"):
        if path:
            content = read_file(path, limit=1 << 28)
        else:
            content = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, timeout=60).stdout
    packages = []
    for entry in content.decode("utf-8", errors="replace").split("\n\n"):
        fields = dict(re.findall(r"^([\w-]+): (.*)$", entry, re.MULTILINE))
        roles = set(re.findall(r"\brole::([\w-]+)", entry))
        if len(roles) == 1 and roles <= set(ROLES) and {"Package", "Maintainer", "Description"} <= fields.keys():
            source = fields.get("Source", fields["Package"]).split(" ")[0]  # "gcc-12 (12.2.0)": with its version
            team = fields["Maintainer"].split(" <")[0]
            packages.append(Package(team, source, fields["Description"], ROLES.index(roles.pop())))
    return packages


def encode(packages: list[Package]) -> Rows:
    """Hashed words: the clients need not agree on a vocabulary."""
    x = np.zeros((len(packages), WORDS), dtype=np.int64)
    for row, package in zip(x, packages, strict=True):
        words = re.findall(r"[a-z0-9+#]+", package.description.lower())[:WORDS]
        row[: len(words)] = [1 + crc32(word.encode()) % (BUCKETS - 1) for word in words]
    return x, np.array([package.role for package in packages])


def split(packages: list[Package]) -> dict[str, Rows]:
    """60/20/20 by source: the descriptions of one source are alike."""
    sources = sorted({package.source for package in packages}, key=lambda name: crc32(name.encode()))
    place = {source: 5 * i // len(sources) for i, source in enumerate(sources)}
    parts = {"train": (0, 1, 2), "val": (3,), "test": (4,)}
    return {name: encode([p for p in packages if place[p.source] in fifths]) for name, fifths in parts.items()}


def make_federation(packages: list[Package]) -> fedthe.Federation:
    by_team: dict[str, list[Package]] = defaultdict(list)
    for package in packages:
        by_team[package.team].append(package)
    orphaned = by_team.pop(ORPHANED, [])
    teams = sorted(by_team.values(), key=lambda own: len({package.source for package in own}), reverse=True)[:TEAMS]
    if len(teams) < TEAMS or len(orphaned) < TEAMS:
        raise InputError(f"{len(packages)} packages with a role are too few; are these the lists of a Debian release?")
    tests = {"orphaned": [encode(orphaned[i::TEAMS]) for i in range(TEAMS)]}
    return fedthe.Federation.from_clients([split(own) for own in teams], classes=ROLES, tests=tests, name="packages")


def main(path: Path | None, methods: Sequence[str] = METHODS) -> fedthe.Results:
    torch.set_num_threads(1)  # batches are small: a second thread gains little
    results = fedthe.run(
        name="descriptions",
        methods=methods,
        federation=make_federation(read_packages(path)),
        net=fedthe.wrap_module(WordNet, head="head"),
        seeds=[0, 1, 2],
        rounds=30,
        local_epochs=1,
        batch=16,
        lr=0.5,
        momentum=0.5,
    )
    print(results, results.compare("fedthe", "fedavg_ft"), sep="\n\n")
    return results


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
