"""Every method, by the id of the paper's tables."""

from __future__ import annotations

from collections.abc import Callable

from ..nets.net import Net
from ..plugins import load_plugins
from .ablations import ABLATIONS
from .apfl import APFL
from .base import Method
from .ditto import Ditto
from .fedrep import FedRep
from .fedrod import FedRoD
from .fedthe import FedTHE, FedTHEPlus, TwoHeads
from .finetune import FineTune
from .gma import GMA
from .knn_per import KNN
from .memo import Memo
from .per_fedavg import PerFedAvg
from .probing import Probe
from .t3a import T3A
from .term import TERM
from .tsa import TSA
from .ttt import TTT

__all__ = ["ABLATIONS", "METHODS", "STUDIES", "Method"]

METHODS: dict[str, Callable[[Net], Method]] = {
    # one global model
    "fedavg": Method,
    "gma": GMA,
    "term": TERM,
    "memo_g": lambda net: Method(net, Memo()),
    # a model of one's own
    "fedavg_ft": FineTune,
    "apfl": APFL,
    "fedrep": FedRep,
    "ditto": Ditto,
    "fedrod": FedRoD,
    "per_fedavg": PerFedAvg,
    "knn_per": lambda net: Method(net, KNN()),
    # a model of one's own that adapts at test time
    "ttt": TTT,
    "memo_p": lambda net: FineTune(net, Memo()),
    "t3a": lambda net: FineTune(net, T3A()),
    "tsa": lambda net: TwoHeads(net, TSA()),
    "fedthe": FedTHE,
    "fedthe_plus": FedTHEPlus,
}
# The rows of the paper's ablation, ablation_1 to ablation_16, and ways to fine-tune what FedAvg pre-trained.
STUDIES: dict[str, Callable[[Net], Method]] = {
    **{f"ablation_{name[1 : name.index(')')]}": make for name, make in ABLATIONS.items()},
    "probe_lp": lambda net: Probe(net, mode="lp"),
    "probe_ft": lambda net: Probe(net, mode="ft"),
    "probe_lpft": lambda net: Probe(net, mode="lpft"),
}

METHODS |= load_plugins("fedthe.methods", METHODS)
