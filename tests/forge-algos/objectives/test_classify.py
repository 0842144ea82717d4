"""Sequence classification equals transformers' own losses, however a step is cut, and is what plain transformers loads."""

import itertools

import numpy as np
import pytest
import torch
import transformers

from forge_algos import (
    AdapterSettings,
    Classify,
    ClassifyBatch,
    LossError,
    OptimizerSettings,
    PackedBatchError,
    adapt,
    evaluate,
    make_optimizer,
    schedule,
    train,
)
from forge_algos.losses import classification

from ...lanes import ci_keeps
from ..oracle import SIZES, distance, gradients, pack, samples

LENGTHS = (5, 3, 9, 1, 7, 4, 6, 2)
C = 3


def classifier(problem="single_label_classification", *, labels=C, kind="Llama", **more):
    names = {number: f"kind {number}" for number in range(labels)}
    config = getattr(transformers, f"{kind}Config")(**SIZES, num_labels=labels, id2label=names, problem_type=problem, **more)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


def targets_of(multi_label, *, seed=0):
    random = np.random.default_rng(seed)
    if multi_label:
        return random.integers(0, 2, (len(LENGTHS), C)).astype(np.float32)
    return random.integers(0, C, len(LENGTHS))


def batches(targets, cuts):
    """Return micro-batches of the documents, cut at these places."""
    documents = samples(LENGTHS)
    return [
        ClassifyBatch(row=pack(documents[begin:end]), targets=targets[begin:end]) for begin, end in itertools.pairwise(cuts)
    ]


def theirs(model, targets):
    """Return transformers' own loss of one padded batch."""
    documents = [ids for ids, _ in samples(LENGTHS)]
    ids, mask = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64), torch.zeros(len(LENGTHS), max(LENGTHS))
    for line, document in enumerate(documents):
        ids[line, : len(document)] = torch.tensor(document)
        mask[line, : len(document)] = 1
    return model(input_ids=ids, attention_mask=mask.long(), labels=torch.tensor(targets), use_cache=False)


def step(model, micro_batches, objective, *, rate=1e-9, steps=1):
    settings = OptimizerSettings(learning_rate=rate)
    optimizer = make_optimizer(model, settings)
    scheduler = schedule(optimizer, settings, num_steps=steps)
    return list(
        train(model, [micro_batches] * steps, objective=objective, optimizer=optimizer, scheduler=scheduler, max_grad_norm=0.0)
    )


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("cuts", [(0, 8), (0, 1, 4, 4, 8)])
def test_it_is_transformers_own_loss(multi_label, cuts):
    """Loss and gradients are those of one padded batch in plain transformers, whatever the micro-batches; one may be empty."""
    problem = "multi_label_classification" if multi_label else "single_label_classification"
    targets = targets_of(multi_label)
    plain = classifier(problem)
    expected = theirs(plain, targets)
    expected.loss.backward()
    model = classifier(problem)
    (output,) = step(model, batches(targets, cuts), Classify(labels=C, multi_label=multi_label))
    assert output.loss == pytest.approx(expected.loss.item(), rel=1e-6)
    assert output.loss_count == len(LENGTHS)
    assert distance(gradients(model), gradients(plain)) < 1e-5


def f1(predicted, actual):
    """Return the mean of the classes' F1 by the definition, over classes that occur or are predicted."""
    found = []
    for c in range(predicted.shape[1]):
        p, a = predicted[:, c], actual[:, c]
        if p.any() or a.any():
            precision = (p & a).sum() / p.sum() if p.any() else 0.0
            recall = (p & a).sum() / a.sum() if a.any() else 0.0
            found.append(2 * precision * recall / (precision + recall) if precision + recall else 0.0)
    return float(np.mean(found))


@pytest.mark.parametrize("multi_label", [False, True])
def test_figures_do_not_depend_on_the_cut(multi_label):
    """Accuracy and macro F1 are those of all predictions together, whatever batches an evaluation has."""
    targets, model = targets_of(multi_label, seed=4), classifier()
    with torch.no_grad():
        logits = theirs(model.eval(), targets_of(False)).logits.numpy()
    if multi_label:
        predicted, actual = logits > 0, targets > 0.5
    else:
        predicted, actual = logits.argmax(1)[:, None] == np.arange(C), targets[:, None] == np.arange(C)
    for cuts in ((0, 8), (0, 3, 5, 8)):
        found = evaluate(model, batches(targets, cuts), objective=Classify(labels=C, multi_label=multi_label))
        assert found.figures["accuracy"] == pytest.approx((predicted == actual).all(1).mean())
        assert found.figures["f1"] == pytest.approx(f1(predicted, actual))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("multi_label", "adapter"),
    ci_keeps(
        [(False, "none"), (True, "lora")], [(several, adapter) for several in (False, True) for adapter in ("none", "lora")]
    ),
)
def test_it_learns_and_plain_transformers_loads_it(multi_label, adapter, tmp_path):
    """Every document gets its labels; what save_pretrained writes gives the same logits, names and problem type."""
    problem = "multi_label_classification" if multi_label else "single_label_classification"
    targets = targets_of(multi_label, seed=2)
    adapted = adapt(classifier(problem), AdapterSettings(adapter=adapter, **({"lora_r": 4} if adapter == "lora" else {})))
    objective = Classify(labels=C, multi_label=multi_label)
    rate = 2e-2
    outputs = step(adapted.model, batches(targets, (0, 5, 8)), objective, rate=rate, steps=30)
    assert outputs[-1].loss < 0.2 * outputs[0].loss
    assert outputs[-1].figures == {"accuracy": 1.0, "f1": pytest.approx(1.0)}
    model = adapted.model if adapter == "none" else adapted.model.merge_and_unload()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(loaded.eval(), targets).logits, theirs(model.eval(), targets).logits, rtol=0, atol=1e-5
        )
    assert loaded.config.id2label == {0: "kind 0", 1: "kind 1", 2: "kind 2"}
    assert loaded.config.problem_type == problem


@pytest.mark.parametrize("kind", ["Qwen3", "Mistral"])
def test_other_architectures(kind):
    """The same with a class of each kind."""
    targets = targets_of(False)
    plain, model = classifier(kind=kind), classifier(kind=kind)
    (output,) = step(model, batches(targets, (0, 4, 8)), Classify(labels=C))
    assert output.loss == pytest.approx(theirs(plain, targets).loss.item(), rel=1e-5)


def test_what_does_not_fit_is_refused():
    """One error names what is wanted and what came."""
    targets = targets_of(False)
    with pytest.raises(LossError, match="gives a sequence 3 numbers and not 4: load it .* num_labels=4"):
        step(classifier(), batches(targets, (0, 8)), Classify(labels=4))
    for wrong, message in (
        (targets[:3], r"shape \[8\]"),
        (targets.astype(np.float32), "classes in int64"),
        (np.full(8, 3), "numbers from 0 to 2"),
        (np.full(8, -100), "numbers from 0 to 2"),
    ):
        with pytest.raises(PackedBatchError, match=message):
            step(classifier(), [ClassifyBatch(row=pack(samples(LENGTHS)), targets=wrong)], Classify(labels=C))
    for wrong in (np.zeros((8, 2), np.float32), np.full((8, C), np.nan, np.float32)):
        with pytest.raises(PackedBatchError, match="targets"):
            batch = ClassifyBatch(row=pack(samples(LENGTHS)), targets=wrong)
            step(classifier(), [batch], Classify(labels=C, multi_label=True))
    with pytest.raises(TypeError, match="labels"):
        Classify(labels=True)
    with pytest.raises(ValueError, match="labels"):
        Classify(labels=0)
    for logits, wrong in ((2,), (2,)), ((2, 3), (2,)), ((2, 3), (3,)):
        with pytest.raises(LossError, match="wanted"):
            classification(torch.zeros(logits), torch.zeros(wrong))
    for wrong, message in (
        (torch.ones(3, dtype=torch.int64), "classes in int64 of the shape"),
        (torch.ones(2, dtype=torch.int32), "classes in int64 of the shape"),
        (torch.tensor([0, 3]), "classes from 0 to 2 are wanted, found 0 to 3"),
        (torch.tensor([0, -100]), "classes from 0 to 2 are wanted, found -100 to 0"),  # torch sums one term; the count was 2
        (torch.full((2, 3), 2.0), "numbers from 0 to 1 are wanted, found 2 to 2"),
    ):
        with pytest.raises(LossError, match=message):
            classification(torch.zeros(2, 3), wrong)
