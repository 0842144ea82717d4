"""Tokens with weights: each counts as often as its weight says, in the sum and in the count, under any cut."""

import numpy as np
import pytest
import torch

from forge_algos import (
    SFT,
    Distill,
    DistillSettings,
    LossError,
    OptimizerSettings,
    PackedBatchError,
    Pretrain,
    SupervisedSettings,
    evaluate,
    make_optimizer,
    schedule,
    train,
)
from forge_algos.losses import distillation, nll

from ..oracle import CPU, distance, gradients, make, pack, samples
from ..threads import on_threads

LENGTHS = (5, 1, 9, 2, 7, 13)
CHOICES = (0.0, 0.3, 1.0, 2.0)


def weighted(lengths=LENGTHS, seed=0):
    """Return (input_ids, labels, weights) of samples; one has weights 1 throughout."""
    random = np.random.default_rng(seed)
    found = [(ids, labels, random.choice(CHOICES, len(ids)).astype(np.float32)) for ids, labels in samples(lengths, seed=seed)]
    return [(*found[0][:2], np.ones(lengths[0], np.float32)), *found[1:]]


def packed(examples):
    """Return a packed row with weights."""
    row = pack([example[:2] for example in examples])
    row.weights = np.concatenate([np.zeros(0, np.float32), *(weights for *_, weights in examples)])
    return row


def by_hand(model, examples, settings):
    """Return (sum, count) in float64, one sample and one token at a time; gradients flow."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for ids, labels, weights in examples:
        logits = model(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0]
        for at in range(1, len(ids)):
            if labels[at] == -100:
                continue
            logps, weight = logits[at - 1].log_softmax(0), float(weights[at])
            smoothed = (1 - settings.label_smoothing) * -logps[labels[at]] - settings.label_smoothing * logps.mean()
            cost = smoothed * (logps[labels[at]].detach().exp() if settings.loss == "dft" else 1)
            total = total + weight * (cost + settings.z_loss * logits[at - 1].logsumexp(0).square())
            count += weight
    return total, count


SETTINGS = [SupervisedSettings(), SupervisedSettings(loss="dft", label_smoothing=0.1, z_loss=0.01)]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("architecture", ["llama-tied", "gemma2"])
def test_equals_one_token_at_a_time(architecture, settings):
    """Sum, count and gradients are those of a naive loss in float64; both ways of scoring a head."""
    examples, objective = weighted(), SFT(settings)
    model = make(architecture).double()
    terms = objective.bind(model, device=CPU)(packed(examples), [])
    terms.sum.backward()
    mine = gradients(model)
    model.zero_grad()
    total, count = by_hand(model, examples, settings)
    total.backward()
    assert terms.count == objective.count(packed(examples)) == pytest.approx(count, rel=1e-12)
    # Eager attention has its softmax in float32.
    close = 1e-9 if architecture == "llama-tied" else 1e-6
    assert terms.sum.item() == pytest.approx(total.item(), rel=close)
    assert distance(mine, gradients(model)) < close


def test_twice_is_the_weight_two():
    """A row of weight 2 has the gradients of the row twice, and the same denominator; so has its accuracy."""
    one, other = samples((7, 9))
    twice = packed([(*one, np.full(7, 2, np.float32)), (*other, np.ones(9, np.float32))])
    repeated = pack([one, other, one])
    found = []
    for batch in (twice, repeated):
        model = make()
        terms = SFT(SupervisedSettings(z_loss=0.1)).bind(model, device=CPU)(batch, [])
        (terms.sum / terms.count).backward()
        found.append((terms, gradients(model)))
    (ours, mine), (theirs, expected) = found
    assert ours.count == theirs.count
    assert ours.stats["correct"] == theirs.stats["correct"]
    assert ours.stats["nll"].item() == pytest.approx(theirs.stats["nll"].item(), rel=1e-6)
    assert distance(mine, expected) < 1e-6


CONFIG = OptimizerSettings(learning_rate=1e-2, eps=1e-3, max_grad_norm=0.5)


def trained(cut, parallel=None):
    """Return (loss, count, gradients) of one step on these micro-batches."""
    model = make()
    optimizer = make_optimizer(model, CONFIG)
    common = {} if parallel is None else {"parallel": parallel}
    if parallel is not None:
        parallel.parameters = list(model.parameters())
    (output,) = train(model, [cut], objective=SFT(), optimizer=optimizer, scheduler=schedule(optimizer, CONFIG, 1), **common)
    return output.loss, output.loss_count, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_any_cut():
    """Packing, micro-batches and ranks change neither loss nor weights; a rank may have weights where another has none."""
    examples = weighted(seed=3)
    whole = trained([packed(examples)])
    plain, rest = pack([examples[0][:2]]), examples[1:]
    cuts = [[packed([each]) for each in examples], [plain, packed(rest[::-1])], [packed(examples[:3]), packed(examples[3:])]]
    for loss, count, weights in map(trained, cuts):
        assert (loss, count) == (pytest.approx(whole[0], rel=1e-6), pytest.approx(whole[1], rel=1e-12))
        assert distance(weights, whole[2]) < 1e-6
    by_rank = [[plain, packed(rest[:1])], [packed(rest[1:3]), packed(rest[3:])]]
    for loss, count, weights in on_threads(lambda rank: trained(by_rank[rank.rank], rank), 2):
        assert (loss, count) == (pytest.approx(whole[0], rel=1e-6), pytest.approx(whole[1], rel=1e-12))
        assert distance(weights, whole[2]) < 1e-6


@pytest.mark.parametrize("objective", [SFT(), Pretrain()])
def test_evaluation(objective):
    """A held-out loss is the weighted mean, in any batches; weights of 1 change nothing."""
    examples = weighted(seed=5)
    one = evaluate(make(), [packed(examples)], objective=objective)
    many = evaluate(make(), [packed([each]) for each in examples], objective=objective)
    assert (one.loss, one.loss_count) == (pytest.approx(many.loss, rel=1e-6), pytest.approx(many.loss_count, rel=1e-12))
    assert one.figures == {name: pytest.approx(value, rel=1e-5) for name, value in many.figures.items()}
    ones = [(ids, labels, np.ones(len(ids), np.float32)) for ids, labels, _ in examples]
    plain = evaluate(make(), [pack([each[:2] for each in examples])], objective=objective)
    assert evaluate(make(), [packed(ones)], objective=objective) == plain


def test_nothing_but_zeros():
    """A row whose learned tokens have no weight has nothing to learn, and the step goes on without it."""
    first, *rest = weighted()
    nothing = packed([(*first[:2], np.zeros(LENGTHS[0], np.float32))])
    assert SFT().count(nothing) == 0
    assert trained([nothing, packed(rest)])[:2] == trained([packed(rest)])[:2]


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_distillation(beta):
    """The divergence of each token has its weight."""
    examples, model, teacher = weighted(), make(), make("granite", seed=5).eval()
    task = Distill(settings=DistillSettings(teacher_path="unread", beta=beta), teacher=teacher)
    terms = task.bind(model, device=CPU)(packed(examples), [])
    terms.sum.backward()
    mine = gradients(model)
    model.zero_grad()
    total = torch.zeros(())
    for ids, labels, weights in examples:
        learned = torch.tensor(labels)[1:] != -100
        ours, theirs = (m(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0, :-1][learned] for m in (model, teacher))
        each = distillation(ours, theirs.detach(), beta=beta, temperature=task.settings.temperature).per_sample
        total = total + (each * torch.tensor(weights)[1:][learned]).sum()
    total.backward()
    assert terms.sum.item() == pytest.approx(total.item(), rel=1e-5)
    assert terms.count == task.count(packed(examples))
    assert distance(mine, gradients(model)) < 1e-5


def test_the_pure_loss():
    """`losses.nll` takes a weight a row, those of ignored rows too."""
    torch.manual_seed(0)
    hidden, head = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    targets, weights = torch.tensor([1, -100, 3, 4, 6]), torch.tensor([0.5, 9.0, 2.0, 0.0, 1.0])
    terms = nll(hidden, head, targets, token_weights=weights)
    costs = torch.nn.functional.cross_entropy(hidden @ head.T, targets, reduction="none", ignore_index=-100)
    torch.testing.assert_close(terms.sum, (costs * weights).sum())
    assert terms.count == 3.5
    (mine,) = torch.autograd.grad(terms.sum, hidden)
    (expected,) = torch.autograd.grad((costs * weights).sum(), hidden)
    torch.testing.assert_close(mine, expected)
    with pytest.raises(LossError, match="token_weights 4"):
        nll(hidden, head, targets, token_weights=weights[:4])


@pytest.mark.parametrize("value", [[-1.0, 1, 1], [float("nan"), 1, 1], [float("inf"), 1, 1], [1.0, 1]])
def test_refused(value):
    """Weights that are none are an error of the row."""
    row = pack(samples((3,)))
    row.weights = np.array(value, np.float32)
    with pytest.raises(PackedBatchError, match="weights must be finite numbers from 0, one for each of the 3 tokens"):
        SFT().count(row)
