"""A model directory and a prompt → an answer, to try what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forge_accel
import forge_data
import forge_dist
from forge._errors import SettingsError
from forge.run._directories import last_export


def generate(
    model_path: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    system: str | None = None,
    seed: int = 42,
) -> str:
    """Generate a model's answer to a prompt.

    Args:
        model_path: A model directory, an adapter directory, a run directory (its last export), or a hub name.
        prompt: What the user says. With a tokenizer that has a chat template it becomes a user message.
        max_new_tokens: Stop after so many tokens.
        temperature: 0 always takes the likeliest token; a higher one samples more freely.
        system: A system message before the prompt; needs a chat template.
        seed: Seed of the sampling.

    Returns:
        The answer, without special tokens.

    Raises:
        SettingsError: a value is out of range.
        forge_dist.ModelError: there is no model at `model_path`.

    """
    if max_new_tokens < 1:
        raise SettingsError(f"max_new_tokens must be at least 1, not {max_new_tokens}.")
    if temperature and not 1e-3 <= temperature < float("inf"):
        raise SettingsError(f"temperature must be 0 (always the likeliest token) or at least 0.001, not {temperature}.")
    if not prompt.strip():
        raise SettingsError("the prompt is empty: give a text.")
    try:
        f"{prompt}{system or ''}".encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"the prompt is not UTF-8: {error.reason} at character {error.start}.") from error
    directory = last_export(str(model_path))
    _refuse_reward_model(directory)
    machine = forge_accel.accelerator()
    machine.seed(seed)
    model: Any = forge_dist.load_trained(directory, dtype=machine.dtype("auto").value, device=machine.device.value)
    tokenizer = forge_data.load_tokenizer(directory)
    if tokenizer.chat_template:
        first = [{"role": "system", "content": system}] if system is not None else []
        text = tokenizer.apply_chat_template(
            [*first, {"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    elif system is not None:
        raise SettingsError("system has no effect here: this tokenizer has no chat template.")
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    sampling = (
        {"do_sample": True, "temperature": temperature}
        if temperature
        else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    )
    tokens = model.generate(
        input_ids=inputs["input_ids"].to(machine.device.value),
        attention_mask=inputs["attention_mask"].to(machine.device.value),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        **sampling,
    )
    return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def _refuse_reward_model(directory: str) -> None:
    """Raise SettingsError for a reward model, which generates no text."""
    for name, key in (("config.json", "architectures"), ("adapter_config.json", "task_type")):
        file = Path(directory) / name
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get(key) if file.is_file() else None
        except (OSError, ValueError, AttributeError):
            continue
        if found == "SEQ_CLS" or (isinstance(found, list) and any("SequenceClassification" in str(one) for one in found)):
            raise SettingsError(
                f"{directory} is a reward model: it gives texts a number and writes none. Give a language model."
            )
