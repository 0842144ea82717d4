"""Distillation from stored log-probabilities on packed rows: the live teacher's loss where all are stored."""

import attrs
import numpy as np
import pytest
import torch

from forge_algos import (
    Distill,
    DistillSettings,
    OptimizerSettings,
    PackedBatchError,
    TopDistill,
    make_optimizer,
    schedule,
    top_logps,
    train,
)
from forge_algos.losses import TopTokens, top_distillation

from ..oracle import CPU, distance, gradients, make, pack, samples
from .test_distill import logits_of

EXAMPLES = samples((5, 1, 9, 2, 7, 13))


def objective(**changes):
    return TopDistill(settings=DistillSettings(teacher_logprobs="unread", **changes))


def stored(teacher, examples, k, temperature=1.0):
    (found,) = top_logps(teacher, [pack(examples)], k=k, temperature=temperature)
    return found


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("student", ["llama-tied", "gemma2"])
def test_all_tokens_equal_the_live_teacher(student, beta):
    """With K = V value, gradients, count and figure are those of `Distill`, with a temperature."""
    model, teacher = make(student), make("granite", seed=5)
    live = Distill(settings=DistillSettings(teacher_path="unread", beta=beta, temperature=1.7), teacher=teacher)
    expected = live.bind(model, device=CPU)(pack(EXAMPLES), [])
    expected.sum.backward()
    wanted = gradients(model)
    model.zero_grad()
    task, batch = objective(beta=beta, temperature=1.7), stored(teacher, EXAMPLES, 1000, 1.7)
    assert batch.ids.shape[1] == 61
    terms = task.bind(model, device=CPU)(batch, [])
    terms.sum.backward()
    assert terms.count == expected.count == task.count(batch)
    assert terms.sum.item() == pytest.approx(expected.sum.item(), rel=1e-6)
    assert terms.stats["kl"].item() == pytest.approx(expected.stats["kl"].item(), rel=1e-5)
    assert distance(gradients(model), wanted) < 1e-5


def test_a_few_tokens_equal_one_sample_at_a_time():
    """With K = 4 and token weights a packed row is the weighted sum of its samples, and of the pure loss."""
    model, teacher = make("gemma2"), make("granite", seed=5)
    batch = stored(teacher, EXAMPLES, 4)
    top = TopTokens(*(torch.from_numpy(each) for each in (batch.ids.astype(np.int64), batch.logps, batch.rest)))
    logits = logits_of(model, EXAMPLES)
    expected = top_distillation(logits, top, beta=0.5)
    bound = objective().bind(model, device=CPU)
    assert bound(batch, []).sum.item() == pytest.approx(expected.sum.item(), rel=1e-5)
    alone = [bound(stored(teacher, [each], 4), []).sum.item() for each in EXAMPLES if (np.array(each[1])[1:] != -100).any()]
    assert bound(batch, []).sum.item() == pytest.approx(sum(alone), rel=1e-5)


def test_learns_without_the_teacher():
    """Thirty steps bring the model nearer to a teacher that is not there; the idle batch has a finite loss."""
    model, config = make(), OptimizerSettings(learning_rate=2e-2, lr_scheduler="constant")
    optimizer, batch = make_optimizer(model, config), stored(make(seed=5), EXAMPLES, 8)
    task = objective(beta=1.0)
    assert torch.isfinite(task.bind(model, device=CPU)(task.idle(), []).sum)
    steps = train(model, [[batch]] * 30, objective=task, optimizer=optimizer, scheduler=schedule(optimizer, config, 30))
    found = [step.figures["kl"] for step in steps]
    assert found[-1] < 0.3 * found[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rest": np.zeros(2, np.float32)}, "learned tokens, and the teacher ids"),
        ({"ids": 61}, "go up to 61"),
        ({"logps": -np.inf}, "must be a token's"),
        ({"logps": np.nan}, "some are NaN"),
        ({"rest": np.inf}, "some are NaN or infinite"),
    ],
)
def test_refusals(changes, message):
    """Other numbers of tokens than are learned, tokens of another vocabulary, and what is no log-probability."""
    model, batch = make(), stored(make(seed=5), EXAMPLES, 2)
    changes = {
        name: np.full_like(getattr(batch, name), value) if np.isscalar(value) else value for name, value in changes.items()
    }
    with pytest.raises(PackedBatchError, match=message):
        objective().bind(model, device=CPU)(attrs.evolve(batch, **changes), [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teacher_path": "a", "teacher_logprobs": "b"}, "not both"),
        ({"teacher_path": "a", "teacher_rest": "left_out"}, "no effect without"),
        ({"teacher_logprobs": "b", "loss": "gold"}, "whole distributions"),
        ({"teacher_logprobs": "b", "teacher_rest": "left_out", "beta": 1.0}, "infinite"),
    ],
)
def test_settings_that_are_refused(given, message):
    """One teacher, and nothing that its file does not say."""
    with pytest.raises(ValueError, match=message):
        DistillSettings(**given)
