"""Prompts with images that a sampling server answers: it sees the very tokens and images, or one error says so."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import forge
import forge_algos
import forge_data
from forge_algos import online

from ..lanes import ci_keeps
from . import modalities, pictures
from .sampling_stub import VERSIONS, Stub, served
from .test_images_online import GIVEN, OWN, REWARDS, asked, logits
from .test_sampling_servers import KNOWN

if TYPE_CHECKING:
    from pathlib import Path

SERVED: dict[str, Any] = {"sampler_timeout": 60.0, "max_sampler_gap": 0.012, "effective_batch_size": 3, "num_iterations": 1}
"""A gap of 0.002 to 0.005 is that of tokens of images, which a server is told never to draw, and of weights in bfloat16."""

WRONG = ("another image", "swapped images")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that is trained and served."""
    return pictures.save("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts with one image, with two, and with none."""
    made = pictures.prompts(tmp_path_factory.mktemp("prompts"), 6)
    (made.parent / "picture_rewards.py").write_text(REWARDS)
    return made


@pytest.fixture(autouse=True)
def _rewards(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures.import_beside(data, "picture_rewards", monkeypatch)


def run(kind: str, model: Path, data: Path, out: Path, *, fault: str = "", **more: Any) -> Stub:
    """Train two rollouts with a server; return its state."""
    settings = GIVEN | OWN["grpo"] | SERVED | {"max_steps": 2} | more
    with served(kind, model, fault=fault, images=True) as (url, stub):
        own = {"model_path": str(model), "data_path": str(data), "sampler": kind, "sampler_url": url}
        forge.grpo(**settings | own, ckpt_output_dir=out)
    return stub


def expected(rollout: online.Rollout, plain: Any, model: Path, data: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a rollout's tokens by plain transformers, one completion a forward.

    Those of the whole distribution, and of the one without tokens of images, from which is drawn.
    """
    prompts, never = asked(data, model), torch.tensor([*forge_data.MediaInputs(model).token_ids])
    whole, drawn = [], []
    for group, completion in zip(rollout.groups, rollout.completion_ids, strict=True):
        with torch.no_grad():
            scores = logits(plain, prompts[int(rollout.prompt_rows[group])], completion)
        ids = torch.tensor(np.asarray(completion), dtype=torch.int64)[:, None]
        whole.append(scores.log_softmax(-1).gather(1, ids)[:, 0])
        drawn.append(scores.index_fill(1, never, -torch.inf).log_softmax(-1).gather(1, ids)[:, 0])
    return torch.cat(whole), torch.cat(drawn)


def check_asked(stub: Stub) -> None:
    """Requests with images have the fields of the released servers' sources."""
    known = KNOWN[stub.kind]
    route = "/inference/v1/generate" if stub.kind == "vllm" else "/generate"
    bodies = [
        body for _, asked, body in stub.asked if asked == route and {"content_parts", "image_data", "audio_data"} & {*body}
    ]
    assert bodies
    for body in bodies:
        assert set(body) <= set(known["routes"][f"POST {route}"]["fields"])
        if stub.kind == "vllm":
            assert set(body["sampling_params"]) <= set(known["generate"]["sampling_params"])
            assert all(set(part) <= set(known["generate"]["content_part"]) for part in body["content_parts"])
        else:
            assert set(body["sampling_params"]) <= set(known["sampling_params"]["fields"])


@pytest.mark.parametrize(
    ("kind", "name"),
    ci_keeps(
        [("vllm", "gemma3"), ("sglang", "llava"), ("vllm", "qwen2-audio")],
        [(kind, name) for kind in VERSIONS for name in ("gemma3", "llava", "qwen2-audio")],
    ),
)
def test_a_server_sees_the_images(kind: str, name: str, model: Path, data: Path, tmp_path: Path) -> None:
    """Its log-probabilities are plain transformers' of the prompts with their images, and of each step's weights."""
    path = model if name == "gemma3" else pictures.save(name, tmp_path / "model")
    if "audio" in name:
        pytest.importorskip("soundfile", reason="soundfile is not installed here: forge-data[audio]")
        data = pictures.prompts(tmp_path, 6, kind="audio")
    stub = run(kind, path, data, tmp_path / "run")
    assert len(stub.loaded) == 2
    check_asked(stub)
    for step, plain in ((1, modalities.plain(path).eval()), (2, stub.model)):
        rollout = online.Rollout.read(tmp_path / "run" / "rollouts" / f"step_{step}.jsonl")
        whole, drawn = expected(rollout, plain, path, data)
        np.testing.assert_allclose(rollout.sampler_logps, drawn, atol=1e-5)
        # The server has the trained weights in bfloat16, as the model's files have them.
        np.testing.assert_allclose(rollout.old_logps, whole, atol=1e-5 if step == 1 else 0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fault"), ci_keeps([("vllm", "swapped images"), ("sglang", "another image")], [*product(VERSIONS, WRONG)])
)
def test_a_server_that_sees_other_images(kind: str, fault: str, model: Path, data: Path, tmp_path: Path) -> None:
    """Another image, or the two of a prompt in each other's place: its log-probabilities tell, and the run ends."""
    with pytest.raises(forge_algos.RolloutError, match=r"max_sampler_gap=0\.012"):
        run(kind, model, data, tmp_path / "run", fault=fault)


@pytest.mark.slow
def test_an_adapter_of_each_step(model: Path, data: Path, tmp_path: Path) -> None:
    """LoRA is given to the server, and answers prompts with images."""
    stub = run("vllm", model, data, tmp_path / "run", adapter="lora", lora_r=4)
    assert len(stub.adapters) == 1
    named = {body["model"] for _, route, body in stub.asked if route == "/inference/v1/generate"}
    assert {"served", *stub.adapters} < named


@pytest.fixture(scope="module")
def asking(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A prompt with two images, and it as a server is given it."""
    store = forge_data.prepare_prompts(data, str(model), tmp_path_factory.mktemp("store"), media=True)
    prompt = next(each for each in store if len(each.media) == 2)
    return prompt, forge_data.MediaInputs(model).unexpanded(prompt)


def drawn(kind: str, url: str, asking: tuple[Any, Any], *more: int, **options: Any) -> list[online.Completion]:
    """Two completions of a prompt with images, with `more` tokens behind it."""
    prompt, sent = asking
    sampler = online.RemoteSampler(kind, url, eos_ids=[2], timeout=60, **options)
    sampler.check("", [], 64)
    own = {"num_generations": 2, "max_new_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 5}
    return sampler.sample([np.array([*prompt.input_ids, *more])], media=[lambda: sent], **own)


@pytest.mark.parametrize("kind", VERSIONS)
def test_other_tokens_of_a_prompt_are_one_error(kind: str, model: Path, asking: tuple[Any, Any]) -> None:
    """Of a server with other limits of pixels, say; or which does not tell what it read."""
    with served(kind, model, images=True) as (url, stub):
        # What was written behind the prompt, in an episode, is sent as it is.
        assert len(drawn(kind, url, asking, 7, 8)) == 2
        for stub.fault, says in (
            (
                "other limits",
                r"read \d+ tokens of a prompt .* makes \d+, and they differ from token 4 on\. Serve the directory",
            ),
            ("says nothing", r"does not say which tokens it read .*version"),
        ):
            with pytest.raises(forge_algos.RolloutError, match=says):
                drawn(kind, url, asking)
        if kind == "vllm":
            stub.fault = "no scale-out"
            with pytest.raises(forge_algos.RolloutError, match=r"403 .*--enable-scale-out"):
                drawn(kind, url, asking)


@pytest.mark.parametrize("kind", VERSIONS)
def test_a_server_draws_no_token_of_an_image(kind: str, model: Path, asking: tuple[Any, Any]) -> None:
    """However likely it is; one that does all the same is refused."""
    with served(kind, model, images=True) as (url, _):
        found = drawn(kind, url, asking, never=range(3, 512))
        assert {token for one in found for token in one.ids.tolist()} <= {0, 1, 2}
        with pytest.raises(forge_algos.RolloutError, match=r"drew token \d+, which stands for a part of media"):
            drawn(kind, url, asking, never=range(512))


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        ({"sampler": "vllm", "adapter": "lora"}, "freeze_vision_tower=False with adapter=lora and sampler=vllm"),
        ({"sampler": "sglang"}, "freeze_vision_tower=False and sampler=sglang: SGLang keeps .* sampler=vllm"),
    ],
)
def test_parts_that_a_server_would_not_follow(
    more: dict[str, Any], refusal: str, model: Path, data: Path, tmp_path: Path
) -> None:
    """One error before a model is loaded."""
    settings = GIVEN | OWN["grpo"] | {"model_path": str(model), "data_path": str(data), "freeze_vision_tower": False}
    with pytest.raises(forge.ForgeError, match=refusal) as caught:
        forge.grpo(**settings | {"sampler_url": "http://localhost:1"} | more, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()
