"""The rows of the paper's ablation table, https://arxiv.org/abs/2205.10920, as configurations of the same code."""

from __future__ import annotations

from .base import FedAvg
from .compose import Recipe
from .fedthe import HeadEnsemble
from .finetune import FineTune
from .lpft import LPFT
from .memo import Memo
from .tsa import TSA
from .two_heads import TwoHeads

BALANCED, PLAIN = FedAvg(balanced=True), FedAvg()
FEDTHE_PLUS = HeadEnsemble(then=Memo(views=16))

ABLATIONS: dict[str, Recipe] = {
    "(1) memo_p": (PLAIN, FineTune(), Memo()),
    "(2) memo_p + test-time LP-FT": (PLAIN, FineTune(), LPFT()),
    "(3) tsa on two-head model": (PLAIN, TwoHeads(), TSA()),
    "(4) two-head model, fixed e=0.5": (PLAIN, TwoHeads()),
    "(5) (4) + balanced softmax": (BALANCED, TwoHeads()),
    "(6) (5) + FA only": (BALANCED, TwoHeads(), HeadEnsemble(weighting="fa")),
    "(7) (5) + EM only": (BALANCED, TwoHeads(), HeadEnsemble(weighting="em")),
    "(8) (5) + 0.5 FA + 0.5 EM": (BALANCED, TwoHeads(), HeadEnsemble(weighting="half")),
    "(9) (8) with SLW = fedthe": (BALANCED, TwoHeads(), HeadEnsemble()),
    "(10) (9) batch-wise e": (BALANCED, TwoHeads(), HeadEnsemble(batch=32)),
    "(11) (9) without test history": (BALANCED, TwoHeads(), HeadEnsemble(history=False)),
    "(12) (9) without balanced softmax": (PLAIN, TwoHeads(), HeadEnsemble()),
    "(13) (9) + test-time FT = fedthe_plus": (BALANCED, TwoHeads(), FEDTHE_PLUS),
    "(14) (13) without balanced softmax": (PLAIN, TwoHeads(), FEDTHE_PLUS),
    "(15) fedavg_ft + balanced softmax": (BALANCED, FineTune()),
    "(16) (15) + balanced softmax on personalized head": (BALANCED, FineTune(balanced_personal=True)),
}
