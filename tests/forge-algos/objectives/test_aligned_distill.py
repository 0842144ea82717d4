"""Distillation across tokenizers: packed rows equal one sample at a time, and the student learns."""

from typing import NamedTuple

import attrs
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forge_algos import (
    AlignedDistill,
    DistillSettings,
    LossError,
    OptimizerSettings,
    PackedBatchError,
    evaluate,
    make_optimizer,
    schedule,
    train,
)
from forge_algos.losses import SharedTokens, aligned_distillation

from ..oracle import CPU, SIZES, distance, gradients, make, pack

SPANS = [
    ([(1, 2), (2, 4), (4, 5)], [(2, 3), (3, 4), (4, 7)]),
    ([(3, 4)], [(1, 4)]),
    ([(1, 4), (5, 6)], [(1, 2), (2, 4)]),
]
"""Of each sample: tokens of the student, and of the teacher."""
SHARED = np.array([3, 60, 7, 20]), np.array([5, 1, 69, 20])


class Batch(NamedTuple):
    row: object
    teacher: object
    spans: np.ndarray


def teacher_of_another_vocabulary(**changes):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 70, **changes}))


def sample(length, vocabulary, seed):
    ids = np.random.default_rng([seed, length]).integers(0, vocabulary, length)
    return ids.tolist(), ids.tolist()


def samples():
    """Return (student's sample, teacher's, spans) of three texts."""
    return [
        (sample(6, SIZES["vocab_size"], 1 + at), sample(8, 70, 7 + at), np.concatenate(spans, axis=1))
        for at, spans in enumerate(SPANS)
    ]


def batch_of(chosen):
    ours, theirs, spans = zip(*chosen, strict=True)
    begins = np.array([[6 * at, 6 * at, 8 * at, 8 * at] for at in range(len(chosen))])
    moved = [part + begin for part, begin in zip(spans, begins, strict=True)]
    return Batch(pack(ours), pack(theirs), np.concatenate(moved))


def objective(teacher, shared=SHARED, **changes):
    settings = DistillSettings(teacher_path="unread", **{"loss": "gold"} | changes)
    return AlignedDistill(settings=settings, teacher=teacher, shared=shared)


def one_at_a_time(model, teacher, chosen, shared, **how):
    """Add up the whole loss of each sample, from both models' whole logits."""
    total = 0.0
    for (ids, _), (other, _), spans in chosen:
        parts = []
        for each, tokens, bounds in ((model, ids, spans[:, :2]), (teacher, other, spans[:, 2:])):
            logits = each(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0].float()
            logps = (logits / how["temperature"]).log_softmax(-1)
            before = [sum(logps[at - 1, tokens[at]] for at in range(a, b - 1)) + 0 * logps[0, 0] for a, b in bounds.tolist()]
            parts += [logits[torch.tensor(bounds[:, 1]) - 2], torch.stack(before)]
        s, s_before, t, t_before = parts
        total = (
            total
            + aligned_distillation(s, t, shared=shared, student_before=s_before, teacher_before=t_before.detach(), **how).sum
        )
    return total


@pytest.mark.parametrize(
    ("student", "changes"),
    [
        ("llama-tied", {"beta": 0.3}),
        ("gemma2", {"matched_weight": 0.4, "unmatched_weight": 2.0, "beta": 1.0}),
        ("llama-tied", {"loss": "uld"}),
    ],
)
def test_equals_one_sample_at_a_time(student, changes):
    """Value, count and gradients of a packed row are those of the whole loss, sample by sample."""
    model, teacher, chosen = make(student), teacher_of_another_vocabulary(), samples()
    shared = (np.zeros(0, np.int64),) * 2 if changes.get("loss") == "uld" else SHARED
    task = objective(teacher, shared, temperature=1.7, **changes)
    terms = task.bind(model, device=CPU)(batch_of(chosen), [])
    terms.sum.backward()
    mine = gradients(model)
    model.zero_grad()
    weights = (0.4, 2.0) if "matched_weight" in changes else None
    how = {"beta": changes.get("beta", 0.5), "temperature": 1.7, "weights": weights}
    expected = one_at_a_time(model, teacher.eval(), chosen, SharedTokens(*map(torch.from_numpy, shared)), **how)
    expected.backward()
    assert terms.count == task.count(batch_of(chosen)) == 6
    assert terms.sum.item() == pytest.approx(expected.item(), rel=1e-5)
    assert distance(mine, gradients(model)) < 1e-5
    assert all(p.grad is None or not p.grad.any() for p in teacher.parameters())


def test_weights_of_tokens():
    """A span counts as often as its tokens' mean weight says, in the sum and in the count."""
    model, teacher, chosen = make(), teacher_of_another_vocabulary(), samples()
    whole, task = batch_of(chosen), objective(teacher)
    per_token = np.tile([9.0, 2.0, 1.0, 3.0, 0.0, 4.0], 3)
    weighted = whole._replace(row=WithWeights.of(whole.row, per_token))
    bound = task.bind(model, device=CPU)
    alone = [bound(Batch(whole.row, whole.teacher, whole.spans[at : at + 1]), []).sum.item() for at in range(6)]
    shares = [2.0, 2.0, 0.0, 3.0, 2.0, 4.0]
    terms = bound(weighted, [])
    assert terms.count == task.count(weighted) == sum(shares)
    assert terms.sum.item() == pytest.approx(sum(a * b for a, b in zip(alone, shares, strict=True)), rel=1e-5)


@attrs.frozen
class WithWeights:
    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    max_seqlen: int
    weights: np.ndarray

    @classmethod
    def of(cls, row, weights):
        return cls(row.input_ids, row.labels, row.position_ids, row.cu_seqlens, row.max_seqlen, weights)


def test_learns_in_any_micro_batches():
    """Steps do not depend on how they are cut, and the distance falls; an evaluation agrees."""
    found = []
    for cut in ([3], [1, 2]):
        model, config = make(), OptimizerSettings(learning_rate=2e-2, lr_scheduler="constant")
        optimizer, chosen = make_optimizer(model, config), samples()
        batches = [batch_of(chosen[sum(cut[:at]) : sum(cut[: at + 1])]) for at in range(len(cut))]
        task = objective(teacher_of_another_vocabulary(), matched_weight=1.0, unmatched_weight=1.0)
        steps = train(model, [batches] * 20, objective=task, optimizer=optimizer, scheduler=schedule(optimizer, config, 20))
        outputs = list(steps)
        found.append([each.loss for each in outputs])
        assert outputs[-1].loss < 0.6 * outputs[0].loss
        assert outputs[0].figures["matched"] + outputs[0].figures["unmatched"] == pytest.approx(outputs[0].loss, rel=1e-5)
        assert evaluate(model, [batch_of(chosen)], objective=task).loss < outputs[-1].loss * 1.2
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_bad_input_is_refused():
    """Spans outside of their documents, and shared tokens outside of a vocabulary, are refused."""
    whole, model = batch_of(samples()), make()
    task = objective(teacher_of_another_vocabulary())
    for wrong, which in (([[5, 7, 1, 2]], "student's"), ([[1, 2, 0, 1]], "teacher's"), ([[1, 2, 3, 3]], "teacher's")):
        with pytest.raises(PackedBatchError, match=f"a span has the tokens .* of the {which} row"):
            task.count(whole._replace(spans=np.array(wrong)))
    with pytest.raises(LossError, match="the teacher's ids must be 1 different ones below 70"):
        objective(task.teacher, (np.array([1]), np.array([70]))).bind(model, device=CPU)
    with pytest.raises(LossError, match="the teacher is the model"):
        objective(model).bind(model, device=CPU)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"matched_weight": 1.0, "unmatched_weight": 1.0}, "no effect with loss=jsd"),
        ({"loss": "gold", "matched_weight": 1.0}, "given alone"),
        ({"loss": "gold", "matched_weight": 0.0, "unmatched_weight": 0.0}, "both 0"),
        ({"loss": "uld", "beta": 0.1}, "beta=0.1 has no effect with loss=uld"),
    ],
)
def test_settings_without_effect_are_refused(given, said):
    """Weights without the loss that reads them, and a β without a JSD, are refused."""
    with pytest.raises(ValueError, match=said):
        DistillSettings(teacher_path="large", **given)
