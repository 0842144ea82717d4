"""Flags of OpenRLHF → a recipe of forge sft, dpo, kto, reward, ppo or grpo.

Defaults are those of OpenRLHF as of 2026-08-13, whose flags have dots (`--actor.adam.lr`); of before, with underscores
(`--actor_learning_rate`), each is read as the one that took its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from forge._errors import RecipeError
from forge.settings.convert._commands import OPENRLHF
from forge.settings.convert._data_sets import entries
from forge.settings.convert._draft import Fields, Keys

_VERBS = {"sft": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward"}
_BEFORE = {
    "pretrain": "model.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "ref_pretrain": "ref.model_name_or_path",
    "save_path": "ckpt.output_dir",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "generate_max_len": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes",
    "max_len": "data.max_len",
    "max_samples": "data.max_samples",
    "dataset": "data.dataset",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "dataset_probs": "data.dataset_probs",
    "dataset_split": "data.dataset_split",
    "prompt_split": "data.prompt_split",
    "eval_dataset": "eval.dataset",
    "eval_steps": "eval.steps",
    **{name: f"data.{name}" for name in "input_key output_key label_key prompt_key chosen_key rejected_key".split()},
    **{name: f"data.{name}" for name in "input_template apply_chat_template tokenizer_chat_template multiturn".split()},
    "learning_rate": "adam.lr",
    "actor_learning_rate": "adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "l2": "adam.weight_decay",
    "adam_betas": "adam.betas",
    "beta": "model.beta",
    "ipo": "model.ipo_enable",
    "label_smoothing": "model.label_smoothing",
    "nll_loss_coef": "model.nll_loss_coef",
    "aux_loss_coef": "model.aux_loss_coef",
    "margin_loss": "model.margin_loss_enable",
    "loss": "model.loss_type",
    "pretrain_mode": "model.pretrain_mode_enable",
    "gradient_checkpointing": "model.gradient_checkpointing_enable",
    "seed": "train.seed",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_target": "algo.kl.target",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "value_clip": "critic.value_clip",
    "policy_loss_type": "actor.policy_loss_type",
    "entropy_loss_coef": "actor.entropy_coef",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "remote_rm_url": "reward.remote_url",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "agent_func_path": "train.agent_func_path",
    "freezing_actor_steps": "critic.freezing_steps",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "target_modules": "ds.lora.target_modules",
    "load_in_4bit": "ds.load_in_4bit",
    "async_train": "train.async_enable",
    "use_wandb": "logger.wandb.key",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "use_tensorboard": "logger.tensorboard_dir",
}
"""Flag of before → the one that took its place."""
_ACTOR = {
    **{f"actor.adam.{name}": f"adam.{name}" for name in ("lr", "betas", "eps", "weight_decay")},
    **{f"actor.{name}": name for name in ("optim", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")},
    **{f"actor.muon.{name}": f"muon.{name}" for name in ("lr", "momentum", "ns_steps", "nesterov")},
    "actor.model_name_or_path": "model.model_name_or_path",
    "actor.aux_loss_coef": "model.aux_loss_coef",
    "actor.gradient_checkpointing_enable": "model.gradient_checkpointing_enable",
}
"""Flag of PPO's policy → that of the other trainers."""
_RATES = {"sft": 5e-6, "dpo": 1e-5, "kto": 1e-5, "rm": 9e-6, "ppo_ray": 1e-6}
_ESTIMATORS: dict[str, dict[str, object]] = {
    "reinforce": {"baseline": "none", "whiten": True},
    "rloo": {"baseline": "leave_one_out"},
    "reinforce_baseline": {"whiten": True},
    "group_norm": {"scale_rewards": "group"},
    "dr_grpo": {"scale_rewards": "none"},
}
"""`advantage.estimator` beside gae → settings of forge grpo."""
BESIDE = re.compile(
    r"(vllm|ckpt|logger|ray|perf|local_rank|use_ms)\b.*|ds\.(?!lora|load_in_4bit).*|.*\.(num_nodes|num_gpus_per_node|offload)"
    r"|train\.(colocate_\w+|dynamic_batch_enable|max_tokens_per_gpu|micro_batch_size|full_determinism_enable|async_queue_size)"
    r"|rollout\.(micro_batch_size|max_tokens_per_gpu|vllm_generate_batch_size)|eval\.(temperature|n_samples_per_prompt|split)"
    r"|\w+\.gradient_checkpointing_\w+|critic\.(save_value_network|model_name_or_path|optim|adam\..*|muon\..*|lr_.*|min_.*|max_.*)"
    r"|data\.(dataloader_num_workers|disable_fast_tokenizer|max_images_per_prompt)|muon\.(ns_steps|nesterov|no_nesterov)"
    r"|algo\.advantage\.is_correction_\w+|(enable_)?vllm_\w+|(ref|reward|critic|actor|colocate)_\w+|zero_stage|bf16|data_type|flash_attn"
    r"|attn_implementation|packing_samples|adam_offload|save_\w+|load_checkpoint|ckpt_\w+|max_ckpt_\w+|logging_steps|grad_accum_dtype"
    r"|enforce_eager|enable_prefix_caching|deepspeed_\w+|ref_reward_offload|use_liger_kernel|overlap_comm|zpg|ring_\w+|wandb_\w+"
    r"|micro_rollout_batch_size|use_dynamic_batch|\w+_max_tokens_per_gpu|disable_\w+|deepcompile|gradient_checkpointing_use_reentrant"
    r"|full_determinism|ds_tensor_parallel_size|value_head_prefix|eval_\w+|use_ds_universal_ckpt|ref_num_\w+|rope_\w+"
)
"""Flags that say how a run is divided, saved, logged or made fast, whatever is trained."""


def openrlhf(
    values: Mapping[str, Any], settings_of: Callable[[str], Fields], verb: str | None
) -> tuple[str, dict[str, object], list[str], dict[str, str]]:
    """Return the verb, its settings, `key: reason` of what is lost, and comments.

    Raises:
        RecipeError: it trains by a method that forge has not.
    """
    what = str(values[OPENRLHF])
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name != OPENRLHF:
            now = _BEFORE.get(name, name)
            given[_ACTOR.get(now, now) if what == "ppo_ray" else now] = value
    keys = Keys(library="OpenRLHF", values=given)
    if what == "ppo_ray":
        estimator = str(keys.get("algo.advantage.estimator", default="gae"))
        if given.get("train.agent_func_path"):
            raise RecipeError(
                f"train.agent_func_path: {given['train.agent_func_path']}: an agent answers the model's turns: write it as an "
                "environment (env=file.py:Class); without this flag the rest is converted."
            )
        if estimator not in ("gae", *_ESTIMATORS):
            raise RecipeError(f"algo.advantage.estimator: {estimator}: forge has {', '.join(['gae', *_ESTIMATORS])}.")
        verb = verb or ("ppo" if estimator == "gae" else "grpo")
        _online(keys, verb, estimator)
    else:
        pretrains = what == "sft" and keys.get("model.pretrain_mode_enable")
        verb = verb or ("pretrain" if pretrains else _VERBS[what])
        _offline(keys, what, verb)
    _common(keys, what)
    return keys.result(verb, settings_of(verb), BESIDE)


def _common(keys: Keys, what: str) -> None:
    """Read model, optimizer, schedule, adapter and trackers."""
    keys.take("model_path", "model.model_name_or_path")
    keys.take("ckpt_output_dir", "ckpt.output_dir")
    keys.take("learning_rate", "adam.lr", default=_RATES[what])
    keys.take("weight_decay", "adam.weight_decay")
    keys.take("eps", "adam.eps")
    betas = keys.get("adam.betas")
    keys.found |= {"beta1": float(betas[0]), "beta2": float(betas[1])} if isinstance(betas, list) and len(betas) == 2 else {}
    keys.take("max_grad_norm", "max_norm")
    kind = keys.get("lr_scheduler", default="cosine_with_min_lr")
    keys.found["lr_scheduler"] = {"constant_with_warmup": "constant"}.get(kind, kind)
    keys.comments |= {} if keys.has("lr_scheduler") else {"lr_scheduler": "OpenRLHF's default"}
    if kind == "cosine_with_min_lr":
        keys.take("min_lr_ratio", "min_lr_ratio", default=0.1)
    if kind != "constant":
        keys.take("warmup_ratio", "lr_warmup_ratio", default=0.03)
    if keys.get("optim", default="adam") == "muon":
        keys.found["optimizer"] = "muon"
        keys.lose("muon.lr", "muon has the learning rate of the other weights here, scaled by the shape of a matrix")
    keys.take("momentum", "muon.momentum") if keys.found.get("optimizer") == "muon" else keys.seen.add("muon.momentum")
    keys.take("seed", "train.seed")
    aux = keys.get("model.aux_loss_coef", default=0)
    keys.found["router_aux_loss_coef"] = aux or None
    rank, alpha = keys.get("ds.lora.rank", default=0), keys.get("ds.lora.alpha", default=16)
    layers = keys.get("ds.lora.target_modules", default="all-linear")
    keys.seen.add("ds.lora.dropout")
    if rank:
        keys.found |= {"adapter": "qlora" if keys.get("ds.load_in_4bit") else "lora", "lora_r": rank, "lora_alpha": alpha}
        keys.comments |= {} if keys.has("ds.lora.alpha") else {"lora_alpha": "OpenRLHF's default"}
        keys.found["lora_dropout"] = keys.get("ds.lora.dropout")
        if layers != "all-linear":
            keys.found["target_modules"] = layers if isinstance(layers, list) else [layers]
    trackers = {"wandb": keys.get("logger.wandb.key"), "tensorboard": keys.get("logger.tensorboard_dir")}
    keys.found["trackers"] = [name for name, value in trackers.items() if value] or None
    if trackers["wandb"]:
        keys.take("wandb_project", "logger.wandb.project")
        keys.take("wandb_run_name", "logger.wandb.run_name")
    keys.take("chat_template", "data.tokenizer_chat_template")
    for split in ("data.dataset_split", "data.prompt_split"):
        if keys.get(split, default="train") != "train":
            keys.lose(split, "name the split behind the data set: NAME:SPLIT")
    every = keys.get("eval.steps", default=-1)
    if keys.has("eval.dataset") and isinstance(every, int) and every > 0:
        keys.take("eval_data_path", "eval.dataset")
        keys.found["eval_every_steps"] = every
        keys.comments["eval_every_steps"] = "optimizer steps; rollouts there" if what == "ppo_ray" else ""
    keys.seen |= {"eval.dataset"}
    most = keys.get("data.max_samples")
    keys.found["max_samples"] = most
    for name in ("data.dataset_probs", "data.prompt_probs"):
        keys.lose(name, "weights are given beside the paths: data_path={'a.jsonl': 0.7, 'b.jsonl': 0.3}")
    keys.drop_open()


def _paths(keys: Keys, name: str) -> None:
    """Read data sets, several between commas, each `type@path` or plain."""
    given = keys.get(name)
    paths = [each.strip().rpartition("@")[2] for each in str(given).split(",")] if given else []
    keys.found["data_path"] = entries([(path, {}) for path in paths], name, keys.lost) if paths else None


def _named(keys: Keys, **usual: tuple[str, str]) -> None:
    """Read the names of columns: flag of `data.` → (its default, what the column is here)."""
    names = {str(keys.get(f"data.{flag}", default=theirs)): ours for flag, (theirs, ours) in usual.items()}
    keys.found["rename_columns"] = {theirs: ours for theirs, ours in names.items() if theirs not in (ours, "None")} or None


def _offline(keys: Keys, what: str, verb: str) -> None:
    """Read supervised fine-tuning, preferences, ratings and reward models."""
    keys.take("effective_batch_size", "train.batch_size", default=128)
    keys.take("num_epochs", "train.max_epochs", default=2 if what == "sft" else 1)
    longest = "block_size" if verb == "pretrain" else "max_seq_len"
    keys.take(longest, "data.max_len", default=2048 if what in ("sft", "kto") else 512)
    if verb != "pretrain":
        keys.found["on_overflow"] = "truncate" if what == "sft" else "drop"
    _paths(keys, "data.dataset")
    template = keys.get("data.input_template", default="User: {}\nAssistant: " if what in ("sft", "kto") else None)
    chat = keys.get("data.apply_chat_template")
    keys.seen.add("data.multiturn")
    if what == "sft":
        if chat or verb == "pretrain":
            _named(
                keys,
                input_key=("input", "text" if verb == "pretrain" else "prompt" if keys.has("data.output_key") else "messages"),
            )
            if keys.has("data.output_key") and verb != "pretrain":
                own = dict(keys.found["rename_columns"] or {}) if isinstance(keys.found["rename_columns"], dict) else {}
                output = str(keys.get("data.output_key"))
                keys.found["rename_columns"] = own | ({output: "completion"} if output != "completion" else {}) or None
        else:
            _named(keys, input_key=("input", "prompt"), output_key=("None", "completion"))
    elif what == "kto":
        _named(keys, input_key=("input", "prompt"), output_key=("None", "completion"), label_key=("label", "label"))
        keys.take("beta", "model.beta", default=0.01)
        keys.take("desirable_weight", "desirable_loss_weight")
        keys.take("undesirable_weight", "undesirable_loss_weight")
    else:
        _named(keys, prompt_key=("None", "prompt"), chosen_key=("chosen", "chosen"), rejected_key=("rejected", "rejected"))
    if template and not chat and verb != "pretrain":
        keys.seen.add("data.input_template")
        keys.lost.append(
            f"data.input_template: {template!r}: is written around a prompt there; here rows are learned in the model's chat "
            "template: write a row's prompt with preprocess for the same texts"
        )
    if what == "dpo":
        keys.take("beta", "model.beta", default=0.1)
        keys.take("reference_path", "ref.model_name_or_path")
        smoothing, likelihood = keys.get("model.label_smoothing", default=0.0), keys.get("model.nll_loss_coef", default=0)
        kind = "ipo" if keys.get("model.ipo_enable") else "sigmoid"
        keys.found["label_smoothing"] = smoothing or None
        keys.found["loss_type"] = [kind, "sft"] if likelihood else [kind]
        keys.found["loss_weights"] = [1.0, likelihood] if likelihood else None
        if kind == "sigmoid" and smoothing:
            keys.found["loss_type"] = ["cdpo", *(["sft"] if likelihood else [])]
        if keys.found["loss_type"] == ["sigmoid"]:
            keys.found["loss_type"] = None
    if what == "rm":
        keys.lose("model.margin_loss_enable", "rows have no margin here")
        keys.seen.add("model.compute_fp32_loss_enable")
        if keys.get("model.loss_type", default="sigmoid") != "sigmoid":
            keys.lose("model.loss_type", "the loss is that of the sigmoid")
    keys.seen.add("model.pretrain_mode_enable")


def _online(keys: Keys, verb: str, estimator: str) -> None:
    """Read rollouts, rewards, advantages and the loss."""
    prompts, each = keys.get("rollout.batch_size", default=1024), keys.get("rollout.n_samples_per_prompt", default=1)
    passes, step = keys.get("train.max_epochs", default=1), keys.get("train.batch_size", default=128)
    keys.take("effective_batch_size", "rollout.batch_size", default=1024)
    keys.take("num_generations", "rollout.n_samples_per_prompt", default=1)
    keys.take("num_iterations", "train.max_epochs", default=1)
    keys.take("num_epochs", "train.num_episodes", default=1)
    if all(isinstance(value, int) and value > 0 for value in (prompts, each, passes, step)):
        if prompts * each % step or (prompts * each // step > 1 and prompts % (prompts * each // step)):
            keys.lost.append(f"train.batch_size: {step}: {prompts} times {each} completions make no whole number of such steps")
        elif prompts * each > step:
            keys.found["updates_per_pass"] = prompts * each // step
            keys.comments["updates_per_pass"] = f"{prompts} times {each} completions in steps of {step}"
    longest, new = keys.get("data.max_len", default=2048), keys.get("rollout.max_new_tokens")
    prompt = keys.get("prompt_max_len")
    keys.found["max_new_tokens"] = new or longest // 2
    keys.found["max_prompt_len"] = prompt or (longest - keys.found["max_new_tokens"])
    if new is None:
        keys.comments["max_new_tokens"] = "half of max_len; there what a prompt leaves of it"
        keys.lost.append(f"data.max_len: {longest}: holds prompt and completion there; here each has a bound, half of it")
    keys.take("temperature", "rollout.temperature")
    keys.take("top_p", "rollout.top_p")
    _paths(keys, "data.prompt_dataset")
    _named(keys, input_key=("input", "prompt"), label_key=("None", "label"))
    template = keys.get("data.input_template")
    if template and not keys.get("data.apply_chat_template"):
        keys.lose("data.input_template", "write a row's prompt with preprocess")
    _rewards(keys)
    _kl(keys, verb, estimator)
    low = keys.get("actor.eps_clip", default=0.2)
    bounds = keys.get("actor.eps_clip_low_high", default=[low, low])
    bounds = [float(bound) for bound in bounds] if isinstance(bounds, list) and len(bounds) == 2 else [low, low]
    gspo = keys.get("actor.policy_loss_type", default="ppo") == "gspo"
    if gspo or bounds != [0.2, 0.2]:
        keys.found |= {"clip": bounds[0], "clip_high": bounds[1]}
    keys.take("dual_clip", "actor.dual_clip")
    entropy = keys.get("actor.entropy_coef", default=0)
    if verb == "ppo":
        keys.take("gamma", "algo.advantage.gamma", default=1.0)
        keys.take("lam", "algo.advantage.lambd", default=1.0)
        keys.take("value_clip", "critic.value_clip", default=0.5)
        rate = keys.get("critic.adam.lr", default=9e-6)
        keys.lost.append(
            f"critic.adam.lr: {rate}: the value head is on the policy's own model here, and learns with it: value_weight and "
            "learning_rate; there the critic is a model of its own"
        )
        if entropy:
            keys.lose("actor.entropy_coef", "forge ppo has no entropy in its loss; forge grpo has")
        if gspo:
            keys.lose("actor.policy_loss_type", "forge ppo clips the ratio of each token")
    else:
        keys.found |= {"loss_type": "gspo" if gspo else "dapo", **_ESTIMATORS[estimator]}
        keys.found["entropy_coef"] = entropy or None
        if keys.get("algo.advantage.no_std_norm") and keys.found.get("whiten"):
            keys.found["whiten"] = None
            keys.found["scale_rewards"] = "none"
            keys.lost.append(
                "algo.advantage.no_std_norm: True: the mean over all tokens is subtracted there, and here nothing is"
            )
        if keys.get("algo.advantage.gamma", default=1) != 1:
            keys.lose("algo.advantage.gamma", "a reward counts for all tokens alike")
    keys.seen |= {
        "algo.advantage.lambd",
        "algo.advantage.no_std_norm",
        "critic.value_clip",
        "algo.advantage.gamma",
        "prompt_max_len",
    }
    keys.lose("critic.freezing_steps", "the policy learns from the first step on")
    keys.lose("train.async_enable", "each rollout is of the policy as it is")
    keys.lose("train.partial_rollout_enable", "each rollout is of the policy as it is")
    keys.lose("train.enable_ema", "the weights that train are exported")
    keys.seen |= {"train.ema_beta", "data.apply_chat_template"}
    if keys.get("actor.freeze_visual_encoder"):
        keys.found["freeze_vision_tower"] = True
    if keys.get("data.image_key", default="images") != "images":
        keys.lose("data.image_key", "name the column in rename_columns, with images")


def _rewards(keys: Keys) -> None:
    """Read the reward function or model, and what becomes of equal rewards and of long answers."""
    url, model = keys.get("reward.remote_url"), keys.get("reward.model_name_or_path")
    if isinstance(url, str) and url.endswith(".py"):
        keys.found["reward"] = f"{url}:reward_func"
    elif url:
        keys.lose("reward.remote_url", "write a function that asks the server, and give it as reward=rewards.py:NAME")
    elif isinstance(model, str) and "," in model:
        keys.lose("reward.model_name_or_path", "one model scores here: reward_model_path; others in a reward function")
    else:
        keys.found["reward_model_path"] = model
    keys.seen.add("reward.model_name_or_path")
    keys.lose("reward.normalize_enable", "scores are as the model gives them; whitened advantages have no unit")
    bounds = keys.get("reward.clip_range", default=[-10.0, 10.0])
    if isinstance(bounds, list) and len(bounds) == 2:
        keys.found["reward_clip_range"] = [float(bound) for bound in bounds]
        keys.comments |= {} if keys.has("reward.clip_range") else {"reward_clip_range": "OpenRLHF's default"}
    if keys.has("reward.overlong_buffer_len"):
        keys.found["overlong_buffer"] = int(keys.get("reward.overlong_buffer_len"))
        if keys.get("reward.overlong_penalty_factor", default=1) != 1:
            keys.lose("reward.overlong_penalty_factor", "the reward falls by 1 at most here")
    keys.lose(
        "reward.stop_properly_penalty_coef", "missing_eos_penalty subtracts from the reward of a completion that was cut off"
    )
    if keys.get("algo.dynamic_filtering_enable"):
        keys.found["on_equal_rewards"] = "resample"
        low, high = (float(bound) for bound in keys.get("algo.dynamic_filtering_range", default=[0, 1]))
        keys.found |= {"min_group_reward": low, "max_group_reward": high}
        keys.lost.append(
            "algo.dynamic_filtering_enable: True: a group of equal rewards, or with a mean outside of the range, is sampled "
            "anew here, and left out where that does not help; there other prompts take its place"
        )
    keys.seen.add("algo.dynamic_filtering_range")


def _kl(keys: Keys, verb: str, estimator: str) -> None:
    """Read the KL to the reference, in the reward or in the loss."""
    weight, kind = keys.get("algo.kl.init_coef", default=0.01), keys.get("algo.kl.estimator", default="k1")
    in_loss = keys.get("algo.kl.use_loss", default=False)
    keys.take("kl_weight", "algo.kl.init_coef", default=0.01)
    target, horizon = keys.get("algo.kl.target"), keys.get("algo.kl.horizon", default=10_000)
    if not weight:
        return
    if target and verb != "ppo" and in_loss:
        keys.lose("algo.kl.target", "kl_target steers the weight of a KL in the rewards, and this one is in the loss")
    elif target:
        keys.found |= {"kl_target": target, "kl_horizon": horizon}
    if verb == "ppo":
        if in_loss:
            keys.lose("algo.kl.use_loss", "the KL of ppo is in the reward here")
    elif in_loss:
        if kind != "k3":
            keys.lost.append(
                f"algo.kl.estimator: {kind!r}: k3 was taken; kl_estimator=unbiased has the gradient of the true KL, as k2 has"
            )
    else:
        keys.found["kl_in_reward"] = True
        if kind != "k1":
            keys.lost.append(f"algo.kl.estimator: {kind!r}: the KL in the reward is k1 here")
        if estimator != "reinforce":
            keys.lost.append(
                "algo.kl.init_coef: the KL is part of the reward that a group is compared by here; there it is subtracted from "
                "each token's advantage, behind the baseline"
            )
