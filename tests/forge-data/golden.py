"""Golden files → cases, and an oracle of masks that knows bytes and no offsets.

A golden file reads as a reviewer reads it: `=== name | settings`, the row as JSON, `---`, and the text as the family's template
writes it, with what is learned between ⟦ and ⟧ and ∎ where the text ends. `⟨%Y-%m-%d⟩` stands for today's date.
"""

import json
from datetime import datetime
from pathlib import Path

import attrs

FOLDER = Path(__file__).parent / "golden"
_PLAIN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
BYTE_OF = {chr(byte): byte for byte in _PLAIN}
"""GPT-2's table: the character that stands for a byte in a byte-level vocabulary → the byte."""
BYTE_OF |= {chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _PLAIN)}
_BLANKS = "".join(chr(code) for code in range(0x3001) if chr(code).isspace() and not 0x1C <= code <= 0x1F)
"""White space as Unicode and the tokenizers' library have it; Python counts four separators more."""


@attrs.frozen
class Case:
    """One row and what is to be learned of it."""

    family: str
    name: str
    row: dict
    train_on: str
    turns: str
    refusal: str
    """`never`, `always`, or `allowed`: where the template leaves it open whether the row can be honoured."""
    marked: str
    """The text with marks; empty where the row is always refused."""

    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """(text, is it learned), in order."""
        marked, pieces = self.marked, []
        for date_format in ("%Y-%m-%d", "%B %d, %Y"):
            marked = marked.replace(f"⟨{date_format}⟩", datetime.now().astimezone().strftime(date_format))
        for part in marked.split("⟦"):
            learned, mark, plain = part.partition("⟧")
            pieces += [(learned, True), (plain, False)] if mark else [(part, False)]
        return [piece for piece in pieces if piece[0]]

    @property
    def text(self) -> str:
        """What the template writes."""
        return "".join(text for text, _ in self.pieces)


def cases() -> list[Case]:
    """Return all cases of all golden files."""
    return [case for file in sorted(FOLDER.glob("*.txt")) for case in _cases(file)]


def _cases(file: Path) -> list[Case]:
    found = []
    for block in ("\n" + file.read_text(encoding="utf-8")).split("\n=== ")[1:]:
        title, _, body = block.partition("\n")
        name, _, settings = title.partition(" | ")
        row, divider, marked = body.partition("\n---\n")
        said = dict(part.partition("=")[::2] for part in settings.split("; ") if part)
        refusal = "always" if "refused" in said else "allowed" if "or refused" in said else "never"
        assert bool(divider) == (refusal != "always"), f"{file.name}: {name}: a text, unless the row is refused"
        if divider:
            marked, end, after = marked.partition("∎")
            assert end, f"{file.name}: {name}: no ∎ at the end of the text"
            assert not after.strip(), f"{file.name}: {name}: text after ∎"
        train_on, turns = said.get("train_on", "assistant"), said.get("turns", "auto")
        found.append(Case(file.stem, name, json.loads(row), train_on, turns, refusal, marked))
    return found


def messages(row: dict) -> list[dict]:
    """Return the messages for the chat template: arguments of calls as objects, no fields about training."""
    both = json.loads(json.dumps(row["messages"] if "messages" in row else row["prompt"] + row["completion"]))
    for message in both:
        for name in ("train", "weight"):
            message.pop(name, None)
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return both


def native(tokenizer, row: dict, **settings):
    """Render a row with the tokenizer's own chat template."""
    return tokenizer.apply_chat_template(
        messages(row), tools=row.get("tools"), return_dict=False, **row.get("chat_template_kwargs", {}), **settings
    )


def places(tokenizer, text: str, ids: list[int]) -> list[tuple[int, int]]:
    """Return the bytes [a, b) of the text that each token holds, from the tokens' letters."""
    data, at, fresh, found = text.encode(), 0, True, []
    added = tokenizer.added_tokens_decoder
    bytewise = tokenizer.backend_tokenizer.normalizer is None
    prepends = not bytewise and "Prepend" in tokenizer.backend_tokenizer.to_str()
    for i, token in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        begin, letters = at, _letters(token, bytewise=bytewise)
        if i in added:
            at += len(token.encode())
            if added[i].rstrip:
                at = len(data) - len(data[at:].decode().lstrip(_BLANKS).encode())
        elif prepends and fresh:
            at += len(letters) - 1
        else:
            at += len(letters)
        held = data[begin:at]
        assert held.startswith(token.encode()) if i in added else held == letters[-len(held) :] * bool(held), (token, held)
        fresh = i in added
        found.append((begin, at))
    assert at == len(data)
    return found


def _letters(token: str, *, bytewise: bool) -> bytes:
    if bytewise:
        return bytes(BYTE_OF.get(letter, 0) for letter in token)
    if len(token) == 6 and token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def expected(tokenizer, ids: list[int], pieces: list[tuple[str, bool]]) -> list[bool | None]:
    """Whether each token is learned: one that holds learned bytes is, save a special token that begins before them and took
    blanks along.

    None, either, for a token that begins before learned text and brings only blanks of it along (whose they are, the template's
    or the message's, is not marked), and for one of no bytes at all where learned text begins or ends.
    """
    text = "".join(text for text, _ in pieces)
    data, learned = text.encode(), [flag for text, flag in pieces for _ in text.encode()]
    added, wanted = tokenizer.added_tokens_decoder, []
    for i, (begin, end) in zip(ids, places(tokenizer, text, ids), strict=True):
        if begin == end:
            around = {learned[at] for at in (begin - 1, begin) if 0 <= at < len(learned)}
            wanted.append(around.pop() if len(around) == 1 else None)
        elif learned[begin] or i in added or not any(learned[begin:end]):
            wanted.append(learned[begin])
        else:
            brought = bytes(byte for byte, flag in zip(data[begin:end], learned[begin:end], strict=True) if flag)
            wanted.append(True if brought.strip() else None)
    return wanted


def disagreements(tokenizer, example, pieces: list[tuple[str, bool]]) -> list[str]:
    """List tokens whose label is not what the oracle says, readable for a person."""
    ids, labels = example.input_ids.tolist(), example.labels.tolist()
    assert all(label in (i, -100) for i, label in zip(ids, labels, strict=True))
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return [
        f"token {t} {tokens[t]!r} (after {' '.join(tokens[max(0, t - 3) : t])!r}) is {'not ' * (labels[t] == -100)}learned"
        for t, wanted in enumerate(expected(tokenizer, ids, pieces))
        if wanted is not None and wanted != (labels[t] != -100)
    ]
