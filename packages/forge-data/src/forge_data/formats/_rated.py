"""Row with a prompt apart from what rates its answer, as elsewhere → where it asks."""

from forge_data.formats._format import Fields

KTO_TAG = "kto_tag"
"""Field that says of a conversation's last turn whether it is wanted."""
_SIDES = ("chosen", "rejected")
_ASKED = {"conversations": "", "messages": "", "instruction": "output", "query": "response"}
"""Field in which a row asks → the one with the answer, where it is another."""
REJECTED = ("rejected_response", "rejected_messages", "rejected_images", "rejected_videos", "rejected_audios")
"""Fields of ms-swift's rows with an answer that another is preferred to, or with its media."""
_PROMPTS = ("prompt", "prompt_chosen", "prompt_rejected", "chosen_prompt", "rejected_prompt")


def rated(fields: Fields) -> str | None:
    """Name the field with the prompt of a row that is compared or rated; None for any other row.

    It is `conversations`, `messages`, `instruction` or `query`, beside `chosen` and `rejected` that are one turn or one text
    each, beside `kto_tag`, or beside the rejected answer alone, as in ms-swift. Sides that are lists hold whole conversations,
    and a row with `prompt` asks there.
    """
    if not any(name in fields for name in (KTO_TAG, *_SIDES, *REJECTED)) or any(name in fields for name in _PROMPTS):
        return None
    asked = next((name for name in _ASKED if name in fields), None)
    if asked is None:
        return None
    if KTO_TAG in fields:
        return asked if not _ASKED[asked] or _ASKED[asked] in fields else None
    if rejects(fields):
        return asked
    sides = [fields[name] for name in _SIDES if name in fields]
    # One of them may be null, which is a fault of the row and not of its format.
    nulls = getattr(fields, "nulls", ())
    both = all(name in fields or name in nulls for name in _SIDES)
    return asked if both and not any(isinstance(side, list) for side in sides) else None


def rejects(fields: Fields) -> bool:
    """Tell whether a row is ms-swift's, whose preferred answer stands in the conversation."""
    return any(name in fields for name in REJECTED) and not any(name in fields for name in (KTO_TAG, *_SIDES))
