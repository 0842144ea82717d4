"""llama.cpp, as packaged by xllamacpp, reads our GGUF files: the same tokens, chat prompt and probabilities."""

from __future__ import annotations

import copy
import ctypes
import importlib
import json
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import forge_dist
from forge_dist.gguf._layout import gguf_architecture, gguf_tensors, model_fields
from forge_dist.gguf._tokenizer import PROBES
from forge_dist.gguf._types import quantize

xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp (llama.cpp in a wheel) is not installed: pip install xllamacpp")
pytest.importorskip("gguf", reason="gguf is an extra of forge-dist")

sys.path.insert(0, str(Path(__file__).parents[1] / "forge-dist"))
try:
    tiny = importlib.import_module("gguf_models")
finally:
    sys.path.pop(0)

RULES = {
    "llama-tied": "smollm",
    "llama3": "llama-bpe",
    "mistral": "tekken",
    "mistral-pieces": "pieces",
    "llama-tied-pieces": "pieces after a space",
    "qwen2": "qwen2",
    "qwen3": "gpt-2",
    "qwen2_moe": "qwen2",
    "qwen3_moe": "qwen2",
    "olmo2": "smaug-bpe",
    "granite": "smollm",
    "smollm3": "llama-bpe",
    "gemma2": "pieces",
    "gemma3": "pieces",
    "gemma3-untied": "qwen2",
    "gpt_oss": "gpt-4o",
    "phi3": "qwen2",
    "phi3-long": "qwen2",
}
"""Kind of model → the rule by which its tokenizer cuts text."""


def made(kind: str) -> tuple[Any, Any]:
    """Return a kind's tokenizer and model."""
    rule, model = RULES[kind], tiny.model_of(kind.removesuffix("-pieces"))
    if kind == "gpt_oss":  # llama.cpp rounds the bounds between which YaRN mixes frequencies
        config = copy.deepcopy(model.config)
        config.rope_parameters["truncate"] = True
        model.model.rotary_emb.inv_freq.copy_(ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))[0])
    for module in model.modules():
        if type(module).__name__ == "GELUTanh":
            module.act = gelu_of_halves
    if rule.startswith("pieces"):
        return tiny.pieces_tokenizer(prefix=rule != "pieces"), model
    return tiny.tokenizer_of(rule, begins=kind == "llama3"), model


def gelu_of_halves(values: torch.Tensor) -> torch.Tensor:
    """GELU as ggml's CPU backend has it: a table of float16 → float16."""
    return torch.nn.functional.gelu(values.half().float(), approximate="tanh").half().float()


class Server:
    """llama.cpp's server on one file."""

    def __init__(self, file: Path, context: int = 256) -> None:
        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.n_ctx, settings.n_parallel, settings.port, settings.warmup = context, 1, 0, False
        settings.cpuparams.n_threads = 1
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(settings)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """One call."""
        address = self._server.listening_address
        request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())


def differences(server: Server, model: Any, lengths: Iterable[int] = range(20, 60, 2)) -> Iterator[list[float]]:
    """Draw rows of tokens; yield of each how far the likeliest next tokens' log-probabilities are from the model's."""
    draw = torch.Generator().manual_seed(0)
    for length in lengths:
        row = torch.randint(3, 380, (length,), generator=draw).tolist()
        with torch.no_grad():
            logps_V = model(torch.tensor([row])).logits[0, -1].log_softmax(-1)
        said = server.ask("/completion", prompt=row, n_predict=1, n_probs=20, temperature=0.0, cache_prompt=False)
        # Of a token that ends an answer, or is half of a character, it says no probabilities.
        for found in said.get("completion_probabilities", [])[:1]:
            yield [abs(logps_V[top["id"]].item() - top["logprob"]) for top in found["top_logprobs"]]


@pytest.mark.parametrize("kind", RULES)
def test_llama_cpp_computes_the_same(kind: str, tmp_path: Path) -> None:
    """Tokens to the last, the chat prompt to the letter, log-probabilities to rounding."""
    tokenizer, model = made(kind)
    server = Server(forge_dist.export_gguf(model, tmp_path / "m.gguf", tokenizer=tokenizer, dtype="float32", name="tiny"))
    for text in (*PROBES, "<|im_start|>user\nhow many? 1234 <think> x<|im_end|>\n"):
        found = server.ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        assert found == tokenizer(text).input_ids
    messages = [{"role": "user", "content": "hi there"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert server.ask("/apply-template", messages=messages)["prompt"] == expected
    compared = list(differences(server, model))
    assert len(compared) >= 3
    assert max(map(max, compared)) < allowed(kind)


def allowed(kind: str) -> float:
    """What rounding alone may do: where activations are rounded to float16, a last bit of those is another now and then."""
    return 1e-3 if kind.startswith("gemma") else 1e-4


@pytest.mark.parametrize("name", ["mine", "against-phi-3"])
@pytest.mark.parametrize("made", [tiny.phi3_tokenizer, lambda: tiny.phi3_tokenizer(strips=False), tiny.tokenizer_of])
def test_llama_cpp_goes_by_the_name(made: Any, name: str, tmp_path: Path) -> None:
    """A model named Phi-3 loses white space behind added tokens, or does not load: the file's name is one that fits."""
    tokenizer, model = made(), tiny.model_of("phi3")
    server = Server(forge_dist.export_gguf(model, tmp_path / "m.gguf", tokenizer=tokenizer, dtype="float32", name=name))
    for text in ("<|user|>\n how many?<|end|>\n<|assistant|>\n <s> x", "<|im_start|> a <think>\n b"):
        found = server.ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        assert found == tokenizer(text).input_ids


COUNTS = ("expert_used_count", "attention.sliding_window")
"""Integers that no tensor's shape gives away."""


@pytest.mark.parametrize("kind", RULES)
def test_llama_cpp_reads_each_number(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field with another value gives other probabilities: it stands where llama.cpp looks for it."""
    tokenizer, model = made(kind)
    right = model_fields(model.config, gguf_architecture(model, tmp_path))
    tried = [key for key, value in right.items() if isinstance(value, float) or (value and key.endswith(COUNTS))]
    for key in tried:
        wrong = right | {key: right[key] * 1.5 + 0.01 if isinstance(right[key], float) else right[key] // 2}
        monkeypatch.setattr("forge_dist.gguf._export.model_fields", lambda *_, wrong=wrong: dict(wrong))
        file = forge_dist.export_gguf(model, tmp_path / f"{key}.gguf", tokenizer=tokenizer, dtype="float32", name="tiny")
        apart = max(map(max, differences(Server(file), model)))
        assert apart > 10 * allowed(kind), f"{key} {apart}"
    assert len(tried) >= 2


def test_llama_cpp_takes_the_long_factors(tmp_path: Path) -> None:
    """Where its context is longer than the original one, a longer row gets longrope's long factors in both."""
    model = tiny.model_of("phi3-long")
    given = {"tokenizer": tiny.tokenizer_of("qwen2"), "dtype": "float32", "name": "tiny"}
    server = Server(forge_dist.export_gguf(model, tmp_path / "m.gguf", **given), context=512)
    assert max(map(max, differences(server, model, range(260, 300, 3)))) < 1e-4
    assert max(map(max, differences(server, model))) > 1e-3  # short rows too, by its context: a model has the short ones there


@pytest.mark.parametrize("dtype", ["q8_0", "mxfp4"])
def test_llama_cpp_rounds_to_the_same_bytes(dtype: str) -> None:
    """ggml's own quantizer, on numbers of many sizes, whole blocks of zeros and ties among them."""
    gguf = importlib.import_module("gguf")
    library = ctypes.CDLL(next(str(file) for file in Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(64, 64, generator=draw) * torch.exp2(torch.randint(-12, 12, (64, 1), generator=draw))
    values[0], values[1], values[2] = 0.0, torch.arange(64) / 2, values[2].round()
    kind: Any = dtype
    ours = quantize(values, kind).tobytes()
    theirs = ctypes.create_string_buffer(len(ours))
    size = library.ggml_quantize_chunk(
        gguf.GGMLQuantizationType[dtype.upper()].value,
        ctypes.c_void_p(values.data_ptr()),
        theirs,
        *(ctypes.c_int64(number) for number in (0, *values.shape)),
        None,
    )
    assert (size, theirs.raw) == (len(ours), ours)


@pytest.mark.parametrize("dtype", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4"])
def test_llama_cpp_runs_each_type(dtype: Any, tmp_path: Path) -> None:
    """A file of blocks answers as a model with the rounded weights does, to the rounding of activations to 8 bits."""
    tokenizer, model = tiny.tokenizer_of("qwen2"), tiny.model_of("qwen3_moe" if dtype == "mxfp4" else "qwen2")
    file = forge_dist.export_gguf(model, tmp_path / "m.gguf", tokenizer=tokenizer, dtype=dtype, name="tiny")
    for name, tensor in gguf_tensors(model, gguf_architecture(model, file), file).items():
        tensor.fill(forge_dist.gguf_rounded(tensor.values(), forge_dist.gguf_type(name, tensor.shape, dtype)))
    compared = list(differences(Server(file), model))
    assert sum(map(len, compared)) >= 60
    assert max(map(max, compared)) < 0.1
