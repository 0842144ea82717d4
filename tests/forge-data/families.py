"""Chat templates of real model families, as vendors ship them, each with a small tokenizer that has its special tokens.

`templates/README.md` says where each file comes from. Vocabularies are trained on the spot: of the family's own make
(byte-level or SentencePiece-like), small, so that words fall apart at places that no mask may lean on. No model, no network, no
torch.
"""

import json
from functools import cache
from pathlib import Path

import attrs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
CORPUS = [
    "What is the capital of France? The capital of France is Paris. Who wrote it? I do not know.",
    "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHow are you today? [/INST] I am fine, thank you.",
    "USER: hello there ASSISTANT: hi, what now? USER: nothing ASSISTANT: then good-bye",
    "user\nassistant\nsystem\nmodel\ntool\n\n  def f(x):\n    return x + 1\n.\n\n.\n\n\n \n",
    '<think>\nLet me think.\n</think>\n\nanswer 0 1 2 3 4 5 6 7 8 9 {"name": "weather", "arguments": {"city": "Paris"}}',
] * 4
_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@attrs.frozen
class Family:
    """A template and the tokens that it is made of."""

    name: str
    specials: tuple[str, ...]
    eos: str
    bos: str | None = None
    files: tuple[tuple[str, str], ...] = ()
    """Name of a template and its file where the vendor ships several; else one file of the family's own name."""
    make: str = "tiktoken"
    """`tiktoken` (Llama-3, Qwen, Phi-4: newlines stay together), `bytes` (GPT-2, SmolLM2: they do not), `metaspace` (Llama-2:
    every stretch of text begins with a blank of its own), `gemma` (no such blank)."""
    swallows: tuple[str, ...] = ()
    """Special tokens that take the blanks after them along."""

    @property
    def template(self) -> str | dict[str, str]:
        """What `tokenizer.chat_template` is set to."""
        named = {name: (TEMPLATES / file).read_text(encoding="utf-8") for name, file in self.files}
        return named or (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")

    def tokenizer(self, make: str | None = None) -> PreTrainedTokenizerFast:
        """A tokenizer of one's own, not shared with other tests."""
        backend = _backend(make or self.make)
        added = [AddedToken(token, normalized=False, rstrip=token in self.swallows) for token in self.specials]
        backend.add_special_tokens(added)
        names = {"eos_token": self.eos} | ({"bos_token": self.bos} if self.bos else {})
        made = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)
        made.chat_template = self.template
        return made


def _backend(make: str) -> Tokenizer:
    return Tokenizer.from_str(_trained(make))


@cache
def _trained(make: str) -> str:
    if make in ("bytes", "tiktoken"):
        return _byte_level(as_tiktoken=make == "tiktoken").to_str()
    return _metaspace(prepends=make == "metaspace").to_str()


def _byte_level(*, as_tiktoken: bool) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    if as_tiktoken:
        split = pre_tokenizers.Split(Regex(_TIKTOKEN), behavior="isolated")
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    return backend


def _metaspace(*, prepends: bool) -> Tokenizer:
    """Blanks are letters, unknown characters fall to bytes, and nothing is cut before merging: as in Llama-2 and Gemma."""
    begin = [normalizers.Prepend("▁")] if prepends else []
    normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizer
    trained.train_from_iterator(
        [line for text in CORPUS for line in text.splitlines()], trainers.BpeTrainer(vocab_size=300, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary |= {token: 257 + place for place, token in enumerate(t for t in model["vocab"] if t != "<unk>")}
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizer
    strip = [decoders.Strip(" ", 1, 0)] if prepends else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA3 = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
_GEMMA = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
_COHERE = (
    "<PAD>", "<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
)  # fmt: skip
_QWEN3 = (*_CHATML, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
_HARMONY = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
_PHI3 = ("<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
_MISTRAL = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)

FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", _CHATML, "<|im_end|>", "<|im_start|>", make="bytes"),
        Family("llama-2", ("<s>", "</s>"), "</s>", "<s>", make="metaspace"),
        Family("llama-3", _LLAMA3, "<|eot_id|>", "<|begin_of_text|>"),
        Family("llama-3-generation", _LLAMA3, "<|eot_id|>", "<|begin_of_text|>"),
        Family("llama-3.1", _LLAMA3, "<|eot_id|>", "<|begin_of_text|>"),
        Family("mistral", ("<s>", "</s>"), "</s>", "<s>", make="metaspace"),
        Family("mistral-nemo", _MISTRAL, "</s>", "<s>"),
        Family("gemma", _GEMMA, "<eos>", "<bos>", make="gemma"),
        Family("gemma-3", _GEMMA, "<eos>", "<bos>", make="gemma"),
        Family("phi-3", _PHI3, "<|endoftext|>", "<s>", make="metaspace", swallows=_PHI3[3:]),
        Family("phi-4", ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"), "<|im_end|>", "<|endoftext|>"),
        Family("qwen2.5", _QWEN3[:5], "<|im_end|>"),
        Family("qwen3", _QWEN3, "<|im_end|>"),
        Family("deepseek-r1-distill", _DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
        Family(
            "granite-3.3",
            ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
            "<|end_of_text|>",
            "<|end_of_text|>",
        ),
        Family("zephyr", ("<s>", "</s>"), "</s>", "<s>", make="metaspace"),
        Family(
            "command-r",
            _COHERE,
            "<|END_OF_TURN_TOKEN|>",
            "<BOS_TOKEN>",
            files=(("default", "command-r.jinja"), ("tool_use", "command-r-tool-use.jinja")),
        ),
        Family("vicuna", ("<s>", "</s>"), "</s>", "<s>", make="metaspace"),
        Family("gpt-oss", _HARMONY, "<|return|>", "<|startoftext|>"),
        Family("smollm3", (*_CHATML, "<think>", "</think>"), "<|im_end|>"),
    )
}
