"""Every form of a preference, or of a rated answer, with images becomes the same one; sides both have the prompt's images."""

import pytest

from forge_data import BadPairError, DataError, Format, Media
from forge_data.formats import _registry
from forge_data.formats._registry import convert, detect
from forge_data.formats._samples import Chat, Preference, Unpaired

GOOD, BAD = ({"role": "assistant", "content": text} for text in ("A cat.", "A dog."))
QUESTION = {"type": "text", "text": "What is it?"}
GAP = {"type": "image"}
FILE = "/rows/cat.png"


def read(row, media=True, directory="/rows"):
    return convert(detect("f:1", row), "f:1", row, None, media=media, directory=directory)


def asked(**image):
    return {"role": "user", "content": [{"type": "image", **image}, QUESTION]}


def given(**image):
    """A row whose prompt has one image."""
    return {"prompt": [asked(**image)], "chosen": [GOOD], "rejected": [BAD]}


def calling(picture, answer, **beside):
    """A conversation in which a tool shows a picture."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    shown = {"role": "tool", "content": [{"type": "image", **({"image": picture} if picture else {})}]}
    return [asked(image="cat.png"), call, shown, answer]


TURNS = [{"from": "human", "value": "<image>What is it?"}]
SIDES = {"chosen": {"from": "gpt", "value": "A cat."}, "rejected": {"from": "gpt", "value": "A dog."}}
MARKED = {"role": "user", "content": "<image>What is it?"}
FORMS = {
    "part": given(image="cat.png"),
    "trl": given() | {"images": ["cat.png"]},
    "trl one": given() | {"image": {"bytes": None, "path": "cat.png"}},
    "trl without a place": {**given(), "prompt": [{"role": "user", "content": "What is it?"}], "images": [FILE]},
    "whole": {"chosen": [asked(image="cat.png"), GOOD], "rejected": [asked(path="cat.png"), BAD]},
    "whole and a column": {"chosen": [asked(), GOOD], "rejected": [asked(), BAD], "images": ["cat.png"]},
    "whole and its question": {"prompt": "What is it?", "chosen": [asked(url=f"file://{FILE}"), GOOD],
                               "rejected": [asked(image=FILE), BAD]},
    "prompts of both": {"prompt_chosen": [asked(image=FILE)], "prompt_rejected": [asked(image=FILE)], "chosen": [GOOD],
                        "rejected": [BAD]},
    "llama-factory": {"conversations": TURNS, **SIDES, "images": ["cat.png"]},
    "llama-factory's messages": {"messages": [MARKED], "chosen": GOOD, "rejected": BAD, "images": ["cat.png"]},
    "llama-factory's alpaca": {"instruction": "<image>What is it?", "chosen": "A cat.", "rejected": "A dog.",
                               "images": ["cat.png"]},
    "messages with a part": {"messages": [asked(image="cat.png")], "chosen": GOOD, "rejected": BAD},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    """Parts, columns and marks say the same, of both sides."""
    made = read(FORMS[form])
    assert isinstance(made, Preference)
    for side, answer in ((made.chosen, GOOD), (made.rejected, BAD)):
        assert side.messages == [asked(), answer]
        assert side.first_completion == 1
        assert [image.path for image in side.media] == [FILE]


@pytest.mark.parametrize("form", FORMS)
def test_not_asked_for(form):
    """A caller that does not train images is told of the first, and who does."""
    with pytest.raises(DataError, match=r"f:1: field .* and only text is trained here: forge sft, osft, "):
        read(FORMS[form], media=False)


RATED = {
    "part": {"prompt": [asked(image="cat.png")], "completion": [GOOD], "label": True},
    "trl": {"prompt": [asked()], "completion": [GOOD], "label": True, "images": ["cat.png"]},
    "trl without a place": {"prompt": [{"role": "user", "content": "What is it?"}], "completion": [GOOD], "label": True,
                            "image": {"bytes": None, "path": "cat.png"}},
    "llama-factory": {"conversations": [*TURNS, SIDES["chosen"]], "kto_tag": True, "images": ["cat.png"]},
    "llama-factory's messages": {"messages": [MARKED, GOOD], "kto_tag": True, "images": ["cat.png"]},
    "llama-factory's alpaca": {"instruction": "<image>What is it?", "output": "A cat.", "kto_tag": True, "images": ["cat.png"]},
    "messages with a part": {"messages": [asked(image="cat.png"), GOOD], "kto_tag": True},
}  # fmt: skip


@pytest.mark.parametrize("form", RATED)
def test_rated_answers(form):
    """Parts, columns and marks of a rated answer say the same; a caller that does not train images is told of them."""
    made = read(RATED[form])
    assert isinstance(made, Unpaired)
    assert isinstance(made.answer, Chat)
    assert made.answer.messages == [asked(), GOOD]
    assert made.answer.first_completion == 1
    assert [image.path for image in made.answer.media] == [FILE]
    with pytest.raises(
        DataError, match=r"f:1: field .* and only text is trained here: forge sft, osft, distill, dpo, orpo, sim"
    ):
        read(RATED[form], media=False)


TEXTS = {
    "a prompt": {"prompt": "see <image>this:", "chosen": " a cat", "rejected": " a dog"},
    "prompts of both": {"prompt_chosen": "see <image>this:", "prompt_rejected": "see <image>this:", "chosen": " a cat",
                        "rejected": " a dog"},
    "no prompt": {"chosen": "see <image>this: a cat", "rejected": "see <image>this: a dog"},
}  # fmt: skip


@pytest.mark.parametrize("form", TEXTS)
def test_plain_text(form):
    """Both sides have the prompt's images, at its marks or before it; so has a rated answer."""
    for marked, places in ((TEXTS[form], (4,)), ({k: v.replace("<image>", "") for k, v in TEXTS[form].items()}, (0,))):
        made = read(marked | {"images": ["cat.png"]})
        assert isinstance(made, Preference)
        sides = made.chosen, made.rejected
        # Of what both begin with, the blank belongs to the answers; "a " does not.
        assert [side.prompt + side.completion for side in sides] == ["see this: a cat", "see this: a dog"]
        assert [side.prompt for side in sides] == ["see this: a" if form == "no prompt" else "see this:"] * 2
        assert [(side.media[0].path, side.places) for side in sides] == [(FILE, places)] * 2
    rated = read({"prompt": "what <image>?", "completion": "a cat", "label": False, "image": "cat.png"})
    assert isinstance(rated, Unpaired)
    assert (rated.answer.prompt, rated.answer.places, rated.answer.media[0].path) == ("what ?", (5,), FILE)
    with pytest.raises(DataError, match=r"f:1: field image.* and only text is trained here: forge sft, osft, "):
        read(TEXTS[form] | {"images": ["cat.png"]}, media=False)


def test_images_of_the_answers():
    """What a tool shows within an answer belongs to that answer."""
    both = {"chosen": calling("a.png", GOOD), "rejected": [asked(image="cat.png"), BAD]}
    made = read(both)
    assert [image.path for image in made.chosen.media] == [FILE, "/rows/a.png"]
    assert [image.path for image in made.rejected.media] == [FILE]
    assert made.chosen.first_completion == 1


@pytest.mark.parametrize(
    ("row", "kind", "expected"),
    [
        (given() | {"images": ["a", "b"]}, DataError,
         r"f:1: field images holds 2 images, and parts that are images and do not say which stand in its messages 1 t"),
        (given(), DataError, r"field prompt\[0\].content\[0\] is a part that is an image and does not say which"),
        ({"conversations": TURNS, **SIDES, "images": ["a", "b"]}, DataError,
         r"field images holds 2 images, and <image> stands in its texts 1 time"),
        ({"conversations": TURNS, **SIDES, "rejected": {"from": "gpt", "value": "<image>"}, "images": ["a"]}, DataError,
         r"f:1: field rejected.value holds <image>, and the row has images"),
        ({**given(image="a"), "rejected": [{**BAD, "content": [GAP]}]}, DataError,
         r"field rejected\[0\].content\[0\] is a part of the type 'image' in a message of the assistant"),
        ({"messages": [MARKED], "chosen": {**GOOD, "content": [GAP]}, "rejected": BAD, "images": ["a"]}, DataError,
         r"field chosen.content\[0\] is a part of the type 'image' in a message of the assistant"),
        ({"prompt": "a", "chosen": "b", "rejected": "c<image>", "images": ["a"]}, DataError,
         r"f:1: field rejected holds <image>, and the row has images"),
        ({"chosen": "a b<image>", "rejected": "a c", "images": ["a"]}, DataError, r"f:1: field chosen holds <image>, and the"),
        ({"prompt": "a", "chosen": "b", "rejected": "b", "images": ["a"]}, BadPairError, r"rejected is the same as chosen"),
        ({"chosen": [asked(image="a"), GOOD], "rejected": [asked(image="b"), BAD]}, BadPairError,
         r"chosen\[0\] and rejected\[0\] differ, so there is no prompt"),
        ({"chosen": [asked(image="a"), GOOD], "rejected": [asked(image="a"), GOOD]}, BadPairError,
         r"nothing is left of chosen"),
        ({"prompt": [asked(image="a")], "chosen": [GOOD], "rejected": [GOOD]}, BadPairError, r"rejected is the same as chosen"),
        ({"prompt": [asked(image="a")], "chosen": calling("b", GOOD)[1:], "rejected": calling("b", GOOD)[1:]}, BadPairError,
         r"rejected is the same as chosen"),
        ({"prompt": [asked(image="a")], "chosen": calling("b", GOOD)[1:], "rejected": calling("c", BAD)[1:]}, BadPairError,
         r"chosen\[1\] is of the role 'tool', and there chosen and rejected begin to differ"),
        (RATED["trl"] | {"images": ["a", "b"]}, DataError, r"f:1: field images holds 2 images, and parts that are images"),
        (RATED["part"] | {"completion": [{**GOOD, "content": [GAP]}]}, DataError,
         r"field completion\[0\].content\[0\] is a part of the type 'image' in a message of the assistant"),
        (RATED["llama-factory's alpaca"] | {"output": "<image>", "images": ["a", "b"]}, DataError,
         r"f:1: field output holds <image>, and the row has images"),
        (RATED["llama-factory"] | {"conversations": [*TURNS, {"from": "gpt", "value": "<image>"}]}, DataError,
         r"f:1: field conversations\[1\].value holds <image>, and the row has images"),
        ({"prompt": "a<image> <image>", "completion": "b", "label": True, "images": ["a"]}, DataError,
         r"f:1: field images holds 1 image, and <image> stands in the prompt 2 times"),
        ({"prompt": [asked(image="a")], "chosen": [GOOD], "rejected": [BAD], "images": ["b"]}, DataError,
         r"parts that are images and do not say which stand in its messages 0 times"),
        ({"prompt": [{"role": "user", "content": "a"}], "chosen": [GOOD, asked(), GOOD], "rejected": [BAD], "images": ["b"]},
         BadPairError, r"f:1: chosen and rejected have the row's media in other places of the prompt"),
    ],
)  # fmt: skip
def test_refused(row, kind, expected):
    """Each fault is named by its field, with what to do; pairs that prefer nothing are pairs of that kind."""
    with pytest.raises(kind, match=expected):
        read(row)


def test_formats_of_other_packages(monkeypatch):
    """A format that returns a preference or a rated answer of its own has its paths placed."""
    side = Chat("f:1", [asked(), GOOD], media=(Media("prompt[0].content[0]", "cat.png"),))
    known = {
        "pairs": Format(needs="a", matches=lambda row: "a" in row, convert=lambda place, _: Preference(place, side, side)),
        "rated": Format(needs="a", matches=lambda row: "a" in row, convert=lambda place, _: Unpaired(place, side, True)),
    }
    monkeypatch.setattr(_registry, "format_named", lambda name: known.get(name) or _registry.built_in(name))
    made = convert("pairs", "f:1", {"a": 1}, None, media=True, directory="/rows")
    rated = convert("rated", "f:1", {"a": 1}, None, media=True, directory="/rows")
    assert isinstance(made, Preference)
    assert isinstance(rated, Unpaired)
    for part in (made.rejected, rated.answer):
        assert isinstance(part, Chat)
        assert [image.path for image in part.media] == [FILE]
    for name in known:
        with pytest.raises(DataError, match=r"f:1: field prompt\[0\].content\[0\] is an image, and only text is trained here"):
            convert(name, "f:1", {"a": 1}, None)
