"""TRL's GOLD beside ours: its loss across tokenizers, and its alignment of two tokenizers' bytes."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forge_algos.batches._aligned import span_positions
from forge_algos.losses import SharedTokens, aligned_distillation
from forge_data.aligning._align import align

trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

V, W = 13, 17


def uld_loss(own, theirs, **changes):
    """TRL's loss with the settings that keep the whole answer; tokens predict what comes after them ("bayesian")."""
    from trl.experimental.gold.gold_trainer import ULDLoss

    config = {
        "uld_crossentropy_weight": 0.0, "uld_distillation_weight": 1.0, "uld_student_temperature": 1.7,
        "uld_teacher_temperature": 1.7, "uld_skip_student_eos": False, "uld_skip_teacher_eos": False, "use_extended_uld": True,
        "uld_token_merge_strategy": "bayesian", "uld_use_hybrid_loss": True, "beta": 0.5,
    }  # fmt: skip
    tokenizers = [SimpleNamespace(get_vocab=lambda vocab=vocab: vocab) for vocab in (own, theirs)]
    return ULDLoss(SimpleNamespace(**config | changes), *tokenizers)


def drawn(seed):
    """Draw a prompt and an answer of 24 bytes that two tokenizers cut at places of their own."""
    g = np.random.default_rng(seed)
    cuts = [np.append(np.sort(g.choice(np.arange(1, 24), size, replace=False)), 24) for size in (9, 12)]
    ids = [g.integers(0, width, 3 + len(cut)) for width, cut in zip((V, W), cuts, strict=True)]
    logits = [
        torch.from_numpy(2 * g.standard_normal((1, len(each), width))).float() for each, width in zip(ids, (V, W), strict=True)
    ]
    return cuts, ids, logits


@pytest.mark.parametrize("seed", range(20))
def test_alignment(seed):
    """Two tokenizers' cuts of one text give TRL's groups of tokens."""
    from trl.experimental.gold.gold_trainer import ULDLoss

    cuts, _, _ = drawn(seed)
    offsets = [np.stack([np.append(0, cut[:-1]), cut], 1).tolist() for cut in cuts]
    groups = ULDLoss._align_by_byte_offsets(*offsets)
    text = bytes(range(97, 121))
    words = [[b"prompt", *(text[a:b] for a, b in each)] for each in offsets]
    spellings = [
        SimpleNamespace(of=lambda ids, words=each: [words[at] for at in ids.tolist()], special=frozenset()) for each in words
    ]
    ids = [np.arange(len(each), dtype=np.int32) for each in words]
    samples = [[(each, np.where(each > 0, each, -100))] for each in ids]
    (found,) = align(*samples, *spellings)
    pairs = [(list(range(a - 1, b - 1)), list(range(c - 1, d - 1))) for a, b, c, d in found.spans.tolist()]
    assert pairs == list(zip(*groups, strict=True))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta": 0.0, "uld_hybrid_matched_weight": 0.4, "uld_hybrid_unmatched_weight": 2.0},
        {"beta": 1.0},
        {"uld_use_hybrid_loss": False},
    ],
)
def test_loss(changes, seed):
    """The loss of a sample and its gradients are TRL's, for spans of one token and of several."""
    names = [f"t{at}" for at in range(30)]
    g = np.random.default_rng(seed)
    own, theirs = ({str(n): at for at, n in enumerate(g.permutation(names)[:width])} for width in (V, W))
    cuts, ids, (s, t) = drawn(seed)
    s.requires_grad_()
    labels = [torch.from_numpy(np.append([-100] * 3, each[3:]))[None] for each in ids]
    offsets = [
        torch.from_numpy(np.concatenate([np.zeros((3, 2)), np.stack([np.append(0, cut[:-1]), cut], 1)]).astype(np.int64))[None]
        for cut in cuts
    ]
    tokens = [torch.from_numpy(each)[None] for each in ids]
    expected = uld_loss(own, theirs, **changes)(s, t, *labels, *tokens, *offsets)

    ends = np.intersect1d(*cuts)
    spans = [np.stack([np.append(0, (at := np.searchsorted(cut, ends) + 1)[:-1]), at], 1) + 3 for cut in cuts]
    rows = [span_positions(each, part) for each, part in zip(ids, spans, strict=True)]
    before = []
    for logits, found in zip((s, t), rows, strict=True):
        logps = (logits[0] / 1.7).log_softmax(-1)[found.before, found.targets]
        before.append(torch.zeros(len(ends)).index_add(0, torch.from_numpy(found.of), logps))
    shared = [name for name in own if name in theirs]
    both = SharedTokens(*(torch.tensor([vocab[name] for name in shared]) for vocab in (own, theirs)))
    weights = changes.get("uld_hybrid_matched_weight"), changes.get("uld_hybrid_unmatched_weight")
    terms = aligned_distillation(
        s[0, rows[0].last],
        t[0, rows[1].last],
        shared=both if changes.get("uld_use_hybrid_loss", True) else None,
        student_before=before[0],
        teacher_before=before[1],
        beta=changes.get("beta", 0.5),
        temperature=1.7,
        weights=None if None in weights else weights,
    )
    assert terms.count == len(ends)
    assert any(len(found.of) for found in rows)
    torch.testing.assert_close(terms.sum / terms.count, expected, rtol=1e-5, atol=1e-6)
    ours, theirs_ = (torch.autograd.grad(each, s, retain_graph=True)[0] for each in (terms.sum / terms.count, expected))
    torch.testing.assert_close(ours, theirs_, rtol=1e-4, atol=1e-6)
