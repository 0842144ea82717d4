"""Data sets of another library's file, and what is learned of their rows → ours."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import forge_data
from forge.settings.convert._data_sets import FILE, PROMPTED, ROLES, data_sets, entries, rename, roles_of, rows_of_slice
from forge.settings.convert._draft import ONLINE, Draft, plain

_NAMED = "a template of {library}'s by name; the tokenizer's own is taken, or give a file of the template{other}"
_SAME_TEXT = {"Axolotl": ("chatml", "llama3", "gemma"), "LLaMA-Factory": ("chatml", "alpaca")}
"""Library → templates that it writes whatever the tokenizer has, in the words that they have here by the same name."""
_NEAR_TEMPLATE = 0.82
"""Least similarity of a misspelt template's name: `chatlm` is 0.83 of `chatml`, LLaMA-Factory's `chatml_de` 0.8."""


def _evaluations(draft: Draft) -> None:
    """Read when held-out rows are measured."""
    if "evaluation_strategy" in draft.left:
        draft.left.setdefault("eval_strategy", draft.left.pop("evaluation_strategy"))  # its name of old
    if draft.library == "Axolotl" and draft.left.get("eval_max_new_tokens"):
        draft.lose("eval_max_new_tokens", "answers that are written while a model trains are those to eval_prompts")
    if draft.library == "Axolotl" and "eval_data_path" not in draft.found and not draft.left.get("val_set_size"):
        for key in ("eval_steps", "evals_per_epoch", "eval_strategy"):
            draft.left.pop(key, None)  # read by nothing there: no row is held out
    if draft.left.get("eval_strategy") in ("no", False, "epoch"):
        draft.left.pop("eval_steps", None)  # read by nothing there
    draft.drop("eval_strategy", when=("no", False, *(["steps"] if draft.left.get("eval_steps") else [])))
    for key, of_epochs in (("eval_strategy", "epoch"), ("evals_per_epoch", 1)):
        if draft.left.get(key) == of_epochs and draft.left[key] is not True:
            del draft.left[key]
            draft.found["eval_at_epoch"] = True
    often, epochs = draft.left.get("evals_per_epoch"), draft.left.get("num_epochs") or 1
    if isinstance(often, int) and not isinstance(often, bool) and often > 1 and isinstance(epochs, int | float) and epochs > 0:
        # As there: a share of the run, of whatever number of steps.
        draft.found["eval_every_steps"] = 1 / (draft.left.pop("evals_per_epoch") * epochs)
        draft.comments["eval_every_steps"] = f"{often} times an epoch, as a share of the run"


def _savings(draft: Draft) -> None:
    """Read when the model and what resuming needs are saved, which are two settings here."""
    left, found = draft.left, draft.found
    if left.get("save_strategy") in ("no", False, "epoch"):
        left.pop("save_steps", None)  # read by nothing there
        draft.drop("save_only_model")
    for key, of_epochs in (("save_strategy", "epoch"), ("saves_per_epoch", 1)):
        if left.get(key) == of_epochs and left[key] is not True:
            del left[key]
            found["checkpoint_at_epoch"] = True  # what resuming needs is saved then by default
    every: Any = left.get("save_steps")
    often, epochs, said = left.get("saves_per_epoch"), left.get("num_epochs") or 1, ""
    if _counts(often) and isinstance(epochs, int | float) and epochs > 0:
        every, said = 1 / (left.pop("saves_per_epoch") * epochs), f", {often} times an epoch as a share of the run"
    draft.drop("save_strategy", when=("no", False, *(["steps"] if every else [])))
    if isinstance(every, float) and every.is_integer():
        every = int(every)
    if not _counts(every) and not (isinstance(every, float) and 0 < every < 1):
        return
    left.pop("save_steps", None)
    samples, product = every, ""  # a share of the run is one of either
    if every >= 1:
        batch = found.get("effective_batch_size")
        samples = every * batch if isinstance(batch, int) and draft.verb not in ONLINE else None
        product = f" ({every} steps of effective_batch_size={batch})"
    if left.get("save_only_model") is True and samples is not None:
        del left["save_only_model"]
        found["save_samples"] = samples
        draft.comments["save_samples"] = f"exports of the model{said}{product}"
        return
    draft.drop("save_only_model", when=(False,))
    exports = "save_samples, which counts samples," if samples is None else f"save_samples={samples:.6g}{product}"
    found["full_state_every_steps"] = every
    draft.comments["full_state_every_steps"] = f"what resuming needs{said}; {exports} exports the model as often"


def _counts(value: object) -> bool:
    """Return whether a value is a number of one or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_OF_SPEED = ("LigerPlugin", "CutCrossEntropyPlugin")
"""Plugins of Axolotl's that change no number; what Liger's switches are here is said of each."""
_SAMPLED_BY_TRL = ("grpo", "rloo", "distill")
"""Verbs whose trainers in TRL draw prompts by `shuffle_dataset`; the other trainers draw at random whatever it says."""


def data(draft: Draft) -> None:
    """Read the paths of data sets, and what becomes of long rows."""
    left, found = draft.left, draft.found
    data_sets(draft)
    _named(draft)
    if draft.library == "TRL" and left.get("dataset_name"):
        name, config = str(left.pop("dataset_name")), left.pop("dataset_config", None)
        split = left.pop("dataset_train_split", None) or "train"
        on_hub = [name, *([str(config)] if config else [])]
        found["data_path"] = ":".join([*on_hub, str(split)])
        if FILE.search(name):
            found["data_path"] = entries([(name, rows_of_slice(str(split), "dataset_train_split", draft.lost))], "", [])
        test = left.pop("dataset_test_split", None) or "test"
        if left.get("eval_strategy") not in (None, "no", False) and not FILE.search(name):
            found["eval_data_path"] = ":".join([*on_hub, str(test)])
    _evaluations(draft)
    _savings(draft)
    for key in ("val_set_size", "val_size"):
        part = left.get(key)
        if part in (0, 0.0):
            del left[key]
        elif isinstance(part, int | float) and part > 1:
            left[key] = int(part)  # a number of rows, of which both libraries drop the fraction
    _order(draft)
    _long_rows(draft)


def _order(draft: Draft) -> None:
    """Read whether rows are drawn at random, or as they stand in the files."""
    left, found = draft.left, draft.found
    asked = left.pop("shuffle_dataset", None)
    strategy = left.get("train_sampling_strategy")
    if draft.verb in _SAMPLED_BY_TRL:
        if asked is False:
            found["shuffle"] = False
        if strategy == "sequential":
            draft.lose("train_sampling_strategy", "read by no trainer there that samples completions: shuffle_dataset is")
    elif strategy in ("random", "sequential"):
        # KTO alone takes rows in order by default.
        if strategy == "sequential" or draft.verb == "kto":
            found["shuffle"] = strategy == "random"
    draft.drop("train_sampling_strategy", when=("random", "sequential"))
    if left.pop("disable_shuffling", None) is True:
        found["shuffle"] = False
    merged = left.pop("shuffle_merged_datasets", None)
    if left.pop("curriculum_sampling", None) is True:
        found["shuffle"] = False
        if merged is not False and isinstance(found.get("data_path"), (list, dict)):
            draft.lost.append("shuffle_merged_datasets: several data sets are shuffled once there; here one follows the other")


def _named(draft: Draft) -> None:
    """Read names between commas: of LLaMA-Factory, those of `dataset_info.json` or of the Hub."""
    beside = draft.left.pop("dataset_dir", "data") if draft.library == "LLaMA-Factory" else None
    for key, setting in (("dataset", "data_path"), ("eval_dataset", "eval_data_path")):
        if not isinstance(draft.left.get(key), str):
            continue
        names = [name.strip() for name in draft.left.pop(key).split(",")]
        if beside == "ONLINE":
            names = [f"{name}:train" for name in names]
        elif isinstance(beside, str) and not beside.startswith("REMOTE:"):
            names = [f"{beside.rstrip('/')}/dataset_info.json:{name}" for name in names]
        elif beside is not None:
            draft.lost.append(f"{key}: {', '.join(names)}: the dataset_info.json of {beside!r} is not read; give the files")
        shares = _shares(draft, len(names)) if setting == "data_path" else None
        if shares is not None and len(set(names)) > 1:
            whole = dict.fromkeys(names, 0.0)
            for name, share in zip(names, shares, strict=True):
                whole[name] += share  # of a data set that is named twice
            draft.found[setting] = whole
            continue
        draft.found[setting] = entries([(name, {}) for name in names], key, draft.lost)


def _shares(draft: Draft, count: int) -> list[float] | None:
    """Return the shares of data sets in LLaMA-Factory; None where one follows the other."""
    left = draft.left
    strategy, given = left.get("mix_strategy"), left.get("interleave_probs")
    if strategy in (None, "concat"):
        left.pop("mix_strategy", None)
        return None  # interleave_probs is refused there, and listed here
    shares = [plain(each.strip()) for each in given.split(",")] if isinstance(given, str) else given or [1.0] * count
    if (
        not isinstance(shares, list)
        or len(shares) != count
        or not all(isinstance(each, int | float) and each > 0 for each in shares)
    ):
        return None
    del left["mix_strategy"]
    left.pop("interleave_probs", None)
    end = "first" if "under" in str(strategy) else "last"
    draft.lost.append(
        f"mix_strategy: {strategy}: the shares are kept; an epoch ends there with the {end} data set that runs out"
    )
    return [float(each) for each in shares]


def _long_rows(draft: Draft) -> None:
    """Read the length of rows (blocks in pretraining), and what becomes of longer ones."""
    left = draft.left
    lengths = ["max_length", "cutoff_len", "sequence_len"]
    # TRL's trainers that sample had it until 0.26.
    lengths += ["max_prompt_length"] if draft.library == "TRL" and draft.verb in ONLINE else []
    for key in lengths:
        if left.get(key) is None:
            continue
        if draft.verb in ONLINE and draft.library == "Axolotl":
            del left[key]  # read by no trainer that samples
            continue
        if draft.verb in ONLINE:
            draft.lost.append(f"{key}: {left[key]}: longer prompts are cut there; here they are left out and counted")
            left["max_prompt_len"] = left.pop(key)
            continue
        if draft.verb == "pretrain":
            left["block_size"] = left.pop(key)
            if draft.library == "Axolotl":
                draft.lost.append(f"{key}: longer documents are cut off there; here they go on in the next block")
            if draft.library == "LLaMA-Factory" and left.get("packing") is False:
                draft.lose("packing", "documents are cut into blocks of block_size, and none is cut off at its end")
        elif draft.library == "LLaMA-Factory" or (draft.library == "TRL" and draft.verb != "reward"):
            draft.found["on_overflow"] = "truncate"  # Axolotl drops long rows, as forge does, and TRL long pairs of rewards
    strategy = left.get("excess_length_strategy")
    if strategy in ("drop", "truncate", "raise"):
        del left["excess_length_strategy"]
        if strategy != "drop":
            draft.found["on_overflow"] = {"truncate": "truncate", "raise": "error"}[strategy]
    draft.drop("truncation_mode", when=("keep_start",))


def rows(draft: Draft) -> None:
    """Read how rows are packed, which tokens are learned, and in which template."""
    left = draft.left
    packs = [key for key in ("packing", "sample_packing", "neat_packing") if left.get(key) is True]
    if packs and draft.verb != "pretrain":
        seen = draft.library == "LLaMA-Factory" and "neat_packing" not in packs
        draft.lost.append(
            f"{packs[0]}: True: rows are packed here too; but a batch counts packed rows there, and samples in "
            "effective_batch_size: multiply it by the samples that fill such a row"
            + ("; without neat_packing they see each other there" if seen else "")
        )
    draft.drop("packing", "sample_packing", "neat_packing", "eval_sample_packing", "eval_packing", "pad_to_sequence_len")
    draft.drop("batch_flattening", "padding_free")
    draft.drop("packing_strategy", when=("bfd",))
    draft.drop("pad_to_multiple_of", when=("auto",))
    if isinstance(left.get("plugins"), list):
        left["plugins"] = [each for each in left["plugins"] if not str(each).endswith(_OF_SPEED)]
    if left.get("model_config") == {"output_router_logits": True}:
        del left["model_config"]  # the routers' loss, which is trained here anyway
    special = left.get("special_tokens")
    if isinstance(special, Mapping):
        left["special_tokens"] = {name: token for name, token in special.items() if name != "pad_token"}  # nothing is padded
    if isinstance(left.get("dataset_text_field"), str):
        column = left.pop("dataset_text_field")
        if column != "text":
            rename(column, "text", draft)
    roles = roles_of(left.get("roles_to_train"))
    if roles and draft.verb in PROMPTED:
        del left["roles_to_train"]
        if roles != ["assistant"]:
            draft.found["train_on"] = ",".join(roles)
    elif left.get("train_on_inputs") is True and draft.library == "Axolotl" and draft.found.get("data_format") == "messages":
        # What every message says and its end, and nothing that the template writes around it.
        del left["train_on_inputs"]
        draft.found["train_on"] = ",".join(ROLES)
    draft.drop("roles_to_train", when=(["assistant"],))
    draft.drop("flash_attention", "flash_attn", "use_flash_attention_2", when=(True, False, "auto", "fa2"))
    if draft.library == "TRL" and draft.verb in ("sft", "osft"):
        _learned(draft)
    _template(draft)


def _learned(draft: Draft) -> None:
    """Read which tokens TRL learns; of conversations all, unless it is told otherwise."""
    left = draft.left
    assistant, completion = left.pop("assistant_only_loss", None), left.pop("completion_only_loss", None)
    if completion is False and not assistant:
        draft.found["train_on"] = "all"
    elif completion is True:
        draft.found["train_on"] = "completion"
    elif not assistant:
        draft.lost.append(
            "assistant_only_loss: not set: of conversations and plain text every token is learned there; for the same, set "
            "train_on: all. Of prompt and completion it is the completion, here too"
        )


def _template(draft: Draft) -> None:
    """Read the chat template: a file, or a name that means the same here."""
    left = draft.left
    if left.get("enable_thinking") is False and left.get("chat_template_kwargs") is None:
        del left["enable_thinking"]
        draft.found["chat_template_kwargs"] = {"enable_thinking": False}
    if draft.library == "Axolotl" and left.get("default_system_message"):
        draft.found["system_prompt"] = left.pop("default_system_message")
        draft.lost.append(
            "default_system_message: is system_prompt; Axolotl puts it into a template with the words 'You are a helpful "
            "assistant.' alone, which its chatml has no more: leave system_prompt out to train as it did"
        )
    draft.drop("chat_template", when=("tokenizer_default", "jinja"))
    key = "template" if draft.library in ("LLaMA-Factory", "ms-swift") else "chat_template"
    name = left.get(key)
    if isinstance(name, str) and name in _SAME_TEXT.get(draft.library, ()) and "chat_template" in draft.known:
        draft.found["chat_template"] = left.pop(key)
        special = left.get("special_tokens")
        if isinstance(special, Mapping) and special.get("eos_token") == forge_data.chat_templates()[name].end:
            left["special_tokens"] = {each: token for each, token in special.items() if each != "eos_token"}
    elif isinstance(name, str) and (near := _misspelt(name, draft.library)) is not None:
        draft.lose(key, f"did you mean `{near}`? As it is, the tokenizer's own template is taken")
    elif isinstance(name, str) and "." not in name and "/" not in name:
        named = next((each for each in forge_data.chat_templates() if name.split("_")[-1] == each), None)
        other = f"; of a tokenizer that has none, chat_template={named} is one" if named else ""
        draft.lose(key, _NAMED.format(library=draft.library, other=other))
    source = left.get("chat_template_jinja")
    if isinstance(source, str) and "{" in source:
        del left["chat_template_jinja"]
        draft.lost.append("chat_template_jinja: a template as text: write it to a file, and give chat_template: FILE")


def _misspelt(name: str, library: str) -> str | None:
    """Return the template of which a name is a misspelling; None where it may be another's.

    Numbers are versions: `llama4` is no misspelling of `llama3`.
    """
    known = [*forge_data.chat_templates(), *(("tokenizer_default",) if library == "Axolotl" else ())]
    plain = name.lower()
    if name in known or "." in name or "/" in name:
        return None
    for each in difflib.get_close_matches(plain, known, n=len(known), cutoff=_NEAR_TEMPLATE):
        if re.findall(r"\d+", each) == re.findall(r"\d+", plain):
            return each
    return None
