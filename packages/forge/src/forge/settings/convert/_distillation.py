"""Trainers with a teacher, of TRL, Axolotl, verl and NeMo-RL → settings of forge distill."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from forge._errors import RecipeError
from forge.settings.convert._draft import Draft, Fields, Keys

_GKD: dict[str, object] = {"learning_rate": 2e-5, "on_policy": 0.5, "max_new_tokens": 128, "sample_temperature": 0.9}
"""Defaults of TRL's GKDConfig, which has `lmbda`."""
_GOLD: dict[str, object] = {"learning_rate": 1e-7, "on_policy": 0.5, "max_new_tokens": 128, "sample_temperature": 0.9}
_GOLD |= {"top_p": 0.95}
"""Those of its GOLDConfig, which has a loss for other tokenizers."""
_DISTILLATION: dict[str, object] = {"on_policy": 1.0, "beta": 1.0}
"""Those of its DistillationConfig, of which all answers are sampled."""
_SAMPLING = ("max_new_tokens", "sample_temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MINILLM = ("rkl_advantage", "single_step_decomposition", "length_normalization")
_OF_GOLD = ("use_uld_loss", "use_extended_uld", "teacher_tokenizer_name_or_path")
_OF_SFT = ("lmbda", "seq_kd", "max_new_tokens", "max_length")
"""Keys that GKDConfig has, and but for max_new_tokens GOLDConfig, and DistillationConfig has not."""
_SAMPLED = ("max_completion_length", "num_generations", "generation_batch_size", "top_p", "top_k", "use_vllm")
"""Keys of sampling that GOLDConfig has, and GKDConfig has not."""
_OF_DISTILLATION = ("min_p", "repetition_penalty", "generation_kwargs", "cache_implementation", "max_tool_calling_iterations")
"""Keys that of the three DistillationConfig alone has."""
_LIKELIHOOD = "a likelihood beside the distillation is not available"
_FACTOR = "a factor of the whole loss: the steps of AdamW do not depend on it, but max_grad_norm does"


def check_teacher(left: Mapping[str, Any], library: str) -> None:
    """Refuse a trainer with a teacher of which forge has no part."""
    own = next((key for key in _MINILLM if key in left), None)
    if library == "TRL" and own is not None:
        raise RecipeError(
            f"{own}: is of TRL's MiniLLM, whose policy gradient counts what a token leads to; forge has no such method. forge "
            "distill with on_policy=1 and beta=1 has the exact gradient of the reverse KL at each sampled token: with --verb "
            "distill the rest of the file is read."
        )


def distillation(draft: Draft) -> None:
    """Read which share of the answers is sampled, and the loss, of TRL's and Axolotl's trainers."""
    if draft.verb != "distill":
        return
    if draft.library == "Axolotl":
        _axolotl(draft)
    if draft.library != "TRL":
        return
    left, found = draft.left, draft.found
    own, of = _trainer(draft)
    for key in _MINILLM:
        if key in left:
            draft.lose(key, "of MiniLLM's policy gradient, which forge has not")
    if own is not _DISTILLATION:
        _last_answers(draft, of)
    if own is _GOLD:
        _gold(draft)
    sampled = left.get("lmbda", 1) != 0
    if own is not _DISTILLATION and "temperature" in left:
        left["sample_temperature"] = left.pop("temperature")  # the divergence is at 1 there
    if "max_completion_length" in left:
        left["max_new_tokens"] = left.pop("max_completion_length")
    for name in () if sampled else _SAMPLING:
        left.pop(name, None)
    given = {"on_policy" if name == "lmbda" else name for name in left}
    for name, value in own.items():
        if name not in given and name not in found and (sampled or name not in _SAMPLING):
            found[name] = value
            draft.comments[name] = f"default of TRL's {of}"
    draft.drop("num_generations", when=(1,))


def _trainer(draft: Draft) -> tuple[dict[str, object], str]:
    """Return defaults and name of the trainer that a file is for; list one that is open."""
    left = draft.left
    taken = "verb: read as a file of TRL's "
    if any(key in _OF_GOLD or key.startswith("uld_") for key in left):
        return _GOLD, "GOLDTrainer"
    if any(key in left for key in _OF_SFT):
        if any(key in left for key in _SAMPLED):
            return _GOLD, "GOLDTrainer"
        if "max_new_tokens" not in left:
            draft.lost.append(
                taken + "GKDTrainer; one of its GOLDTrainer is known by use_uld_loss (false by default): write it into the file"
            )
        return _GKD, "GKDTrainer"
    if not any(key in left for key in (*_OF_DISTILLATION, *_MINILLM)):
        draft.lost.append(
            taken + "DistillationTrainer, which samples every answer; one of its GKDTrainer is known by lmbda (0.5 by "
            "default), one of its GOLDTrainer by use_uld_loss (false by default): write it into the file"
        )
    return _DISTILLATION, "DistillationTrainer"


def _last_answers(draft: Draft, of: str) -> None:
    """Read what GKD and GOLD learn of a row: its last answer, of a long row the last tokens."""
    left, found = draft.left, draft.found
    found["train_on"] = "last"
    draft.comments["train_on"] = f"TRL's {of} learns the last message of a conversation alone"
    for name in ("on_overflow", "shuffle"):
        found.pop(name, None)  # rows are drawn at random there, whatever shuffle_dataset says
    left.pop("truncation_mode", None)  # read by neither
    given = left.get("max_length")
    if given is None and (of == "GKDTrainer" or "max_length" not in left):
        found["max_seq_len"], given = 1024, "1024 by default"
        draft.comments["max_seq_len"] = f"default of TRL's {of}"
    if given is not None:
        draft.lost.append(
            f"max_length: {given}: of a longer row the last tokens are kept there, so the answer and not all of its prompt; "
            "here such a row is left out and counted, for on_overflow=truncate would cut the answer: give a larger max_seq_len"
        )


def _gold(draft: Draft) -> None:
    """Read the loss of TRL's GOLDTrainer, which compares two tokenizers if it is told so."""
    left, found = draft.left, draft.found
    if left.get("teacher_tokenizer_name_or_path") not in (None, left.get("teacher_model_name_or_path")):
        draft.lose("teacher_tokenizer_name_or_path", "the teacher's tokenizer is read from teacher_path")
    for name in ("teacher_tokenizer_name_or_path", "generation_batch_size"):
        left.pop(name, None)
    uld = {name: left.pop(name) for name in list(left) if name in _OF_GOLD or name.startswith("uld_")}
    if uld.get("use_uld_loss") is not True:
        found["temperature"] = left.get("temperature", 0.9)  # of the divergence too, there
        draft.comments["temperature"] = "in GOLDTrainer's JSD the temperature of the sampling is that of the comparison"
        return
    hybrid = uld.get("uld_use_hybrid_loss") is True
    found["loss"] = "gold" if hybrid else "uld"
    if not hybrid:
        left.pop("beta", None)  # which nothing reads then, there and here
    found["temperature"] = uld.get("uld_student_temperature", 1.0)
    if uld.get("uld_teacher_temperature", 1.0) != found["temperature"]:
        draft.lost.append(
            f"uld_teacher_temperature: {uld.get('uld_teacher_temperature', 1.0)}: one temperature is both models'"
        )
    for name in ("matched", "unmatched"):
        if hybrid and uld.get(f"uld_hybrid_{name}_weight") is not None:
            found[f"{name}_weight"] = uld[f"uld_hybrid_{name}_weight"]
    told = {
        "use_extended_uld": (True, "tokens are paired by the text that they spell, not by their place"),
        "uld_token_merge_strategy": ("bayesian", "probabilities are read where a token is predicted, as its `bayesian` does"),
        "uld_crossentropy_weight": (0.0, _LIKELIHOOD),
        "uld_distillation_weight": (1.0, _FACTOR),
        "uld_skip_student_eos": (False, "the token that ends a turn is learned too"),
        "uld_skip_teacher_eos": (False, "the token that ends a turn is compared too"),
    }
    usual = {"use_extended_uld": True, "uld_token_merge_strategy": "observed", "uld_crossentropy_weight": 0.0}
    usual |= {"uld_distillation_weight": 1.0, "uld_skip_student_eos": True, "uld_skip_teacher_eos": True}
    for name, (same, why) in told.items():
        if (value := uld.get(name, usual[name])) != same:
            draft.lost.append(f"{name}: {value!r}{'' if name in uld else ' by default'}: {why}")


def _axolotl(draft: Draft) -> None:
    """Read Axolotl's trainer with stored log-probabilities, `kd_trainer`."""
    left, found = draft.left, draft.found
    own = {name: left.pop(name) for name in list(left) if name.startswith("kd_")}
    if isinstance(left.get("plugins"), list):
        left["plugins"] = [each for each in left["plugins"] if not str(each).endswith(".KDPlugin")]
    found |= {"teacher_logprobs": "taught", "teacher_rest": "left_out"}
    draft.comments["teacher_logprobs"] = "made of the same rows: forge teach --from-rows --output taught"
    found["beta"] = own.get("kd_beta") or 0.0
    if own.get("kd_beta") is None:
        draft.comments["beta"] = "Axolotl's default of kd_beta"
    elif found["beta"] == 1:
        found["teacher_rest"] = "class"  # a reverse KL is infinite where the teacher's rest is left out
    found["temperature"] = own.get("kd_temperature") or 1.0
    told = {
        "kd_ce_alpha": ((0, 0.0), _LIKELIHOOD),
        "kd_alpha": ((1, 1.0), _FACTOR),
        "kd_normalize_topk": (
            (False,),
            "the model's probabilities of the teacher's tokens are divided by their sum there; here they are those of the "
            "whole vocabulary",
        ),
        "kd_temperature_min": ((), "the temperature stays as it is"),
        "kd_online_server_base_url": ((), "a server is asked once, for all runs: forge teach --teacher-path URL"),
    }
    for name, (same, why) in told.items():
        if own.get(name) is not None and own[name] not in same:
            draft.lost.append(f"{name}: {own[name]!r}: {why}")


def verl_teacher(keys: Keys) -> bool:
    """Read verl's on-policy distillation; False where it is off.

    Raises:
        RecipeError: it has rewards beside the teacher, several teachers, or a loss without counterpart.
    """
    if not keys.get("distillation.enabled"):
        return False
    at = "distillation.distillation_loss"
    paths = [name for name in keys.values if name.startswith("distillation.teacher_models.") and name.endswith(".model_path")]
    mode, gradient = str(keys.get(f"{at}.loss_mode", default="k3")), keys.get(f"{at}.use_policy_gradient", default=False)
    beta = 1.0 if gradient and mode in _ESTIMATORS else _DIRECT.get(mode)
    refused = {
        f"{at}.use_task_rewards": "forge distill has no rewards beside the teacher: use_task_rewards=False is converted"
        if keys.get(f"{at}.use_task_rewards", default=True)
        else None,
        "distillation.teacher_models": f"has {len(paths)} teachers: forge distill has one" if len(paths) != 1 else None,
        f"{at}.loss_mode={mode}": (
            f"with use_policy_gradient=False {', '.join(_DIRECT)} are converted, with True {', '.join(_ESTIMATORS)}"
            if beta is None
            else None
        ),
    }
    told = [f"{name}: {why}" for name, why in refused.items() if why]
    if told:
        raise RecipeError(f"verl: {'; '.join(told)}.")
    keys.take("teacher_path", *paths)
    keys.found |= {"on_policy": 1.0, "beta": beta}
    keys.comments["beta"] = f"the divergence of which {mode} is an estimate at the sampled token; here it is computed whole"
    for name in ("topk", "loss_max_clamp", "log_prob_min_clamp"):
        keys.lose(f"{at}.{name}", "the divergence is over the whole vocabulary, and is not clamped")
    keys.lost.append(
        "data.prompt_key: rows are prompts alone there; rows of forge distill have answers: add a completion to each"
    )
    keys.seen |= {name for name in keys.values if name.startswith("distillation.")}
    return True


_ESTIMATORS = ("kl", "k1", "k2", "mse", "k3", "low_var_kl", "abs")
"""Estimates of the reverse KL, each a reward of the sampled token with `use_policy_gradient`."""
_DIRECT = {"forward_kl_topk": 0.0, "k2": 1.0, "mse": 1.0, "k3": 0.0, "low_var_kl": 0.0}
"""Losses that are backpropagated → the β of the KL that their gradient is, on the model's own samples:
that of k2 is the reverse KL's, that of k3 the forward one's."""


NEMO = ("policy.model_name", "teacher.model_name", "distillation.num_prompts_per_step")
"""Keys that tell a file of NeMo-RL's on-policy distillation."""
_NEMO_BESIDE = re.compile(
    r"(logger|cluster|checkpointing|env|teacher)\..*|data\.(validation\..*|num_workers|default\.env_name)"
    r"|policy\.(megatron_cfg|dtensor_cfg|dynamic_batching|sequence_packing|generation|optimizer)\..*"
    r"|policy\.(make_|logprob_|offload_|refit_|train_micro_|generation_batch|precision|tokenizer\.name).*"
    r"|distillation\.((max_)?val_.*|max_rollout_turns)"
)
"""Keys that say how a run of NeMo-RL is divided, saved, logged or validated."""


def nemo_rl(
    values: Mapping[str, Any], settings_of: Callable[[str], Fields], verb: str | None
) -> tuple[str, dict[str, object], list[str], dict[str, str]]:
    """Return verb, settings, what is lost, and comments, of a file of NeMo-RL's distillation."""
    keys = Keys(library="NeMo-RL", values=values)
    if verb not in (None, "distill"):
        raise RecipeError(f"--verb {verb}: of NeMo-RL's files those of run_distillation.py are converted, to forge distill.")
    keys.take("model_path", "policy.model_name")
    keys.take("teacher_path", "teacher.model_name")
    keys.found["on_policy"] = 1.0
    kind, weight = keys.get("loss_fn.kl_type", default="mixed"), keys.get("loss_fn.mixed_kl_weight", default=0.5)
    keys.found["beta"] = {"forward": 0.0, "reverse": 1.0}.get(str(kind), 0.5)
    if kind == "mixed":
        keys.lost.append(f"loss_fn.kl_type: mixed of {weight}: a sum of both KLs there; a Jensen-Shannon divergence was taken")
    keys.lose("distillation.topk_logits_k", "the divergence is over the whole vocabulary")
    keys.lose("loss_fn.zero_outside_topk", "the divergence is over the whole vocabulary")
    keys.take("effective_batch_size", "policy.train_global_batch_size")
    keys.take("max_seq_len", "policy.max_total_sequence_length")
    keys.take("max_new_tokens", "policy.generation.max_new_tokens")
    for name, open_ in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0)):
        keys.take("sample_temperature" if name == "temperature" else name, f"policy.generation.{name}", default=open_)
    steps, prompts = keys.get("distillation.max_num_steps"), keys.get("distillation.num_prompts_per_step")
    batch = keys.found["effective_batch_size"]
    times = prompts // batch if isinstance(prompts, int) and isinstance(batch, int) and batch and prompts % batch == 0 else 1
    if isinstance(steps, int):
        keys.found["max_steps"] = steps * times
        keys.comments |= {"max_steps": f"{steps} rollouts of {times} steps"} if times > 1 else {}
    keys.take("num_epochs", "distillation.max_num_epochs")
    if keys.found.get("max_steps"):
        keys.found["num_epochs"] = None
        keys.lost.append("distillation.max_num_epochs: max_steps ends the run, or num_epochs")
    if keys.get("distillation.num_generations_per_prompt", default=1) != 1:
        keys.lose("distillation.num_generations_per_prompt", "one completion of each prompt is sampled")
    keys.take("seed", "distillation.seed")
    at = "policy.optimizer.kwargs"
    keys.take("learning_rate", f"{at}.lr")
    keys.take("weight_decay", f"{at}.weight_decay")
    betas = keys.get(f"{at}.betas", default=[])
    keys.found |= dict(zip(("beta1", "beta2"), betas, strict=False)) if isinstance(betas, list) else {}
    keys.take("max_grad_norm", "policy.max_grad_norm")
    keys.take("shuffle", "data.shuffle")
    keys.lose("policy.scheduler", "choose lr_scheduler and warmup_steps")
    keys.lose("policy.tokenizer.chat_template_kwargs", "give chat_template_kwargs")
    keys.take("ckpt_output_dir", "checkpointing.checkpoint_dir")
    keys.take("data_path", "data.train.data_path")
    for name in ("prompt_file", "system_prompt_file"):
        keys.lose(f"data.default.{name}", "write it as system_prompt, or into the rows")
    keys.lose("data.train.dataset_name", "a data set by NeMo-RL's own name: give data_path, of rows with answers")
    keys.drop_open()
    return keys.result("distill", settings_of("distill"), _NEMO_BESIDE)
