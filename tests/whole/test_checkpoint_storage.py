"""`checkpoint_storage`: a run whose machine is gone goes on from the copy of its directory, with the same bits."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import forge

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .starts import DROPOUT, RUN, final_state, sft, sft_copied, untimed, weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def given(model_dir: Path, chats: Path) -> dict[str, Any]:
    """Three epochs of four steps, with dropout and a full state and an export a step."""
    return {"model_path": str(model_dir), "data_path": str(chats), "save_samples": 12, **RUN, **DROPOUT}


@pytest.fixture(scope="module")
def untouched(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run, without a copy."""
    run = tmp_path_factory.mktemp("untouched") / "run"
    run_on_ranks(sft, 1, {**given, "ckpt_output_dir": str(run)}, joined=False)
    return run


def copied(settings: dict[str, Any], *moment: Any) -> bool:
    """Whether a start came to its end; False where it was killed."""
    try:
        run_on_ranks(sft_copied, 1, settings, *moment, joined=False)
    except RuntimeError as error:
        if "-9" not in str(error):
            raise
        return False
    return True


def alike(run: Path, untouched: Path) -> None:
    """Raise unless two runs ended the same."""
    assert untimed(run) == untimed(untouched), "every step once, with the same loss, norm, rate and counters"
    assert weights(run) == weights(untouched), "the exported weights, bit for bit"
    assert final_state(run) == final_state(untouched), "weights and optimizer state, bit for bit"
    assert not [*run.rglob(".*")], "nothing half-written is left"


def complete(url: Path) -> int:
    """Step of the newest snapshot, every file of which is there with its bytes; 0 without one."""
    found = sorted(url.glob("snapshots/*.json"))
    if not found:
        return 0
    about = json.loads(found[-1].read_text())
    for file in about["files"].values():
        assert (url / file["at"]).stat().st_size == file["bytes"]
    states = {path.split("/")[1] for path in about["files"] if path.startswith("full_state/step_")}
    return max((int(name.removeprefix("step_")) for name in states), default=0)


@pytest.mark.parametrize("kills", ci_keeps([2], [2, 4, 25]))
def test_killed_and_its_machine_gone(kills: int, given: dict[str, Any], untouched: Path, tmp_path: Path) -> None:
    """Killed while it copies or fetches, its directory lost each time: it goes on from the newest whole copy."""
    draw, killed, round_of, reached = random.Random(3), 0, 0, [0]
    while killed < kills:
        url, run = tmp_path / f"elsewhere {round_of}", tmp_path / f"machine {round_of} {killed}"
        settings = {**given, "ckpt_output_dir": str(run), "checkpoint_storage": f"file://{url}"}
        where = "fetching" if killed % 3 == 2 and reached[-1] else "copying"
        if copied(settings, where, draw.randrange(3, 40), draw.choice(["before", "after"])):
            # It came to its end all the same: the next ones are killed on their way to another copy.
            alike(run, untouched)
            round_of, reached = round_of + 1, [0]
        else:
            killed += 1
            reached.append(complete(url))
        assert reached == sorted(reached)
        shutil.rmtree(run)
    last = tmp_path / "last"
    assert copied({**given, "ckpt_output_dir": str(last), "checkpoint_storage": f"file://{url}"})
    alike(last, untouched)
    assert (f"from file://{url} in" in (last / "log.txt").read_text()) == (reached[-1] > 0)
    # What a finished run's copy holds is the finished run.
    again = tmp_path / "again"
    settings = {**given, "ckpt_output_dir": str(again), "checkpoint_storage": f"file://{url}"}
    assert copied(settings)
    alike(again, untouched)
    assert (again / "result.json").read_bytes() == (last / "result.json").read_bytes()


@pytest.mark.lane
def test_asked_to_stop(given: dict[str, Any], untouched: Path, tmp_path: Path) -> None:
    """SIGTERM: the state is saved and copied before the process ends with 75; another machine goes on from it."""
    url = tmp_path / "elsewhere"
    settings = {**given, "checkpoint_storage": str(url), "full_state_every_steps": 0, "accelerate_full_state_at_epoch": False}
    with pytest.raises(forge.PreemptedError):
        run_on_ranks(
            sft_copied, 1, {**settings, "ckpt_output_dir": str(tmp_path / "a")}, "optimizer", 3, "before", signal.SIGTERM,
            joined=False,
        )  # fmt: skip
    assert complete(url) == 3
    run = tmp_path / "b"
    run_on_ranks(sft_copied, 1, {**settings, "ckpt_output_dir": str(run)}, joined=False)
    assert untimed(run) == untimed(untouched)
    assert weights(run) == weights(untouched)


@pytest.mark.lane
def test_two_ranks(given: dict[str, Any], tmp_path: Path) -> None:
    """The first of two ranks copies and fetches; the losses are those of one rank without a copy."""
    url, runs = tmp_path / "elsewhere", [tmp_path / "a", tmp_path / "b"]
    plain = {name: value for name, value in given.items() if name not in DROPOUT}
    shorter = {**plain, "num_epochs": 1, "lr_scheduler": "constant", "checkpoint_storage": str(url), "nproc_per_node": 2}
    for run, epochs in zip(runs, (1, 2), strict=True):
        forge.sft(**{**shorter, "ckpt_output_dir": str(run), "num_epochs": epochs, "keep_full_state": True})
    whole = tmp_path / "whole"
    forge.sft(**{**shorter, "ckpt_output_dir": str(whole), "num_epochs": 2, "nproc_per_node": 1, "checkpoint_storage": None})
    losses = [[line["loss"] for line in untimed(run) if "loss" in line] for run in (runs[1], whole)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert len(losses[0]) == 8


def test_the_setting_is_refused_where_it_cannot_work(given: dict[str, Any], tmp_path: Path) -> None:
    """Before a row is read, with nothing left behind; a dry run says what the address holds."""
    run = tmp_path / "run"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"cat")
    for url, why in {
        str(tmp_path / "photos"): "is not empty and holds no run",
        str(run / "copy"): "lies in ckpt_output_dir",
        "nosuch://bucket": "Give a URL of fsspec",
    }.items():
        with pytest.raises((forge.RunDirectoryError, forge.SettingsError), match=why):
            forge.sft(**given, ckpt_output_dir=str(run), checkpoint_storage=url)
        assert not run.exists()
    forge.dry_run(forge.sft, **given, ckpt_output_dir=str(run), checkpoint_storage=str(tmp_path / "new"))
    assert not run.exists()
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]


def test_a_path_and_its_url_are_one_place(given: dict[str, Any], tmp_path: Path) -> None:
    """A finished run that is fetched by the other spelling is that run, and is not trained again."""
    url, run = tmp_path / "elsewhere", tmp_path / "run"
    settings = {**given, "ckpt_output_dir": str(run), "max_steps": 1, "save_samples": 0}
    first = forge.sft(**settings, checkpoint_storage=str(url))
    shutil.rmtree(run)
    assert forge.sft(**settings, checkpoint_storage=f"file://{url}") == first


def test_what_was_fetched_for_a_refused_run_does_not_stay(given: dict[str, Any], tmp_path: Path) -> None:
    """The directory is as it was, so that the next command may name it for another run; the copy is untouched."""
    url, settings = tmp_path / "elsewhere", {**given, "max_steps": 1, "keep_full_state": True, "save_samples": 0}
    settings["checkpoint_storage"] = str(url)
    forge.sft(**settings, ckpt_output_dir=str(tmp_path / "run"))
    before = sorted(path.relative_to(url) for path in url.rglob("*"))
    for there in (False, True):
        run = tmp_path / f"again {there}"
        if there:
            run.mkdir()
        with pytest.raises(forge.SettingsError, match="seed"):
            forge.sft(**{**settings, "seed": 7}, ckpt_output_dir=str(run))
        assert run.exists() == there
        assert not there or not [*run.iterdir()]
    assert sorted(path.relative_to(url) for path in url.rglob("*")) == before
    assert forge.sft(**settings, ckpt_output_dir=str(tmp_path / "again False")).steps == 1


@pytest.mark.parametrize("url", ["memory://bucket/run", "memory:///run", "simplecache::memory://run"])
def test_memory_is_no_place_for_a_copy(url: str, given: dict[str, Any], tmp_path: Path) -> None:
    """It ends with the process whose end the copy is for, and no rank or later command sees it."""
    with pytest.raises(forge.SettingsError, match="must outlive the process"):
        forge.sft(**given, ckpt_output_dir=str(tmp_path / "run"), checkpoint_storage=url)
