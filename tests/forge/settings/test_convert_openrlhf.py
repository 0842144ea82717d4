"""Scripts of OpenRLHF → recipes: flags of today and of before, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from forge._errors import RecipeError

from ...whole.repository import ROOT
from .scripts import looked_at, recipe_of

PAGE = (ROOT / "docs" / "migrating" / "openrlhf.md").read_text()
(THEIRS,) = re.findall(r"```shell\n(# OpenRLHF: .*?)```", PAGE, re.DOTALL)
(OURS,) = re.findall(r"```yaml\n(# forge: .*?)```", PAGE, re.DOTALL)


def of(command: str) -> Any:
    """What a command becomes; a recipe that its verb takes."""
    return recipe_of(f"python3 -m openrlhf.cli.{command}", "OpenRLHF")


def test_the_pages_example() -> None:
    """The script of the page becomes the recipe below it, and only how it runs there is listed."""
    found = of(THEIRS.partition("openrlhf.cli.")[2])
    assert found.verb == "grpo"
    numbers = {"reward": ("rewards.py:reward_func",), "learning_rate": 1e-6, "reward_clip_range": (-10.0, 10.0)}
    assert found.settings == {**yaml.safe_load(OURS), **numbers}
    assert looked_at(found) == set()


SCHEDULE = {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.1, "warmup_ratio": 0.03}
CASES: list[tuple[str, str, dict[str, Any], set[str]]] = [
    (
        "train_sft --data.dataset d --data.input_key q --data.output_key a --data.apply_chat_template --adam.lr 1e-5",
        "sft",
        {
            "rename_columns": {"q": "prompt", "a": "completion"},
            "max_seq_len": 2048,
            "on_overflow": "truncate",
            "num_epochs": 2,
            "effective_batch_size": 128,
            "learning_rate": 1e-5,
            "data_path": "d",
            **SCHEDULE,
        },
        set(),
    ),
    (
        "train_sft --pretrain m --dataset d --input_key q --output_key a --max_epochs 1 --lora_rank 8 --load_in_4bit --l2 0.1",
        "sft",
        {
            "model_path": "m",
            "num_epochs": 1,
            "adapter": "qlora",
            "lora_r": 8,
            "lora_alpha": 16,
            "weight_decay": 0.1,
            "effective_batch_size": 128,
        },
        {"data.input_template"},
    ),
    (
        "train_sft --model.pretrain_mode_enable --data.input_key content --data.max_len 64",
        "pretrain",
        {"block_size": 64},
        set(),
    ),
    (
        "train_dpo --model.beta 0.2 --ref.model_name_or_path r --data.prompt_key p "
        "--model.nll_loss_coef 0.5 --adam.betas 0.8 0.9",
        "dpo",
        {
            "beta": 0.2,
            "reference_path": "r",
            "loss_type": ("sigmoid", "sft"),
            "loss_weights": (1.0, 0.5),
            "max_seq_len": 512,
            "learning_rate": 1e-5,
            "rename_columns": {"p": "prompt"},
            "beta1": 0.8,
            "beta2": 0.9,
        },
        set(),
    ),
    ("train_dpo --ipo --beta 0.1 --bf16 --zero_stage 3", "dpo", {"loss_type": ("ipo",), "beta": 0.1}, set()),
    ("train_dpo --model.label_smoothing 0.1", "dpo", {"loss_type": ("cdpo",), "label_smoothing": 0.1}, set()),
    (
        "train_kto --apply_chat_template --input_key i --output_key o --label_key s --desirable_loss_weight 2",
        "kto",
        {"beta": 0.01, "rename_columns": {"i": "prompt", "o": "completion", "s": "label"}, "desirable_weight": 2.0},
        set(),
    ),
    (
        "train_rm --data.max_len 64 --model.margin_loss_enable",
        "reward",
        {"max_seq_len": 64, "learning_rate": 9e-6},
        {"model.margin_loss_enable"},
    ),
    (
        "train_ppo_ray --reward.model_name_or_path rm --rollout.max_new_tokens 512 --rollout.batch_size 256",
        "ppo",
        {
            "reward_model_path": "rm",
            "kl_weight": 0.01,
            "lam": 1.0,
            "value_clip": 0.5,
            "updates_per_pass": 2,
            "num_iterations": 1,
            "max_new_tokens": 512,
            "max_prompt_len": 1536,
            "reward_clip_range": (-10.0, 10.0),
            "learning_rate": 1e-6,
        },
        {"critic.adam.lr"},
    ),
    (
        "train_ppo_ray --advantage_estimator reinforce --remote_rm_url r.py "
        "--pretrain m --actor_learning_rate 5e-7 --init_kl_coef 1e-4 --kl_target 0.05"
        " --prompt_max_len 100 --generate_max_len 200 "
        "--n_samples_per_prompt 1 --vllm_num_engines 4 --actor_num_gpus_per_node 8",
        "grpo",
        {
            "model_path": "m",
            "baseline": "none",
            "whiten": True,
            "kl_in_reward": True,
            "kl_weight": 1e-4,
            "kl_target": 0.05,
            "kl_horizon": 10_000,
            "learning_rate": 5e-7,
            "max_prompt_len": 100,
            "max_new_tokens": 200,
            "num_generations": 1,
            "reward": ("r.py:reward_func",),
        },
        set(),
    ),
    (
        "train_ppo_ray --advantage_estimator group_norm --reward_pretrain a,b "
        "--n_samples_per_prompt 4 --use_kl_loss --kl_estimator k2 --kl_target 0.05"
        " --max_len 200 --dynamic_filtering --dynamic_filtering_reward_range 0 1 --normalize_reward",
        "grpo",
        {
            "scale_rewards": "group",
            "on_equal_rewards": "resample",
            "min_group_reward": 0.0,
            "max_group_reward": 1.0,
            "max_new_tokens": 100,
            "kl_in_reward": None,
            "kl_target": None,
            "whiten": None,
        },
        {
            "reward.model_name_or_path",
            "algo.kl.target",
            "algo.kl.estimator",
            "data.max_len",
            "algo.dynamic_filtering_enable",
            "reward.normalize_enable",
        },
    ),
    (
        "train_ppo_ray --algo.advantage.estimator dr_grpo --rollout.n_samples_per_prompt 4 "
        "--actor.policy_loss_type gspo --new_flag 3"
        " --rollout.max_new_tokens 9 --algo.kl.init_coef 0 --reward.remote_url http://x",
        "grpo",
        {"loss_type": "gspo", "clip": 0.2, "clip_high": 0.2, "scale_rewards": "none", "kl_weight": 0.0},
        {"new_flag", "reward.remote_url"},
    ),
    (
        "train_ppo_ray --algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4 --rollout.max_new_tokens 9",
        "grpo",
        {"baseline": "leave_one_out", "kl_in_reward": True, "kl_weight": 0.01},
        {"algo.kl.init_coef"},
    ),
]


@pytest.mark.parametrize(("command", "verb", "settings", "lost"), CASES)
def test_what_flags_become(command: str, verb: str, settings: dict[str, Any], lost: set[str]) -> None:
    """Flags with dots and with underscores, the defaults of each trainer, and what is to be looked at."""
    found = of(command)
    assert (found.verb, looked_at(found)) == (verb, lost)
    assert {name: found.settings.get(name) for name in settings} == settings


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train_ppo_ray --train.agent_func_path a.py", "an agent answers the model's turns: write it as an environment"),
        ("train_ppo_ray --advantage_estimator magic", "algo.advantage.estimator: magic: forge has gae, reinforce"),
        ("train_kd --beta 1", "calls openrlhf.cli.train_kd, .*`forge distill`"),
        ("serve_rm --port 1", "reward_model_path"),
    ],
)
def test_what_is_refused(command: str, message: str) -> None:
    """By name, with what there is instead."""
    with pytest.raises(RecipeError, match=message):
        of(command)


def test_a_data_set_that_is_named_twice() -> None:
    """Its rows are seen twice there, and once here, which is listed."""
    found = of("train_sft --model.model_name_or_path m --data.dataset a.jsonl,a.jsonl --data.input_key p --data.output_key c")
    assert found.settings["data_path"] == "a.jsonl"
    assert "data.dataset" in looked_at(found)
