"""Every method, by its id: the parts that differ from FedAvg's."""

from __future__ import annotations

from ..plugins import load_plugins
from .ablations import ABLATIONS
from .apfl import APFL
from .atp import ATP, AdaptationRates
from .authors import AUTHORS
from .base import FedAvg, Method
from .bbse import BBSE
from .compose import Recipe, compose
from .ditto import Ditto
from .em import EM
from .fedbabu import FedBABU
from .fedper import FedPer
from .fedprox import FedProx
from .fedrep import FedRep
from .fedrod import FedRoD
from .fedthe import HeadEnsemble
from .finetune import FineTune
from .fmapls import FMAPLS
from .gma import GMA
from .knn_per import KNN
from .lame import LAME
from .lg_fedavg import LGFedAvg
from .logit_adjust import LogitAdjust
from .memo import Memo
from .per_fedavg import PerFedAvg
from .pfedme import PFedMe
from .probing import Probe
from .regime_filter import RegimeFilter
from .rotta import RoTTA
from .sar import SAR
from .scaffold import Scaffold
from .t3a import T3A
from .tent import Tent
from .term import TERM
from .tsa import TSA
from .ttt import TTT, LocalRotation, Online
from .two_heads import TwoHeads
from .views import Views

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
    "fedthe_regime": (FedAvg(balanced=True), TwoHeads(), RegimeFilter()),
    "regime_memo": (FedAvg(balanced=True), TwoHeads(), RegimeFilter(then=Memo(views=16))),
    "fedthe_regime_lda": (FedAvg(balanced=True), TwoHeads(), RegimeFilter(discriminant=0.5)),
    # not in the paper's tables: one global model
    "fedprox": FedProx(),
    "scaffold": Scaffold(),
    # and a personal one
    "fedper": FedPer(),
    "lg_fedavg": LGFedAvg(),
    "fedbabu": (FedBABU(), FineTune()),
    "pfedme": PFedMe(),
    # FedTHE's global head under an estimated class prior
    "logit_adjust": (FedAvg(balanced=True), TwoHeads(), LogitAdjust()),
    "em": (FedAvg(balanced=True), TwoHeads(), EM()),
    "bbse": (FedAvg(balanced=True), TwoHeads(), BBSE()),
    "fmapls": (FedAvg(balanced=True), TwoHeads(), FMAPLS()),
    # and test-time adaptation: of outputs, of norm layers, and of all layers at rates that clients learn together
    "lame": (FineTune(), LAME()),
    "tent": (FineTune(), Tent()),
    "sar": (FineTune(), SAR()),
    "rotta": (FineTune(), RoTTA()),
    "atp": (AdaptationRates(), ATP()),
}
# The rows of the paper's ablation, ablation_1 to ablation_16; methods as the FedTHE authors' code runs them; the regime
# filter with plain views of a sample; ways to fine-tune what FedAvg pre-trained.
STUDIES: dict[str, Recipe] = {
    **{f"ablation_{name[1 : name.index(')')]}": recipe for name, recipe in ABLATIONS.items()},
    **AUTHORS,
    "regime_mirror": (FedAvg(balanced=True), TwoHeads(), RegimeFilter(then=Views())),
    "regime_views": (FedAvg(balanced=True), TwoHeads(), RegimeFilter(then=Views(shift=2))),
    "probe_lp": Probe("lp"),
    "probe_ft": Probe("ft"),
    "probe_lpft": Probe("lpft"),
}

METHODS |= load_plugins("fedthe.methods", METHODS)
