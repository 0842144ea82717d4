"""Scripts of verl → recipes: what each key becomes, and what is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge._errors import RecipeError
from forge.cli._config import convert as write_recipe
from forge.settings.convert._convert import convert, read_foreign

from ...whole.repository import ROOT
from .scripts import looked_at, recipe_of
from .test_convert import fields

PAGE = (ROOT / "docs" / "migrating" / "verl.md").read_text()
(THEIRS,) = re.findall(r"```shell\n(# verl: .*?)```", PAGE, re.DOTALL)
(OURS,) = re.findall(r"```yaml\n(# forge: .*?)```", PAGE, re.DOTALL)
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def script(*more: str, module: str = "verl.trainer.main_ppo") -> str:
    """A script that calls verl with the least that is given, and more."""
    least = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=m", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4"]
    return f"python3 -m {module} \\\n  " + " \\\n  ".join(
        f"'{each}'" for each in ([] if "sft" in module else least) + list(more)
    )


def of(text: str, verb: str | None = None) -> Any:
    """What a script becomes; a recipe that its verb takes."""
    return recipe_of(text, "verl", verb)


def test_the_pages_example() -> None:
    """The script of the page becomes the recipe below it, and only how it runs there is listed."""
    found, wanted = of(THEIRS), yaml.safe_load(OURS)
    assert found.verb == "grpo"
    assert found.settings == {**wanted, "learning_rate": 1e-6, "reward": ("rewards.py:compute_score",)}
    assert looked_at(found) == set()
    assert set(found.comments) == {"weight_decay", "beta2", "lr_scheduler", "dual_clip"}


def test_nothing_given_is_verls_default() -> None:
    """What a script leaves out and forge has otherwise is written: the numbers of ppo_trainer.yaml."""
    found = of("python -m verl.trainer.main_ppo")
    assert found.verb == "ppo"
    assert found.settings == {
        "effective_batch_size": 1024, "updates_per_pass": 4, "num_iterations": 1, "max_new_tokens": 512, "max_prompt_len": 512,
        "on_overflow": "error", "reward": ("verl.utils.reward_score:default_compute_score",), "dual_clip": 3.0, "lam": 1.0,
        "value_clip": 0.5, "kl_weight": 0.0, "num_epochs": 30, "learning_rate": 1e-6, "weight_decay": 0.01, "beta2": 0.999,
        "lr_scheduler": "constant",
    }  # fmt: skip
    assert looked_at(found) == {"critic.optim.lr"}


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        (["algorithm.adv_estimator=rloo"], {"baseline": "leave_one_out", "loss_type": "dapo"}),
        (["algorithm.adv_estimator=opo"], {"baseline": "length"}),
        (["algorithm.adv_estimator=grpo_passk"], {"baseline": "second_best", "scale_rewards": "group"}),
        (
            ["algorithm.adv_estimator=grpo_passk", "algorithm.norm_adv_by_std_in_grpo=False"],
            {"baseline": "second_best", "scale_rewards": None},
        ),
        (
            ["algorithm.adv_estimator=gpg", f"{ACTOR}.policy_loss.loss_mode=gpg"],
            {"scale_rewards": "nonzero", "loss_type": "gpg", "clip": None, "dual_clip": None},
        ),
        (
            [
                f"{ACTOR}.policy_loss.loss_mode=dppo_tv",
                f"{ACTOR}.clip_ratio_low=0.15",
                f"{ACTOR}.clip_ratio_high=0.15",
                f"{ACTOR}.clip_ratio_c=10000.0",
                f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
            ],
            {"loss_type": "dppo_tv", "loss_reduction": "max_length", "clip": 0.15, "clip_high": 0.15, "dual_clip": 10000.0},
        ),
        (
            [f"{ACTOR}.policy_loss.loss_mode=dro", f"{ACTOR}.policy_loss.dro_beta=0.1"],
            {"loss_type": "dro", "dro_beta": 0.1, "clip": None},
        ),
        (
            [
                f"{ACTOR}.policy_loss.loss_mode=clip_cov",
                *(f"{ACTOR}.policy_loss.clip_cov_{k}" for k in ("ratio=0.1", "lb=0.5")),
            ],
            {
                "loss_type": "clip_cov",
                "clip_cov_ratio": 0.1,
                "clip_cov_lb": 0.5,
                "clip": 0.2,
                "clip_high": 0.2,
                "dual_clip": None,
            },
        ),
        (
            [f"{ACTOR}.policy_loss.loss_mode=kl_cov", f"{ACTOR}.policy_loss.ppo_kl_coef=0.5"],
            {"loss_type": "kl_cov", "kl_cov_coef": 0.5, "clip": None, "dual_clip": None},
        ),
        (
            [f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
            {"loss_type": "cispo", "loss_reduction": "mean"},
        ),
        (
            ["algorithm.adv_estimator=remax", f"{ROLLOUT}.n=1"],
            {"baseline": "greedy", "num_generations": 1, "scale_rewards": None},
        ),
        (["algorithm.adv_estimator=optimal_token_baseline"], {"baseline": "optimal_token", "scale_rewards": None}),
        (["algorithm.adv_estimator=reinforce_plus_plus"], {"baseline": "none", "whiten": True}),
        (["algorithm.adv_estimator=reinforce_plus_plus_baseline"], {"whiten": True}),
        (["algorithm.adv_estimator=gdpo"], {"multi_objective_aggregation": "normalize_then_sum"}),
        ([f"{ROLLOUT}.n=1"], {"num_generations": 1, "baseline": "none", "scale_rewards": "none"}),
        (["algorithm.norm_adv_by_std_in_grpo=False"], {"scale_rewards": "none"}),
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"], {"loss_type": "grpo", "dual_clip": 3.0}),
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"], {"loss_type": "dr_grpo", "scale_rewards": "group"}),
        (
            [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"],
            {"loss_type": "luspo", "importance_sampling_level": "token", "clip": 0.2, "clip_high": 0.2},
        ),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], {"loss_type": "gspo", "clip": 0.2, "clip_high": 0.2, "dual_clip": None}),
        (
            [f"{ACTOR}.policy_loss.loss_mode=geo_mean", f"{ACTOR}.clip_ratio=0.4"],
            {"loss_type": "gmpo", "clip": 0.4, "clip_high": 0.4},
        ),
        ([f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=10"], {"loss_type": "cispo", "clip": None}),
        (
            [f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.tau_neg=1.2"],
            {"loss_type": "sapo", "sapo_temperature_neg": 1.2, "clip": None, "dual_clip": None},
        ),
        ([f"{ACTOR}.clip_ratio_c=10.0"], {"dual_clip": 10.0}),
        ([f"{ACTOR}.use_kl_loss=True"], {"kl_weight": 0.001, "kl_in_reward": None}),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1"], {"kl_weight": 0.1, "kl_in_reward": True}),
        (
            [
                "algorithm.use_kl_in_reward=True",
                *(f"algorithm.kl_ctrl.{key}" for key in ("type=adaptive", "target_kl=0.2", "horizon=500")),
            ],
            {"kl_weight": 0.001, "kl_in_reward": True, "kl_target": 0.2, "kl_horizon": 500},
        ),
        (["algorithm.kl_ctrl.type=adaptive"], {"kl_target": None, "kl_horizon": None}),
        ([f"{ACTOR}.entropy_coeff=0.01"], {"entropy_coef": 0.01}),
        (
            [f"{ACTOR}.ppo_epochs=2", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16"],
            {"num_iterations": 2, "updates_per_pass": 4},
        ),
        (
            [
                "trainer.total_training_steps=10",
                "trainer.test_freq=5",
                "data.val_files=[b.parquet]",
                f"{ACTOR}.optim.lr_warmup_steps=3",
            ],
            {"max_steps": 40, "num_epochs": None, "eval_every_steps": 20, "eval_data_path": ("b.parquet",), "warmup_steps": 12},
        ),
        (
            [f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.min_lr_ratio=0.1"],
            {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.1},
        ),
        (["data.truncation=left"], {"on_overflow": "drop"}),
        (["+data.apply_chat_template_kwargs.enable_thinking=False"], {"chat_template_kwargs": {"enable_thinking": False}}),
        (["data.apply_chat_template_kwargs={enable_thinking:False}"], {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            ["data.train_files=['a.parquet', 'b.parquet']", "data.prompt_key=question"],
            {"data_path": ("a.parquet", "b.parquet"), "rename_columns": {"question": "prompt"}},
        ),
        (["actor_rollout_ref.model.lora_rank=32"], {"adapter": "lora", "lora_r": 32, "lora_alpha": 16, "target_modules": None}),
        (
            ["actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.target_modules=[q_proj,v_proj]"],
            {"target_modules": ("q_proj", "v_proj")},
        ),
        (["reward_model.enable=True", "reward_model.model.path=rm"], {"reward_model_path": "rm", "reward": None}),
        (["reward.custom_reward_function.path=r.py", "reward.custom_reward_function.name=f"], {"reward": ("r.py:f",)}),
        (
            ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=10"],
            {"on_equal_rewards": "resample", "max_resamples": 10},
        ),
        (
            [
                "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
                "+reward_model.reward_kwargs.overlong_buffer_cfg.len=64",
            ],
            {"overlong_buffer": 64},
        ),
        ([f"{ROLLOUT}.top_k=-1", f"{ROLLOUT}.temperature=0.6"], {"top_k": None, "temperature": 0.6}),
        (
            ["trainer.logger=[console,wandb]", "trainer.project_name=p", "trainer.experiment_name=e"],
            {"trackers": ("wandb",), "wandb_run_name": "e"},
        ),
        (["trainer.default_local_dir=$CKPTS/x"], {"ckpt_output_dir": None}),
    ],
)
def test_what_keys_become(more: list[str], settings: dict[str, Any]) -> None:
    """Each, beside a plain GRPO run."""
    found = of(script(*more)).settings
    assert {name: found.get(name) for name in settings} == settings


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ([f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=k2"], f"{ACTOR}.kl_loss_type"),
        (["data.custom_cls.path=x.py"], "data.custom_cls.path"),
        (
            ["custom_reward_function.path=r.py", "+custom_reward_function.reward_kwargs.a=1"],
            "custom_reward_function.reward_kwargs.a",
        ),
        ([f"{ACTOR}.ppo_mini_batch_size=1000"], f"{ACTOR}.ppo_mini_batch_size"),
        (["--config-name=my_own"], "config_name"),
        (["algorithm.gdpo_reward_keys=[a,b]", "algorithm.adv_estimator=gdpo"], "algorithm.gdpo_reward_keys"),
        (["actor_rollout_ref.actor.something_new=1"], f"{ACTOR}.something_new"),
        (["trainer.critic_warmup=5"], "trainer.critic_warmup"),
        ([f"{ACTOR}.policy_loss.clip_cov_lb=1.0"], f"{ACTOR}.policy_loss.clip_cov_lb"),
    ],
)
def test_what_is_to_be_looked_at(more: list[str], key: str) -> None:
    """What could change what is trained is listed under its key; what says how a run is divided stands apart."""
    apart = [
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        f"{ROLLOUT}.gpu_memory_utilization=0.6",
        "trainer.nnodes=2",
        "ray_kwargs.x=1",
    ]
    found = of(script(*more, *apart))
    assert looked_at(found) == {key}
    assert len(found.groups["not carried over, without effect on what is trained"]) == len(apart)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (script("algorithm.adv_estimator=mine"), "adv_estimator=mine: of these there are gae, grpo,"),
        (script(f"{ACTOR}.policy_loss.loss_mode=bypass_mode"), "loss_mode=bypass_mode: of these there are vanilla, gspo, sapo"),
        (script("distillation.enabled=True"), "use_task_rewards: .*no rewards beside the teacher"),
        (
            script(f"{ROLLOUT}.multi_turn.enable=False", f"{ROLLOUT}.multi_turn.tool_config_path=t.yaml"),
            r"as an environment \(env=",
        ),
        (script("algorithm.use_pf_ppo=True"), "use_pf_ppo"),
        (
            "python -m verl.trainer.main_generation x=1",
            "calls verl.trainer.main_generation, .*it answers prompts: `forge generate`",
        ),
        ("python -m recipe.prime.main_prime x=1", "calls recipe.prime.main_prime, .*no such training"),
        (
            script() + "\n" + script("data.shuffle=False"),
            r"trains 2 times \(verl.trainer.main_ppo\): a recipe is of one run",
        ),
        (
            "while sleep 1; do python -m verl.trainer.main_ppo x=1; done",
            "calls no training of ms-swift, verl or OpenRLHF .`while` loops",
        ),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    """A method that forge has not, another program, several runs in one file: by name, with what to do."""
    with pytest.raises(RecipeError, match=message):
        of(text)


def test_sft() -> None:
    """The trainer of today, and fsdp_sft_trainer, whose defaults and columns are others."""
    more = ["model.path=m", "data.train_files=a.parquet", "optim.lr=1e-4", "trainer.total_epochs=2"]
    found = of(script(*more, module="verl.trainer.sft_trainer"))
    assert (found.verb, looked_at(found)) == ("sft", set())
    assert found.settings == {
        "model_path": "m", "data_path": "a.parquet", "effective_batch_size": 256, "max_seq_len": 1024, "on_overflow": "error",
        "num_epochs": 2, "learning_rate": 1e-4, "weight_decay": 0.01, "beta2": 0.999, "lr_scheduler": "constant",
    }  # fmt: skip
    inner = of(script("data.prompt_dict_keys=['q']", *more, module="verl.trainer.fsdp_sft_trainer"))
    assert ("rename_columns" in inner.settings, looked_at(inner)) == (False, {"data.prompt_dict_keys"})
    columns = ["data.prompt_key=extra", "data.response_key=answer", "model.partial_pretrain=m", "data.truncation=right"]
    before = of(script(*columns, module="verl.trainer.fsdp_sft_trainer"))
    assert before.settings["rename_columns"] == {"extra": "prompt", "answer": "completion"}
    assert (before.settings["on_overflow"], before.settings["warmup_ratio"]) == ("truncate", 0.1)
    assert {"beta2", "lr_scheduler"}.isdisjoint(before.settings), "as forge has them by default"


def test_yaml_and_the_command(tmp_path: Path) -> None:
    """A YAML file in sections is read like overrides; the command writes a recipe that its verb takes."""
    values = {
        "actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"n": 4}},
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_files": "a.parquet"},
    }
    text = yaml.safe_dump(values)
    found = convert(read_foreign(text, "c.yaml"), "verl", fields)
    assert found.settings == of(script()).settings
    (tmp_path / "run.sh").write_text(THEIRS)
    assert "recipe for forge grpo" in write_recipe(tmp_path / "run.sh", output=tmp_path / "recipe.yaml")
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["clip_high"] == 0.28


def test_a_number_of_rows_and_a_file_twice() -> None:
    """verl draws them of all files, and sees a file twice that is named twice: both are listed, and the recipe is read."""
    found = of(script("data.train_files=['a.parquet', 'b.parquet', 'a.parquet']", "data.train_max_samples=100"))
    assert found.settings["data_path"] == ("a.parquet", "b.parquet")
    assert found.settings["max_samples"] == 100
    assert {"data.train_files", "data.train_max_samples"} <= looked_at(found)
    assert looked_at(found) - looked_at(of(script())) == {"data.train_files", "data.train_max_samples"}
