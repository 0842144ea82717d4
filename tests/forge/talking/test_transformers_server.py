"""What transformers' server answers once it is started by `forge serve`."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge.talking._transformers_server import _of_template, _refuse_unread_tools

from ...ranks import run_on_ranks

_ASKED = """
import json, sys
from fastapi.testclient import TestClient
from forge.talking._transformers_server import list_only
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server

list_only("/runs/first/export")
manager = ModelManager(device="cpu")
manager.force_model = "/runs/first/export"  # as given at the start, which would load it
client = TestClient(build_server(manager, *[None] * 6))
json.dump(client.get("/v1/models").json(), sys.stdout)
"""
_BAD = """
import json, sys
from types import SimpleNamespace
from fastapi.testclient import TestClient
from forge.talking._transformers_server import names_of, refuse_bad_requests
from transformers.cli.serving import server
from transformers.cli.serving.chat_completion import ChatCompletionHandler

resolved, written, read = [], [], []

def apply_chat_template(messages, *_, **__):
    read.append(messages)
    written.append([(each["role"], each["content"][0]["text"]) for each in messages])
    raise ValueError("2 tokens of images, 1 image")

class Handler(ChatCompletionHandler):
    def __init__(self):
        self.model_manager = SimpleNamespace(get_model_modality=lambda *_, **__: SimpleNamespace(value="VLM"))
        self.generation_state = SimpleNamespace(use_continuous_batching=lambda *_: False, get_manager=lambda *_, **__: None)
        self.chat_template_kwargs = {}
    def _resolve_model(self, body):
        resolved.append(body.get("model"))
        return "m", None, SimpleNamespace(apply_chat_template=apply_chat_template)

refuse_bad_requests(names_of("/runs/first/export", "runs/first"), "Be brief.")
client = TestClient(server.build_server(None, Handler(), *[None] * 5))
part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}
asked = [{}, {"messages": [{"role": "user", "content": [part]}]}, {"messages": [{"role": "user", "content": "hi"}]}]
asked += [asked[-1] | {"model": name} for name in ("first", "runs/first", "/runs/first/export", "gpt-4")]
asked += [{"messages": [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "hi"}]}]
found = [client.post("/v1/chat/completions", json=each) for each in asked]
call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
more = {"content": "I ask f.", "reasoning_content": "Hm.", "tool_calls": [call]}
client.post("/v1/chat/completions", json={"messages": [{"role": "assistant", **more}]})
said = [(each.status_code, each.json()["error"]["message"]) for each in found]
json.dump([*said, resolved, written, read[-1][-1]], sys.stdout)
"""
_DRAWN = """
import asyncio, json, sys, threading, time
from types import SimpleNamespace
import torch
import uvicorn
from fastapi.testclient import TestClient
from forge.talking import _transformers_server, _served_generation
from transformers.cli.serving import server
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import GenerationState

path = sys.argv[1]
_transformers_server.refuse_bad_requests((path,))
manager, state = ModelManager(device="cpu", force_model=path), GenerationState()
handlers = [each(manager, state) for each in (ChatCompletionHandler, CompletionHandler, ResponseHandler)]
app = server.build_server(manager, *handlers, None, None, state)
client = TestClient(app, raise_server_exceptions=False)
asked = {"messages": [{"role": "user", "content": "the apple"}], "max_tokens": 12}

def answer(**more):
    found = client.post("/v1/chat/completions", json=asked | more).json()
    return found["choices"][0]["message"]["content"] if "choices" in found else found["error"]

found = {"seeds": [answer(temperature=2.0, seed=seed) for seed in (1, 2, 1)], "likeliest": answer(temperature=0)}
threads, beside = [], {}
for number in range(4):
    work = lambda number=number: beside.update({number: answer(temperature=2.0, seed=1 + number % 2)})
    threads.append(threading.Thread(target=work))
[each.start() for each in threads], [each.join() for each in threads]
found["beside"] = [beside[number] for number in range(4)]
found["penalized"] = answer(temperature=0, presence_penalty=2, frequency_penalty=2)
stop = found["likeliest"][2:5]
found["stop"], found["stopped"] = stop, answer(temperature=0, stop=stop)
found["stream"] = client.post("/v1/chat/completions", json=asked | {"temperature": 0, "stop": stop, "stream": True}).text
found["room"] = [answer(max_tokens=10**6), answer(messages=[{"role": "user", "content": "apple " * 3000}])]
found["tools"] = answer(tools=[{"type": "function", "function": {"name": "f"}}])
found["token"] = answer(logit_bias={"999999": 1})
settings = ("{", "[]", '{"foo": 1}', '{"temperature": -1, "do_sample": true}')
found["settings"] = [answer(generation_config=each)["message"] for each in settings]
nothing = client.post("/v1/completions", json={"prompt": ""})
found["nothing"] = [nothing.status_code, nothing.json()["error"]["message"]]
biased = {"prompt": "the apple", "max_tokens": 2, "temperature": 0, "logprobs": 0, "logit_bias": {"70": 100}}
found["biased_completion"] = client.post("/v1/completions", json=biased).json()["choices"][0]["logprobs"]["tokens"]
found["response"] = client.post("/v1/responses", json={"input": "the apple", "max_output_tokens": 3}).json()["object"]
routes = (("/load_model", {"model": "/"}), ("/reset", {}), ("/v1/embeddings", {}), ("/v1/chat/completions", [1]))
closed = [client.post(path, json=body) for path, body in routes]
found["routes"] = [(each.status_code, each.json()["error"]["message"]) for each in closed]

several = {"temperature": 2.0, "seed": 1, "n": 2}
found["several"] = client.post("/v1/chat/completions", json=asked | several).json()
found["several_streamed"] = client.post("/v1/chat/completions", json=asked | several | {"stream": True}).text
model, tokenizer = manager.load_model_and_processor(manager.process_model_name(path))[:2]

def naive(ids, steps, token=None):
    drawn, entries = [], []
    for _ in range(steps):
        logps = model(torch.tensor([ids + drawn])).logits[0, -1].float().log_softmax(-1)
        drawn.append(int(logps.argmax()) if token is None else token)
        entries.append((logps[drawn[-1]].item(), sorted(logps.tolist(), reverse=True)[:3]))
    return drawn, entries

written = tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True, return_dict=False)
found["naive"], token = naive(written, 12), tokenizer.encode("b", add_special_tokens=False)[-1]
found["naive_biased"], found["biased_text"] = naive(written, 3, token), tokenizer.decode([token] * 3)
with_logprobs = asked | {"temperature": 0, "logprobs": True, "top_logprobs": 3}
found["logprobs"] = client.post("/v1/chat/completions", json=with_logprobs).json()["choices"][0]
drawn = with_logprobs | {"temperature": 2.0, "seed": 1}
ends = [{}, {"stop": found["seeds"][0][4:6]}]
found["logprobs_drawn"] = [client.post("/v1/chat/completions", json=drawn | each).json()["choices"][0] for each in ends]
bias = {"logit_bias": {str(token): 100}, "max_tokens": 3, "n": 2}
found["logprobs_biased"] = client.post("/v1/chat/completions", json=with_logprobs | bias).json()["choices"]
text = {"prompt": "the apple", "max_tokens": 4, "temperature": 0, "logprobs": 2}
found["of_text"] = client.post("/v1/completions", json=text).json()["choices"][0]
found["token_70"] = tokenizer.decode([70])
found["naive_text"] = naive(tokenizer("the apple")["input_ids"], 4)

async def gone():
    sent, messages = [], [{"type": "http.request", "body": json.dumps(asked | {"max_tokens": 400}).encode()}]
    async def receive():
        if messages:
            return messages.pop()
        await asyncio.sleep(0.2)
        return {"type": "http.disconnect"}
    async def send(message):
        sent.append(message)
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "http_version": "1.1"}
    await app(scope | {"headers": [(b"content-type", b"application/json")]}, receive, send)
    return sent

slow = lambda *_: time.sleep(0.05)
manager.load_model_and_processor(manager.process_model_name(path))[0].register_forward_hook(slow)
began = time.monotonic()
asyncio.run(gone())
found["seconds"] = time.monotonic() - began
_served_generation.end_at_once()
exit = lambda: uvicorn.Server.handle_exit(SimpleNamespace(_captured_signals=[], should_exit=False), 15, None)
whole = threading.Event()  # which the signal comes in the middle of, with a stream in the queue behind it
waiting = threading.Thread(target=lambda: (whole.wait(), found.update(queued=stream())))
stream = lambda: client.post("/v1/chat/completions", json=asked | {"stream": True, "n": 2}).text
model.register_forward_hook(lambda *_: whole.set())
waiting.start()
threading.Timer(0.5, exit).start()
began = time.monotonic()
found["ended"] = client.post("/v1/chat/completions", json=asked | {"max_tokens": 400})
found["ended"] = [found["ended"].status_code, found["ended"].json()]
waiting.join()
found["ended_after"] = time.monotonic() - began
json.dump(found, sys.stdout)
"""


def ran(code: str, *words: str) -> Any:
    """Run a script in this process, and return what it printed; in a rank, which has imported most of it."""
    sys.argv[1:] = words
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {"__name__": "__main__"})
    return json.loads(printed.getvalue())


@pytest.mark.slow
def test_answers_are_drawn_as_asked(model_dir: Path) -> None:
    """By the request's seed whoever asks beside, to its stop string, within the context, until nobody waits or Ctrl-C."""
    pytest.importorskip("fastapi")
    (found,) = run_on_ranks(ran, 1, _DRAWN, str(model_dir), joined=False)
    first, second, again = found["seeds"]
    assert first == again != second
    assert first != found["likeliest"] != found["penalized"]
    assert found["beside"] == [first, second] * 2
    assert found["stopped"] == found["likeliest"].partition(found["stop"])[0]
    *chunks, ended = [each.removeprefix("data: ") for each in found["stream"].split("\n\n") if each]
    pieces = [json.loads(each)["choices"][0] for each in chunks]
    assert "".join(each["delta"].get("content") or "" for each in pieces) == found["stopped"]
    assert (pieces[-1]["finish_reason"], ended) == ("stop", "[DONE]")
    assert [each["code"] for each in found["room"]] == ["context_length_exceeded"] * 2
    assert found["token"]["message"].startswith("logit_bias: the model has no token 999999: its last is")
    broken, no_object, unknown, refused = found["settings"]
    assert broken.endswith(no_object[-len("give a JSON text of generation settings") :])
    assert unknown == "generation_config: 'foo' is no generation setting of transformers"
    assert refused.startswith("generation_config: `temperature` (=-1) has to be a strictly positive float")
    assert found["nothing"] == [400, "prompt: is empty, and this model's tokenizer puts nothing before a text; give a text"]
    assert found["biased_completion"] == [found["token_70"]] * 2
    assert found["response"] == "response"
    assert [status for status, _ in found["routes"]] == [404, 404, 404, 400]
    served = "there are /v1/chat/completions, /v1/completions, /v1/responses, /v1/models"
    assert found["routes"][2][1] == f"POST /v1/embeddings: not served here; {served}"
    assert found["tools"]["message"].startswith(
        "tools: this model's chat template writes no tools, so that it would not know of"
    )
    assert found["seconds"] < 10  # of 400 steps of 0.05 seconds
    assert found["ended_after"] < 10
    check_ended(found)

    check_several(found)
    check_logprobs(found)


def check_ended(found: dict[str, Any]) -> None:
    """A part of an answer is not given as the whole; whoever waits behind it is told too, and no stream goes on for ever."""
    said = "the server is ending, and the answer is not whole; ask again once it is back"
    assert found["ended"] == [503, {"error": {"message": said, "type": "server_error", "param": None, "code": None}}]
    *_, error, done = [each.removeprefix("data: ") for each in found["queued"].split("\n\n") if each]
    assert (json.loads(error)["error"]["message"], done) == (f"the answer broke off: {said}", "[DONE]")
    assert found["queued"].count("broke off") == 1


def check_several(found: dict[str, Any]) -> None:
    """Each of several answers is that of its seed, whole and streamed; the prompt is counted once."""
    texts = [each["message"]["content"] for each in found["several"]["choices"]]
    assert texts == found["seeds"][:2]
    assert [each["index"] for each in found["several"]["choices"]] == [0, 1]
    usage = found["several"]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    *chunks, ended = [each.removeprefix("data: ") for each in found["several_streamed"].split("\n\n") if each]
    choices = [(each, choice) for each in map(json.loads, chunks) for choice in each["choices"]]
    streamed = ["".join(one["delta"].get("content") or "" for _, one in choices if one["index"] == at) for at in (0, 1)]
    assert (streamed, ended) == (texts, "[DONE]")
    assert [each["usage"] for each, _ in choices if each.get("usage")][-1] == usage


def check_logprobs(found: dict[str, Any]) -> None:
    """They are the model's own of each token that is drawn, whatever changes its logits, up to a stop string."""
    content = found["logprobs"]["logprobs"]["content"]
    drawn, entries = found["naive"]
    assert 0 < len(content) <= len(drawn)
    assert "".join(each["token"] for each in content) == found["logprobs"]["message"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == found["logprobs"]["message"]["content"]
    for each, (logprob, likeliest) in zip(content, entries, strict=False):
        assert each["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert [one["logprob"] for one in each["top_logprobs"]] == pytest.approx(likeliest, abs=1e-4)
        assert each["top_logprobs"][0]["token"] == each["token"]
    whole, cut = ["".join(each["token"] for each in one["logprobs"]["content"]) for one in found["logprobs_drawn"]]
    stopped, last = found["logprobs_drawn"][1]["message"]["content"], found["logprobs_drawn"][1]["logprobs"]["content"][-1]
    assert whole == found["seeds"][0]
    assert whole.startswith(cut)
    assert len(cut) - len(last["token"]) < len(stopped) <= len(cut) < len(whole)
    for choice in found["logprobs_biased"]:
        assert choice["message"]["content"] == found["biased_text"]
        expected = [logprob for logprob, _ in found["naive_biased"][1]]
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(expected, abs=1e-4)
    text, of_text = found["of_text"]["text"], found["of_text"]["logprobs"]
    tokens, logprobs = of_text["tokens"], [logprob for logprob, _ in found["naive_text"][1]]
    assert "".join(tokens) == text
    assert of_text["token_logprobs"] == pytest.approx(logprobs[: len(tokens)], abs=1e-4)
    for at, token, likeliest in zip(of_text["text_offset"], tokens, of_text["top_logprobs"], strict=True):
        assert text[at:].startswith(token)
        assert max(likeliest.values()) == likeliest[token]


def test_a_developer_is_the_system_where_the_template_leaves_him_out() -> None:
    """Such a template wrote nothing of what he says, without a word; one that knows him is given him."""
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]

    def of(*roles: str) -> list[str]:
        def apply_chat_template(messages: Any, **_: Any) -> str:
            return " ".join(each["content"] for each in messages if each["role"] in roles)

        processor = SimpleNamespace(apply_chat_template=apply_chat_template)
        return [each["role"] for each in _of_template(messages, SimpleNamespace(tokenizer=processor))]

    assert of("system", "user") == ["system", "user"]
    assert of("developer", "user") == ["developer", "user"]


def test_tools_that_the_template_writes_are_no_error() -> None:
    """However it writes them; a template that raises is asked where the request is read, and no tools are no question."""

    def writes(*_: Any, tools: Any, **__: Any) -> str:
        return f"hi {tools or ''}"

    def fails(*_: Any, **__: Any) -> str:
        raise ValueError("no tools")

    for template, tools in ((writes, [{"name": "f"}]), (fails, [{"name": "f"}]), (lambda *_, **__: "hi", [])):
        _refuse_unread_tools(tools, SimpleNamespace(apply_chat_template=template))


@pytest.mark.slow
def test_the_served_model_is_listed_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`GET /v1/models` was answered with 500 where the Hub's cache is missing, and never named a directory."""
    pytest.importorskip("fastapi")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _ASKED], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["object"] == "list"
    assert [(model["id"], model["object"]) for model in answer["data"]] == [("/runs/first/export", "model")]


@pytest.mark.slow
def test_bad_requests_are_answered_with_what_is_wrong() -> None:
    """Status 400 and OpenAI's error object, where transformers' server answers 500; a model is known by its short name."""
    pytest.importorskip("fastapi")
    pytest.importorskip("PIL")
    (found,) = run_on_ranks(ran, 1, _BAD, joined=False)
    (none, image, text, *named, other, own, resolved, written, read) = found
    assert none == [400, "messages: nothing came; give a list of messages"]
    assert image[0] == text[0] == 400
    assert image[1].startswith("messages[0].content[0].image_url: 'data:image/png;base64,@@@' is no image that can be read")
    assert text[1] == "messages: this model's template and processor cannot read it: 2 tokens of images, 1 image"
    assert named == [text] * 3
    assert other == [
        400,
        "model: 'gpt-4' is not served here; ask for 'first' or 'runs/first' or '/runs/first/export', or leave model out",
    ]
    assert resolved == [None, None, *["/runs/first/export"] * 3, None, None]
    assert own == text
    # The run's system_prompt, where a conversation has no system message.
    *written, _ = written
    assert written == [[["system", "Be brief."], ["user", "hi"]]] * 4 + [[["system", "Rhyme."], ["user", "hi"]]]
    # What transformers' server leaves out of a message, its template is given.
    assert read["content"] == [{"type": "text", "text": "I ask f."}]
    assert read["reasoning_content"] == "Hm."
    assert read["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
