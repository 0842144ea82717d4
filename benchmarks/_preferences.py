"""Pairs of answers to one prompt, made from chats, in optimizer steps; written once for both sides.

A chat's own answer is chosen, another chat's is rejected. The file is that of `_rows.py`: a row an optimizer step, its
samples chosen, rejected, chosen, rejected, ...
"""

from pathlib import Path

import numpy as np
from _chats import Chats
from _rows import Rows, write_samples


def write_pairs(path: Path, chats: Chats, *, pairs: int, steps: int, max_length: int) -> Rows:
    """Write `steps` rows of `pairs` pairs each; neither side of a pair is longer than `max_length` tokens."""
    ends = np.cumsum(chats.lengths)
    samples = [
        (chats.input_ids[end - size : end], chats.labels[end - size : end])
        for end, size in zip(ends, chats.lengths, strict=True)
    ]
    begins = [int(np.argmax(labels != -100)) for _, labels in samples]
    ids, labels = [], []
    for i, (own, begin) in enumerate(zip(samples, begins, strict=True)):
        j = (i + 1) % len(samples)
        other = samples[j][0][begins[j] :], samples[j][1][begins[j] :]
        rejected = [np.concatenate([mine[:begin], theirs]) for mine, theirs in zip(own, other, strict=True)]
        if len(own[0]) <= max_length and len(rejected[0]) <= max_length and not np.array_equal(own[0], rejected[0]):
            ids += [own[0], rejected[0]]
            labels += [own[1], rejected[1]]
        if len(ids) == 2 * pairs * steps:
            break
    else:
        raise SystemExit(
            f"the chats make {len(ids) // 2} pairs, too few for {steps} steps of {pairs}: lower --steps or --pairs"
        )
    return write_samples(path, ids, labels, each=2 * pairs)


def write_groups(path: Path, chats: Chats, *, prompts: int, each: int, steps: int, max_length: int) -> Rows:
    """Write `steps` rows of `prompts` groups: `each` chats' answers to one chat's prompt, none longer than `max_length`."""
    ends = np.cumsum(chats.lengths)
    samples = [
        (chats.input_ids[end - size : end], chats.labels[end - size : end])
        for end, size in zip(ends, chats.lengths, strict=True)
    ]
    begins = [int(np.argmax(labels != -100)) for _, labels in samples]
    ids, labels = [], []
    for i, (own, begin) in enumerate(zip(samples, begins, strict=True)):
        group = [
            [np.concatenate([mine[:begin], theirs[begins[j] :]]) for mine, theirs in zip(own, samples[j], strict=True)]
            for j in ((i + k) % len(samples) for k in range(each))
        ]
        if begin and all(begin < len(one) <= max_length for one, _ in group):
            ids += [one for one, _ in group]
            labels += [learned for _, learned in group]
        if len(ids) == each * prompts * steps:
            break
    else:
        raise SystemExit(f"the chats make {len(ids) // each} groups, too few for {steps} steps of {prompts}: lower one of them")
    return write_samples(path, ids, labels, each=each * prompts)
