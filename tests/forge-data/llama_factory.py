"""LLaMA-Factory's converters, said again in a few lines: an oracle for what its rows mean.

After `src/llamafactory/data/converter.py` and `parser.py` of 0.9.5. A row becomes its prompt, its answers, its system message
and its tools; of KTO's rows the answer stands beside an empty one there, and beside a flag here.
"""

DEFAULTS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "observation",
    "function_tag": "function",
    "system_tag": "system",
}


def converted(row, entry):
    """Return (prompt, answers, wanted, system, tools) of a row, as an entry of dataset_info.json says."""
    columns = entry.get("columns", DEFAULTS)
    names = TAGS | entry.get("tags", {})

    def column(name):
        return row.get(columns.get(name)) if columns.get(name) else None

    if entry.get("formatting", "alpaca") == "alpaca":
        prompt = []
        for asked, answered in column("history") or []:
            prompt += [("user", asked), ("assistant", answered)]
        prompt.append(("user", "\n".join(part for part in (column("prompt"), column("query")) if part)))
        system = column("system") or ""
        if isinstance(column("kto_tag"), bool) or not entry.get("ranking"):
            answers = [("assistant", column("response"))]
        else:
            answers = [("assistant", column(side)) for side in ("chosen", "rejected")]
    else:
        roles = {names[tag]: role for tag, role in ROLES.items()}

        def read(turn):
            return roles[turn[names["role_tag"]]], turn[names["content_tag"]]

        messages = column("messages")
        system = column("system") or ""
        if messages[0][names["role_tag"]] == names["system_tag"]:
            system, messages = messages[0][names["content_tag"]], messages[1:]
        prompt = [read(turn) for turn in messages]
        if entry.get("ranking"):
            assert len(prompt) % 2 == 1
            answers = [read(column(side)) for side in ("chosen", "rejected")]
        else:
            assert len(prompt) % 2 == 0
            prompt, answers = prompt[:-1], prompt[-1:]
    return prompt, answers, column("kto_tag"), system, column("tools") or ""
