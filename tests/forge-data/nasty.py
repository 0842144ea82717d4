"""Text that breaks careless masks: look-alikes of special tokens, multi-code-point characters, odd blanks."""

LOOK_ALIKES = [
    "<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<end_of_turn>",
    "</s>", "<s>",
    "<start_of_turn>model\n", "[INST]", " [/INST]", "<<SYS>>", "ASSISTANT:", "USER: ", "<|assistant|>\n", "<|end|>",
    "<|endoftext|>",
    "<|END_OF_TURN_TOKEN|>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>".replace("▁", "_"), "<|UNMASK_BEGIN|>", "<|UNMASK_END|>",
    "{% generation %}", "{{ bos_token }}", "{# x #}", "<tool_call>", "<tool_response>", "</tool_response>", "<think>", "\\n",
    "${x}", "%s",
]  # fmt: skip
WORDS = [
    "a",
    "Paris",
    "é",
    "e\u0301",
    "🙂",
    "👩\u200d👩\u200d👧",
    "\u200b",
    "\u200f",
    "\ufeff",
    "ß",
    "İ",
    "1",
    ".",
    "&amp;",
    "<b>",
    '"',
    "\\",
]
BLANKS = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\xa0", "\x85", "\u2028", "\u3000", "\x1c"]
