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


def keep_known(phase, positions):
    return [i for i in positions if phase[i] != "unknown"]


def phase_of(phase, positions):
    """Of the samples of known classes, if there are any."""
    names = {phase[i] for i in keep_known(phase, positions)} or {"unknown"}
    return names.pop() if len(names) == 1 else "mixed"


def accuracy_of(right, segment, phase, wanted):
    """On the samples of a phase, or on the segments that are mixed; None without samples."""
    positions = [i for i in range(len(right)) if phase[i] == wanted]
    if wanted == "mixed":
        positions = [i for each in split_segments(segment) if phase_of(phase, each) == wanted for i in each]
    known = keep_known(phase, positions)
    return float(mean([int(right[i]) for i in known])) if known else None


def smooth(right, segment, phase, window):
    """None where no sample of a known class is near."""
    out = []
    for i in range(len(right)):
        near = [j for j in range(len(right)) if abs(i - j) <= window // 2 and segment[j] == segment[i]]
        known = keep_known(phase, near)
        out.append(float(mean([int(right[j]) for j in known])) if known else None)
    return out


def over_time(streams, window):
    """Streams are (right, segment, phase). Mean over the clients that have a value, where they are at least half."""
    smoothed = [smooth(*stream, window) for stream in streams]
    out = []
    for i in range(max(map(len, smoothed))):
        here = [row[i] for row in smoothed if i < len(row) and row[i] is not None]
        out.append(sum(here) / len(here) if here and 2 * len(here) >= len(smoothed) else None)
    return out


def worst_window(right, size):
    if len(right) < size:
        return None
    return min(float(mean([int(x) for x in right[i : i + size]])) for i in range(len(right) - size + 1))


def forgetting(right, segment, phase):
    segments = split_segments(segment)
    while phase_of(phase, segments[0]) == "unknown":
        segments = segments[1:]
    first, *others = segments
    later, left = [], False
    for each in others:
        if phase_of(phase, each) != phase_of(phase, first):
            left = True
        elif left:
            later += each
    if not later:
        return None
    first, later = keep_known(phase, first), keep_known(phase, later)
    return float(mean([int(right[i]) for i in first]) - mean([int(right[i]) for i in later]))


def recovery(clients, wanted, window, tolerance):
    """Clients are (right, segment, phase). (samples or None, steady, lost), or None if segments are too short."""
    rows = []
    for right, segment, phase in clients:
        mine = [keep_known(phase, each) for each in split_segments(segment)[1:] if phase_of(phase, each) == wanted]
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
