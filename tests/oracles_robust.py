"""The server's rules for uploads that cannot be trusted, written out for lists of numbers.

An upload is a list of floats: the update of one client.
"""

from __future__ import annotations

import math


def median(uploads):
    """Coordinate by coordinate; of an even number, the mean of the two in the middle."""
    result = []
    for i in range(len(uploads[0])):
        values = sorted(upload[i] for upload in uploads)
        half = len(values) // 2
        result.append(values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2)
    return result


def trimmed_mean(uploads, wrong):
    """Without the `wrong` least and the `wrong` greatest values of every coordinate."""
    result = []
    for i in range(len(uploads[0])):
        values = sorted(upload[i] for upload in uploads)
        for _ in range(wrong):
            values = values[1:-1]
        result.append(sum(values) / len(values))
    return result


def multi_krum(uploads, wrong):
    """The places of the n - wrong uploads with the smallest sums of squared distances to their n - wrong - 2 nearest
    others. It is defined for n >= 2 * wrong + 3."""
    n, scores = len(uploads), []
    if wrong == 0:
        return list(range(n))
    assert n >= 2 * wrong + 3
    for i, one in enumerate(uploads):
        distances = []
        for j, other in enumerate(uploads):
            if i != j:
                distances.append(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)))
        scores.append((sum(sorted(distances)[: n - wrong - 2]), i))
    return sorted(i for _, i in sorted(scores)[: n - wrong])


def clip(uploads, times):
    """Shortened to at most `times` the median length."""
    lengths = [math.sqrt(sum(value**2 for value in upload)) for upload in uploads]
    (middle,) = median([[length] for length in lengths])
    most = times * middle
    return [
        [value * most / length for value in upload] if length > most else upload
        for upload, length in zip(uploads, lengths, strict=True)
    ]
