"""Flat names and values → composed settings."""

from __future__ import annotations

import inspect
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from forge import SettingsError
from forge.cli._app import main
from forge.settings._added import is_added
from forge.settings._converted import converted
from forge.settings._settings import flat_fields, resolve, signature_of
from forge.verbs._online import GRPOSettings
from forge.verbs._preferences import DPOSettings
from forge.verbs._registry import VERBS, task_of
from forge.verbs._sft import SFTSettings
from forge_algos.adaptations import ADAPTERS, AdapterKind
from forge_algos.losses import POLICY_KINDS, PolicyKind

REQUIRED: dict[str, Any] = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o"}


def test_later_layers_win_and_are_named() -> None:
    """A flag beats a recipe, a recipe beats the default, and `origins` says which it was."""
    s = resolve(SFTSettings, ("recipe r.yaml", {**REQUIRED, "seed": 1, "beta1": 0.5}), ("flag", {"seed": 2}))
    assert (s.plan.seed, s.optimizer.beta1) == (2, 0.5)
    assert (s.origins["seed"], s.origins["beta1"], s.origins["beta2"]) == ("flag", "recipe r.yaml", "default")


def test_names_are_unique_across_packages() -> None:
    """A flat name belongs to one package, so that a flag cannot mean two things."""
    names = [field.name for _, field in flat_fields(SFTSettings)]
    assert len(names) == len(set(names)) > 25


def test_settings_are_given_by_name() -> None:
    """What stands behind the recipe is answered with how settings are given."""
    import forge

    with pytest.raises(TypeError, match=r"forge.sft takes one recipe, and settings by name: model_path=..., data_path"):
        forge.sft("org/model", "train.jsonl")


def test_signature_lists_every_setting() -> None:
    """`help(forge.sft)` and the command line are made from one signature: recipe, then every setting by keyword."""
    import forge

    *settings, accelerate, callbacks = inspect.signature(forge.sft).parameters.values()
    assert settings == list(signature_of(SFTSettings).parameters.values())
    assert [each.name for each in settings] == ["recipe", *(field.name for _, field in flat_fields(SFTSettings))]
    assert [accelerate.name, callbacks.name] == ["accelerate_config", "callbacks"], "what is no setting"


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_required(name: str) -> None:
    """Leaving a required setting out is refused by name."""
    with pytest.raises(SettingsError, match=f"{name} is required"):
        resolve(SFTSettings, ("argument", {key: value for key, value in REQUIRED.items() if key != name}))


@pytest.mark.slow
@given(name=st.text(min_size=1, max_size=20))
def test_unknown_names_are_refused(name: str) -> None:
    """Whatever the name: it is a setting or it is refused by name."""
    known = {field.name for _, field in flat_fields(SFTSettings)}
    if name in known:
        return
    with pytest.raises(SettingsError) as caught:
        resolve(SFTSettings, ("argument", {**REQUIRED, name: 1}))
    assert repr(name) in str(caught.value)


@given(
    value=st.one_of(
        st.none(), st.booleans(), st.text(), st.lists(st.integers()), st.floats(), st.dictionaries(st.text(), st.text())
    )
)
@pytest.mark.parametrize("name", ["seed", "effective_batch_size", "warmup_steps"])
def test_mistyped_values_are_refused(name: str, value: object) -> None:
    """Only whole numbers are taken where one is meant; everything else is refused with the name, never coerced."""
    with pytest.raises(SettingsError, match=name):
        resolve(SFTSettings, ("argument", {**REQUIRED, name: value}))


def test_a_value_of_no_type_names_the_types() -> None:
    """Whatever a setting's type is, a value of another one is answered with the types that it takes."""
    fields = {field.name: field for verb in VERBS for _, field in flat_fields(task_of(verb).settings)}
    for name, field in fields.items():
        with pytest.raises(SettingsError, match=f"{name} must be .*, not an object of builtins.object"):
            converted(field, object(), "call")
    with pytest.raises(SettingsError, match="a mapping from strings to numbers or mappings, not True"):
        converted(fields["data_path"], True, "call")


def test_whole_numbers_are_numbers() -> None:
    """learning_rate=1 is a number like 1.0; True is none."""
    assert resolve(SFTSettings, ("argument", {**REQUIRED, "learning_rate": 1})).optimizer.learning_rate == 1.0
    with pytest.raises(SettingsError, match="learning_rate must be a number"):
        resolve(SFTSettings, ("argument", {**REQUIRED, "learning_rate": True}))


def test_all_faults_are_in_one_message() -> None:
    """Unknown names of each layer, mistyped values, and what groups refuse."""
    layers = (("recipe r.yaml", {"lr": 1, "beta1": "x"}), ("flag", {**REQUIRED, "blurb": 2, "seed": 1.5, "lora_r": 0}))
    with pytest.raises(SettingsError) as caught:
        resolve(SFTSettings, *layers)
    message = str(caught.value)
    assert message.startswith(
        "4 faults in the settings:\n2 unknown settings:\n  'lr' (recipe r.yaml): here it is `learning_rate`\n"
    )
    for part in ("'blurb': there is no", "beta1 must be a number", "seed must be a whole number", "lora_r"):
        assert part in message
    with pytest.raises(SettingsError, match="data_path, ckpt_output_dir are required: give them"):
        resolve(SFTSettings, ("argument", {"model_path": "m"}))


def test_a_section_is_told_to_be_flat() -> None:
    """Settings below `sft:`, as other trainers' files have them."""
    with pytest.raises(SettingsError, match="^unknown setting 'sft' .recipe r.yaml.: a recipe has no sections: write what"):
        resolve(SFTSettings, ("recipe r.yaml", {"sft": {**REQUIRED}}))


def test_values_out_of_range_beside_other_faults() -> None:
    """Each is told beside a mistyped or missing value of its group, and beside another one out of range."""
    given = {"model_path": "m", "num_epochs": "three", "effective_batch_size": -1, "learning_rate": -1, "warmup_steps": -4}
    with pytest.raises(SettingsError, match="^5 faults in the settings") as caught:
        resolve(SFTSettings, ("recipe r.yaml", given))
    for part in (
        "num_epochs must be",
        "effective_batch_size must be an integer from 1 to 2147483647, got -1 (recipe r.yaml)",
        "learning_rate must be above 0 and at most 1e+06, got -1.0 (recipe r.yaml)",
        "warmup_steps must be at least 0 and finite, got -4 (recipe r.yaml)",
        "data_path, ckpt_output_dir are required",
    ):
        assert part in str(caught.value)


def test_numbers_that_yaml_reads_as_text() -> None:
    """YAML 1.1 reads 1e-5 as a string: from a recipe it is the number that was meant, from Python it is refused."""
    layer = {**REQUIRED, "learning_rate": "1e-5"}
    assert resolve(SFTSettings, ("recipe r.yaml", layer)).optimizer.learning_rate == 1e-5
    with pytest.raises(SettingsError, match="learning_rate must be a number"):
        resolve(SFTSettings, ("argument", layer))


def test_choices_suggest_the_nearest() -> None:
    """A misspelled choice is answered with the choices and the nearest one."""
    with pytest.raises(SettingsError, match=r"lr_scheduler must be one of .*Did you mean 'cosine'\?"):
        resolve(SFTSettings, ("argument", {**REQUIRED, "lr_scheduler": "cosin"}))


@pytest.mark.parametrize(
    ("name", "theirs", "here"),
    [
        ("optimizer", "adamw_torch", "adamw"),
        ("optimizer", "paged_adamw_8bit", "adamw_8bit"),
        ("dtype", "BF16", "bfloat16"),
        ("attention", "flash_attention_2", "auto"),
        ("lr_scheduler", "constant_with_warmup", "constant"),
        ("adapter", "LoRA", "lora"),
        ("packing", "true", "on"),
        ("baseline", "ReMax", "greedy"),
        ("baseline", "otb", "optimal_token"),
    ],
)
def test_values_of_other_libraries(name: str, theirs: str, here: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Their word for a choice is answered with ours, in Python and on the command line, not with one that looks alike."""
    with pytest.raises(SettingsError, match=f"{name} must be one of .*Did you mean '{here}'"):
        resolve(GRPOSettings if name == "baseline" else SFTSettings, ("argument", {**REQUIRED, name: theirs}))
    assert main(["grpo" if name == "baseline" else "sft", f"--{name.replace('_', '-')}", theirs]) == 2
    assert capsys.readouterr().err.strip().endswith(f'Did you mean "{here}"?')


@pytest.mark.parametrize("origin", ["argument", "recipe r.yaml"])
def test_choices_of_a_setting_that_may_be_left_out(origin: str) -> None:
    """What another tool makes, and the nearest word: of such a setting neither was said."""
    with pytest.raises(SettingsError, match=r"qat must be one of .*llama-quantize makes q4_k_m, of what .forge export RUN"):
        resolve(SFTSettings, (origin, {**REQUIRED, "qat": "q4_k_m"}))
    with pytest.raises(SettingsError, match=r"qat must be one of .*Did you mean 'q4_0'\?"):
        resolve(SFTSettings, (origin, {**REQUIRED, "qat": "Q4_0"}))


def test_resolved_keeps_the_reason() -> None:
    """A value that was chosen later has the reason as its origin."""
    s = resolve(SFTSettings, ("argument", REQUIRED)).resolved("num_epochs", 1, "nothing was given")
    assert s.plan.num_epochs == 1
    assert s.origins["num_epochs"] == "chosen: nothing was given"
    assert s.resolved("dtype", "float32", "float32: the exact choice").origins["dtype"] == "chosen: the exact choice"


def test_settings_are_frozen() -> None:
    """A run cannot change its settings."""
    s = resolve(SFTSettings, ("argument", REQUIRED))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        s.plan.seed = 3  # type: ignore[misc]


def own_function() -> None:
    """Named by a test."""


def test_a_function_is_given_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function itself, or a list of functions, is answered with its name, or with the form of one."""
    anywhere = '"module:function", from a file that can be imported'
    mine = f'"{own_function.__module__}:own_function"'
    for value, shown, name in (
        (len, "the function len", '"builtins:len"'),
        (["a:b", len], r"\['a:b', the function len\]", '"builtins:len"'),
        (own_function, "the function own_function", mine),
        (lambda: 0, "the function .*<lambda>", anywhere),
    ):
        with pytest.raises(SettingsError, match=f"preprocess must be a string, not {shown}. Give .* its name, {name}: config"):
            resolve(SFTSettings, ("argument", REQUIRED | {"preprocess": value}))
    monkeypatch.setattr(own_function, "__module__", "__main__")
    with pytest.raises(
        SettingsError, match=r'by its name, "module:own_function", from a file that processes which read rows can'
    ):
        resolve(SFTSettings, ("argument", REQUIRED | {"preprocess": own_function}))
    with pytest.raises(SettingsError, match=r'"__main__:own_function" in a run of one process, or "module:own_function" from'):
        resolve(GRPOSettings, ("argument", REQUIRED | {"reward": own_function}))


class Model:
    """A loaded model, as far as its settings see it."""

    def save_pretrained(self, path: str) -> None:
        """Save it."""

    def __repr__(self) -> str:
        return "Model(\n  layers\n)"


def test_a_model_object_is_answered_in_one_line() -> None:
    """By its type, with what makes a directory of it, and not as missing too."""
    with pytest.raises(SettingsError) as raised:
        resolve(SFTSettings, ("argument", REQUIRED | {"model_path": Model()}))
    assert str(raised.value) == (
        f"model_path must be a string, not an object of {Model.__module__}.Model. Save it with save_pretrained, its tokenizer "
        "beside it, and give the directory."
    )


def test_no_rows() -> None:
    """An empty list is said to hold no rows."""
    for none in ([], ()):
        with pytest.raises(SettingsError, match="data_path is empty: no rows were given, and no file"):
            resolve(SFTSettings, ("argument", REQUIRED | {"data_path": none}))


def test_a_choice_of_which_several_may_be_given() -> None:
    """Is listed as such, with the one that is spelled most like it."""
    with pytest.raises(
        SettingsError, match=r"loss_type must be one or several of 'sigmoid', .*, 'sigmoid_norm', not 'sigmoi'"
    ) as raised:
        resolve(DPOSettings, ("argument", REQUIRED | {"loss_type": "sigmoi"}))
    assert str(raised.value).endswith("Did you mean 'sigmoid'?")


@pytest.mark.parametrize("warmup", [{"warmup_steps": 5}, {"warmup_ratio": 0.5}])
def test_a_warm_up_and_a_decay_fit_into_the_run(warmup: dict[str, float]) -> None:
    """Before a model is loaded, of a run of so many steps."""
    given = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o", "lr_scheduler": "warmup_stable_decay", **warmup}
    s = resolve(SFTSettings, ("argument", {**given, "decay_steps": 5}))
    for num_steps in (10, None if "warmup_steps" in warmup else 11):
        s.check_length(num_steps)
    with pytest.raises(SettingsError, match=r"decay_steps=5 after .*warmup_steps=5: more than the 9 steps of this run"):
        s.check_length(9)
    with pytest.raises(SettingsError, match="decay_steps=5 after"):
        resolve(SFTSettings, ("argument", {**given, "decay_steps": 5, "max_steps": 9}))


def test_a_row_that_a_script_added_is_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/extending.md: a row of a table is all that `forge.sft(adapter="gralora")` and `loss_type="whole"` need."""
    asked: list[tuple[Any, str, str]] = [(SFTSettings, "adapter", "gralora"), (GRPOSettings, "loss_type", "whole")]
    more: dict[str, dict[str, Any]] = {"adapter": {}, "loss_type": {"reward": "rewards:short"}}
    for kind, name, value in asked:
        with pytest.raises(SettingsError, match=f"{name} must be one of .*, not '{value}'"):
            resolve(kind, ("argument", {**REQUIRED, **more[name], name: value}))
    monkeypatch.setitem(ADAPTERS, "gralora", AdapterKind(learning_rate=3e-4, peft="GraloraConfig", arguments={"r": "lora_r"}))
    monkeypatch.setitem(POLICY_KINDS, "whole", PolicyKind(ratio="sequence_sum", reduce="mean", grpo=True))
    for kind, name, value in asked:
        assert resolve(kind, ("argument", {**REQUIRED, **more[name], name: value})).origins[name] == "argument"


def test_no_other_choice_is_added() -> None:
    """Whatever a setting's type names is all that its validator takes, of every verb."""
    for verb in VERBS:
        for _, field in flat_fields(task_of(verb).settings):
            assert not is_added(field, "no such choice"), field.name
