"""For every shipped recipe: the words of a short run of it on a tiny model, and the memory of one on a real model's shape."""

from __future__ import annotations

import json
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any

import forge
from forge.run._dry_run import rehearse
from forge.run._rows import take_rows
from forge.settings._recipe import read_recipe, verb_of
from forge.settings._settings import resolve
from forge.settings._shipped import shipped

from .verbs import KINDS, settings_of

if TYPE_CHECKING:
    from pathlib import Path

OWN = ("model_path", "data_path", "teacher_path", "reward", "max_new_tokens", "num_generations", "block_size")
"""Settings of `settings_of` that a recipe leaves to its user, or that a tiny model needs smaller."""


def words_of(name: str, model_dir: Path, folder: Path, run: Path, **more: Any) -> list[str]:
    """`recipes run NAME key=value ...`, with rows and rewards written to `folder`."""
    given = settings_of(str(verb_of(shipped()[name])), model_dir, folder)
    small = {key: value[0] if isinstance(value, tuple) else value for key, value in given.items() if key in OWN}
    few = {"max_steps": 2, "num_epochs": "null", "effective_batch_size": 4, "validation_split": 0.25, "max_tokens_per_gpu": 512}
    few |= {key: 1 for key in ("warmup_steps", "decay_steps") if read_recipe(shipped()[name]).get(key)}
    settings = {**small, **few, "ckpt_output_dir": run, **more}
    return ["recipes", "run", name, *(f"{key}={value}" for key, value in settings.items() if value != "null")]


TOKENS = 4096
"""Tokens of a micro-batch for which a recipe says what it needs."""
NEEDS = re.compile(r"^# Needs: ([0-9.]+) GiB of GPU memory \((\w+)\)(.*)$", re.MULTILINE)
"""Line of a recipe's head: gibibytes, and the phase that takes them."""


def write_outline(model_dir: Path, path: Path) -> Path:
    """Write a model of the shape of Llama 3.2 1B whose file of weights is a hole, with the tests' tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shutil.copytree(model_dir, path, ignore=shutil.ignore_patterns("*.safetensors", "generation_config.json"))
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256, "head_dim": 64}
    heads = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    }
    config = LlamaConfig(**shape, **heads, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    header, at = {}, 0
    for name, tensor in model.named_parameters():
        end = at + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return path


def needs_of(name: str, outline: Path, folder: Path) -> tuple[float, str]:
    """The memory of a recipe's worst phase on each GPU in GiB, and the phase, as `--dry-run --for` plans them."""
    verb = str(verb_of(shipped()[name]))
    task, recipe = getattr(forge, verb).task, read_recipe(shipped()[name], verb)
    prompt, answer = "what colour has the fig?" + " very" * 240, "red" + " red" * 480
    rows = {
        "chats": {"prompt": prompt, "completion": answer * 2},
        "pairs": {"prompt": prompt, "chosen": answer, "rejected": answer[:-4]},
        "answers": {"prompt": prompt, "completion": answer, "label": True},
        "prompts": {"prompt": prompt, "fruit": "fig"},
        "documents": {"text": answer * 8},
        "labelled": {"text": answer * 2, "label": True},
        "texts": {"query": prompt, "positive": answer, "negative": answer[:-4]},
    }[KINDS[verb]]
    own = settings_of(verb, outline, folder) if KINDS[verb] == "prompts" else {}
    more = {"teacher_path": str(outline)} if verb == "distill" else {}
    of_length = ("num_epochs", "validation_split", "max_steps", "warmup_steps")
    given = {key: value for key, value in recipe.items() if key not in of_length}
    given |= {"model_path": str(outline), "max_steps": 4, "max_tokens_per_gpu": TOKENS, **more}
    given |= {} if verb == "sdft" or KINDS[verb] in ("prompts", "labelled", "texts") else {"lint": "off"}
    given |= {key: value for key, value in own.items() if key == "reward"}
    given["data_path"] = [
        {**rows, **({"label": (at % 2) == 1 if verb == "kto" else "ab"[at % 2]} if "label" in rows else {})} for at in range(64)
    ]
    if recipe.get("kl_base"):
        given["eval_data_path"] = given["data_path"]  # it measures on held-out rows
    given["ckpt_output_dir"] = str(folder / "planned")
    sys.path.insert(0, str(folder))
    try:
        given, in_memory = take_rows(given)
        devices = recipe.get("nproc_per_node", 1)
        plan = rehearse(
            task, resolve(task.settings, ("argument", given)), in_memory, target=f"{devices}xGPU-80GB", quiet=True
        ).memory
    finally:
        sys.path.remove(str(folder))
    assert plan is not None
    assert plan["refused"] is None, plan
    worst = max(plan["phases"], key=lambda phase: phase["planned"])
    return worst["planned"] / 2**30, worst["name"]
