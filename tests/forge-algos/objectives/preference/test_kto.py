"""KTO: good and bad completions around the KL of the whole step."""

import math

import numpy as np
import pytest
from attrs import evolve

from forge_algos import KTO, KTOSettings, LossError, PackedBatchError, evaluate, reference_logps

from ...oracle import distance, make
from ...preferences import kto_batch, naive_kto, one_step, rotated, some_pairs, token_logps

PAIRS = some_pairs(6, seed=3)
GOOD = [True, False, True, True, False, False]
# Of this reference the model's completions are so much likelier that the KL is above 0; of the other it is not.
REFERENCES = {"above": 8, "clamped": 4}


def stored(reference, good=GOOD, pairs=PAIRS, mismatched=None):
    batch = kto_batch(pairs, good, rotated(pairs) if mismatched is None else mismatched)
    logps, others = reference_logps(reference, [batch.completions, batch.mismatched])
    return kto_batch(pairs, good, mismatched or rotated(pairs), ref_logps=logps, ref_mismatched_logps=others)


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("good", [GOOD, [True] * 6, [False] * 6], ids=["both", "good", "bad"])
def test_the_kl_and_its_figures(kind, good):
    """The KL may be above 0 or clamped at 0, with both classes or one.
    Figures of an absent class are left out.
    """
    model, reference = make(), make(seed=REFERENCES[kind])
    objective = KTO(KTOSettings(beta=0.2, desirable_weight=1.5))
    rotated_all = rotated(PAIRS)
    parts = [stored(reference, good[cut], PAIRS[cut], rotated_all[cut]) for cut in (slice(1), slice(1, 6))]
    found = evaluate(model, parts, objective=objective)
    drift = [token_logps(model, *p).sum().item() - token_logps(reference, *p).sum().item() for p in rotated_all]
    ratios = np.array([token_logps(model, *p[:2]).sum().item() - token_logps(reference, *p[:2]).sum().item() for p in PAIRS])
    kl, chosen = max(np.mean(drift), 0), np.array(good)
    assert (kl > 0) == (kind == "above")
    expected = naive_kto(model, PAIRS, good, rotated_all, reference, beta=0.2, weights=(1.5, 1.0)).item()
    assert found.loss == pytest.approx(expected, rel=1e-5)
    figures = {"kl": kl, "accuracy": np.where(chosen, ratios > kl, ratios < kl).mean()}
    if chosen.any():
        figures["chosen_reward"] = 0.2 * ratios[chosen].mean()
    if not chosen.all():
        figures["rejected_reward"] = 0.2 * ratios[~chosen].mean()
    if len(figures) == 4:
        figures["margin"] = figures["chosen_reward"] - figures["rejected_reward"]
    assert found.figures == pytest.approx(figures, rel=1e-4, abs=1e-6)
    assert (found.loss_count, KTO().unit) == (6, "completions")


@pytest.mark.parametrize("reference", ["stored", "live"])
def test_without_a_kl_mismatched_completions_are_not_run(reference):
    """loss_type="apo_zero_unpaired" judges each completion against 0: no other one is wanted, and none is read."""
    model, other = make(), make(seed=REFERENCES["above"])
    settings = KTOSettings(beta=0.2, undesirable_weight=1.5, loss_type="apo_zero_unpaired", reference=reference)
    objective = KTO(settings, reference=other if reference == "live" else None)
    whole = evolve(stored(other), ref_mismatched_logps=None)
    alone = evolve(whole, mismatched=None)
    found, read = (
        evaluate(model, [batch], objective=objective) for batch in (alone, evolve(whole, mismatched=whole.completions))
    )
    expected = naive_kto(model, PAIRS, GOOD, rotated(PAIRS), other, beta=0.2, weights=(1.0, 1.5), kl=0.0).item()
    assert found.loss == read.loss == pytest.approx(expected, rel=1e-5)
    assert "kl" not in found.figures
    assert objective.tokens(alone) < objective.tokens(whole)
    assert (objective.idle().mismatched is None, KTO().idle().mismatched is None) == (True, False)
    with pytest.raises(PackedBatchError, match="mismatched: 6 groups are wanted, from which loss_type='kto' has its KL"):
        evaluate(model, [alone], objective=KTO(KTOSettings()))


def test_it_starts_at_a_half():
    """A model that is its reference has w/2 in every term and a KL of 0."""
    found = evaluate(make(), [stored(make())], objective=KTO())
    assert found.loss == pytest.approx(0.5, abs=1e-5)
    assert found.figures["kl"] == pytest.approx(0, abs=1e-4)


def test_a_live_reference_is_the_stored_one():
    """A live reference runs both rows of a batch; loss and gradients are the stored one's."""
    expected, theirs = one_step(make(), KTO(), [stored(make(seed=8))])
    objective = KTO(KTOSettings(reference="live"), reference=make(seed=8))
    output, grads = one_step(make(), objective, [kto_batch(PAIRS, GOOD, rotated(PAIRS))])
    assert output.loss == pytest.approx(expected.loss, rel=1e-6)
    assert distance(grads, theirs) < 1e-5
    assert output.figures == pytest.approx(expected.figures, rel=1e-4)


def test_no_gradient_runs_through_the_kl_and_no_dropout():
    """Mismatched completions are run without gradients and without dropout.
    In a model of nothing but dropout the KL is that without it.
    """
    model = make()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    output, _ = one_step(model, KTO(), [stored(make(seed=8))])
    without, _ = one_step(make(), KTO(), [stored(make(seed=8))])
    assert output.figures["kl"] == pytest.approx(without.figures["kl"], rel=1e-5)
    assert output.figures["kl"] > 0
    assert output.loss != pytest.approx(without.loss, rel=1e-3)
    assert all(module.training for module in model.modules())


def test_what_is_counted():
    """Terms and samples are completions; tokens are those of both rows; an empty row has none."""
    batch = kto_batch(PAIRS, GOOD, rotated(PAIRS))
    tokens = sum(len(p) + len(c) for p, c, _ in PAIRS) + sum(len(p) + len(c) for p, c in rotated(PAIRS))
    assert (KTO().count(batch), KTO().samples(batch), KTO().tokens(batch)) == (6, 6, tokens)
    assert KTO().count(kto_batch([], [], [])) == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ref_logps": None}, LossError, "ref_logps: reference='stored' reads it"),
        ({"ref_mismatched_logps": None}, LossError, "ref_mismatched_logps: reference='stored' reads it"),
        ({"desirable": np.where(GOOD, 1, -1)}, PackedBatchError, "desirable: True and False are wanted, or 1 and 0, got"),
        ({"desirable": np.ones(5, bool)}, PackedBatchError, r"desirable: 6 values are wanted for 6 completions, got \[5\]"),
        (
            {"mismatched": kto_batch(PAIRS[:4], GOOD[:4], PAIRS[:4]).completions},
            PackedBatchError,
            "mismatched: 6 groups of one",
        ),
    ],
)
def test_missing_and_misshapen_arrays_are_refused(change, error, message):
    """Arrays that are missing or of another length are refused by name."""
    batch = stored(make())
    fields = {name: getattr(batch, name) for name in type(batch).__annotations__} | change
    with pytest.raises(error, match=message):
        one_step(make(), KTO(), [type(batch)(**fields)])


def test_the_naive_loss_depends_on_the_kl():
    """The oracle depends on the KL: with 0 in its place the loss is another."""
    args = make(), PAIRS, GOOD
    with_kl = naive_kto(*args, rotated(PAIRS), make(seed=8)).item()
    assert math.isfinite(with_kl)
    assert with_kl != pytest.approx(naive_kto(*args, [PAIRS[0][:2]], make(seed=8)).item(), rel=1e-4)
