"""What is said of streams in time, once more: literal, slow, one sample after another, in plain Python."""

from fractions import Fraction


def split_segments(segment):
    """Positions of each segment."""
    found = []
    for i, number in enumerate(segment):
        if i == 0 or number != segment[i - 1]:
            found.append([])
        found[-1].append(i)
    return found


def mean(values):
    values = [Fraction(int(value)) if isinstance(value, bool | int) else value for value in values]
    return sum(values) / len(values)


def phase_of(phase, positions):
    names = {phase[i] for i in positions}
    return names.pop() if len(names) == 1 else "mixed"


def smooth(right, segment, window):
    out = []
    for i in range(len(right)):
        near = [j for j in range(len(right)) if abs(i - j) <= window // 2 and segment[j] == segment[i]]
        out.append(float(mean([int(right[j]) for j in near])))
    return out


def over_time(streams, window):
    """Streams are (right, segment). Mean over the clients that are still there, while they are at least half."""
    smoothed = [smooth(right, segment, window) for right, segment in streams]
    out = []
    for i in range(max(map(len, smoothed))):
        here = [row[i] for row in smoothed if i < len(row)]
        if 2 * len(here) < len(smoothed):
            break
        out.append(sum(here) / len(here))
    return out


def worst_window(right, size):
    if len(right) < size:
        return None
    return min(float(mean([int(x) for x in right[i : i + size]])) for i in range(len(right) - size + 1))


def forgetting(right, segment, phase):
    first, *others = split_segments(segment)
    later, left = [], False
    for each in others:
        if phase_of(phase, each) != phase_of(phase, first):
            left = True
        elif left:
            later += each
    if not later:
        return None
    return float(mean([int(right[i]) for i in first]) - mean([int(right[i]) for i in later]))


def recovery(clients, wanted, window, tolerance):
    """Clients are (right, segment, phase). (samples or None, steady, lost), or None if segments are too short."""
    rows = []
    for right, segment, phase in clients:
        mine = [each for each in split_segments(segment)[1:] if phase_of(phase, each) == wanted]
        row = []
        for t in range(max(map(len, mine), default=0)):
            row.append(mean([int(right[each[t]]) for each in mine if t < len(each)]))
        rows.append(row)
    curve = []
    for t in range(max(map(len, rows))):
        here = [row[t] for row in rows if t < len(row)]
        if 2 * len(here) < len(rows):
            break
        curve.append(sum(here) / len(here))
    if len(curve) < 2 * window:
        return None
    half = len(curve) // 2
    steady = sum(curve[half:]) / len(curve[half:])
    lost = sum(steady - value for value in curve[:half])
    for t in range(half):
        if sum(curve[t : t + window]) / window >= steady - tolerance:
            return t, float(steady), float(lost)
    return None, float(steady), float(lost)


def auroc(known, unknown):
    """The share of pairs in which the known sample has more confidence; a tie is half."""
    won = [1 if a > b else 0.5 if a == b else 0 for a in known for b in unknown]
    return sum(won) / len(won)


def false_positives(known, unknown):
    """At the highest threshold that at least 95 % of the known samples reach."""
    for threshold in sorted({*known}, reverse=True):
        if 100 * sum(value >= threshold for value in known) >= 95 * len(known):
            return sum(value >= threshold for value in unknown) / len(unknown)
    raise AssertionError("the lowest is reached by all")
