"""Servers of vLLM and SGLang as samplers: whole runs against a small server that has their routes, and one that misbehaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forge
import forge_algos

from ..lanes import ci_keeps
from .sampling_stub import VERSIONS, Stub, served
from .verbs import run_verb, settings_of

KNOWN = json.loads((Path(__file__).parent / "interfaces" / "sampling_servers.json").read_text())
MISBEHAVES = {
    "old": "older than",
    "wrong model": "whose tokenizer gives",
    "short": "start it with a longer context",
    "wrong weights": "max_sampler_gap",
    "restarted": "were given to it",
    "late": "sampler_timeout=1",
    "dead": "the run resumes",
    "missing": "were asked for",
    "stale prompts": "did not forget what it computed",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and rewards."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(autouse=True)
def _rewards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))


def run(model_dir: Path, folder: Path, out: Path, kind: str, *, fault: str = "", **more: Any) -> tuple[list[Any], Stub]:
    """Run two rollouts of GRPO with a server; return the lines of its metrics, and the server's state."""
    settings = settings_of("grpo", model_dir, folder) | {"num_iterations": 1, "max_steps": 2, "validation_split": 0, **more}
    with served(kind, model_dir, fault=fault) as (url, stub):
        run_verb("grpo", settings | {"sampler": kind, "sampler_url": url, "ckpt_output_dir": str(out)})
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return lines, stub


@pytest.mark.slow
@pytest.mark.parametrize("kind", VERSIONS)
def test_a_server_samples_with_the_weights_of_each_step(model_dir: Path, folder: Path, tmp_path: Path, kind: str) -> None:
    """Before each rollout the server has the trained weights: the gap is rounding alone, after updates that move it far."""
    lines, stub = run(model_dir, folder, tmp_path / "out", kind, learning_rate=5e-2, max_steps=3)
    rollouts = [line for line in lines if "rollout_reward" in line]
    assert len(rollouts) == len(stub.loaded) == 3
    assert all(line["rollout_sampler_gap_max"] < 1e-3 for line in rollouts)
    assert not list((tmp_path / "out" / "sampler").iterdir())
    first = json.loads((tmp_path / "out" / "rollouts" / "step_1.jsonl").read_text().splitlines()[1])
    assert len(first["sampler_logps"]) == len(first["old_logps"]) == len(first["completion_ids"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ci_keeps(("vllm",), tuple(VERSIONS)))
def test_a_server_samples_with_the_adapter_of_each_step(model_dir: Path, folder: Path, tmp_path: Path, kind: str) -> None:
    """LoRA is given to the server as an adapter, a new name each time, and the former one is taken away."""
    lines, stub = run(model_dir, folder, tmp_path / "out", kind, adapter="lora", learning_rate=5e-2)
    assert [line["rollout_sampler_gap_max"] < 1e-3 for line in lines if "rollout_reward" in line] == [True, True]
    assert len(stub.loaded) == 2
    assert len(stub.adapters) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ci_keeps(["vllm"], list(VERSIONS)))
def test_what_is_asked_is_what_the_released_servers_take(model_dir: Path, folder: Path, tmp_path: Path, kind: str) -> None:
    """Routes and fields, of whole weights and of an adapter, are those in the sources of the released servers."""
    _, whole = run(model_dir, folder, tmp_path / "whole", kind, max_steps=1)
    _, adapter = run(model_dir, folder, tmp_path / "lora", kind, adapter="lora", max_steps=2)
    known = KNOWN[kind]
    assert known["version"] == VERSIONS[kind]
    asked = [*whole.asked, *adapter.asked]
    assert {f"{method} {route.partition('?')[0]}" for method, route, _ in asked} <= set(known["routes"])
    for method, route, body in asked:
        path, _, query = route.partition("?")
        fields = known["routes"][f"{method} {path}"].get("fields", [])
        assert set(body) | {part.partition("=")[0] for part in query.split("&") if part} <= set(fields), route
        if route == "/generate":
            assert set(body["sampling_params"]) <= set(known["sampling_params"]["fields"])
        if route == "/collective_rpc":
            assert set(body["kwargs"]) <= set(known["reload_weights"]["arguments"])
    handlers = {name for name in vars(Stub) if name.startswith(("get_", "post_"))}
    routes = [route.split() for each in VERSIONS for route in KNOWN[each]["routes"]]
    assert handlers <= {f"{method.lower()}_{path.strip('/').replace('/', '_')}" for method, path in routes}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ci_keeps(("wrong weights", "dead"), tuple(MISBEHAVES)))
def test_a_server_that_misbehaves_is_one_clear_error(model_dir: Path, folder: Path, tmp_path: Path, fault: str) -> None:
    """Another version, model or weights, none at all, too late or too few: never silently wrong."""
    kind = "sglang" if fault == "restarted" else "vllm"
    more = {"sampler_timeout": 1.0} if fault == "late" else {}
    with pytest.raises((forge_algos.RolloutError, forge.ForgeError), match=MISBEHAVES[fault]):
        run(model_dir, folder, tmp_path / "out", kind, fault=fault, **more)


@pytest.mark.slow
def test_choices_in_another_order_are_put_in_theirs(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """The same completions in the same order, whatever the order of the answer."""
    runs = []
    for fault in ("", "reordered"):
        run(model_dir, folder, tmp_path / f"out{fault}", "vllm", fault=fault, max_steps=1)
        file = tmp_path / f"out{fault}" / "rollouts" / "step_1.jsonl"
        runs.append([json.loads(line)["completion_ids"] for line in file.read_text().splitlines()[1:]])
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_a_cache_that_is_busy_is_reset_again(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """vLLM refuses to forget prompts while transfers go on, and says that callers may ask again."""
    _, stub = run(model_dir, folder, tmp_path / "out", "vllm", fault="busy", max_steps=1)
    assert stub.resets == 3


@pytest.mark.slow
def test_a_gap_weighs_the_advantages(model_dir: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gap of 0.05 a token is under the limit, and above the one from which advantages are weighed by exp(0.05).
    A line says so once, and none where they are not weighed.
    """
    found, warned = [], []
    for name, more in (("weighed", {}), ("not", {"tis_above": 0.1}), ("capped", {"tis_cap": 0.5})):
        run(model_dir, folder, tmp_path / name, "vllm", fault="off by a little", max_steps=1, kl_weight=0.0, **more)
        warned.append(capsys.readouterr().err.count("WARNING: step 1: the server's log-probabilities are 0.05 nats a token"))
        lines = (tmp_path / name / "rollouts" / "step_1.jsonl").read_text().splitlines()[1:]
        found.append([value for line in lines for value in json.loads(line)["advantages"]])
    weighed, plain, capped = found
    assert warned == [1, 0, 1]
    assert any(plain)
    assert weighed == pytest.approx([value * 2.718281828459045**0.05 for value in plain], rel=1e-3)
    assert capped == pytest.approx([value * 0.5 for value in plain], rel=1e-5)


def drawn(url: str, **more: Any) -> list[forge_algos.online.Completion]:
    """Draw three completions of eight tokens from SGLang, once its version and model are known."""
    sampler = forge_algos.online.RemoteSampler("sglang", url, eos_ids=[2], timeout=30)
    sampler.check("", [], 32)
    sampler.expect("default", adapter=False)
    own = {"num_generations": 3, "max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 5} | more
    return sampler.sample([np.array([5, 6, 7])], **own)


def test_completions_differ_where_sglang_draws_by_seeds(model_dir: Path) -> None:
    """It draws a request's `n` by one seed there, which gives one completion `n` times, and an advantage to none."""
    with served("sglang", model_dir, fault="seeded") as (url, stub):
        first, again = drawn(url), drawn(url)
    assert len({tuple(completion.ids.tolist()) for completion in first}) == 3
    assert [completion.ids.tolist() for completion in first] == [completion.ids.tolist() for completion in again]
    seeds = [own["sampling_seed"] for _, route, body in stub.asked if route == "/generate" for own in body["sampling_params"]]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("limits", "ended a completion for 'length' after 4 of 8 tokens"),
        ("aborts", "ended a completion for 'abort' after 8 of 8 tokens"),
        ("mixes", "were given to it"),
    ],
)
def test_a_completion_that_sglang_cut_off_is_refused(model_dir: Path, fault: str, says: str) -> None:
    """By a limit of its own, by another process, or begun with former weights: SGLang answers each as if nothing were."""
    with served("sglang", model_dir, fault=fault) as (url, _), pytest.raises(forge_algos.RolloutError, match=says):
        drawn(url)


def test_the_tokens_that_sglang_keeps_of_its_context_are_known(model_dir: Path) -> None:
    """A context of 512 tokens has room for 506, which is seen at the start; with more a completion would end early."""
    with served("sglang", model_dir) as (url, _):
        sampler = forge_algos.online.RemoteSampler("sglang", url, eos_ids=[2], timeout=30)
        sampler.check("", [], 506)
        with pytest.raises(forge_algos.RolloutError, match="reads 506 tokens at most"):
            sampler.check("", [], 507)


def test_an_answer_without_what_other_releases_leave_out_is_taken(model_dir: Path) -> None:
    """SGLang's limit of tokens, the way in which it draws and the version of its weights."""
    with served("sglang", model_dir, fault="bare") as (url, _):
        assert len(drawn(url)) == 3


@pytest.mark.parametrize("answer", [{}, [], "down", {"version": None}, {"version": VERSIONS["sglang"]}])
@pytest.mark.parametrize("kind", VERSIONS)
def test_an_answer_that_lacks_what_is_read_is_one_clear_error(kind: str, answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server at the address, say: its name, its address and what could not be read."""
    sampler = forge_algos.online.RemoteSampler(kind, "http://127.0.0.1:9", eos_ids=[2], timeout=1)
    monkeypatch.setattr(sampler.server, "ask", lambda _route, _body=None: answer)
    with pytest.raises(forge_algos.RolloutError, match="http://127.0.0.1:9"):
        sampler.check("", [], 8)
    with pytest.raises(forge_algos.RolloutError, match="http://127.0.0.1:9"):
        sampler.sample([np.array([5])], num_generations=1, max_new_tokens=8, temperature=1.0, top_p=1.0, top_k=0, seed=0)


def test_an_answer_that_breaks_off_is_one_clear_error(model_dir: Path) -> None:
    """As of a server that dies while it answers."""
    with (
        served("sglang", model_dir, fault="torn") as (url, _),
        pytest.raises(forge_algos.RolloutError, match="cannot be reached"),
    ):
        drawn(url)


def test_an_end_token_that_was_the_last_one_allowed_is_an_end(model_dir: Path) -> None:
    """Whether a server calls it an end or the limit depends on which of the two it looks for first."""
    with served("sglang", model_dir, fault="length first") as (url, _):
        sampler = forge_algos.online.RemoteSampler("sglang", url, eos_ids=list(range(2000)), timeout=30)
        sampler.check("", [], 8)
        own = {"num_generations": 2, "max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 5}
        found = sampler.sample([np.array([5, 6, 7])], **own)
    assert [(len(completion.ids), completion.finished) for completion in found] == [(1, True)] * 2


@pytest.mark.parametrize("kind", VERSIONS)
def test_a_turn_is_asked_for_what_the_server_has_room_for(model_dir: Path, kind: str) -> None:
    """Of episodes that are asked together one may write more than the other, which has less of the context left."""
    with served(kind, model_dir) as (url, stub):
        sampler = forge_algos.online.RemoteSampler(kind, url, eos_ids=[2], timeout=30)
        sampler.check("", [], 16)
        longest = 512 if kind == "vllm" else 506
        own = {"num_generations": 1, "max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 5}
        sampler.sample([np.array([5] * (longest - 2)), np.array([5])], **own)
    bodies = [body for _, route, body in stub.asked if route in ("/v1/completions", "/generate")]
    assert sorted(body.get("max_tokens") or body["sampling_params"]["max_new_tokens"] for body in bodies) == [2, 8]


@pytest.mark.slow
@pytest.mark.parametrize("kind", VERSIONS)
def test_a_greedy_answer_is_asked_for_without_a_temperature(model_dir: Path, kind: str) -> None:
    """As both servers have it: one completion of a prompt, of temperature 0; other bounds are refused as ever."""
    with served(kind, model_dir) as (url, stub):
        sampler = forge_algos.online.RemoteSampler(kind, url, eos_ids=[2], timeout=30)
        sampler.check("", [], 16)
        own = {"num_generations": 1, "max_new_tokens": 4, "temperature": 0.7, "top_p": 1.0, "top_k": 1}
        (one,), (other,) = (sampler.sample([np.array([5, 6, 7])], **own, seed=seed) for seed in (1, 2))
        with pytest.raises(forge_algos.RolloutError, match="samples from the whole distribution"):
            sampler.sample([np.array([5])], **own | {"top_k": 2}, seed=1)
    assert one.ids.tolist() == other.ids.tolist()
    bodies = [body for _, route, body in stub.asked if route in ("/v1/completions", "/generate")]
    sampled = [sampling_of(body) for body in bodies]
    assert [(each["temperature"], each["n"]) for each in sampled] == [(0.0, 1)] * 2


def sampling_of(body: dict[str, Any]) -> dict[str, Any]:
    """The options of a request, wherever that server reads them."""
    found = body.get("sampling_params", body)
    return found[0] if isinstance(found, list) else found


@pytest.mark.slow
def test_the_small_server_answers_as_sglang_did(model_dir: Path, tmp_path: Path) -> None:
    """Field by field what SGLang itself answered."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir), LoraConfig()).save_pretrained(tmp_path / "lora")
    with served("sglang", model_dir) as (url, stub):
        drawn(url)
        sampler = forge_algos.online.RemoteSampler("sglang", url, eos_ids=[2], timeout=30)
        sampler.server.load(str(model_dir), "whole")
        for name in ("one", "two"):
            sampler.load(str(tmp_path / "lora"), name, adapter=True)
    known = KNOWN["sglang"]["answers"]
    assert {route for route, _ in stub.answered} == {name for name in known if " /" in name} == set(KNOWN["sglang"]["routes"])
    for route, answer in stub.answered:
        for each in answer if isinstance(answer, list) else [answer]:
            assert sorted(each) == known[route]
            if route == "POST /generate":
                assert sorted(each["meta_info"]) == known["meta_info"]
                reason = each["meta_info"]["finish_reason"]
                assert sorted(reason) == known["finish_reason"][reason["type"]]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sampler": "vllm"}, "needs sampler_url"),
        ({"sampler": "vllm", "sampler_url": "localhost:8000"}, "must be an address"),
        ({"sampler_url": "http://localhost:8000"}, "has no effect with sampler='transformers'"),
        ({"sampler": "sglang", "sampler_url": "http://localhost:1", "top_k": 5}, "top_k=5 is refused"),
        ({"sampler": "vllm", "sampler_url": "http://localhost:1", "min_p": 0.1}, "min_p=0.1 is refused"),
        ({"sampler": "vllm", "sampler_url": "http://localhost:1", "repetition_penalty": 1.1}, "repetition_penalty=1.1 is ref"),
        ({"sampler": "vllm", "sampler_url": "http://localhost:1", "adapter": "ia3"}, "adapter=ia3 is refused"),
        ({"tis_cap": 3.0}, "has no effect"),
        ({"max_turns": 3}, "has no effect without env"),
    ],
)
def test_what_cannot_be_is_refused(model_dir: Path, folder: Path, tmp_path: Path, given: dict[str, Any], says: str) -> None:
    """By name, before anything is done."""
    settings = settings_of("grpo", model_dir, folder)
    with pytest.raises(ValueError, match=says):
        run_verb("grpo", settings | given | {"ckpt_output_dir": str(tmp_path / "out")})
