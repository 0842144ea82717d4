"""`forge teach` and `forge distill --teacher-logprobs`: the live teacher's run without the teacher."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import forge
import forge_algos
import forge_data
import forge_dist
from forge.locking._run_lock import RunLock
from forge.tasks.items._stored_teacher import StoredTeacher, part_key
from forge.teaching import _output, _teach

from ..ranks import run_on_ranks
from .conftest import conversations, write_rows
from .sampling_stub import served
from .starts import metrics
from .verbs import assert_two_ranks_as_one, run_verb


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, larger_model: Path) -> dict[str, Any]:
    """Settings of a run with a live teacher."""
    folder = tmp_path_factory.mktemp("stored")
    write_rows(folder / "chats.jsonl", conversations(24))
    return {
        "model_path": str(model_dir), "teacher_path": str(larger_model),
        "data_path": str(folder / "chats.jsonl"), "max_steps": 3, "effective_batch_size": 5, "max_tokens_per_gpu": 200,
        "learning_rate": 1e-2, "lr_scheduler": "constant", "warmup_steps": 0, "validation_split": 0.2,
    }  # fmt: skip


def taught(given: dict[str, Any], output: Path, **more: Any) -> Path:
    names = ("model_path", "teacher_path", "data_path")
    return forge.teach(**{name: given[name] for name in names}, output=output, **{"top_k": 100_000} | more).path


def stored(given: dict[str, Any], path: Path, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "teacher_path"} | {"teacher_logprobs": str(path)} | more


@pytest.fixture(scope="module")
def whole(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All tokens of the vocabulary, in several parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_teach, "_PART_BYTES", 400_000)
        path = taught(given, tmp_path_factory.mktemp("taught") / "whole")
    assert len(list(path.glob("part_*.safetensors"))) > 1
    return path


@pytest.mark.parametrize("turns", ["auto", pytest.param("history", marks=pytest.mark.lane)])
def test_equals_the_live_teacher(given: dict[str, Any], whole: Path, tmp_path: Path, turns: str) -> None:
    """With all tokens stored the losses, held-out ones too, are those of the run with the teacher, however steps are cut."""
    live = forge.distill(**given, turns=turns, ckpt_output_dir=tmp_path / "live")
    for name, most in (("stored", 200), ("apart", 70)):
        found = forge.distill(
            **stored(given, whole, turns=turns) | {"max_tokens_per_gpu": most}, ckpt_output_dir=tmp_path / name
        )
        for ours, theirs in zip(metrics(found.output_dir), metrics(live.output_dir), strict=True):
            for figure in ("loss", "kl", "eval_loss"):
                assert (figure in ours) == (figure in theirs)
                assert ours.get(figure, 0) == pytest.approx(theirs.get(figure, 0), rel=1e-4)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_says_what_the_teacher_does(kind: str, given: dict[str, Any], tmp_path: Path) -> None:
    """A teacher behind vLLM's or SGLang's interface is stored as the one that is loaded; what is amiss is one error."""
    live = taught(given, tmp_path / "live", top_k=8)
    with served(kind, given["teacher_path"]) as (url, stub):
        path = taught(given | {"teacher_path": url}, tmp_path / "served", top_k=8)
        requests = len(stub.asked)
        taught(given | {"teacher_path": url}, path, top_k=8)  # all is there
        assert len(stub.asked) <= requests + 6
        for changes, said in (
            ({"temperature": 2.0}, "temperature=2: a server says"),
            ({"nproc_per_node": 2}, "nproc_per_node has no effect with a server"),
            ({"server_timeout": 0}, "server_timeout must be above 0"),
            ({"model_path": None}, "model_path is wanted with the address of a server"),
        ):
            asked = {"teacher_path": url, "model_path": given["model_path"], "data_path": given["data_path"]} | changes
            with pytest.raises(forge.SettingsError, match=said):
                forge.teach(**asked, output=tmp_path / "no")
    one, two = (load_file(each / "part_00000.safetensors") for each in (live, path))
    of = {rows.tobytes(): at for at, rows in enumerate(by_sample(one, "input_ids", "offsets"))}
    assert len(of) == len(two["offsets"]) - 1
    for at, rows in enumerate(by_sample(two, "input_ids", "offsets")):
        for array in ("positions", "ids", "logps", "rest"):
            ours, theirs = by_sample(one, array, "starts")[of[rows.tobytes()]], by_sample(two, array, "starts")[at]
            np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-4)
    for fault, error, said in (
        ("few", forge_algos.RolloutError, "start it with a higher limit"),
        ("wrong model", forge.SettingsError, "whose tokenizer gives other ids"),
        ("short", forge.SettingsError, "reads fewer than"),
    ):
        with served(kind, given["teacher_path"], fault=fault) as (url, _), pytest.raises(error, match=said):
            taught(given | {"teacher_path": url}, tmp_path / fault, top_k=8)
        assert not (tmp_path / fault).exists()
    with pytest.raises(forge_algos.RolloutError, match="cannot be reached"):
        taught(given | {"teacher_path": url}, tmp_path / "gone", top_k=8)


def by_sample(part: dict[str, Any], array: str, ends: str) -> list[Any]:
    """The rows of an array of a part, by sample."""
    return np.split(part[array], part[ends][1:-1])


@pytest.mark.slow
def test_processes_share_the_rows(given: dict[str, Any], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes store what one does, to the bit, and nothing else; a wish that cannot be met is one error."""
    monkeypatch.setattr(_teach, "_PART_BYTES", 400_000)
    path = taught(given, tmp_path / "two", nproc_per_node=2)
    names = [sorted(each.name for each in folder.iterdir() if each.name[0] != ".") for folder in (path, whole)]
    assert names[0] == names[1]
    assert not (path / ".logs").exists()
    assert (path / "teacher.json").read_text() == (whole / "teacher.json").read_text()
    for name in names[0][:-1]:
        assert part_key(path / name) == part_key(whole / name)
        two, one = load_file(path / name), load_file(whole / name)
        assert two.keys() == one.keys()
        assert all(two[each].tobytes() == one[each].tobytes() for each in one)
    with pytest.raises(forge.SettingsError, match="nproc_per_node"):
        taught(given, tmp_path / "none", nproc_per_node="two")
    assert not (tmp_path / "none").exists()


@pytest.mark.lane
@pytest.mark.slow
def test_an_error_of_a_process_is_the_commands(given: dict[str, Any], tmp_path: Path) -> None:
    """What a process that shares the rows raises is raised by the command, with its rank; nothing is left."""
    broken = tmp_path / "broken"
    shutil.copytree(given["teacher_path"], broken)
    (broken / "model.safetensors").write_bytes(b"")
    with pytest.raises(forge_dist.ModelError, match="rank 0"):
        taught(given | {"teacher_path": str(broken)}, tmp_path / "out", nproc_per_node=2)
    assert not (tmp_path / "out").exists()


def test_goes_on_after_a_kill(given: dict[str, Any], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is missing is computed again, alone, and is the same; a run without it is refused."""
    path = tmp_path / "whole"
    shutil.copytree(whole, path)
    lost = path / "part_00001.safetensors"
    before = load_file(lost)
    lost.unlink()
    with pytest.raises(forge.SettingsError, match="part 2 of .* is missing"):
        forge.distill(**stored(given, path), ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(_teach, "_PART_BYTES", 400_000)
    lost.write_bytes((whole / lost.name).read_bytes()[:-7])
    with pytest.raises(forge.SettingsError, match="part 2 of .* is missing or damaged"):
        forge.distill(**stored(given, path), ckpt_output_dir=tmp_path / "run")
    written: list[Path] = []
    write = _output.write_part
    monkeypatch.setattr(_output, "write_part", lambda file, *rest: (written.append(file), write(file, *rest)))
    taught(given, path)
    assert written == [lost]
    after = load_file(lost)
    assert all(np.array_equal(after[name], found) for name, found in before.items())
    with pytest.raises(forge.SettingsError, match=r"holds what was computed with top_k \d+ \(now 3\)\. Remove it"):
        taught(given, path, top_k=3)


def test_one_command_at_a_time(given: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    """A directory that another command writes to, one of other files and a file are refused, and stay as they are."""
    with RunLock(whole), pytest.raises(forge.RunDirectoryError, match="another command writes to it now"):
        taught(given, whole)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    for path, message in ((tmp_path / "mine", "holds other files"), (tmp_path / "mine" / "thesis.txt", "is a file")):
        with pytest.raises(forge.SettingsError, match=message):
            taught(given, path)
    assert [each.name for each in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_flipped_bit_is_found(given: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    """A changed log-probability ends a run that reads it, and names file and row."""
    path = tmp_path / "whole"
    shutil.copytree(whole, path)
    for file in path.glob("*.safetensors"):
        held = bytearray(file.read_bytes())
        at = held.index(load_file(file)["logps"][0].tobytes())
        held[at] ^= 1
        file.write_bytes(held)
    with pytest.raises(forge_data.StoreError, match=r"part_\d+\.safetensors: what it holds of .*chats\.jsonl:\d+ is damaged"):
        forge.distill(**stored(given, path), ckpt_output_dir=tmp_path / "run")


def test_rows_of_the_same_tokens(given: dict[str, Any], tmp_path: Path) -> None:
    """Rows that differ in what is learned alone, in two files and twice in one, are learned as with the live teacher."""
    ids = [5, 9, 40, 41, 42, 7, 30, 31]
    labels = [[token if at in learned else -100 for at, token in enumerate(ids)] for learned in ({3}, {5, 6}, {2, 3, 7})]
    rows = [{"input_ids": ids, "labels": each} for each in labels]
    files = [str(write_rows(tmp_path / f"{name}.jsonl", part)) for name, part in (("a", [*rows[:2], rows[0]]), ("b", rows[1:]))]
    more = {"data_path": files, "validation_split": 0, "max_steps": 1}
    live = forge.distill(**given | more, ckpt_output_dir=tmp_path / "live")
    path = taught(given | more, tmp_path / "taught")
    found = forge.distill(**stored(given | more, path), ckpt_output_dir=tmp_path / "stored")
    assert metrics(found.output_dir)[0]["loss"] == pytest.approx(metrics(live.output_dir)[0]["loss"], rel=1e-5)
    wider = write_rows(tmp_path / "c.jsonl", [{"input_ids": ids, "labels": ids}])
    with pytest.raises(forge.SettingsError, match=r"c\.jsonl:1: its token 1 is learned, .* nothing of 3 others"):
        forge.distill(**stored(given | more, path, data_path=str(wider)), ckpt_output_dir=tmp_path / "run")


ODD: list[dict[str, Any]] = [
    {"input_ids": [5], "labels": [5]},
    {"input_ids": [5, 6], "labels": [-100, 6]},
    {"input_ids": [5, 9, 40, 41], "labels": [-100] * 4},
    {"input_ids": [5, 9, 40, 41], "labels": [5, -100, -100, -100]},
    {"input_ids": [5, 9, 40, 41, 7], "labels": [-100, 9, -100, 41, 7], "weights": [0, 0.5, 0, 3, 0.25]},
    {"input_ids": [0, 1, 2, 0, 1, 2, 83], "labels": [-100, 1, 2, 0, 1, 2, 83]},
]
"""One token, none that is learned, the first alone, weights of tokens, special tokens."""


def naive_losses(given: dict[str, Any], k: int, temperature: float, beta: float, *, class_of_rest: bool) -> list[float]:
    """Mean divergence and mean KL over `ODD`, a token at a time, from plain transformers' logits in float64."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(given[name]).eval() for name in ("model_path", "teacher_path"))
    sums = np.zeros(3)
    for row in ODD:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            q_of, p_of = ((model(ids).logits[0].double() / temperature).softmax(-1) for model in (student, teacher))
        for at in (at for at in range(1, ids.shape[1]) if row["labels"][at] != -100):
            top, weight = p_of[at - 1][: len(q_of[at - 1])].topk(k).indices, row.get("weights", [1.0] * (at + 1))[at]
            q, p = (torch.cat((each[top], 1 - each[top].sum()[None])) for each in (q_of[at - 1], p_of[at - 1]))
            if not class_of_rest:
                p[-1] = 0
                p = p / p.sum()
            mixture = beta * p + (1 - beta) * q
            kl, of_p, of_q = ((a * (a / b).log())[a > 0].sum().item() for a, b in ((p, q), (p, mixture), (q, mixture)))
            sums += weight * np.array([kl if beta == 0 else beta * of_p + (1 - beta) * of_q, kl, 1])
    return list(sums[:2] / sums[2])


@pytest.mark.parametrize(
    ("k", "temperature", "beta", "rest"),
    [
        (3, 0.02, 0.5, "class"),
        (2, 0.05, 0.0, "left_out"),
        pytest.param(4, 0.1, 0.9, "left_out", marks=pytest.mark.lane),
        pytest.param(1, 0.03, 0.1, "class", marks=pytest.mark.lane),
    ],
)
def test_odd_rows_have_a_naive_loops_losses(
    k: int, temperature: float, beta: float, rest: str, given: dict[str, Any], tmp_path: Path
) -> None:
    """Of few tokens stored, at a temperature, weighted; rows of which nothing is learned count nothing."""
    more = {"data_path": str(write_rows(tmp_path / "odd.jsonl", ODD)), "lint": "off", "validation_split": 0, "max_steps": 1}
    path = taught(given | more, tmp_path / "taught", top_k=k, temperature=temperature)
    settings = {"effective_batch_size": 8, "temperature": temperature, "beta": beta, "teacher_rest": rest}
    line = metrics(forge.distill(**stored(given | more | settings, path), ckpt_output_dir=tmp_path / "run").output_dir)[0]
    expected = naive_losses(given, k, temperature, beta, class_of_rest=rest == "class")
    assert [line["loss"], line["kl"]] == pytest.approx(expected, rel=1e-5)


def test_a_teacher_with_more_ids_than_tokens(given: dict[str, Any], tmp_path: Path) -> None:
    """Probability of ids beyond the tokenizer's is of the rest; the live teacher of another width is refused, and says so."""
    wider = tmp_path / "wider"
    shutil.copytree(given["teacher_path"], wider)
    teacher = AutoModelForCausalLM.from_pretrained(wider)
    teacher.resize_token_embeddings(teacher.config.vocab_size + 32)
    teacher.save_pretrained(wider)
    more = {"teacher_path": str(wider), "data_path": str(write_rows(tmp_path / "odd.jsonl", ODD)), "lint": "off"}
    more |= {"validation_split": 0, "max_steps": 1, "temperature": 0.02}
    with pytest.raises(
        forge_algos.LossError, match=r"vocabulary of \d+, the model, .*likeliest tokens alone, which `forge teach`"
    ):
        forge.distill(**given | more, ckpt_output_dir=tmp_path / "live")
    path = taught(given | more, tmp_path / "taught", top_k=5, temperature=0.02)
    line = metrics(forge.distill(**stored(given | more, path), ckpt_output_dir=tmp_path / "run").output_dir)[0]
    expected = naive_losses(given | more, 5, 0.02, 0.5, class_of_rest=True)
    assert [line["loss"], line["kl"]] == pytest.approx(expected, rel=1e-5)


def test_a_row_beyond_the_teachers_table(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is longer than the teacher's table of positions is refused by name, and nothing is written."""
    monkeypatch.setattr(forge_dist, "position_table", lambda _: 16)
    with pytest.raises(forge.SettingsError, match=r"chats\.jsonl:\d+ has \d+ tokens, and teacher_path .* has a table of 16"):
        taught(given, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.lane
@pytest.mark.slow
def test_two_ranks_are_one(given: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    """Divided over two ranks the steps and the held-out loss are those of one."""
    assert_two_ranks_as_one("distill", stored(given, whole, strategy="ddp"), tmp_path, ("loss", "grad_norm", "kl", "eval_loss"))


@pytest.mark.lane
@pytest.mark.slow
def test_two_ranks_that_share_a_row(given: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    """With cp_size=2 each rank computes the loss of a part of a row; both together are one rank's."""
    for ranks, more in ((1, {}), (2, {"strategy": "fsdp2", "cp_size": 2})):
        run = stored(given, whole, **more) | {"ckpt_output_dir": str(tmp_path / str(ranks))}
        run_on_ranks(run_verb, ranks, "distill", run, joined=False)
    one, two = metrics(tmp_path / "1"), metrics(tmp_path / "2")
    for name in ("loss", "grad_norm", "kl", "eval_loss"):
        found = [[line[name] for line in lines if name in line] for lines in (one, two)]
        assert found[0]
        assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_resumed_run_is_the_same(given: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    """A run of a few tokens that is left and resumed has the same losses; another directory's numbers are refused."""
    few = taught(given, tmp_path / "few", top_k=4)
    settings = stored(given, few, beta=0.0, teacher_rest="left_out", temperature=1.5, keep_full_state=True)
    straight = forge.distill(**settings, ckpt_output_dir=tmp_path / "straight")
    forge.distill(**settings | {"max_steps": 1}, ckpt_output_dir=tmp_path / "run")
    with pytest.raises(forge.SettingsError, match="teacher_logprobs"):
        forge.distill(**settings | {"teacher_logprobs": str(whole)}, ckpt_output_dir=tmp_path / "run")
    shutil.move(few, tmp_path / "former")
    taught(given, few, top_k=3)
    with pytest.raises(
        forge.SettingsError, match="model in teacher_logprobs is not .*: what `forge teach` wrote there changed"
    ):
        forge.distill(**settings, ckpt_output_dir=tmp_path / "run")
    shutil.rmtree(few)
    shutil.move(tmp_path / "former", few)
    forge.distill(**settings, ckpt_output_dir=tmp_path / "run")
    losses = [
        {line["step"]: line["loss"] for line in metrics(tmp_path / name) if "loss" in line} for name in ("straight", "run")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert straight.output_dir == tmp_path / "straight"


def test_a_live_teacher_and_a_stored_one_are_two_runs(given: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    """A run of one is not resumed with the other: both settings are named, and what goes on, also after its end."""
    runs = {"stored": stored(given, whole), "live": given}
    for name, other in (("stored", "live"), ("live", "stored")):
        run = forge.distill(**runs[name] | {"max_steps": 1}, ckpt_output_dir=tmp_path / name).output_dir
        was, now = (
            f"teacher_logprobs={whole}" if each == "stored" else f"teacher_path={given['teacher_path']}"
            for each in (name, other)
        )
        said = f"holds a run with {was}, and now {now}; its steps so far were made with the former. "
        with pytest.raises(forge.SettingsError, match=re.escape(f"{said}That run is finished: ")):
            forge.distill(**runs[other] | {"max_steps": 1}, ckpt_output_dir=run)
        (run / "result.json").unlink()
        with pytest.raises(forge.SettingsError, match=re.escape(f"{said}Give {was} to resume it, or give another ckpt_")):
            forge.distill(**runs[other] | {"max_steps": 1}, ckpt_output_dir=run)


def test_what_is_refused(given: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    """Rows that the teacher was not asked about, or read otherwise, by row and position; and another temperature."""
    rows = conversations(24)
    rows[7]["messages"][-1]["content"] += " indeed"
    for name, changed, message in (
        ("chats", rows, r"chats\.jsonl:8: its tokens are others there: token \d+ is \d+, and the teacher read \d+"),
        ("others", rows, r"others\.jsonl:8: the teacher was asked about \d+ samples, and this row is none"),
    ):
        file = tmp_path / f"{name}.jsonl"
        write_rows(file, changed)
        with pytest.raises(forge.SettingsError, match=message):
            forge.distill(**stored(given, whole, data_path=str(file), validation_split=0), ckpt_output_dir=tmp_path / "run")
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "why", "chosen": "so", "rejected": "no"}])
    with pytest.raises(forge.SettingsError, match=r"data_path holds preference rows \(pairs\.jsonl:1\), and forge teach takes"):
        taught(given | {"data_path": str(pairs)}, tmp_path / "run")
    image = [{"type": "image", "url": "plum.png"}, {"type": "text", "text": "what?"}]
    shown = write_rows(
        tmp_path / "shown.jsonl", [*rows[:2], {"messages": [{"role": "user", "content": image}, *rows[0]["messages"][1:2]]}]
    )
    for more, message in (
        ({"data_path": str(shown)}, "image"),
        ({"train_on": "all"}, r"chats\.jsonl:\d+: its token 1 is learned, .* nothing of it, .* run has of train_on, turns"),
        ({"temperature": 2.0}, "was computed with 1"),
        ({"add_tokens": ("<new>",)}, "another tokenizer"),
        ({"teacher_logprobs": str(tmp_path / "none")}, "there is no such directory"),
        ({"teacher_logprobs": str(tmp_path)}, "there is no teacher.json in it"),
    ):
        with pytest.raises((forge.SettingsError, forge_data.DataError), match=message):
            forge.distill(**stored(given, whole) | more, ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_says_its_size_beforehand(given: dict[str, Any], tmp_path: Path) -> None:
    """A dry run writes nothing and says the size, which the files have but for their headers."""
    said = forge.teach(**{n: given[n] for n in ("teacher_path", "data_path")}, output=tmp_path / "out", top_k=4, dry_run=True)
    assert not (tmp_path / "out").exists()
    assert "would write" in str(said)
    forge.teach(**{n: given[n] for n in ("teacher_path", "data_path")}, output=tmp_path / "out", top_k=4)
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert said.num_bytes == pytest.approx(written, rel=0.2)
    assert forge.dry_run("distill", **stored(given, tmp_path / "out"), ckpt_output_dir=tmp_path / "run")


@pytest.mark.parametrize("form", ["axolotl", "vllm"])
def test_rows_of_others(given: dict[str, Any], whole: Path, tmp_path: Path, form: str) -> None:
    """The columns of Axolotl and vLLM hold the same numbers as what forge computed itself."""
    store = forge_data.prepare(given["data_path"], given["model_path"], tmp_path / "store")
    teacher = StoredTeacher(whole)
    places, lines = teacher.places(store), []
    for place, sample in zip(places, store, strict=True):
        assert place is not None
        ids, logps, _ = teacher.tokens_of(place, sample)
        learned = np.flatnonzero(np.asarray(sample.labels) != -100)
        tokens = sample.input_ids.tolist()
        if form == "vllm":
            found: list[Any] = [None] * len(tokens)
            for at, one, many in zip(learned, ids, logps, strict=True):
                found[at] = {str(t): {"logprob": float(p)} for t, p in zip(one[:6], many[:6], strict=True)}
            lines.append({"prompt_token_ids": tokens, "prompt_logprobs": found})
        else:
            first = int(learned[0])
            mask = [[int(at in learned)] * 6 for at in range(first, len(tokens))]
            known = dict(zip(learned.tolist(), zip(ids, logps, strict=True), strict=True))
            pairs = [known.get(at, (ids[0], logps[0])) for at in range(first, len(tokens))]
            lines.append(
                {"input_ids": tokens, "target_mask": mask}
                | {"target_token_ids": [each[0][:6].tolist() for each in pairs]}
                | {"target_logprobs": [each[1][:6].tolist() for each in pairs]}
            )
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, lines)
    path = forge.teach(
        data_path=str(rows), model_path=given["model_path"], from_rows=True, top_k=5, output=tmp_path / form
    ).path
    ours = StoredTeacher(path)
    for place, own, sample in zip(places, ours.places(store), store, strict=True):
        assert place is not None
        assert own is not None
        ids, logps, _ = teacher.tokens_of(place, sample)
        found_ids, found_logps, rest = ours.tokens_of(own, sample)
        assert (found_ids == ids[:, :5]).all()
        assert np.array_equal(found_logps, logps[:, :5])
        np.testing.assert_allclose(np.exp(rest), 1 - np.exp(logps[:, :5]).sum(1), atol=1e-5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [5, 6], "logprobs": "none"}, "holds no log-probabilities"),
        ({"input_ids": [5, 6.5], "target_token_ids": [[7]], "logprobs": [[-0.5]]}, "holds no log-probabilities"),
        ({"input_ids": [5], "target_token_ids": [[7], [7]], "logprobs": [[-1], [-1]]}, "There are 2 entries for 1 tokens"),
        ({"input_ids": [5, 6], "target_token_ids": [[7, 8]], "logprobs": [[-1, float("nan")]]}, "token 1: has a .* NaN"),
        ({"input_ids": [5, 6], "target_token_ids": [[7, 8]], "logprobs": [[-0.1, -0.2]]}, "token 1: its prob.* add up to 1.72"),
        ({"input_ids": [5, 6], "target_token_ids": [[7, 7]], "logprobs": [[-1, -1]]}, "token 1: names a token twice"),
        ({"input_ids": [5, 6], "target_token_ids": [[99999]], "logprobs": [[-1]]}, "token 1: names a token twice, or one that"),
        ({"prompt_token_ids": [5, 99999], "prompt_logprobs": [None, {"7": -0.5}]}, "its tokens are from 5 to 99999"),
    ],
)
def test_rows_of_others_that_are_refused(row: dict[str, Any], message: str, given: dict[str, Any], tmp_path: Path) -> None:
    """What is no distribution of this vocabulary is refused by row and token, and nothing is written."""
    good = {"input_ids": [5, 6], "target_token_ids": [[7]], "logprobs": [[-0.5]]}
    rows = write_rows(tmp_path / "rows.jsonl", [good, row])
    with pytest.raises(forge.SettingsError, match=rf"rows\.jsonl:2: .*{message}"):
        forge.teach(data_path=str(rows), model_path=given["model_path"], from_rows=True, output=tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_rows_of_others_that_cannot_be_read(given: dict[str, Any], tmp_path: Path) -> None:
    """Bytes that are no UTF-8 and nesting without end, by row; a file that is not there; settings of how rows are read."""
    rows, good = tmp_path / "rows.jsonl", b'{"input_ids": [5, 6], "target_token_ids": [[7, 8]], "logprobs": [[-0.5, -1e300]]}\n'
    how = {"data_path": str(rows), "model_path": given["model_path"], "from_rows": True, "output": tmp_path / "out"}
    with pytest.raises(forge.SettingsError, match=r"rows\.jsonl: there is no such file"):
        forge.teach(**how)
    for bad in (b'{"input_ids": "\xff"}\n', b"[" * 100_000 + b"\n"):
        rows.write_bytes(good + bad)
        with pytest.raises(forge.SettingsError, match=r"rows\.jsonl:2: holds no log-probabilities as they are read"):
            forge.teach(**how)
    rows.write_bytes(good)
    for name, value in {"train_on": "all", "max_seq_len": 8, "data_format": "messages", "max_samples": 1}.items():
        with pytest.raises(forge.SettingsError, match=f"{name}={value} has no effect with from_rows"):
            forge.teach(**how, **{name: value})
    assert not (tmp_path / "out").exists()
    found = load_file(next(forge.teach(**how).path.glob("*.safetensors")))
    assert found["logps"].tolist() == [[-0.5]]  # no float32 holds the other


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": 2}, "is of another version of forge \\(2\\)"),
        ({"key": None}, "its teacher.json cannot be read"),
        ({"parts": "many"}, "its teacher.json cannot be read"),
    ],
)
def test_records_that_cannot_be_read(changed: dict[str, Any], message: str, whole: Path, tmp_path: Path) -> None:
    """Of another version, without an entry, or with a value that is none: said as that."""
    record = json.loads((whole / "teacher.json").read_text()) | changed
    held = {name: value for name, value in record.items() if value is not None}
    (tmp_path / "teacher.json").write_text(json.dumps(held))
    with pytest.raises(forge.SettingsError, match=message):
        StoredTeacher(tmp_path)


def test_another_tokenizer_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    """A teacher with other tokens is refused before it is loaded."""
    other = tmp_path / "other"
    shutil.copytree(given["teacher_path"], other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(forge.SettingsError, match="other ids to tokens"):
        taught(given | {"teacher_path": str(other)}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert json.loads((Path(given["teacher_path"]) / "config.json").read_text())["model_type"]


def test_reads_rows_as_the_run_does(given: dict[str, Any], tmp_path: Path) -> None:
    """Ends of turns, bad rows and a format of its own for each file; it says what the stored tokens hold."""
    file = tmp_path / "bad.jsonl"
    write_rows(file, [*conversations(6), {"messages": []}])
    settings = {"train_on_turn_end": "last", "on_bad_row": "skip", "max_bad_rows": 0.5, "validation_split": 0}
    data = f'{file}={{"data_format": "messages"}}'
    reading = {name: settings[name] for name in ("train_on_turn_end", "on_bad_row", "max_bad_rows")}
    found = forge.teach(
        data_path=[data], teacher_path=given["teacher_path"], model_path=given["model_path"], output=tmp_path / "out",
        top_k=3, **reading,
    )  # fmt: skip
    rests = np.concatenate([load_file(part)["rest"] for part in found.path.glob("*.safetensors")])
    assert found.covered == pytest.approx(1 - np.exp(rests.astype(np.float64)).mean())
    assert f"3 tokens at each, which hold {found.covered:.1%} of the teacher's probability" in str(found)
    assert f"{found.num_bytes / 2**10:,.1f} KiB: 3 tokens" in str(found)
    little, much = (str(attrs.evolve(found, covered=covered)) for covered in (0.05, 0.9))
    assert ". WARNING: the rest is learned as one class; set a larger top_k" in little
    assert "WARNING" not in much
    others = str(write_rows(tmp_path / "others.jsonl", conversations(7)))
    with pytest.raises(forge.SettingsError, match="computed from other rows, rows read otherwise, or other weights of the"):
        forge.teach(data_path=[others], teacher_path=given["teacher_path"], output=found.path, top_k=3)
    run = stored(given, found.path, **settings) | {"data_path": {str(file): {"data_format": "messages"}}}
    assert forge.distill(**run, ckpt_output_dir=tmp_path / "run").steps == 3
