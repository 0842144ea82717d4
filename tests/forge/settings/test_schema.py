"""The JSON schema of recipes takes what a recipe takes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from forge import SettingsError
from forge.cli._options import field_texts
from forge.settings._recipe import as_recipe
from forge.settings._schema import recipe_schema
from forge.settings._settings import resolve
from forge.verbs._registry import VERBS, task_of

from ...lanes import quick_keeps

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is installed where every dependency of the tests is")

REQUIRED: dict[str, Any] = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o"}


def checker(verb: str) -> Any:
    """The schema's validator."""
    return jsonschema.Draft202012Validator(recipe_schema(verb, task_of(verb).settings, field_texts))


@pytest.mark.parametrize("verb", quick_keeps(["sft", "osft", "grpo"], VERBS))
def test_it_is_a_schema_and_takes_a_runs_own_recipe(verb: str) -> None:
    """It is valid by draft 2020-12, and the config.yaml of a run is valid by it."""
    found = checker(verb)
    found.check_schema(found.schema)
    more = {"teacher_path": "t"} if verb == "distill" else {"reward": ("m:f",)} if verb in ("ppo", "grpo", "rloo") else {}
    recipe = yaml.safe_load(as_recipe(resolve(task_of(verb).settings, ("argument", {**REQUIRED, **more})), verb))
    assert [error.message for error in found.iter_errors(recipe)] == []


@pytest.mark.parametrize(
    "recipe", [{"lr": 1e-4}, {"adapter": "lroa"}, {"seed": 1.5}, {"seed": "x"}, {"keep_best": "yes"}, {"verb": "dpo"}]
)
def test_it_refuses_what_a_recipe_may_not_have(recipe: dict[str, Any]) -> None:
    """Unknown names, values of the wrong type, another verb."""
    assert not checker("sft").is_valid(recipe)


SFT = checker("sft")


@pytest.mark.slow
@given(
    name=st.sampled_from(sorted(SFT.schema["properties"])[:-1]),
    value=st.one_of(
        st.booleans(),
        st.integers(-2, 2000),
        st.floats(-1, 2),
        st.text(max_size=3),
        st.sampled_from(["lora", "on", "1e-3", "auto"]),
    ),
)
def test_what_is_taken_is_allowed(name: str, value: Any) -> None:
    """Every value that a recipe may have is valid by the schema: an editor never marks what runs."""
    if name == "verb":
        return
    try:
        resolve(task_of("sft").settings, ("recipe r.yaml", {**REQUIRED, name: value}))
    except SettingsError:
        return
    assert SFT.is_valid({name: value}), (name, value)
