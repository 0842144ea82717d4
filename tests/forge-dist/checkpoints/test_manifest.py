"""What a manifest notices."""

import json

import attrs
import pytest
from hypothesis import given, strategies as st

from forge_dist import CheckpointError
from forge_dist.checkpoints._manifest import Damaged, Manifest, _digest, jsonable, next_serial, read_manifest, refuse_foreign
from forge_dist.checkpoints._plan import Chunk, StoredTensor
from forge_dist.checkpoints._write import WrittenFile

EXAMPLE = Manifest(
    step=7,
    serial=3,
    world_size=2,
    versions={"torch": "2"},
    must_match={"seed": 1},
    about={"loss": float("inf"), "é": [1.5, None]},
    files={"rank_0.safetensors": WrittenFile(10, "ab"), "rank_1.safetensors": WrittenFile(11, "cd")},
    tensors={"w": StoredTensor("F32", [3, 2], [Chunk([0, 0], [2, 2], 0), Chunk([2, 0], [1, 2], 1)])},
)


def write(directory, text):
    (directory / "manifest.json").write_text(text, encoding="utf-8")
    return directory


def test_it_comes_back(tmp_path):
    """All values, infinities too, come back as they went."""
    assert read_manifest(write(tmp_path, EXAMPLE.to_text()), 7) == EXAMPLE
    assert Manifest.from_text(EXAMPLE.to_text()) == EXAMPLE


@given(st.data())
def test_any_other_byte_is_noticed(tmp_path_factory, data):
    """A manifest in which any one byte is another one, or that ends anywhere, is damaged; none is read as something else."""
    text = EXAMPLE.to_text().encode()
    place = data.draw(st.integers(0, len(text) - 1))
    cut = (
        text[:place]
        if data.draw(st.booleans())
        else text[:place] + bytes([text[place] ^ 1 << data.draw(st.integers(0, 7))]) + text[place + 1 :]
    )
    directory = tmp_path_factory.mktemp("m")
    (directory / "manifest.json").write_bytes(cut)
    try:
        found = read_manifest(directory, 7)
    except Damaged:
        return
    # JSON may say the same in two ways: an escaped letter in upper or lower case.
    assert found == EXAMPLE


def test_edits_and_other_steps_are_damage(tmp_path):
    """A changed value, a missing one, a manifest of another step and none at all: each is damage, and is distinguished."""
    content = json.loads(EXAMPLE.to_text())
    for change, words in [
        ({"step": 8}, "edited or damaged"),
        ({"about": {}}, "edited or damaged"),
        ({"version": 3}, "edited or damaged"),
        ({"sha256": None}, "edited or damaged"),
    ]:
        with pytest.raises(Damaged, match=words):
            read_manifest(write(tmp_path, json.dumps(content | change)), 7)
    for change, words in [
        ({"tensors": None}, "lacks"),
        ({"tensors": {"w": 1}}, "lacks"),
        ({"tensors": {"w": -1}}, "lacks"),
        ({"layouts": [{"dtype": "F32"}]}, "lacks"),
        ({"files": {}}, "cannot be followed"),
    ]:
        changed = content | change
        with pytest.raises(Damaged, match=words):
            read_manifest(write(tmp_path, json.dumps(changed | {"sha256": _digest(changed)})), 7)
    with pytest.raises(Damaged, match=r"of step 7, and the directory"):
        read_manifest(write(tmp_path, EXAMPLE.to_text()), 8)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(Damaged, match="missing"):
        read_manifest(tmp_path, 7)


@pytest.mark.parametrize("change", [{"version": 0}, {"version": 3}, {"format": "another"}])
def test_another_format_is_refused_by_name(tmp_path, change):
    """An older or a newer version, whole in itself, is no damage: which version it is and what to use are reported."""
    content = json.loads(EXAMPLE.to_text()) | change
    content["sha256"] = _digest(content)
    with pytest.raises(CheckpointError, match=r"is of format .*version .*reads .*, versions 1 and 2: use the version"):
        read_manifest(write(tmp_path, json.dumps(content)), 7)


def test_every_foreign_value_is_named(tmp_path):
    """Values that differ, that are new and that are gone are named with both sides; tuples are lists to JSON."""
    refuse_foreign(tmp_path, {"seed": 1, "betas": [0.9, 0.95]}, {"betas": (0.9, 0.95), "seed": 1})
    with pytest.raises(CheckpointError) as caught:
        refuse_foreign(
            tmp_path, {"seed": 1, "data": "a", "old": 1, "same": 0}, {"seed": 2, "data": "b", "new": None, "same": 0}
        )
    for words in (
        "belongs to another run",
        "data: 'a' was saved, 'b' is asked for",
        "seed: 1 was saved, 2 is asked for",
        "old: 1 was saved, '(not there)' is asked for",
        "new: '(not there)' was saved, None is asked for",
    ):
        assert words in str(caught.value)
    assert "same" not in str(caught.value)


def test_serials_go_on(tmp_path):
    """The next serial is above all that can be read, and 1 where there are none."""
    assert next_serial([]) == 1
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write(tmp_path / "a", EXAMPLE.to_text())
    write(tmp_path / "b", "damaged")
    assert next_serial([tmp_path / "a", tmp_path / "b", tmp_path / "nowhere"]) == 4


def test_what_is_no_json_is_named():
    """A value that JSON does not know is an error before anything is written."""
    assert json.loads(jsonable({"a": (1, 2)}, "about")) == {"a": [1, 2]}
    with pytest.raises(CheckpointError, match="about of a full state must be JSON"):
        jsonable({"a": {1, 2}}, "about")


def test_what_lies_alike_is_written_once():
    """Tensors of one layout share an entry, whether they share their chunks in memory or only have equal ones."""
    chunks = [Chunk([4 * rank, 0], [4, 8], rank) for rank in range(2)]
    tensors = {f"t{index}": StoredTensor("F32", [8, 8], chunks) for index in range(100)}
    tensors |= {"equal": StoredTensor("F32", [8, 8], list(chunks)), "half": StoredTensor("BF16", [8, 8], chunks)}
    manifest = attrs.evolve(EXAMPLE, tensors=tensors)
    assert [len(json.loads(manifest.to_text())[key]) for key in ("layouts", "tensors")] == [2, 102]
    found = Manifest.from_text(manifest.to_text())
    assert found == manifest
    assert len({id(tensor.chunks) for tensor in found.tensors.values()}) == 2
