"""One step of each preference objective, for every cut and two ranks, against one big batch."""

import functools
import itertools

import numpy as np
import pytest

from forge_algos import (
    DPO,
    KTO,
    ORPO,
    DPOSettings,
    KTOSettings,
    ORPOSettings,
    Reward,
    RewardSettings,
    SimPO,
    SimPOSettings,
)

from ....lanes import ci_keeps, quick_keeps
from ...oracle import distance, make, worst
from ...preferences import (
    a_classifier,
    kto_batch,
    loss_and_gradients,
    naive_dpo,
    naive_kto,
    naive_orpo,
    naive_reward,
    naive_simpo,
    naive_wpo,
    one_step,
    pair_batch,
    rotated,
    shareable,
    some_pairs,
    token_logps,
)
from ...threads import on_threads

PAIRS = some_pairs(8, seed=3)
CUTS = {"8x1": [1] * 8, "4x2": [2] * 4, "1x8": [8], "8=5+0+3": [5, 0, 3], "7=4+3": [4, 3], "7x1": [1] * 7}
DESIRABLE = [True, False, False, True, True, True, False, True]
MARGINS = np.linspace(0.0, 2.1, 8, dtype=np.float32)


def reference():
    """Return another model than the policy, so that no ratio is 1 and KTO's KL is above 0."""
    return make(seed=8)


@functools.cache
def reference_logps_of_pairs():
    found = [[token_logps(reference(), p, y).sum().item() for y in (chosen, rejected)] for p, chosen, rejected in PAIRS]
    return np.array(found, np.float32)


@functools.cache
def reference_logps_of_completions():
    return [
        np.array([token_logps(reference(), *pair[:2]).sum().item() for pair in pairs], np.float32)
        for pairs in (PAIRS, rotated(PAIRS))
    ]


def of_pairs(cut, **kind):
    """Return the pairs numbered `cut` in one row, with all that any objective reads."""
    logps = reference_logps_of_pairs()[cut].reshape(-1)
    return pair_batch(PAIRS[cut], ref_logps=logps, margins=MARGINS[cut], **kind)


def of_completions(cut, *, share=False, total=8):
    mismatched = rotated(PAIRS[:total])[cut]
    logps, _ = reference_logps_of_completions()
    others = np.array([token_logps(reference(), *pair).sum().item() for pair in mismatched], np.float32)
    return kto_batch(PAIRS[cut], DESIRABLE[cut], mismatched, ref_logps=logps[cut], ref_mismatched_logps=others)


def dpo(*types, weights=None, **settings):
    """Return the objective, and the naive mean of its mixture."""

    def naive(model, n):
        parts = [naive_dpo(model, PAIRS[:n], reference(), beta=settings.get("beta", 0.1), kind=kind) for kind in types]
        return sum(weight * part for weight, part in zip(weights or [1.0] * len(parts), parts, strict=True))

    return DPO(DPOSettings(loss_type=types, loss_weights=weights, **settings)), naive


def kto(**settings):
    weights = settings.get("desirable_weight", 1.0), settings.get("undesirable_weight", 1.0)
    return KTO(KTOSettings(**settings)), lambda model, n: naive_kto(
        model, PAIRS[:n], DESIRABLE[:n], rotated(PAIRS[:n]), reference(), beta=settings.get("beta", 0.1), weights=weights,
        kl=0.0 if "loss_type" in settings else None,
    )  # fmt: skip


CASES = {
    "sigmoid": dpo("sigmoid", beta=0.5),
    "hinge": dpo("hinge"),
    "ipo": dpo("ipo"),
    "bco_pair": dpo("bco_pair"),
    "apo_zero": dpo("apo_zero"),
    "sppo_hard": dpo("sppo_hard"),
    "sft": dpo("sft"),
    "sigmoid+sft": dpo("sigmoid", "sft"),
    "wpo": (
        DPO(DPOSettings(loss_type=["sigmoid", "sft"], beta=0.5, wpo=True)),
        lambda model, n: naive_wpo(model, PAIRS[:n], reference(), beta=0.5),
    ),
    "mpo": dpo("sigmoid", "bco_pair", "sft", weights=[0.8, 0.2, 1.5]),
    "orpo": (ORPO(ORPOSettings(beta=0.7)), lambda model, n: naive_orpo(model, PAIRS[:n], beta=0.7)),
    "orpo with prompts": (
        ORPO(ORPOSettings(beta=0.7, learn_prompt=True)),
        lambda model, n: naive_orpo(model, PAIRS[:n], beta=0.7, learn_prompt=True),
    ),
    "simpo": (SimPO(SimPOSettings(beta=2.5, gamma=0.6)), lambda model, n: naive_simpo(model, PAIRS[:n], beta=2.5, gamma=0.6)),
    "simpo with likelihood": (
        SimPO(SimPOSettings(beta=2.5, gamma=0.6, cpo_alpha=0.7)),
        lambda model, n: naive_simpo(model, PAIRS[:n], beta=2.5, gamma=0.6)
        + 0.7 * naive_dpo(model, PAIRS[:n], reference(), kind="sft"),
    ),
    "kto": kto(beta=0.3, desirable_weight=1.3, undesirable_weight=0.8),
    "kto apo_zero_unpaired": kto(beta=0.3, desirable_weight=1.3, undesirable_weight=0.8, loss_type="apo_zero_unpaired"),
    "reward": (
        Reward(RewardSettings(centering=0.05)),
        lambda model, n: naive_reward(model, PAIRS[:n], margins=MARGINS, centering=0.05),
    ),
}
UNCOUPLED = {"hinge", "ipo", "bco_pair", "apo_zero", "sppo_hard", "sft", "kto apo_zero_unpaired"}


def model_of(name):
    return a_classifier() if name == "reward" else make()


def batch_of(name, cut, **kind):
    return of_completions(cut, **kind) if name.startswith("kto") else of_pairs(cut, **kind)


@functools.cache
def expected(name, n):
    model = model_of(name)
    return loss_and_gradients(model, CASES[name][1](model, n))


def micro_batches(name, sizes, **kind):
    """Return rows of so many pairs each, in order."""
    total, ends = sum(sizes), np.cumsum([0, *sizes])
    if name.startswith("kto"):
        kind["total"] = total
    return [batch_of(name, slice(a, b), **kind) for a, b in itertools.pairwise(ends)]


def same(output, grads, name, n):
    loss, theirs = expected(name, n)
    assert output.loss == pytest.approx(loss, rel=3e-6)
    assert output.loss_count == n
    assert distance(grads, theirs) < 1e-5
    assert worst(grads, theirs) < 1e-4


@pytest.mark.parametrize(
    ("name", "cut"),
    # What no mean over tokens and no KL couples differs in one formula alone.
    quick_keeps(
        [(name, cut) for name in CASES for cut in ("8x1", "8=5+0+3") if name not in UNCOUPLED or cut == "8x1"],
        [(name, cut) for name in CASES for cut in CUTS if name not in UNCOUPLED or cut in {"8x1", "7=4+3"}],
    ),
)
def test_any_cut_gives_the_naive_gradients(name, cut):
    """Loss and gradients of a step are the naive ones of one big batch, for every cut.
    One unpadded completion at a time.
    """
    sizes = CUTS[cut]
    output, grads = one_step(model_of(name), CASES[name][0], micro_batches(name, sizes))
    same(output, grads, name, sum(sizes))


DIVIDED = ("sigmoid+sft", "wpo", "orpo", "orpo with prompts", "simpo", "simpo with likelihood", "kto", "reward")


def test_ktos_kl_is_not_zero():
    """KTO's KL is above 0, and another one for each half of the step."""
    policy = np.array([token_logps(make(), *pair).sum().item() for pair in rotated(PAIRS)])
    drift = policy - of_completions(slice(0, 8)).ref_mismatched_logps
    assert drift.mean() > 0.5
    assert drift[:4].mean() != pytest.approx(drift[4:].mean(), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["1x8", "7=4+3"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "kto" and name not in UNCOUPLED])
def test_shared_prompts_give_the_naive_gradients(name, cut):
    """Loss and gradients are the same where each prompt is in the row once."""
    sizes = CUTS[cut]
    output, grads = one_step(shareable(model_of(name)), CASES[name][0], micro_batches(name, sizes, share=True))
    same(output, grads, name, sum(sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    # What an idle rank does is the loop's; KTO alone adds up over ranks before a step.
    ci_keeps(
        [*((name, [3, 0, 5]) for name in DIVIDED), ("kto", [1, 7]), ("kto", [8, 0])],
        list(itertools.product(DIVIDED, [[3, 0, 5], [1, 7], [8, 0]])),
    ),
)
def test_two_ranks_equal_one(name, sizes):
    """Two ranks with unequal shares have the loss, figures and gradients of one process.
    With nothing in a column, or in all.
    """
    rows = micro_batches(name, sizes)
    empty = micro_batches(name, [0])[0]
    rows += [empty] * (len(rows) % 2)
    alone, _ = one_step(model_of(name), CASES[name][0], rows)

    def on(rank):
        return one_step(model_of(name), CASES[name][0], rows[rank.rank :: 2], parallel=rank)

    for output, grads in on_threads(on, 2):
        same(output, grads, name, 8)
        assert output.loss == pytest.approx(alone.loss, rel=1e-6)
        assert output.figures == pytest.approx(alone.figures, rel=1e-5, abs=1e-7)
        assert (output.samples, output.tokens) == (alone.samples, alone.tokens)


@pytest.mark.parametrize("name", ["sigmoid+sft", "orpo", "simpo", "simpo with likelihood", "kto", "reward"])
def test_trls_mean_does_depend_on_the_cut(name):
    """normalize="trl" is the mean of micro-batches' own means, as 7 = 4+3 shows.
    One micro-batch is the same either way.
    """
    objective, _ = CASES[name]
    kind = type(objective)
    settings = type(objective.settings)
    fields = {field: getattr(objective.settings, field) for field in settings.__annotations__} | {"normalize": "trl"}
    theirs = kind(settings(**fields))
    model = model_of(name)
    # KTO's own KL of each micro-batch is part of the definition, so that each part is computed on its own here too.
    parts = micro_batches(name, [4, 3])
    losses, sums = [], None
    for part in parts:
        output, grads = one_step(model, theirs, [part])
        alone, _ = one_step(model, objective, [part])
        assert output.loss == pytest.approx(alone.loss, rel=1e-6)
        losses.append(output.loss)
        sums = grads if sums is None else {key: sums[key] + grads[key] for key in sums}
    output, grads = one_step(model, theirs, parts)
    assert output.loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert distance(grads, {key: grad / 2 for key, grad in sums.items()}) < 1e-6
    _, ours = one_step(model, objective, parts)
    assert distance(grads, ours) > 1e-3
