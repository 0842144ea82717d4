"""Documents of a packed row → lines of ordinary batches, and back."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

Lines = Literal["padded", "equal", "single"]
"""How documents share a batch: padded on the right, equally long ones only, or one by itself."""

_WASTE = 1.25
"""Most places for each token of a forward of padded lines, beyond a forward so small that its size does not matter."""
_SMALL = 256
"""Places of a forward below which its time does not depend on their number."""

OF_ROWS = frozenset({"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})
"""Arguments that a packed row has, and a document by itself does without."""


def divide(lengths: Sequence[int], lines: Lines) -> list[list[int]]:
    """Divide documents over forwards, equally long ones or those of similar lengths together.

    >>> divide([2, 300, 2, 299], "padded"), divide([2, 300, 2, 299], "equal"), divide([2, 300], "single")
    ([[1, 3], [0, 2]], [[1], [3], [0, 2]], [[0], [1]])
    """
    if lines == "single":
        return [[document] for document in range(len(lengths))]
    groups: list[list[int]] = []
    tokens = 0
    for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
        length, group = lengths[document], groups[-1] if groups else []
        longest = lengths[group[0]] if group else 0
        places = (len(group) + 1) * longest
        fits = length == longest if lines == "equal" else places <= max(_SMALL, _WASTE * (tokens + length))
        if group and fits:
            group.append(document)
            tokens += length
        else:
            groups.append([document])
            tokens = length
    return groups


def in_a_row(lines: Sequence[torch.Tensor], groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> torch.Tensor:
    """Put the lines float[B, S, ...] of all groups into the documents' order: float[T, ...].
    Padding is left out.
    """
    found = {
        document: line[: lengths[document]]
        for documents, several in zip(groups, lines, strict=True)
        for document, line in zip(documents, several, strict=True)
    }
    return torch.cat([found[document] for document in range(len(lengths))])


def run_in_lines(
    run: Callable[..., Any],
    states: Callable[[Any], torch.Tensor],
    groups: Sequence[Sequence[int]],
    lengths: Sequence[int],
    missing: int,
) -> tuple[list[Any], torch.Tensor]:
    """Run the documents of a row group by group, and join what comes out.

    Args:
        run: numbers of documents → the output of their lines; `counts=False` for a forward that is made for other ranks alone.
        states: output → its lines float[B, S, ...].
        groups: documents of each forward.
        lengths: tokens of each document.
        missing: forwards of other ranks beyond this one's.

    Returns:
        tuple: each forward's output, and the row float[1, T, ...].
    """
    outs = [run(documents) for documents in groups]
    whole = in_a_row([states(out) for out in outs], groups, lengths)[None]
    for _ in range(missing):
        idle = run([_shortest(lengths)], counts=False)
        # Weight 0: its backward pass runs, and adds nothing.
        whole = whole + (states(idle) * 0.0).sum()
    return outs, whole


def _shortest(lengths: Sequence[int]) -> int:
    return min(range(len(lengths)), key=lengths.__getitem__)
