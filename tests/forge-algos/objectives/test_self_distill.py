"""Self-distillation on the student's own samples: the loss, the teacher's weights, and that it learns."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from forge_algos import (
    SFT,
    AdapterSettings,
    LossError,
    OptimizerSettings,
    PackedBatchError,
    SDFTSettings,
    SelfDistill,
    WeightAverage,
    adamw,
    adapt,
    schedule,
    train,
)
from forge_algos.adaptations import switched_off
from forge_algos.losses import distillation
from forge_algos.online import GenerateSampler, SelfSamples, sample_self, taught_batches

from ...lanes import ci_keeps, quick_keeps
from ..digits import ASK, END, PAD, START, digit_model
from ..oracle import CPU, VOCAB, distance, gradients, make, pack

SHOW = 14
"""A sign before a demonstration."""


def made_up(number=5, *, each=2, seed=0):
    """Samples of so many prompts: of ragged lengths, each with a longer prompt for the teacher."""
    random = np.random.default_rng(seed)

    def ids(low, high):
        return random.integers(3, VOCAB, random.integers(low, high)).astype(np.int32)

    prompts = tuple(ids(1, 6) for _ in range(number))
    return SelfSamples(
        prompt_ids=prompts,
        teacher_ids=tuple(np.concatenate([ids(2, 9), prompt]) for prompt in prompts),
        groups=np.repeat(np.arange(number), each),
        completion_ids=tuple(ids(1, 8) for _ in range(number * each)),
        finished=np.arange(number * each) % 3 > 0,
    )


def naive(model, teacher, samples, *, beta, temperature, skip=0):
    """The sum of the divergence, one completion and one token at a time, over the whole vocabulary."""

    def logits(which, prompt, completion):
        ids = torch.tensor(np.concatenate([prompt, completion]), dtype=torch.int64)[None]
        return which(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()

    total, count = torch.zeros(()), 0
    for group, completion in zip(samples.groups, samples.completion_ids, strict=True):
        ours = logits(model, samples.prompt_ids[group], completion)
        with torch.no_grad():
            theirs = logits(teacher, samples.teacher_ids[group], completion)
        for at in range(skip, len(completion)):
            total = total + distillation(ours[at : at + 1], theirs[at : at + 1], beta=beta, temperature=temperature).sum
            count += 1
    return total, count


def summed(model, objective, batches):
    """Loss of some batches, its count, and the gradients."""
    model.zero_grad()
    bound, total = objective.bind(model, device=CPU), 0.0
    for batch in batches:
        terms = bound(batch, [])
        terms.sum.backward()
        total += terms.sum.item()
    return total, sum(map(objective.count, batches)), gradients(model)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("architecture", quick_keeps(["llama-tied"], ["llama-tied", "gemma2"]))
def test_equals_one_token_at_a_time(architecture, beta):
    """Loss and gradients are those of a naive loop, under any cut."""
    samples, model = made_up(), make(architecture)
    teacher = make(architecture, seed=3).eval()
    settings = SDFTSettings(beta=beta, temperature=1.3, skip_tokens=2)
    expected, count = naive(model, teacher, samples, beta=beta, temperature=1.3, skip=2)
    model.zero_grad()
    expected.backward()
    wanted = gradients(model)
    frozen = SelfDistill(settings=settings, teacher=teacher)
    for max_tokens in (30, 10_000):
        batches = taught_batches(samples, max_tokens=max_tokens, skip_tokens=2)
        found, number, grads = summed(model, frozen, batches)
        assert number == count
        assert found == pytest.approx(expected.item(), rel=1e-5)
        assert distance(grads, wanted) < 1e-5
    assert len(taught_batches(samples, max_tokens=30)) > 2


@pytest.mark.slow
def test_equals_trl():
    """At β=1 and β=0 it is TRL's full-vocabulary loss at α=1 and α=0."""
    trl = pytest.importorskip("trl.experimental.sdft.loss_utils", reason="TRL is not installed")
    random = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(40, 17, generator=random) for _ in range(2))
    for beta in (0.0, 0.5, 1.0):
        theirs = trl.compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=beta).sum()
        assert distillation(student, teacher, beta=beta).sum.item() == pytest.approx(theirs.item(), rel=1e-5)


@pytest.mark.parametrize("adapter", ["lora", "osft"])
def test_the_initial_model_teaches_with_the_adapter_off(adapter):
    """Without a second model, loss and gradients are those from a copy of the initial one."""
    base, samples = make(), made_up()
    model = adapt(copy.deepcopy(base), AdapterSettings(adapter=adapter, **({"lora_r": 4} if adapter == "lora" else {}))).model
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.05 * torch.randn_like(p)
    settings, batches = SDFTSettings(), taught_batches(samples, max_tokens=60)
    copied = summed(model, SelfDistill(settings=settings, teacher=base), batches)
    off = summed(model, SelfDistill(settings=settings, teacher=switched_off), batches)
    assert off[:2] == pytest.approx(copied[:2], rel=1e-5)
    assert distance(off[2], copied[2]) < 1e-5


def test_the_average_teaches():
    """The teacher's weights are the moving average, written out; the student's are the same bits after each exchange."""
    rate, model = 0.3, make()
    settings = OptimizerSettings(learning_rate=1e-2, lr_scheduler="constant")
    optimizer = adamw(model, settings)
    average = WeightAverage(optimizer, rate)
    objective = SelfDistill(settings=SDFTSettings(), teacher=average.exchanged)
    batches = taught_batches(made_up(), max_tokens=60)
    expected = [p.detach().clone() for p in model.parameters()]
    for _ in train(
        model,
        [batches] * 4,
        objective=objective,
        optimizer=optimizer,
        scheduler=schedule(optimizer, settings, 4),
        average=average,
    ):
        expected = [(1 - rate) * old + rate * p.detach() for old, p in zip(expected, model.parameters(), strict=True)]
    before = [p.detach().clone() for p in model.parameters()]
    with average.exchanged(model):
        for p, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.detach(), wanted, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    # Now the loss is that from a copy with these weights.
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        for p, wanted in zip(teacher.parameters(), expected, strict=True):
            p.copy_(wanted)
    copied = summed(model, SelfDistill(settings=SDFTSettings(), teacher=teacher), batches)
    held = summed(model, objective, batches)
    assert held[0] == pytest.approx(copied[0], rel=1e-4)
    assert distance(held[2], copied[2]) < 1e-4


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_every_optimizer_keeps_an_average(name):
    """The average begins as the first weights and lies in the optimizer's state, whatever else that holds."""
    from forge_algos import make_optimizer

    model = make()
    first = [p.detach().clone() for p in model.parameters()]
    settings = OptimizerSettings(optimizer=name, learning_rate=1e-2, lr_scheduler="constant")
    optimizer = make_optimizer(model, settings)
    average = WeightAverage(optimizer, 1e-9)
    objective = SelfDistill(settings=SDFTSettings(), teacher=average.exchanged)
    steps = [taught_batches(made_up(), max_tokens=60)] * 3
    list(
        train(
            model, steps, objective=objective, optimizer=optimizer, scheduler=schedule(optimizer, settings, 3), average=average
        )
    )
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), first, strict=True))
    with average.exchanged(model):
        for p, old in zip(model.parameters(), first, strict=True):
            torch.testing.assert_close(p.detach(), old, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused():
    """The model as its own copy, and rows of different completions."""
    model, samples = make(), made_up()
    with pytest.raises(LossError, match="the model that is trained"):
        SelfDistill(settings=SDFTSettings(), teacher=model).bind(model, device=CPU)
    one, other = (taught_batches(s, max_tokens=1000)[0] for s in (samples, made_up(seed=1)))
    import attrs

    bound = SelfDistill(settings=SDFTSettings(), teacher=lambda _: nullcontext()).bind(model, device=CPU)
    with pytest.raises(PackedBatchError, match="different completions"):
        bound(attrs.evolve(one, teacher=other.teacher), [])


def rows(questions, shown, answers):
    """Question, perhaps after a demonstration, and the answer that is learned."""
    found = []
    for question, demonstration, answer in zip(questions, shown, answers, strict=True):
        before = [] if demonstration is None else [SHOW, demonstration]
        ids = np.array([*before, START, question, ASK, answer, END])
        found.append((ids, np.where(np.arange(len(ids)) < len(ids) - 2, -100, ids)))
    return found


def fit(model, steps, objective, rate, average=None, optimizer=None):
    """Take steps at a constant rate."""
    settings = OptimizerSettings(learning_rate=rate, lr_scheduler="constant")
    optimizer = optimizer or adamw(model, settings)
    scheduler = schedule(optimizer, settings, 1000)
    for _ in train(model, steps, objective=objective, optimizer=optimizer, scheduler=scheduler, average=average):
        pass


@pytest.fixture(scope="module")
def in_context():
    """A model that repeats a demonstration where it has one, and without one answers any digit."""
    model, random = digit_model(), np.random.default_rng(0)

    def drawn():
        for _ in range(150):
            questions, shown = random.integers(0, 10, 64), random.integers(0, 10, 64)
            known = [int(digit) if random.random() < 0.7 else None for digit in shown]
            yield [pack(rows(questions, known, shown))]

    fit(model, drawn(), SFT(), 5e-3)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ci_keeps(["ema"], ["ema", "initial"]))
def test_it_learns_what_the_demonstrations_show(in_context, teacher):
    """From demonstrations of answers that it does not know, the model comes to give them unasked."""
    model = copy.deepcopy(in_context)
    sampler = GenerateSampler(model, eos_ids=[END], pad_id=PAD, batch_tokens=4096)
    digits = np.arange(10)
    asked = [np.array([START, d, ASK], np.int32) for d in digits]
    taught = [np.array([SHOW, (d + 3) % 10, START, d, ASK], np.int32) for d in digits]

    def right(prompts, wanted):
        found = sampler.sample(prompts, num_generations=1, max_new_tokens=2, temperature=1.0, top_p=1.0, top_k=1, seed=0)
        return float(np.mean([completion.ids[0] == digit for completion, digit in zip(found, wanted, strict=True)]))

    assert right(taught, (digits + 3) % 10) == 1
    assert right(asked, (digits + 3) % 10) < 0.5
    rate = {"teacher_rate": 0.005} if teacher == "ema" else {}
    settings = SDFTSettings(teacher=teacher, max_new_tokens=2, num_generations=4, **rate)
    optimizer = adamw(model, OptimizerSettings(learning_rate=3e-3, lr_scheduler="constant"))
    average = WeightAverage(optimizer, settings.teacher_rate) if teacher == "ema" else None
    weights = {"ema": average and average.exchanged, "initial": in_context}

    def steps():
        for step in range(50):
            samples = sample_self(sampler, asked, taught, settings=settings, seed=step)
            yield taught_batches(samples, max_tokens=4096)

    fit(model, steps(), SelfDistill(settings=settings, teacher=weights[teacher]), 3e-3, average, optimizer)
    assert right(asked, (digits + 3) % 10) >= 0.9
