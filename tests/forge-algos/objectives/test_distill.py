"""Distillation towards a teacher's distributions at the learned tokens of packed rows."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forge_algos import Distill, DistillSettings, LossError, OptimizerSettings, evaluate, make_optimizer, schedule, train
from forge_algos.losses import distillation

from ..oracle import CPU, SIZES, distance, gradients, make, pack, samples

LENGTHS = (5, 1, 9, 2, 7, 13)
EXAMPLES = samples(LENGTHS)


def objective(teacher, **changes):
    return Distill(settings=DistillSettings(teacher_path="unread", **changes), teacher=teacher)


def logits_of(model, examples):
    """Return float[M, V] before each learned token, one sample at a time."""
    found = []
    for ids, labels in examples:
        logits = model(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0, :-1].float()
        found.append(logits[torch.tensor(labels)[1:] != -100])
    return torch.cat(found)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("student", ["llama-tied", "gemma2"])
def test_equals_one_sample_at_a_time(student, beta):
    """Value and gradients are the pure loss on both models' whole logits.
    The teacher, of another architecture, gets no gradients.
    """
    model, teacher = make(student), make("granite", seed=5)
    task = objective(teacher, beta=beta, temperature=1.7)
    terms = task.bind(model, device=CPU)(pack(EXAMPLES), [])
    terms.sum.backward()
    mine = gradients(model)
    model.zero_grad()
    with torch.no_grad():
        given = logits_of(teacher.eval(), EXAMPLES)
    expected = distillation(logits_of(model, EXAMPLES), given, beta=beta, temperature=1.7)
    expected.sum.backward()
    assert terms.count == expected.count == task.count(pack(EXAMPLES))
    assert terms.sum.item() == pytest.approx(expected.sum.item(), rel=1e-5)
    assert distance(mine, gradients(model)) < 1e-5
    assert all(p.grad is None for p in teacher.parameters())
    with torch.no_grad():
        forward = distillation(logits_of(model, EXAMPLES), given, beta=0.0, temperature=1.7)
    assert terms.stats["kl"].item() == pytest.approx(forward.sum.item(), rel=1e-4)


def test_the_teacher_has_no_dropout_and_no_gradients():
    """The teacher runs in evaluation mode whatever the student's mode; it is not changed.
    Neither are random numbers.
    """
    teacher = make(seed=5).train()
    for layer in teacher.model.layers:
        layer.self_attn.attention_dropout = 0.5
    before = [p.detach().clone() for p in teacher.parameters()]
    model, config = make(), OptimizerSettings(learning_rate=2e-2, lr_scheduler="constant")
    optimizer = make_optimizer(model, config)
    task = objective(teacher)
    state = torch.get_rng_state()
    outputs = list(
        train(
            model,
            [[pack(EXAMPLES[:3]), pack(EXAMPLES[3:])]] * 30,
            objective=task,
            optimizer=optimizer,
            scheduler=schedule(optimizer, config, 30),
        )
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert not teacher.training
    assert all(torch.equal(p, b) for p, b in zip(teacher.parameters(), before, strict=True))
    assert outputs[-1].figures["kl"] < 0.3 * outputs[0].figures["kl"]
    assert evaluate(model, [pack(EXAMPLES)], objective=task).loss < 0.3 * outputs[0].loss


def test_another_vocabulary_is_refused():
    """Another vocabulary is refused with both sizes and models, before any forward."""
    with torch.random.fork_rng():
        teacher = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 70}))
    with pytest.raises(LossError, match="LlamaForCausalLM, has a vocabulary of 70, .*Gemma2ForCausalLM, one of 61"):
        objective(teacher).bind(make("gemma2"), device=CPU)


def test_a_model_cannot_teach_itself():
    """The model itself is refused as its teacher: it would be trained and frozen at once."""
    model = make()
    with pytest.raises(LossError, match="the teacher is the model"):
        objective(model).bind(model, device=CPU)
