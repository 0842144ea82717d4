"""Rollout files: read back to the bit, and refused where they are not whole."""

import json
import math
import re

import attrs
import numpy as np
import pytest

from forge_algos import RolloutError
from forge_algos.online import Rollout


def made_up_rollout(tokens=(2, 3, 1), values=True):
    """Return two prompts with three completions and floats of every kind."""
    total = sum(tokens)
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, total * 6, dtype=np.uint32).view(np.float32)
    bits = np.where(np.isfinite(bits), bits, np.float32(-0.0)).astype(np.float32)
    parts = np.split(bits, 6)
    parts[0][:3] = [np.nan, 1e-45, -0.0]
    return Rollout(
        seed=7,
        prompt_rows=np.array([40, 41]),
        prompt_ids=(np.array([1, 2], np.int32), np.array([3], np.int32)),
        prompt_texts=("a\u2028line", "é"),
        groups=np.array([0, 0, 1]),
        completion_ids=tuple(np.arange(n, dtype=np.int32) for n in tokens),
        completion_texts=('"quoted"\n', "\udc80 lone", ""),
        finished=np.array([True, False, True]),
        scores={"m:f": np.array([0.1, np.nan, 3], np.float32)},
        rewards=np.array([0.1, np.nan, 3], np.float32),
        trained=np.array([True, False, True]),
        masked=np.array([False, True, False]),
        resampled=5,
        equal_rewards=None if values else 1,
        old_logps=parts[0],
        ref_logps=parts[1],
        values=parts[2] if values else None,
        advantages=parts[3],
        returns=parts[4] if values else None,
        entropy=None if values else parts[5],
        least_entropy=0.0 if values else 0.1234567890123456,
    )


def same(ours, theirs):
    for field in attrs.fields(Rollout):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        a, b = (list(x.items()) if isinstance(x, dict) else x for x in (a, b))
        if isinstance(a, np.ndarray):
            a, b = [a], [b]
        if isinstance(a, tuple | list) and a and isinstance(a[0], tuple):
            assert [k for k, _ in a] == [k for k, _ in b]
            a, b = [v for _, v in a], [v for _, v in b]
        if isinstance(a, tuple | list) and a and isinstance(a[0], np.ndarray):
            for x, y in zip(a, b, strict=True):
                assert x.dtype == y.dtype
                # As bytes: a NaN is a NaN, and -0.0 is not 0.0.
                assert x.tobytes() == y.tobytes(), field.name
        else:
            assert a == b, field.name


@pytest.mark.parametrize("values", [True, False])
def test_read_back_to_the_bit(tmp_path, values):
    """Floats of all sizes, NaN, -0.0, odd texts and missing arrays are read back as written."""
    rollout = made_up_rollout(values=values)
    rollout.write(tmp_path / "new" / "r.jsonl")
    same(Rollout.read(tmp_path / "new" / "r.jsonl"), rollout)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["r.jsonl"]


def test_a_person_can_read_it(tmp_path):
    """The file has a line about the whole and a line for each completion.
    With texts, rewards, and the prompt where its group begins.
    """
    made_up_rollout().write(tmp_path / "r.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().split("\n")[:-1]]
    assert len(lines[0].pop("sha256")) == 64
    assert lines[0] == {
        "rollout": 1, "seed": 7, "resampled": 5, "prompts": 2, "completions": 3, "functions": ["m:f"],
        "arrays": ["old_logps", "ref_logps", "values", "advantages", "returns"],
    }  # fmt: skip
    assert [line["completion"] for line in lines[1:]] == ['"quoted"\n', "\udc80 lone", ""]
    assert [line.get("prompt") for line in lines[1:]] == ["a\u2028line", None, "é"]
    assert [line["reward"] for line in lines[1:]] == [0.100000001, None, 3.0]
    assert lines[2]["finished"] is False
    assert [line["masked"] for line in lines[1:]] == [False, True, False]


def of_an_earlier_version(text):
    return re.sub(r', "sha256": "[0-9a-f]{64}"', "", text)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda text: text.replace('"reward": 3.0', '"reward": 2.0'), "does not have the SHA-256 that it says it has"),
        (lambda text: text.replace('"seed": 7', '"seed": 8'), "does not have the SHA-256 that it says it has"),
        (lambda text: text.replace('"quoted', '"quotes'), "does not have the SHA-256 that it says it has"),
        (lambda text: text[: text.rindex('{"group"')], "is not whole: it has 2 of 3 completions"),
        (lambda text: text[:-20], "does not have the SHA-256"),
        (lambda text: of_an_earlier_version(text)[:-20], "damaged"),
        (lambda text: text.replace('"rollout": 1', '"rollout": 9'), "no rollout of version 1"),
        (lambda text: of_an_earlier_version(text).replace('"prompt_ids": [3]', '"other": [3]'), "1 of 2 prompts"),
        (
            lambda text: of_an_earlier_version(text).replace('"completion_ids": [0, 1]', '"completion_ids": [0]'),
            "6 old_logps for 5 tokens",
        ),
        (lambda text: "", "damaged"),
    ],
)
def test_damaged_files_are_refused(tmp_path, harm, message):
    """A damaged file is an error, also where what it says could be trained on."""
    file = tmp_path / "r.jsonl"
    made_up_rollout().write(file)
    file.write_text(harm(file.read_text()))
    with pytest.raises(RolloutError, match=message):
        Rollout.read(file)


def test_a_file_of_an_earlier_version(tmp_path):
    """A file without a SHA-256 is read as it is."""
    file = tmp_path / "r.jsonl"
    made_up_rollout().write(file)
    file.write_text(of_an_earlier_version(file.read_text()))
    same(Rollout.read(file), made_up_rollout())


def test_a_missing_file(tmp_path):
    """A missing file is an error of forge_algos, with the path."""
    with pytest.raises(RolloutError, match="cannot be read"):
        Rollout.read(tmp_path / "none.jsonl")


def test_a_write_that_fails_leaves_nothing(tmp_path):
    """A failing write leaves neither a partial file nor a temporary one."""
    file = tmp_path / "r.jsonl"
    made_up_rollout().write(file)
    before = file.read_bytes()
    with pytest.raises(TypeError):
        attrs.evolve(made_up_rollout(), prompt_texts=("a", object())).write(file)
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def test_figures():
    """Figures are means over what could be scored, and counts of the rest."""
    found = made_up_rollout().figures()
    assert found["reward"] == pytest.approx(1.55)
    assert (found["completions"], found["tokens"], found["cut_off"], found["unscored"], found["trained"]) == (3, 6, 1, 1, 2)
    assert found["reward/m:f"] == pytest.approx(1.55)


def test_a_mean_of_nothing_is_no_number():
    """Where nothing could be scored there is no mean reward: 0 would be better than every negative one."""
    rollout = made_up_rollout()
    nothing = np.full(3, np.nan, np.float32)
    found = attrs.evolve(rollout, rewards=nothing, scores={"m:f": nothing}).figures()
    assert math.isnan(found["reward"])
    assert math.isnan(found["reward/m:f"])
    assert found["unscored"] == 3


def test_spread_is_that_of_one_prompts_completions():
    """Differences between prompts do not count, nor do completions without a reward, nor prompts all of whose are alike."""
    made = attrs.evolve(made_up_rollout(), rewards=np.array([0.5, np.nan, 3], np.float32))
    assert made.spread == 0
    assert attrs.evolve(made, rewards=np.array([0.5, 0.75, 3], np.float32)).spread == 0.25
    assert attrs.evolve(made, rewards=np.array([np.nan, np.nan, 3], np.float32)).spread == 0
