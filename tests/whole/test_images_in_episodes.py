"""Episodes of several turns on prompts with images: every forward has the images, as plain transformers' has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import forge
import forge_algos
import forge_data
from forge_algos import online
from forge_algos.online.sampling._draw import inverse_cdf, uniforms

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import modalities, pictures, reference
from .policies import KL, k3, logits, surrogate
from .sampling_stub import served
from .starts import metrics
from .test_images_online import GIVEN, OWN, asked
from .verbs import run_verb

if TYPE_CHECKING:
    from pathlib import Path

# Exports with images are compared in test_images.py, those of each verb in test_verbs.py.
pytestmark = pytest.mark.usefixtures("unchecked_exports")

TURNS = 3
GAME = '''
import os


class Letters:
    """Asks three times, and rewards letters; what it is given it spoils."""

    def reset(self, *, prompt, seed, answer):
        parts = [part for message in prompt if isinstance(message["content"], list) for part in message["content"]]
        for part in (part for part in parts if part["type"] == "image"):
            assert os.path.isfile(part["image"])
            part["image"] = None
        self.turns = 0

    def step(self, turn):
        self.turns += 1
        return f"and {self.turns}?", sum(map(ord, turn["content"])) % 97 / 97, self.turns == 3


class Shows(Letters):
    """Answers with the text of an image's token."""

    def step(self, turn):
        return "an <img> for you", 0.0, False
'''
GAMES: dict[str, Any] = {name: value for name, value in GIVEN.items() if name != "reward"} | {
    **OWN["grpo"],
    "env": "picture_game:Letters",
    "max_turns": TURNS,
    "max_new_tokens": 44,
    "max_tokens_per_gpu": 400,
    "effective_batch_size": 3,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the runs train."""
    return saved("gemma3", tmp_path_factory.mktemp("gemma3"))


def saved(name: str, directory: Path) -> Path:
    """A model of which so many tokens end a turn that random weights end some; none of them is an image's."""
    pictures.save(name, directory)
    others = {*range(300, 512, 2)} - forge_data.MediaInputs(directory).token_ids
    GenerationConfig(eos_token_id=sorted(others)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts with one image, with two, and with none."""
    made = pictures.prompts(tmp_path_factory.mktemp("prompts"), 6)
    (made.parent / "picture_game.py").write_text(GAME)
    return made


@pytest.fixture(autouse=True)
def _game(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures.import_beside(data, "picture_game", monkeypatch)


def turns_of(learned: Any) -> list[tuple[int, int]]:
    """[start, stop) of each turn of the model among the tokens of an episode."""
    edges = np.flatnonzero(np.diff(np.asarray(learned), prepend=False, append=False))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def learned_logps(plain: Any, prompt: Any, ids: Any, learned: Any) -> torch.Tensor:
    """Log-probabilities of the model's tokens of an episode, in one forward with the prompt's images."""
    found = logits(plain, prompt, ids).log_softmax(-1)
    return found.gather(1, torch.tensor(np.asarray(ids), dtype=torch.int64)[:, None])[:, 0][torch.tensor(learned)]


def oracle(run: Path, plain: Any, first: Any, prompts: list[Any], never: frozenset[int]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of two updates on each rollout; what was drawn in each turn is what plain transformers predicts."""
    recipe = reference.Recipe(3e-3, 4, lr_scheduler="constant", max_grad_norm=0.5)
    optimizer, found = reference.AdamW(plain, recipe, lambda _name, _parameter: False), []
    several = 0
    for step in (1, 3):
        rollout = online.Rollout.read(run / "rollouts" / f"step_{step}.jsonl")
        assert rollout.learned is not None
        episodes = [
            (prompts[int(rollout.prompt_rows[group])], ids, learned)
            for group, ids, learned in zip(rollout.groups, rollout.completion_ids, rollout.learned, strict=True)
        ]
        with torch.no_grad():
            old, other = ([learned_logps(each, *episode) for episode in episodes] for each in (plain, first))
        for at, (prompt, ids, learned) in enumerate(episodes):
            with torch.no_grad():
                scores = logits(plain, prompt, ids)
            scores[:, [*never]] = -torch.inf
            turns = turns_of(learned)
            several += len(turns) > 1
            for number, (start, stop) in enumerate(turns):
                drawn = uniforms(rollout.seed, [(at * TURNS + number, 0)], stop - start)[0]
                assert inverse_cdf(scores[start:stop], drawn).tolist() == ids[start:stop].tolist()
        np.testing.assert_allclose(rollout.old_logps, torch.cat(old), atol=1e-5)
        np.testing.assert_allclose(rollout.ref_logps, torch.cat(other), atol=1e-5)
        rewards = torch.tensor(rollout.rewards).view(-1, 3)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).ravel()
        for _ in range(2):
            plain.zero_grad()
            terms = []
            for episode, before, reference_logps, advantage in zip(episodes, old, other, advantages, strict=True):
                logp = learned_logps(plain, *episode)
                terms.append(KL["grpo"] * k3(logp, reference_logps) - surrogate(logp - before, advantage))
            loss = torch.cat(terms).mean()
            loss.backward()
            gradients = {
                name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for name, parameter in plain.named_parameters()
                if parameter.requires_grad
            }
            found.append((float(loss.detach()), reference.norm(gradients)))
            optimizer.step(reference.clip(gradients, 0.5), 3e-3)
    assert several > 9
    return found


@pytest.mark.parametrize("name", ci_keeps(["gemma3", "mllama"], ["gemma3", "llava", "llava-next", "mllama"]))
def test_losses_are_those_of_plain_transformers(name: str, model: Path, data: Path, tmp_path: Path) -> None:
    """Tokens drawn in each turn, log-probabilities, losses and gradient norms: padded, packed, and one episode a forward."""
    path = model if name == "gemma3" else saved(name, tmp_path / "model")
    run = forge.grpo(**GAMES, model_path=str(path), data_path=str(data), ckpt_output_dir=tmp_path / "run").output_dir
    never = forge_data.MediaInputs(path).token_ids
    expected = oracle(run, modalities.plain(path).eval(), modalities.plain(path).eval(), asked(data, path), never)
    lines = [line for line in metrics(run) if "loss" in line]
    np.testing.assert_allclose([line["loss"] for line in lines], [loss for loss, _ in expected], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([line["grad_norm"] for line in lines], [norm for _, norm in expected], rtol=1e-4)


@pytest.mark.parametrize("kind", ci_keeps(["vllm"], ["vllm", "sglang"]))
def test_a_server_answers_every_turn_with_the_images(kind: str, model: Path, data: Path, tmp_path: Path) -> None:
    """Its log-probabilities are plain transformers' of the prompt with its images and all turns before."""
    with served(kind, model, images=True) as (url, _):
        own = {"sampler": kind, "sampler_url": url, "sampler_timeout": 60.0, "max_steps": 1, "num_iterations": 1}
        given = {"model_path": str(model), "data_path": str(data)}
        run = forge.grpo(**GAMES | own | given, ckpt_output_dir=tmp_path / "run").output_dir
    rollout = online.Rollout.read(run / "rollouts" / "step_1.jsonl")
    assert rollout.learned is not None
    assert sum(len(turns_of(learned)) > 1 for learned in rollout.learned) > 3
    plain, prompts, drawn = modalities.plain(model).eval(), asked(data, model), []
    for group, ids, learned in zip(rollout.groups, rollout.completion_ids, rollout.learned, strict=True):
        with torch.no_grad():
            scores = logits(plain, prompts[int(rollout.prompt_rows[group])], ids)
        scores[:, [*forge_data.MediaInputs(model).token_ids]] = -torch.inf
        found = scores.log_softmax(-1).gather(1, torch.tensor(np.asarray(ids), dtype=torch.int64)[:, None])[:, 0]
        drawn.append(found[torch.tensor(learned)])
    np.testing.assert_allclose(rollout.sampler_logps, torch.cat(drawn), atol=1e-5)


def test_a_token_of_an_image_in_an_observation(model: Path, data: Path, tmp_path: Path) -> None:
    """One error that names the environment, the row and the turn: it would stand for an image that there is none of."""
    settings = GAMES | {"model_path": str(model), "data_path": str(data), "env": "picture_game:Shows"}
    with pytest.raises(
        forge_algos.RewardError,
        match=r"picture_game:Shows'.* 'an <img> for you', which has a token of an image .*prompts\.jsonl:\d, turn 1",
    ):
        forge.grpo(**settings, ckpt_output_dir=tmp_path / "run")


@pytest.mark.lane
@pytest.mark.slow
def test_two_ranks(model: Path, data: Path, tmp_path: Path) -> None:
    """Divided it plays and trains as on one rank, also where a rank's rows have no images."""
    few = pictures.prompts(tmp_path, 6, images=2)
    settings = GAMES | {"model_path": str(model), "data_path": str(few)}
    for ranks in (1, 2):
        run = settings | {"ckpt_output_dir": str(tmp_path / str(ranks)), "strategy": "fsdp2" if ranks == 2 else "auto"}
        run_on_ranks(run_verb, ranks, "grpo", run, str(data.parent), joined=False)
    one, two = ([line for line in metrics(tmp_path / str(ranks)) if "loss" in line] for ranks in (1, 2))
    for name in ("loss", "grad_norm", "reward", "length"):
        both = [[line[name] for line in lines] for lines in (two, one)]
        np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-5, err_msg=name)
    assert any(line.get("rollout_observed") for line in metrics(tmp_path / "2"))
