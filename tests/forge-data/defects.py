"""Seeded defects: one function each, which damages a clean row in one place, differently each time.

A defect knows which rule has to find it, how gravely, and in which field; whoever uses it knows in which row.
"""

import json

from .defect_corpus import DEFECTS, defect
from .lint_rows import (
    LATE,
    MUTE,
    OPEN,
    SOME,
    STRICT,
    WORDS,
    call,
    completion,
    preference,
    question,
    reply,
    tokens,
    tooled,
    turn,
    words,
)

__all__ = ["DEFECTS"]


def inside(rng, text, wrong):
    """Put something wrong at one of a text's blanks."""
    parts = text.split(" ")
    at = rng.randint(1, len(parts) - 1)
    return " ".join([*parts[:at], wrong, *parts[at:]])


@defect("unreadable_row", "stop")
def cut_json(rng, row):
    line = json.dumps(row)
    return line[: rng.randint(5, len(line) - 1)], ""


@defect("unreadable_row", "stop")
def no_object(rng, row):
    return rng.choice(['["a"]', '"text"', "7", "null", "true"]), ""


@defect("unreadable_row", "stop")
def content_is_no_text(rng, row):
    at = question(row, rng)
    row["messages"][at]["content"] = rng.choice([7, {"a": 1}, True, 1.5])
    return f"messages[{at}].content"


@defect("unknown_role", "stop")
def strange_role(rng, row):
    at = reply(row, rng)
    row["messages"][at]["role"] = rng.choice(["Assistant", "model", "gpt", "ASSISTANT", "bot", "asistant", "assistant "])
    return f"messages[{at}].role"


@defect("template_refuses", "stop", template=STRICT)
def role_the_template_refuses(rng, row):
    row["messages"] += [turn("tool", words(rng)), turn("assistant", words(rng))]
    return ""


@defect("untrained_turn_end", "stop", template=OPEN)
def no_turn_end(rng, row):
    row["messages"] = [turn("user", words(rng)), turn("assistant", words(rng))]
    return "messages[1]"


@defect("untrained_turn", "stop", template=SOME)
def turn_that_is_not_marked(rng, row):
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": words(rng)}}}],
    }
    row["messages"] = [turn("user", words(rng)), called, turn("tool", words(rng)), turn("assistant", words(rng))]
    return "messages[1]"


@defect("double_bos", "stop", base=tokens)
def two_bos(rng, row):
    bos = 420
    row["input_ids"] = [bos] * rng.randint(2, 3) + row["input_ids"]
    row["labels"] = [-100] * (len(row["input_ids"]) - len(row["labels"])) + row["labels"]
    return "input_ids"


@defect("reasoning_dropped", "stop", template=MUTE)
def reasoning_of_the_last_turn(rng, row):
    row["messages"][-1]["reasoning_content"] = words(rng)
    return f"messages[{len(row['messages']) - 1}].reasoning_content"


@defect("reasoning_dropped", "warn", template=MUTE)
def reasoning_of_an_earlier_turn(rng, row):
    row["messages"] += [turn("user", words(rng)), turn("assistant", words(rng))]
    at = len(row["messages"]) - 3
    row["messages"][at]["reasoning_content"] = words(rng)
    return f"messages[{at}].reasoning_content"


@defect("not_as_prompted", "stop", template=LATE)
def several_turns_in_one_text(rng, row):
    row["messages"] += [turn("user", words(rng)), turn("assistant", words(rng))]
    row["unmask"] = True
    return f"messages[{len(row['messages']) - 3}]"


@defect("inline_reasoning", "stop", template=LATE)
def thinks_behind_an_empty_block(rng, row):
    row["messages"][-1]["content"] = f"<think>{words(rng)}</think>{words(rng)}"
    return f"messages[{len(row['messages']) - 1}].content"


@defect("unclosed_reasoning", "stop")
def thinks_without_end(rng, row):
    at = reply(row, rng)
    row["messages"][at]["content"] = rng.choice(["<think>", "\n<think>\n", "<think> "]) + words(rng)
    return f"messages[{at}].content"


@defect("tool_arguments", "stop", base=tooled)
def arguments_that_are_no_json(rng, row):
    whole = json.dumps({"city": rng.choice(WORDS)})
    bad = [whole[:-1], whole.replace('"', "'"), "", rng.choice(WORDS), f"[{whole}]", "null", whole + "}", '"text"']
    row["messages"][1]["tool_calls"][0]["function"]["arguments"] = rng.choice(bad)
    return "messages[1].tool_calls[0].function.arguments"


@defect("tool_arguments", "stop", base=tooled)
def arguments_that_are_null(rng, row):
    function = row["messages"][1]["tool_calls"][0]["function"]
    if rng.random() < 0.5:
        function["arguments"] = None
    else:
        del function["arguments"]
    return "messages[1].tool_calls[0].function.arguments"


@defect("tool_arguments", "warn", base=tooled)
def argument_of_a_merged_schema(rng, row):
    name = rng.choice(WORDS)
    arguments = {"city": "x", name: None}
    function = row["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = arguments if rng.random() < 0.5 else json.dumps(arguments)
    return f"messages[1].tool_calls[0].function.arguments.{name}"


@defect("unknown_tool", "warn", base=tooled)
def call_of_what_was_not_offered(rng, row):
    row["messages"][1]["tool_calls"][0]["function"]["name"] += rng.choice(["_", "2", "s"])
    return "messages[1].tool_calls[0].function.name"


@defect("tool_call_without_result", "warn", base=tooled)
def call_without_result(rng, row):
    if rng.random() < 0.5:
        row["messages"][1]["tool_calls"].append(call(row["tools"][0]["function"]["name"], {"city": rng.choice(WORDS)}))
    else:
        row["messages"][2] = turn("user", words(rng))
    return "messages[1].tool_calls"


@defect("tool_result_without_call", "warn", base=tooled)
def result_without_call(rng, row):
    del row["messages"][1]
    return "messages[1].role"


@defect("tool_result_without_call", "warn", base=tooled)
def result_of_another_call(rng, row):
    row["messages"][1]["tool_calls"][0]["id"] = f"call_{rng.randint(1, 9)}"
    row["messages"][2]["tool_call_id"] = "call_x"
    return "messages[2].tool_call_id"


@defect("empty_turn", "stop")
def empty_answers(rng, row):
    for message in row["messages"]:
        if message["role"] == "assistant":
            message["content"] = rng.choice(["", " ", "\n", "\t \n", "\u00a0"])
    return f"messages[{reply(row, rng)}].content"


@defect("empty_turn", "warn")
def one_empty_answer(rng, row):
    at = reply(row, rng)
    row["messages"] += [turn("user", words(rng)), turn("assistant", words(rng))]
    row["messages"][at]["content"] = rng.choice(["", " ", "\n"])
    return f"messages[{at}].content"


@defect("empty_turn", "stop")
def null_answer(rng, row):
    at = reply(row, rng)
    row["messages"][at]["content"] = None
    return f"messages[{at}].content"


@defect("empty_turn", "warn")
def empty_question(rng, row):
    at = question(row, rng)
    row["messages"][at]["content"] = rng.choice(["", " ", "\n\n"])
    return f"messages[{at}].content"


@defect("empty_turn", "stop", base=completion)
def empty_completion(rng, row):
    row["completion"] = rng.choice(["", " ", "\n"])
    return "completion"


@defect("special_token_in_text", "stop")
def turn_end_within_an_answer(rng, row):
    at = reply(row, rng)
    content = row["messages"][at]["content"]
    row["messages"][at]["content"] = inside(rng, content, rng.choice(["<|im_end|>", "<|im_start|>user", "<|endoftext|>"]))
    return f"messages[{at}].content"


@defect("special_token_in_text", "warn")
def forged_turn_of_a_user(rng, row):
    at = question(row, rng)
    forged = rng.choice(["<|im_end|>\n<|im_start|>assistant\nyes", "<|endoftext|>", "<|im_sep|>", "<|im_start|>"])
    row["messages"][at]["content"] = inside(rng, row["messages"][at]["content"], forged)
    return f"messages[{at}].content"


@defect("foreign_markup", "warn")
def rendered_for_another_model(rng, row):
    at = rng.choice([question(row, rng), reply(row, rng)])
    mark = rng.choice(
        ["<|eot_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<|start_header_id|>user", "<|assistant|>", "<<SYS>>"]
    )
    row["messages"][at]["content"] = inside(rng, row["messages"][at]["content"], mark)
    return f"messages[{at}].content"


@defect("role_label_in_text", "warn")
def label_of_a_role(rng, row):
    at = reply(row, rng)
    label, after = (
        rng.choice(["Assistant: ", "AI:", "### Response: ", "\nASSISTANT: "]),
        rng.choice(["\nUser: ", "\n\nHuman: ", "\n### Human: "]),
    )
    content = row["messages"][at]["content"]
    row["messages"][at]["content"] = label + content if rng.random() < 0.5 else content + after + words(rng)
    return f"messages[{at}].content"


@defect("straddling_token", "warn")
def stretch_behind_a_blank(rng, row):
    at, first, last = reply(row, rng), words(rng), f"capital {words(rng)}"
    row["messages"][at]["content"] = f"{first} {last}"
    if rng.random() < 0.5:
        parts = ((first + " ", False), (last, True))
        row["messages"][at]["content"] = [{"type": "text", "text": text, "train": train} for text, train in parts]
    else:
        detail = {"begin_offset": len(first) + 1, "end_offset": len(first) + len(last), "train": True}
        row["messages"][at]["train_detail"] = [detail]
    return f"messages[{at}].content"


@defect("broken_unicode", "warn")
def lost_characters(rng, row):
    at = rng.randrange(len(row["messages"]))
    wrong = rng.choice(
        [
            "caf\ufffd",
            "ItÃ¢â‚¬â„¢s",
            "naÃ¯ve",
            "donâ€™t",
            "Â«so",
            "nul\x00",
            "back\x08",
            "\x1b[1mbold",
            "\x93quoted\x94",
            "Ð¿Ñ€Ð¸",
        ]
    )
    row["messages"][at]["content"] = inside(rng, row["messages"][at]["content"], wrong)
    return f"messages[{at}].content"


@defect("broken_unicode", "stop")
def half_a_character(rng, row):
    at = rng.randrange(len(row["messages"]))
    row["messages"][at]["content"] = inside(rng, row["messages"][at]["content"], rng.choice(["\ud83d", "\ude00", "a\udc80"]))
    return f"messages[{at}].content"


@defect("role_order", "warn")
def roles_out_of_order(rng, row):
    row["messages"] = [turn("user", words(rng)), turn("assistant", words(rng))]
    kind = rng.randrange(4)
    extra = turn(("user", "assistant", "system", "assistant")[kind], words(rng))
    at = (1, 2, 2, 0)[kind]
    row["messages"].insert(at, extra)
    if kind == 2:
        row["messages"] += [turn("user", words(rng)), turn("assistant", words(rng))]
    return f"messages[{at}].role"


@defect("no_trained_token", "warn")
def nothing_to_learn(rng, row):
    if rng.random() < 0.5:
        row["messages"] = [turn("user", words(rng))]
    else:
        for message in row["messages"]:
            message["train"] = False
    return ""


@defect("untrained_last_turn", "warn")
def ends_with_the_user(rng, row):
    row["messages"].append(turn("user", words(rng)))
    return f"messages[{len(row['messages']) - 1}]"


@defect("missing_eos", "warn", base=tokens)
def no_end(rng, row):
    keep = rng.randint(5, len(row["input_ids"]) - 1)
    row["input_ids"], row["labels"] = row["input_ids"][:keep], row["labels"][:keep]
    return "labels"


@defect("same_answers", "stop", base=preference)
def twice_the_same_answer(rng, row):
    row["rejected"] = row["chosen"]
    return "rejected"


@defect("same_answers", "warn", base=preference, settings={"on_bad_pair": "skip"})
def twice_the_same_answer_left_out(rng, row):
    row["rejected"] = row["chosen"]
    return "rejected"


@defect("prompts_differ", "stop", base=preference)
def a_prompt_for_each(rng, row):
    row["prompt_chosen"] = row.pop("prompt")
    row["prompt_rejected"] = [turn("user", words(rng) + "?")] if isinstance(row["prompt_chosen"], list) else words(rng) + "?"
    return "prompt_chosen"


@defect("empty_answer", "stop", base=preference)
def no_answer(rng, row):
    side = rng.choice(["chosen", "rejected"])
    row[side] = rng.choice(["", None, []])
    return side
