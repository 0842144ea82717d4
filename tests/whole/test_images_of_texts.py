"""Prompts of plain text with images: runs are plain transformers on `processor(text=..., images=..., suffix=...)`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM, AutoProcessor
from transformers.image_utils import load_image

import forge
import forge_data
import forge_packing
from forge_algos import online

from . import (
    modalities,
    pictures,
    test_images_of_answers as rated,
    test_images_of_pairs as preferred,
    test_images_of_teachers as teachers,
    test_images_online as drawn,
    texts,
)
from .conftest import write_rows
from .policies import oracle as updates
from .three_steps import SETTINGS, figures, oracle, samples

GIVEN: dict[str, Any] = {**SETTINGS, "effective_batch_size": 6, "max_tokens_per_gpu": 96}
ROWS = 18
ASKED = ("caption", "", "left <image> right")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows in a file, beside their images."""
    return texts.rows(tmp_path_factory.mktemp("texts"), ROWS)


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


def test_losses(run: Path, model: Path, data: Path) -> None:
    """Ids, labels, losses and gradient norms of tower, projector and language part are plain transformers'."""
    processor: Any = AutoProcessor.from_pretrained(model)
    log = (run / "log.txt").read_text()
    # In transformers 5.23 PaliGemma's documents lie in padded lines.
    assert ("images: several in a row" in log) is (texts.takes_suffix(processor) <= (transformers.__version__ >= "5.24"))
    assert ": loaded back, " in log
    plain = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    expected = oracle(run, plain, inputs=texts.inputs_of(model, data))
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


def _planned(run: Path) -> tuple[forge_data.TokenStore, forge_packing.BatchPlan]:
    return forge_data.TokenStore.open(run / "data" / "train"), forge_packing.BatchPlan.load(run / "plan" / "plan.npz")


def _compare(run: Path, expected: list[tuple[float, float]]) -> None:
    assert figures(run) == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([norm for _, norm in expected], rel=1e-4)


OF_ANSWERS = {name: value for name, value in GIVEN.items() if name != "moe_aux_loss"} | {"max_tokens_per_gpu": 192}


# --- adapters and teachers --------------------------------------------------------------------------------------------------


@pytest.mark.lane
def test_adapters(model: Path, data: Path, tmp_path: Path) -> None:
    """LoRA's losses and gradient norms are plain PEFT's."""
    plain = pictures.with_adapter(
        modalities.plain(model), lambda: modalities.plain(model), adapter := tmp_path / "adapter", "CAUSAL_LM"
    )
    more = {"adapter": "lora", "adapter_path": str(adapter), "ckpt_output_dir": tmp_path / "run"}
    run = forge.sft(model_path=str(model), data_path=str(data), **GIVEN, **more).output_dir
    _compare(run, [(step.loss, step.grad_norm) for step in oracle(run, plain, inputs=texts.inputs_of(model, data))])


@pytest.mark.lane
def test_what_osft_protects(model: Path, data: Path, tmp_path: Path) -> None:
    """OSFT begins at a plain model's loss, and moves no matrix of the language part in the directions that it protects."""
    more = {"unfreeze_rank_ratio": 0.5, "save_dtype": "float32", "ckpt_output_dir": tmp_path / "run"}
    result = forge.osft(model_path=str(model), data_path=str(data), **GIVEN, **more)
    first = oracle(result.output_dir, modalities.plain(model), inputs=texts.inputs_of(model, data))[0]
    assert figures(result.output_dir)[0] == pytest.approx(first.loss, rel=1e-5)
    before, after = (load_file(each / "model.safetensors") for each in (model, result.model_dir))
    names = [name for name in before if "language_model" in name and name.endswith("_proj.weight")]
    assert len(names) == 14
    for name in names:
        moved = after[name].double() - before[name].double()
        left, _, right = torch.linalg.svd(before[name].double(), full_matrices=False)
        half = len(right) // 2
        assert moved.norm() > 1e-3
        assert (left[:, :half].T @ moved).norm() < 1e-5 * moved.norm()
        assert (moved @ right[:half].T).norm() < 1e-5 * moved.norm()


@pytest.mark.lane
def test_a_teacher(model: Path, data: Path, tmp_path: Path) -> None:
    """Distillation from a model of other weights, which is given the images too."""
    other = tmp_path / "teacher"
    shutil.copytree(model, other)
    torch.manual_seed(5)
    moved = {name: each + 0.1 * torch.randn_like(each) for name, each in load_file(model / "model.safetensors").items()}
    save_file(moved, other / "model.safetensors", metadata={"format": "pt"})
    more = {"teacher_path": str(other), "beta": 0.0, "ckpt_output_dir": tmp_path / "run"}
    run = forge.distill(model_path=str(model), data_path=str(data), **OF_ANSWERS, **more).output_dir
    store, plan = _planned(run)
    known = samples(store, list(range(len(store))), texts.inputs_of(model, data))
    student, teacher = modalities.plain(model), modalities.plain(other)
    _compare(run, pictures.steps(student, plan, lambda at: teachers.divergence(student, teacher, [known[i] for i in at])))


# --- pairs, rated answers and prompts that are rewarded ---------------------------------------------------------------------


def test_pairs(model: Path, data: Path, tmp_path: Path) -> None:
    """DPO: both answers to a prompt with its images, each in a forward of its own; the prompt may be given twice."""
    rows = [texts.pair(row) for row in texts.read(data)]
    rows[0] |= {name: rows[0]["prompt"] + rows[0][name] for name in ("chosen", "rejected")}
    del rows[0]["prompt"]
    file = write_rows(data.parent / "pairs.jsonl", rows)
    given = OF_ANSWERS | {"beta": preferred.BETA}
    run = forge.dpo(model_path=str(model), data_path=str(file), ckpt_output_dir=tmp_path / "run", **given).output_dir
    store, plan = _planned(run)
    known = texts.pairs_of(store, file, model)
    plain = modalities.plain(model)
    with torch.no_grad():
        before = [preferred.terms(plain, pair) for pair in known]

    def loss(taken: list[int]) -> torch.Tensor:
        return preferred.dpo([preferred.terms(plain, known[at]) for at in taken], [before[at] for at in taken])

    _compare(run, pictures.steps(plain, plan, loss))


def test_rated_answers(model: Path, data: Path, tmp_path: Path) -> None:
    """KTO: each answer, and the next row's behind the same prompt and its images."""
    rows = [texts.rated_row(row, at) for at, row in enumerate(texts.read(data))]
    file = write_rows(data.parent / "rated.jsonl", rows)
    own = {name: rated.GIVEN[name] for name in ("beta", "desirable_weight", "undesirable_weight")}
    given = OF_ANSWERS | own | {"model_path": str(model), "data_path": str(file)}
    run = forge.kto(**given, ckpt_output_dir=tmp_path / "run").output_dir
    store, plan = _planned(run)
    answers = texts.Rated(store, file, model)
    plain = modalities.plain(model)
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
    rows = [{name: value for name, value in row.items() if name != "completion"} for row in texts.read(data)[:12]]
    file = write_rows(tmp_path / "prompts.jsonl", rows)
    (tmp_path / "images").symlink_to(data.parent / "images")
    (tmp_path / "text_rewards.py").write_text(REWARDS, encoding="utf-8")
    pictures.import_beside(file, "text_rewards", monkeypatch)
    given = drawn.GIVEN | drawn.OWN["grpo"] | {"reward": ("text_rewards:letters",), "max_tokens_per_gpu": 400}
    given |= {"model_path": str(model), "data_path": str(file), "ckpt_output_dir": tmp_path / "run"}
    if texts.takes_suffix(processor):
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
    _compare(
        run,
        updates(
            run, modalities.plain(model).eval(), modalities.plain(model).eval(), asked, forge_data.MediaInputs(model).token_ids
        ),
    )
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
