"""FedTHE under low participation: over which clients should the global descriptor average?

By Algorithm 1 of the paper it averages over the clients of the last round. With 2 of 20 in a round, that says little
about the other 18. Here the same trained models answer once with that descriptor, and once with the mean over all 20.

    python examples/all_descriptors.py 0        # the seed; half an hour on a CPU
"""

from __future__ import annotations

import sys
from dataclasses import replace

from fedthe.config import make_config
from fedthe.experiment.training import Deployed, deploy_all
from fedthe.study.figures.base import average, rate


def show(deployed: Deployed) -> dict[str, float]:
    """Accuracy in percent by test, the mean over clients."""
    return {test: round(each["mean"], 1) for test, each in average(rate(deployed, samples=None)).items()}


settings = {"dataset": "cifar10", "natural": "none", "participation": 0.1, "methods": ["fedthe"]}
for deployed in deploy_all(make_config(settings | {"seeds": [int(sys.argv[1])], "out": "runs/descriptors"})):
    print("the two of the last round", show(deployed))
    own = deployed.states["own_descriptor"]  # [clients, d]
    of_all = {"descriptor": own.mean(0, keepdim=True).expand_as(own)}
    print("all twenty", show(replace(deployed, states=deployed.states | of_all)))
