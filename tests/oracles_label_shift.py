"""Literal, slow versions of the label-shift methods: one sample and one class at a time, in float64, from the formulas.

z: logits of a head trained under equal class priors, a list of rows. Every function returns a prior or a list of them.
"""

from __future__ import annotations

import math

import numpy as np


def softmax(row):
    top = max(row)
    weights = [math.exp(float(value) - float(top)) for value in row]
    return [weight / sum(weights) for weight in weights]


def reweigh(posterior, prior):
    """Bayes' rule: a posterior under equal priors -> the one under this prior."""
    joint = [p * q for p, q in zip(posterior, prior, strict=True)]
    return [value / sum(joint) for value in joint]


def own_prior(counts, smoothing):
    """A row is of the client's own mix, or, with this probability, of any class alike."""
    total = sum(float(count) for count in counts)
    return [(1 - smoothing) * float(count) / total + smoothing / len(counts) for count in counts]


# EM: equations (2.8) and (2.9) of Saerens et al., with equal priors in training


def em(posteriors, steps):
    classes = len(posteriors[0])
    prior = [1 / classes] * classes
    for _ in range(steps):
        now = [reweigh(posterior, prior) for posterior in posteriors]
        prior = [sum(posterior[i] for posterior in now) / len(now) for i in range(classes)]
    return prior


def em_priors(z, buffer, steps):
    posteriors = [softmax(row) for row in z]
    return [em(posteriors[max(0, n - buffer) : n], steps) for n in range(1, len(z) + 1)]


# BBSE: the moment equation of Lipton et al., in the regularised form of RLLS


def vote(row, soft):
    return softmax(row) if soft else [float(i == int(np.argmax(row))) for i in range(len(row))]


def confusion(z, labels, soft, shrinkage):
    """[answer][class], of validation rows; every class gets `shrinkage` more, of a typical class."""
    classes = len(z[0])
    votes = [vote(row, soft) for row in z]
    right = (sum(row[y] for row, y in zip(votes, labels, strict=True)) + 1) / (len(labels) + 1)
    table = np.zeros((classes, classes))
    for j in range(classes):
        of_class = [row for row, y in zip(votes, labels, strict=True) if y == j]
        for i in range(classes):
            typical = right if i == j else (1 - right) / (classes - 1)
            table[i, j] = (sum(row[i] for row in of_class) + shrinkage * typical) / (len(of_class) + shrinkage)
    return table


def bbse_priors(z, table, source, soft, ridge, pseudo):
    classes, priors = len(source), []
    # a ridge is `classes` more equations, that nothing changes
    equations = np.concatenate([table, math.sqrt(ridge) * np.eye(classes)])
    for n in range(1, len(z) + 1):
        mean = sum(np.array(vote(row, soft)) for row in z[:n]) / n
        wanted = np.concatenate([mean - table @ np.array(source), np.zeros(classes)])
        change = np.linalg.lstsq(equations, wanted, rcond=None)[0]
        prior = [max(0.0, s + n / (n + pseudo) * c) for s, c in zip(source, change, strict=True)]
        priors.append([value / sum(prior) for value in prior])
    return priors


# FMAPLS: the mode of a Dirichlet distribution after n ** rate samples with the smoothed responsibilities


def fmapls_priors(z, own, strength, anchor, rate):
    prior, share, priors = list(own), list(own), []
    for n, row in enumerate(z, 1):
        size = n**-rate
        responsibility = reweigh(softmax(row), prior)
        share = [(1 - size) * s + size * r for s, r in zip(share, responsibility, strict=True)]
        alpha = [1 + strength * (anchor * o + (1 - anchor) * p) for o, p in zip(own, prior, strict=True)]
        counts = [s / size + a - 1 for s, a in zip(share, alpha, strict=True)]
        prior = [count / sum(counts) for count in counts]
        priors.append(prior)
    return priors
