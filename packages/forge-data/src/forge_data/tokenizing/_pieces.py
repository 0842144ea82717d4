"""Texts that were tokenised each alone → the tokens of one sample."""

from typing import TYPE_CHECKING

import numpy as np

from forge_data.tokenizing._batch_tokenizer import Tokenised

if TYPE_CHECKING:
    from numpy.typing import NDArray


def joined_pieces(made: Tokenised, ends: tuple[int | None, int] | None) -> "tuple[NDArray[np.int32], NDArray[np.int64]]":
    """Join texts, with one BOS at most before the first and one EOS behind the last.

    A last text that is empty has no EOS: nothing was said, as in Axolotl.

    Args:
        made: T tokens of the texts.
        ends: ids of BOS (None if there is none) and EOS; None where each text is taken as it is.

    Returns:
        int32[T'] ids, and int64[T'] the number of the text that each is of.
    """
    parts = np.split(made.ids, np.cumsum(made.sizes)[:-1])
    if ends is not None:
        bos, eos = ends
        last = len(parts) - 1
        # The tokenizer adds its own around each; a token that writes characters is none of these.
        offsets = np.split(made.offsets, np.cumsum(made.sizes)[:-1])
        for at, (ids, places) in enumerate(zip(parts, offsets, strict=True)):
            if not places.size or not (places[:, 1] > places[:, 0]).any():
                parts[at] = ids[:0] if at else ids
                continue
            begin = int(at > 0 and ids[0] == bos)
            stop = len(ids) - int(at < last and ids[-1] == eos and places[-1, 0] == places[-1, 1])
            parts[at] = ids[begin:stop]
            if at == last and ids[-1] != eos:
                parts[at] = np.append(parts[at], np.int32(eos))
    return np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])
