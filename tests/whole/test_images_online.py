"""Prompts with images in the online verbs: sampling, losses and gradients are plain transformers', one completion a forward."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import forge
import forge_algos
import forge_data
from forge.run import _memory, _run
from forge_algos import online
from forge_algos.online.sampling._draw import inverse_cdf, uniforms
from forge_algos.online.updates._divide import divide_shards

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import modalities, pictures
from .conftest import write_rows
from .policies import logits, oracle
from .starts import metrics, untimed, weights
from .three_steps import SETTINGS, figures
from .verbs import run_verb, run_verb_killed

# Exports with images are compared in test_images.py, those of each verb in test_verbs.py.
pytestmark = pytest.mark.usefixtures("unchecked_exports")

REWARDS = '''
SEEN = []


def letters(prompts, completions, answer, **columns):
    """A number that follows from the letters; what was given is kept."""
    SEEN.append((prompts, completions, answer, columns))
    return [sum(map(ord, one[-1]["content"])) % 97 / 97 for one in completions]
'''
GIVEN: dict[str, Any] = {name: value for name, value in SETTINGS.items() if name != "moe_aux_loss"} | {
    "reward": ("picture_rewards:letters",),
    "effective_batch_size": 4,
    "max_new_tokens": 7,
    "max_tokens_per_gpu": 200,
    "max_steps": 4,
    "num_iterations": 2,
    "learning_rate": 3e-3,
}
OWN: dict[str, dict[str, Any]] = {
    "grpo": {"num_generations": 3, "kl_weight": 0.1},
    "rloo": {"num_generations": 3, "kl_weight": 0.1},
    "ppo": {"num_generations": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the runs train."""
    return pictures.save("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 prompts, and their reward."""
    made = pictures.prompts(tmp_path_factory.mktemp("prompts"))
    (made.parent / "picture_rewards.py").write_text(REWARDS)
    return made


@pytest.fixture(autouse=True)
def _rewards(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures.import_beside(data, "picture_rewards", monkeypatch)


@pytest.fixture(scope="module")
def given(model: Path, data: Path) -> dict[str, Any]:
    """Settings of four steps on two rollouts."""
    return {"model_path": str(model), "data_path": str(data), **GIVEN}


def asked(data: Path, model: Path) -> list[dict[str, torch.Tensor]]:
    """What the processor makes of each row."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    return [pictures.prompt_inputs(model, row["prompt"], data.parent) for row in rows]


def sampled_media(inputs: forge_data.MediaInputs, store: forge_data.PromptStore) -> online.SampledMedia:
    """What a sampler must know of the media of a store's prompts; the first two with some are tried."""
    documents = [
        forge_algos.MediaDocument(each.input_ids, inputs(each), [(medium.start, medium.stop) for medium in each.media])
        for each in store
        if each.media
    ]
    return online.SampledMedia(
        documents=documents[:2],
        token_ids=inputs.token_ids,
        joins=inputs.joins,
        join=inputs.join,
        join_more=partial(inputs.join, more=True),
    )


@pytest.fixture(
    scope="module",
    params=["gemma3", "llava", *(pytest.param(name, marks=pytest.mark.lane) for name in ("llava-next", "idefics2")), "mllama"],
)
def sampled(request: pytest.FixtureRequest, model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(plain model, its prompts, the arguments of a sampler, prompts and images for `sample`)."""
    path = model if request.param == "gemma3" else pictures.save(request.param, tmp_path_factory.mktemp("model"))
    store = forge_data.prepare_prompts(data, str(path), tmp_path_factory.mktemp("store"), media=True)
    inputs, plain = forge_data.MediaInputs(path), modalities.plain(path).eval()
    known = sampled_media(inputs, store)
    images = [partial(inputs, each) if each.media else None for each in store]
    return plain, asked(data, path), known, [each.input_ids for each in store], images


OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "top_p": 1.0, "top_k": 0, "seed": 5}


@pytest.mark.parametrize(("tokens", "each"), [(1, 1), (10_000, 1), (10_000, 3)])
def test_the_likeliest_tokens_are_those_of_generate(sampled: Any, tokens: int, each: int) -> None:
    """Alone, in batches of prompts with images and without, and with prompts computed once for their completions."""
    plain, prompts, known, ids, images = sampled
    sampler = online.GenerateSampler(plain, eos_ids=[2], pad_id=0, batch_tokens=tokens, media=known)
    found = sampler.sample(ids, num_generations=each, temperature=1e-4, media=images, **OPTIONS)
    for at, prompt in enumerate(prompts):
        assert prompt["input_ids"][0].tolist() == ids[at].tolist()
        theirs = plain.generate(
            **prompt, max_new_tokens=8, do_sample=False, eos_token_id=2, suppress_tokens=[*known.token_ids], pad_token_id=0
        )[0, len(ids[at]) :].tolist()
        assert [one.ids.tolist() for one in found[at * each : (at + 1) * each]] == [theirs] * each
    assert sampler._beside == ("any" if known.joins else "same")
    # Mllama's tokens are told which images they see, and behind a cache `generate` would not tell them.
    assert sampler._shares_media is (known.joins if each > 1 else None)


def test_tokens_are_drawn_from_what_the_model_predicts(sampled: Any) -> None:
    """The token at which the summed probability of a plain forward exceeds the completion's number, whatever stands beside."""
    plain, prompts, known, ids, images = sampled
    draw = partial(online.GenerateSampler, plain, eos_ids=[2], pad_id=0, media=known)
    options = {"num_generations": 2, "temperature": 0.9, "media": images, **OPTIONS}
    found = draw(batch_tokens=10_000).sample(ids, **options)
    for number, one in enumerate(found):
        at, which = divmod(number, 2)
        with torch.no_grad():
            scores = logits(plain, prompts[at], one.ids) / 0.9
        scores[:, [*known.token_ids]] = -torch.inf
        assert inverse_cdf(scores, uniforms(5, [(at, which)], 8)[0, : len(one.ids)]).tolist() == one.ids.tolist()
    singly = draw(batch_tokens=1).sample(ids, **options)
    assert [one.ids.tolist() for one in singly] == [one.ids.tolist() for one in found]


def test_no_token_of_an_image_is_drawn(sampled: Any) -> None:
    """However likely: a completion with one would need pixels."""
    plain, _, known, ids, images = sampled
    head, token = plain.get_output_embeddings(), min(known.token_ids)
    before = head.weight.detach().clone()
    try:
        with torch.no_grad():
            head.weight[token] = head.weight.abs().sum(0) * 9
            head.weight[(token + 1) % len(head.weight)] = -head.weight[token]
        sampler = online.GenerateSampler(plain, eos_ids=[2], pad_id=0, batch_tokens=10_000, media=known)
        found = sampler.sample(ids, num_generations=2, temperature=1.0, media=images, **OPTIONS)
    finally:
        with torch.no_grad():
            head.weight.copy_(before)
    assert not {token for one in found for token in one.ids.tolist()} & known.token_ids


@pytest.mark.parametrize("beside", ["same", "none"])
def test_prompts_that_may_not_stand_beside_others(sampled: Any, beside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same completions where a batch has one prompt with images alone, or one row of it."""
    plain, _, known, ids, images = sampled
    seen: list[list[int]] = []

    class Counted(online.GenerateSampler):
        def _generate(self, prompts: Any, numbers: Any, *more: Any) -> Any:
            seen.append(list(numbers))
            return super()._generate(prompts, numbers, *more)

    draw = partial(Counted, plain, eos_ids=[2], pad_id=0, batch_tokens=10_000, media=known)
    options = {"num_generations": 2, "temperature": 0.9, "media": images, **OPTIONS}
    together = draw().sample(ids, **options)
    assert len(seen) == (1 if known.joins else 9)  # else each of 8 prompts with images alone
    seen.clear()
    monkeypatch.setattr("forge_algos.online.sampling._generate.may_stand_beside", lambda *_: beside)
    apart = draw().sample(ids, **options)
    with_media = [numbers for numbers in seen if images[numbers[0]] is not None]
    assert [len(numbers) for numbers in with_media] == ([2] * 8 if beside == "same" else [1] * 16)
    assert all(images[number] is None for numbers in seen for number in numbers if numbers not in with_media)
    assert [one.ids.tolist() for one in apart] == [one.ids.tolist() for one in together]


def test_what_padding_changes_stands_alone(sampled: Any) -> None:
    """Batches are tried with images padded, also where those that are tried are alike in size."""
    plain, _, known, ids, images = sampled

    def spoiled(found: Any) -> Any:
        return [{name: array + (array.dtype.kind == "f") for name, array in each.items()} for each in found]

    known = attrs.evolve(known, join_more=spoiled)
    sampler = online.GenerateSampler(plain, eos_ids=[2], pad_id=0, batch_tokens=10_000, media=known)
    sampler.sample(ids, num_generations=1, temperature=1.0, media=images, **OPTIONS)
    assert sampler._beside == "same"


def test_images_of_another_number(sampled: Any) -> None:
    """Images of some of the prompts, and those that the sampler was not made for, are one error."""
    plain, _, known, ids, images = sampled
    for mine, several in ((known, images[:2]), (None, images)):
        sampler = online.GenerateSampler(plain, eos_ids=[2], pad_id=0, batch_tokens=100, media=mine)
        with pytest.raises(forge_algos.RolloutError, match="media: of"):
            sampler.sample(ids, num_generations=1, temperature=1.0, media=several, **OPTIONS)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gemma3", "several in a forward, padded"),
        ("llava", "several in a row"),
        ("llava-next", "several in a row"),
        pytest.param("idefics2", "several in a row", marks=pytest.mark.lane),
        ("mllama", "one sample a row"),
    ],
)
def test_losses_are_those_of_plain_transformers(
    name: str, rows: str, given: dict[str, Any], model: Path, data: Path, tmp_path: Path
) -> None:
    """Log-probabilities of policy and reference, losses and gradient norms of two updates on each of two rollouts."""
    path = model if name == "gemma3" else pictures.save(name, tmp_path / "model")
    run = forge.grpo(**given | OWN["grpo"] | {"model_path": str(path)}, ckpt_output_dir=tmp_path / "run").output_dir
    said = (run / "log.txt").read_text()
    assert f"images: {rows}" in said
    assert "12 prompts; 12 images, for which" in said
    assert "prompts: computed once a completion: its tokens may stand for other media" in said
    never = forge_data.MediaInputs(path).token_ids
    expected = oracle(run, modalities.plain(path).eval(), modalities.plain(path).eval(), asked(data, path), never)
    lines = [line for line in metrics(run) if "loss" in line]
    np.testing.assert_allclose([line["loss"] for line in lines], [loss for loss, _ in expected], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([line["grad_norm"] for line in lines], [norm for _, norm in expected], rtol=1e-4)
    assert [line["ratio"] for line in lines[::2]] == pytest.approx([1, 1], abs=1e-6)


def test_rewards_are_given_images(given: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """In the prompts, as TRL's are, and in the columns that have some; by their paths."""
    image = str(data.parent / "images/0_0.png")
    rows = [{"prompt": [{"role": "user", "content": "what?"}], "image": image, "answer": "a"}] * 2
    write_rows(tmp_path / "rows.jsonl", rows)
    settings = given | OWN["rloo"] | {"data_path": str(tmp_path / "rows.jsonl"), "max_steps": 1}
    forge.rloo(**settings, ckpt_output_dir=tmp_path / "run")
    shown = json.loads((tmp_path / "run" / "rollouts" / "step_1.jsonl").read_text().splitlines()[1])["prompt"]
    assert shown.startswith("[0_0.png] user")
    ((prompts, completions, answers, columns),) = sys.modules["picture_rewards"].SEEN
    assert prompts[0] == [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]}]
    assert completions[0][-1]["role"] == "assistant"
    assert answers == ["a"] * 6
    assert columns == {"image": [image] * 6}


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("ppo", {"adapter": "lora", "lora_r": 4}),
        pytest.param("rloo", {"max_steps": 4}, marks=pytest.mark.lane),
        pytest.param("grpo", {"adapter": "lora", "lora_r": 4, "max_steps": 4}, marks=pytest.mark.lane),
        # Two models and two rollouts; what the verbs share beside media is tried with texts, in test_online.py.
        pytest.param(
            "grpo",
            {"reference": "moving", "reference_sync_steps": 1, "reference_mixup": 0.5, "max_steps": 3},
            marks=pytest.mark.slow,
        ),
        pytest.param("grpo", {"loss_type": "gspo", "updates_per_pass": 2, "num_iterations": 1}, marks=pytest.mark.lane),
    ],
)
def test_any_micro_batches(verb: str, more: dict[str, Any], given: dict[str, Any], tmp_path: Path) -> None:
    """The same figures in large micro-batches, in small ones, and without packing; held-out prompts are measured too."""
    settings = given | OWN[verb] | {"validation_split": 0.25, "max_steps": 2} | more
    found = []
    for at, own in enumerate(({"max_tokens_per_gpu": 2000}, {"max_tokens_per_gpu": 60}, {"packing": "off"})):
        result = getattr(forge, verb)(**settings | own, ckpt_output_dir=tmp_path / str(at))
        lines = [line for line in metrics(result.output_dir) if "loss" in line]
        found.append([[line["loss"], line["grad_norm"], line["reward"], line["ratio"]] for line in lines])
        assert result.eval_before["eval_reward"] > 0
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "strategy"),
    ci_keeps([("grpo", "fsdp2")], [("grpo", "ddp"), ("rloo", "fsdp2"), ("grpo", "fsdp2"), ("ppo", "zero2")]),
)
def test_two_ranks(verb: str, strategy: str, given: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """Divided it samples and trains as on one rank, also where a rank's rows have no images."""
    few = pictures.prompts(tmp_path, 6, images=2)
    settings = given | OWN[verb] | {"data_path": str(few), "effective_batch_size": 3, "strategy": strategy}
    for ranks in (1, 2):
        run = settings | {"ckpt_output_dir": str(tmp_path / str(ranks))}
        run |= {} if ranks == 2 else {"strategy": "auto"}
        run_on_ranks(run_verb, ranks, verb, run, str(data.parent), joined=False)
    one, two = ([line for line in metrics(tmp_path / str(ranks)) if "loss" in line] for ranks in (1, 2))
    for name in ("loss", "grad_norm", "reward", "length"):
        both = [[line[name] for line in lines] for lines in (two, one)]
        np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-5, err_msg=name)
    texts = [
        [online.Rollout.read(tmp_path / str(ranks) / "rollouts" / f"step_{step}.jsonl").completion_texts for step in (1, 3)]
        for ranks in (1, 2)
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("step", ci_keeps([1], [1, 2, 3]))
def test_a_killed_run(step: int, given: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """Killed between two updates on a rollout, or between two rollouts, and started again it ends with the same bits."""
    settings = given | OWN["grpo"] | {"full_state_every_steps": 1}
    whole, killed = ({**settings, "ckpt_output_dir": str(tmp_path / name)} for name in ("whole", "killed"))
    run_on_ranks(run_verb, 1, "grpo", whole, str(data.parent), joined=False)
    with pytest.raises(RuntimeError, match="status -9"):
        run_on_ranks(run_verb_killed, 1, "grpo", killed, str(data.parent), step, joined=False)
    run_on_ranks(run_verb, 1, "grpo", killed, str(data.parent), joined=False)
    assert f"resuming after step {step}" in (tmp_path / "killed" / "log.txt").read_text()
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_an_image_that_changes_meanwhile(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops the run with its row and file; put back, the run goes on."""
    data = pictures.prompts(tmp_path, 4)
    settings = given | OWN["grpo"] | {"data_path": str(data), "full_state_every_steps": 1, "max_steps": 3}
    whole = forge.grpo(**settings, ckpt_output_dir=tmp_path / "whole").output_dir
    file = tmp_path / "images/0_0.png"
    before, make = file.read_bytes(), online.make_rollout
    seen: list[int] = []

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) == 2:
            file.write_bytes(before + b".")
            kwargs["media"]._made.cache_clear()
        return make(*args, **kwargs)

    monkeypatch.setattr(online, "make_rollout", spoiled)
    run = tmp_path / "run"
    with pytest.raises(forge_data.DataError, match=r"^prompts\.jsonl:1: .*0_0\.png changed since .*put it back") as caught:
        forge.grpo(**settings, ckpt_output_dir=run)
    assert caught.value.exit_status == 2
    file.write_bytes(before)
    forge.grpo(**settings, ckpt_output_dir=run)
    assert figures(run) == figures(whole)
    assert weights(run) == weights(whole)


def test_the_memory_plan(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update takes what was planned, with pixels and the tower's forward."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    monkeypatch.setattr("forge.tasks._rollouts.end_ids", lambda _: [10**6])
    settings = given | OWN["grpo"] | {"packing": "off", "max_steps": 1}
    forge.grpo(**settings, ckpt_output_dir=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "memory.json").read_text())
    phases = {phase["name"]: phase for phase in about["phases"]}
    assert not any("pixels" in note for note in about["notes"])
    assert phases["first steps"]["planned"] == pytest.approx(phases["first steps"]["measured"], rel=0.02)
    assert phases["rollout"]["parts"]["activations"] > 0


@pytest.mark.parametrize(
    ("verb", "more", "refusal"),
    [
        ("grpo", {"adapter": "prefix"}, "adapter=prefix and rows with images.*lora"),
        ("grpo", {"data_path": "TEXT"}, r"text\.jsonl:2: its prompt has '<img>' in its text, .* take it out of the text"),
    ],
)
def test_what_cannot_have_images(
    verb: str, more: dict[str, Any], refusal: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error before a model is loaded, and no run directory."""
    monkeypatch.setattr(_run, "load_with_attention", lambda *_, **__: pytest.fail("a model is loaded"))
    monkeypatch.setattr("forge.verbs._online.OnlineTask.check_settings", lambda *_: None)
    with_image, *_ = Path(given["data_path"]).read_text().splitlines()
    rows = [json.loads(with_image), {"prompt": [{"role": "user", "content": "an <img> in words"}]}]
    files = {"TEXT": str(Path(given["data_path"]).with_name("text.jsonl"))}
    write_rows(Path(files["TEXT"]), rows)
    settings = given | OWN.get(verb, {}) | {name: files.get(each, each) for name, each in more.items()}
    with pytest.raises((forge.ForgeError, forge_data.ForgeDataError), match=refusal) as caught:
        getattr(forge, verb)(**settings, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


def test_completions_in_lines_and_alone() -> None:
    """Every completion once, in the order of the prompts; places of a row's lines are at most what it may have."""
    random = np.random.default_rng(0)
    for ranks in (1, 2, 3):
        prompts, own = np.repeat(random.integers(5, 40, 9), 4), random.integers(1, 20, 36)
        given = (np.arange(36), np.repeat(np.arange(9), 4), prompts, own)
        for layout in ("lines", "single"):
            dealt = divide_shards(*given, max_tokens=130, data_parallel_size=ranks, share_prompts=False, layout=layout)
            rows = [row for mine in dealt for row in mine if len(row)]
            assert sorted(int(i) for row in rows for i in row) == list(range(36))
            assert len({len(mine) for mine in dealt}) == 1
            assert all(len(row) * (prompts + own)[row].max() <= 130 for row in rows)
            assert layout == "lines" or all(len(row) == 1 for row in rows)
