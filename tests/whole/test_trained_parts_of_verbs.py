"""Vision tower and projector that train with other verbs than sft and the preferences: runs are plain transformers'."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM, AutoModelForSequenceClassification

import forge
import forge_data
import forge_packing
from forge.run import _memory
from forge_algos.online import Rollout

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import (
    pictures,
    test_images_of_answers as answers,
    test_images_of_rewards as rewards,
    test_images_of_teachers as teachers,
    test_images_online as online,
)
from .conftest import write_rows
from .policies import oracle, token_logps
from .starts import untimed, weights
from .three_steps import figures, samples
from .verbs import run_verb, run_verb_killed

ALL: dict[str, Any] = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False, "save_dtype": "float32"}
LORA: dict[str, Any] = {"adapter": "lora", "lora_r": 4, "save_dtype": None}
PARTS = (("vision_tower", "vision_model"), ("multi_modal_projector", "connector"))
"""Names of the tower and of the projector."""


def unmeasured(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run without held-out rows."""
    return {name: value for name, value in given.items() if name != "validation_split"} | ALL


GIVEN: dict[str, dict[str, Any]] = {
    "kto": unmeasured(answers.GIVEN) | {"max_tokens_per_gpu": 200},
    "reward": unmeasured(rewards.GIVEN),
    "distill": unmeasured(teachers.GIVEN),
    **{verb: unmeasured(online.GIVEN | own) for verb, own in online.OWN.items()},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models of `pictures`, each made once."""
    return cache(lambda name: pictures.save(name, tmp_path_factory.mktemp(name)))


def whole(model: Path, auto: Any = AutoModelForMultimodalLM) -> Any:
    """The saved model as transformers loads it, all of it trainable."""
    return auto.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")


def same(
    run: forge.RunResult, plain: Any, model: Path, expected: list[tuple[float, float]], folder: Path, atol: float = 1e-4
) -> None:
    """Losses and gradient norms of every step, and weights behind the last one; tower and projector have moved."""
    assert figures(run.output_dir) == pytest.approx([loss for loss, _ in expected], rel=1e-5, abs=2e-6)
    assert figures(run.output_dir, "grad_norm") == pytest.approx([norm for _, norm in expected], rel=1e-4)
    plain.save_pretrained(folder / "plain")
    file = "adapter_model.safetensors" if hasattr(plain, "peft_config") else "model.safetensors"
    found, weights = load_file(run.model_dir / file), load_file(folder / "plain" / file)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        # The scores of a query all move by the same with it: its gradient is rounding, which AdamW makes steps of.
        if not name.endswith("k_proj.bias"):
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
    if file == "model.safetensors":
        before = load_file(model / file)
        moved = [name for name, tensor in before.items() if name in found and not torch.equal(tensor.float(), found[name])]
        assert all(any(part in name for part in either for name in moved) for either in PARTS)


def adapted(plain: Any, directory: Path, task: str = "CAUSAL_LM") -> tuple[Any, dict[str, Any]]:
    """Save an adapter on layers of all parts, that is not zero; return a model with it, and the settings that train it."""
    torch.manual_seed(3)
    targets = r".*(language_model.*(q_proj|down_proj)|vision_tower.*layers.0.*(q_proj|fc2)|multi_modal_projector.*linear_1)"
    made: Any = get_peft_model(plain, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type=task))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(directory)
    settings = {"adapter": "lora", "adapter_path": str(directory), "save_dtype": None}
    return PeftModel.from_pretrained(made.unload(), directory, is_trainable=True), settings


def planned(run: forge.RunResult) -> tuple[forge_data.TokenStore, forge_packing.BatchPlan]:
    """The rows that a run trained on, and its plan."""
    store = forge_data.TokenStore.open(run.output_dir / "data" / "train")
    return store, forge_packing.BatchPlan.load(run.output_dir / "plan" / "plan.npz")


@pytest.fixture(scope="module")
def rated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 rated answers."""
    return pictures.rated(tmp_path_factory.mktemp("rated"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 prompts, and their reward beside them."""
    data = pictures.prompts(tmp_path_factory.mktemp("prompts"))
    (data.parent / "picture_rewards.py").write_text(online.REWARDS)
    return data


@pytest.fixture(autouse=True)
def _rewards(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(prompts.parent)
    monkeypatch.delitem(sys.modules, "picture_rewards", raising=False)


@pytest.mark.parametrize(
    ("name", "lora", "more"),
    [
        ("gemma3", False, {}),
        *(
            pytest.param(*case, marks=pytest.mark.lane)
            for case in (
                ("gemma3", False, {"packing": "off"}),
                ("llava-before-last", False, {"reference": "live"}),
                ("llava-before-last", True, {}),
                ("llava-before-last", True, {"reference": "live"}),
                ("llava-next", False, {}),
                ("idefics2", False, {}),
                ("mllama", False, {}),
                ("mllama", False, {"reference": "live"}),
            )
        ),
    ],
)
def test_kto(name: str, lora: bool, more: dict[str, Any], saved: Callable[[str], Path], rated: Path, tmp_path: Path) -> None:
    """The reference, also that of the mismatched answers, has the tower as it began."""
    model, plain = saved(name), whole(saved(name))
    if lora:
        plain, adapter = adapted(plain, tmp_path / "adapter")
        more = more | adapter
    run = forge.kto(**GIVEN["kto"] | more, model_path=str(model), data_path=str(rated), ckpt_output_dir=tmp_path / "run")
    store, plan = planned(run)
    rows = answers.Answers(store, rated, model)
    own = rows.references(plain)
    same(run, plain, model, pictures.steps(plain, plan, lambda taken: rows.loss(plain, taken, *own)), tmp_path)
    assert max(figures(run.output_dir, "kl")) > 0


@pytest.mark.lane
@pytest.mark.parametrize("lora", [False, True])
def test_reward(lora: bool, tmp_path: Path) -> None:
    """A reward model's tower, beside its head."""
    model = pictures.save("gemma3", tmp_path / "model", AutoModelForSequenceClassification, num_labels=1)
    data = pictures.pairs(tmp_path)
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    write_rows(data, [row | {"margin": 0.1 * (at % 4)} for at, row in enumerate(lines)])
    plain, more = whole(model, AutoModelForSequenceClassification), {}
    if lora:
        plain, more = adapted(plain, tmp_path / "adapter", "SEQ_CLS")
        more["freeze_multi_modal_projector"] = True  # Gemma 3's has no linear layer
    given = GIVEN["reward"] | more | {"model_path": str(model), "data_path": str(data)}
    run = forge.reward(**given, ckpt_output_dir=tmp_path / "run")
    store, plan = planned(run)
    pairs = rewards.Pairs(store, data, model)
    same(run, plain, model, pictures.steps(plain, plan, lambda taken: pairs.loss(plain, taken)), tmp_path)


@pytest.mark.parametrize(("name", "lora"), [("llava-before-last", True), pytest.param("gemma3", False, marks=pytest.mark.lane)])
def test_distill(name: str, lora: bool, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """The teacher sees by a tower of its own."""
    model, teacher, data = saved(name), pictures.save(name, tmp_path / "teacher", seed=21), pictures.rows(tmp_path)
    plain, more = adapted(whole(model), tmp_path / "adapter") if lora else (whole(model), {})
    given = GIVEN["distill"] | more | {"model_path": str(model), "teacher_path": str(teacher), "data_path": str(data)}
    run = forge.distill(**given, ckpt_output_dir=tmp_path / "run")
    store, plan = planned(run)
    rows, theirs = samples(store, list(range(len(store))), pictures.inputs_of(model, data)), whole(teacher)
    expected = pictures.steps(plain, plan, lambda taken: teachers.divergence(plain, theirs, [rows[at] for at in taken]))
    same(run, plain, model, expected, tmp_path)


@pytest.mark.parametrize(
    ("verb", "name", "lora"),
    [
        ("grpo", "llava-next", False),
        ("ppo", "gemma3", False),
        *(
            pytest.param(*case, marks=pytest.mark.lane)
            for case in (
                *(("grpo", name, False) for name in ("gemma3", "idefics2", "mllama")),
                *((verb, name, False) for verb in ("rloo", "ppo") for name in ("llava-next", "idefics2", "mllama")),
                ("rloo", "gemma3", False),
                *((verb, "llava-before-last", True) for verb in ("grpo", "rloo", "ppo")),
            )
        ),
    ],
)
def test_online(verb: str, name: str, lora: bool, saved: Callable[[str], Path], prompts: Path, tmp_path: Path) -> None:
    """It samples by the tower of now, and the KL is from the tower of the start; a value head learns beside them."""
    model = saved(name)
    plain, first, more = whole(model), whole(model), {}
    if lora:
        plain, more = adapted(plain, tmp_path / "adapter")
        first = PeftModel.from_pretrained(first, tmp_path / "adapter")
    given = GIVEN[verb] | more | {"model_path": str(model), "data_path": str(prompts)}
    run = getattr(forge, verb)(**given, ckpt_output_dir=tmp_path / "run")
    never = forge_data.MediaInputs(model).token_ids
    expected = oracle(run.output_dir, plain.eval(), first.eval(), online.asked(prompts, model), never, verb)
    same(run, plain, model, expected, tmp_path, atol=3e-4)


@pytest.mark.lane
def test_references_of_adapted_towers(saved: Callable[[str], Path], rated: Path, prompts: Path, tmp_path: Path) -> None:
    """Stored, without its adapter and as a second model they are the same; the KL of GRPO is from the model without it."""
    model = saved("llava-before-last")
    given = LORA | {"model_path": str(model), "learning_rate": 3e-2}
    found = []
    for kind in ("stored", "adapter_off", "live"):
        settings = GIVEN["kto"] | given | {"data_path": str(rated), "reference": kind}
        run = forge.kto(**settings, ckpt_output_dir=tmp_path / kind).output_dir
        found.append([figures(run, name) for name in ("loss", "grad_norm", "kl")])
        np.testing.assert_allclose(found[-1], found[0], rtol=1e-5, atol=1e-6)
    settings = GIVEN["grpo"] | given | {"data_path": str(prompts), "freeze_language_model": True}
    run = forge.grpo(**settings, ckpt_output_dir=tmp_path / "run").output_dir
    first, asked, rollout = whole(model).eval(), online.asked(prompts, model), Rollout.read(run / "rollouts" / "step_3.jsonl")
    with torch.no_grad():
        expected = [
            token_logps(first, asked[int(rollout.prompt_rows[group])], ids)
            for group, ids in zip(rollout.groups, rollout.completion_ids, strict=True)
        ]
    assert rollout.ref_logps is not None
    np.testing.assert_allclose(rollout.ref_logps, torch.cat(expected), atol=1e-5)
    assert np.abs(rollout.ref_logps - rollout.old_logps).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "more"),
    ci_keeps(
        [],
        [
            *((verb, more) for verb in ("ppo", "rloo", "grpo") for more in ({}, LORA)),
            ("grpo", {"reference": "moving", "reference_sync_steps": 1}),
        ],
    ),
)
def test_any_micro_batches(
    verb: str, more: dict[str, Any], saved: Callable[[str], Path], prompts: Path, tmp_path: Path
) -> None:
    """The same figures in large micro-batches, in small ones, and one completion a forward; a value head too."""
    given = GIVEN[verb] | {"model_path": str(saved("llava-before-last")), "data_path": str(prompts)} | more
    found = []
    for at, own in enumerate(({"max_tokens_per_gpu": 2000}, {"max_tokens_per_gpu": 60}, {"packing": "off"})):
        run = getattr(forge, verb)(**given | own, ckpt_output_dir=tmp_path / str(at)).output_dir
        found.append([figures(run, name) for name in ("loss", "grad_norm", "reward", "ratio")])
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "name", "more"),
    ci_keeps(
        [],
        [
            *((verb, "llava-before-last", {"strategy": "fsdp2"}) for verb in ("kto", "grpo", "ppo")),
            *((verb, "gemma3", {"strategy": "fsdp2"}) for verb in ("kto", "grpo")),
            *((verb, "llava-before-last", LORA | {"strategy": "fsdp2"}) for verb in ("kto", "grpo")),
            *((verb, "mllama", {"strategy": "ddp"}) for verb in ("kto", "grpo")),
        ],
    ),
)
def test_two_ranks(verb: str, name: str, more: dict[str, Any], saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Divided it trains as on one rank, also where a rank's rows have no images, and ends."""
    data = pictures.rated(tmp_path, 12, images=2) if verb == "kto" else pictures.prompts(tmp_path, 6, images=2)
    (tmp_path / "picture_rewards.py").write_text(online.REWARDS)
    settings = GIVEN[verb] | more | {"model_path": str(saved(name)), "data_path": str(data), "effective_batch_size": 3}
    for ranks in (1, 2):
        run = settings | {"ckpt_output_dir": str(tmp_path / str(ranks))} | ({"strategy": "auto"} if ranks == 1 else {})
        run_on_ranks(run_verb, ranks, verb, run, str(tmp_path), joined=False)
    for figure in ("loss", "grad_norm"):
        one, two = (figures(tmp_path / str(ranks), figure) for ranks in (1, 2))
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5, err_msg=figure)


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "step"), ci_keeps([], [("kto", 1), ("grpo", 1), ("grpo", 2)]))
def test_a_killed_run(verb: str, step: int, saved: Callable[[str], Path], rated: Path, prompts: Path, tmp_path: Path) -> None:
    """Killed between two updates on a rollout, or two rollouts, and started again it ends with the same bits."""
    data = rated if verb == "kto" else prompts
    settings = GIVEN[verb] | {"model_path": str(saved("llava-before-last")), "data_path": str(data)}
    settings |= {"full_state_every_steps": 1, "keep_full_state": True}
    unbroken, killed = ({**settings, "ckpt_output_dir": str(tmp_path / name)} for name in ("unbroken", "killed"))
    run_on_ranks(run_verb, 1, verb, unbroken, str(prompts.parent), joined=False)
    with pytest.raises(RuntimeError, match="status -9"):
        run_on_ranks(run_verb_killed, 1, verb, killed, str(prompts.parent), step, joined=False)
    run_on_ranks(run_verb, 1, verb, killed, str(prompts.parent), joined=False)
    assert f"resuming after step {step}" in (tmp_path / "killed" / "log.txt").read_text()
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "unbroken")
    assert weights(tmp_path / "killed") == weights(tmp_path / "unbroken")


@pytest.mark.lane
@pytest.mark.parametrize("verb", ["kto", "distill", "ppo"])
def test_the_memory_plan(
    verb: str, saved: Callable[[str], Path], rated: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take what was planned, the tower's backward pass and gradients too."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    monkeypatch.setattr("forge.tasks._rollouts.end_ids", lambda _: [10**6])
    model = str(saved("llava-before-last"))
    data = {"kto": rated, "ppo": prompts}.get(verb) or pictures.rows(tmp_path)
    given = GIVEN[verb] | {"model_path": model, "data_path": str(data), "max_steps": 2}
    given |= {"teacher_path": model} if verb == "distill" else {}
    getattr(forge, verb)(**given, ckpt_output_dir=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "memory.json").read_text())
    phases = {phase["name"]: phase for phase in about["phases"]}
    assert phases["first steps"]["planned"] == pytest.approx(phases["first steps"]["measured"], rel=0.02)
