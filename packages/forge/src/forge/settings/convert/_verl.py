"""Settings of verl, with dotted names → a recipe of forge grpo, ppo or sft.

Defaults are those of verl 0.9 (verl/trainer/config of 2026-08-22), and of 0.6 for `fsdp_sft_trainer`, which is gone since.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from forge._errors import RecipeError
from forge.settings.convert._commands import VERL
from forge.settings.convert._data_sets import entries
from forge.settings.convert._distillation import verl_teacher
from forge.settings.convert._draft import Fields, Keys
from forge.settings.convert._verl_loss import LOSSES, read_clip, read_critic, read_kl, read_loss

_A, _R, _M, _O = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model", "actor.optim"))
_ESTIMATORS: dict[str, dict[str, object]] = {
    "grpo": {},
    "grpo_vectorized": {},
    "rloo": {"baseline": "leave_one_out"},
    "rloo_vectorized": {"baseline": "leave_one_out"},
    "opo": {"baseline": "length"},
    "reinforce_plus_plus": {"baseline": "none", "whiten": True},
    "reinforce_plus_plus_baseline": {"whiten": True},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
    "gpg": {"scale_rewards": "nonzero"},
    "grpo_passk": {"baseline": "second_best"},
    "remax": {"baseline": "greedy"},
    "optimal_token_baseline": {"baseline": "optimal_token"},
    "tir_optimal_token_baseline": {"baseline": "optimal_token"},
}
"""`adv_estimator` beside gae → settings of forge grpo."""
_TRACKERS = ("wandb", "mlflow", "swanlab", "tensorboard", "trackio", "clearml", "comet")
BESIDE = re.compile(
    r"(ray_kwargs|ray_init|transfer_queue|global_profiler|profiler|\w+_timeout|hydra|checkpoint|engine|sandbox_fusion)\b.*"
    r"|config_path|ulysses_sequence_parallel_size|model_engine|trainer\.(?!total_|critic_warmup|v1\b|default_local_dir|seed).*"
    r"|.*@.*|.*\.?model_engine|model|optim|.*\.(engine|override_optimizer_config)\b.*|.*\.(fsdp_config|fsdp|megatron|veomni|torchtitan|turbo_config|profiler|checkpoint|engine_kwargs|agent|checkpoint_engine)\b.*"
    r"|actor_rollout_ref\.(ref|hybrid_engine|\w+_timeout)\b.*|actor_rollout_ref\.rollout\.(?!n$|temperature|top_|multi_turn).*"
    r"|(critic|reward_model|reward)\.(?!optim|cliprange_value|model\.path|reward_manager|model_path|reward_kwargs|custom).*"
    r"|.*(use_dynamic_bsz|micro_batch_size|micro_batch_size_per_gpu|max_token_len_per_gpu|batch_size_per_gpu)|.*\.strategy"
    r"|.*\.(ulysses_sequence_parallel_size|use_torch_compile|use_fused_kernels|use_prefix_grouper|entropy_.*chunk.*)"
    r"|.*\.(entropy_checkpointing|calculate_.*|data_loader_seed|pad_to_length.*|use_liger|external_lib|trust_remote_code)"
    r"|.*\.(use_remove_padding|enable_gradient_checkpointing|enable_activation_offload\w*|use_shm|fused_kernel_options.*|tiled_mlp.*)"
    r"|data\.(val_.*|dataloader_num_workers|num_workers|filter_overlong_prompts_workers|return_.*|image_patch_size|gen_batch_size)"
    r"|data\.(reward_fn_key|validation_shuffle|pad_mode|balance_dp_token|ignore_input_ids_mismatch|tool_config_path)"
    r"|.*optim\.(optimizer_impl|total_training_steps|zero_indexed_step|fused|clip_grad)|critic\.model\.path|use_remove_padding"
)
"""Keys that say how a run is divided, saved, logged or made fast, whatever is trained."""


def verl(
    values: Mapping[str, Any], settings_of: Callable[[str], Fields], verb: str | None
) -> tuple[str, dict[str, object], list[str], dict[str, str]]:
    """Return the verb, its settings, `key: reason` of what is lost, and comments.

    Raises:
        RecipeError: it trains by a method that forge has not.
    """
    what = values.get(VERL, "ppo")
    keys = Keys(library="verl", values={name: value for name, value in values.items() if name != VERL})
    if what != "ppo":
        _supervised(keys, old=what == "fsdp_sft")
        verb = verb or "sft"
    elif verb in (None, "distill") and verl_teacher(keys):
        verb = "distill"
        _distilled(keys)
    else:
        estimator = str(keys.get("algorithm.adv_estimator", default="gae"))
        verb = verb or ("ppo" if estimator == "gae" else "grpo")
        _refuse(keys, estimator)
        _online(keys, verb, estimator)
    _common(keys)
    return keys.result(verb, settings_of(verb), BESIDE)


def _refuse(keys: Keys, estimator: str) -> None:
    """Raise RecipeError for a method that has no counterpart."""
    told: dict[str, str] = {}
    if estimator not in ("gae", *_ESTIMATORS):
        told[f"algorithm.adv_estimator={estimator}"] = (
            f"of these there are {', '.join(['gae', *_ESTIMATORS])}; with one of them the rest is converted"
        )
    mode = str(keys.get(f"{_A}.policy_loss.loss_mode", default="vanilla"))
    if mode not in ("vanilla", *LOSSES):
        losses = ", ".join(["vanilla", *LOSSES])
        told[f"loss_mode={mode}"] = f"of these there are {losses}; with one of them the rest is converted"
    if keys.get("distillation.enabled"):
        told["distillation.enabled"] = (
            "a teacher's distribution is learned by `forge distill`, on the model's own completions with on_policy=1 and "
            "beta=1, and by `forge sdft`"
        )
    turns = f"{_R}.multi_turn"
    several = [f"{turns}.{name}" for name in ("enable", "tool_config_path", "interaction_config_path")]
    asked = [keys.get(name) for name in (*several, "data.tool_config_path")]
    if any(asked):
        told[turns] = (
            "write what answers the model's turns as an environment (env=file.py:Class); without it the rest is converted"
        )
    if keys.get("algorithm.use_pf_ppo"):
        told["algorithm.use_pf_ppo"] = "completions are not drawn again by their rewards here"
    if told:
        raise RecipeError(f"verl: {'; '.join(f'{name}: {why}' for name, why in told.items())}.")


def _online(keys: Keys, verb: str, estimator: str) -> None:
    """Read rollouts, rewards, advantages and the loss."""
    _sampled(keys)
    keys.take("num_iterations", f"{_A}.ppo_epochs", default=1)
    times = _updates(keys)
    _rewards(keys)
    _length(keys, epochs=30, times=times)
    _optimizer(keys, _O, grad_clip=f"{_A}.grad_clip", lr=1e-6, times=times)
    read_kl(keys, verb)
    mode, aggregation = (
        str(keys.get(f"{_A}.policy_loss.loss_mode", default="vanilla")),
        str(keys.get(f"{_A}.loss_agg_mode", default="token-mean")),
    )
    if verb == "ppo":
        read_critic(keys, mode, aggregation)
    else:
        keys.found |= _ESTIMATORS.get(estimator, {})
        read_loss(keys, mode, aggregation, estimator)
    read_clip(keys, mode)
    if verb != "ppo":
        keys.seen |= {"algorithm.gamma", "algorithm.lam"}
        if estimator == "reinforce_plus_plus" and keys.get("algorithm.gamma") not in (None, 1):
            keys.lose("algorithm.gamma", "a reward counts for all tokens alike")
        keys.lose("algorithm.gdpo_reward_keys", "write a function for each reward, and list them in reward")
    if keys.found["num_generations"] == 1 and verb == "grpo" and estimator != "remax":
        keys.found |= {"baseline": "none", "scale_rewards": None if keys.found.get("whiten") else "none"}
        keys.comments["baseline"] = "one completion a prompt is compared with none, there too"
    keys.lose("actor_rollout_ref.actor.shuffle", "the completions of a rollout are drawn anew for each pass")
    keys.lose("trainer.critic_warmup", "the policy learns from the first step on")
    keys.lose("trainer.v1.trainer_mode", "each rollout is of the policy as it is")
    for name in [name for name in keys.values if name.startswith("algorithm.rollout_correction")]:
        plain_loss = name.endswith("loss_type") and keys.values[name] != "ppo_clip"
        server = "with a server that samples, tis_above and tis_cap; the model itself needs none"
        keys.lose(name, "the loss is loss_type's, and its ratio clipped" if plain_loss else server)


def _sampled(keys: Keys) -> None:
    """Read what is sampled of which prompts."""
    keys.take("effective_batch_size", "data.train_batch_size", default=1024)
    keys.take("num_generations", f"{_R}.n", default=1)
    keys.take("max_new_tokens", "data.max_response_length", f"{_R}.response_length", default=512)
    keys.take("max_prompt_len", "data.max_prompt_length", f"{_R}.prompt_length", default=512)
    keys.take("temperature", f"{_R}.temperature")
    keys.take("top_p", f"{_R}.top_p")
    top_k = keys.get(f"{_R}.top_k")
    keys.found["top_k"] = None if top_k == -1 else top_k
    drops, cut = keys.get("data.filter_overlong_prompts"), keys.get("data.truncation", default="error")
    keys.found["on_overflow"] = "drop" if drops else "error"
    if cut != "error" and not drops:
        keys.lose("data.truncation", "prompts are whole here, or left out: on_overflow=drop")
        keys.found["on_overflow"] = "drop"


def _distilled(keys: Keys) -> None:
    """Read on-policy distillation beside its teacher and loss."""
    _sampled(keys)
    found = keys.found
    found["sample_temperature"] = found.pop("temperature")
    lengths = [found.pop("max_prompt_len"), found["max_new_tokens"]]
    if all(isinstance(each, int) for each in lengths):
        found["max_seq_len"] = sum(int(str(each)) for each in lengths)
        keys.comments["max_seq_len"] = "prompt and answer together, as there"
    else:
        found["on_overflow"] = None
    if found.pop("num_generations") != 1:
        keys.lose(f"{_R}.n", "one completion of each prompt is sampled")
    prompts, mini = found["effective_batch_size"], keys.get(f"{_A}.ppo_mini_batch_size", default=256)
    times = prompts // mini if isinstance(prompts, int) and isinstance(mini, int) and mini and prompts % mini == 0 else 1
    if times > 1:
        found["effective_batch_size"] = mini
        keys.comments["effective_batch_size"] = f"ppo_mini_batch_size: {times} steps on {prompts} samples; here each samples"
    _length(keys, epochs=30, times=times)
    _optimizer(keys, _O, grad_clip=f"{_A}.grad_clip", lr=1e-6, times=times)
    keys.seen |= {name for name in keys.values if name.startswith(("algorithm.", f"{_A}.clip_ratio", f"{_A}.ppo_epochs"))}


def _updates(keys: Keys) -> int:
    """Read the optimizer steps of a pass over a rollout, and return those of all passes."""
    prompts, mini = keys.found["effective_batch_size"], keys.get(f"{_A}.ppo_mini_batch_size", default=256)
    passes = keys.found["num_iterations"]
    if not all(isinstance(each, int) and each > 0 for each in (prompts, mini, passes)):
        return 1
    assert isinstance(prompts, int)
    if prompts % mini:
        keys.lost.append(
            f"{_A}.ppo_mini_batch_size: {mini}: the {prompts} prompts of a rollout make no whole number of such steps"
        )
        return int(str(passes))
    keys.found["updates_per_pass"] = prompts // mini
    return prompts // mini * int(str(passes))


def _rewards(keys: Keys) -> None:
    """Read the reward function or model, penalties, and what becomes of equal rewards."""
    own = [f"{part}custom_reward_function" for part in ("reward.", "")]
    path = keys.get(*(f"{each}.path" for each in own))
    name = keys.get(*(f"{each}.name" for each in own), default="compute_score")
    model = keys.get("reward.reward_model.model_path", "reward_model.model.path", "reward.reward_model.path")
    is_on = keys.get("reward.reward_model.enable", "reward_model.enable", default=False)
    if is_on and path is None:
        keys.found["reward_model_path"] = model
    else:
        keys.found["reward"] = f"{path or 'verl.utils.reward_score'}:{name if path else 'default_compute_score'}"
        if path is None:
            keys.comments["reward"] = "verl's own, by data_source, for which verl must be installed"
        if is_on:
            keys.lost.append(
                f"reward_model.model_path: {model!r}: the reward function asks it there; here it has no such server"
            )
    for each in [key for key in keys.values if re.match(r"(reward\.)?custom_reward_function\.reward_kwargs", key)]:
        keys.lose(each, "give it to the function as a default of its own")
    long = [f"{part}reward_kwargs.overlong_buffer_cfg" for part in ("reward.", "reward_model.", "reward.reward_manager.")]
    long += ["reward_model.overlong_buffer"]
    if keys.get(*(f"{each}.enable" for each in long)):
        keys.take("overlong_buffer", *(f"{each}.len" for each in long))
        factor = keys.get(*(f"{each}.penalty_factor" for each in long), default=1.0)
        if factor != 1:
            keys.lost.append(f"overlong_buffer.penalty_factor: {factor}: the reward falls by 1 at most here")
    for key in [key for key in keys.values if "overlong_buffer" in key or key.endswith("reward_kwargs.max_resp_len")]:
        keys.seen.add(key)
    manager = keys.get("reward.reward_manager.name", "reward_model.reward_manager", "reward.reward_manager", default="naive")
    if manager not in ("naive", "dapo", "batch", "prime", "gdpo"):
        keys.lost.append(f"reward_manager: {manager!r}: the reward function is called for each completion")
    filters = "algorithm.filter_groups"
    keys.seen |= {"reward.reward_manager.source", f"{filters}.metric", f"{filters}.max_num_gen_batches"}
    if keys.get("algorithm.filter_groups.enable"):
        keys.found["on_equal_rewards"] = "resample"
        most = keys.get("algorithm.filter_groups.max_num_gen_batches")
        keys.found["max_resamples"] = most or None
        keys.lost.append(
            "algorithm.filter_groups: a group of equal rewards is sampled anew here, and left out where that does not help; "
            "there other prompts take its place"
        )


def _length(keys: Keys, *, epochs: int, times: int) -> None:
    """Read epochs or steps; steps are rollouts there and optimizer steps here."""
    steps = keys.get("trainer.total_training_steps")
    if isinstance(steps, int):
        keys.found["max_steps"] = steps * times
        if times > 1:
            keys.comments["max_steps"] = f"{steps} rollouts of {times} steps"
        keys.seen.add("trainer.total_epochs")
    else:
        keys.take("num_epochs", "trainer.total_epochs", default=epochs)
    every = keys.get("trainer.test_freq")
    if isinstance(every, int) and every > 0:
        keys.take("eval_data_path", "data.val_files")
        keys.found["eval_every_steps"] = every * times if keys.found["eval_data_path"] else None


def _optimizer(keys: Keys, at: str, *, grad_clip: str, lr: float, times: int, old: bool = False) -> None:
    """Read the optimizer and its schedule, which moves once a rollout there."""
    keys.take("learning_rate", f"{at}.lr", default=lr)
    keys.take("weight_decay", f"{at}.weight_decay", default=0.01)
    betas = keys.get(f"{at}.betas", default=[0.9, 0.95 if old else 0.999])
    if isinstance(betas, list) and len(betas) == 2:
        keys.found |= {"beta1": betas[0], "beta2": betas[1]}
        if not keys.has(f"{at}.betas"):
            keys.comments |= {"beta1": "verl's default", "beta2": "verl's default"}
    keys.take("max_grad_norm", grad_clip, f"{at}.clip_grad")
    kind = keys.get(f"{at}.lr_scheduler_type", f"{at}.lr_scheduler", f"{at}.warmup_style", f"{at}.lr_decay_style")
    least, rate = keys.get(f"{at}.min_lr_ratio"), keys.found["learning_rate"]
    floor = keys.get(f"{at}.min_lr")
    if least is None and isinstance(floor, float) and isinstance(rate, float) and rate:
        least = floor / rate
    kind = kind or ("cosine" if old else "constant")
    if kind == "cosine" and least:
        keys.found |= {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": least}
    elif kind in ("constant", "cosine", "linear"):
        keys.found["lr_scheduler"] = kind
    else:
        keys.lost.append(f"{at}.lr_scheduler_type: {kind!r}: choose lr_scheduler")
    if not keys.has(f"{at}.lr_scheduler_type", f"{at}.lr_scheduler", f"{at}.warmup_style", f"{at}.lr_decay_style"):
        keys.comments["lr_scheduler"] = "verl's default"
    steps, share = keys.get(f"{at}.lr_warmup_steps"), keys.get(f"{at}.lr_warmup_steps_ratio", default=0.1 if old else 0.0)
    if isinstance(steps, int) and steps > 0:
        keys.found["warmup_steps"] = steps * times
        if times > 1:
            keys.comments["warmup_steps"] = f"{steps} rollouts of {times} steps"
    elif share:
        keys.found["warmup_ratio"] = share
        if old and not keys.has(f"{at}.lr_warmup_steps_ratio"):
            keys.comments["warmup_ratio"] = "verl's default"
    name = keys.get(f"{at}.optimizer", default="AdamW")
    if str(name).lower() not in ("adamw", "adam"):
        keys.lost.append(f"{at}.optimizer: {name!r}: choose optimizer")


def _supervised(keys: Keys, *, old: bool) -> None:
    """Read supervised fine-tuning."""
    keys.take("effective_batch_size", "data.train_batch_size", default=256)
    keys.take("max_seq_len", "data.max_length", default=1024)
    cut = keys.get("data.truncation", default="error")
    keys.found["on_overflow"] = "error" if cut == "error" else "truncate"
    if cut == "left":
        keys.lost.append("data.truncation: 'left': truncate keeps the beginning here")
    if keys.has("data.messages_key", "data.multiturn.messages_key") or not old or keys.get("data.multiturn.enable"):
        named = {str(keys.get("data.messages_key", "data.multiturn.messages_key", default="messages")): "messages"}
    else:
        named = {
            str(keys.get("data.prompt_key", default="question")): "prompt",
            str(keys.get("data.response_key", default="answer")): "completion",
        }
        inner = ("data.prompt_dict_keys", "data.response_dict_keys")
        named = {} if keys.has(*inner) else named
        for key in inner:
            keys.lose(key, "the text is within a mapping there: preprocess makes rows with prompt and completion of it")
    keys.seen |= {
        "data.multiturn.tools_key",
        "data.multiturn.enable_thinking_key",
        "data.prompt_key",
        "data.response_key",
        "data.multiturn.enable",
        "data.tools_key",
        "data.enable_thinking_key",
    }
    keys.found["rename_columns"] = {theirs: ours for theirs, ours in named.items() if theirs != ours} or None
    _length(keys, epochs=4, times=1)
    _optimizer(keys, "optim", grad_clip="optim.clip_grad", lr=1e-5 if old else 1e-3, times=1, old=old)
    keys.take("seed", "trainer.seed")
    keys.take("chat_template", "data.chat_template")


def _common(keys: Keys) -> None:
    """Read model, adapter, data and trackers."""
    keys.take("model_path", f"{_M}.path", "model.path", "model.partial_pretrain")
    keys.take("data_path", "data.train_files")
    most = keys.get("data.train_max_samples")
    keys.found["max_samples"] = most if isinstance(most, int) and most > 0 else None
    if isinstance(files := keys.found["data_path"], list):
        keys.found["data_path"] = entries([(str(file), {}) for file in files], "data.train_files", keys.lost)
    if keys.found["max_samples"]:
        keys.lost.append(
            f"data.train_max_samples: {most}: of all files together, at random with data.shuffle; here max_samples is the "
            "first rows of each: for random ones give each file random_rows, data_path={'a.parquet': {'random_rows': 500}}"
        )
    keys.take("ckpt_output_dir", "trainer.default_local_dir")
    shuffle = keys.get("data.shuffle")
    keys.found["shuffle"] = None if shuffle is None else bool(shuffle)
    keys.take("seed", "data.seed", "trainer.seed")
    column = keys.get("data.prompt_key", default="prompt")
    if column != "prompt" and "rename_columns" not in keys.found:
        keys.found["rename_columns"] = {column: "prompt"}
    arguments = keys.get("data.apply_chat_template_kwargs", default={})
    arguments = dict(arguments) if isinstance(arguments, dict) else {}
    for key in keys.values:
        if key.startswith("data.apply_chat_template_kwargs."):
            arguments[key.rpartition(".")[2]] = keys.get(key)
    keys.found["chat_template_kwargs"] = arguments or None
    for name, usual in (("image", "images"), ("video", "videos"), ("audio", "audios")):
        if keys.get(f"data.{name}_key", default=usual) != usual:
            keys.lose(f"data.{name}_key", f"name the column in rename_columns, with {usual}")
    keys.lose("data.custom_cls.path", "rows are changed by preprocess")
    keys.seen.add("data.custom_cls.name")
    keys.lose(f"{_M}.custom_chat_template", "write it into a file and give chat_template")
    keys.take("freeze_vision_tower", f"{_A}.freeze_vision_tower", f"{_M}.freeze_vision_tower")
    config = str(keys.get("config_name", default="")).strip("'\"").removesuffix(".yaml")
    if config and not re.fullmatch(r"(ppo|sft)_?\w*trainer\w*|dapo_\w*trainer", config):
        keys.lose("config_name", "settings of this file are not read: write those that matter into the script")
    _adapter(keys)
    loggers = keys.get("trainer.logger", default=[])
    named = [name for name in (loggers if isinstance(loggers, list) else [loggers]) if name in _TRACKERS]
    keys.found["trackers"] = named or None
    if "wandb" in named:
        keys.take("wandb_project", "trainer.project_name")
        keys.take("wandb_run_name", "trainer.experiment_name")
    for part in (_M, "model"):
        for key in [key for key in keys.values if key.startswith(f"{part}.override_config.")]:
            keys.lose(key, "write it into the config.json of a copy of the model")
    keys.drop_open()
    for name in [name for name in keys.values if re.search(r"\.(mtp|qat|router_replay)\b", name)]:
        keys.lose(name, "not available")


def _adapter(keys: Keys) -> None:
    """Read LoRA, which is off with a rank of 0."""
    for at in (_M, "model"):
        rank = keys.get(f"{at}.lora_rank", f"{at}.lora.rank", default=0)
        alpha = keys.get(f"{at}.lora_alpha", f"{at}.lora.alpha", default=16)
        layers, dropout = keys.get(f"{at}.target_modules", f"{at}.lora.target_modules"), keys.get(f"{at}.lora.dropout")
        path = keys.get(f"{at}.lora_adapter_path")
        keys.seen |= {key for key in keys.values if key.startswith(f"{at}.lora.")}
        keys.lose(f"{at}.exclude_modules", "name the layers that have an adapter in target_modules")
        if path is not None:
            keys.found |= {"adapter": "lora", "adapter_path": path}
        elif isinstance(rank, int) and rank > 0:
            keys.found |= {"adapter": "lora", "lora_r": rank, "lora_alpha": alpha, "lora_dropout": dropout}
            keys.comments |= {} if keys.has(f"{at}.lora_alpha", f"{at}.lora.alpha") else {"lora_alpha": "verl's default"}
            if isinstance(layers, list) and not any("linear_" in str(layer) for layer in layers):
                keys.found["target_modules"] = layers
            elif isinstance(layers, str) and layers != "all-linear":
                keys.found["target_modules"] = [layers]
