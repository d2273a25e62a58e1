"""Made-up answers to streams in time, as files of samples hold them: by method and seed, then "test/client/column"."""

import numpy as np

from fedthe.data.shifts import ORIGINS

OWN, CORRUPTED, OOC = map(ORIGINS.index, ("own", "corrupted", "ooc"))
SLOW = {"fedavg": 0, "fedavg_ft": 0, "fedthe": 8, "fedthe_plus": 3}  # samples until a method has noticed a switch
KNOWS = {  # accuracy on own and out-of-client samples, once it has
    "fedavg": (0.6, 0.6),
    "fedavg_ft": (0.85, 0.3),
    "fedthe": (0.85, 0.55),
    "fedthe_plus": (0.86, 0.57),
}


def make_columns(segment, origin, right, rng, severity=None):
    size = len(segment)
    label = rng.integers(0, 10, size)
    return {
        "right": right,
        "label": label.astype(np.int32),
        "answer": np.where(right, label, (label + 1) % 10).astype(np.int32),
        "probability": rng.uniform(0.2, 1, size).astype(np.float32),
        "segment": segment.astype(np.int16),
        "origin": origin.astype(np.uint8),
        "kind": np.where(np.zeros(size) if severity is None else severity, 3, -1).astype(np.int8),
        "severity": (np.zeros(size) if severity is None else severity).astype(np.int8),
    }


def switch(method, rng, block=50, size=400):
    """Own and out-of-client in turns; a method answers as before until it notices."""
    segment = np.arange(size) // block
    origin = np.where(segment % 2, OOC, OWN)
    own, ooc = KNOWS[method]
    late = (np.arange(size) % block < SLOW[method]) & (segment > 0)
    share = np.where(origin == OWN, own, ooc) * np.where(late, 0.4, 1)
    return make_columns(segment, origin, rng.random(size) < share, rng)


def ramp(method, rng, block=10):
    """Severity 1 to 5 and back, twice."""
    severity = np.repeat([1, 2, 3, 4, 5, 4, 3, 2, 1] * 2, block)
    segment = np.arange(len(severity)) // block
    share = KNOWS[method][0] - 0.06 * severity
    origin = np.full(len(severity), CORRUPTED)
    return make_columns(segment, origin, rng.random(len(severity)) < share, rng, severity)


def make_samples(methods=tuple(SLOW), seeds=(0, 1, 2), clients=20, size=400):
    made = {}
    for method in methods:
        for seed in seeds:
            kept = made.setdefault((method, seed), {})
            for k in range(clients):
                rng = np.random.default_rng([seed, k, len(method)])
                for test, columns in (("switch50", switch(method, rng, size=size)), ("gradual", ramp(method, rng))):
                    kept |= {f"{test}/{k}/{name}": values for name, values in columns.items()}
                plain = switch(method, rng, size=60)
                kept |= {f"original/{k}/{name}": plain[name] for name in ("right", "label", "answer", "probability")}
    return made
