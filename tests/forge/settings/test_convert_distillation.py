"""Files of trainers with a teacher → recipes of forge distill: what each key becomes, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from forge import RecipeError
from forge.settings._settings import resolve
from forge.verbs._registry import task_of

from .scripts import looked_at, recipe_of
from .test_convert import AXOLOTL, TEACHER, TRL, about, converted
from .test_convert_verl import script

GOLD = TEACHER + "use_uld_loss: true\nuld_token_merge_strategy: bayesian\nuld_skip_student_eos: false\n"
GOLD += "uld_skip_teacher_eos: false\n"
KD = AXOLOTL + "datasets: [{path: a.jsonl, type: axolotl.integrations.kd.chat_template}]\nkd_trainer: true\n"
KD += "plugins: [axolotl.integrations.kd.KDPlugin]\n"
GKD = {"train_on": "last", "max_seq_len": 1024, "on_overflow": None, "learning_rate": 2e-5, "beta": None}
"""What a file of TRL's GKDTrainer leaves to it."""
UNNAMED = ("", "lmbda: 0.3\ntemperature: 0.8\n", "max_completion_length: 9\n")
"""Files that might as well be for another of TRL's trainers with a teacher."""
NEMO = """\
policy:
  model_name: m
  train_global_batch_size: 64
  max_total_sequence_length: 2048
  max_grad_norm: 1.0
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 2.0e-5, weight_decay: 0.02, betas: [0.9, 0.99], eps: 1.0e-8}}
  generation: {max_new_tokens: 512, temperature: 0.8, top_p: 0.9, top_k: null, backend: vllm, vllm_cfg: {precision: x}}
teacher: {model_name: t}
distillation: {num_prompts_per_step: 128, num_generations_per_prompt: 1, max_num_steps: 10, max_num_epochs: 9, seed: 7,
  topk_logits_k: 64, val_period: 20}
loss_fn: {kl_type: reverse}
data: {shuffle: true, train: {dataset_name: DeepScaler}}
checkpointing: {checkpoint_dir: out}
"""


def checked(text: str) -> Any:
    """What a file becomes; forge distill takes it."""
    found = converted(text)
    assert found.verb == "distill"
    needed = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o"}
    resolve(task_of("distill").settings, ("recipe", needed | found.settings))
    return found


@pytest.mark.parametrize(
    ("text", "settings", "lost"),
    [
        (
            GOLD + "uld_use_hybrid_loss: true\nuld_hybrid_matched_weight: 1\nuld_hybrid_unmatched_weight: 2\nlmbda: 1\n",
            {"loss": "gold", "matched_weight": 1, "unmatched_weight": 2, "on_policy": 1, "temperature": 1.0, "top_p": 0.95},
            {"max_length"},
        ),
        (
            GOLD + "beta: 0.2\nuld_student_temperature: 2\nuld_teacher_temperature: 3\nuse_extended_uld: false\n",
            {"loss": "uld", "beta": None, "temperature": 2, "on_policy": 0.5, "max_new_tokens": 128, "learning_rate": 1e-7},
            {"uld_teacher_temperature", "use_extended_uld", "max_length"},
        ),
        (
            TEACHER + "use_uld_loss: true\nuld_crossentropy_weight: 0.1\nlmbda: 0\ntop_p: 0.5\nnum_generations: 2\n",
            {"loss": "uld", "on_policy": 0, "top_p": None, "sample_temperature": None},
            {
                *("uld_token_merge_strategy", "uld_crossentropy_weight", "uld_skip_student_eos", "uld_skip_teacher_eos"),
                *("num_generations", "max_length"),
            },
        ),
        (
            TEACHER + "teacher_tokenizer_name_or_path: t\ntemperature: 0.7\nmax_completion_length: 9\ntop_k: 5\n",
            {"loss": None, "temperature": 0.7, "sample_temperature": 0.7, "max_new_tokens": 9, "top_k": 5, "beta": None},
            {"max_length"},
        ),
        (
            TEACHER + "lmbda: 0.5\nseq_kd: true\n",
            {"on_policy": 0.5, "sample_temperature": 0.9},
            {"seq_kd", "verb", "max_length"},
        ),
        (
            KD + "kd_ce_alpha: 0.1\nkd_alpha: 0.9\nkd_temperature: 2.0\nkd_normalize_topk: true\n",
            {
                "teacher_logprobs": "taught",
                "teacher_rest": "left_out",
                "beta": 0.0,
                "temperature": 2,
                "data_format": "messages",
            },
            {"kd_ce_alpha", "kd_alpha", "kd_normalize_topk"},
        ),
        (
            KD + "kd_beta: 1.0\nkd_alpha: 1\nkd_ce_alpha: 0\nkd_online_server_base_url: http://x\nkd_temperature_min: 1\n",
            {"teacher_rest": "class", "beta": 1.0, "temperature": 1.0},
            {"kd_online_server_base_url", "kd_temperature_min"},
        ),
    ],
)
def test_trl_and_axolotl(text: str, settings: dict[str, Any], lost: set[str]) -> None:
    """GOLDConfig's loss and sampling, GKDConfig's, and Axolotl's kd; what has no counterpart is listed by its name."""
    found = checked(text)
    assert {name: found.settings.get(name) for name in settings} == settings
    assert about(found) == lost


@pytest.mark.parametrize(
    ("text", "settings", "lost"),
    [
        ("lmbda: 0.3\ntemperature: 0.8\n", {**GKD, "on_policy": 0.3, "sample_temperature": 0.8, "temperature": None}, 2),
        ("lmbda: 0\ntemperature: 0.8\nmax_new_tokens: 9\n", {**GKD, "on_policy": 0, "max_new_tokens": None}, 1),
        ("max_new_tokens: 9\nshuffle_dataset: false\n", {**GKD, "shuffle": None, "on_policy": 0.5, "max_new_tokens": 9}, 1),
        ("max_new_tokens: 9\nmax_length: 512\ntruncation_mode: keep_end\n", {**GKD, "max_seq_len": 512}, 1),
        ("max_new_tokens: 9\nmax_length: null\n", GKD, 1),
        ("lmbda: 0.5\nmax_completion_length: 9\n", {**GKD, "learning_rate": 1e-7, "max_new_tokens": 9, "top_p": 0.95}, 1),
        ("lmbda: 0.5\nuse_uld_loss: false\nmax_length: null\n", {"train_on": "last", "max_seq_len": None, "top_p": 0.95}, 0),
        ("", {"train_on": None, "max_seq_len": None, "on_policy": 1.0, "learning_rate": 1e-6}, 1),
        ("max_completion_length: 9\n", {"train_on": None, "max_seq_len": None, "on_policy": 1.0, "max_new_tokens": 9}, 1),
        (
            "repetition_penalty: 1.1\nshuffle_dataset: false\n",
            {"shuffle": False, "train_on": None, "max_seq_len": None, "on_policy": 1.0},
            0,
        ),
    ],
)
def test_whose_trainer_a_file_of_trl_is_for(text: str, settings: dict[str, Any], lost: int) -> None:
    """Told by keys that one has alone, else listed; GKD and GOLD learn the last answer, and keep the end of a long row."""
    found = checked(TEACHER + text)
    assert {name: found.settings.get(name) for name in settings} == settings
    listed = [line for line in found.lost if line.startswith(("max_length", "verb"))]
    assert len(listed) == lost
    assert any("last tokens are kept there" in line for line in listed) == (found.settings.get("max_seq_len") is not None)
    assert any("read as a file of TRL's" in line for line in listed) == (text in UNNAMED)


def test_minillm_is_refused() -> None:
    """By name, unless the verb is given: then its own keys are listed."""
    with pytest.raises(RecipeError, match="rkl_advantage: is of TRL's MiniLLM"):
        converted(TEACHER + "rkl_advantage: true\n")
    found = converted(TEACHER + "rkl_advantage: true\n", verb="distill")
    assert about(found) == {"rkl_advantage"}
    assert converted(TRL + "learning_rate: 1.0\n").verb == "sft"


@pytest.mark.parametrize(
    ("more", "beta"),
    [
        (("loss_mode=k1", "use_policy_gradient=True"), 1.0),
        (("loss_mode=forward_kl_topk", "topk=64"), 0.0),
        (("loss_mode=k2",), 1.0),
        ((), 0.0),
    ],
)
def test_verl(more: tuple[str, ...], beta: float) -> None:
    """Each estimate is the divergence that its gradient is of; a step is a mini-batch."""
    teacher = ["distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=t"]
    own = [f"distillation.distillation_loss.{each}" for each in ("use_task_rewards=False", *more)]
    rest = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32", "trainer.total_training_steps=5"]
    rest += ["actor_rollout_ref.rollout.temperature=0.7", "actor_rollout_ref.rollout.n=1"]
    found = recipe_of(script(*teacher, *own, *rest), "verl")
    assert found.verb == "distill"
    wanted = {"teacher_path": "t", "on_policy": 1.0, "beta": beta, "effective_batch_size": 32, "max_steps": 10}
    wanted |= {"sample_temperature": 0.7, "max_new_tokens": 512, "max_seq_len": 1024}
    assert {name: found.settings.get(name) for name in wanted} == wanted
    assert looked_at(found) <= {"distillation.distillation_loss.topk", "data.prompt_key"}
    assert beta == 1 or "data.prompt_key" in looked_at(found)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("loss_mode=k1",), "loss_mode=k1: with use_policy_gradient=False forward_kl_topk"),
        (("use_task_rewards=True",), "use_task_rewards"),
    ],
)
def test_what_verl_has_beside_a_teacher_is_refused(more: tuple[str, ...], message: str) -> None:
    """Losses that learn nothing, rewards beside the teacher, and several teachers."""
    own = [f"distillation.distillation_loss.{each}" for each in ("use_task_rewards=False", *more)]
    with pytest.raises(RecipeError, match=message):
        recipe_of(script("distillation.enabled=True", "+distillation.teacher_models.a.model_path=t", *own), "verl")
    both = [f"+distillation.teacher_models.{name}.model_path=t" for name in "ab"]
    with pytest.raises(RecipeError, match="has 2 teachers"):
        recipe_of(script("distillation.enabled=True", *both, own[0]), "verl")


def test_nemo_rl() -> None:
    """A file of run_distillation.py: its steps are rollouts, and its names of data sets are its own."""
    found = checked(NEMO)
    assert found.library == "NeMo-RL"
    assert found.settings == {
        "model_path": "m", "teacher_path": "t", "on_policy": 1.0, "beta": 1.0, "effective_batch_size": 64, "max_seq_len": 2048,
        "max_new_tokens": 512, "sample_temperature": 0.8, "top_p": 0.9, "max_steps": 20, "seed": 7, "learning_rate": 2e-5,
        "weight_decay": 0.02, "beta1": 0.9, "beta2": 0.99, "max_grad_norm": 1.0, "shuffle": True, "ckpt_output_dir": "out",
    }  # fmt: skip
    assert looked_at(found) == {"distillation.topk_logits_k", "distillation.max_num_epochs", "data.train.dataset_name"}
    mixed = converted(yaml.safe_dump(yaml.safe_load(NEMO) | {"loss_fn": {"kl_type": "mixed", "mixed_kl_weight": 0.3}}))
    assert mixed.settings["beta"] == 0.5
    assert "loss_fn.kl_type" in looked_at(mixed)
    with pytest.raises(RecipeError, match="--verb sft"):
        converted(NEMO, verb="sft")
