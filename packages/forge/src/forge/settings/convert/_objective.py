"""Method of another library's file → the verb, and the settings of its objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge._errors import RecipeError
from forge.settings.convert._distillation import check_teacher
from forge.settings.convert._draft import Draft

METHODS = {
    **{name: name for name in ("sft", "dpo", "kto", "orpo", "simpo", "grpo", "ppo", "rloo", "reward")},
    "pt": "pretrain",
    "rm": "reward",
    "ipo": "dpo",
    "gdpo": "grpo",
}
METHOD_KEYS = ("rl", "stage", "pref_loss", "reward_model", "pretraining_dataset")
_SIGNS = {
    "distill": ("teacher_model_name_or_path",),
    "kto": ("desirable_weight", "undesirable_weight"),
    "rloo": ("normalize_advantages", "reward_clip_range"),
    "grpo": (
        "reward_funcs",
        "num_generations",
        "scale_rewards",
        "epsilon",
        "epsilon_high",
        "num_iterations",
        "multi_objective_aggregation",
        "entropy_coef",
        "top_entropy_quantile",
        "use_adaptive_entropy",
    ),
    "reward": ("center_rewards_coefficient",),
    "dpo": ("precompute_ref_log_probs", "ref_model", "f_divergence_type", "loss_weights", "ld_alpha", "use_weighting"),
}
"""Verb → keys that only files of its method have, in the order in which they are looked for."""
_FORMS = {
    "sft": ("nll", "dft", "chunked_nll"),
    "kto": ("kto", "apo_zero_unpaired"),
    "grpo": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "simpo": ("simpo",),
}
"""Verb → its values of `loss_type` in TRL; any other is one of DPO's."""
_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Names that `trl grpo` has for functions of trl.rewards."""
_READ_SMOOTHING = {"cdpo", "exo_pair", "robust", "aot", "aot_unpaired"}
"""Losses of DPO that read `label_smoothing`, here and, but for `cdpo`, in TRL."""

_NO_TRAINING = {
    "export_dir": "`forge export RUN --merge` writes the merged model",
    "infer_backend": "`forge chat RUN` and `forge serve RUN` answer prompts",
    "do_predict": "`forge generate RUN` answers prompts, `forge eval RUN` scores a model",
}
"""Key of LLaMA-Factory's files for its other commands → the command here."""
_LIKELIHOOD = (
    "normalize: the likelihood of the wanted answers is a mean over a micro-batch's tokens there, over the step's here",
    "normalize: the likelihood of the wanted answers is the mean of each one's own mean there, over all their tokens here",
)
"""What is said of a loss that has a likelihood beside the preference: of TRL and Axolotl, of LLaMA-Factory."""


def verb_of(left: Mapping[str, Any], library: str) -> str:
    """Return the verb that a configuration asks for; RecipeError where it is several or none."""
    check_teacher(left, library)
    if library == "Axolotl" and left.get("kd_trainer"):
        return "distill"
    if left.get("reward_model") is True:
        return "reward"
    if left.get("pretraining_dataset"):
        return "pretrain"
    asked = [(key, left[key]) for key in ("rl", "stage") if isinstance(left.get(key), str) and left[key] not in METHODS]
    asked += [("process_reward_model", True)] if left.get("process_reward_model") is True else []
    for key, value in asked:
        raise RecipeError(
            f"{key}: {value!r}: forge has no such method. Methods: {', '.join(dict.fromkeys(METHODS.values()))}; with --verb "
            "the rest of the file is read for one of them."
        )
    for key, instead in _NO_TRAINING.items():
        if library == "LLaMA-Factory" and left.get(key) and left.get("do_train") is not True and not left.get("dataset"):
            raise RecipeError(f"{key}: {left[key]!r}: this file trains nothing, so that there is no recipe of it: {instead}.")
    loss = left.get("pref_loss")
    for method in (loss if loss in ("orpo", "simpo") else None, left.get("rl"), left.get("stage")):
        if isinstance(method, str) and method in METHODS:
            return METHODS[method]
    for verb, keys in _SIGNS.items():
        if any(left.get(key) is not None for key in keys):
            return verb
    form = left.get("loss_type")
    if library == "TRL" and form:
        names = [str(each) for each in (form if isinstance(form, list) else [form])]
        return next((verb for verb, forms in _FORMS.items() if set(names) <= set(forms)), "dpo")
    if library == "TRL" and left.get("beta") is not None:
        raise RecipeError(
            "beta is a setting of TRL's DPO, KTO, GRPO and RLOO, and nothing in the file says which of them it is for: give "
            "--verb dpo, kto, grpo or rloo."
        )
    return "sft"


def methods(draft: Draft) -> None:
    """Take out the keys that chose the verb."""
    left = draft.left
    for key in ("router_aux_loss_coef", "moe_aux_loss_coef"):
        if left.get(key) == 0:
            del left[key]
            draft.found["moe_aux_loss"] = "off"
    for key in METHOD_KEYS:
        value = left.get(key)
        if isinstance(value, bool) or (isinstance(value, str) and value in METHODS):
            if draft.verb == "dpo" and (key == "pref_loss" or value == "ipo"):
                draft.found["loss_type"] = (str(value),)
            if value == "gdpo":
                left.setdefault("multi_objective_aggregation", "normalize_then_sum")
            del left[key]
    if draft.verb == "kto":
        draft.drop("loss_type", when=("kto", ["kto"]))
        for key in ("pref_loss", "dpo_loss_type"):  # DPO alone reads these
            left.pop(key, None)
    if draft.verb == "reward":
        draft.drop("num_labels", when=(1,))
    if isinstance(left.get("loss_type"), str) and draft.verb in ("sft", "osft"):
        left["loss_type"] = left["loss_type"].replace("chunked_nll", "nll")


def preferences(draft: Draft) -> None:
    """Read the form of DPO, its smoothing, and the likelihood beside it."""
    left, found = draft.left, draft.found
    if "orpo_alpha" in left and left.get("rl_beta") is None:
        left["rl_beta"] = left.pop("orpo_alpha")
    _moving_reference(left)
    if draft.verb != "dpo":
        if left.get("dpo_label_smoothing"):
            draft.lose("dpo_label_smoothing", "only DPO reads it")
        if draft.verb == "simpo" and left.get("pref_ftx"):
            left["cpo_alpha"] = left.pop("pref_ftx")
        if draft.verb == "simpo":
            draft.drop("loss_type", when=("simpo", ["simpo"]))
        alpha = left.get("cpo_alpha")
        # The default of TRL, and of Axolotl, is 1.
        if draft.verb == "orpo" or (draft.verb == "simpo" and (draft.library != "LLaMA-Factory" if alpha is None else alpha)):
            draft.lost.append(_LIKELIHOOD[draft.library == "LLaMA-Factory"])
        return
    given = (left[key] for key in ("loss_type", "pref_loss", "dpo_loss_type") if left.get(key))
    form = found.get("loss_type") or next(given, "sigmoid")
    forms = tuple(str(each) for each in (form if isinstance(form, (list, tuple)) else [form]))
    if draft.library == "LLaMA-Factory" and forms == ("sigmoid",) and left.get("dpo_label_smoothing"):
        forms = ("cdpo",)
        left.pop("pref_loss", None)
        found["loss_type"] = forms
    for key in ("dpo_label_smoothing", "label_smoothing", "label_smoothing_factor"):
        if left.get(key) and not _READ_SMOOTHING & set(forms):
            draft.lose(key, f"loss_type={', '.join(forms)} reads none, here and there")
    if left.get("f_divergence_type") != "alpha_divergence":
        left.pop("f_alpha_divergence_coef", None)
    if "discopop" not in forms:
        left.pop("discopop_tau", None)
    weight = left.get("pref_ftx")
    if isinstance(weight, (int, float)) and not isinstance(weight, bool) and weight > 0 and "loss_weights" not in left:
        for key in ("pref_ftx", "pref_loss", "loss_type"):
            left.pop(key, None)
        forms = (*forms, "sft")
        found |= {"loss_type": forms, "loss_weights": (*[1.0] * (len(forms) - 1), float(weight))}
    if "sft" in forms:
        draft.lost.append(_LIKELIHOOD[draft.library == "LLaMA-Factory"])


def _moving_reference(left: dict[str, Any]) -> None:
    """Take out what nothing reads where the reference stays."""
    if not left.get("sync_ref_model"):
        for key in ("ref_model_sync_steps", "ref_model_mixup_alpha"):
            left.pop(key, None)


def _read_otherwise(draft: Draft, form: object) -> None:
    """Take out what another loss type alone reads; list what has another meaning there."""
    left = draft.left
    bounds = {"sapo": ("epsilon", "epsilon_high", "delta"), "vespo": ("epsilon", "epsilon_high", "delta"), "cispo": ("delta",)}
    for key in bounds.get(str(form), ()):
        left.pop(key, None)
    own = [f"{name}_" for name in ("sapo_temperature", "vespo") if not name.startswith(str(form))]
    for key in [key for key in left if key.startswith(tuple(own))]:
        del left[key]
    if left.get("beta") and left.get("use_bias_correction_kl") and left.get("importance_sampling_level") == "sequence":
        why = "the KL is weighed by the completion's ratio there, by each token's here"
        draft.lost.append(f"use_bias_correction_kl: True: {why}")


def online(draft: Draft) -> None:
    """Read the policy loss and the reward functions, by the names that TRL gives them."""
    left = draft.left
    if not left.get("use_adaptive_entropy"):
        for key in ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max"):
            left.pop(key, None)  # which nothing reads then, there and here
    functions = left.get("reward_funcs")
    names = [functions] if isinstance(functions, str) else functions
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        paths = [f"trl.rewards.{name}" if name in _REWARDS else name for name in names]
        left["reward_funcs"] = [path if ":" in path else ":".join(path.rsplit(".", 1)) for path in paths]
    if left.get("multi_objective_aggregation") == "normalize_then_sum":
        left.pop("scale_rewards", None)  # which nothing reads then, there and here
    if left.get("use_vllm") and left.get("vllm_importance_sampling_correction") is False:
        draft.lose(
            "vllm_importance_sampling_correction",
            "here a server's completions are weighed where its log-probabilities are more than tis_above from the model's: as "
            "large as max_sampler_gap it weighs none",
        )
    form = left.get("loss_type")
    if draft.verb == "grpo":
        _read_otherwise(draft, form)
    if form == "bnpo":
        draft.lose("loss_type", "a mean over a micro-batch's tokens there; over the step's it is dapo, which is taken")
    if left.get("importance_sampling_level") == "sequence" and form in ("grpo", "luspo"):
        del left["importance_sampling_level"]
        left["loss_type"] = "gspo" if form == "grpo" else form
    elif form == "luspo" and "importance_sampling_level" not in left:
        draft.found["importance_sampling_level"] = "token"
        draft.comments["importance_sampling_level"] = "TRL's default"
    elif form == "vespo":
        draft.drop("importance_sampling_level", when=("token", "sequence"))  # the ratio is a completion's in any case
    elif form != "luspo":
        draft.drop("importance_sampling_level", when=("token",))
    if left.get("loss_type") in ("gspo", "luspo") and left.get("epsilon") is None:
        draft.found["clip"], draft.comments["clip"] = 0.2, "TRL's default"
    high = left.get("epsilon_high")
    if left.get("loss_type") == "cispo" and isinstance(high, (int, float)) and high > 1:
        left["epsilon_high"] = high - 1.0  # TRL gives the bound itself, forge how far above 1 it lies
    if not (left.get("beta") or left.get("kl_weight")):
        draft.drop("use_bias_correction_kl")  # nothing to estimate
        if draft.verb == "grpo" and left.get("sync_ref_model"):
            draft.lose("sync_ref_model", "without beta there is no reference, there and here")
            _moving_reference(left)
