"""Settings as flags: what a command line reads from them is what the recipe said."""

from __future__ import annotations

import pytest

from forge._errors import SettingsError
from forge.cli._app import make_app
from forge.clusters import ForgeConfig
from forge.clusters._words import as_words
from forge.settings._recipe import as_values, read_recipe
from forge.settings._settings import required, resolve
from forge.settings._shipped import shipped
from forge.verbs._registry import task_of

ODD = {
    "model_path": "org/a model",
    "data_path": {"a b.jsonl": 0.25, "ü.jsonl": {"weight": 0.75, "data_format": "alpaca", "rename_columns": {"a=}": "output"}}},
    "ckpt_output_dir": "-runs/'first' \"$HOME\"",
    "learning_rate": "1e-5",
    "keep_best": True,
    "async_save": False,
    "validation_split": 0.5,
    "adapter": "lora",
    "target_modules": ["q_proj", "layers.*.mlp"],
    "chat_template_kwargs": {"enable_thinking": False, "language": "two words", "effort": "2", "depth": "true", "title": '"a"'},
    "num_epochs": float("inf"),
    "lr_scheduler": "constant",
    "rename_columns": {"question": "prompt"},
    "full_state_every_minutes": 0.5,
    "eval_prompts": ["What is a plum?\nAnd a fig?"],
}


def read_by_the_command_line(verb: str, words: list[str]) -> dict[str, object]:
    """The settings that `forge VERB` gets from words, converted as its command does."""
    task = task_of(verb)
    _, bound, *_ = make_app(verb).parse_args([verb, *words], exit_on_error=False, print_error=False)
    from forge.settings._settings import flat_fields

    of_words = {field.name: field.metadata["words"] for _, field in flat_fields(task.settings) if "words" in field.metadata}
    given = {
        name: of_words[name](value) if name in of_words and isinstance(value, tuple) else value
        for name, value in bound.kwargs.items()
    }
    return as_values(resolve(task.settings, ("flag", given)))


@pytest.mark.parametrize("recipe", [*shipped(), "odd"])
def test_flags_say_what_the_recipe_says(recipe: str) -> None:
    """For every shipped recipe, and for values with spaces, quotes, dashes, newlines, mappings and switches."""
    from forge.settings._recipe import verb_of

    values = dict(ODD) if recipe == "odd" else read_recipe(shipped()[recipe])
    verb = "sft" if recipe == "odd" else verb_of(shipped()[recipe])
    assert verb is not None
    task = task_of(verb)
    values = {**dict.fromkeys(required(task.settings), "x"), **values}
    expected = as_values(resolve(task.settings, ("recipe r.yaml", values)))
    assert read_by_the_command_line(verb, as_words(values)) == expected


@pytest.mark.parametrize("value", [[], ["-x"], {}])
def test_what_no_flag_can_carry_is_refused(value: object) -> None:
    """An empty list, and an entry that would be read as a flag."""
    with pytest.raises(SettingsError, match="target_modules"):
        as_words({"target_modules": value})


def test_a_configuration_checks_its_settings() -> None:
    """Unknown verbs and settings, places that the cluster decides, and what is set twice are refused by name."""
    with pytest.raises(SettingsError, match="no verb 'lora'"):
        ForgeConfig(verb="lora")
    with pytest.raises(SettingsError, match="learning_rate"):
        ForgeConfig(settings={"lr": 1.0}).to_args()
    with pytest.raises(SettingsError, match="nnodes=4 is what the cluster says"):
        ForgeConfig(settings={"nnodes": 4}).to_args()
    with pytest.raises(SettingsError, match="settings must be a mapping from names to values, not \\['lora_r'\\]"):
        ForgeConfig(settings=["lora_r"])  # ty: ignore
    with pytest.raises(SettingsError, match="peft_config must be one of LoraConfig"):
        ForgeConfig(peft_config={"r": 8})  # type: ignore[arg-type]


def test_arguments_are_escaped_for_kubernetes() -> None:
    """It expands `$(NAME)` in a container's arguments, and reads `$$` as one dollar sign, in any place."""
    odd = "$(HOME)/$model$$"
    assert f"--model-path={odd.replace('$', '$$')}" in ForgeConfig(settings={"model_path": odd}).to_args()


@pytest.mark.parametrize("path", ["a=0.5", ["b.jsonl=1", "c.jsonl=2"]])
def test_a_path_that_would_be_read_as_a_weight_is_refused(path: object) -> None:
    """`a=0.5` is a path with its weight on a command line, and a file of that name in a recipe."""
    with pytest.raises(SettingsError, match="data_path=.* would read .* otherwise. Name it otherwise."):
        ForgeConfig(settings={"model_path": "m", "data_path": path}).to_args()
    args = ForgeConfig(settings={"model_path": "m", "data_path": ["b=c.jsonl", "d.jsonl"]}).to_args()
    assert args[-3:] == ["--data-path", "b=c.jsonl", "d.jsonl"]
