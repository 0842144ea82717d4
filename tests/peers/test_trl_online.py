"""Four steps of TRL 1.16's GRPO and RLOO trainers, and of ours, on recorded completions: the same losses and gradient norms.

TRL's own scoring, advantages, losses and callbacks; only what it tokenizes and samples is given to it.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from .test_trl_preference_objectives import VOCAB, a_model, a_tokenizer

trl = pytest.importorskip("trl", reason="TRL is the oracle of this file")

STEPS, GROUPS, EACH, EOS = 4, 2, 3, 1
RATE = 5e-3
ENTROPY = {1.0: 5.135, 0.5: 5.1445}
"""Quantile of tokens → an entropy that the first step is below, and the others are above."""


def recorded():
    """Return (prompt, completion) of each step's samples, as lists of ids, in groups of a prompt; each ends with EOS."""
    rng = np.random.default_rng(3)

    def some(most):
        return rng.integers(3, VOCAB - 1, int(rng.integers(1, most))).tolist()

    return [[(prompt, [*some(9), EOS]) for prompt in (some(6), some(6)) for _ in range(EACH)] for _ in range(STEPS)]


ROWS = recorded()


def reward(ids):
    return sum(ids) % 97 / 97


def length(ids):
    """A second reward, of another scale."""
    return 40.0 * (len(ids) > 4)


def run_trl(verb, folder, scratch, rewards=(reward,), **options):
    """[(loss, gradient norm) of each step]."""
    from datasets import Dataset

    trainer_class, config_class = {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}[verb]
    given = iter(ROWS)

    class Recorded(trainer_class):
        def _tokenize_prompts(self, prompts):
            self.rows = next(given)
            return [prompt for prompt, _ in self.rows], None, {}

        def _generate_single_turn(self, *_args, **_kwargs):
            made = [list(completion) for _, completion in self.rows]
            return (made, None) if verb == "grpo" else made

    config = config_class(
        output_dir=str(scratch), max_steps=STEPS, per_device_train_batch_size=GROUPS * EACH, gradient_accumulation_steps=1,
        num_generations=EACH, max_completion_length=16, learning_rate=RATE, lr_scheduler_type="constant", optim="adamw_torch",
        adam_beta2=0.95, weight_decay=0.0, max_grad_norm=0.5, bf16=False, use_cpu=True, save_strategy="no", logging_steps=1,
        report_to=[], disable_tqdm=True, activation_checkpointing=False, shuffle_dataset=False, **options,
    )  # fmt: skip
    trainer = Recorded(
        model=str(folder), args=config, processing_class=a_tokenizer(),
        reward_funcs=[
            lambda completion_ids, one=one, **_: [one(ids) for ids in completion_ids] for one in rewards
        ],
        train_dataset=Dataset.from_dict({"prompt": [str(n) for n in range(STEPS * GROUPS)]}),
    )  # fmt: skip
    trainer.train()
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]


def run_ours(objective, folder, rewards=(reward,)):
    """The same of ours."""
    from transformers import AutoModelForCausalLM

    import forge_algos
    from forge_algos import online

    own = objective.settings
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    still = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    settings = forge_algos.OptimizerSettings(learning_rate=RATE, lr_scheduler="constant", max_grad_norm=0.5)
    optimizer = forge_algos.adamw(model, settings)
    average = None
    if own.reference == "moving":
        average = forge_algos.WeightAverage(optimizer, own.reference_mixup, every=own.reference_sync_steps)

    def steps():
        for rows in ROWS:
            made = [online.Completion(ids=np.array(completion), finished=True) for _, completion in rows]
            scores = [[one(completion) for _, completion in rows] for one in rewards]
            rollout = online.make_rollout(
                model,
                SimpleNamespace(sample=lambda *_args, made=made, **_kwargs: made),
                [SimpleNamespace(input_ids=np.array(prompt), prompt="", columns={}) for prompt, _ in rows[::EACH]],
                settings=own,
                rewards=[
                    online.Reward(name=f"recorded {n}", function=lambda each=each, **_: each, weight=own.reward_weights[n])
                    for n, each in enumerate(scores)
                ],
                decode=lambda _ids: "",
                max_tokens=128,
                seed=0,
                reference=still if average is None else average.exchanged,
            )
            yield from online.rollout_batches(rollout, max_tokens=128)

    outputs = forge_algos.train(
        model, steps(), objective=objective, optimizer=optimizer, average=average, max_grad_norm=0.5,
        scheduler=forge_algos.schedule(optimizer, settings, num_steps=STEPS),
    )  # fmt: skip
    return [(output.loss, output.grad_norm) for output in outputs]


def test_rloo_with_normalized_advantages_and_clipped_rewards(tmp_path):
    """Rewards of which some are beyond the range, beside the KL; advantages of mean 0 and deviation 1."""
    folder = tmp_path / "model"
    a_model().save_pretrained(folder)
    more = {"normalize_advantages": True, "reward_clip_range": (0.3, 0.7)}
    assert {reward(completion) > 0.7 for rows in ROWS for _, completion in rows} == {True, False}
    theirs = run_trl("rloo", folder, tmp_path, beta=0.3, **more)
    ours = run_ours(objective("rloo", **more), folder)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def objective(verb, **more):
    import forge_algos

    common = {"num_generations": EACH, "max_new_tokens": 16, "kl_weight": 0.3, "reward": ("a:b",), "reward_weights": (1.0,)}
    common |= more
    if verb == "rloo":
        return forge_algos.RLOO(forge_algos.RLOOSettings(**common))
    return forge_algos.GRPO(forge_algos.GRPOSettings(**{"loss_type": "dapo", "kl_estimator": "unbiased", **common}))


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_an_entropy_in_the_loss(kind, tmp_path):
    """A mean over all tokens of the step, whatever the loss is a mean of; without it is another run."""
    folder = tmp_path / "model"
    a_model().save_pretrained(folder)
    theirs = run_trl("grpo", folder, tmp_path, beta=0.3, loss_type=kind, entropy_coef=0.5, temperature=0.8)
    ours, other = (
        run_ours(objective("grpo", loss_type=kind, temperature=0.8, entropy_coef=each), folder) for each in (0.5, 0.0)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert abs(ours[0][1] - other[0][1]) > 1e-4


@pytest.mark.parametrize("quantile", [1.0, 0.5])
def test_an_entropy_that_follows_a_target(quantile, tmp_path):
    """Its weight rises after the first step, up to its bound, weighs the second, and falls; without it is another run."""
    folder = tmp_path / "model"
    a_model().save_pretrained(folder)
    more = {"entropy_coef": 0.2, "entropy_coef_delta": 0.4, "entropy_coef_max": 0.5, "top_entropy_quantile": quantile}
    more |= {"use_adaptive_entropy": True, "entropy_target": ENTROPY[quantile]}
    theirs = run_trl("grpo", folder, tmp_path, beta=0.3, loss_type="dapo", **more)
    ours, other = (run_ours(objective("grpo", **more | each), folder) for each in ({}, {"entropy_target": 0.0}))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert abs(ours[1][1] - other[1][1]) > 1e-4


@pytest.mark.parametrize(("kind", "more"), [("grpo", {}), ("dapo", {"entropy_coef": 0.5}), ("gspo", {}), ("cispo", {})])
def test_the_most_uncertain_tokens_alone_learn(kind, more, tmp_path):
    """2506.01939, beside the KL of all tokens; all of them is another run."""
    folder = tmp_path / "model"
    a_model().save_pretrained(folder)
    own, theirs = {"loss_type": kind, "temperature": 0.8, **more}, {"loss_type": kind}
    if kind == "gspo":
        own |= {"kl_estimator": "k3"}  # TRL's other one is weighed by the completion's ratio
        theirs = {"loss_type": "grpo", "importance_sampling_level": "sequence", "use_bias_correction_kl": False}
    theirs |= {"epsilon_high": 5.0} if kind == "cispo" else {}
    theirs = run_trl("grpo", folder, tmp_path, beta=0.3, top_entropy_quantile=0.4, temperature=0.8, **theirs, **more)
    ours, all_of_them = (run_ours(objective("grpo", **own, top_entropy_quantile=each), folder) for each in (0.4, 1.0))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert abs(ours[0][1] - all_of_them[0][1]) > 1e-4


def test_rewards_are_normalized_each_by_itself(tmp_path):
    """GDPO: two rewards of other scales and weights; their sum, normalised, is another run."""
    folder = tmp_path / "model"
    a_model().save_pretrained(folder)
    two, weights = (reward, length), (0.5, 2.0)
    more = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": weights}
    theirs = run_trl("grpo", folder, tmp_path, two, beta=0.3, loss_type="dapo", **{**more, "reward_weights": list(weights)})
    summed = {"reward": ("a:b", "a:c"), "reward_weights": weights}
    ours, other = (run_ours(objective("grpo", **summed | each), folder, two) for each in (more, {}))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert abs(ours[0][1] - other[0][1]) > 1e-2


# Where the reference moves is no matter of the loss.
MOVING = [("grpo", 1, 0.6), ("grpo", 2, 1.0), pytest.param("rloo", 1, 0.6, marks=pytest.mark.lane)]


@pytest.mark.parametrize(("verb", "every", "share"), MOVING)
def test_a_reference_that_moves(verb, every, share, tmp_path):
    """TRL's sync_ref_model, after each step or after the second; a reference that stays is another run."""
    folder = tmp_path / "model"
    a_model().save_pretrained(folder)
    theirs = run_trl(
        verb, folder, tmp_path, beta=0.3, sync_ref_model=True, ref_model_sync_steps=every, ref_model_mixup_alpha=share,
        **({"loss_type": "dapo"} if verb == "grpo" else {"normalize_advantages": False}),
    )  # fmt: skip
    moves = {"reference": "moving", "reference_sync_steps": every, "reference_mixup": share}
    ours, still = run_ours(objective(verb, **moves), folder), run_ours(objective(verb), folder)
    assert len(ours) == len(theirs) == STEPS
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(ours[:every], still[:every], rtol=1e-6)
    assert abs(ours[-1][1] - still[-1][1]) > 1e-2


def test_what_narrows_sampling_is_not_in_the_loss(tmp_path):
    """Log-probabilities are those of the whole distribution at the temperature, there and here."""
    folder = tmp_path / "model"
    a_model().save_pretrained(folder)
    narrow = {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.2, "repetition_penalty": 1.5}
    theirs = run_trl("grpo", folder, tmp_path, beta=0.3, loss_type="dapo", **narrow)
    np.testing.assert_allclose(run_ours(objective("grpo", **narrow), folder), theirs, rtol=1e-4, atol=1e-6)
