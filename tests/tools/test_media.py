"""What `hatch run media` makes of answers; one family is really checked. The others need torchvision, which CI has not."""

import json
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import media
import media_check
import media_configs
import media_rows
import numpy as np
import pytest
import torch
from repository import RESULTS

RIGHT = {
    "ok": True,
    "says": "loss 6e-08, gradients 1e-07",
    "rows": "packed",
    "loss": 6e-8,
    "gradients": 1.2e-7,
    "first": [1e-8, 0.0],
}
WRONG = RIGHT | {"ok": False, "says": "loss 1e-02, gradients 3e-01", "loss": 1e-2, "gradients": 0.3}
FAILS = {"ok": False, "says": "KeyError: 'pixel_values'", "refused": False}
REFUSED = {"ok": True, "says": "SettingsError: Gemma4UnifiedModel names no vision tower", "refused": True}
DRAWN = RIGHT | {"beside": "any", "shared": False}
FOUND = {
    "image": {
        "sft": {"origin": "First.", "families": {"LLaVA": RIGHT, "Aria": WRONG, "Ovis 2": FAILS}},
        "all_parts": {"origin": "Second.", "families": {"LLaVA": RIGHT, "Gemma 4 Unified": REFUSED}},
        "kto": {"origin": "First.", "families": {"Gemma 4 Unified": WRONG | {"ok": True}}},
        "grpo": {"origin": "First.", "families": {"LLaVA": DRAWN}},
    },
    "video": {"sft": {"origin": "First.", "families": {"Qwen2-VL": RIGHT}}},
}


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """The folder of the results, with pages that have places for the tables; no lane of the checkout is read."""
    for page in ("images", "audio", "video"):
        marks = [f"<!-- hatch run media: {name} -->\n<!-- end -->" for name, of in media.BLOCKS.items() if of[0] == page]
        (tmp_path / f"{page}.md").write_text("\n\n".join(["# Title", "By hand.", *marks, "The rest."]) + "\n")
    monkeypatch.setattr(media, "RESULTS", tmp_path)
    monkeypatch.setattr(media, "TORCHVISION", "torchvision 9")
    monkeypatch.setattr(media, "versions", lambda: "transformers 9")
    monkeypatch.setattr(media.lane, "Lane", partial(media.lane.Lane, home=tmp_path / "state", sources="s"))
    return tmp_path


def test_the_tables_say_what_was_found(pages):
    """Figures, what is wrong, fails, is refused or skipped, and where each column comes from; what is by hand stays."""
    media.write(FOUND)
    text = (pages / "images.md").read_text()
    assert "| LLaVA | packed | 6e-8, 1e-7 | 6e-8, 1e-7 |  |  |  |" in text
    assert "| Aria | packed | **1e-2, 3e-1** |" in text
    assert "| Ovis 2 |  | **fails** |" in text
    assert "| Gemma 4 Unified | packed |  | refused |  | 1e-8, 0 ([rounding](images.md#what-is-rounding)) |  |" in text
    assert "| LLaVA | packed | any | no | 6e-8, 1e-7 |  |" in text
    assert "| Molmo 2 |  |  |  | [rounding](images.md#what-is-rounding) | [rounding](images.md#what-is-rounding) |" in text
    assert "| Qwen2-VL | all | packed |  |  | 6e-8, 1e-7 |  |" in (pages / "video.md").read_text()
    assert "sft; kto: First.\n\nsft, all parts train: Second.\n\ndpo; distill: not run." in text
    assert "Wrong:\n\n- Ovis 2, sft: KeyError: 'pixel\\_values'\n- Aria, sft: loss 1e-02, gradients 3e-01" in text
    assert text.startswith("# Title\n\nBy hand.\n")
    assert text.endswith("<!-- end -->\n\nThe rest.\n")
    assert media.read() == FOUND
    media.main(["--tables"])
    assert (pages / "images.md").read_text() == text


@pytest.mark.parametrize(("answer", "status"), [(RIGHT, 0), (WRONG, 1), (FAILS, 1)])
def test_a_wrong_row_is_a_failure(answer, status, pages, monkeypatch, capsys):
    """The lane ends with 1, names the row and writes it; other checks keep their figures."""
    media.write(FOUND)
    asked = []

    def one(name, kind, check):
        asked.append((name, kind, check))
        return {"says": answer["says"], "answer": answer if name == "Aria" else RIGHT}

    monkeypatch.setattr(media, "one", one)
    assert media.main(["--check", "sft", "--kind", "image"]) == status
    # Several threads ask.
    assert sorted(asked) == sorted((name, "image", "sft") for name in media_configs.families("image"))
    assert (f"\nimage, sft, Aria: {answer['says']}" in capsys.readouterr().out) == bool(status)
    found = media.read()
    assert found["image"]["sft"]["families"]["Aria"] == answer
    assert "`hatch run media --check sft --kind image`" in found["image"]["sft"]["origin"]
    assert found["image"]["all_parts"] == FOUND["image"]["all_parts"]


def test_some_families_again(pages, monkeypatch):
    """Their answers take the place of older ones; the others and where they come from stay."""
    media.write(FOUND)
    monkeypatch.setattr(media, "one", lambda *_: {"says": "", "answer": RIGHT})
    assert media.main(["--update", "Aria", "--check", "sft"]) == 0
    found = media.read()["image"]["sft"]
    assert found["families"] == FOUND["image"]["sft"]["families"] | {"Aria": RIGHT}
    assert found["origin"].startswith("First. Again: Aria. Written by `hatch run media --update Aria --check sft` on")


def test_some_families_alone(pages, monkeypatch):
    """Nothing is written."""
    monkeypatch.setattr(media, "one", lambda *_: {"says": "", "answer": RIGHT})
    assert media.main(["--only", "Aria"]) == 0
    assert not (pages / "media.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "Lava"], "there is no family 'Lava': Qwen3-VL, "),
        (["--check", "sft,ppo"], "there is no check 'ppo': sft, all_parts, "),
        (["--only", "Qwen2-Audio", "--kind", "image"], "nothing is left to be checked"),
    ],
)
def test_what_is_not_there(arguments, said, pages, capsys):
    """Unknown families and checks are refused."""
    with pytest.raises(SystemExit):
        media.main(arguments)
    assert said in capsys.readouterr().err


def test_a_page_without_a_place_for_a_table(pages):
    """It is said which marks are missing."""
    (pages / "audio.md").write_text("# Title\n")
    with pytest.raises(SystemExit, match="no place for the table 'audio': put <!-- hatch run media: audio --> and"):
        media.write({"audio": {}})


def test_the_pages_have_every_family():
    """The tables of docs/lanes are those of media.json, which has every family that is to be checked, and no other."""
    found = media.read()
    for name, (page, kind, checks) in media.BLOCKS.items():
        text = (RESULTS / f"{page}.md").read_text()
        table = text.partition(f"<!-- hatch run media: {name} -->\n\n")[2].partition("\n\n<!-- end -->")[0]
        assert table == media.block(found, name), f"{name}: hatch run media --tables"
        rows = [line.split(" | ")[0][2:] for line in table.splitlines() if line.startswith("| ")][2:]
        assert rows == list(media_configs.families(kind)), name
        for check in set(checks) & set(found[kind]):
            asked = {each.name for each in media_configs.families(kind).values() if check not in each.skipped}
            assert set(found[kind][check]["families"]) == asked, f"{kind}, {check}: hatch run media --check {check}"


def test_every_check_is_asked_of_what_it_is_of():
    """Checks that media_check.py has, and those that the lane knows, are the same; so are those that a family names."""
    assert list(media_check.CHECKS) == list(media.TITLES)
    named = {check for each in media_configs.FAMILIES for check in [*each.refused, *each.skipped, *each.drifts]}
    assert named <= set(media.TITLES)


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_family_is_checked(spoiled, tmp_path, monkeypatch):
    """LLaVA, whose processor needs no torchvision: figures of a run, which are not those of another learning rate."""
    family = media_configs.families("image")["LLaVA"]
    if spoiled:
        monkeypatch.setitem(media_check.SETTINGS, "learning_rate", 2e-3)
    (tmp_path / "rows").mkdir()
    found = media_check.sft(family, media_check.Rows(family, "image", tmp_path / "rows"), tmp_path)
    assert found["ok"] is not spoiled, found
    assert found["rows"] == "packed"


def test_rows_with_videos(tmp_path, monkeypatch):
    """Files and lists, one or two a row, beside images too; a run on them is that of plain transformers.

    The model's video processor needs no torchvision.
    """
    pytest.importorskip("av", reason="PyAV is not installed here: forge-data[video]")
    monkeypatch.setattr(media_rows.pictures, "_processor", media_rows.pictures._processor)
    monkeypatch.setattr(media_rows.VideoProcessorMixin, "fetch_videos", media_rows.VideoProcessorMixin.fetch_videos)
    media_rows.ask_for_videos.__wrapped__()
    family = media_configs.Family("x", media_rows.pictures.FAMILIES["qwen3-vl"], ("video",), tokens=1200)
    (tmp_path / "rows").mkdir()
    rows = media_check.Rows(family, "video", tmp_path / "rows")
    found = media_check.sft(family, rows, tmp_path)
    assert found["ok"], found
    assert found["rows"] == "packed"
    messages = [json.loads(line)["messages"] for line in rows.conversations().read_text().splitlines()]
    parts = [[part for each in row if isinstance(each["content"], list) for part in each["content"]] for row in messages]
    given = [[part["video"] for part in row if part["type"] == "video"] for row in parts]
    assert {(len(row), all(isinstance(each, list) for each in row)) for row in given if row} == {
        (1, True),
        (1, False),
        (2, True),
        (2, False),
    }
    assert {len(row) for row, each in zip(given, parts, strict=True) if any(p["type"] == "image" for p in each)} == {0, 1, 2}


@pytest.mark.parametrize(("number", "same"), [(1.0, True), (1.0 + 1e-6, False)])
def test_arrays_are_compared_bit_by_bit(number, same, monkeypatch):
    """Those of every row with media; the row and the array are named."""
    monkeypatch.setattr(media_rows.forge_data, "MediaInputs", lambda _: lambda _: {"pixels": np.ones(2, np.float32)})

    class Store(list):
        source = "rows.jsonl:{}".format

    store = Store([SimpleNamespace(media=()), SimpleNamespace(media=("a video",))])
    made = {"pixels": torch.tensor([1.0, number]), "attention_mask": torch.ones(1)}
    with nullcontext() if same else pytest.raises(AssertionError, match="rows.jsonl:1: pixels is not the processor's"):
        media_rows.same_arrays(store, None, lambda *_: made)


def test_marks_that_are_drawn_are_text():
    """Qwen-Omni's positions are counted without marks of media behind which none stands, as its own fail on them."""
    seen = []
    model = SimpleNamespace(
        config=SimpleNamespace(
            vision_start_token_id=5, audio_start_token_id=6, image_token_id=7, video_token_id=8, audio_token_id=9
        ),
        model=SimpleNamespace(get_rope_index=lambda input_ids, **_: seen.append(input_ids.tolist())),
    )
    media_check._counting_media(model).model.get_rope_index(torch.tensor([[5, 7, 1, 6, 9, 6, 2, 5]]), attention_mask=None)
    assert seen == [[[5, 7, 1, 6, 9, 0, 2, 0]]]


def test_what_is_to_be_refused(monkeypatch):
    """A refusal is right where the family names it, and wrong where it names none or another."""

    class RefusedError(Exception):
        exit_status = 2

    def refuse(*_):
        raise RefusedError("it names no vision tower")

    monkeypatch.setitem(media_check.CHECKS, "all_parts", refuse)
    monkeypatch.setitem(media_check.CHECKS, "sft", lambda *_: dict(RIGHT))
    answers = media_check.answers("Gemma 4 Unified", "image", "all_parts")
    assert answers == {"ok": True, "says": "RefusedError: it names no vision tower", "refused": True}
    assert not media_check.answers("LLaVA", "image", "all_parts")["ok"]
    monkeypatch.setattr(media_check, "families", lambda _: {"x": media_configs.Family("x", None, refused={"sft": "no"})})
    assert media_check.answers("x", "image", "sft")["says"] == "not refused, and 'no' was to be said"


@pytest.mark.parametrize(("first", "ok"), [((1e-7, 1e-7), True), ((1e-3, 1e-7), False)])
def test_what_drifts_is_close_in_its_first_step(first, ok, monkeypatch):
    """Behind it a step of AdamW may be as good as drawn."""
    monkeypatch.setitem(media_check.CHECKS, "kto", lambda *_: WRONG | {"first": first})
    assert media_check.answers("Gemma 4 Unified", "image", "kto")["ok"] is ok
    assert not media_check.answers("LLaVA", "image", "kto")["ok"]
