"""The setting `backend`: which trainer makes the steps, its own settings, and what it does not have."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.backends import Backend
from forge.cli._app import main
from forge.settings import _backends
from forge.settings._backends import shipped_names
from forge.settings._settings import flat_fields, groups
from forge.trackers import _table
from forge.verbs._registry import VERBS, task_of

from .repository import PACKAGES


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as pip leaves it, on the path: another package's module, and the metadata with its entry point."""
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("outside_backend.py"), folder)
    metadata = folder / "outside_backend-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-backend\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[forge.backends]\nscribe = outside_backend:Scribe\nforge = outside_backend:Scribe\nbroken = outside_backend:Gone\n"
        "wrong = outside_backend:OwnSettings\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "outside_backend", raising=False)
    return folder


@pytest.fixture
def given(installed: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings of a run by the outside backend."""
    return {"model_path": "org/model", "data_path": "rows.jsonl", "ckpt_output_dir": str(tmp_path / "run"), "backend": "scribe"}


def written(given: dict[str, Any]) -> dict[str, Any]:
    """What the outside backend was asked for."""
    return json.loads((Path(given["ckpt_output_dir"]) / "params.json").read_text())


def test_a_backend_from_outside_is_given_the_verb_and_every_setting(given: dict[str, Any]) -> None:
    """`forge.sft(backend=...)` runs the class of an entry point with all settings by name, its own included."""
    result = forge.sft(**given, pages=3, max_steps=7)
    found = written(given)
    assert found["verb"] == "sft"
    assert (found["pages"], found["ink"], found["max_steps"], found["backend"]) == (3, "blue", 7, "scribe")
    assert {field.name for _, field in flat_fields(forge.sft.task.settings)} <= found.keys()
    assert (found["origins"]["pages"], found["origins"]["ink"]) == ("argument", "default")
    assert str(result.output_dir) == given["ckpt_output_dir"]


def test_an_export_that_does_not_stop_as_it_was_trained_is_named(
    given: dict[str, Any], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend from outside that leaves the end of a named template's turns out of its export; with it nothing is said."""
    from transformers import AutoTokenizer, GenerationConfig

    made = tmp_path / "made"
    shutil.copytree(model_dir, made)
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot_id|>"]})
    tokenizer.save_pretrained(made)
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    monkeypatch.setenv("SCRIBES_MODEL", str(made))
    said = []
    for number, (template, eos) in enumerate((("llama3", [2]), ("llama3", [2, end]), (None, [2]))):
        GenerationConfig(eos_token_id=eos).save_pretrained(made)
        forge.sft(**{**given, "chat_template": template, "ckpt_output_dir": str(tmp_path / f"run{number}")})
        said.append(capsys.readouterr().err)
    assert "WARNING: chat_template: <|eot_id|> ends a turn" in said[0]
    assert f"which backend=scribe wrote, does not name it as EOS: add {end} to eos_token_id" in " ".join(said[0].split())
    assert said[1:] == ["", ""]


def test_a_backend_gets_rows_in_memory(given: dict[str, Any]) -> None:
    """Rows in memory and callbacks reach a backend as they are."""

    class Watch:
        def on_end(self, result: Any) -> None:
            """Do nothing."""

    forge.sft(**{**given, "data_path": [{"text": "a"}]}, callbacks=[Watch()])
    assert written(given)["rows"] == {"data_path": [{"text": "a"}]}
    assert written(given)["watched"] is True


def test_a_recipe_names_the_backend_and_its_settings(given: dict[str, Any], tmp_path: Path) -> None:
    """`backend:` and the backend's own settings stand in a recipe like any other, and the origin says so."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("verb: dpo\n" + "".join(f"{name}: {value}\n" for name, value in given.items()) + "ink: black\n")
    forge.dpo(recipe)
    assert written(given)["ink"] == "black"
    assert written(given)["origins"]["ink"] == f"recipe {recipe}"


@pytest.mark.slow
def test_the_command_line_takes_the_settings_of_the_backend(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags of the backend that --backend names, or the recipe, are options, and --help lists them."""
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert main(["sft", *words, "--pages", "2"]) == 0
    assert written(given)["pages"] == 2
    assert main(["sft", "--backend=scribe", "--help"]) == 0
    assert "Pages that it writes" in capsys.readouterr().out
    assert main(["sft", *words, "--dry-run", "--pages", "4", "--for", "24GB"]) == 0
    assert "would write 4 pages in blue for 24GB" in capsys.readouterr().out
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("backend: scribe\n")
    assert main(["sft", str(recipe), "--help"]) == 0
    assert "--pages" in capsys.readouterr().out
    assert main(["sft", *words, "--page", "2"]) == 2
    assert "did you mean --pages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"backend": "scrib"}, "backend: there is no backend 'scrib'; known are forge, .*Did you mean 'scribe'?"),
        ({"backend": "broken"}, "backend=broken: outside_backend:Gone could not be loaded"),
        ({"backend": "wrong"}, "is no subclass of forge.backends.Backend"),
        ({"backend": 3}, "backend must be a string, not 3"),
        ({"backend": ""}, "there is no backend ''"),
        ({"pags": 2}, "unknown setting 'pags'.*did you mean `pages`?"),
        ({"pages": 0}, "'pages' must be >= 1"),
        ({"ink": "red"}, "'ink' must be in"),
        ({"pages": "many"}, "pages must be a whole number"),
        ({"adapter": "dora"}, "adapter=dora is not available with backend=scribe; it has none, lora"),
        ({"strategy": "ddp"}, "strategy=ddp is not available with backend=scribe; it has auto"),
        ({"seed": 7}, "seed=7 has no effect with backend=scribe: it draws nothing"),
        ({"backend": "forge", "pages": 2}, "unknown setting 'pages'"),
    ],
)
def test_what_a_backend_does_not_have_is_refused(given: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    """A wrong backend, a wrong setting of its own and what it does not honour: one message by name, nothing written."""
    with pytest.raises(forge.SettingsError, match=message):
        forge.sft(**(given | changed))
    assert not Path(given["ckpt_output_dir"]).exists()


def test_a_verb_that_a_backend_does_not_have_is_refused(given: dict[str, Any]) -> None:
    """The message lists the verbs that there are."""
    with pytest.raises(forge.SettingsError, match="backend=scribe has no kto; it has sft, dpo"):
        forge.kto(**given)


def test_a_backend_whose_package_is_missing_names_the_command(given: dict[str, Any]) -> None:
    """One error with the pip command."""
    backend: Any = forge.backends.get("scribe")
    type(backend).requires, type(backend).install = ("no_such_package_here",), "outside-backend[all]"
    with pytest.raises(
        forge.SettingsError, match=r"no_such_package_here is not installed: `pip install 'outside-backend\[all\]'"
    ):
        forge.sft(**given)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"attrs": ">=1,<2"}, r"attrs [\d.]+ is installed, and >=1,<2 is needed: `pip install 'outside-backend\[all\]'`"),
        ({"attrs": ">=999"}, "and >=999 is needed"),
        ({"no-such-package-here": ">=1"}, "no-such-package-here is not installed"),
    ],
)
def test_a_backend_whose_package_is_of_another_version_is_refused(
    given: dict[str, Any], versions: dict[str, str], message: str
) -> None:
    """A newer major version too, and a module without its package: one error with the pip command, and nothing written."""
    backend: Any = forge.backends.get("scribe")
    type(backend).versions, type(backend).install = versions, "outside-backend[all]"
    with pytest.raises(forge.SettingsError, match=message):
        forge.sft(**given)
    assert not Path(given["ckpt_output_dir"]).exists()


def test_versions_are_those_of_the_extras() -> None:
    """What a backend accepts is what pip installs for it."""
    extras: Any = PACKAGES["forge"].project["optional-dependencies"]
    for backend in map(forge.backends.get, shipped_names()):
        if backend.requires:
            declared = extras[backend.install.partition("[")[2].rstrip("]")]
            for distribution, wanted in backend.versions.items():
                assert f"{distribution}{wanted}" in declared
            assert backend.versions


def test_names_and_get(installed: Path) -> None:
    """Shipped backends come first; a package that is merely installed replaces none of them."""
    assert forge.backends.names() == [*shipped_names(), "broken", "scribe", "wrong"]
    for name in shipped_names():
        found = forge.backends.get(name)
        assert isinstance(found, Backend)
        assert found.name == name
    assert type(forge.backends.get("forge")).__module__ == "forge.backends._forge"


def test_a_shipped_one_is_found_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that names shipped backends and trackers does not look through all that is installed; another name does."""

    def search(**_: object) -> list[Any]:
        raise LookupError("searched")

    for module in (_backends, _table):
        monkeypatch.setattr(module, "entry_points", search)
    assert [_backends.backend_class(name).name for name in shipped_names()] == shipped_names()
    _table.check_trackers([])
    with pytest.raises(LookupError, match="searched"):
        _backends.backend_class("scribe")
    with pytest.raises(LookupError, match="searched"):
        _table.check_trackers(["tensorboard", "scribe"])


def test_settings_of_a_backend_never_have_the_name_of_a_setting() -> None:
    """A flat name stays unambiguous with every shipped backend and verb."""
    for backend in map(forge.backends.get, shipped_names()):
        own = set() if backend.Settings is None else {field.name for field in backend.Settings.__attrs_attrs__}
        for verb in backend.capabilities().verbs or VERBS:
            assert own.isdisjoint(field.name for _, field in flat_fields(task_of(verb).settings)), (backend.name, verb)


@pytest.mark.slow
def test_the_forge_backend_runs_a_verb_by_name(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """`execute_training` with a verb and a few settings is the same run as the verb itself."""
    given = {"model_path": model_dir, "data_path": chats, "max_steps": 2, "effective_batch_size": 4, "learning_rate": 1e-3}
    plain = forge.sft(**given, ckpt_output_dir=tmp_path / "plain")
    named = forge.backends.get("forge").execute_training({"verb": "sft", **given, "ckpt_output_dir": tmp_path / "named"})
    assert named.loss == plain.loss
    lines = [line for line in (tmp_path / "named" / "config.yaml").read_text().splitlines() if line.startswith("backend:")]
    assert lines == ["backend: forge  # argument"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "verb must be the name of a training verb"),
        ({"verb": "export"}, "verb must be the name of a training verb"),
        ({"verb": "sft", "backend": "scribe"}, "backend=scribe was given to the backend forge"),
        ({"verb": "sft", "model_path": "m", "lr": 1}, "learning_rate"),
    ],
)
def test_parameters_that_are_wrong_are_refused(installed: Path, params: dict[str, Any], message: str) -> None:
    """`execute_training` checks names and values as the verb does."""
    with pytest.raises(forge.SettingsError, match=message):
        forge.backends.get("forge").execute_training(params)


def test_a_run_says_which_backend_made_it(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """config.yaml holds the backend; without the setting it is forge."""
    run = tmp_path / "first"
    forge.sft(model_path=model_dir, data_path=chats, max_steps=1, effective_batch_size=4, ckpt_output_dir=run)
    assert "backend: forge  # default" in (run / "config.yaml").read_text()
    assert "passed_on" not in groups(forge.sft.task.settings)
