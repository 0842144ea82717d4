"""Every setting is documented, and refuses values that it cannot have."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from forge.settings._settings import flat_fields
from forge.verbs._registry import VERBS, task_of

from .repository import PACKAGES, field_docstrings

if TYPE_CHECKING:
    from collections.abc import Iterator


def settings_classes() -> Iterator[type]:
    """Every settings class of every package; a class that only groups others is not one."""
    for package in PACKAGES.values():
        for source in package.sources:
            names = [
                node.name for node in source.tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Settings")
            ]
            module = importlib.import_module(source.module) if names else None
            for name in names:
                found = getattr(module, name)
                if not any(attrs.has(field.type) for field in attrs.fields(attrs.resolve_types(found))):
                    yield found


CLASSES = {f"{found.__module__.partition('.')[0]}.{found.__name__}": found for found in settings_classes()}
# A field that is inherited is looked at where it is written.
FIELDS = {
    f"{name}.{field.name}": (found, field)
    for name, found in CLASSES.items()
    for field in attrs.fields(found)
    if not field.inherited
}


def refusal(owner: type, field: attrs.Attribute[Any], value: object) -> Exception | None:
    """The error of the field's validator for a value (after its converter), or None when the value is accepted."""
    try:
        if field.converter is not None:
            value = field.converter(value)
        if field.validator is not None:
            field.validator(object.__new__(owner), field, value)
    except (TypeError, ValueError) as error:
        return error
    return None


def test_the_scan_sees_every_package() -> None:
    """Each of the six packages owns settings, and `forge.sft` has the names that were promised."""
    assert {found.partition(".")[0] for found in CLASSES} == {package.import_name for package in PACKAGES.values()}
    promised = """model_path data_path ckpt_output_dir num_epochs max_steps effective_batch_size learning_rate max_seq_len
        max_tokens_per_gpu
        warmup_steps lr_scheduler weight_decay beta1 beta2 eps max_grad_norm seed dtype adapter lora_r lora_alpha
        lora_dropout target_modules save_samples checkpoint_at_epoch eval_data_path validation_split eval_every_steps
        logging_steps"""
    assert set(promised.split()) - {name.rpartition(".")[2] for name in FIELDS} == set()


@pytest.mark.parametrize("verb", VERBS)
def test_no_setting_has_two_owners(verb: str) -> None:
    """Within a verb a name belongs to one package: flat recipes and flags stay unambiguous."""
    names = [field.name for _, field in flat_fields(task_of(verb).settings)]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("name", CLASSES)
def test_settings_are_frozen_and_keyword_only(name: str) -> None:
    """A settings object cannot be changed under a run, and no setting is given by position."""
    found = CLASSES[name]
    assert all(field.kw_only for field in attrs.fields(found))
    with pytest.raises(attrs.exceptions.FrozenError):
        found.__setattr__(object.__new__(found), attrs.fields(found)[0].name, None)


@cache
def docstrings_of(owner: type) -> dict[str, str]:
    """Field → its docstring, of one class; a file is read once for all of its fields, of which there are 400."""
    return field_docstrings(ast.parse(inspect.getsource(inspect.getmodule(owner))), owner.__name__)


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_has_a_docstring(name: str) -> None:
    """The bare string under a field is its help on the command line and its line in the reference: a sentence."""
    owner, field = FIELDS[name]
    text = docstrings_of(owner).get(field.name, "")
    assert len(text.split()) >= 3
    assert text.strip().endswith((".", ")"))


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_refuses_a_wrong_type(name: str) -> None:
    """A validator is beside every field, and its error names the field."""
    owner, field = FIELDS[name]
    error = refusal(owner, field, object())
    assert error is not None
    assert field.name in str(error)


@pytest.mark.parametrize("name", FIELDS)
def test_every_default_is_valid(name: str) -> None:
    """A default passes its own validator."""
    owner, field = FIELDS[name]
    if field.default is not attrs.NOTHING:
        assert refusal(owner, field, field.default) is None


@pytest.mark.parametrize(
    "name", [name for name, (_, field) in FIELDS.items() if "bool" not in str(field.type) and field.type is not str]
)
def test_a_number_is_no_truth_value(name: str) -> None:
    """True is no count and no rate, though Python calls it an int."""
    assert refusal(*FIELDS[name], True) is not None


@pytest.mark.parametrize("name", [name for name, (_, field) in FIELDS.items() if "float" in str(field.type)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_is_finite(name: str, value: float) -> None:
    """No setting is NaN or infinite."""
    assert refusal(*FIELDS[name], value) is not None


@pytest.mark.parametrize("name", [name for name, (_, field) in FIELDS.items() if field.type is float])
def test_a_float_may_be_written_as_an_integer(name: str) -> None:
    """Where 0.0 or 1.0 is fine, 0 or 1 is too."""
    owner, field = FIELDS[name]
    for value in (0, 1):
        assert (refusal(owner, field, value) is None) == (refusal(owner, field, float(value)) is None)
