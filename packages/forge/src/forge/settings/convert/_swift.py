"""Flags, YAML or args.json of ms-swift → a draft with names that other libraries have."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from forge._errors import RecipeError
from forge.settings._elsewhere import RENAMED, SWITCHES, TOLD
from forge.settings.convert._commands import SWIFT
from forge.settings.convert._draft import ONLINE, Draft, plain
from forge.settings.convert._swift_arguments import DEFAULTS, INSIDE
from forge.settings.convert._swift_data import datasets

MARKS = """model_id_or_path tuner_type train_type sft_type rlhf_type torch_dtype attn_impl split_dataset_ratio val_dataset
    swift_version freeze_vit target_modules""".split()
"""Keys beside `model` that tell ms-swift's files from others'."""
_RLHF = {
    **{name: name for name in ("dpo", "orpo", "simpo", "kto", "ppo", "grpo")},
    "rm": "reward",
    "gkd": "distill",
}
_COMMANDS = {"sft": "sft", "pt": "pretrain"}
_TASKS = {"seq_cls": "classify", "embedding": "embed", "causal_lm": ""}
_TUNERS = {"full": "none", **{name: name for name in ("lora", "qlora", "ia3", "prefix", "prompt", "vera", "fourierft")}}
_OF_FOURIER = {"fourier_n_frequency": 2000, "fourier_scaling": 300.0}
"""Defaults of ms-swift's fourierft that are others here."""
_RENAMED = {
    "model": "model_name_or_path",
    "adapters": "adapter_name_or_path",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "max_epochs": "num_train_epochs",
    "early_stop_interval": "early_stopping_steps",
    "torch_dtype": "torch_dtype",
    "rpo_alpha": "pref_ftx",
    "simpo_gamma": "simpo_gamma",
}
_TRUNCATION = {"delete": "drop", "right": "truncate", "split": "split"}
_LEARNED = {"default": "assistant", "last_round": "last", "all": "all"}
_LISTS = ("dataset", "val_dataset", "target_modules", "modules_to_save", "new_special_tokens", "reward_funcs", "loss_type")
_LISTS += ("loss_weights", "reward_weights", "report_to", "cached_dataset", "cached_val_dataset")
_JSON = ("deepspeed", "fsdp", "lr_scheduler_kwargs", "columns", "gradient_checkpointing_kwargs", "model_kwargs", "optim_args")
_RANKS = ("NPROC_PER_NODE", "NNODES")
_LAUNCH = {
    "NPROC_PER_NODE": "nproc_per_node",
    "NNODES": "nnodes",
    "NODE_RANK": "node_rank",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
    "WANDB_PROJECT": "wandb_project",
}
_OF_THE_PROCESSOR = re.compile(r"(VIDEO_|IMAGE_)?(MAX|MIN)_(PIXELS|TOKEN_NUM)|VIDEO_.*|FPS.*|.*FRAMES.*|MAX_NUM|INPUT_SIZE")
"""Variables of the environment that say how large images and videos are."""
_AS_ANYWAY = ("lora_bias", "packing_strategy")
"""Arguments whose default is what forge does."""
_OF_2 = ("model_id_or_path", "sft_type", "train_dataset_sample", "template_type")
"""Arguments that ms-swift 3 has under other names."""
_OF_MODELSCOPE = "LLM-Research AI-ModelScope iic ZhipuAI Shanghai_AI_Laboratory modelscope swift damo TeleAI".split()
"""Owners of models that Hugging Face's hub has under another name."""
_SAMPLES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_beams", "max_new_tokens", "stop_words")
"""Arguments of generation, which training alone does not read."""
_DRAWN = ("top_k", "top_p", "min_p", "repetition_penalty")
"""Those of them that narrow what is sampled from."""


def swift_draft(
    values: Mapping[str, Any],
    settings_of: Callable[[str], Mapping[str, attrs.Attribute[Any]]],
    verb: str | None,
) -> Draft:
    """Begin a recipe: the verb, the data, and all else under names that the other parts read.

    Raises:
        RecipeError: a method, a task or a way of training that forge has not.
    """
    left = _values(values)
    command = left.pop(SWIFT, None)
    if of_old := next((key for key in _OF_2 if key in left), None):
        raise RecipeError(
            f"{of_old}: is of ms-swift 2, whose arguments and defaults are others; files of ms-swift 3 and 4 are converted."
        )
    verb = verb or _verb(left, command)
    for key in ("rlhf_type", "task_type"):
        left.pop(key, None)
    draft = Draft(library="ms-swift", verb=verb, known=settings_of(verb), left=left)
    for take in (_environment, _tuner, datasets, _evaluation, _length, _learned, _labels, _objective, _sampling, _rest):
        take(draft)
    if stray := left.pop("stray_flags", None):
        draft.lost.append(
            f"{stray[0].split()[0][2:]}: {stray[0]}: stands behind a comment, so that the shell does not give it to swift"
        )
    for theirs, ours in _RENAMED.items():
        if theirs in left:
            left.setdefault(ours, left.pop(theirs))
    return draft


def _values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Read texts as what they write; leave out what an args.json holds by default or for itself."""
    found: dict[str, Any] = {}
    whole = "swift_version" in values
    for key, given in values.items():
        name = key.replace("-", "_")
        value = [plain(each) for each in given] if isinstance(given, list) else plain(given)
        if name in _JSON and isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise RecipeError(f"{name}: {given!r}: is no JSON: {error}.") from error
        if name in _LISTS and not isinstance(value, list) and value is not None:
            value = [value]
        if whole and (INSIDE.fullmatch(name) or value == DEFAULTS.get(name) or (name not in DEFAULTS and not value)):
            continue
        found[name] = value
    if whole and isinstance(values.get("global_world_size"), int):
        found["ENV"] = {"NPROC_PER_NODE": str(values["global_world_size"])}
    return found


def _verb(left: dict[str, Any], command: Any) -> str:
    """Return the verb of the command, its method and task."""
    task = left.get("task_type")
    method = left.get("rlhf_type") or ("dpo" if command == "rlhf" else None)
    if method is not None:
        if method == "cpo" and left.get("loss_type") in (["simpo"], "simpo"):
            method = "simpo"
        if method not in _RLHF:
            raise RecipeError(
                f"rlhf_type: {method!r}: forge has no such method. Methods: {', '.join(_RLHF)}; orpo and simpo need no "
                "reference either. With --verb the rest of the file is read for one of them."
            )
        if method == "gkd":
            _check_distillation(left)
        if (
            method == "grpo"
            and (left.get("teacher_model") or left.get("teacher_model_server"))
            and not left.get("reward_funcs")
        ):
            raise RecipeError(
                "teacher_model: with rlhf_type grpo and no reward_funcs a teacher judges completions that the model samples; "
                "forge has no such method: forge distill learns from a teacher at the model's own completions with on_policy=1 "
                "(--verb distill)."
            )
        return _RLHF[method]
    if task not in (None, *_TASKS):
        raise RecipeError(
            f"task_type: {task!r}: forge has no rerankers: forge embed trains embeddings of queries and documents (--verb "
            "embed), forge reward a score of answers."
        )
    if left.get("problem_type") == "regression":
        raise RecipeError(
            "problem_type: 'regression': forge classify has labels, no numbers: forge reward trains a score of pairs."
        )
    return _TASKS.get(str(task), "") or _COMMANDS.get(str(command), "sft")


def _check_distillation(left: dict[str, Any]) -> None:
    """Refuse distillation of which forge has no part."""
    if (teacher := left.get("teacher_model")) in (None, "", left.get("model")):
        given = f"{teacher!r} is the model that learns" if teacher else "is not given"
        raise RecipeError(
            f"teacher_model: {given}: a model that teaches itself, or a server that does, is no teacher of forge distill; "
            "a server is asked once by `forge teach --teacher-path URL`, whose output is teacher_logprobs, and forge sdft "
            "teaches a model by itself with demonstrations (--verb sdft)."
        )


def _environment(draft: Draft) -> None:
    """Read processes and nodes, and what is said of images."""
    env = draft.left.pop("ENV", None)
    known = isinstance(env, Mapping)
    ranks = 1
    for name, value in env.items() if isinstance(env, Mapping) else ():
        number = plain(str(value))
        if name in _LAUNCH and name not in ("MASTER_ADDR", "WANDB_PROJECT") and not isinstance(number, int):
            draft.lost.append(f"{name}: {value!r}: is set outside the file: give {_LAUNCH[name]}")
            known = known and name not in _RANKS
        elif name in _LAUNCH:
            draft.found[_LAUNCH[name]] = number if isinstance(number, int) else str(value)
            ranks *= number if name in _RANKS and isinstance(number, int) else 1
        elif _OF_THE_PROCESSOR.fullmatch(name):
            draft.lost.append(f"{name}: {value!r}: the model's own processor is taken, whose files say how large images are")
    found = draft.found
    if found.get("nnodes") in (None, 1):
        for name in ("nnodes", "node_rank", "master_addr", "master_port"):
            found.pop(name, None)
    if found.get("nproc_per_node") == 1:
        del found["nproc_per_node"]
    draft.ranks = ranks if known else None


def _tuner(draft: Draft) -> None:
    """Read what is trained; LoRA where the file does not say."""
    left = draft.left
    given = [left.pop(name, None) for name in ("tuner_type", "train_type")]
    kind = next((each for each in given if each is not None), None)
    if kind is None:
        draft.comments["adapter"] = "ms-swift's default"
    if kind is not None and kind not in _TUNERS:
        raise RecipeError(
            f"tuner_type: {kind!r}: forge has no such way of training; put tuner_type lora or full into the file, and set "
            "adapter in the recipe: oft, loha, lokr, miss and others (`forge sft --help` names them)."
        )
    left["adapter"] = _TUNERS[kind or "lora"]
    if left["adapter"] == "fourierft":
        for name, value in _OF_FOURIER.items():
            if name not in left:
                draft.found[name], draft.comments[name] = value, "ms-swift's default"
        draft.lost.append("tuner_type: fourierft: its coefficients begin at zero here, where they begin at random there")
    bits = left.pop("quant_bits", None)
    method = left.pop("quant_method", None)
    if bits:
        left["quantization_bit"] = bits
        if method not in (None, "bnb"):
            draft.lost.append(f"quant_method: {method}: a base in {bits} bits is quantised by bitsandbytes' rules here")
    _reference(draft)
    start = left.pop("init_weights", None)
    if str(start).lower() not in ("none", "true", "default"):
        draft.left["peft_init_lora_weights"] = start
    draft.drop("bnb_4bit_compute_dtype", when=(left.get("torch_dtype"), "bfloat16"))
    tokens = left.get("new_special_tokens")
    if isinstance(tokens, list) and any(str(each).endswith(".txt") for each in tokens):
        draft.lose("new_special_tokens", "a file: write its lines as the list add_special_tokens")
    if str(left.get("model")).partition("/")[0] in _OF_MODELSCOPE:
        draft.lost.append(
            f"model: {left['model']}: a name of ModelScope's hub: give a directory, or the name on Hugging Face's"
        )
    if left["adapter"] == "none" and left.get("torch_dtype") == "bfloat16":
        draft.lost.append(
            "torch_dtype: bfloat16: the weights are bfloat16 there too; here they are float32, and products bfloat16"
        )
    if left.get("adapter") != "none" and not draft.left.get("learning_rate"):
        draft.found["learning_rate"], draft.comments["learning_rate"] = 1e-4, "ms-swift's default, of adapters"


def _reference(draft: Draft) -> None:
    """Read the reference of preferences where an adapter goes on: by default the base there."""
    left = draft.left
    begun, compared = left.get("adapters"), left.pop("ref_adapters", None)
    if compared and compared != begun:
        draft.lost.append(f"ref_adapters: {compared!r}: merge it (forge export --merge), and give the model as reference_path")
    elif begun and not compared and draft.verb in ("dpo", "kto"):
        draft.found["reference"] = "adapter_off"
        draft.comments["reference"] = "ms-swift's without ref_adapters: the base, not the model that adapter_path makes of it"


def _evaluation(draft: Draft) -> None:
    """Read when held-out rows are measured: as often as the model is saved, by default."""
    left = draft.left
    left.pop("eval_dataset", None)
    share = left.get("split_dataset_ratio")
    if "eval_data_path" in draft.found and share:
        draft.lose("split_dataset_ratio", "without effect there beside val_dataset")
    if not share and "eval_data_path" not in draft.found:
        for key in ("eval_steps", "eval_strategy", "split_dataset_ratio", "metric_for_best_model", "load_best_model_at_end"):
            left.pop(key, None)  # nothing is measured there
        return
    how = left.get("eval_strategy") or left.get("save_strategy") or "steps"
    if how == "steps" and not left.get("eval_steps"):
        left["eval_steps"] = left.get("save_steps") or 500
        draft.comments["eval_every_steps"] = "ms-swift's default: as often as it saves"
    left["eval_strategy"] = how


def _length(draft: Draft) -> None:
    """Read the batch's rows: their greatest length, and what becomes of longer ones."""
    left = draft.left
    how = left.pop("truncation_strategy", None) or "delete"
    if how == "left" and draft.verb not in ONLINE:
        draft.lost.append("truncation_strategy: left: rows are cut at their end here (on_overflow=truncate), or left out")
    elif how == "split" and draft.verb != "pretrain":
        draft.lost.append("truncation_strategy: split: is of `swift pt`; forge sft has on_overflow=split")
    elif _TRUNCATION.get(how, "drop") != "drop" and draft.verb != "pretrain" and draft.verb not in ONLINE:
        left["excess_length_strategy"] = _TRUNCATION[how]
    if draft.verb == "pretrain" and left.get("max_length") and how == "delete":
        draft.lost.append("max_length: longer documents are left out there; here they go on in the next block")
    packed = left.pop("packing_length", None)
    if packed and packed != left.get("max_length"):
        draft.lost.append(f"packing_length: {packed}: how long packed rows are follows from max_tokens_per_gpu")


def _learned(draft: Draft) -> None:
    """Read which tokens are learned."""
    left, verb = draft.left, draft.verb
    scale = left.pop("loss_scale", None)
    base, *more = str(scale).split("+") if scale else [""]
    if base and base not in _LEARNED:
        base, more = "", [base, *more]
    for name in more:
        if name in ("ignore_empty_think", "ignore_think_prefix"):
            draft.lost.append(
                f"loss_scale: {name}: what a template writes before an answer when it is asked is not learned here"
            )
        else:
            draft.lost.append(f"loss_scale: {name}: weighs parts of an answer: here a message has a weight, and no part of one")
    if verb in ("sft", "osft") and base not in ("", "default"):
        draft.found["train_on"] = _LEARNED[base]
    elif verb == "distill":
        draft.found["train_on"] = _LEARNED[base or "last_round"]
        if not base:
            draft.comments["train_on"] = "ms-swift's default of rlhf_type gkd"
    elif base in ("default", "all") and verb not in ("pretrain", "sft", "osft"):
        draft.lost.append(f"loss_scale: {base}: what follows the prompt is learned, of both answers alike")
    if verb in ("sft", "osft", "pretrain") and left.get("loss_type"):
        if left["loss_type"] == ["loss_scale"]:
            del left["loss_type"]
        else:
            draft.lose("loss_type", "a function of ms-swift's own; loss is nll or dft")
    if left.get("use_chat_template") is False and verb not in ("pretrain",):
        draft.lost.append(
            "use_chat_template: false: rows of prompt and completion are learned without a template; or forge pretrain"
        )
    left.pop("use_chat_template", None)
    left.pop("use_hf", None)
    system = left.pop("system", None)
    if system and verb not in ("pretrain", "embed"):
        text = str(system)
        draft.found["system_prompt"] = f"file:{text}" if text.endswith(".txt") else text.replace("\\n", "\n")
    thinks = left.pop("enable_thinking", None)  # read there where answers are sampled
    if isinstance(thinks, bool) and verb in ONLINE:
        draft.found["chat_template_kwargs"] = {"enable_thinking": thinks}


def _objective(draft: Draft) -> None:
    """Read what the method has of its own."""
    left, verb = draft.left, draft.verb
    if verb == "distill":
        share, most = left.pop("lmbda", 0.5), left.pop("max_completion_length", 512)
        drawn = {name: left[name] for name in _DRAWN if share > 0 and name in left}
        for name in (*_SAMPLES[1:], "vllm_mode", "use_vllm"):
            left.pop(name, None)
        left |= drawn
        draft.drop("top_k", when=(-1,))
        if share > 0:
            left |= {"on_policy": share, "max_new_tokens": most}
        if left.get("sft_alpha"):
            draft.lose("sft_alpha", "a likelihood beside the distillation is not available")
        if left.get("seq_kd"):
            draft.lose("seq_kd", "let the teacher write the rows: `forge generate`")
    if verb == "simpo" and isinstance(left.get("loss_type"), list):
        draft.drop("loss_type", when=(["simpo"],))
    if isinstance(left.get("loss_type"), list) and len(left["loss_type"]) == 1:
        (left["loss_type"],) = left["loss_type"]
    if verb in ONLINE:
        lengths = [left.pop(name, None) for name in ("response_length", "max_new_tokens", "max_completion_length")]
        left["max_new_tokens"] = next((each for each in lengths if each), 512)
        if not any(lengths):
            draft.comments["max_new_tokens"] = "ms-swift's default"
        draft.drop("top_k", when=(-1,))
    if verb in ("grpo", "rloo"):
        _rewards(draft)
    if isinstance(left.get("reward_model"), list):
        models = left.pop("reward_model")
        if len(models) == 1:
            left["reward_model"] = models[0]
        else:
            draft.lost.append(f"reward_model: {models!r}: one reward_model_path, beside functions")


def _labels(draft: Draft) -> None:
    """Read what embeddings and classifiers are trained on."""
    left, verb = draft.left, draft.verb
    if verb == "embed":
        if left.get("loss_type") == ["infonce"]:
            left["loss_type"] = "contrastive"
        draft.lost.append(
            "dataset: rows of messages, positive_messages and negative_messages: make query and document with preprocess"
        )
    if verb == "classify":
        left.pop("num_labels", None)
        if left.get("problem_type") == "multi_label_classification":
            columns: Any = draft.found.get("rename_columns") or {}
            draft.found["rename_columns"] = {"label": "labels", **columns}


def _rewards(draft: Draft) -> None:
    """List reward functions, which are classes of ms-swift's by name there."""
    left = draft.left
    if "loss_type" not in left:
        left["loss_type"], draft.comments["loss_type"] = "grpo", "ms-swift's default"
    names = [str(name) for name in left.pop("reward_funcs", None) or []]
    carried = list[str]()
    for name in names:
        if name == "accuracy":
            carried.append("accuracy_reward")
            draft.comments["reward"] = "compares with math_verify as ms-swift's accuracy does, which looks into <answer> first"
        elif name == "soft_overlong" and left.get("soft_cache_length"):
            draft.found["overlong_buffer"] = left.pop("soft_cache_length")
        else:
            draft.lost.append(f"reward_funcs: {name}: a class there; a reward here is a function, module:name: write it as one")
    if carried:
        left["reward_funcs"] = carried
    if len(carried) != len(names) and left.get("reward_weights"):
        draft.lose("reward_weights", "one for each function, of which some are to be written")
    if left.get("lora_dropout"):
        draft.lose("lora_dropout", "here the model that samples is the one that trains, without dropout")
    if draft.verb == "grpo":
        _advantages(draft)
    if left.get("scale_rewards") == "gdpo":
        del left["scale_rewards"]
        left["multi_objective_aggregation"] = "normalize_then_sum"
    if left.get("multi_turn_scheduler") or left.get("use_gym_env") or left.get("gym_env"):
        for key in ("multi_turn_scheduler", "use_gym_env", "gym_env", "max_turns"):
            if left.get(key):
                draft.lose(key, "a class of ms-swift's: write an environment, env=module:name, which has max_turns")


def _advantages(draft: Draft) -> None:
    """Read what rewards are compared with, and whether the KL is part of them."""
    left, found = draft.left, draft.found
    estimator, in_reward = left.pop("advantage_estimator", "grpo"), left.pop("kl_in_reward", None)
    if estimator == "rloo":
        found["baseline"] = "leave_one_out"
    elif estimator != "grpo":
        draft.lost.append(
            f"advantage_estimator: {estimator}: divides by the deviation of the batch's advantages, one for each completion; "
            "whiten=true divides by that of their tokens, scale_rewards=batch by that of the rewards"
        )
    if (estimator != "grpo" if in_reward is None else in_reward is True) and left.get("beta") != 0:
        found["kl_in_reward"] = True
        if in_reward is None:
            draft.comments["kl_in_reward"] = f"ms-swift's default with {estimator}"


def _sampling(draft: Draft) -> None:
    """Leave out how answers are sampled where nothing samples while it trains."""
    left = draft.left
    if draft.verb in ONLINE or draft.verb in ("distill", "sdft"):
        return
    if left.pop("predict_with_generate", None) is True:
        draft.lost.append(
            "predict_with_generate: True: answers to the prompts of eval_prompts are written while a model trains"
        )
        if left.get("max_new_tokens"):
            draft.found["eval_max_new_tokens"] = left["max_new_tokens"]
    for name in (*_SAMPLES, "max_completion_length"):
        left.pop(name, None)


def _rest(draft: Draft) -> None:
    """Read optimizers, order, sharding and what a run says of itself."""
    left = draft.left
    chosen = left.pop("optimizer", None)
    if chosen in ("muon", "adamw"):
        left["optim"] = chosen
    elif chosen not in (None, "lorap", "galore", "multimodal"):  # of which a switch beside says the same
        draft.lost.append(f"optimizer: {chosen}: choose optimizer: adamw, adamw_8bit, muon, apollo and others")
    order = [left.pop(name, None) for name in ("train_dataloader_shuffle", "dataset_shuffle")]
    if order == [False, False]:
        draft.found["shuffle"] = False
    draft.drop("lora_dtype", when=("float32",))
    for key in [key for key, value in left.items() if key in DEFAULTS and value == DEFAULTS[key]]:
        if (key not in TOLD or key in _AS_ANYWAY) and key not in SWITCHES and RENAMED.get(key, key) not in draft.known:
            del left[key]  # asks for what is done there anyway, and is nothing here
    divided, ranks = left.get("deepspeed"), left.get("sequence_parallel_size")
    if isinstance(ranks, int) and ranks > 1 and isinstance(divided, str) and re.match(r"zero[123]", divided):
        del left["deepspeed"]
        draft.found |= {"strategy": "fsdp2"} | ({"cpu_offload": True} if "offload" in divided else {})
        draft.comments["strategy"] = f"divides what {divided} does, and takes cp_size, which ZeRO does not"
    if left.get("fsdp") == "fsdp2":
        del left["fsdp"]
        draft.found["strategy"] = "fsdp2"
    elif isinstance(left.get("fsdp"), Mapping):
        held = left.pop("fsdp")
        left["fsdp"], left["fsdp_config"] = held.get("fsdp"), held.get("fsdp_config")
    name = left.pop("model_name", None)
    if name:
        left.setdefault("model_author", None)
    if left.pop("model_author", None) and not any("self-cognition" in line for line in draft.lost):
        draft.lost.append("model_author: fills {{AUTHOR}} in the rows of swift/self-cognition: do it with preprocess")
    if left.pop("rollout_importance_sampling_mode", None) not in (None, "token_truncate"):
        draft.lost.append("rollout_importance_sampling_mode: ratios of tokens are cut off at tis_cap")
    if isinstance(left.get("vllm_server_base_url"), list):
        left["vllm_server_base_url"] = left["vllm_server_base_url"][0]
    for key in [key for key, value in left.items() if isinstance(value, str) and re.fullmatch(r".*\$[\w({].*", value)]:
        draft.lose(key, "a variable that the script does not set")


def accumulated(each: int, verb: str) -> int:
    """Return over how many batches ms-swift adds up gradients by default: up to 16 rows."""
    return 1 if verb in ("grpo", "rloo") else max(1, math.ceil(16 / each))
