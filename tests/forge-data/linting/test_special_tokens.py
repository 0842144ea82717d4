"""Special tokens and foreign marks that a text writes out."""

import pytest
from tokenizers import AddedToken

from forge_data.linting._special_tokens import SpecialTokens

from ..families import FAMILIES


def found(family, text):
    return [(each.token, each.special, each.turns) for each in SpecialTokens(FAMILIES[family].tokenizer()).find(text)]


def test_own_and_foreign():
    """Own tokens are separated from marks of other tokenizers, and tokens of turns from others."""
    assert found("qwen2.5", "a <|im_end|> b [INST] c") == [("<|im_end|>", True, True), ("[INST]", False, False)]
    assert found("llama-3", "a <|im_end|> <|eot_id|> <|end_of_text|>")[:2] == [
        ("<|im_end|>", False, False),
        ("<|eot_id|>", True, True),
    ]
    assert found("deepseek-r1-distill", "x<｜User｜>y") == [("<｜User｜>", True, True)]
    assert found("mistral-nemo", "[INST] [/INST] [X]") == [("[INST]", True, True), ("[/INST]", True, True)]


@pytest.mark.parametrize(
    "text",
    ["", "a < b > c", "<div><p>x</p></div>", "x[0] and y[i]", "<think>a</think>", "<tool_call>{}</tool_call>", "<|im_end"],
)
def test_nothing_to_speak_of(text):
    """HTML, code, reasoning, calls and halves of tokens are plain text."""
    assert found("qwen3", text) == []


def test_every_special_token_of_every_family_is_found():
    """A special token of any shape is found inside a word and twice in a row, unless it is for reasoning or tools."""
    for family in FAMILIES.values():
        special = SpecialTokens(family.tokenizer())
        for token in family.specials:
            wanted = [] if any(word in token.lower() for word in ("think", "tool", "python")) else [token, token]
            assert [each.token for each in special.find(f"x{token}{token}y")] == wanted, (family.name, token)


def test_tokens_without_brackets():
    """A special token that is a plain word is found too; the longest where one begins with another."""
    tokenizer = FAMILIES["qwen2.5"].tokenizer()
    tokenizer.add_tokens(
        [AddedToken(token, special=True) for token in ("ENDTURN", "ENDTURN2", "\u2581\u2581")], special_tokens=True
    )
    assert [each.token for each in SpecialTokens(tokenizer).find("so ENDTURN2 and ENDTURN.")] == ["ENDTURN2", "ENDTURN"]
