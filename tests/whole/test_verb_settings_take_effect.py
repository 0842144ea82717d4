"""No dead settings: each setting of a verb's own changes the run or its files, or is refused by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.settings._settings import groups
from forge.verbs._registry import task_of
from forge.verbs._sft import SFTSettings

from ..lanes import ci_keeps
from .conftest import write_rows
from .sampling_stub import served
from .test_other_tokenizers import write_teacher
from .test_settings_take_effect import once, traces
from .verbs import VERBS, settings_of, teacher

pytestmark = pytest.mark.usefixtures("unchecked_exports")

MOVING = {"reference": "moving", "learning_rate": 1e-1, "max_steps": 3}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 99.0, "max_steps": 3, "learning_rate": 1e-2}
CLIP_COV = {"loss_type": "clip_cov", "clip_cov_lb": -9.0, "clip_cov_ratio": 0.5}
AT_ONCE = {"num_iterations": 1, "max_steps": 3}
"""Of online verbs: a rollout a step, so that each has a reference that may have moved."""
STEERED = {"kl_weight": 5.0, "kl_in_reward": True, "kl_target": 0.1, "kl_horizon": 30, **AT_ONCE, "learning_rate": 1e-1}

# For every verb: its own settings, as (what is given beside it, and two values that must tell two runs apart; a mapping is a
# value with what only it may have beside it).
CASES: dict[str, dict[str, tuple[dict[str, Any], Any, Any]]] = {
    "pretrain": {
        "block_size": ({}, 24, 16),
        "cross_documents": ({}, False, True),
        "label_smoothing": ({}, 0.0, 0.2),
        "z_loss": ({}, 0.0, 1e-2),
    },
    "distill": {
        "teacher_path": ({}, "TEACHER", "OTHER TEACHER"),
        "teacher_logprobs": ({"teacher_path": None}, "STORED", "OTHER STORED"),
        "teacher_rest": ({"teacher_path": None, "teacher_logprobs": "STORED"}, "class", "left_out"),
        "beta": ({}, 0.5, 1.0),
        "temperature": ({}, 1.0, 2.0),
        "on_policy": ({}, 0.0, 1.0),
        "max_new_tokens": ({"on_policy": 1.0}, 256, 3),
        "sample_temperature": ({"on_policy": 1.0}, 1.0, 2.0),
        "top_p": ({"on_policy": 1.0}, 1.0, 0.5),
        "top_k": ({"on_policy": 1.0}, 0, 1),
        "min_p": ({"on_policy": 1.0}, 0.0, 0.9),
        "repetition_penalty": ({"on_policy": 1.0}, 1.0, 9.0),
        "loss": ({}, "jsd", "gold"),
        "matched_weight": ({"loss": "gold", "unmatched_weight": 1.0}, 1.0, 2.0),
        "unmatched_weight": ({"loss": "gold", "matched_weight": 1.0, "teacher_path": "ANOTHER TOKENIZER"}, 1.0, 2.0),
    },
    "sdft": {
        "demonstration_template": ({}, "{prompt} {demonstration}", "{demonstration} {prompt}"),
        "teacher": ({"learning_rate": 1e-1}, "ema", "initial"),
        "teacher_rate": ({"learning_rate": 1e-1}, 0.02, 0.9),
        "beta": ({}, 1.0, 0.0),
        "num_generations": ({}, 1, 2),
        "max_new_tokens": ({}, 6, 4),
        "temperature": ({}, 1.0, 0.5),
        "top_p": ({}, 1.0, 0.2),
        "top_k": ({}, 0, 2),
        "min_p": ({}, 0.0, 0.9),
        "repetition_penalty": ({}, 1.0, 1e3),
        "skip_tokens": ({}, 0, 2),
        "max_prompt_len": ({}, None, 25),
        "on_overflow": ({"max_prompt_len": 25}, "drop", "error"),
    },
    "dpo": {
        "on_bad_pair": ({"data_path": "WITH A BAD PAIR"}, "error", "skip"),
        "beta": ({}, 0.1, 1.0),
        "loss_type": ({}, "sigmoid", ("sigmoid", "sft")),
        "loss_weights": ({"loss_type": ("sigmoid", "sft")}, (1.0, 1.0), (1.0, 0.5)),
        "label_smoothing": ({"loss_type": "robust"}, 0.1, 0.2),
        "f_divergence": ({"learning_rate": 1e-1}, "reverse_kl", "js_divergence"),
        "f_divergence_alpha": ({"learning_rate": 1e-1, "f_divergence": "alpha_divergence"}, 0.5, 0.0),
        "discopop_tau": ({"learning_rate": 1e-1, "loss_type": "discopop"}, 0.05, 0.5),
        "ld_alpha": ({"learning_rate": 1e-1}, None, 0.0),
        "wpo": ({}, False, True),
        "reference_sync_steps": (MOVING, 1, 2),
        "reference_mixup": ({**MOVING, "reference_sync_steps": 1}, 0.6, 1.0),
        "reference": ({"adapter": "lora", "reference_path": None}, "stored", "adapter_off"),
        "reference_path": ({}, None, "TEACHER"),
        "normalize": ({"loss_type": ("sigmoid", "sft"), "max_tokens_per_gpu": 200, "effective_batch_size": 5}, "global", "trl"),
    },
    "orpo": {
        "beta": ({}, 0.1, 1.0),
        "learn_prompt": ({}, False, True),
        "normalize": ({"max_tokens_per_gpu": 200, "effective_batch_size": 5}, "global", "trl"),
    },
    "simpo": {
        "beta": ({}, 2.0, 4.0),
        "gamma": ({}, 1.0, 0.0),
        "label_smoothing": ({}, 0.0, 0.2),
        "cpo_alpha": ({}, 0.0, 1.0),
        "normalize": ({"max_tokens_per_gpu": 200, "effective_batch_size": 5}, "global", "trl"),
    },
    "kto": {
        "beta": ({}, 0.1, 1.0),
        "loss_type": ({"learning_rate": 1e-1}, "kto", "apo_zero_unpaired"),
        "desirable_weight": ({}, 1.0, 2.0),
        "undesirable_weight": ({}, 1.0, 2.0),
        "reference_sync_steps": (MOVING, 1, 2),
        "reference_mixup": ({**MOVING, "reference_sync_steps": 1}, 0.6, 1.0),
        "reference": ({"adapter": "lora", "reference_path": None}, "stored", "adapter_off"),
        "reference_path": ({}, None, "TEACHER"),
        "normalize": ({"max_tokens_per_gpu": 200, "effective_batch_size": 5}, "global", "trl"),
    },
    "classify": {
        "labels": ({}, None, ("weather", "colour")),
        "problem_type": ({}, "auto", "multi_label_classification"),
    },
    "embed": {
        "loss": ({"data_path": "TEXTS OF BOTH KINDS"}, "contrastive", "batch_all_triplet"),
        "pooling": ({}, "auto", "mean"),
        "temperature": ({}, None, 0.5),
        "exclude_same_text": ({"data_path": "WITH EQUAL TEXTS"}, False, True),
        "margin": ({"loss": "batch_all_triplet", "data_path": "TEXTS OF BOTH KINDS"}, None, 0.5),
        "query_prefix": ({}, "", "query: "),
        "document_prefix": ({}, "", "passage: "),
    },
    "reward": {
        "centering": ({"learning_rate": 1e-1}, 0.0, 1.0),
        "normalize": ({"max_tokens_per_gpu": 200, "effective_batch_size": 5}, "global", "trl"),
    },
    "grpo": {
        "max_prompt_len": ({}, None, 25),
        "on_overflow": ({"max_prompt_len": 25}, "drop", "error"),
        "reward": ({}, ("forge_test_rewards:short",), ("forge_test_rewards:long",)),
        "reward_weights": ({}, (1.0,), (-1.0,)),
        "reward_clip_range": ({}, None, (-0.5, 0.0)),
        "reward_model_path": ({}, None, "REWARD MODEL"),
        "on_reward_error": ({"reward": ("forge_test_rewards:at_times",)}, "stop", "skip"),
        "reward_timeout": ({"reward": ("forge_test_rewards:sleepy",)}, None, 0.1),
        "env": ({}, None, "forge_test_rewards:Echo"),
        "max_turns": ({"env": "forge_test_rewards:Echo"}, 8, 1),
        "env_timeout": ({"env": "forge_test_rewards:Echo"}, 60.0, 0.01),
        "sampler": ({"sampler_url": "SERVER"}, "vllm", "sglang"),
        "sampler_url": ({"sampler": "vllm"}, "SERVER", "OTHER SERVER"),
        "sampler_timeout": ({"sampler": "vllm", "sampler_url": "SERVER"}, 600.0, 1e-6),
        "tis_above": ({"sampler": "vllm", "sampler_url": "OTHER SERVER"}, 0.01, 0.1),
        "tis_cap": ({"sampler": "vllm", "sampler_url": "OTHER SERVER"}, 2.0, 0.5),
        "max_sampler_gap": ({"sampler": "vllm", "sampler_url": "OTHER SERVER"}, 0.2, 0.02),
        "max_new_tokens": ({}, 6, 4),
        "temperature": ({}, 1.0, 0.5),
        "top_p": ({}, 1.0, 0.2),
        "top_k": ({}, 0, 2),
        "min_p": ({}, 0.0, 0.9),
        "repetition_penalty": ({}, 1.0, 1e3),
        "clip": ({"learning_rate": 1e-1}, 0.2, 0.01),
        "clip_high": ({"learning_rate": 1e-1, "clip": 0.01}, None, 0.9),
        "entropy_coef": ({"max_steps": 3}, 0.0, 1.0),
        "top_entropy_quantile": ({}, 1.0, 0.2),
        "use_adaptive_entropy": ({"max_steps": 3}, False, {"use_adaptive_entropy": True, "entropy_target": 99.0}),
        "entropy_target": ({**ADAPTIVE, "max_steps": 3}, 99.0, 0.1),
        "entropy_coef_delta": (ADAPTIVE, 0.005, 0.1),
        "entropy_coef_min": ({**ADAPTIVE, "entropy_target": 0.1, "entropy_coef": 0.15, "entropy_coef_delta": 0.1}, 0.0, 0.1),
        "entropy_coef_max": ({**ADAPTIVE, "entropy_coef_delta": 0.1}, 1.0, 0.05),
        "importance_sampling_level": ({"learning_rate": 1e-1, "num_iterations": 2}, None, "sequence"),
        "off_policy_mask_threshold": ({"learning_rate": 1e-1, "num_iterations": 2}, None, 1e-6),
        "dual_clip": ({"learning_rate": 1e-1, "num_iterations": 2}, None, 1.3),
        "loss_reduction": ({}, None, "mean"),
        "dro_beta": ({"loss_type": "dro", "learning_rate": 1e-1, "num_iterations": 2}, 0.1, 5.0),
        "clip_cov_ratio": (CLIP_COV, 0.1, 0.9),
        "clip_cov_lb": (CLIP_COV, -9.0, 0.5),
        "clip_cov_ub": (CLIP_COV, 9.0, 0.1),
        "kl_cov_ratio": ({"loss_type": "kl_cov", "learning_rate": 1e-1, "num_iterations": 2}, 0.1, 0.9),
        "kl_cov_coef": ({"loss_type": "kl_cov", "learning_rate": 1e-1, "num_iterations": 2}, 1.0, 5.0),
        "kl_estimator": ({}, "k3", "unbiased"),
        "updates_per_pass": ({}, 1, 2),
        "mask_truncated": ({}, False, True),
        "missing_eos_penalty": ({}, 0.0, 1.0),
        "overlong_buffer": ({}, 0, 6),
        "loss_type": ({}, "dapo", "gspo"),
        "sapo_temperature_pos": ({"loss_type": "sapo", "num_iterations": 2, "learning_rate": 1e-1}, 1.0, 4.0),
        "sapo_temperature_neg": ({"loss_type": "sapo", "num_iterations": 2, "learning_rate": 1e-1}, 1.05, 4.0),
        **{
            name: ({"loss_type": "vespo", "num_iterations": 2, "learning_rate": 1e-3}, value, value / 2)
            for name, value in (
                ("vespo_k_pos", 2.0),
                ("vespo_lambda_pos", 3.0),
                ("vespo_k_neg", 3.0),
                ("vespo_lambda_neg", 2.0),
            )
        },
        "num_generations": ({}, 3, 2),
        "scale_rewards": ({}, "group", "none"),
        "baseline": ({"scale_rewards": "none"}, "mean", "length"),
        "whiten": ({"scale_rewards": "none"}, False, True),
        "kl_in_reward": ({"kl_weight": 5.0}, False, True),
        "kl_target": (STEERED, 0.1, 1e-6),
        "kl_horizon": (STEERED, 30, 60),
        "multi_objective_aggregation": ({}, "sum_then_normalize", "normalize_then_sum"),
        "kl_weight": ({}, 0.05, 0.5),
        "reference": (AT_ONCE, "initial", {"reference": "moving", "reference_sync_steps": 1}),
        "reference_sync_steps": ({**AT_ONCE, **MOVING}, 1, 2),
        "reference_mixup": ({**AT_ONCE, **MOVING, "reference_sync_steps": 1}, 0.6, 1.0),
        "num_iterations": ({}, 1, 2),
        "on_equal_rewards": ({"reward": ("forge_test_rewards:same",)}, "keep", "skip"),
        "max_resamples": ({"reward": ("forge_test_rewards:same",), "on_equal_rewards": "resample"}, 1, 2),
        "min_group_reward": ({"on_equal_rewards": "skip"}, None, 1e3),
        "max_group_reward": ({"on_equal_rewards": "skip"}, None, -1e3),
    },
    "rloo": {
        "num_generations": ({}, 3, 2),
        "normalize_advantages": ({}, False, True),
        "kl_weight": ({}, 0.05, 5.0),
        "num_iterations": ({}, 1, 2),
        "on_equal_rewards": ({"reward": ("forge_test_rewards:same",)}, "keep", "skip"),
        "max_resamples": ({"reward": ("forge_test_rewards:same",), "on_equal_rewards": "resample"}, 1, 2),
        "min_group_reward": ({"on_equal_rewards": "skip"}, None, 1e3),
        "max_group_reward": ({"on_equal_rewards": "skip"}, None, -1e3),
    },
    "ppo": {
        "num_generations": ({}, 1, 2),
        "kl_weight": ({"max_steps": 4}, 0.05, 5.0),
        "num_iterations": ({}, 1, 2),
        "gamma": ({}, 1.0, 0.5),
        "lam": ({"learning_rate": 1e-1}, 0.95, 0.1),
        "value_weight": ({}, 0.1, 1.0),
        "value_clip": ({"learning_rate": 1e-1}, 0.2, 0.001),
        "whiten": ({}, True, False),
        "dual_clip": ({"learning_rate": 1e-1, "num_iterations": 2, "num_generations": 2, "clip": 0.01}, None, 1.02),
    },
}
PAIRS = [(verb, name) for verb, cases in CASES.items() for name in cases]
REPEATED = [
    *(("rloo", name) for name in ("on_equal_rewards", "max_resamples", "min_group_reward", "max_group_reward")),
    *(("kto", name) for name in ("reference", "reference_path", "reference_sync_steps", "reference_mixup")),
    *((verb, "normalize") for verb in ("orpo", "simpo", "kto")),
    *(("sdft", name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")),
    *(("distill", name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")),
    *(("grpo", name) for name in ("reference_sync_steps", "reference_mixup")),
]
"""What a verb has from the same group or code as another, where CI tries it: grpo, dpo, and dpo and reward."""
REWARDS = """

def long(prompts, completions, **_):
    return [len(text(c)) / 10 for c in completions]


def same(prompts, completions, **_):
    return [1.0] * len(completions)


def at_times(prompts, completions, **_):
    return [1 / (len(text(c)) % 3) for c in completions]


def sleepy(prompts, completions, **_):
    import time

    time.sleep(0.5)
    return [-len(text(c)) / 10 for c in completions]


class Echo:
    def reset(self, **_):
        import time

        time.sleep(0.2)
        self.turns = 0

    def step(self, turn):
        self.turns += 1
        return "more", float(len(turn["content"])), self.turns == 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of rows and reward functions."""
    return tmp_path_factory.mktemp("verbs")


@pytest.fixture(scope="module")
def places(model_dir: Path, folder: Path) -> Iterator[dict[str, str]]:
    """Models and rows by name, and rewards that can be imported."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    first = teacher(model_dir, folder)
    other = teacher(first, folder / "other")
    scored = AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1)
    scored.save_pretrained(folder / "scored")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder / "scored")
    chats = settings_of("distill", model_dir, folder)["data_path"]
    for name, path in (("stored", first), ("other_stored", other)):
        forge.teach(teacher_path=str(path), data_path=chats, output=folder / name, top_k=4)
    settings_of("dpo", model_dir, folder)
    bad = folder / "bad.jsonl"
    bad.write_text((folder / "pairs.jsonl").read_text() + '{"prompt": "a", "chosen": "b", "rejected": "b"}\n')
    settings_of("embed", model_dir, folder)
    texts = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
    write_rows(folder / "both.jsonl", [{**row, "text": row["query"], "label": at % 3} for at, row in enumerate(texts)])
    write_rows(folder / "equal.jsonl", [{**row, "positive": texts[at % 2]["positive"]} for at, row in enumerate(texts)])
    with (folder / "forge_test_rewards.py").open("a") as rewards:
        rewards.write(REWARDS)
    with (
        pytest.MonkeyPatch.context() as patch,
        served("vllm", model_dir) as (server, _),
        served("vllm", model_dir, fault="off by a little") as (other_server, _),
    ):
        patch.syspath_prepend(folder)
        # Another file's module of this name may be loaded.
        patch.delitem(sys.modules, "forge_test_rewards", raising=False)
        yield {
            "SERVER": server,
            "OTHER SERVER": other_server,
            "TEACHER": str(first),
            "OTHER TEACHER": str(other),
            "STORED": str(folder / "stored"),
            "OTHER STORED": str(folder / "other_stored"),
            "ANOTHER TOKENIZER": str(write_teacher(folder / "another")),
            "REWARD MODEL": str(folder / "scored"),
            "WITH A BAD PAIR": str(bad),
            "TEXTS OF BOTH KINDS": str(folder / "both.jsonl"),
            "WITH EQUAL TEXTS": str(folder / "equal.jsonl"),
        }


@pytest.fixture(scope="module")
def outcome(
    places: dict[str, str], model_dir: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Callable[[dict[str, Any]], str]]:
    """Verb → settings → what their run left, or why it was refused."""

    @cache
    def of(verb: str) -> Callable[[dict[str, Any]], str]:
        written = (folder / "forge_test_rewards.py").read_text()
        given = {**settings_of(verb, model_dir, folder), "max_steps": 2, "max_grad_norm": 0.0}
        # Held-out rows are measured twice, a quarter of an online run; a setting's effect shows in its steps.
        given |= {"validation_split": 0.0}
        (folder / "forge_test_rewards.py").write_text(written)

        def made(options: dict[str, Any]) -> str:
            chosen = {**given, **options}
            chosen = {name: places.get(value, value) if isinstance(value, str) else value for name, value in chosen.items()}
            directory = tmp_path_factory.mktemp(verb) / "run"
            try:
                getattr(forge, verb)(**chosen, ckpt_output_dir=directory)
            except (forge.data.ForgeDataError, forge.algos.ForgeAlgosError) as error:
                return f"refused: {type(error).__name__}"
            return traces(directory)

        return once(task_of(verb).settings, made, given)

    return of


def test_every_setting_has_a_case() -> None:
    """A setting of a verb without a case here fails the suite; what online verbs share is tried with one."""
    shared = {name for group in ("data", "objective") for name in _names(SFTSettings, group)}
    online = set(CASES["grpo"]) | set(_names(task_of("grpo").settings, "data"))
    for verb in VERBS.keys() - {"sft", "osft"}:
        settings = task_of(verb).settings
        names = set(_names(settings, "objective")) | (set(_names(settings, "data")) - shared)
        if verb in ("ppo", "rloo"):
            names -= online - set(CASES[verb])
        if verb in ("orpo", "simpo", "kto", "reward"):
            names -= {"on_bad_pair"}
        assert names <= set(CASES[verb]), verb


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "name"), ci_keeps([pair for pair in PAIRS if pair not in REPEATED], PAIRS))
def test_setting_takes_effect(verb: str, name: str, outcome: Callable[[str], Callable[[dict[str, Any]], str]]) -> None:
    """Two values of one setting leave different traces."""
    beside, one, other = CASES[verb][name]
    runs = [outcome(verb)({**beside, **(value if isinstance(value, dict) else {name: value})}) for value in (one, other)]
    assert runs[0] != runs[1]


def test_an_online_run_that_nothing_rewards_is_refused(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Without a reward there is nothing to learn; nothing is written."""
    with pytest.raises(forge.SettingsError, match="nothing rewards the completions: set reward=package"):
        forge.grpo(**(settings_of("grpo", model_dir, folder) | {"reward": ()}), ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_switching_off_an_adapter_that_is_not_there_is_refused(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """A reference by the adapter's absence needs an adapter."""
    given = settings_of("dpo", model_dir, folder) | {"reference": "adapter_off"}
    with pytest.raises(forge.SettingsError, match="adapter=none trains the model itself"):
        forge.dpo(**given, ckpt_output_dir=tmp_path / "run")


def _names(settings: type, group: str) -> list[str]:
    import attrs

    return [field.name for field in attrs.fields(groups(settings)[group])]
