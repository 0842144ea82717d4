"""Prompts of plain text with images: runs are plain transformers on `processor(text=..., images=..., suffix=...)`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForMultimodalLM, AutoProcessor
from transformers.image_utils import load_image

import forge
import forge_data
import forge_packing
from forge_algos import online

from . import (
    pictures,
    reference,
    test_images_of_answers as rated,
    test_images_of_pairs as preferred,
    test_images_online as drawn,
)
from .conftest import write_rows
from .policies import oracle as updates
from .three_steps import SETTINGS, figures, oracle

GIVEN: dict[str, Any] = {**SETTINGS, "effective_batch_size": 6, "max_tokens_per_gpu": 96}
ROWS = 18
ASKED = ("caption", "", "left <image> right")
OTHER = "\n no plum"
"""The rejected answer of a pair, and an unwanted one."""


def _row(folder: Path, number: int) -> dict[str, Any]:
    """One image before the prompt, two at marks in it, or none, in turn."""
    (folder / "images").mkdir(exist_ok=True)
    count = (1, 2, 0)[number % 3]
    files = [f"images/{number}_{each}.png" for each in range(count)]
    for each, file in enumerate(files):
        pictures.picture(10 * number + each).save(folder / file)
    prompt = f"caption the picture {number} in a few words"
    prompt = f"<image>before {prompt} <image>" if count == 2 else prompt
    return {"prompt": prompt, "completion": f"\n {number} plums and a cherry", **({"images": files} if files else {})}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows in a file, beside their images."""
    folder = tmp_path_factory.mktemp("texts")
    return write_rows(folder / "rows.jsonl", [_row(folder, number) for number in range(ROWS)])


@pytest.fixture(scope="module", params=["paligemma", "llava"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose processor takes a suffix, and one whose processor takes one text; neither has a chat template."""
    folder = pictures.save(request.param, tmp_path_factory.mktemp(request.param))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def run(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on all parts, and an answer at their end."""
    out = tmp_path_factory.mktemp("run") / "run"
    parts = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False, "save_dtype": "float32"}
    asked = write_rows(data.parent / "asked.jsonl", [{"prompt": prompt, "images": ["images/0_0.png"]} for prompt in ASKED])
    asks = {"eval_prompts": [str(asked)], "eval_max_new_tokens": 8}
    return forge.sft(model_path=str(model), data_path=str(data), ckpt_output_dir=out, **GIVEN, **parts, **asks).output_dir


def _asked(processor: Any, row: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """What the processor makes of a row, as its documentation asks it, with `labels`."""
    images = [load_image(str(folder / file)) for file in row.get("images", [])]
    eos, count = processor.tokenizer.eos_token, row["prompt"].count("<image>")
    prompt = row["prompt"] if count else "<image>" * len(images) + row["prompt"]
    if not images:
        ids = processor.tokenizer(prompt + row["completion"] + eos, return_tensors="pt")["input_ids"]
        learned = len(processor.tokenizer(row["completion"] + eos)["input_ids"])
        marks = {"token_type_ids": torch.ones_like(ids)} if _takes_suffix(processor) else {}
        return {"input_ids": ids, "labels": _labels(ids, learned)} | marks
    if _takes_suffix(processor):
        arrays = processor(text=[prompt], images=[images], suffix=[row["completion"]], return_tensors="np")
        return {name: torch.as_tensor(array) for name, array in arrays.items()}
    made = dict(processor(text=[prompt + row["completion"] + eos], images=[images], return_tensors="pt"))
    return made | {"labels": _labels(made["input_ids"], len(processor.tokenizer(row["completion"] + eos)["input_ids"]))}


def _takes_suffix(processor: Any) -> bool:
    return type(processor).__name__ == "PaliGemmaProcessor"


def _labels(ids: torch.Tensor, learned: int) -> torch.Tensor:
    return torch.where(torch.arange(ids.shape[1]) >= ids.shape[1] - learned, ids, -100)


def test_losses(run: Path, model: Path, data: Path) -> None:
    """Ids, labels, losses and gradient norms of tower, projector and language part are plain transformers'."""
    processor: Any = AutoProcessor.from_pretrained(model)
    given = [json.loads(line) for line in data.read_text().splitlines()]

    def inputs(store: forge_data.TokenStore, at: int) -> dict[str, torch.Tensor]:
        made = _asked(processor, given[int(store.source(at).rpartition(":")[2]) - 1], data.parent)
        assert made.pop("input_ids")[0].tolist() == store[at].input_ids.tolist()
        assert made.pop("labels")[0].tolist() == store[at].labels.tolist()
        return made

    log = (run / "log.txt").read_text()
    # In transformers 5.23 PaliGemma's documents lie in padded lines.
    assert ("images: several in a row" in log) is (_takes_suffix(processor) <= (transformers.__version__ >= "5.24"))
    assert ": loaded back, " in log
    plain = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    expected = oracle(run, plain, inputs=inputs)
    assert figures(run) == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)


def test_asked(run: Path, data: Path) -> None:
    """`forge generate` and `eval_prompts` put images at marks, or before a prompt without, and answer as plain transformers."""
    (export,) = (run / "hf_format").glob("samples_*")
    processor: Any = AutoProcessor.from_pretrained(export)
    plain: Any = AutoModelForMultimodalLM.from_pretrained(export, dtype=torch.float32)
    file = data.parent / "images" / "0_0.png"
    answers = [json.loads(line)["answer"] for line in (run / "answers.jsonl").read_text().splitlines()][-len(ASKED) :]
    for prompt, answer in zip(ASKED, answers, strict=True):
        text = prompt if "<image>" in prompt else f"<image>{prompt}"
        arrays = processor(text=[text], images=[[load_image(str(file))]], return_tensors="np")
        inputs = {name: torch.as_tensor(array) for name, array in arrays.items() if name != "labels"}
        made = plain.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        expected = processor.decode(made, skip_special_tokens=True).strip()
        assert expected
        assert forge.generate(run, prompt, image=[file], max_new_tokens=8) == expected
        assert answer == expected


# --- pairs, rated answers and prompts that are rewarded ---------------------------------------------------------------------


def _rows(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.read_text().splitlines()]


def _sample(processor: Any, row: dict[str, Any], completion: str, folder: Path) -> reference.Sample:
    made = _asked(processor, row | {"completion": completion}, folder)
    return reference.Sample(made.pop("input_ids")[0].tolist(), made.pop("labels")[0].tolist(), made)


def _plain(model: Path) -> Any:
    """The model, whose language part trains."""
    found: Any = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    found.requires_grad_(False)
    for part in (found.get_decoder(), found.get_output_embeddings()):
        part.requires_grad_(True)
    return found


def _planned(run: Path) -> tuple[forge_data.TokenStore, forge_packing.BatchPlan]:
    return forge_data.TokenStore.open(run / "data" / "train"), forge_packing.BatchPlan.load(run / "plan" / "plan.npz")


def _compare(run: Path, expected: list[tuple[float, float]]) -> None:
    assert figures(run) == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([norm for _, norm in expected], rel=1e-4)


SETTINGS_OF_ANSWERS = {name: value for name, value in GIVEN.items() if name != "moe_aux_loss"} | {"max_tokens_per_gpu": 192}


def test_pairs(model: Path, data: Path, tmp_path: Path) -> None:
    """DPO: both answers to a prompt with its images, each in a forward of its own; the prompt may be given twice."""
    processor: Any = AutoProcessor.from_pretrained(model)
    rows = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": OTHER, "images": row.get("images", [])}
        for row in _rows(data)
    ]
    rows[0] |= {name: rows[0]["prompt"] + rows[0][name] for name in ("chosen", "rejected")}
    del rows[0]["prompt"]
    file = write_rows(data.parent / "pairs.jsonl", rows)
    given = SETTINGS_OF_ANSWERS | {"beta": preferred.BETA}
    run = forge.dpo(model_path=str(model), data_path=str(file), ckpt_output_dir=tmp_path / "run", **given).output_dir
    store, plan = _planned(run)
    known = []
    for both in store.pairs.tolist():
        at = int(store.source(both[0]).rpartition(":")[2]) - 1
        row = _rows(data)[at]
        # Without a prompt it is what both begin with, but for a space.
        shared = {"prompt": row["prompt"] + ("\n" if at == 0 else "")}
        cut = len(shared["prompt"]) - len(row["prompt"])
        sides = [_sample(processor, row | shared, text[cut:], data.parent) for text in (row["completion"], OTHER)]
        assert [each.input_ids for each in sides] == [store[each].input_ids.tolist() for each in both]
        assert [each.labels for each in sides] == [store[each].labels.tolist() for each in both]
        known.append(sides)
    plain = _plain(model)
    with torch.no_grad():
        before = [preferred.terms(plain, pair) for pair in known]

    def loss(taken: list[int]) -> torch.Tensor:
        return preferred.dpo([preferred.terms(plain, known[at]) for at in taken], [before[at] for at in taken])

    _compare(run, pictures.steps(plain, plan, loss))


class _Rated(rated.Answers):
    """Answers and their mismatches, as the processor reads them."""

    def __init__(self, store: forge_data.TokenStore, rows: list[dict[str, Any]], processor: Any, folder: Path) -> None:
        self.wanted = [row["label"] for row in rows]
        following = rows[1:] + rows[:1]
        self.own = [_sample(processor, row, row["completion"], folder) for row in rows]
        both = zip(rows, following, strict=True)
        self.others = [_sample(processor, row, other["completion"], folder) for row, other in both]
        assert [each.input_ids for each in self.own] == [each.input_ids.tolist() for each in store]


def test_rated_answers(model: Path, data: Path, tmp_path: Path) -> None:
    """KTO: each answer, and the next row's behind the same prompt and its images."""
    rows = [row | {"label": bool(at % 3)} | ({} if at % 3 else {"completion": OTHER}) for at, row in enumerate(_rows(data))]
    file = write_rows(data.parent / "rated.jsonl", rows)
    own = {name: rated.GIVEN[name] for name in ("beta", "desirable_weight", "undesirable_weight")}
    given = SETTINGS_OF_ANSWERS | own | {"model_path": str(model), "data_path": str(file)}
    run = forge.kto(**given, ckpt_output_dir=tmp_path / "run").output_dir
    store, plan = _planned(run)
    answers = _Rated(store, rows, AutoProcessor.from_pretrained(model), data.parent)
    plain = _plain(model)
    before = answers.references(plain)
    _compare(run, pictures.steps(plain, plan, lambda taken: answers.loss(plain, taken, *before)))


REWARDS = """
SEEN = []

def letters(prompts, completions, images, **columns):
    SEEN.append((prompts, images))
    return [sum(map(ord, one)) % 97 / 97 for one in completions]
"""


def test_rewarded_prompts(model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPO: drawn tokens, log-probabilities and updates behind a prompt with its images; PaliGemma is one error."""
    processor: Any = AutoProcessor.from_pretrained(model)
    rows = [{name: value for name, value in row.items() if name != "completion"} for row in _rows(data)[:12]]
    file = write_rows(tmp_path / "prompts.jsonl", rows)
    (tmp_path / "images").symlink_to(data.parent / "images")
    (tmp_path / "text_rewards.py").write_text(REWARDS, encoding="utf-8")
    pictures.import_beside(file, "text_rewards", monkeypatch)
    given = drawn.GIVEN | drawn.OWN["grpo"] | {"reward": ("text_rewards:letters",), "max_tokens_per_gpu": 400}
    given |= {"model_path": str(model), "data_path": str(file), "ckpt_output_dir": tmp_path / "run"}
    if _takes_suffix(processor):
        with pytest.raises(forge.SettingsError, match="prompts with images: this model's prompt sees what is ahead") as caught:
            forge.grpo(**given)
        assert caught.value.exit_status == 2
        assert not (tmp_path / "run").exists()
        return
    run = forge.grpo(**given).output_dir
    asked = []
    for row in rows:
        images = [load_image(str(tmp_path / each)) for each in row.get("images", [])]
        text = row["prompt"] if "<image>" in row["prompt"] else "<image>" * len(images) + row["prompt"]
        asked.append(dict(processor(text=[text], **({"images": [images]} if images else {}), return_tensors="pt")))
    _compare(run, updates(run, _plain(model).eval(), _plain(model).eval(), asked, forge_data.MediaInputs(model).token_ids))
    rollout = online.Rollout.read(run / "rollouts" / "step_1.jsonl")
    import text_rewards  # type: ignore[import-not-found]

    prompts, images = (each for each in text_rewards.SEEN[0])
    of = [rows[int(rollout.prompt_rows[group])] for group in rollout.groups]
    assert list(prompts) == [row["prompt"] for row in of]
    assert list(images) == [[str(tmp_path / file) for file in row["images"]] if "images" in row else None for row in of]


@pytest.mark.parametrize(
    ("verb", "more", "refusal"),
    [
        ("grpo", {"sampler": "vllm", "sampler_url": "http://127.0.0.1:1", "reward": ("json:dumps",)}, "sampler=vllm and .*"),
        ("grpo", {"reward_model_path": ""}, "reward_model_path .* and .*"),
        ("sdft", {}, ".*: its prompt is plain text with images, and a teacher is shown"),
    ],
)
def test_what_takes_conversations(verb: str, more: dict[str, Any], refusal: str, data: Path, tmp_path: Path) -> None:
    """A server, a reward model and a teacher that is shown an answer are given no plain text with images: one error."""
    model = pictures.save("llava", tmp_path / "model")
    if "reward_model_path" in more:
        more = {"reward_model_path": str(pictures.save("gemma3", tmp_path / "reward"))}
    expected = refusal if verb == "sdft" else f"^{refusal}rows.jsonl:1: its prompt is plain text with images, and conversations"
    with pytest.raises(forge.SettingsError, match=expected) as caught:
        getattr(forge, verb)(model_path=str(model), data_path=str(data), ckpt_output_dir=tmp_path / "run", **more)
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()
