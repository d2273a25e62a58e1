"""Display names of methods, test distributions and networks, by id. Other ids are shown as they are."""

from __future__ import annotations

from .text import clean

METHOD_NAMES = {
    "fedavg": "FedAvg",
    "gma": "GMA",
    "term": "TERM",
    "memo_g": "MEMO (G)",
    "fedavg_ft": "FedAvg + FT",
    "apfl": "APFL",
    "fedrep": "FedRep",
    "ditto": "Ditto",
    "fedrod": "FedRoD",
    "per_fedavg": "Per-FedAvg",
    "knn_per": "kNN-Per",
    "ttt": "TTT",
    "ttt_ft": "TTT (local head)",
    "memo_p": "MEMO (P)",
    "t3a": "T3A",
    "tsa": "TSA",
    "fedthe": "FedTHE",
    "fedthe_plus": "FedTHE+",
    "fedthe_regime": "FedTHE, regime filter",
    "regime_memo": "FedTHE+, regime filter",
    "fedthe_regime_lda": "FedTHE, regime filter + LDA",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "fedper": "FedPer",
    "lg_fedavg": "LG-FedAvg",
    "fedbabu": "FedBABU",
    "pfedme": "pFedMe",
    "logit_adjust": "logit adjustment",
    "em": "EM prior",
    "bbse": "BBSE",
    "fmapls": "online-FMAPLS",
    "lame": "LAME",
    "tent": "Tent",
    "sar": "SAR",
    "rotta": "RoTTA",
    "atp": "ATP",
}
AS_CODED = ("fedthe", "memo_g", "memo_p", "fedrod", "fedrep", "apfl", "ditto", "knn_per")
STUDY_NAMES = {  # of methods that tables and figures compare with these
    "regime_mirror": "FedTHE, regime filter, 2 views",
    "regime_views": "FedTHE, regime filter, 10 views",
    **{f"authors_{id}": f"{METHOD_NAMES[id]} (authors' code)" for id in AS_CODED},
}
OURS = ("fedthe", "fedthe_plus", "regime_memo", "fedthe_regime", "fedthe_regime_lda")
PROBE_NAMES = {"lp": "LP", "ft": "FT", "lpft": "LP-FT"}  # linear probing and fine-tuning of a pre-trained network
TEST_NAMES = {
    "original": "original",
    "corrupted": "corrupted",
    "ooc": "out-of-client",
    "mixture": "mixture",
    "corrupted_ooc": "corrupted out-of-client",
}
STREAM_NAMES = {  # tests that a run has only if it asks for them
    "correlated": "correlated",
    "ooc_correlated": "correlated out-of-client",
    "switch10": "switching every 10",
    "switch50": "switching every 50",
    "switch100": "switching every 100",
    "gradual": "gradual severity",
    "recurring": "recurring",
    "late": "late classes",
    "open_set": "open set",
}
NET_NAMES = {"cnn": "CNN", "resnet20_gn": "ResNet20-GN", "cct4": "CCT4"}


def name_method(method: str) -> str:
    """Of a variant such as fedthe(alpha=0.2,beta=0.3): FedTHE (alpha=0.2, beta=0.3)."""
    name, bracket, hyper = method.partition("(")
    if not (bracket and hyper.endswith(")")):
        return METHOD_NAMES.get(method) or STUDY_NAMES.get(method) or clean(method)
    return clean(f"{METHOD_NAMES.get(name, name)} ({hyper.replace(',', ', ')}", 160)


def name_test(test: str) -> str:
    return TEST_NAMES.get(test) or STREAM_NAMES.get(test) or clean(test)


def name_phase(phase: str) -> str:
    """Of what a part of a stream is drawn from: ooc is out-of-client, and "corrupted 3" corrupted, severity 3."""
    origin, _, severity = phase.partition(" ")
    return f"{name_test(origin)}, severity {severity}" if severity else name_test(origin)
