"""DPO: its losses and options from a row, sources of its reference, its first loss."""

import math

import numpy as np
import pytest
import torch

from forge_algos import (
    DPO,
    ORPO,
    AdapterError,
    AdapterSettings,
    DPOSettings,
    LossError,
    PackedBatchError,
    PreferenceBatch,
    adapt,
    evaluate,
    idle_groups,
    losses,
    reference_logps,
)
from forge_algos.settings._dpo_types import DPO_TYPES

from ...oracle import CPU, distance, gradients, make
from ...preferences import naive_weight, one_step, pair_batch, rows_of, some_pairs, token_logps

PAIRS = some_pairs(6, seed=11)
SORTED = ("aot", "aot_unpaired")


def naive_logps(model):
    """Return float32[2P], one completion at a time."""
    return torch.stack([token_logps(model, prompt, y).sum() for prompt, *completions in PAIRS for y in completions])


def stored(reference, pairs=PAIRS):
    """Return the batch with the reference's log-probabilities, computed as for storing."""
    batch = pair_batch(pairs)
    (logps,) = reference_logps(reference, [batch.groups])
    return pair_batch(pairs, ref_logps=logps)


OPTIONS = [
    *({"loss_type": kind, **({"label_smoothing": 0.1} if DPO_TYPES[kind].smoothing else {})} for kind in DPO_TYPES),
    {"f_divergence": "forward_kl"},
    {"f_divergence": "alpha_divergence", "f_divergence_alpha": 0.2},
    {"loss_type": "discopop", "discopop_tau": 0.5},
    {"f_divergence": "js_divergence", "loss_type": ["sigmoid", "sft"]},
    {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_loss_and_option_arrives(options):
    """Each setting gives the loss of that name from naive log-probabilities, with its gradients."""
    reference, model = make(seed=5), make()
    normalize = "trl" if options.get("loss_type") in SORTED else "global"
    objective = DPO(DPOSettings(beta=0.2, normalize=normalize, **options))
    output, grads = one_step(model, objective, [stored(reference)])
    with torch.no_grad():
        ref = naive_logps(reference)
    model.zero_grad()
    policy = naive_logps(model)
    sizes = torch.tensor([[len(c), len(r)] for _, c, r in PAIRS])
    terms = losses.dpo(
        policy[::2],
        policy[1::2],
        ref[::2],
        ref[1::2],
        beta=0.2,
        chosen_lengths=sizes[:, 0],
        rejected_lengths=sizes[:, 1],
        **options,
    )
    (terms.sum / terms.count).backward()
    assert output.loss == pytest.approx(terms.sum.item() / 6, rel=1e-5)
    # The slope of `discopop` is up to 1/τ = 20 times that of the others, and so is what it makes of rounding.
    assert distance(grads, gradients(model)) < (1e-4 if options.get("loss_type") == "discopop" else 1e-5)
    expected = {
        "accuracy": "correct",
        "margin": "margins",
        "chosen_reward": "chosen_rewards",
        "rejected_reward": "rejected_rewards",
        "chosen_logp": "chosen_logps",
        "rejected_logp": "rejected_logps",
    }
    assert output.figures == pytest.approx(
        {name: terms.stats[stat].item() / 6 for name, stat in expected.items()}, rel=1e-4, abs=1e-5
    )


@pytest.mark.parametrize("where", ["stored", "live"])
def test_the_longer_one_s_tail_counts_less(where):
    """LD-DPO: tokens beyond the shorter completion count by `ld_alpha`, under model and reference.
    `sft` learns all of them.
    """
    reference, model, alpha = make(seed=5), make(), 0.3
    settings = DPOSettings(beta=0.5, loss_type=["sigmoid", "sft"], ld_alpha=alpha, reference=where)
    batch = pair_batch(PAIRS)
    if where == "stored":
        (logps,) = reference_logps(reference, [batch.groups], ld_alpha=alpha)
        batch = pair_batch(PAIRS, ref_logps=logps)
    output, grads = one_step(model, DPO(settings, reference=reference if where == "live" else None), [batch])
    model.zero_grad()
    terms, likelihood = [], []
    for prompt, chosen, rejected in PAIRS:
        shorter, ratios = min(len(chosen), len(rejected)), []
        for y in (chosen, rejected):
            with torch.no_grad():
                theirs = token_logps(reference, prompt, y)
            each = token_logps(model, prompt, y) - theirs
            ratios.append(each[:shorter].sum() + alpha * each[shorter:].sum())
        terms.append(-torch.nn.functional.logsigmoid(0.5 * (ratios[0] - ratios[1])))
        likelihood.append(-token_logps(model, prompt, chosen))
    loss = torch.stack(terms).mean() + torch.cat(likelihood).mean()
    loss.backward()
    assert any(len(chosen) != len(rejected) for _, chosen, rejected in PAIRS)
    assert output.loss == pytest.approx(loss.item(), rel=1e-5)
    assert distance(grads, gradients(model)) < 1e-5


def test_a_tail_does_not_change_the_weights():
    """WPO beside LD-DPO: each pair's loss by its weight, of which every token is a part; no gradient runs through it."""
    reference, model = make(seed=5), make()
    settings = DPOSettings(beta=0.5, ld_alpha=0.3, wpo=True, reference="live")
    output, grads = one_step(model, DPO(settings, reference=reference), [pair_batch(PAIRS)])
    model.zero_grad()
    terms = []
    for prompt, *completions in PAIRS:
        shorter, ratios = min(map(len, completions)), []
        for y in completions:
            with torch.no_grad():
                theirs = token_logps(reference, prompt, y)
            each = token_logps(model, prompt, y) - theirs
            ratios.append(each[:shorter].sum() + 0.3 * each[shorter:].sum())
        loss = -torch.nn.functional.logsigmoid(0.5 * (ratios[0] - ratios[1]))
        terms.append(naive_weight(model, prompt, completions) * loss)
    torch.stack(terms).mean().backward()
    assert output.loss == pytest.approx(torch.stack(terms).mean().item(), rel=1e-5)
    assert distance(grads, gradients(model)) < 1e-5


def test_a_tail_is_weighed_in_pairs_alone():
    """`reference_logps` refuses groups of another size where it has an `ld_alpha`."""
    with pytest.raises(PackedBatchError, match="groups of two are wanted"):
        list(reference_logps(make(), [idle_groups((3,))], ld_alpha=0.5))


def lora(*, learned=True):
    model = adapt(make(), AdapterSettings(adapter="lora", lora_r=3, lora_dropout=0.5)).model
    if learned:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("where", ["stored", "adapter_off", "live"])
def test_the_first_loss_is_ln_2(where):
    """A model that is its reference begins at ln 2 within 1e-4, with a margin of 0.
    From every source of the reference.
    """
    model = lora(learned=False) if where == "adapter_off" else make()
    batch = stored(make()) if where == "stored" else pair_batch(PAIRS)
    objective = DPO(DPOSettings(reference=where), reference=make() if where == "live" else None)
    found = evaluate(model, [batch], objective=objective)
    assert abs(found.loss - math.log(2)) < 1e-4
    assert abs(found.figures["margin"]) < 1e-4


@pytest.mark.parametrize("where", ["adapter_off", "live"])
def test_references_computed_in_the_step_equal_stored_ones(where):
    """References computed in the step equal stored ones to 1e-6: loss, figures and gradients.
    With an adapter that has learned.
    """
    torch.manual_seed(0)
    model = lora().eval()
    for module in model.modules():
        # The policy's own dropout would differ from run to run; the reference's must be off by itself.
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    expected, theirs = one_step(model, DPO(DPOSettings(beta=0.5)), [stored(make())])
    live = make() if where == "live" else None
    output, grads = one_step(model, DPO(DPOSettings(reference=where, beta=0.5), reference=live), [pair_batch(PAIRS)])
    assert output.loss == pytest.approx(expected.loss, rel=1e-6)
    assert output.loss != pytest.approx(math.log(2), rel=1e-2)
    assert output.figures == pytest.approx(expected.figures, rel=1e-5, abs=1e-6)
    assert distance(grads, theirs) < 1e-5
    assert all("lora" in name for name in grads)
    if live is not None:
        assert all(p.grad is None for p in live.parameters())


def test_the_reference_has_no_dropout_and_modes_are_restored():
    """A live reference runs without dropout, and has its mode back afterwards."""
    live = make()
    for layer in live.model.layers:
        layer.self_attn.attention_dropout = 0.9
    objective = DPO(DPOSettings(reference="live"), reference=live)
    output, _ = one_step(make(), objective, [pair_batch(PAIRS)])
    assert abs(output.loss - math.log(2)) < 1e-4
    assert all(module.training for module in live.modules())


def test_an_adapter_that_is_switched_off_is_on_again():
    """The policy's forward has the adapter, in the step after a reference's too.
    The adapter's weights keep training.
    """
    model = lora()
    objective = DPO(DPOSettings(reference="adapter_off"))
    output, grads = one_step(model, objective, [pair_batch(PAIRS[:3]), pair_batch(PAIRS[3:])])
    assert abs(output.loss - math.log(2)) > 1e-3
    assert len(grads) == 28
    assert all(grad.abs().sum() > 0 for name, grad in grads.items() if "lora_A" in name)


@pytest.mark.parametrize(
    ("settings", "live", "batch", "error", "message"),
    [
        (
            {},
            False,
            {},
            LossError,
            "ref_logps: reference='stored' reads it and the batch has none; compute it with reference_logps",
        ),
        ({"reference": "live"}, False, {}, LossError, "reference='live': a model is wanted"),
        ({"reference": "adapter_off"}, True, {}, LossError, "reference='adapter_off': reference=... would not be read"),
        ({"reference": "adapter_off"}, False, {}, AdapterError, "LlamaForCausalLM carries no adapter.*'stored' or 'live'"),
        ({}, False, {"ref_logps": np.zeros(6, np.float32)}, PackedBatchError, r"ref_logps: 12 numbers.*6 pairs, got \[6\]"),
    ],
)
def test_missing_references_are_refused(settings, live, batch, error, message):
    """A reference that is missing, or given and not read, is refused with what to do."""
    objective = DPO(DPOSettings(**settings), reference=make() if live else None)
    with pytest.raises(error, match=message):
        one_step(make(), objective, [pair_batch(PAIRS, **batch)])


def test_a_reference_that_is_the_model_is_refused():
    """The model itself is refused as its live reference: both would move."""
    model = make()
    with pytest.raises(LossError, match="the very model that is trained"):
        DPO(DPOSettings(reference="live"), reference=model).bind(model, device=CPU)


def test_groups_that_are_no_pairs_are_refused():
    """A group that is not a pair is refused by its number."""
    groups = rows_of([[pair[:2]] * size for pair, size in zip(PAIRS, (2, 3), strict=False)])
    batch = type(pair_batch([]))(groups=groups)
    with pytest.raises(PackedBatchError, match="group 1 holds 3"):
        DPO().count(batch)


def test_shared_prompts_under_sdpa_are_refused():
    """A shared prompt under sdpa is refused: it would silently see the wrong keys."""
    batch = pair_batch(PAIRS, share=True, ref_logps=np.zeros(12, np.float32))
    with pytest.raises(PackedBatchError, match="prompts are shared by their completions: .*kv_rows"):
        one_step(make(), DPO(), [batch])


def test_an_empty_row_is_answered_with_what_a_rank_without_work_runs():
    """The row of no pairs, as a packer gives it, is refused with what to run in its place."""
    nothing = PreferenceBatch(groups=idle_groups(()), ref_logps=np.zeros(0, np.float32))
    with pytest.raises(PackedBatchError, match=r"run the objective's `idle\(\)`"):
        DPO().bind(make(), device=CPU)(nothing, [])


@pytest.mark.parametrize(
    "objective", [DPO(DPOSettings(loss_type=["sigmoid", "sft"])), ORPO(), DPO(DPOSettings(normalize="trl"))]
)
def test_missing_totals_are_named(objective):
    """An objective whose terms depend on the step says what of the step it was not given."""
    bound = objective.bind(make(), device=CPU)
    with pytest.raises(LossError, match="totals: 2 numbers are wanted, what `measure` returned for each micro-batch"):
        bound(stored(make()), [])
