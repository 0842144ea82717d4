"""`forge plan`: a saved plan, or one for a store, on the requested ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import forge_data
import forge_packing
from forge.cli import _app as _cli

SAVED = {"batch_size": 4, "max_tokens": 20, "world_size": 2, "seed": 3, "epochs": 2}


@pytest.fixture
def saved(tmp_path: Path) -> forge_packing.BatchPlan:
    """A plan of ten samples, at plan.npz and where a run directory has it."""
    made = forge_packing.plan([7, 3, 9, 4, 4, 12, 5, 6, 2, 8], **SAVED)
    made.save(tmp_path / "plan.npz")
    (tmp_path / "run" / "plan").mkdir(parents=True)
    made.save(tmp_path / "run" / "plan" / "plan.npz")
    return made


@pytest.fixture
def store(tmp_path: Path) -> forge_data.TokenStore:
    """A token store of six samples."""
    rows = tmp_path / "tokens.jsonl"
    rows.write_text("".join(f'{{"input_ids": {[5] * n}, "labels": {[5] * n}, "len": {n}}}\n' for n in (3, 9, 4, 7, 2, 6)))
    return forge_data.TokenStore.from_jsonl(rows, tmp_path / "store")


@pytest.mark.parametrize("place", ["plan.npz", "run", "run/plan", "run/plan/plan.npz"])
def test_a_saved_plan(place: str, saved: forge_packing.BatchPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file, the run directory and the folder in it all name the plan; its summary is printed."""
    assert _cli.main(["plan", str(tmp_path / place)]) == 0
    assert capsys.readouterr().out == saved.summary() + "\n"


def test_other_ranks(saved: forge_packing.BatchPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A saved plan is shown on other ranks and in other micro-batches, a step of it in figures."""
    words = ["--world-size", "3", "--max-tokens-per-gpu", "40", "--step", "2"]
    assert _cli.main(["plan", str(tmp_path / "run"), *words]) == 0
    other = saved.reshape(world_size=3, max_tokens=40)
    said = capsys.readouterr().out
    assert said.startswith(other.summary() + "\nstep 2: 4 samples, ")
    assert f"fill {other.figures(1).fill:.1%}" in said


def test_a_store(store: forge_data.TokenStore, capsys: pytest.CaptureFixture[str]) -> None:
    """A store is planned for as training would plan for it, by the same settings."""
    words = [
        "--effective-batch-size",
        "4",
        "--num-epochs",
        "3",
        "--seed",
        "9",
        "--max-tokens-per-gpu",
        "12",
        "--world-size",
        "2",
    ]
    assert _cli.main(["plan", str(store.path), *words]) == 0
    made = forge_packing.plan(
        store.lengths, batch_size=4, epochs=3, seed=9, max_tokens=12, world_size=2, loss_counts=store.loss_counts
    )
    assert capsys.readouterr().out == made.summary() + "\n"
    assert _cli.main(["plan", str(store.path), *words, "--no-shuffle"]) == 0
    assert ", in the order of the data\n" in capsys.readouterr().out


def test_what_a_plan_for_a_store_assumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No model is known: that samples share what they begin with is assumed, and said. A saved plan assumes nothing."""
    rows, begin = tmp_path / "tokens.jsonl", list(range(20))
    samples = [[*begin, at, at + 1] for at in range(6)]
    rows.write_text("".join(f'{{"input_ids": {ids}, "labels": {ids}, "len": 22}}\n' for ids in samples))
    made = forge_data.TokenStore.from_jsonl(rows, tmp_path / "store")
    assert _cli.main(["plan", str(made.path), "--max-tokens-per-gpu", "40"]) == 0
    said = capsys.readouterr().out
    assert "shared tokens  computed once a micro-batch: 32 tokens in place of 132; 6 micro-batches without that" in said
    assert said.splitlines()[-1].startswith("assumed        a model and settings with which samples can share")
    plan = forge_packing.plan([22] * 6, batch_size=6, max_tokens=40, prefixes=[0] * 6, prefix_tokens=[20])
    plan.save(tmp_path / "plan.npz")
    assert _cli.main(["plan", str(tmp_path / "plan.npz")]) == 0
    assert capsys.readouterr().out == plan.summary() + "\n"


def test_tokens_that_suit_the_machine(store: forge_data.TokenStore, capsys: pytest.CaptureFixture[str]) -> None:
    """Without max_tokens_per_gpu the machine's own is used, as in training, and printed."""
    assert _cli.main(["plan", str(store.path), "--max-steps", "5"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("max_tokens_per_gpu ")
    assert "5 of at most 32 samples" in said


@pytest.mark.slow
def test_a_run_without_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An endless plan is summed up and drawn from its beginning; each of its steps can be shown."""
    endless = forge_packing.plan([3, 9, 4], batch_size=2, max_tokens=12, epochs=None)
    endless.save(tmp_path / "plan.npz")
    words = ["plan", str(tmp_path / "plan.npz"), "--step", str(10**12)]
    assert _cli.main([*words, "--draw", str(tmp_path / "drawing.html")]) == 0
    assert f"step {10**12}: {endless.figures(10**12 - 1).samples} sample" in capsys.readouterr().out
    assert "The first 1,024 steps, measured at" in (tmp_path / "drawing.html").read_text()
    assert _cli.main([*words[:-1], "0"]) == 2
    assert "--step 0 is not in this plan: steps are counted from 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan.npz", "--seed", "1"], "--seed has no effect on"),
        (["plan.npz", "--no-shuffle"], "shuffle has no effect on"),
        (["run", "--effective-batch-size", "8"], "--effective-batch-size has no effect on"),
        (["plan.npz", "--max-tokens-per-gpu", "5"], "--max-tokens-per-gpu 5 is less than the longest sample, 12 tokens"),
        (["plan.npz", "--step", "7"], "--step 7 is not in this plan: it has 6 steps, counted from 1"),
        (["plan.npz", "--step", "0"], "--step 0 is not in this plan"),
        (["plan.npz", "--draw", "x.svg"], "the drawing is a page for a browser"),
        (["plan.npz", "--draw", "nowhere/x.html"], "nowhere/x.html: cannot be written"),
        (["nothing"], "nothing is no plan: give a plan.npz, a run directory"),
        (["."], "is no plan"),
        (["store", "--max-tokens-per-gpu", "8"], "--max-tokens-per-gpu 8 is less than the longest sample, 9 tokens"),
        (["store", "--world-size", "33"], "--effective-batch-size 32 is less than --world-size 33"),
        (["store", "--seed", "-1"], "--seed must be an integer from 0"),
        (["store", "--num-epochs", "0"], "--num-epochs must be an integer of at least 1 or 'inf', got 0"),
        (["tokens.jsonl"], "tokens.jsonl is not a plan"),
    ],
)
def test_refusals(
    words: list[str],
    message: str,
    saved: forge_packing.BatchPlan,
    store: forge_data.TokenStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What cannot be shown gives one message with the reason, exit status 2, and no file."""
    (tmp_path / "plan.npz").rename(tmp_path / "here.npz")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for name in ("run", "store", "tokens.jsonl"):
        (tmp_path / "empty" / name).symlink_to(tmp_path / name)
    (tmp_path / "empty" / "plan.npz").symlink_to(tmp_path / "here.npz")
    before = sorted(path.name for path in (tmp_path / "empty").iterdir())
    if words == ["."]:
        (tmp_path / "empty" / "plan.npz").unlink()
        before.remove("plan.npz")
    assert _cli.main(["plan", *words]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == before


def test_the_drawing_is_written_whole(
    saved: forge_packing.BatchPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--draw writes the page, names it, and leaves nothing else."""
    before = {path.name for path in tmp_path.iterdir()}
    assert _cli.main(["plan", str(tmp_path / "plan.npz"), "--draw", str(tmp_path / "packing.html")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "packing.html")
    assert {path.name for path in tmp_path.iterdir()} == before | {"packing.html"}
    assert (tmp_path / "packing.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_every_setting_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    """`forge plan --help` lists every field of PlanSettings, with its help."""
    assert _cli.main(["plan", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in ("effective-batch-size", "max-tokens-per-gpu", "num-epochs", "max-steps", "seed", "draw", "step"):
        assert f"--{option}" in text
