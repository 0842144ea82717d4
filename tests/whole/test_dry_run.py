"""What is known before a run costs anything: --dry-run, the memory plan, and the order of the checks."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import sys
from contextlib import nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import forge
import forge_algos
from forge.cli._app import main
from forge.memory import _changes, _tokens
from forge.memory._forecast import Rehearsed, plan_of
from forge.memory._plans import PLANNING
from forge.run import _memory, _prepare

from ..lanes import ci_keeps
from .conftest import write_rows
from .verbs import VERBS, settings_of

if TYPE_CHECKING:
    from pathlib import Path


def words_of(settings: dict[str, Any]) -> list[str]:
    """Settings as flags."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def given(model_dir: Path, chats: Path) -> dict[str, Any]:
    """Settings of a short run."""
    return {"model_path": str(model_dir), "data_path": str(chats), "max_steps": 2, "effective_batch_size": 4}


@pytest.mark.slow
def test_a_dry_run_says_what_would_happen(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 0 for what fits, steps and memory and exports in words, and no directory."""
    path = tmp_path / "deep" / "run"
    assert main(["sft", *words_of(given), "--ckpt-output-dir", str(path), "--dry-run", "--for", "2xH100-80GB"]) == 0
    shown = capsys.readouterr()
    assert "steps: 2, 8 samples in all" in shown.out
    assert "exports: 1" in shown.out
    assert re.search(r"  memory: [\d.]+ MiB at the peak \(step\), of the 79.50 GiB that 80.00 GiB leave", shown.out)
    assert "chosen, device, compile and kernels for this machine:\n" in shown.out
    assert "memory on 2xH100-80GB, on each of 2 ranks" in shown.err
    assert "it fits" in shown.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_computes_as_one_of_its_ranks(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hours of a run of two processes are those of half of the cores; the threads of this process stay."""
    import torch

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("forge_dist.environment._topology._cores", lambda: 6)
    monkeypatch.setattr("forge_accel.devices._cpu.missing_compiler", lambda: "")
    monkeypatch.setattr("forge.run._prepare.operations_of", lambda *_: 1e18)
    before = torch.get_num_threads()
    for processes, hours in (2, "925.9 hours by 3 threads"), (3, "1,388.9 hours by 2 threads"):
        found = forge.dry_run(forge.sft, **given, nproc_per_node=processes, device="cpu", ckpt_output_dir=str(tmp_path / "run"))
        assert hours in str(found)
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_what_comes_before_the_first_row_is_said(
    given: dict[str, Any], chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another run's record the directory it writes to; what is loaded and read, where that takes its time."""
    monkeypatch.setattr("forge._progress._SHORT_SECONDS", 0.0)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "run.json").write_text("{}")
    (moved / "config.yaml").write_text(json.dumps(given | {"ckpt_output_dir": str(tmp_path / "first")}))
    assert main(["sft", str(moved / "config.yaml"), "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert f"WARNING: {moved / 'config.yaml'} is of the run in {moved}, and its ckpt_output_dir is {tmp_path / 'first'}" in said
    first = said.index(f"{chats}: read ")
    for line in (f"loading the tokenizer of {given['model_path']} ...\n", f"reading {chats} ...\n"):
        assert 0 <= said.find(line) < first, line


@pytest.mark.slow
def test_a_dry_run_reads_no_weights(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers of the files tell what it needs; a 70B's weights are read for minutes. Where a run is there it compares them."""
    read: list[str] = []

    def identify(path: str) -> str:
        read.append(path)
        return "0" * 64

    monkeypatch.setattr("forge_dist.loading._identity.model_identity", identify)
    words = ["sft", *words_of(given), "--ckpt-output-dir", str(tmp_path / "run")]
    assert main([*words, "--dry-run"]) == 0
    assert not read
    assert main(words) == 0
    assert main([*words, "--dry-run", "--learning-rate", "0.1"]) == 2
    assert len(read) >= 2


@pytest.mark.slow
def test_a_plan_for_another_machine_needs_no_weights(
    given: dict[str, Any], model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shapes are those of config.json: the same bytes as with the weights. This machine needs them, as the run does."""
    bare = shutil.copytree(model_dir, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    given = {**given, "max_tokens_per_gpu": 256, "ckpt_output_dir": tmp_path / "run"}
    found = [forge.dry_run(forge.sft, **{**given, "model_path": path}, machine="80GB") for path in (model_dir, bare)]
    assert found[0].memory == found[1].memory
    assert f"{bare} holds no weights: shapes are those of its config.json" in capsys.readouterr().err
    for call in (forge.sft, partial(forge.dry_run, forge.sft)):
        with pytest.raises(forge.dist.ModelError, match="no complete weights: .* dry run for another machine, with --for"):
            call(**{**given, "model_path": bare})
    (bare / "model.safetensors").write_bytes(b"")
    with pytest.raises(forge.dist.ModelError, match="broken weights"):
        forge.dry_run(forge.sft, **{**given, "model_path": bare}, machine="80GB")


@pytest.mark.slow
def test_a_plan_for_another_machine_is_not_refused_by_the_disk_of_this_one(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this machine would refuse for want of room is planned for another with a warning."""
    full = SimpleNamespace(total=10**6, used=10**6, free=1000)
    monkeypatch.setattr("forge.saving._room.shutil.disk_usage", lambda _: full)
    with pytest.raises(forge.RunDirectoryError, match="less room than the run takes"):
        forge.dry_run(forge.sft, **given, ckpt_output_dir=tmp_path / "run")
    found = forge.dry_run(forge.sft, **given, ckpt_output_dir=tmp_path / "run", machine="80GB")
    assert "WARNING: the disk has less room than that" in found


@pytest.mark.slow
def test_self_distillation_is_planned(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SDFT samples with the model itself and has no `sampler`; its plan is computed all the same."""
    forge.dry_run(forge.sdft, **given, max_new_tokens=4, ckpt_output_dir=tmp_path / "run", machine="80GB")
    assert "it fits" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_leaves_the_environment_as_it_was(given: dict[str, Any], tmp_path: Path) -> None:
    """What DeepSpeed reads at its import is gone again: the next run of this process is no half of a launcher's."""
    before = {name: value for name, value in os.environ.items() if "RANK" in name}
    forge.dry_run(forge.sft, **given, strategy="zero1", ckpt_output_dir=tmp_path / "run")
    assert {name: value for name, value in os.environ.items() if "RANK" in name} == before
    forge.dry_run(forge.sft, **given, ckpt_output_dir=tmp_path / "run")


@pytest.mark.slow
def test_a_dry_run_leaves_a_run_as_it_was(given: dict[str, Any], tmp_path: Path) -> None:
    """Of a finished run it says so; with other settings it refuses as the run would; no file changes."""
    forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")}
    assert "finished" in forge.dry_run(forge.sft, **given, ckpt_output_dir=tmp_path / "run")
    with pytest.raises(forge.ForgeError):
        forge.dry_run(forge.sft, **{**given, "learning_rate": 1e-3}, ckpt_output_dir=tmp_path / "run")
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")} == before


@pytest.mark.lane
@pytest.mark.slow
def test_what_does_not_fit_says_what_to_set(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The changes are tried, and each takes less than the plan."""
    found = forge.dry_run(forge.sft, **given, max_tokens_per_gpu=512, ckpt_output_dir=tmp_path / "run", machine="0.501GB")
    shown = " ".join(capsys.readouterr().err.split())
    assert "would not fit" in found
    assert "does NOT fit" in shown
    for setting in (
        "max_tokens_per_gpu=",
        "activation_checkpointing=selective",
        "activation_checkpointing=full",
        "adapter=lora",
    ):
        assert f"\n  {setting}" in found


@pytest.fixture
def tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what may lower a plan only micro-batches and long rows are tried: each other setting is one more rehearsal."""
    monkeypatch.setattr(_changes, "_changes", lambda _: [])


@pytest.fixture
def with_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other settings that may lower a plan only the adapter is tried."""
    every = _changes._changes
    monkeypatch.setattr(_changes, "_changes", lambda planned: [each for each in every(planned) if "adapter" in each[0]])


def mib(text: str, pattern: str) -> list[float]:
    """Numbers of MiB in a text, one for each place that matches."""
    return [float(number) for number in re.findall(pattern + r" +([\d.]+) MiB", text)]


@pytest.mark.slow
@pytest.mark.usefixtures("with_an_adapter")
@pytest.mark.parametrize("steps", ci_keeps(["2"], ["1", "2"]))
def test_a_plan_left_open_is_that_with_the_same_tokens(
    steps: str, given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same bytes for as many steps, and flags with which it takes less; a script reads from the status that it lacks."""
    words = words_of({**given, "max_steps": steps, "ckpt_output_dir": tmp_path / "run"})
    seen = []
    for tokens in ("", "chosen"):
        more = ["--max-tokens-per-gpu", seen[0][2]] if tokens else []
        assert main(["sft", *words, *more, "--dry-run", "--for", "0.5005GB"]) == 2
        shown = capsys.readouterr()
        assert "a plan may fill 0.5 MiB (95% of the 0.5 MiB that 512.5 MiB leave beside a chip's context)" in shown.err
        (most,), less = mib(shown.err, "does NOT fit: the step takes"), mib(shown.out, r"\n  --\w[^:]*:")
        assert less
        assert max(less) <= most, "rounded; one with which it takes as much is not offered"
        assert re.search(r"\n  --adapter lora: [\d.]+ MiB, which (fits|does not fit yet); ", shown.out)
        assert "It would not fit into memory: the step takes" in shown.out
        assert "--" not in shown.err, "a plan is part of the log, whose names are those of recipes"
        seen.append((most, less, *re.findall(r"--max-tokens-per-gpu (\d+): memory", shown.out)))
    assert seen[0][:2] == seen[1][:2]


@pytest.mark.slow
def test_whether_it_fits_is_a_field(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures for a script, beside the text; the status is of the field, whatever the text holds."""
    given = {**given, "max_tokens_per_gpu": 512}
    lacks = forge.dry_run(forge.sft, **given, ckpt_output_dir=tmp_path / "run", machine="0.501GB")
    assert lacks.fits is False
    assert lacks.phase == "step"
    assert lacks.memory is not None
    assert lacks.available_bytes == int(0.95 * lacks.memory["limit"])
    assert lacks.peak_bytes > lacks.available_bytes
    assert lacks.peak_bytes == max(phase["planned"] for phase in lacks.memory["phases"])
    assert {"adapter": "lora"} in [each["settings"] for each in lacks.suggestions]
    for each in lacks.suggestions:
        assert each["planned"] < lacks.peak_bytes
        assert each["fits"] is (each["planned"] <= lacks.available_bytes)
    assert pickle.loads(pickle.dumps(lacks)).suggestions == lacks.suggestions
    assert print(lacks) or capsys.readouterr().out == f"{lacks}\n"

    path = tmp_path / "It would not fit into memory: "
    roomy = forge.dry_run(forge.sft, **given, ckpt_output_dir=path, machine="80GB")
    assert (roomy.fits, roomy.suggestions) == (True, ())
    assert roomy.peak_bytes <= roomy.available_bytes
    assert main(["sft", *words_of(given), "--ckpt-output-dir", str(path), "--dry-run", "--for", "80GB"]) == 0


@pytest.fixture(scope="module")
def deep_model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of ten layers, the fewest of which a few are rehearsed."""
    path = shutil.copytree(model_dir, tmp_path_factory.mktemp("deep") / "model")
    config = AutoConfig.from_pretrained(model_dir, num_hidden_layers=10)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture
def large(given: dict[str, Any], deep_model: Path, tmp_path: Path) -> dict[str, Any]:
    """Its run, whose largest micro-batch has many samples."""
    return {**given, "model_path": deep_model, "effective_batch_size": 8, "ckpt_output_dir": tmp_path / "run"}


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Number of blocks of each model that is rehearsed; None is the whole model."""
    made: list[int | None] = []
    of = Rehearsed.of.__func__  # type: ignore[attr-defined]

    def counted(kind: Any, *planned_and_target: Any, blocks: int | None = None, **more: Any) -> Any:
        made.append(blocks)
        return of(kind, *planned_and_target, blocks=blocks, **more)

    monkeypatch.setattr(Rehearsed, "of", classmethod(counted))
    return made


@pytest.mark.slow
@pytest.mark.lane
@pytest.mark.parametrize("more", [{}, {"validation_split": 0.2, "dtype": "bfloat16"}])
def test_what_takes_less_is_what_a_run_with_it_takes(
    more: dict[str, Any], large: dict[str, Any], rehearsed: list[int | None], capsys: pytest.CaptureFixture[str]
) -> None:
    """What was derived from few layers is what the whole model is planned with, to the byte; it is said what is tried."""
    given = {**large, **more, "max_tokens_per_gpu": 1024}
    suggestions = forge.dry_run(forge.sft, **given, machine="0.501GB").suggestions
    assert rehearsed.count(None) == 1, "the whole model is rehearsed once"
    assert len(suggestions) >= 4
    shown = capsys.readouterr().err
    for each in suggestions:
        assert f"memory: it does not fit; trying {next(iter(each['settings']))}" in shown.replace("a lower ", "")
        alone = forge.dry_run(forge.sft, **{**given, **each["settings"]}, machine="80GB")
        assert alone.peak_bytes == each["planned"], each


@pytest.mark.slow
@pytest.mark.usefixtures("tokens_alone")
def test_the_most_tokens_that_fit_are_offered(large: dict[str, Any], rehearsed: list[int | None]) -> None:
    """A plain number between the longest sample and what was asked for, where a little more does not fit; else the least."""
    lacks = forge.dry_run(forge.sft, **large, max_tokens_per_gpu=1024, machine="0.501GB")
    (least,) = lacks.suggestions
    assert (least["settings"], least["fits"]) == ({"max_tokens_per_gpu": 64}, False)
    assert lacks.peak_bytes is not None
    room = (0.7 * lacks.peak_bytes + 0.3 * least["planned"]) / 0.95
    machine = f"{room / 2**30 + 0.5:.9f}GB"
    rehearsed.clear()
    (offered,) = forge.dry_run(forge.sft, **large, max_tokens_per_gpu=1024, machine=machine).suggestions
    assert rehearsed == [None, 3, 4], "the whole model once, whatever is tried"
    tokens = offered["settings"]["max_tokens_per_gpu"]
    assert offered["fits"]
    assert tokens % 64 == 0
    for more, fits in ((0, True), (192, False)):
        found = forge.dry_run(forge.sft, **large, max_tokens_per_gpu=tokens + more, machine=machine)
        assert found.fits is fits


@pytest.mark.slow
@pytest.mark.usefixtures("tokens_alone")
@pytest.mark.parametrize("more", ci_keeps([{}], [{}, {"max_tokens_per_gpu": 4096}]))
def test_one_huge_row_is_named_with_the_limit_that_leaves_it_out(
    more: dict[str, Any], given: dict[str, Any], tmp_path: Path
) -> None:
    """First of what is tried is max_seq_len, with file and row; its plan is that of a run with it."""
    rows = [{"prompt": "what colour?", "completion": "red " * (800 if at == 2 else 1 + at % 5)} for at in range(12)]
    given = {**given, **more, "data_path": str(write_rows(tmp_path / "huge.jsonl", rows)), "ckpt_output_dir": tmp_path / "run"}
    lacks = forge.dry_run(forge.sft, **given, machine="0.501GB")
    first = lacks.suggestions[0]
    assert first["settings"].pop("max_tokens_per_gpu", None) == (1024 if more else None)
    assert first["settings"] == {"max_seq_len": 64}
    said = r"it leaves out 1 of 12 rows, the longest of them huge.jsonl:3 with \d+ tokens; the longest that stays has \d+"
    assert re.fullmatch(said, first["cost"])
    kept = {**given, "max_seq_len": 64, "max_tokens_per_gpu": 1024}
    assert forge.dry_run(forge.sft, **kept, machine="80GB").peak_bytes == first["planned"] < lacks.peak_bytes


@pytest.fixture
def roomy(given: dict[str, Any]) -> dict[str, Any]:
    """A step of many micro-batches."""
    return {**given, "effective_batch_size": 160, "num_epochs": 14}


def chosen_for(machine: str, settings: dict[str, Any], path: Path) -> int:
    """The max_tokens_per_gpu that a dry run for a machine chooses."""
    found = re.search(
        r"max_tokens_per_gpu=(\d+): memory plan", forge.dry_run(forge.sft, **settings, ckpt_output_dir=path, machine=machine)
    )
    assert found is not None
    return int(found[1])


@pytest.mark.slow
@pytest.mark.usefixtures("tokens_alone")
def test_a_micro_batch_left_open_is_the_largest_that_fits(
    roomy: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As large as the target's memory, not this machine's: what is chosen fits, and three times as much does not."""
    small = chosen_for("0.504GB", roomy, tmp_path / "run")
    assert 256 <= small < 1024
    capsys.readouterr()
    for tokens, said in ((small, "it fits"), (3 * small, "it does NOT fit")):
        forge.dry_run(forge.sft, **roomy, max_tokens_per_gpu=tokens, ckpt_output_dir=tmp_path / "run", machine="0.504GB")
        assert said in capsys.readouterr().err


@pytest.mark.lane
@pytest.mark.parametrize("kind", ["none", "auto"])
def test_more_memory_gives_larger_micro_batches(kind: str, roomy: dict[str, Any], tmp_path: Path) -> None:
    """Up to what is fastest, which is more than this small model's 1,024 where steps are long, whatever else is left open."""
    assert chosen_for("80GB", roomy | {"activation_checkpointing": kind}, tmp_path / "run") > 1024


@pytest.mark.lane
def test_what_is_recomputed_follows_from_the_memory(
    large: dict[str, Any], rehearsed: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """activation_checkpointing=auto is none, selective and full as memory falls: the first of them that fits nine tenths.

    The whole model is rehearsed once for all three, and that is said.
    """
    asked: list[Any] = []

    def choose(*given: Any) -> tuple[str, str]:
        asked.extend(given)
        return _tokens.choose_checkpointing(*given)

    monkeypatch.setattr(_memory, "_SMALL", 0)
    monkeypatch.setattr(_prepare, "is_small", lambda _: False)
    monkeypatch.setattr(_prepare, "choose_checkpointing", choose)
    forge.dry_run(forge.sft, **large, activation_checkpointing="auto", machine="80GB")
    planned, target, report = asked
    said: list[str] = []
    monkeypatch.setattr(report, "taking", lambda *words: nullcontext(said.extend(words)))
    needs = {}
    for kind in _tokens.KINDS:
        settings = planned.settings.with_value("strategy", "activation_checkpointing", kind)
        needs[kind] = _tokens._needed(plan_of(Rehearsed.of(attrs.evolve(planned, settings=settings), target), target))
    assert needs["none"] > needs["selective"] > needs["full"]
    for kind, needed in needs.items():
        enough = math.ceil(needed / 0.9) + 1
        assert _tokens.choose_checkpointing(planned, attrs.evolve(target, limit=enough), report)[0] == kind
    rehearsed.clear()
    said.clear()
    found, why = _tokens.choose_checkpointing(planned, attrs.evolve(target, limit=2**18), report)
    assert found == "full", why
    assert rehearsed == [None, *(3, 4) * 3]
    assert said == list(PLANNING)
    assert "even so" in why


@pytest.mark.slow
@pytest.mark.usefixtures("tokens_alone")
def test_the_longest_sample_is_the_least_that_is_chosen(roomy: dict[str, Any], tmp_path: Path) -> None:
    """Where nothing fits, the micro-batch holds the longest sample, and the dry run says that it does not fit."""
    said = forge.dry_run(forge.sft, **roomy, ckpt_output_dir=tmp_path / "run", machine="0.5005GB")
    assert "the longest sample, which does not fit" in said


@pytest.mark.slow
@pytest.mark.usefixtures("tokens_alone")
@pytest.mark.parametrize("more", ci_keeps([{}], [{}, {"max_tokens_per_gpu": 90}]))
def test_fewer_tokens_hold_virtual_tokens_too(
    more: dict[str, Any], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of prompts with an adapter of virtual tokens that does not fit is a plan: what is tried has room for them."""
    monkeypatch.syspath_prepend(tmp_path)
    settings = settings_of("grpo", model_dir, tmp_path) | {"adapter": "prefix", "validation_split": 0}
    del settings["max_tokens_per_gpu"]
    said = forge.dry_run(forge.grpo, **settings, **more, ckpt_output_dir=tmp_path / "run", machine="0.50001GB")
    assert "It would not fit into memory" in said


@pytest.mark.slow
def test_a_resumed_run_keeps_its_micro_batches(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen once by the memory plan and recorded with its reason; kept whatever memory there is when it is resumed."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    kept = {**given, "lr_scheduler": "constant", "keep_full_state": True, "ckpt_output_dir": tmp_path / "run"}
    forge.sft(**kept)
    line = re.compile("^max_tokens_per_gpu: .*$", re.MULTILINE)
    (began,) = line.findall((tmp_path / "run" / "config.yaml").read_text())
    assert "1024  # chosen: memory plan: more would not be faster" in began
    monkeypatch.setattr(forge.accel.CPUAccelerator, "memory_limit_bytes", lambda _: 2**20)
    before = json.loads((tmp_path / "run" / "memory.json").read_text())
    forge.sft(**{**kept, "max_steps": 3})
    assert line.findall((tmp_path / "run" / "config.yaml").read_text()) == [began]
    assert not re.search("changed since then: max_tokens", (tmp_path / "run" / "log.txt").read_text())
    after = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert (before["fits"], after["fits"]) == (True, False), "the plan is renewed"
    assert [each["name"] for each in after["phases"]].count("first steps") == 1
    state = str(tmp_path / "run" / "full_state" / "step_3")
    forge.sft(**{**kept, "max_steps": 4, "ckpt_output_dir": tmp_path / "other"}, resume=state)
    assert line.findall((tmp_path / "other" / "config.yaml").read_text()) == [began]


@pytest.mark.slow
def test_what_cannot_be_planned_takes_the_default(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log says so."""
    monkeypatch.syspath_prepend(tmp_path)
    settings = {name: value for name, value in settings_of("grpo", model_dir, tmp_path).items() if name != "max_tokens_per_gpu"}
    forge.dry_run(forge.grpo, **settings, ckpt_output_dir=tmp_path / "run", machine="80GB")
    assert "(memory plan: more would not be faster, " in " ".join(capsys.readouterr().err.split())

    def refuse(*_: Any) -> None:
        raise forge_algos.RehearsalError("a computation needs values")

    monkeypatch.setattr(type(forge.grpo.task), "rehearsal_source", refuse)
    forge.dry_run(forge.grpo, **settings, ckpt_output_dir=tmp_path / "run", machine="80GB")
    assert "max_tokens_per_gpu: 1,024 (what suits cpu; no memory plan can be made)" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("words", ["8x", "H100", "0xH100-80GB", "0.2GB", "9" * 400 + "GB", "00xH100-80GB"])
def test_a_machine_in_other_words_is_refused(words: str, given: dict[str, Any], tmp_path: Path) -> None:
    """The message says how one is named."""
    with pytest.raises(forge.SettingsError, match="such as 8xH100-80GB"):
        forge.dry_run(forge.sft, **given, ckpt_output_dir=tmp_path / "run", machine=words)


@pytest.mark.parametrize(
    "wrong", [{"trackers": ["wandbb"]}, {"eval_prompts": [" "]}, {"eval_prompts": ["\ud800"]}, {"model_path": "no/model"}]
)
def test_a_dry_run_refuses_what_the_run_does(wrong: dict[str, Any], given: dict[str, Any], tmp_path: Path) -> None:
    """In the same words, and neither leaves anything behind."""
    said = []
    for call in (forge.sft, partial(forge.dry_run, forge.sft)):
        with pytest.raises(Exception, match=".") as caught:
            call(**{**given, **wrong}, ckpt_output_dir=tmp_path / "run")
        assert caught.value.exit_status == 2
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dry_run_of_several_ranks_answers_once(
    rank: int, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where torchrun started it, the first rank says what all would do; the others end at once and say nothing."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**world, "MASTER_PORT": 29777}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["sft", *words_of(given), "--ckpt-output-dir", str(tmp_path / "run"), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert ("on each of 2 ranks" in shown.err, bool(shown.out)) == ((True, True) if rank == 0 else (False, False))
    assert rank == 0 or not shown.err


def test_a_machine_is_named_as_it_was_given(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag on a command line, the argument in Python."""
    assert main(["sft", *words_of(given), "--ckpt-output-dir", str(tmp_path / "run"), "--dry-run", "--for", "garbage"]) == 2
    assert capsys.readouterr().err.startswith("forge: --for garbage: give the number of devices")
    with pytest.raises(forge.SettingsError, match="^machine='garbage': give"):
        forge.dry_run(forge.sft, **given, ckpt_output_dir=tmp_path / "run", machine="garbage")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--weights", "bfloat16"], "forge: --weights bfloat16 is moved by adamw_8bit, which needs bitsandbytes"),
        (["--adapter", "lora", "--weights", "bfloat16"], "forge: --weights bfloat16 is moved by adamw_8bit, which needs"),
        (["--adapter", "qlora"], "forge: --adapter qlora (--quant-type nf4) needs bitsandbytes, which is not installed"),
        (["--adapter", "qlora", "--quant-type", "fp4"], "forge: --quant-type fp4 needs bitsandbytes"),
        (["--optimizer", "adamw_8bit"], "forge: --optimizer adamw_8bit needs bitsandbytes"),
    ],
)
def test_a_missing_package_is_said_of_the_flag_that_was_given(
    flags: list[str],
    said: str,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was chosen for it, or is a default, is not what to leave out; the command that installs it is there."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("forge_accel.devices._quantization.version", missing)
    assert main(["sft", *words_of(given), *flags, "--ckpt-output-dir", str(tmp_path / "run"), "--dry-run"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(said)
    assert "pip install" in error
    assert ("--optimizer adamw" in error) is ("--optimizer" in flags)


def test_for_is_for_dry_runs(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --dry-run it has no effect, and is refused."""
    assert main(["sft", *words_of(given), "--ckpt-output-dir", str(tmp_path / "run"), "--for", "24GB"]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["distill", "dpo", "grpo"])
def test_each_kind_of_verb_has_a_dry_run(verb: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is computed, phase by phase."""
    assert verb in VERBS
    monkeypatch.syspath_prepend(tmp_path)
    settings = settings_of(verb, model_dir, tmp_path)
    plans: list[Any] = []
    write = _prepare.write_plan
    monkeypatch.setattr(_prepare, "write_plan", lambda plan, *given, **how: plans.append(plan) or write(plan, *given, **how))
    found = forge.dry_run(getattr(forge, verb), **settings, ckpt_output_dir=tmp_path / "run")
    assert f"forge {verb} would write" in found
    assert plans[0].refused is None
    measured = ["rollout", "step"] if verb == "grpo" else ["step", "evaluation"]
    assert [phase.name for phase in plans[0].phases] == [*measured, "saving", "export"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_measures_itself(dtype: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """memory.json has the first steps as planned and as measured, within 2 percent of each other.

    In bfloat16 with what some processors' products take for themselves, 5 percent of a model as tiny as this.
    """
    monkeypatch.setattr(_memory, "_SMALL", 0)
    forge.sft(**given, dtype=dtype, ckpt_output_dir=tmp_path / "run")
    found = json.loads((tmp_path / "run" / "memory.json").read_text())
    phase = found["phases"][-1]
    assert phase["name"] == "first steps"
    assert math.isclose(phase["planned"], phase["measured"], rel_tol=0.02)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "memory: the tensors of step 2 took" in log
    assert "the process holds more, with Python and libraries: memory in metrics.jsonl" in log
    assert ("activations have bfloat16 copies of the weights in them" in log) is (dtype == "bfloat16")
    assert sum(phase["parts"].values()) == phase["planned"]
    # What libraries keep is no tensor: it is planned for all phases, and is not in what is measured.
    *compiled, last = [each["parts"].get("compiled", 0) / 2**20 for each in found["phases"]]
    assert last == 0
    assert set(compiled) <= ({0} if dtype == "float32" else {20, 40, 60, 80, 100, 120, 128})


@pytest.mark.parametrize("profiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_measurement_ends_with_its_run(
    profiled: bool, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails leaves no profiler behind in a script or a notebook; one that was there before goes on."""
    from forge_algos.heads import _head

    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(_memory, "_SMALL", 0)
    monkeypatch.setattr(_head.Head, "nll", full)
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) if profiled else nullcontext()
    with own:
        with pytest.raises(forge.OutOfMemoryError, match="forward pass|evaluation"):
            forge.sft(**given, ckpt_output_dir=tmp_path / "run")
        assert torch.autograd._profiler_enabled() is profiled
        torch.ones(3).sum()
    if profiled:
        assert "aten::sum" in {event.name for event in own.events()}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"adapter": "lora", "target_modules": ("q_prj",)}, "q_prj matches no linear layer"),
        ({"warmup_steps": 9}, "warmup_steps=9 is more than the 2 steps"),
        ({"moe_aux_loss": "trl"}, "moe_aux_loss=trl has no effect"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef=0.1 has no effect: .*num_experts_per_tok"),
        ({"nproc_per_node": "1", "effective_batch_size": 0}, "effective_batch_size"),
    ],
)
def test_settings_are_refused_before_a_row_is_read(
    wrong: dict[str, Any], message: str, given: dict[str, Any], tmp_path: Path
) -> None:
    """The second row is of no format; the setting is what the message is about."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}, {"nothing": 1}])
    with pytest.raises(Exception, match=message) as caught:
        forge.sft(**{**given, "data_path": str(rows), **wrong}, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


def test_a_reward_that_takes_something_else_is_refused_before_a_row_is_read(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes, and what it will be called with."""
    (tmp_path / "odd_rewards.py").write_text("def length(texts):\n    return [len(text) for text in texts]\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = write_rows(tmp_path / "rows.jsonl", [{"nothing": 1}])  # which would be refused next
    with pytest.raises(forge.algos.RewardError, match=r"takes \(texts\)"):
        forge.grpo(**{**given, "data_path": str(rows)}, reward=("odd_rewards:length",), ckpt_output_dir=tmp_path / "run")


@pytest.mark.slow
def no_work(*_: Any, **__: Any) -> None:
    """Stand for what is expensive."""
    raise AssertionError("this was to be refused before")


@pytest.mark.parametrize(
    ("verb", "row", "more", "said"),
    [
        ("sft", {"question": "a", "answer": "b"}, {}, r"rows\.jsonl:1 has the fields 'question', 'answer', which are no known"),
        (
            "sft",
            {"q": "a", "completion": "b"},
            {"rename_columns": {"question": "prompt"}},
            "names the column 'question', which",
        ),
        ("dpo", {"prompt": "a", "good": "b", "bad": "c"}, {}, r"rows\.jsonl:1 has the fields"),
        ("pretrain", {"words": "a"}, {}, r"rows\.jsonl:1 has the fields"),
        ("grpo", {"question": "a"}, {}, r"rows\.jsonl:1 has the fields 'question', and none of them is a prompt"),
        ("sft", None, {}, r"no file at .*rows\.jsonl"),
    ],
)
def test_a_wrong_column_is_refused_before_a_model_is_looked_at(
    verb: str,
    row: dict[str, Any] | None,
    more: dict[str, Any],
    said: str,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No weights' headers are read, no small model is made, no row is tokenized."""
    from forge.run import _starting_model

    monkeypatch.syspath_prepend(tmp_path)
    given = settings_of(verb, model_dir, tmp_path) | more
    file = tmp_path / "rows.jsonl"
    if row is not None:
        write_rows(file, [row] * 4)
    monkeypatch.setattr(_prepare, "try_packing", no_work)
    monkeypatch.setattr(_starting_model.forge_dist, "check_model", no_work)
    with pytest.raises(forge.data.DataError, match=said) as caught:
        getattr(forge, verb)(**{**given, "data_path": file, "ckpt_output_dir": tmp_path / "run"})
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


def test_a_reward_without_its_column_is_refused_before_the_model_is_loaded(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An argument without a default that no row has, by its name and those that are there."""
    (tmp_path / "asking.py").write_text(
        "def right(prompts, completions, solution, weight=1):\n    return [1.0] * len(prompts)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("forge.run._run.load_with_attention", no_work)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"a{n}", "answer": 1} for n in range(4)])
    given = settings_of("grpo", model_dir, tmp_path) | {"data_path": rows, "reward": ("asking:right",)}
    with pytest.raises(
        forge.SettingsError, match="it takes the field solution, which no row of data_path has .they have answer"
    ):
        forge.grpo(**given, ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(AssertionError, match="refused before"):
        forge.grpo(**given, rename_columns={"answer": "solution"}, ckpt_output_dir=tmp_path / "run")


@pytest.mark.parametrize(("verb", "setting"), [("distill", "teacher_path"), ("dpo", "reference_path")])
def test_the_hub_is_asked_for_every_model_at_once(verb: str, setting: str, model_dir: Path, tmp_path: Path) -> None:
    """A teacher or reference that the hub does not have is refused by its own name, as the model is."""
    given = settings_of(verb, model_dir, tmp_path) | {setting: "org/no-such-model"}
    with pytest.raises(forge.dist.ModelError, match=f"{setting} 'org/no-such-model': there is no such directory here"):
        getattr(forge, verb)(**given, ckpt_output_dir=tmp_path / "run")


@pytest.mark.slow
def test_a_run_without_a_step_is_replaced(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed in its first forward; the same directory takes other settings."""

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(forge.algos, "train", fails)
        with pytest.raises(forge.OutOfMemoryError):
            forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    stale = tmp_path / "run" / "answers.jsonl"
    stale.write_text('{"step": 0, "prompt": "a", "answer": "of the former run"}\n')
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")}
    assert "would write" in forge.dry_run(forge.sft, **{**given, "seed": 7}, ckpt_output_dir=tmp_path / "run")
    with pytest.raises(forge.SettingsError, match="warmup_steps=9"):
        forge.sft(**given, seed=7, warmup_steps=9, ckpt_output_dir=tmp_path / "run")
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")} == before
    result = forge.sft(**{**given, "learning_rate": 1e-3, "seed": 7}, ckpt_output_dir=tmp_path / "run")
    assert result.steps == 2
    assert "replaced" in (tmp_path / "run" / "log.txt").read_text()
    assert not stale.exists()


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (MemoryError(), "does not say|held"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes."),
            "8.00 GiB were asked",
        ),
        (RuntimeError("can't start new thread"), "no thread could be started"),
    ],
)
def test_out_of_memory_says_where(
    error: Exception, asked: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phase, figures and three settings; exit status 1."""
    from forge_algos.heads import _head

    def full(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(_head.Head, "nll", full)
    with pytest.raises(forge.OutOfMemoryError, match="forward pass|evaluation") as caught:
        forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    message = str(caught.value)
    assert caught.value.exit_status == 1
    assert any(each in message for each in asked.split("|"))
    for setting in ("max_tokens_per_gpu", "activation_checkpointing=full", "adamw_8bit"):
        assert setting in message


def test_out_of_memory_in_the_optimizer(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states are made at the first step: the message names that, not the forward pass."""

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.optim.AdamW, "step", full)
    with pytest.raises(forge.OutOfMemoryError, match="out of memory in the optimizer's step") as caught:
        forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 1


@pytest.mark.parametrize("here", [True, False])
def test_an_export_that_cannot_be_checked_stays(
    here: bool, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for a second copy, here or on another rank: model and result are written, and the log says so."""

    def full(*_: Any, **__: Any) -> None:
        if here:
            raise MemoryError("no room for a second copy")
        # As forge_dist raises it where another rank's allocator said so.
        raise forge.dist.ExportError("cannot be read back (rank 1)") from torch.OutOfMemoryError("no room")

    monkeypatch.setattr(forge.dist, "check_export", full)
    result = forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    assert (result.model_dir / "model.safetensors").is_file()
    assert (tmp_path / "run" / "result.json").is_file()
    assert "could not be compared" in (tmp_path / "run" / "log.txt").read_text()
