"""The rows of the paper's ablation table, https://arxiv.org/abs/2205.10920, as configurations of the same code."""

from __future__ import annotations

from collections.abc import Callable

from ..nets.net import Net
from .base import Method
from .fedthe import HeadEnsemble, TwoHeads
from .finetune import FineTune
from .lpft import LPFT
from .memo import Memo
from .tsa import TSA

ABLATIONS: dict[str, Callable[[Net], Method]] = {
    "(1) memo_p": lambda net: FineTune(net, predictor=Memo()),
    "(2) memo_p + test-time LP-FT": lambda net: FineTune(net, predictor=LPFT()),
    "(3) tsa on two-head model": lambda net: TwoHeads(net, balanced=False, predictor=TSA()),
    "(4) two-head model, fixed e=0.5": lambda net: TwoHeads(net, balanced=False),
    "(5) (4) + balanced softmax": lambda net: TwoHeads(net),
    "(6) (5) + FA only": lambda net: TwoHeads(net, predictor=HeadEnsemble(weighting="fa")),
    "(7) (5) + EM only": lambda net: TwoHeads(net, predictor=HeadEnsemble(weighting="em")),
    "(8) (5) + 0.5 FA + 0.5 EM": lambda net: TwoHeads(net, predictor=HeadEnsemble(weighting="half")),
    "(9) (8) with SLW = fedthe": lambda net: TwoHeads(net, predictor=HeadEnsemble()),
    "(10) (9) batch-wise e": lambda net: TwoHeads(net, predictor=HeadEnsemble(batch=32)),
    "(11) (9) without test history": lambda net: TwoHeads(net, predictor=HeadEnsemble(history=False)),
    "(12) (9) without balanced softmax": lambda net: TwoHeads(net, balanced=False, predictor=HeadEnsemble()),
    "(13) (9) + test-time FT = fedthe_plus": lambda net: TwoHeads(net, predictor=HeadEnsemble(then=Memo(views=16))),
    "(14) (13) without balanced softmax": lambda net: TwoHeads(
        net, balanced=False, predictor=HeadEnsemble(then=Memo(views=16))
    ),
    "(15) fedavg_ft + balanced softmax": lambda net: FineTune(net, balanced=True),
    "(16) (15) + balanced softmax on personalized head": lambda net: FineTune(
        net, balanced=True, balanced_personal=True
    ),
}
