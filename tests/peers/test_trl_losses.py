"""TRL's own loss methods beside ours: the same values and gradients for every loss type, at random log-probabilities.

TRL's trainers compute their losses from a model's outputs; here they get a model with random log-probabilities, and a trainer
that has nothing but what the method reads.
"""

from __future__ import annotations

import collections
import math
import os
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from forge_algos import losses
from forge_algos.settings._dpo_types import DPO_TYPES, Divergence

trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

SEEDS = range(6)
SMOOTHED = {name for name, kind in DPO_TYPES.items() if kind.smoothing}
TRLS = sorted(set(DPO_TYPES) - {"cdpo"})
ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"),
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
    num_processes=1,
)


def a_trainer(**fields):
    """What TRL's loss methods read of `self`."""
    metrics = {"train": collections.defaultdict(list)}
    common = {"accelerator": ACCELERATOR, "model": SimpleNamespace(training=True), "aux_loss_enabled": False}
    return SimpleNamespace(**common, _metrics=metrics, _total_train_tokens=0, _tp_size=1, **fields)


def a_row(B, seed, prompt=2):
    """Padded token log-probabilities [B, prompt-1 + S] of a float32 leaf, their mask [B, prompt + S], and the lengths."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (B,), generator=g)
    width = int(lengths.max())
    mask = torch.cat([torch.zeros(B, prompt, dtype=torch.long), (torch.arange(width) < lengths[:, None]).long()], 1)
    scale = 10 ** (torch.rand((), generator=g) * 1.5 - 1)
    leaf = (-scale * torch.rand(B, prompt + width - 1, generator=g)).requires_grad_()
    return leaf, mask, lengths, g


def outputs_of(leaf, mask):
    """What TRL's fused head gives: log-probabilities at completion tokens, 0 elsewhere."""
    zeros = torch.zeros_like(leaf)
    return SimpleNamespace(
        log_probs=leaf * mask[:, 1:], entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), label_mask=mask[:, 1:].bool()
    )


def flat(leaf, mask):
    """The completions' tokens, one after another."""
    return leaf[mask[:, 1:].bool()]


def compare(ours, theirs, leaf):
    """Values within 1e-5 relative, gradients within 1e-5 of their norm."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    (mine,), (other,) = (torch.autograd.grad(loss, leaf, retain_graph=True) for loss in (ours, theirs))
    assert (mine - other).norm() <= 1e-5 * other.norm() + 1e-8


def both_dpo(seed, types, weights=None, divergence="reverse_kl", B=5, alpha=0.5, tau=0.05, ld_alpha=None, wpo=False):
    """(our mean, TRL's loss, the leaf) for one random batch of pairs."""
    leaf, mask, lengths, g = a_row(2 * B, seed)
    beta = float(10 ** (torch.rand((), generator=g) * 1.7 - 1.7))
    eps = float(torch.rand((), generator=g) * 0.44 + 0.01)
    ref = (leaf.detach() + 0.3 * leaf.detach().abs().mean() * torch.randn(leaf.shape, generator=g)) * mask[:, 1:]
    places = mask[:, 1:].cumsum(1)
    beyond = places > torch.minimum(lengths[:B], lengths[B:]).repeat(2)[:, None]
    each = torch.where(beyond, 1.0 if ld_alpha is None else ld_alpha, 1.0)
    sums, ref_sums = (losses.completion_logps(flat(t * each, mask), lengths) for t in (leaf, ref))
    whole = losses.completion_logps(flat(leaf, mask), lengths)
    trainer = a_trainer(
        beta=beta, loss_types=types, loss_weights=weights or [1.0] * len(types), ld_alpha=ld_alpha,
        precompute_ref_logps=True, f_divergence_type=divergence, f_alpha_divergence_coef=alpha, use_weighting=wpo,
        args=SimpleNamespace(discopop_tau=tau), label_smoothing=eps,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": ref_sums[:B],
        "ref_rejected_logps": ref_sums[B:],
    }
    outputs = outputs_of(leaf, mask)
    outputs.log_sum_sq_probs = -torch.rand(leaf.shape, generator=g)
    theirs = trl.DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)
    own = {"f_divergence_alpha": alpha} if divergence == "alpha_divergence" else {}
    own |= {"discopop_tau": tau} if "discopop" in types else {}
    if wpo:
        # Their batch has the chosen ones first, a row of ours the two of each pair.
        order = torch.arange(2 * B).view(2, B).t().flatten()
        tokens = (flat(row[order], mask[order]) for row in (leaf, outputs.log_sum_sq_probs))
        own["pair_weights"] = losses.wpo_weights(*tokens, lengths[order])
    terms = losses.dpo(
        *sums.split(B), *ref_sums.split(B), beta=beta, loss_type=types, loss_weights=weights, f_divergence=divergence,
        sft_logps=whole[:B], **own,
        label_smoothing=eps if SMOOTHED & set(types) else 0.0, chosen_lengths=lengths[:B], rejected_lengths=lengths[B:],
    )  # fmt: skip
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return terms, theirs, leaf, metrics


@pytest.mark.parametrize("kind", TRLS)
@pytest.mark.parametrize("seed", SEEDS)
def test_dpo(kind, seed):
    """All fifteen, with random β and smoothing and unequal lengths; the reported rewards too."""
    terms, theirs, leaf, metrics = both_dpo(seed, [kind])
    compare(terms.sum / terms.count, theirs, leaf)
    names = {"chosen": "chosen_rewards", "rejected": "rejected_rewards", "accuracies": "correct", "margins": "margins"}
    for their_name, name in names.items():
        assert terms.stats[name].item() / terms.count == pytest.approx(metrics[f"rewards/{their_name}"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", [name for name in TRLS if DPO_TYPES[name].divergence])
@pytest.mark.parametrize("divergence", get_args(Divergence)[1:])
def test_dpo_with_another_divergence(kind, divergence):
    """Every divergence with every loss that TRL allows it for."""
    for seed, alpha in enumerate((0.5, 0.0, 1.0, 0.8)):
        terms, theirs, leaf, _ = both_dpo(seed, [kind], divergence=divergence, alpha=alpha)
        compare(terms.sum / terms.count, theirs, leaf)


@pytest.mark.parametrize("kind", [name for name in TRLS if not DPO_TYPES[name].sorts])
@pytest.mark.parametrize("ld_alpha", [0.0, 0.3, 1.0])
def test_dpo_without_the_longer_one_s_tail(kind, ld_alpha):
    """LD-DPO: what one completion is longer counts less, in every form."""
    terms, theirs, leaf, _ = both_dpo(7, [kind], ld_alpha=ld_alpha, tau=0.3)
    compare(terms.sum / terms.count, theirs, leaf)


@pytest.mark.parametrize("kind", [name for name in TRLS if not DPO_TYPES[name].sorts and name not in {"hinge", "sft"}])
def test_wpo(kind):
    """WPO: a pair counts by the model's own probability of both completions.
    Of `hinge` and `sft` TRL multiplies in place what autograd or an expanded tensor still needs, and fails.
    """
    for seed, more in enumerate(({}, {"ld_alpha": 0.3}, {"weights": [0.7]})):
        terms, theirs, leaf, _ = both_dpo(seed, [kind], wpo=True, tau=0.3, **more)
        compare(terms.sum / terms.count, theirs, leaf)


@pytest.mark.parametrize("seed", SEEDS)
def test_dpo_mixed_and_weighted(seed):
    """MPO's three with weights, and a mixture with sorting."""
    for types, weights in ((["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]), (["sigmoid", "aot"], None)):
        terms, theirs, leaf, _ = both_dpo(seed, types, weights)
        compare(terms.sum / terms.count, theirs, leaf)


def reference_free(seed, B=5):
    """A padded batch as ORPO's and CPO's trainers see it: logits in, mean or summed log-probabilities out."""
    leaf, mask, lengths, g = a_row(2 * B, seed)
    beta = float(torch.rand((), generator=g) * 2 + 0.05)
    sums = losses.completion_logps(flat(leaf, mask), lengths)
    sides = {"chosen_lengths": lengths[:B], "rejected_lengths": lengths[B:]}
    return leaf, mask, lengths, g, beta, sums, sides


@pytest.mark.parametrize("seed", SEEDS)
def test_orpo(seed):
    """Odds ratio, and a likelihood over prompt and chosen completion."""
    from trl.experimental.orpo import ORPOTrainer

    B = 5
    leaf, mask, lengths, _, beta, sums, sides = reference_free(seed)
    attended = torch.arange(mask.shape[1]) < (2 + lengths)[:, None]
    whole = (leaf * attended[:, 1:]).sum(1)
    trainer = a_trainer(beta=beta)
    trainer.concatenated_forward = lambda *_: (
        *(sums / lengths).split(B), torch.zeros(1), torch.zeros(1), -whole[:B].sum() / attended[:B, 1:].sum()
    )  # fmt: skip
    trainer.odds_ratio_loss = lambda *args: ORPOTrainer.odds_ratio_loss(trainer, *args)
    theirs, _ = ORPOTrainer.get_batch_loss_metrics(trainer, None, {})
    terms = losses.orpo(*sums.split(B), **sides, beta=beta, nll_logps=whole[:B], nll_lengths=attended[:B, 1:].sum(1))
    compare(terms.sum / terms.count, theirs, leaf)


@pytest.mark.parametrize(("kind", "weight"), [("sigmoid", 0.7), ("hinge", 0.7), ("ipo", 0.7), ("simpo", 0.0), ("simpo", 0.7)])
@pytest.mark.parametrize("seed", SEEDS)
def test_cpo_and_simpo(kind, weight, seed):
    """CPO's three losses with the likelihood beside them; SimPO with γ and smoothing, and with the likelihood."""
    from trl.experimental.cpo import CPOTrainer

    B = 5
    leaf, _, lengths, g, beta, sums, sides = reference_free(seed)
    eps = float(torch.rand((), generator=g) * 0.4) if kind in {"sigmoid", "simpo"} else 0.0
    given = sums / lengths if kind in {"ipo", "simpo"} else sums
    trainer = a_trainer(beta=beta, alpha=0.0, cpo_alpha=weight, loss_type=kind, simpo_gamma=0.6, label_smoothing=eps)
    trainer.concatenated_forward = lambda *_: (
        *given.split(B), torch.zeros(1), torch.zeros(1), -sums[:B].sum() / lengths[:B].sum()
    )  # fmt: skip
    trainer.cpo_loss = lambda *args: CPOTrainer.cpo_loss(trainer, *args)
    theirs, _ = CPOTrainer.get_batch_loss_metrics(trainer, None, {})
    if kind == "simpo":
        terms = losses.simpo(*sums.split(B), **sides, beta=beta, gamma=0.6, label_smoothing=eps, nll_weight=weight)
    else:
        terms = losses.cpo(*sums.split(B), **sides, beta=beta, loss_type=kind, label_smoothing=eps, nll_weight=weight)
    compare(terms.sum / terms.count, theirs, leaf)


@pytest.mark.parametrize("classes", ["mixed", "desirable", "undesirable"])
@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("seed", SEEDS)
def test_kto(classes, kind, seed):
    """Both classes with weights, one class alone; the KL of mismatched completions, clamped at 0, or none."""
    B = 6
    leaf, mask, lengths, g = a_row(B, seed)
    beta = float(torch.rand((), generator=g) * 0.9 + 0.05)
    desirable = {"mixed": torch.arange(B) % 2 == 0, "desirable": torch.ones(B).bool(), "undesirable": torch.zeros(B).bool()}[
        classes
    ]
    sums = losses.completion_logps(flat(leaf, mask), lengths)
    ref = sums.detach() + torch.randn(B, generator=g)
    mismatched, mismatched_ref = torch.randn(2, B, generator=g).unbind()
    trainer = a_trainer(
        beta=beta, loss_type=kind, calculate_KL=kind == "kto", precompute_ref_logps=True, desirable_weight=1.3,
        undesirable_weight=0.8,
    )  # fmt: skip
    trainer._compute_kl_logps = lambda *_: mismatched
    batch = {
        "input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask,
        "label": desirable, "ref_logps": ref, "ref_KL_logps": mismatched_ref,
    }  # fmt: skip
    theirs = trl.KTOTrainer._compute_loss(trainer, lambda **_: outputs_of(leaf, mask), batch, return_outputs=False)
    drift = (mismatched - mismatched_ref).mean() if kind == "kto" else 0.0
    terms = losses.kto(sums, ref, desirable, drift, beta=beta, desirable_weight=1.3, undesirable_weight=0.8)
    compare(terms.sum / terms.count, theirs, leaf)


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("centering", [None, 0.01])
@pytest.mark.parametrize("seed", SEEDS)
def test_reward(margin, centering, seed):
    """Bradley-Terry, with a margin and with rewards pulled towards 0."""
    g = torch.Generator().manual_seed(seed)
    leaf = (3 * torch.randn(10, generator=g)).requires_grad_()
    margins = torch.rand(5, generator=g) if margin else None
    trainer = a_trainer(args=SimpleNamespace(center_rewards_coefficient=centering))
    inputs = {"attention_mask": torch.ones(10, 3)} | ({"margin": margins} if margin else {})
    theirs = trl.RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=leaf[:, None]), inputs)
    terms = losses.reward(*leaf.split(5), margin=margins, centering=centering or 0.0)
    compare(terms.sum / terms.count, theirs, leaf)


@pytest.mark.parametrize(
    ("kind", "level", "dual_clip", "unbiased"),
    [
        *((kind, None, None, False) for kind in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo")),
        *((kind, None, 1.4, True) for kind in ("grpo", "dr_grpo", "dapo")),
        # TRL weighs a token's KL by the ratio of its completion; the KL's gradient takes the token's own.
        *((kind, None, 1.4, False) for kind in ("gspo", "luspo")),
        *((kind, None, None, True) for kind in ("cispo", "sapo", "vespo")),
        *((kind, "sequence", 1.4, False) for kind in ("grpo", "dr_grpo", "dapo")),
        *((kind, "sequence", None, False) for kind in ("cispo", "sapo")),
        ("luspo", "token", 1.4, True),
    ],
)
@pytest.mark.parametrize("threshold", [None, 0.05])
@pytest.mark.parametrize("seed", SEEDS)
def test_grpo(kind, level, dual_clip, unbiased, threshold, seed):
    """Each form, with an uneven clip, a bound where advantages are negative, and the KL to the reference by both estimates."""
    B = 6
    leaf, mask, lengths, g = a_row(B, seed, prompt=1)
    old, ref = (leaf.detach() + 0.3 * torch.randn(2, *leaf.shape, generator=g)).unbind()
    advantages, completion = torch.randn(B, generator=g), mask[:, 1:]
    trainer = a_trainer(
        beta=0.04, top_entropy_quantile=1.0, off_policy_mask_threshold=threshold,
        importance_sampling_level=level or ("sequence" if kind in ("gspo", "luspo") else "token"),
        loss_type="grpo" if kind == "gspo" else kind,
        # TRL's bound of CISPO is that of the ratio itself.
        epsilon_low=0.2, epsilon_high=1.28 if kind == "cispo" else 0.28, use_vllm=False,
        current_gradient_accumulation_steps=1, max_completion_length=16, _entropy_bonus_enabled=False,
        args=SimpleNamespace(
            use_bias_correction_kl=unbiased, delta=dual_clip, steps_per_generation=1,
            sapo_temperature_pos=1.3, sapo_temperature_neg=1.9,
            vespo_k_pos=1.5, vespo_lambda_pos=2.5, vespo_k_neg=3.5, vespo_lambda_neg=0.5,
        ),
    )  # fmt: skip
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros_like(leaf), None)
    trainer.get_gamma_weights = trl.GRPOTrainer.get_gamma_weights
    trainer.get_off_policy_mask = trl.GRPOTrainer.get_off_policy_mask
    inputs = {
        "prompt_ids": torch.zeros(B, 1), "prompt_mask": torch.ones(B, 1), "completion_ids": completion,
        "completion_mask": completion,
        "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref,
        "num_items_in_batch": completion.sum(),
    }  # fmt: skip
    theirs = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    tokens, old_tokens, ref_tokens = (flat(x, mask) for x in (leaf, old, ref))
    bounds = {"clip": None if kind == "cispo" else 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    terms = losses.policy_gradient(
        tokens, old_tokens, advantages, lengths, kind=kind,
        ratio=level and {"sequence": "sequence_mean", "token": "token"}[level],
        **{"sapo": {"temperatures": (1.3, 1.9)}, "vespo": {"gamma_weights": ((1.5, 2.5), (3.5, 0.5))}}.get(kind, bounds),
        ref_logps=ref_tokens, kl_weight=0.04, off_policy_threshold=threshold,
        kl_estimator="unbiased" if unbiased else "k3", max_length=16 if kind == "dr_grpo" else None,
    )  # fmt: skip
    compare(terms.sum / terms.count, theirs, leaf)
    if (kind, level) == ("dapo", None) and dual_clip is None and threshold is None:
        metrics = trainer._metrics["train"]
        for name, their_name in (
            ("ref_kl", "kl"),
            ("clipped_low", "clip_ratio/low_mean"),
            ("clipped_high", "clip_ratio/high_mean"),
        ):
            assert terms.stats[name].item() / terms.count == pytest.approx(metrics[their_name][-1], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo(seed):
    """The ratio of whole samples, clipped."""
    B = 6
    leaf, mask, lengths, g = a_row(B, seed, prompt=1)
    old, advantages, completion = (
        leaf.detach() + 0.1 * torch.randn(leaf.shape, generator=g),
        torch.randn(B, generator=g),
        mask[:, 1:],
    )
    trainer = a_trainer(epsilon_low=0.2, epsilon_high=0.3)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros_like(leaf), None)
    inputs = {
        "prompt_ids": torch.zeros(B, 1), "prompt_mask": torch.ones(B, 1), "completion_ids": completion,
        "completion_mask": completion,
        "advantages": advantages, "old_logps": (old * completion).sum(1),
    }  # fmt: skip
    theirs = trl.RLOOTrainer._compute_loss(trainer, None, inputs)
    terms = losses.policy_gradient(flat(leaf, mask), flat(old, mask), advantages, lengths, kind="rloo", clip_high=0.3)
    compare(terms.sum / terms.count, theirs, leaf)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_distillation(beta, seed):
    """The generalised Jensen-Shannon divergence and its two ends, with a temperature."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    g = torch.Generator().manual_seed(seed)
    leaf, teacher = (3 * torch.randn(2, 1, 7, 11, generator=g)).unbind()
    leaf.requires_grad_()
    head = torch.eye(11)
    theirs, _, _ = _chunked_divergence_loss(leaf, teacher, head, head, torch.ones(1, 7), beta, temperature=1.7)
    terms = losses.distillation(leaf[0], teacher[0], beta=beta, temperature=1.7)
    compare(terms.sum / terms.count, theirs, leaf)


def ppo_by_the_papers(new, old, values, old_values, rewards, lengths, *, gamma, lam, clip):
    """1707.06347, equations 7 and 9 with openai/baselines' clipped values; 1506.02438, equation 16: one token after another."""
    policy, critic, start = [], [], 0
    for length in lengths:
        advantages, running = [0.0] * length, 0.0
        for t in reversed(range(length)):
            after = old_values[start + t + 1].item() if t + 1 < length else 0.0
            delta = rewards[start + t].item() + gamma * after - old_values[start + t].item()
            running = delta + gamma * lam * running
            advantages[t] = running
        for t in range(length):
            n, A = start + t, advantages[t]
            ratio = torch.exp(new[n] - old[n])
            bound = min(max(ratio.item(), 1 - clip), 1 + clip)
            policy.append(-ratio * A if ratio.item() * A <= bound * A else torch.tensor(-bound * A, dtype=new.dtype))
            target = A + old_values[n].item()
            held = old_values[n] + torch.clamp(values[n] - old_values[n], -clip, clip)
            errors = (values[n] - target) ** 2, (held - target) ** 2
            critic.append(0.5 * (errors[0] if errors[0].item() >= errors[1].item() else errors[1]))
        start += length
    return torch.stack(policy), torch.stack(critic)


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_as_the_papers_have_it(seed):
    """PPO's clip, value and GAE, which TRL no longer has, against thirty lines written from the papers."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (5,), generator=g).tolist()
    draws = torch.randn(5, sum(lengths), generator=g, dtype=torch.float64)
    old, old_values, rewards = draws[0] - 3, draws[1], draws[2]
    new, values = (old + 0.3 * draws[3]).requires_grad_(), (old_values + 0.3 * draws[4]).requires_grad_()
    policy, critic = ppo_by_the_papers(new, old, values, old_values, rewards, lengths, gamma=0.99, lam=0.95, clip=0.2)
    advantages, returns = losses.gae(rewards, old_values, lengths, gamma=0.99, lam=0.95)
    ours = losses.policy_gradient(new, old, advantages, lengths, kind="ppo")
    torch.testing.assert_close(ours.per_sample, policy, rtol=1e-9, atol=1e-12)
    compare(ours.sum, policy.sum(), new)
    ours = losses.value(values, old_values, returns)
    torch.testing.assert_close(ours.per_sample, critic, rtol=1e-9, atol=1e-12)
    compare(ours.sum, critic.sum(), values)


@pytest.mark.parametrize("seed", SEEDS)
def test_dpo_starts_at_ln_2_as_theirs(seed):
    """The oracle is no constant: TRL's sigmoid at a policy that is its reference is ln 2, and ours agrees elsewhere too."""
    terms, theirs, _, _ = both_dpo(seed, ["sigmoid"])
    assert abs(theirs.item() - math.log(2)) > 1e-6
    assert terms.sum.item() / terms.count == pytest.approx(theirs.item(), rel=1e-5)
