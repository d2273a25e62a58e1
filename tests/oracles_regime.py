"""The regime filter, one sample and one number at a time: plain Python floats, no tensor."""

import math


def softmax(logits):
    top = max(logits)
    weights = [math.exp(z - top) for z in logits]
    return [w / sum(weights) for w in weights]


def regime_stream(
    of_global,
    of_local,
    counts,
    temperatures=(1.0, 1.0),
    own=(0.03, 0.6, 0.99),
    start=(0.1, 0.3, 0.6),
    leave=0.01,
    trust=0.6,
    personal=0.4,
    smooth=1 / 16,
    recent=0.02,
    forget=0.2,
    regress=0.05,
    penalty=0.95,
    state=None,
    federation=None,
):
    """Lists of logits in; (probabilities, own) for each sample, and the state after the last."""
    classes = range(len(counts))
    rows = sum(counts)
    everybody = [1 / len(counts)] * len(counts)
    if federation is not None and sum(federation):
        everybody = [(1 - smooth) * n / sum(federation) + smooth / len(counts) for n in federation]
    share = smooth if rows else 1
    mix = [(1 - share) * counts[y] / (rows or 1) + share * everybody[y] for y in classes]
    if state is None:
        share = sum(w * s for w, s in zip(start, own, strict=True))
        expected = [share * mix[y] + (1 - share) * everybody[y] for y in classes]
        state = (list(start), [1 - recent, recent], expected)
    regimes, follows, seen = state
    answers = []
    for z_g, z_l in zip(of_global, of_local, strict=True):
        p_g = softmax([z / temperatures[0] for z in z_g])
        p_l = softmax([z / temperatures[1] for z in z_l])
        adjusted = [p_g[y] * mix[y] for y in classes]
        adjusted = [a / sum(adjusted) for a in adjusted]
        p_own = [p_l[y] ** personal * adjusted[y] ** (1 - personal) for y in classes]
        p_own = [p / sum(p_own) for p in p_own]

        p_any = [p_g[y] * everybody[y] for y in classes]
        evidence = (sum(mix[y] * p_g[y] for y in classes) / sum(p_any)) ** trust
        p_any = [p / sum(p_any) for p in p_any]
        likely = [s * evidence + 1 - s for s in own]
        total = sum(w * f for w, f in zip(regimes, likely, strict=True))
        share = sum(w * s for w, s in zip(regimes, own, strict=True))
        q = share * evidence / total
        answer = [q * p_own[y] + (1 - q) * p_any[y] for y in classes]

        expected = [share * mix[y] + (1 - share) * everybody[y] for y in classes]
        near = [(1 - regress) * seen[y] + regress * expected[y] for y in classes]
        fit = sum(p_g[y] * near[y] for y in classes) / sum(p_g[y] * expected[y] for y in classes)
        gain = penalty * fit**trust
        u = follows[1] * gain / (follows[0] + follows[1] * gain)
        shifted = [answer[y] * near[y] / expected[y] for y in classes]
        shifted = [s / sum(shifted) for s in shifted]
        answers.append(([(1 - u) * answer[y] + u * shifted[y] for y in classes], q))

        regimes = [w * f / total for w, f in zip(regimes, likely, strict=True)]
        regimes = [(1 - leave) * w + leave * s for w, s in zip(regimes, start, strict=True)]
        follows = [(1 - leave) * (1 - u) + leave * (1 - recent), (1 - leave) * u + leave * recent]
        seen = [(1 - forget) * seen[y] + forget * answer[y] for y in classes]
    return answers, (regimes, follows, seen)


def best_temperature(logits, labels, grid):
    """The temperature of the grid with the highest likelihood of the labels."""
    likelihoods = [
        sum(math.log(softmax([z / t for z in row])[y]) for row, y in zip(logits, labels, strict=True)) for t in grid
    ]
    return grid[likelihoods.index(max(likelihoods))]
