"""llama.cpp, as packaged by xllamacpp, reads our GGUF files: the same tokens, chat prompt and probabilities."""

from __future__ import annotations

import importlib
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import forge_dist
from forge_dist.gguf._tokenizer import PROBES

xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp (llama.cpp in a wheel) is not installed: pip install xllamacpp")
pytest.importorskip("gguf", reason="gguf is an extra of forge-dist")

sys.path.insert(0, str(Path(__file__).parents[1] / "forge-dist"))
try:
    tiny = importlib.import_module("gguf_models")
finally:
    sys.path.pop(0)

RULES = {"llama-tied": "smollm", "llama3": "llama-bpe", "mistral": "tekken", "qwen2": "qwen2", "qwen3": "gpt-2"}
"""Kind of model → the rule by which its tokenizer cuts text: each rule once."""


class Server:
    """llama.cpp's server on one file."""

    def __init__(self, file: Path) -> None:
        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.n_ctx, settings.n_parallel, settings.port, settings.warmup = 256, 1, 0, False
        settings.cpuparams.n_threads = 1
        self._server = xllamacpp.Server(settings)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """One call."""
        address = self._server.listening_address
        request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())


@pytest.mark.parametrize("kind", RULES)
def test_llama_cpp_computes_the_same(kind: str, tmp_path: Path) -> None:
    """Tokens to the last, the chat prompt to the letter, log-probabilities to the rounding of its cache in float16."""
    tokenizer, model = tiny.tokenizer_of(RULES[kind], begins=kind == "llama3"), tiny.model_of(kind)
    server = Server(forge_dist.export_gguf(model, tmp_path / "m.gguf", tokenizer=tokenizer, dtype="float32", name="tiny"))
    for text in (*PROBES, "<|im_start|>user\nhow many? 1234 <think> x<|im_end|>\n"):
        found = server.ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        assert found == tokenizer(text).input_ids
    messages = [{"role": "user", "content": "hi there"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert server.ask("/apply-template", messages=messages)["prompt"] == expected
    compared = 0
    draw = torch.Generator().manual_seed(0)
    for length in range(20, 60, 2):
        row = torch.randint(3, 380, (length,), generator=draw).tolist()
        with torch.no_grad():
            logps_V = model(torch.tensor([row])).logits[0, -1].log_softmax(-1)
        said = server.ask("/completion", prompt=row, n_predict=1, n_probs=20, temperature=0.0, cache_prompt=False)
        # Of a token that ends an answer, or is half of a character, it says no probabilities.
        for found in said.get("completion_probabilities", [])[:1]:
            compared += 1
            for top in found["top_logprobs"]:
                assert logps_V[top["id"]].item() == pytest.approx(top["logprob"], abs=1e-2)
    assert compared >= 3
