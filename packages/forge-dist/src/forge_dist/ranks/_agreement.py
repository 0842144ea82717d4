"""Compare the digests of all ranks."""

from collections.abc import Mapping, Sequence


def disagreement(digests: Sequence[Mapping[str, str]]) -> str:
    """Return a sentence that names the digests in which ranks differ, or "".

    >>> disagreement([{"data": "ab"}, {"data": "cd"}, {"data": "ab"}])  # doctest: +NORMALIZE_WHITESPACE
    'the ranks do not agree: data is ab on ranks 0, 2 and cd on rank 1; start every rank with the same settings, data and
    versions'
    """
    names = sorted({name for digest in digests for name in digest})
    found: list[str] = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, digest in enumerate(digests):
            holders.setdefault(digest.get(name, "missing"), []).append(rank)
        if len(holders) > 1:
            found.append(f"{name} is " + " and ".join(f"{value} on {_rank_list(ranks)}" for value, ranks in holders.items()))
    if not found:
        return ""
    return f"the ranks do not agree: {'; '.join(found)}; start every rank with the same settings, data and versions"


def _rank_list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
