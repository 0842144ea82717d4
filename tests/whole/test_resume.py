"""Resuming a run: what may change, what may not, damaged states, other processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import forge
import forge_dist
from forge.run import _resume, _run
from forge.run._launching import read_settings, write_settings
from forge.settings._settings import resolve
from forge.verbs._sft import SFTSettings
from forge_dist.loading import _identity

from ..lanes import quick_keeps
from .conftest import conversations, write_rows
from .starts import damaged, metrics, untimed, weights

FEW: dict[str, Any] = {
    "effective_batch_size": 6,
    "max_tokens_per_gpu": 256,
    "learning_rate": 1e-2,
    "full_state_every_steps": 1,
    "keep_full_state": True,
    "num_epochs": 1,
}


@pytest.fixture(scope="module")
def given(model_dir: Path, chats: Path) -> dict[str, Any]:
    """Four steps of one epoch."""
    return {"model_path": str(model_dir), "data_path": str(chats), **FEW}


@pytest.fixture(scope="module")
def finished(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run."""
    return forge.sft(**given, ckpt_output_dir=tmp_path_factory.mktemp("finished") / "run").output_dir


@pytest.fixture
def left(finished: Path, tmp_path: Path) -> Path:
    """The same run as if it had been killed after step 4 was saved, and before anything was measured or exported."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "result.json").unlink()
    shutil.rmtree(run / "hf_format")
    return run


def log(run: Path) -> str:
    """The log of all starts."""
    return (run / "log.txt").read_text()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 7}, "seed=42, and now `seed` is 7"),
        ({"shuffle": False}, "shuffle=true, and now `shuffle` is false"),
        ({"effective_batch_size": 5}, "effective_batch_size=6, and now `effective_batch_size` is 5"),
        ({"learning_rate": 2e-2}, "learning_rate=0.01, and now `learning_rate` is 0.02"),
        ({"num_epochs": 2}, "num_epochs=1, and now `num_epochs` is 2.*lr_scheduler=cosine over that length"),
        ({"adapter": "lora"}, "adapter"),
        ({"max_seq_len": 40}, "a run with no max_seq_len, and now `max_seq_len` is 40.*Leave max_seq_len out"),
    ],
)
def test_what_would_change_the_past_is_refused(change: dict[str, Any], named: str, given: dict[str, Any], left: Path) -> None:
    """The setting is named with both values and the way out; the run is left as it was."""
    before = {file: file.read_bytes() for file in left.rglob("*") if file.is_file()}
    with pytest.raises(forge.SettingsError, match=named) as caught:
        forge.sft(**{**given, **change}, ckpt_output_dir=left)
    assert caught.value.exit_status == 2
    assert {file: file.read_bytes() for file in left.rglob("*") if file.is_file()} == before


def test_other_rows_are_refused(given: dict[str, Any], left: Path, tmp_path: Path) -> None:
    """Rows that changed under the same settings are detected by their tokens; the run's own store stays."""
    rows = conversations()
    rows[3]["messages"][1]["content"] += "!"
    before = {file: file.read_bytes() for file in (left / "data").rglob("*") if file.is_file()}
    with pytest.raises(forge.SettingsError, match="the rows of data_path are not those"):
        forge.sft(**{**given, "data_path": str(write_rows(tmp_path / "other.jsonl", rows))}, ckpt_output_dir=left)
    assert {file: file.read_bytes() for file in (left / "data").rglob("*") if file.is_file()} == before


def other_model(given: dict[str, Any], folder: Path) -> str:
    """Another model of the same shape, with the same tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(given["model_path"])
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(given["model_path"]).save_pretrained(folder)
    return str(folder)


def content(run: Path) -> dict[Path, bytes]:
    """Every file of a run."""
    return {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}


def test_another_base_is_refused(given: dict[str, Any], left: Path, tmp_path: Path) -> None:
    """A run is not resumed with another model of the same shape."""
    with pytest.raises(forge.SettingsError, match="the model in model_path is not the one that its run began with"):
        forge.sft(**{**given, "model_path": other_model(given, tmp_path / "other")}, ckpt_output_dir=left)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Models' files are hashed only once the model is loaded, as those of a large one may be; which were."""
    hashed: list[Path] = []
    loaded, content_of, load = threading.Event(), _identity._content, _run.load_with_attention

    def late(file: Any) -> bytes:
        assert loaded.wait(300), "the run waited for its model's hashes before it loaded it"
        hashed.append(file[0])
        return content_of(file)

    def loading(*given: Any) -> Any:
        found = load(*given)
        loaded.set()
        return found

    _identity._digest.cache_clear()
    monkeypatch.setattr(_identity, "_content", late)
    monkeypatch.setattr(_run, "load_with_attention", loading)
    monkeypatch.setattr(_resume, "_SHORT_SECONDS", 0.05)
    return hashed


def test_a_large_model_is_hashed_beside_what_comes_before_training(
    given: dict[str, Any], finished: Path, tmp_path: Path, large: list[Path]
) -> None:
    """The start does not wait for it until the model is loaded, reads each file once, and records the same identity."""
    run = forge.sft(**given, ckpt_output_dir=tmp_path / "run").output_dir
    assert large == [Path(given["model_path"], "model.safetensors")]
    known, expected = (json.loads((path / "run.json").read_text()) for path in (run, finished))
    assert known.keys() == expected.keys()
    assert {**known, "run": ""} == {**expected, "run": ""}
    assert known["model"] == forge_dist.model_identity(given["model_path"])
    assert weights(run) == weights(finished)


def test_another_large_base_is_refused(given: dict[str, Any], left: Path, tmp_path: Path, large: list[Path]) -> None:
    """As any other, once it is read: before the first step, and with the run as it was."""
    before = content(left)
    with pytest.raises(forge.SettingsError, match="the model in model_path is not the one that its run began with"):
        forge.sft(**{**given, "model_path": other_model(given, tmp_path / "other")}, ckpt_output_dir=left)
    assert [file.parent.name for file in large] == ["other"]
    assert content(left) == before


def test_a_large_base_is_known_again(given: dict[str, Any], left: Path, finished: Path, large: list[Path]) -> None:
    """The same model, read late, goes on."""
    forge.sft(**given, ckpt_output_dir=left)
    assert len(large) == 1
    assert weights(left) == weights(finished)


def test_another_large_base_is_said_before_its_rows(
    given: dict[str, Any], left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the rows or the settings do not fit either, the model that is read still is waited for, and said first."""
    monkeypatch.setattr(_resume, "_SHORT_SECONDS", 0.05)
    _identity._digest.cache_clear()
    content_of = _identity._content
    monkeypatch.setattr(_identity, "_content", lambda file: time.sleep(0.3) or content_of(file))
    other = {"model_path": other_model(given, tmp_path / "other"), "seed": 7}
    with pytest.raises(forge.SettingsError, match="the model in model_path is not the one that its run began with"):
        forge.sft(**{**given, **other}, ckpt_output_dir=left)


def test_what_leaves_the_past_alone_is_accepted(given: dict[str, Any], left: Path, finished: Path) -> None:
    """Other micro-batches, data paths and saving: the run is resumed, logs what changed, and updates config.yaml."""
    moved = shutil.copy(given["data_path"], left.parent / "moved.jsonl")
    change = {"data_path": str(moved), "max_tokens_per_gpu": 128, "logging_steps": 2, "keep_last_n": 3}
    forge.sft(**{**given, **change}, ckpt_output_dir=left)
    assert "changed since then: max_tokens_per_gpu: 256 → 128" in log(left)
    assert "max_tokens_per_gpu: 128" in (left / "config.yaml").read_text()
    assert untimed(left) == untimed(finished)
    assert weights(left) == weights(finished)


@pytest.mark.slow
def test_a_run_of_constant_rate_can_go_on_for_longer(given: dict[str, Any], tmp_path: Path) -> None:
    """With a constant rate more epochs continue from the end, as if they had been given at once."""
    constant = {**given, "lr_scheduler": "constant"}
    forge.sft(**constant, ckpt_output_dir=tmp_path / "run")
    result = forge.sft(**{**constant, "num_epochs": 2}, ckpt_output_dir=tmp_path / "run")
    assert result.steps == 8
    at_once = forge.sft(**{**constant, "num_epochs": 2}, ckpt_output_dir=tmp_path / "at_once")
    assert untimed(tmp_path / "run") == untimed(tmp_path / "at_once")
    name = "model.safetensors"
    assert (result.model_dir / name).read_bytes() == (at_once.model_dir / name).read_bytes()


def test_a_finished_run_of_a_version_without_a_setting(given: dict[str, Any], finished: Path, tmp_path: Path) -> None:
    """It is finished where the setting is what its run had, and another run where it is not."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    recipe = run / "config.yaml"
    lines = recipe.read_text().splitlines(keepends=True)
    # `loss` is new of distill alone.
    lines = [line for line in lines if (name := line.split(":")[0]) == "loss" or name not in _resume.ADDED]
    recipe.write_text("".join(lines))
    asked = {**given, "ckpt_output_dir": str(run)}
    same, other = (resolve(SFTSettings, ("argument", asked | more)) for more in ({}, {"shuffle": False}))
    assert _resume.is_finished(run, same, "sft")
    assert not _resume.is_finished(run, other, "sft")
    assert not _resume.is_finished(run, same, "osft"), "a run of another verb, which has the same settings"


@pytest.mark.slow
def test_resume_never_and_resume_from_a_path(given: dict[str, Any], left: Path, finished: Path) -> None:
    """`resume=never` refuses the run; a path resumes from that very state, and later steps are made again."""
    with pytest.raises(forge.RunDirectoryError, match="resume=never"):
        forge.sft(**given, ckpt_output_dir=left, resume="never")
    forge.sft(**given, ckpt_output_dir=left, resume=str(left / "full_state" / "step_3"))
    assert "resuming after step 3" in log(left)
    assert untimed(left) == untimed(finished)
    assert weights(left) == weights(finished)
    with pytest.raises(forge.SettingsError, match="step_99: there is no such full state"):
        shutil.rmtree(left / "hf_format")
        (left / "result.json").unlink()
        forge.sft(**given, ckpt_output_dir=left, resume=str(left / "full_state" / "step_99"))


@pytest.mark.parametrize(
    ("name", "how"),
    quick_keeps(
        [("rank_0.safetensors", "swapped"), ("manifest.json", "truncated")],
        list(product(["rank_0.safetensors", "manifest.json"], ["deleted", "truncated", "bit flipped", "swapped"])),
    ),
)
def test_a_damaged_state_is_passed_over(name: str, how: str, given: dict[str, Any], left: Path, finished: Path) -> None:
    """It is named in the log and skipped; resumed from the state before it, the run ends with the same bits."""
    newest, before = left / "full_state" / "step_4", left / "full_state" / "step_3"
    damaged(newest / name, how, before / name)
    forge.sft(**given, ckpt_output_dir=left)
    assert "step_4" in log(left).split("resuming after step 3")[0].rsplit("resuming it", 1)[1]
    assert untimed(left) == untimed(finished)
    assert weights(left) == weights(finished)


def test_nothing_whole_is_an_error(given: dict[str, Any], left: Path) -> None:
    """Where every state is damaged the run is refused, not begun anew."""
    for state in (left / "full_state").glob("step_*"):
        (state / "manifest.json").write_text("{")
    with pytest.raises(forge.dist.CheckpointError, match="step_4"):
        forge.sft(**given, ckpt_output_dir=left)
    assert len(metrics(left)) == 4


@pytest.mark.parametrize(
    ("name", "how"),
    quick_keeps(
        [("loss_mask.bin", "bit flipped")],
        [("loss_mask.bin", "bit flipped"), ("offsets.bin", "truncated"), ("store.json", "deleted")],
    ),
)
def test_a_damaged_token_store_is_made_again(name: str, how: str, given: dict[str, Any], left: Path, finished: Path) -> None:
    """It is named in the log and made of the rows again; resumed before step 4, the run ends with the same bits."""
    shutil.rmtree(left / "full_state" / "step_4")
    damaged(left / "data" / "train" / name, how, left)
    forge.sft(**given, ckpt_output_dir=left)
    assert re.search(rf"WARNING: {left}/data/train.*It was made again from the rows of data_path", log(left))
    forge.data.TokenStore.open(left / "data" / "train").verify()
    assert untimed(left) == untimed(finished)
    assert weights(left) == weights(finished)


def test_a_lost_token_store_is_made_again(given: dict[str, Any], left: Path, finished: Path) -> None:
    """A run without its data folder gets it back from the rows."""
    shutil.rmtree(left / "data")
    forge.sft(**given, ckpt_output_dir=left)
    assert {file.name for file in (left / "data" / "train").iterdir()} >= {"store.json", "loss_mask.bin", "tokenizer"}
    assert weights(left) == weights(finished)


@pytest.mark.parametrize("how", quick_keeps(["bit flipped"], ["deleted", "truncated", "bit flipped"]))
def test_a_damaged_plan_is_made_again(how: str, given: dict[str, Any], left: Path, finished: Path) -> None:
    """A plan that was lost is made again, and known by the fingerprint of its order; without that it is refused."""
    plan, about = left / "plan" / "plan.npz", left / "run.json"
    order = forge.packing.BatchPlan.load(plan).order_fingerprint
    damaged(plan, how, plan)
    recorded = about.read_text()
    about.write_text(json.dumps({name: value for name, value in json.loads(recorded).items() if name != "order"}))
    with pytest.raises(forge.SettingsError, match=r"plan/plan\.npz cannot be read .* would prove another plan equal"):
        forge.sft(**given, ckpt_output_dir=left)
    about.write_text(recorded)
    forge.sft(**given, ckpt_output_dir=left)
    assert re.search(r"WARNING: .*plan.* It was made again: it takes the samples in the run's order", log(left))
    assert forge.packing.BatchPlan.load(plan).order_fingerprint == order
    assert weights(left) == weights(finished)


@pytest.mark.slow
def test_a_damaged_store_of_other_rows_is_refused(given: dict[str, Any], left: Path, tmp_path: Path) -> None:
    """Rows that do not prove a damaged or replaced store equal do not become one; the run is left as it was."""
    changed = {**given, "data_path": str(write_rows(tmp_path / "other.jsonl", conversations()[1:]))}
    damaged(left / "data" / "train" / "loss_mask.bin", "bit flipped", left)
    before = {file: file.read_bytes() for file in (left / "data").rglob("*") if file.is_file()}
    with pytest.raises(forge.SettingsError, match=r"the rows of data_path.*SHA-256 is [0-9a-f]{64}, and [0-9a-f]{64} was"):
        forge.sft(**changed, ckpt_output_dir=left)
    assert {file: file.read_bytes() for file in (left / "data").rglob("*") if file.is_file()} == before
    # Whole, and of other rows: neither the rows nor the store that was put there are the run's.
    forge.sft(**changed, ckpt_output_dir=tmp_path / "other")
    shutil.rmtree(left / "data" / "train")
    shutil.copytree(tmp_path / "other" / "data" / "train", left / "data" / "train")
    with pytest.raises(forge.SettingsError, match="are not those that its run was made with"):
        forge.sft(**changed, ckpt_output_dir=left)
    forge.sft(**given, ckpt_output_dir=left)
    assert "was replaced: its fingerprint is" in log(left)


@pytest.mark.slow
def test_bytes_damaged_while_training_are_never_saved(
    given: dict[str, Any], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte flipped in step 3 stops the run at its next save; a file that is only touched does not; then it goes on."""
    import torch

    run, step, calls = tmp_path / "run", torch.optim.AdamW.step, []

    def damaging(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            os.utime(run / "data" / "train" / "input_ids.bin")
        if len(calls) == 3:
            with (run / "data" / "train" / "loss_mask.bin").open("r+b") as mask:
                mask.seek(-1, os.SEEK_END)
                mask.write(b"\x07")
        return step(*args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", damaging)
    with pytest.raises(forge.data.StoreError, match=r"loss_mask\.bin does not hold .* is stopped before it saves"):
        forge.sft(**given, ckpt_output_dir=run)
    assert len(calls) == 3
    assert (run / "full_state" / "latest").read_text().strip() == "step_2"
    forge.sft(**given, ckpt_output_dir=run)
    assert "resuming after step 2" in log(run)
    assert untimed(run) == untimed(finished)
    assert weights(run) == weights(finished)


@pytest.mark.parametrize("resumed", [pytest.param(False, id="new"), pytest.param(True, id="resumed", marks=pytest.mark.slow)])
def test_bytes_damaged_before_the_first_step_are_never_trained_on(
    resumed: bool, given: dict[str, Any], left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte flipped once the store was verified, while the model is loaded, stops the run before it makes a step."""
    import torch

    run = left if resumed else tmp_path / "new"
    make, steps = forge.algos.make_optimizer, []

    def damaging(*args: Any, **kwargs: Any) -> Any:
        root = run if resumed else run / ".forge-preparing"
        damaged(root / "data" / "train" / "loss_mask.bin", "bit flipped", run)
        return make(*args, **kwargs)

    if resumed:
        shutil.rmtree(left / "full_state" / "step_4")
    with monkeypatch.context() as patched:
        patched.setattr(forge.algos, "make_optimizer", damaging)
        patched.setattr(torch.optim.AdamW, "step", lambda *_args, **_kwargs: steps.append(1))
        with pytest.raises(forge.data.StoreError, match=r"loss_mask\.bin does not hold what was written") as caught:
            forge.sft(**given, ckpt_output_dir=run)
    # The hidden folder is gone by then: the file is named as it is called in a run.
    assert str(run / "data" / "train" / "loss_mask.bin") in str(caught.value)
    assert not steps
    forge.sft(**given, ckpt_output_dir=run)
    assert len(metrics(run)) == 4


@pytest.mark.slow
def test_a_store_is_verified_once_a_start(given: dict[str, Any], left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of the store is hashed once at a run's beginning and once when it is resumed."""
    import hashlib

    digest, read = hashlib.file_digest, []

    def noting(file: Any, name: str) -> Any:
        if "data/train" in file.name:
            read.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", noting)
    for run in (left, left.parent / "begun"):
        forge.sft(**given, ckpt_output_dir=run)
        assert sorted(read) == sorted(Path(name).name for name in forge.data.TokenStore.open(left / "data" / "train").sha256)
        read.clear()


def test_cut_metrics_are_refused(given: dict[str, Any], left: Path) -> None:
    """A metrics.jsonl that was cut is refused; one that was removed begins anew, with a warning."""
    whole = (left / "metrics.jsonl").read_text()
    (left / "metrics.jsonl").write_text(whole[:200])
    with pytest.raises(forge.RunDirectoryError, match=r"metrics\.jsonl"):
        forge.sft(**given, ckpt_output_dir=left)
    (left / "metrics.jsonl").unlink()
    forge.sft(**given, ckpt_output_dir=left)
    assert "WARNING: metrics.jsonl was lost; it begins anew after step 4" in log(left)


def test_a_step_that_is_not_finite_names_its_samples(given: dict[str, Any], tmp_path: Path) -> None:
    """The error has the rows of the step and the last good state; the optimizer did not move."""
    with pytest.raises(forge.algos.DivergedError, match=r"chats\.jsonl:\d+, .*last good state is .*step_1") as caught:
        forge.sft(
            **{**given, "learning_rate": 1e6, "max_grad_norm": 0.0, "async_save": False}, ckpt_output_dir=tmp_path / "run"
        )
    assert caught.value.exit_status == 1


def test_skipped_steps_are_counted(given: dict[str, Any], tmp_path: Path) -> None:
    """`on_nan=skip` leaves such steps out and marks them in metrics.jsonl, which stays valid JSON."""
    settings = {**given, "learning_rate": 1e6, "max_grad_norm": 0.0, "on_nan": "skip"}
    forge.sft(**settings, ckpt_output_dir=tmp_path / "run")
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line.get("skipped", False) for line in lines] == [False, True, True, True]


@pytest.mark.slow
def test_a_second_run_is_refused_while_the_first_lives(given: dict[str, Any], left: Path) -> None:
    """The lock is held by the process, so that it is released with its owner; nothing is touched."""
    hold = (
        "import sys, time; from forge.run._run_directory import RunDirectory\n"
        "with RunDirectory(sys.argv[1]):\n    print('in', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", hold, str(left)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "in\n"
        with pytest.raises(forge.RunDirectoryError, match="another run is writing to it now"):
            forge.sft(**given, ckpt_output_dir=left)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert forge.sft(**given, ckpt_output_dir=left).steps == 4


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_whose_directory_was_taken_over_commits_nothing(
    async_save: bool, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on no full state, no export and no result appears; status 1, and the same command goes on from before."""
    from forge.run._run_directory import RunDirectory

    run, written = tmp_path / "run", RunDirectory.metrics

    def lose(out: RunDirectory, values: Any) -> None:
        written(out, values)
        if values["step"] == 3:
            for record in run.glob(".forge-owner-*"):
                record.unlink()

    monkeypatch.setattr(RunDirectory, "metrics", lose)
    settings = {**given, "async_save": async_save, "checkpoint_at_epoch": True, "ckpt_output_dir": run}
    with pytest.raises(forge.RunTakenOverError, match="lost it and ends without writing anything more") as caught:
        forge.sft(**settings)
    assert caught.value.exit_status == 1
    # In the background the state of step 2 may not have been finished when the directory was lost.
    states = sorted(state.name for state in (run / "full_state").glob("step_*"))
    assert states in ([["step_1"], ["step_1", "step_2"]] if async_save else [["step_1", "step_2"]])
    assert not (run / "hf_format").exists() or not any((run / "hf_format").iterdir())
    assert not (run / "result.json").exists()
    assert "failed" not in log(run)
    monkeypatch.undo()
    assert forge.sft(**settings).steps == 4


def test_settings_travel_to_workers_with_their_origins(given: dict[str, Any], tmp_path: Path) -> None:
    """Settings that a launcher writes for its workers keep every value and every origin."""
    s = resolve(
        SFTSettings,
        ("recipe r.yaml", {"target_modules": ["q_proj"], "adapter": "lora"}),
        ("flag", {**given, "ckpt_output_dir": "x"}),
    )
    write_settings(s, tmp_path / "settings.json")
    assert read_settings(forge.sft.task, tmp_path / "settings.json") == s


def test_a_run_without_its_states_is_not_begun_anew(given: dict[str, Any], finished: Path, tmp_path: Path) -> None:
    """A finished run copied without its states is still finished; changed settings are refused, nothing deleted."""
    run = tmp_path / "run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("full_state"))
    assert forge.sft(**given, ckpt_output_dir=run).steps == 4
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with pytest.raises(forge.RunDirectoryError, match=r"these settings ask for another one \(`logging_steps`: 1 → 3\)\. "):
        forge.sft(**{**given, "logging_steps": 3, "quiet": True}, ckpt_output_dir=run)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_state_of_another_directory_begins_a_run(given: dict[str, Any], finished: Path, tmp_path: Path) -> None:
    """`resume=PATH` may name a state of another directory: a new run continues from it, with the same bits."""
    result = forge.sft(**given, ckpt_output_dir=tmp_path / "run", resume=str(finished / "full_state" / "step_3"))
    assert weights(result.output_dir) == weights(finished)
    assert [line["step"] for line in metrics(result.output_dir)] == [4]


@pytest.mark.slow
def test_a_foreign_state_is_passed_over(given: dict[str, Any], left: Path, finished: Path, tmp_path: Path) -> None:
    """A whole state of another run is named in the log and skipped for the run's own."""
    other = forge.sft(**{**given, "seed": 7}, ckpt_output_dir=tmp_path / "other").output_dir
    shutil.rmtree(left / "full_state" / "step_4")
    shutil.copytree(other / "full_state" / "step_4", left / "full_state" / "step_4")
    forge.sft(**given, ckpt_output_dir=left)
    assert "step_4 is of another run and is passed over" in log(left)
    assert "resuming after step 3" in log(left)
    assert weights(left) == weights(finished)


@pytest.mark.slow
def test_going_back_forgets_what_came_after(given: dict[str, Any], finished: Path, tmp_path: Path) -> None:
    """Killed after it went back to an earlier state, the run resumes there: later states and metrics are gone."""
    from ..ranks import run_on_ranks
    from .starts import sft, sft_with_signal

    run = tmp_path / "run"
    shutil.copytree(finished, run)
    settings = {**given, "ckpt_output_dir": str(run)}
    with pytest.raises(RuntimeError, match="-9"):
        back = {**settings, "resume": str(run / "full_state" / "step_3")}
        run_on_ranks(sft_with_signal, 1, back, "optimizer", 1, "before", joined=False)
    run_on_ranks(sft, 1, settings, joined=False)
    assert untimed(run) == untimed(finished)
    assert weights(run) == weights(finished)


def test_a_request_that_left_out_what_was_asked_for_is_another_one(given: dict[str, Any], finished: Path) -> None:
    """A setting that the run was given and that is now left out is refused by name, finished or not."""
    fewer = {name: value for name, value in given.items() if name != "effective_batch_size"}
    with pytest.raises(forge.SettingsError, match="effective_batch_size=6"):
        forge.sft(**fewer, ckpt_output_dir=finished)


@pytest.mark.slow
def test_a_run_cannot_become_shorter_than_it_is(given: dict[str, Any], tmp_path: Path) -> None:
    """With a constant rate a length may grow; one below what was trained is refused."""
    constant = {**given, "lr_scheduler": "constant", "num_epochs": 2}
    forge.sft(**constant, ckpt_output_dir=tmp_path / "run")
    with pytest.raises(forge.SettingsError, match="is of step 8, and num_epochs, max_steps or max_tokens now ask for 4 steps"):
        forge.sft(**{**constant, "num_epochs": 1}, ckpt_output_dir=tmp_path / "run")
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_a_finished_run_keeps_no_state(given: dict[str, Any], tmp_path: Path) -> None:
    """Its states are removed at its end, so that it returns its result again and is refused more steps by name."""
    short = {**given, "keep_full_state": False, "max_steps": 1, "num_epochs": None, "lr_scheduler": "constant"}
    run = tmp_path / "run"
    first = forge.sft(**short, ckpt_output_dir=run)
    assert not (run / "full_state").exists()
    assert forge.sft(**short, ckpt_output_dir=run) == first
    with pytest.raises(forge.RunDirectoryError, match=r"its run is finished.*keep_full_state=true keeps it"):
        forge.sft(**{**short, "max_steps": 2}, ckpt_output_dir=run)
    assert first.model_dir.is_dir()
    kept = {**short, "accelerate_full_state_at_epoch": True}
    forge.sft(**kept, ckpt_output_dir=tmp_path / "kept")
    assert forge.sft(**{**kept, "max_steps": 2}, ckpt_output_dir=tmp_path / "kept").steps == 2
