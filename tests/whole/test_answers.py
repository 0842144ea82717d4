"""`eval_prompts`: answers at each measurement, which change nothing else of a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forge
from forge.tasks._answers import read_prompts

from .conftest import write_rows

SHORT: dict[str, Any] = {
    "max_steps": 4,
    "effective_batch_size": 4,
    "max_tokens_per_gpu": 512,
    "learning_rate": 1e-2,
    "adapter": "lora",
    "lora_dropout": 0.5,
    "eval_every_steps": 2,
}
ASKED = "what colour has the fig?"


def answers(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]


def weights(run: Path) -> bytes:
    return next(run.glob("hf_format/samples_*/*.safetensors")).read_bytes()


@pytest.mark.slow
def test_answers_at_each_measurement(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """Before, every so many steps and after, of texts and files; the last is what the export answers; steps are the same."""
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}, {"role": "user", "content": ASKED}]
    file = write_rows(
        tmp_path / "rows.jsonl", [{"messages": [*talk, {"role": "assistant", "content": "red"}]}, {"prompt": ASKED}]
    )
    given = {**SHORT, "model_path": model_dir, "data_path": chats}
    run = tmp_path / "run"
    result = forge.sft(**given, ckpt_output_dir=run, eval_prompts=[ASKED, str(file)], eval_max_new_tokens=6)
    found = answers(run)
    assert [line["step"] for line in found] == [0] * 3 + [2] * 3 + [4] * 3
    assert [line["prompt"] for line in found[:3]] == [ASKED, talk, ASKED]
    assert found[0]["answer"] == found[2]["answer"]
    assert found[-1]["answer"] == forge.generate(result.model_dir, ASKED, max_new_tokens=6)
    assert f"after step 4, asked {ASKED!r}: {found[-1]['answer']!r}" in (run / "log.txt").read_text()
    without = {name: value for name, value in given.items() if name != "eval_every_steps"}
    forge.sft(**without, ckpt_output_dir=tmp_path / "without")
    assert weights(run) == weights(tmp_path / "without")


@pytest.mark.slow
def test_a_resumed_run_answers_again_what_came_later(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """Steps that are made again are answered again, once; a line torn within a sign goes, one with odd signs stays as it is."""
    given = SHORT | {"lr_scheduler": "constant", "adapter": "none", "lora_dropout": 0.0, "keep_full_state": True}
    given |= {"model_path": model_dir, "data_path": chats, "ckpt_output_dir": tmp_path / "run", "eval_prompts": [ASKED]}
    forge.sft(**given | {"max_steps": 2})
    with (tmp_path / "run" / "answers.jsonl").open("ab") as file:
        odd = json.dumps({"step": 2, "prompt": ASKED, "answer": "two\u2028lines \u0085", "time": ""}, ensure_ascii=False)
        file.write(odd.encode() + b"\n")
        file.write(json.dumps({"step": 3, "prompt": ASKED, "answer": "of a later step", "time": ""}).encode())
        file.write('\n{"step": 4, "answer": "ü'.encode()[:-1])
    forge.sft(**given)
    kept = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in kept] == [0, 2, 2, 4]
    assert kept[2] == json.loads(odd)


@pytest.mark.parametrize(
    ("verb", "settings", "said"),
    [
        ("sft", {"eval_prompts": [" "]}, "empty prompt"),
        ("sft", {"eval_max_new_tokens": 4}, "eval_max_new_tokens has no effect without eval_prompts"),
        ("sft", {"eval_prompts": ["a"], "eval_every_steps": 1, "keep_best": True}, "keep_best has no effect"),
        ("sft", {"eval_prompts": ["ROWS"]}, "rows.jsonl:2: holds no prompt"),
        ("sft", {"eval_prompts": ["TEXTS"]}, "texts.jsonl:1: each of its messages must have a role and a content"),
        ("sft", {"eval_prompts": ["NULL"]}, "null.jsonl:1: each of its messages must have a role and a content"),
        (
            "sft",
            {"eval_prompts": ["IMAGE"]},
            r"image.jsonl:2: field messages\[0\].content\[0\] is a part that is an image and do",
        ),
        ("sft", {"eval_prompts": ["\udcff"]}, "is not UTF-8"),
        ("reward", {"eval_prompts": ["a"]}, "a reward model gives texts a number"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    verb: str, settings: dict[str, Any], said: str, model_dir: Path, chats: Path, tmp_path: Path
) -> None:
    """By name, before anything is done."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"messages": [{"role": "assistant", "content": "a"}]}])
    if settings.get("eval_prompts") == ["ROWS"]:
        settings = {"eval_prompts": [str(rows)]}
    texts = write_rows(tmp_path / "texts.jsonl", [{"prompt": ["a"]}])
    null = write_rows(tmp_path / "null.jsonl", [{"messages": [{"role": "user", "content": None}]}])
    parts = [{"role": "user", "content": [{"type": "image_url"}]}]
    image = write_rows(tmp_path / "image.jsonl", [{"prompt": "a"}, {"messages": parts}])
    for name, file in (("TEXTS", texts), ("NULL", null), ("IMAGE", image)):
        if settings.get("eval_prompts") == [name]:
            settings = {"eval_prompts": [str(file)]}
    with pytest.raises((forge.SettingsError, forge.data.DataError), match=said):
        getattr(forge, verb)(model_path=model_dir, data_path=chats, ckpt_output_dir=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_a_prompt_that_the_template_refuses_is_found_before_training(
    model_dir: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its file and row, before a row of the data is tokenized; the template is the one that the run is given."""
    monkeypatch.setattr("forge.run._prepare.try_packing", None)
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    system = [{"role": "system", "content": "be kind"}, {"role": "user", "content": ASKED}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": ASKED}, {"messages": system}])
    given = {**SHORT, "model_path": model_dir, "data_path": chats, "chat_template": str(template)}
    with pytest.raises(forge.SettingsError, match=r"rows\.jsonl:2: the chat template does not write it: no system messages"):
        forge.sft(**given, eval_prompts=[str(rows)], ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_prompt_is_a_line(name: str, tmp_path: Path) -> None:
    """Of a file with or without a byte order mark, and a line ends at a newline alone."""
    asked = ["one\u2028two\x85three", "four"]
    lines = asked if name.endswith("txt") else [json.dumps({"prompt": text}, ensure_ascii=False) for text in asked]
    (tmp_path / name).write_bytes(("\ufeff" + "\r\n".join(lines) + "\r\n").encode())
    evaluation = SimpleNamespace(eval_prompts=[str(tmp_path / name)])
    s: Any = SimpleNamespace(evaluation=evaluation, data=SimpleNamespace())
    task: Any = SimpleNamespace(model_task=lambda _: "causal")
    assert [each.prompt for each in read_prompts(task, s)] == asked


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_an_empty_file_of_prompts_is_refused(name: str, model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """It asks nothing, and says nothing of that later."""
    (tmp_path / name).write_text("\n \n")
    with pytest.raises(forge.SettingsError, match=f"{name}: holds no prompt"):
        forge.sft(model_path=model_dir, data_path=chats, ckpt_output_dir=tmp_path / "run", eval_prompts=[str(tmp_path / name)])


@pytest.mark.lane
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_answers_over_ranks(strategy: str, model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """The first rank's file has each answer once; divided weights answer together."""
    given = {**SHORT, "model_path": model_dir, "data_path": chats, "eval_prompts": [ASKED, "hello"], "adapter": "none"}
    del given["lora_dropout"]
    forge.sft(**given, ckpt_output_dir=tmp_path / "one")
    forge.sft(**given, ckpt_output_dir=tmp_path / "two", nproc_per_node=2, strategy=strategy)
    found = [[(line["step"], line["prompt"], line["answer"]) for line in answers(tmp_path / name)] for name in ("one", "two")]
    assert found[0] == found[1]
