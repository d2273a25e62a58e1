"""Our methods beside what the FedTHE authors' code runs under the same names: what each difference is worth."""

from __future__ import annotations

from ..names import AS_CODED, NET_NAMES
from .streams import AS_USUAL

TITLE = f"As the papers say and as the FedTHE authors' code runs them, {NET_NAMES['cnn']} on CIFAR10, Dir(0.1)"
SETTING = AS_USUAL
# Theirs by ours. Their TSA is on a model that was trained without balanced softmax.
PAIRS = {id: f"authors_{id}" for id in AS_CODED} | {"tsa": "ablation_3"}
METHODS = tuple(method for pair in PAIRS.items() for method in pair)
