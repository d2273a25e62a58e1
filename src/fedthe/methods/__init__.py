"""Every method, by its id: the parts that differ from FedAvg's."""

from __future__ import annotations

from ..plugins import load_plugins
from .ablations import ABLATIONS
from .apfl import APFL
from .base import FedAvg, Method
from .compose import Recipe, compose
from .ditto import Ditto
from .fedbabu import FedBABU
from .fedper import FedPer
from .fedprox import FedProx
from .fedrep import FedRep
from .fedrod import FedRoD
from .fedthe import HeadEnsemble
from .finetune import FineTune
from .gma import GMA
from .knn_per import KNN
from .lg_fedavg import LGFedAvg
from .memo import Memo
from .per_fedavg import PerFedAvg
from .pfedme import PFedMe
from .probing import Probe
from .scaffold import Scaffold
from .t3a import T3A
from .term import TERM
from .tsa import TSA
from .ttt import TTT, LocalRotation, Online
from .two_heads import TwoHeads

__all__ = ["ABLATIONS", "METHODS", "STUDIES", "Method", "compose"]

METHODS: dict[str, Recipe] = {
    # one global model
    "fedavg": FedAvg(),
    "gma": GMA(),
    "term": TERM(),
    "memo_g": Memo(),
    # a personal model
    "fedavg_ft": FineTune(),
    "apfl": APFL(),
    "fedrep": FedRep(),
    "ditto": Ditto(),
    "fedrod": (FedAvg(balanced=True), FedRoD()),
    "per_fedavg": (PerFedAvg(), FineTune()),
    "knn_per": KNN(),
    # a personal model that adapts at test time
    "ttt": (TTT(), Online()),
    "ttt_ft": (LocalRotation(), Online()),  # the paper's row
    "memo_p": (FineTune(), Memo()),
    "t3a": (FineTune(), T3A()),
    "tsa": (FedAvg(balanced=True), TwoHeads(), TSA()),
    "fedthe": (FedAvg(balanced=True), TwoHeads(), HeadEnsemble()),
    "fedthe_plus": (FedAvg(balanced=True), TwoHeads(), HeadEnsemble(then=Memo(views=16))),
    # not in the paper's tables: one global model
    "fedprox": FedProx(),
    "scaffold": Scaffold(),
    # and a personal one
    "fedper": FedPer(),
    "lg_fedavg": LGFedAvg(),
    "fedbabu": (FedBABU(), FineTune()),
    "pfedme": PFedMe(),
}
# The rows of the paper's ablation, ablation_1 to ablation_16, and ways to fine-tune what FedAvg pre-trained.
STUDIES: dict[str, Recipe] = {
    **{f"ablation_{name[1 : name.index(')')]}": recipe for name, recipe in ABLATIONS.items()},
    "probe_lp": Probe("lp"),
    "probe_ft": Probe("ft"),
    "probe_lpft": Probe("lpft"),
}

METHODS |= load_plugins("fedthe.methods", METHODS)
