"""Naive versions of the packer: every partition of a few samples, the textbook's best fit, mini-trainer's own search."""

from hypothesis import strategies as st

from forge_packing import Cost


@st.composite
def steps(draw, most_samples=40, most_tokens=80, most_ranks=9):
    """One step: (lengths, max_tokens, world_size)."""
    max_tokens = draw(st.integers(1, most_tokens))
    lengths = draw(st.lists(st.integers(1, max_tokens), min_size=1, max_size=most_samples))
    return lengths, max_tokens, draw(st.integers(1, most_ranks))


COSTS = st.sampled_from([Cost(), Cost(1.0, 0.5), Cost(0.0, 1.0), Cost(1.0, 0.0), Cost(3e-12, 1e-9, 2.0)])


def partitions(lengths, capacity):
    """Every way to put the samples into rows of at most `capacity`, as lists of lists of indices."""

    def place(index, rows, loads):
        if index == len(lengths):
            yield [list(row) for row in rows]
            return
        for at in range(len(rows)):
            if loads[at] + lengths[index] <= capacity:
                rows[at].append(index)
                loads[at] += lengths[index]
                yield from place(index + 1, rows, loads)
                loads[at] -= lengths[index]
                rows[at].pop()
        rows.append([index])
        loads.append(lengths[index])
        yield from place(index + 1, rows, loads)
        loads.pop()
        rows.pop()

    return place(0, [], [])


def best_possible(lengths, capacity, ranks, cost):
    """(fewest passes, least makespan of any number of passes, least makespan of the fewest), by trying everything."""
    values = cost.of(lengths).tolist()
    found = {}
    for rows in partitions(lengths, capacity):
        costs = sorted((sum(values[i] for i in row) for row in rows), reverse=True)
        passes = -(-len(rows) // ranks)
        makespan = sum(costs[::ranks]) + passes * cost.per_micro_batch
        found[passes] = min(found.get(passes, makespan), makespan)
    fewest = min(found)
    return fewest, min(found.values()), found[fewest]


def makespan(ranks, lengths, cost):
    """The makespan of a result of `divide`."""
    values = cost.of(lengths)
    return sum(max(values[m].sum() for m in passes) + cost.per_micro_batch for passes in zip(*ranks, strict=True))


def best_fit_decreasing(lengths, capacity):
    """Quadratic best-fit decreasing, as in the textbook: the row with the least space that still fits, else a new one."""
    rows = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [(capacity - sum(lengths[i] for i in row), at) for at, row in enumerate(rows)]
        fitting = [pair for pair in fitting if pair[0] >= lengths[index]]
        if fitting:
            rows[min(fitting)[1]].append(index)
        else:
            rows.append([index])
    return rows


def mini_trainers(lengths, capacity, ranks):
    """mini-trainer's passes, each as its ranks' lengths: the longest prefix that fits, again and again."""

    def emptiest_first(prefix):
        loads = [[] for _ in range(ranks)]
        for length in prefix:
            min(loads, key=sum).append(length)
        return loads if max(map(sum, loads)) <= capacity else None

    left = sorted(lengths, reverse=True)
    passes = []
    while left:
        count = max(n for n in range(1, len(left) + 1) if emptiest_first(left[:n]))
        passes.append(emptiest_first(left[:count]))
        left = left[count:]
    return passes
