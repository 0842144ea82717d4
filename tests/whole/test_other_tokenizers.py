"""`forge distill` from a teacher with another tokenizer: the loss of both models by themselves, any division, any kill."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import forge
import forge_data
from forge.run import _memory

from ..ranks import run_on_ranks
from .conftest import conversations, write_rows
from .starts import metrics
from .test_turns import THINKING
from .verbs import assert_two_ranks_as_one, run_verb

MARKS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[Q] {{ m['content'] }} [/Q]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)


def write_teacher(directory: Path) -> Path:
    """A tiny model whose tokens are SentencePiece's, with a template of its own."""
    import torch
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Replace("▁", " ")
    texts = [message["content"] for row in conversations() for message in row["messages"]]
    specials = ["<unk>", "<s>", "</s>", "[Q]", "[/Q]"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=150, special_tokens=specials, show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<unk>")
    fast.chat_template = MARKS
    fast.save_pretrained(directory)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture
def settings(model_dir: Path, teacher: Path, chats: Path) -> dict[str, Any]:
    return {
        "model_path": str(model_dir), "teacher_path": str(teacher), "data_path": str(chats), "loss": "gold", "max_steps": 3,
        "effective_batch_size": 5, "max_tokens_per_gpu": 200, "learning_rate": 1e-2, "lr_scheduler": "constant",
        "warmup_steps": 0,
    }  # fmt: skip


def of_rows(run: Path) -> Iterator[tuple[Any, Any, Any]]:
    """A run's rows as both models have them, and their spans."""
    store = forge_data.TokenStore.open(run / "data" / "train")
    for row in range(len(store)):
        (text,), spans = store.taught(row)
        yield store[row].input_ids, text, spans


def of_samples(run: Path, step: int, teacher_path: str) -> Iterator[tuple[Any, Any, Any]]:
    """What was sampled for a step behind its prompts, in the order of the step, as both models have it."""
    store = forge_data.TokenStore.open(run / "data" / "train")
    own, other = store.tokenizer(), AutoTokenizer.from_pretrained(teacher_path)
    reader, of = forge_data.AnswerReader(own, other), store.settings["alignment"]
    room = math.ceil(1.5 * 9 * max(1, of["teacher_tokens"] / of["tokens"]))
    for line in map(json.loads, (run / "samples" / f"step_{step}.jsonl").read_text().splitlines()):
        row, (text, *_) = store[line["row"]], store.taught(line["row"])[0]
        question = conversations(24)[line["row"]]["messages"][-2]["content"]
        begin = int(store.teacher_runs[line["row"]])
        assert other.decode(text[:begin]).endswith(f"[Q] {question} [/Q]")  # its own template's, not the model's
        completion = np.array(line["completion_ids"], np.int32)
        prompt = own(line["prompt"], add_special_tokens=False)["input_ids"]
        found = reader((row.input_ids, row.labels), text, begin, completion, ended=line["finished"])
        moved = found.spans[found.spans[:, 3] <= room] + [len(prompt), len(prompt), begin, begin]
        yield np.append(prompt, completion), np.append(text[:begin], found.ids), moved


def naive_loss(rows: Iterable[tuple[Any, Any, Any]], model_path: str, teacher_path: str, *, hybrid: bool) -> tuple[float, int]:
    """The mean over all spans of rows, from whole distributions of both models, one sample at a time; and their number."""
    import torch
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (model_path, teacher_path)]
    own, other = (AutoTokenizer.from_pretrained(path) for path in (model_path, teacher_path))
    spelled = {text: at for text, at in own.get_vocab().items() if at not in own.added_tokens_decoder}
    pairs = [
        (spelled[text.replace("▁", "Ġ")], at)
        for text, at in other.get_vocab().items()
        if at not in other.added_tokens_decoder and text.replace("▁", "Ġ") in spelled
    ]
    pairs += [(own.convert_tokens_to_ids("<|im_end|>"), other.convert_tokens_to_ids("</s>"))]
    ours, theirs = (torch.tensor(each) for each in zip(*pairs, strict=True)) if hybrid else (torch.tensor([], dtype=int),) * 2
    total, count = 0.0, 0
    for *both_ids, spans in rows:
        ids = [torch.tensor(np.asarray(each, np.int64)) for each in both_ids]
        with torch.no_grad():
            both = [model(each[None]).logits[0].double().softmax(-1) for model, each in zip(models, ids, strict=True)]
        for a, b, c, d in spans.tolist():
            p, q = both[0][b - 2], both[1][d - 2]
            for at in range(a, b - 1):
                p = p * both[0][at - 1, ids[0][at]]
            for at in range(c, d - 1):
                q = q * both[1][at - 1, ids[1][at]]
            x, y = p[ours].clamp_min(1e-8), q[theirs].clamp_min(1e-8)
            m = (x + y) / 2
            matched = ((y * (y / m).log()).sum() + (x * (x / m).log()).sum()) / 2
            rest = [np.delete(each.numpy(), index.numpy()) for each, index in ((p, ours), (q, theirs))]
            rest = [np.sort(np.pad(each, (0, max(map(len, rest)) - len(each))))[::-1] for each in rest]
            share = len(ours) / len(q)
            total += share * matched.item() + (1 - share) * np.abs(rest[0] - rest[1]).sum()
            count += 1
    return total / count, count


@pytest.mark.parametrize("loss", ["gold", "uld"])
def test_the_loss_is_that_of_both_models_by_themselves(loss: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """A step over all rows has the mean over all spans, the same in any micro-batches; it says what is compared."""
    given = settings | {"loss": loss, "effective_batch_size": 24, "max_steps": 2}
    run = forge.distill(**given, ckpt_output_dir=tmp_path / "run").output_dir
    first, second = metrics(run)
    expected, _ = naive_loss(of_rows(run), given["model_path"], given["teacher_path"], hybrid=loss == "gold")
    assert first["loss"] == pytest.approx(expected, rel=1e-5)
    assert second["loss"] < first["loss"]
    log = (run / "log.txt").read_text()
    assert re.search(r"spans: 100\.0% of [\d,]+ learned tokens lie in [\d,]+ spans that both tokenizers cut alike", log)
    assert re.search(r"vocabularies: \d+ tokens are in both vocabularies, of \d+ and of the teacher's 150", log)
    if loss == "gold":
        again = forge.distill(**given | {"max_tokens_per_gpu": 2000}, ckpt_output_dir=tmp_path / "whole").output_dir
        for one, other in zip((first, second), metrics(again), strict=True):
            for name in ("loss", "grad_norm", "matched", "unmatched"):
                assert one[name] == pytest.approx(other[name], rel=1e-4)
            assert one["loss_spans"] == other["loss_spans"]


@pytest.fixture(scope="module")
def speaking(model_dir: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model once it has learned to write answers, and to end them."""
    given = {"learning_rate": 2e-2, "lr_scheduler": "constant", "effective_batch_size": 24, "max_steps": 40, "lint": "off"}
    run = forge.sft(model_path=model_dir, data_path=chats, ckpt_output_dir=tmp_path_factory.mktemp("speaking") / "run", **given)
    return str(run.model_dir)


@pytest.mark.parametrize("loss", ["gold", pytest.param("uld", marks=pytest.mark.lane)])
def test_the_models_own_completions(loss: str, settings: dict[str, Any], speaking: str, tmp_path: Path) -> None:
    """A step on what the model samples has the mean over its spans, read by the teacher behind its own prompt.

    It is the same in any micro-batches; stopped and resumed, a run samples the same and makes the same steps to the bit.
    """
    given = settings | {"loss": loss, "seed": 5, "on_policy": 0.7, "max_new_tokens": 9, "max_steps": 4, "keep_full_state": True}
    given["model_path"] = speaking
    for name, changes in (("whole", {}), ("wide", {"max_tokens_per_gpu": 2000}), ("cut", {"max_steps": 2}), ("cut", {})):
        forge.distill(**given | changes, ckpt_output_dir=tmp_path / name)
    steps = {name: [line for line in metrics(tmp_path / name) if "loss" in line] for name in ("whole", "wide", "cut")}
    assert [line["loss"] for line in steps["cut"]] == [line["loss"] for line in steps["whole"]]
    assert [line["loss"] for line in steps["wide"]] == pytest.approx([line["loss"] for line in steps["whole"]], rel=1e-4)
    sampled = sorted(int(each.stem[5:]) for each in (tmp_path / "whole" / "samples").iterdir())
    assert sampled == [1, 3, 4]  # a share of the steps, drawn by the seed
    rows = list(of_samples(tmp_path / "whole", 1, given["teacher_path"]))
    expected, count = naive_loss(rows, given["model_path"], given["teacher_path"], hybrid=loss == "gold")
    line = steps["whole"][0]
    assert line["loss"] == pytest.approx(expected, rel=1e-5)
    assert line["loss_spans"] == count
    figures = next(each for each in metrics(tmp_path / "whole") if "rollout_compared" in each)
    share = sum(int((spans[:, 1] - spans[:, 0]).sum()) for _, _, spans in rows)
    assert figures["rollout_compared"] == pytest.approx(share / (figures["rollout_length"] * len(rows)))


def test_is_resumed_to_the_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    """A run that goes on from a full state makes the steps of one that was never stopped, held-out rows too."""
    given = settings | {"validation_split": 0.25, "full_state_every_steps": 1, "max_steps": 4}
    whole = forge.distill(**given, ckpt_output_dir=tmp_path / "whole").output_dir
    short = given | {"keep_full_state": True}
    forge.distill(**short | {"max_steps": 2}, ckpt_output_dir=tmp_path / "cut")
    cut = forge.distill(**short, ckpt_output_dir=tmp_path / "cut").output_dir
    steps = [[line["loss"] for line in metrics(run) if "loss" in line] for run in (whole, cut)]
    assert steps[0] == steps[1]
    assert metrics(whole)[-1]["eval_loss"] == metrics(cut)[-1]["eval_loss"]


def test_another_tokenizer_needs_another_loss(settings: dict[str, Any], tmp_path: Path) -> None:
    """The refusal names the loss that takes it; images, ids and pairs are refused, and nothing is written."""
    for changes, said in (
        ({"loss": "jsd"}, "its tokenizer gives other ids .* set loss=gold"),
        ({"on_overflow": "split", "max_seq_len": 30}, "on_overflow=split with loss=gold"),
        ({"data_path": str(write_rows(tmp_path / "ids.jsonl", [{"input_ids": [5, 6], "labels": [5, 6]}]))}, "token ids"),
    ):
        with pytest.raises((forge.SettingsError, forge_data.DataError), match=said):
            forge.distill(**settings | changes, ckpt_output_dir=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_part_of_the_rows_without_common_text_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    """Held-out rows of none of which both have the same text are one error, and nothing is written."""
    other = [("user", "q"), ("assistant", "▁ {} ▁▁")]  # the teacher's tokens do not tell this mark from a blank
    rows = [{"messages": [{"role": role, "content": text.format(at)} for role, text in other]} for at in range(22)]
    data = write_rows(tmp_path / "rows.jsonl", [*rows, *conversations(2)])
    with pytest.raises(forge_data.DataError, match="of none do both tokenizers have the same learned text"):
        forge.distill(**settings | {"data_path": str(data), "validation_split": 2}, ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_is_planned(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory plan rehearses a step of both models on the same spans: within 5 percent of what one takes."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    run = forge.distill(**settings, ckpt_output_dir=tmp_path / "run").output_dir
    phase = json.loads((run / "memory.json").read_text())["phases"][-1]
    assert phase["name"] == "first steps"
    assert phase["planned"] == pytest.approx(phase["measured"], rel=0.05)


@pytest.mark.lane
def test_own_completions_are_planned(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory plan rehearses sampling, and a step on completions as long as both models may have them."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    given = settings | {"on_policy": 1.0, "max_new_tokens": 60, "max_tokens_per_gpu": 300, "max_steps": 1}
    run = forge.distill(**given, ckpt_output_dir=tmp_path / "run").output_dir
    found = {phase["name"]: phase for phase in json.loads((run / "memory.json").read_text())["phases"]}
    assert "rollout" in found
    assert found["first steps"]["measured"] <= 1.05 * found["step"]["planned"]


def test_turns_that_are_learned_apart(settings: dict[str, Any], model_dir: Path, teacher: Path, tmp_path: Path) -> None:
    """A row whose turns the student learns one by one is an item, in one step, and each turn is compared."""
    student = tmp_path / "student"
    shutil.copytree(model_dir, student)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(student)
    given = settings | {"model_path": str(student), "effective_batch_size": 24, "max_steps": 1, "max_tokens_per_gpu": 2000}
    run = forge.distill(**given, ckpt_output_dir=tmp_path / "run").output_dir
    (line,) = metrics(run)
    assert line["samples"] == 24
    assert len(forge_data.TokenStore.open(run / "data" / "train")) > 24
    assert line["loss"] == pytest.approx(naive_loss(of_rows(run), str(student), str(teacher), hybrid=True)[0], rel=1e-5)
    assert "training on 24 rows" in (run / "log.txt").read_text()


@pytest.mark.lane
@pytest.mark.slow
def test_two_ranks_that_share_a_row(settings: dict[str, Any], tmp_path: Path) -> None:
    """With cp_size=2 each rank computes the loss of a part of the spans; both together are one rank's."""
    for ranks, more in ((1, {}), (2, {"strategy": "fsdp2", "cp_size": 2})):
        given = settings | more | {"validation_split": 0.25, "ckpt_output_dir": str(tmp_path / str(ranks))}
        run_on_ranks(run_verb, ranks, "distill", given, joined=False)
    one, two = metrics(tmp_path / "1"), metrics(tmp_path / "2")
    for name in ("loss", "grad_norm", "matched", "unmatched", "eval_loss"):
        found = [[line[name] for line in lines if name in line] for lines in (one, two)]
        assert found[0]
        assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.lane
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "more"), [("ddp", {}), ("fsdp2", {}), ("fsdp2", {"on_policy": 1.0, "max_new_tokens": 9})])
def test_two_ranks(strategy: str, more: dict[str, Any], settings: dict[str, Any], speaking: str, tmp_path: Path) -> None:
    """Divided over two ranks the steps and the held-out loss are those of one, on own completions too."""
    given = settings | more | {"validation_split": 0.25, "strategy": strategy}
    given |= {"model_path": speaking} if more else {}
    assert_two_ranks_as_one("distill", given, tmp_path, ("loss", "grad_norm", "matched", "unmatched", "eval_loss"))
