"""Oracles of real chat templates: what each writes, and what of it is learned, written by hand.

An account turns messages into (text, is it learned). It was written from the template, and knows nothing of tracing, offsets or
tokens. A test first holds it against the template's own text, so an account that is wrong about the text fails by itself.
"""

from collections.abc import Callable, Iterator

import attrs

Pieces = Iterator[tuple[str, bool]]


@attrs.frozen
class Account:
    """One family's template by hand, and which conversations it covers."""

    pieces: Callable[[list[dict]], Pieces]
    system: bool = True
    """Whether a conversation may open with a system message."""
    strict: bool = True
    """Whether user and assistant have to take turns."""
    loses: Callable[[list[dict]], bool] = lambda messages: False
    """Whether the template leaves out words in a way that forge may refuse, for that reason."""


def turns(
    header: str, end: str, after: str = "", *, names: dict[str, str] | None = None, trims: bool = False
) -> Callable[[list[dict]], Pieces]:
    """Write most families: header with the role's name, content, turn end, and text between turns."""

    def pieces(messages: list[dict]) -> Pieces:
        for message in messages:
            role, content = message["role"], message["content"]
            yield header.format((names or {}).get(role, role)), False
            yield (content.strip() if trims else content) + end, role == "assistant"
            yield after, False

    return pieces


def opened(begin: str, inner: Callable[[list[dict]], Pieces], end: str = "") -> Callable[[list[dict]], Pieces]:
    """Add text before and after the turns."""

    def pieces(messages: list[dict]) -> Pieces:
        yield begin, False
        yield from inner(messages)
        yield end, False

    return pieces


def own_system(text: str, inner: Callable[[list[dict]], Pieces]) -> Callable[[list[dict]], Pieces]:
    """Describe a template that writes a system turn of its own where the conversation has none."""

    def pieces(messages: list[dict]) -> Pieces:
        if messages[0]["role"] != "system":
            yield text, False
        yield from inner(messages)

    return pieces


def folded(join: str, inner: Callable[[list[dict]], Pieces], *, front: str = "") -> Callable[[list[dict]], Pieces]:
    """Describe a template that puts the system message at the beginning of the first user message."""

    def pieces(messages: list[dict]) -> Pieces:
        if messages[0]["role"] == "system":
            system, first, *rest = messages
            messages = [{"role": "user", "content": front + system["content"] + join + first["content"]}, *rest]
        return inner(messages)

    return pieces


def llama2(messages: list[dict]) -> Pieces:
    for message in messages:
        if message["role"] == "user":
            yield f"<s>[INST] {message['content'].strip()} [/INST]", False
        else:
            yield f" {message['content'].strip()} </s>", True


def llama31(messages: list[dict]) -> Pieces:
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"].strip(), messages[1:]
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    yield "<|begin_of_text|>" + header.format("system"), False
    yield f"Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n{system}<|eot_id|>", False
    yield from turns(header, "<|eot_id|>", trims=True)(messages)


def mistral(messages: list[dict]) -> Pieces:
    for message in messages:
        user = message["role"] == "user"
        yield f"[INST] {message['content']} [/INST]" if user else message["content"] + "</s>", not user


def mistral_nemo(messages: list[dict]) -> Pieces:
    for message in messages:
        user = message["role"] == "user"
        yield f"[INST]{message['content']}[/INST]" if user else message["content"] + "</s>", not user


def phi4(messages: list[dict]) -> Pieces:
    for message in messages:
        match message["role"]:
            case "assistant":
                yield message["content"] + "<|im_end|>", True
            case role:
                yield f"<|im_start|>{role}<|im_sep|>{message['content']}<|im_end|>", False
        if message["role"] == "user":
            yield "<|im_start|>assistant<|im_sep|>", False


def qwen3(messages: list[dict]) -> Pieces:
    def is_query(message: dict) -> bool:
        content = message["content"]
        return message["role"] == "user" and not (
            content.startswith("<tool_response>") and content.endswith("</tool_response>")
        )

    queries = [place for place, message in enumerate(messages) if is_query(message)]
    last_query = queries[-1] if queries else len(messages) - 1
    for place, message in enumerate(messages):
        content = message["content"]
        yield f"<|im_start|>{message['role']}\n", False
        if message["role"] != "assistant":
            yield content + "<|im_end|>\n", False
            continue
        reasoning = message.get("reasoning_content", "")
        if "reasoning_content" not in message and "</think>" in content:
            reasoning = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
            content = content.split("</think>")[-1].lstrip("\n")
        if place > last_query and (place == len(messages) - 1 or reasoning):
            stripped = reasoning.strip("\n")
            content = f"<think>\n{stripped}\n</think>\n\n" + content.lstrip("\n")
        yield content + "<|im_end|>", True
        yield "\n", False


def r1(messages: list[dict]) -> Pieces:
    yield "<｜begin▁of▁sentence｜>", False
    yield next((m["content"] for m in messages if m["role"] == "system"), ""), False
    for message in messages:
        match message["role"]:
            case "user":
                yield "<｜User｜>" + message["content"], False
            case "assistant":
                yield "<｜Assistant｜>", False
                yield message["content"].split("</think>")[-1] + "<｜end▁of▁sentence｜>", True


def gemma3(messages: list[dict]) -> Pieces:
    prefix = ""
    if messages[0]["role"] == "system":
        prefix, messages = messages[0]["content"] + "\n\n", messages[1:]
    yield "<bos>", False
    for message in messages:
        yield f"<start_of_turn>{_MODEL.get(message['role'], 'user')}\n{prefix}", False
        yield message["content"].strip() + "<end_of_turn>", message["role"] == "assistant"
        yield "\n", False
        prefix = ""


def command_r(messages: list[dict]) -> Pieces:
    yield "<BOS_TOKEN>", False
    for message in messages:
        yield f"<|START_OF_TURN_TOKEN|><|{_COHERE[message['role']]}_TOKEN|>", False
        content = message["content"] if message["role"] == "system" else message["content"].strip()
        yield content + "<|END_OF_TURN_TOKEN|>", message["role"] == "assistant"


def vicuna(messages: list[dict]) -> Pieces:
    default = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and "
        "polite answers to the user's questions."
    )
    system = messages[0]["content"] if messages[0]["role"] == "system" else default
    yield f"<s>{system} ", False
    for message in messages:
        if message["role"] == "user":
            yield f"USER: {message['content']} ", False
        elif message["role"] == "assistant":
            yield "ASSISTANT:", False
            yield f" {message['content']}</s>", True


def smollm3(messages: list[dict]) -> Pieces:
    for message in messages:
        if message["role"] != "system":
            yield f"<|im_start|>{message['role']}\n", False
            yield (
                message["content"].lstrip("\n" * (message["role"] == "assistant")) + "<|im_end|>",
                message["role"] == "assistant",
            )
            yield "\n", False


def _inline_reasoning(messages: list[dict]) -> bool:
    return any("</think>" in message["content"] for message in messages if message["role"] == "assistant")


_IM = "<|im_start|>{}\n"
_H3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
_COHERE = {"system": "SYSTEM", "user": "USER", "assistant": "CHATBOT"}
_MODEL = {"assistant": "model"}
_llama3 = opened("<|begin_of_text|>", turns(_H3, "<|eot_id|>", trims=True))

ACCOUNTS = {
    "chatml": Account(
        own_system(
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n",
            turns(_IM, "<|im_end|>", "\n"),
        ),
        strict=False,
    ),
    "llama-2": Account(folded("\n<</SYS>>\n\n", llama2, front="<<SYS>>\n")),
    "llama-3": Account(_llama3, strict=False),
    "llama-3-generation": Account(_llama3, strict=False),
    "llama-3.1": Account(llama31, strict=False),
    "mistral": Account(opened("<s>", mistral), system=False),
    "mistral-nemo": Account(opened("<s>", mistral_nemo), system=False),
    "gemma": Account(gemma3, system=False),
    "gemma-3": Account(gemma3),
    "phi-3": Account(opened("", turns("<|{}|>\n", "<|end|>", "\n"), "<|endoftext|>"), strict=False),
    "phi-4": Account(phi4, strict=False),
    "qwen2.5": Account(
        own_system(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n",
            turns(_IM, "<|im_end|>", "\n"),
        ),
        strict=False,
    ),
    "qwen3": Account(qwen3, strict=False, loses=_inline_reasoning),
    "deepseek-r1-distill": Account(r1, strict=False, loses=_inline_reasoning),
    "zephyr": Account(turns("<|{}|>\n", "</s>", "\n"), strict=False),
    "command-r": Account(command_r),
    "vicuna": Account(vicuna, strict=False),
}
"""Families whose text is theirs alone; the others open with pages of instructions, and are covered by their golden files."""
