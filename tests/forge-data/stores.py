"""Stores of a few tokens, written without a tokenizer."""

import numpy as np

from forge_data import Accounting, TokenizedExample, TokenStore
from forge_data.formats._samples import Encoded
from forge_data.preparing._batch import BatchBuilder
from forge_data.store._manifest import SourceFile
from forge_data.store._writer import StoreWriter
from forge_data.tokenizing._overflow import Fitted

EXAMPLE = TokenizedExample(
    np.array([1, 2], dtype=np.int32),
    np.array([-100, 2], dtype=np.int32),
    np.array([[0, 1], [1, 2]], dtype=np.int32),
    ("user", "assistant"),
)


def arrays(rows, *, sides=1, desirable=None):
    """Make the arrays of a batch of rows, one example (or two) a row."""
    builder = BatchBuilder()
    for row in rows:
        examples = (EXAMPLE,) * sides
        builder.add(row, Encoded(examples, desirable), Fitted(examples, None, {}))
    return builder.build(0, rows[-1] if rows else 0, None).arrays


def write(
    directory, rows=(1,), *, kind="supervised", sources=None, inputs="x", commit=True, before=lambda writer: None, **about
):
    """Write a store of rows."""
    with StoreWriter(directory) as writer:
        writer.add(arrays(rows, **about))
        count, tokens = writer.samples, writer.tokens
        manifest = writer.finish(
            kind,
            sources or [SourceFile("a", "/a", count)],
            Accounting(len(rows), len(rows), {}, count, tokens, tokens),
            tokenizer=None,
            inputs=inputs,
            settings={},
        )
        before(writer)
        if commit:
            writer.commit(manifest, '{"findings": []}\n')
    return TokenStore.open(directory) if commit else None
