"""Token store → numbers to know before training: samples, lengths, roles, learned share."""

from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np

from forge_data._accounting import Accounting
from forge_data._example import ROLES
from forge_data._media import Kind, several
from forge_data._values import counted
from forge_data.store._manifest import PROMPTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forge_data.store._prompt_store import PromptStore
    from forge_data.store._token_store import TokenStore

_PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_UNKNOWN = ROLES.index("tokens")


@attrs.frozen
class Share:
    """Part of a store that one role or one source has."""

    name: str
    samples: int
    """Samples in which it occurs."""
    tokens: int
    learned: int
    """Tokens that count in the loss."""


@attrs.frozen
class SourceShare(Share):
    """Part of a store that came from one file."""

    format: str | None
    """Format of its rows; None for prompts, and where the store does not say."""
    read: int | None
    """Rows read of the whole file, as the accounting counts them; None where the store does not say."""
    kept: int | None
    """Rows of the whole file that became samples."""


@attrs.frozen(kw_only=True)
class Stats:
    """Numbers of a token store; `str()` is a table of them."""

    kind: str
    """Kind of the samples, as `TokenStore.kind`."""
    samples: int
    tokens: int
    learned: int
    """Tokens that count in the loss: labels but the first that are not -100."""
    lengths: dict[int, int]
    """Percentile → tokens of a sample; 0 is the shortest and 100 the longest."""
    learned_lengths: dict[int, int]
    """Percentile → learned tokens of a sample."""
    roles: tuple[Share, ...]
    """Shares by role of the text, in the order of `ROLES`."""
    sources: tuple[SourceShare, ...]
    """Shares by file, in the order in which they were read."""
    accounting: Accounting
    """Rows read, kept and dropped when the store was prepared."""
    held_out: int = 0
    """Samples that the store's run measures, and does not train on."""
    held_out_learned: int = 0
    """Tokens of those that are in the loss."""
    media: int = 0
    image_tokens: int = 0
    """Tokens that stand for images and audio clips."""
    samples_with_media: int = 0
    media_kinds: tuple[Kind, ...] = ()

    @property
    def learned_share(self) -> float:
        """Learned tokens by all tokens, from 0 to 1."""
        return self.learned / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts, for JSON."""
        return attrs.asdict(self) | {"accounting": self.accounting.as_dict(), "learned_share": self.learned_share}

    def __str__(self) -> str:
        prompts = self.kind == PROMPTS
        lengths = {"all": self.lengths} | ({} if prompts else {"learned": self.learned_lengths})
        lines = [
            f"{counted(self.samples, 'prompts')}, {counted(self.tokens, 'tokens')}"
            if prompts
            else (
                f"{counted(self.samples, 'samples')} ({self.kind}), {counted(self.tokens, 'tokens')}, "
                f"{self.learned:,} of them learned ({self.learned_share:.1%})"
            ),
            str(self.accounting),
            *self._held_out(prompts=prompts),
            *self._media(),
            "",
            *_table(
                ["tokens a prompt" if prompts else "tokens a sample", *(_percentile(percent) for percent in self.lengths)],
                [[name, *map(_number, values.values())] for name, values in lengths.items()],
            ),
        ]
        head = ["samples", "tokens", "share", "learned"]
        if self.roles:
            lines += ["", *_table(["role", *head], [self._row(share) for share in self.roles])]
        if self.sources:
            of_file = [[*self._row(share), *_rows_of(share)] for share in self.sources]
            lines += ["", *_table(["source", *head, "rows read", "kept", "format"], of_file)]
        return "\n".join(lines)

    def _held_out(self, *, prompts: bool) -> list[str]:
        if not self.held_out:
            return []
        trained = f", {self.learned - self.held_out_learned:,} of the learned tokens are trained on"
        return [f"held out: {self.held_out:,} of {self.samples:,}, measured and not trained on{'' if prompts else trained}"]

    def _media(self) -> list[str]:
        if not self.media:
            return []
        stand = f"for which {counted(self.image_tokens, 'tokens')} stand ({_part(self.image_tokens, self.tokens).strip()})"
        kinds = several(self.media_kinds)
        return [f"{counted(self.media, kinds)} in {counted(self.samples_with_media, 'samples')}, {stand}"]

    def _row(self, share: Share) -> list[str]:
        samples, tokens, learned = map(_number, (share.samples, share.tokens, share.learned))
        return [share.name, samples, tokens, _part(share.tokens, self.tokens), learned]


def _rows_of(share: SourceShare) -> list[str]:
    return [*("-" if count is None else _number(count) for count in (share.read, share.kept)), _short(share.format)]


def _short(name: str | None) -> str:
    """Write a format's name for a column of a table; one with texts of its own in short."""
    return "-" if name is None else f"{name[:8]}{{…}}" if "{" in name else name


def stats(store: "TokenStore | PromptStore") -> Stats:
    """Count the samples, tokens and learned tokens of a store or a view, by role and source."""
    lengths, learned = store.lengths, _learned(store)
    held_out = sorted(store.held_out)
    media = store.media_counts
    return Stats(
        kind=store.kind,
        samples=len(store),
        tokens=int(lengths.sum()),
        learned=int(learned.sum()),
        lengths=_percentiles(lengths),
        learned_lengths=_percentiles(learned),
        roles=_by_role(cast("TokenStore", store)) if store.kind != PROMPTS else (),
        sources=_by_source(store),
        accounting=store.accounting,
        held_out=len(held_out),
        held_out_learned=int(learned[held_out].sum()),
        media=int(media[:, 0].sum()),
        image_tokens=int(media[:, 1].sum()),
        samples_with_media=int((media[:, 0] > 0).sum()),
        media_kinds=store.media_kinds,
    )


def _by_role(store: "TokenStore") -> tuple[Share, ...]:
    arrays, indices = store._arrays, store._indices
    offsets, mask = arrays["offsets.bin"], arrays["loss_mask.bin"]
    bounds = arrays["segment_offsets.bin"]
    owners = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    starts = offsets[owners] + arrays["segment_starts.bin"]
    sizes = np.diff(starts, append=offsets[-1:])
    learned = np.add.reduceat(mask, starts, dtype=np.int64) if len(starts) else np.zeros(0, np.int64)
    # The first label of a sample never counts.
    firsts = np.flatnonzero(np.diff(owners, prepend=-1))
    learned[firsts] -= mask[starts[firsts]]
    cells = owners * len(ROLES) + arrays["segment_roles.bin"]
    tokens_, learned_ = (_summed(cells, values, len(bounds) - 1) for values in (sizes, learned))
    # Samples without segments have no known role.
    bare = np.diff(bounds) == 0
    if bare.any():
        counts = np.add.reduceat(mask, offsets[:-1], dtype=np.int64) - mask[offsets[:-1]]
        tokens_[bare, _UNKNOWN], learned_[bare, _UNKNOWN] = np.diff(offsets)[bare], counts[bare]
    if indices is not None:
        tokens_, learned_ = tokens_[indices], learned_[indices]
    shares = (
        Share(role, int(np.count_nonzero(tokens_[:, at])), int(tokens_[:, at].sum()), int(learned_[:, at].sum()))
        for at, role in enumerate(ROLES)
    )
    return tuple(share for share in shares if share.tokens)


def _summed(cells: "NDArray[np.int64]", values: "NDArray[np.int64]", samples: int) -> "NDArray[np.int64]":
    """Add values up: int64[N, roles].

    They are whole numbers far below 2**53, so float64 adds them exactly.
    """
    size = samples * len(ROLES)
    return np.bincount(cells, values, minlength=size).astype(np.int64).reshape(samples, len(ROLES))


def _learned(store: "TokenStore | PromptStore") -> "NDArray[np.int64]":
    return cast("TokenStore", store).loss_counts if store.kind != PROMPTS else np.zeros(len(store), dtype=np.int64)


def _by_source(store: "TokenStore | PromptStore") -> tuple[SourceShare, ...]:
    files = store._manifest.sources
    numbers = np.repeat(np.arange(len(files)), [file.samples for file in files])
    if store._indices is not None:
        numbers = numbers[store._indices]
    samples = np.bincount(numbers, minlength=len(files))
    tokens, learned = (np.bincount(numbers, each, minlength=len(files)) for each in (store.lengths, _learned(store)))
    return tuple(
        SourceShare(file.name, int(samples[n]), int(tokens[n]), int(learned[n]), file.format, file.read, file.kept)
        for n, file in enumerate(files)
        if samples[n] or (store._indices is None and file.read)
    )


def _percentiles(values: "NDArray[np.int64]") -> dict[int, int]:
    if not len(values):
        return {}
    # A length that occurs, not one between two.
    found = np.percentile(values, _PERCENTILES, method="inverted_cdf")
    return {percent: int(value) for percent, value in zip(_PERCENTILES, found, strict=True)}


def _percentile(percent: int) -> str:
    return {0: "least", 50: "median", 100: "most"}.get(percent, f"{percent} %")


def _number(value: int) -> str:
    return f"{value:,}"


def _part(value: int, whole: int) -> str:
    return f"{value / whole:.1%}" if whole else "-"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Format a table as lines: first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in (head, *rows)
    ]
