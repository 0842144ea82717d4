"""save and load: whole or not at all, verified, no pickle."""

import json
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import BatchPlan, Cost, PackingError, plan
from forge_packing.planning import _steps
from forge_packing.planning._file import ALGORITHM


@pytest.fixture
def made():
    return plan([3, 5, 2, 7, 4], batch_size=2, max_tokens=8, world_size=2, seed=3, epochs=2, loss_counts=[1, 2, 0, 4, 3])


@settings(deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    batch_size=st.integers(1, 8),
    max_steps=st.none() | st.integers(1, 9),
    counted=st.booleans(),
)
def test_round_trip(tmp_path_factory, lengths, batch_size, max_steps, counted):
    """What is loaded answers as what was saved did."""
    file = tmp_path_factory.mktemp("plan") / "plan.npz"
    counts = [length - 1 for length in lengths] if counted else None
    made = plan(lengths, batch_size=batch_size, max_tokens=30, max_steps=max_steps, loss_counts=counts)
    made.save(file)
    loaded = BatchPlan.load(file)
    assert loaded.fingerprint == made.fingerprint
    assert loaded.summary() == made.summary()
    for step in range(made.num_steps):
        assert loaded.samples(step).tolist() == made.samples(step).tolist()
        assert [m.tolist() for m in loaded.micro_batches(step)] == [m.tolist() for m in made.micro_batches(step)]
    assert (loaded.loss_counts is None) == (not counted)


def test_every_part_comes_back(tmp_path):
    """Sources, weights and cost are saved too; an endless plan is, as it is."""
    given = {"lengths": [3, 5, 2, 7, 4], "batch_size": 2, "max_tokens": 9, "epochs": None}
    made = plan(**given, sources=[0, 1, 0, 1, 1], weights=[0.3, 0.7], cost=Cost(0.1, 1 / 3, 7.0), drop_last=True)
    made.save(tmp_path / "plan.npz")
    loaded = BatchPlan.load(tmp_path / "plan.npz")
    assert loaded.endless
    assert loaded.cost == made.cost
    assert loaded.weights.tolist() == [3, 7]
    assert loaded.fingerprint == made.fingerprint
    assert loaded.samples(10**9).tolist() == made.samples(10**9).tolist()


def test_a_long_plan_is_a_small_file(tmp_path):
    """A million steps take the space of the lengths alone."""
    plan([3, 5, 2], batch_size=2, max_tokens=9, epochs=None, max_steps=10**6).save(tmp_path / "plan.npz")
    assert (tmp_path / "plan.npz").stat().st_size < 3_000


def test_another_division_is_noticed(made, tmp_path, monkeypatch):
    """Where the steps come out otherwise than where the plan was saved, it is not loaded."""
    made.save(tmp_path / "plan.npz")
    divide_steps = _steps.divide_steps

    def otherwise(*given, **named):
        order, starts, passes = divide_steps(*given, **named)
        return order[::-1].copy(), starts, passes

    monkeypatch.setattr(_steps, "divide_steps", otherwise)
    with pytest.raises(PackingError, match=r"worked out otherwise than here.*Install the versions"):
        BatchPlan.load(tmp_path / "plan.npz")


def test_the_name_is_the_given_one(made, tmp_path):
    """No ending is added, nothing else is left behind, and an older plan of that name is replaced."""
    file = tmp_path / "the plan"
    file.write_text("older")
    made.save(str(file))
    assert [path.name for path in tmp_path.iterdir()] == ["the plan"]
    assert BatchPlan.load(file).fingerprint == made.fingerprint


def test_a_failed_save_leaves_the_old_plan(made, tmp_path, monkeypatch):
    """A disk that is full in the middle leaves the old file, whole, and no temporary one."""
    file = tmp_path / "plan.npz"
    made.save(file)
    before = file.read_bytes()

    def full(stream, **_arrays):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(PackingError, match=r"cannot be written to .*No space left"):
        made.save(file)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.npz"]
    assert file.read_bytes() == before


def test_missing_directory(made, tmp_path):
    """A directory that is not there is named."""
    with pytest.raises(PackingError, match=r"cannot be written to .*nowhere.*The directory must exist"):
        made.save(tmp_path / "nowhere" / "plan.npz")


def test_a_file_where_a_directory_should_be(made, tmp_path):
    """So is one that is a file."""
    (tmp_path / "file").write_text("")
    with pytest.raises(PackingError, match="cannot be written to"):
        made.save(tmp_path / "file" / "plan.npz")


def test_missing_file(tmp_path):
    """A file that is not there is named."""
    with pytest.raises(PackingError, match=r"plan\.npz cannot be read"):
        BatchPlan.load(tmp_path / "plan.npz")


def test_same_plan_same_bytes(made, tmp_path):
    """Two saves of a plan are the same file."""
    made.save(tmp_path / "a")
    made.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_torn_anywhere(made, tmp_path):
    """A file that ends early is refused, wherever it ends."""
    file = tmp_path / "plan.npz"
    made.save(file)
    whole = file.read_bytes()
    for size in range(0, len(whole), 37):
        file.write_bytes(whole[:size])
        with pytest.raises(PackingError):
            BatchPlan.load(file)


def test_no_flipped_byte_changes_the_plan(made, tmp_path):
    """With any one byte flipped the file is refused, or (in a zip field that is never read) loads as the same plan."""
    file = tmp_path / "plan.npz"
    made.save(file)
    whole = file.read_bytes()
    refused = 0
    for at in range(0, len(whole), 11):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            loaded = BatchPlan.load(file)
        except PackingError:
            refused += 1
        else:
            assert loaded.fingerprint == made.fingerprint
    assert refused > len(whole) // 11 * 0.7


def rewritten(file, **changes):
    """Rewrite some arrays of an archive, checksums and all, as an editor of plans would."""
    with np.load(file) as loaded:
        arrays = {name: loaded[name] for name in loaded.files}
    arrays.update(changes)
    with file.open("wb") as stream:
        np.savez(stream, **{name: array for name, array in arrays.items() if array is not None})


def header(file, **changes):
    """The header of a saved plan with some of its entries changed."""
    with np.load(file) as loaded:
        content = json.loads(loaded["header"].tobytes())
    return np.frombuffer(json.dumps({**content, **changes}).encode(), dtype=np.uint8)


def parameters(file, **changes):
    """The header of a saved plan with some of its parameters changed."""
    with np.load(file) as loaded:
        content = json.loads(loaded["header"].tobytes())
    return header(file, parameters={**content["parameters"], **changes})


def test_an_edited_plan(made, tmp_path):
    """A plan edited after it was saved does not match its fingerprint."""
    file = tmp_path / "plan.npz"
    made.save(file)
    rewritten(file, lengths=made.lengths + 1)
    with pytest.raises(PackingError, match="was changed after it was saved"):
        BatchPlan.load(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: {"lengths": np.zeros(0, dtype=np.int64)}, "is not a plan: lengths is empty"),
        (lambda file: {"surprise": np.zeros(1, dtype=np.int64)}, r"it differs in \['surprise'\]"),
        (lambda file: {"lengths": np.zeros(3)}, r"'lengths' is float64\[3\], not int64\[n\]"),
        (lambda file: {"header": None}, "it has no header"),
        (lambda file: {"header": np.frombuffer(b"{", dtype=np.uint8)}, "its header is not JSON"),
        (lambda file: {"header": np.frombuffer(b"\xff\xfe\x00", dtype=np.uint8)}, "its header is not JSON"),
        (lambda file: {"header": np.frombuffer(b"[]", dtype=np.uint8)}, "is not a plan"),
        (lambda file: {"header": np.frombuffer(b"[" * 10**5, dtype=np.uint8)}, "its header is not JSON"),
        (lambda file: {"header": header(file, format="another's")}, "is not a plan"),
        (lambda file: {"header": header(file, version=99)}, "a plan of format 99; this version reads 2"),
        (lambda file: {"header": header(file, parameters={"algorithm": ALGORITHM})}, "it differs in"),
        (lambda file: {"header": header(file, parameters={})}, "was made by version None of the planning"),
        (lambda file: {"header": parameters(file, world_size="many")}, "is not a plan: world_size must be an integer"),
        (lambda file: {"header": parameters(file, cost=None)}, "is not a plan"),
        (lambda file: {"header": parameters(file, cost={"per_smile": 1})}, "is not a plan"),
        (lambda file: {"header": parameters(file, seed=4)}, "was changed after it was saved"),
        (lambda file: {"header": parameters(file, steps="0" * 64)}, "its steps were worked out otherwise than here"),
    ],
)
def test_foreign_archives(made, tmp_path, change, message):
    """An .npz that is no plan, or another version's, is refused by name."""
    file = tmp_path / "plan.npz"
    made.save(file)
    rewritten(file, **change(file))
    with pytest.raises(PackingError, match=message):
        BatchPlan.load(file)


SHAPED = "{{'descr': '<i8', 'fortran_order': False, 'shape': ({},), }}"


@pytest.mark.parametrize("text", ["(((((", "{'descr':", "\n  x\n y", *(SHAPED.format(10**power) for power in (15, 18, 30))])
def test_members_that_numpy_chokes_on(made, tmp_path, text):
    """A member whose header is no literal, or claims more than memory holds, is refused like any damage."""
    file = tmp_path / "plan.npz"
    made.save(file)
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["lengths.npy"] = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(PackingError, match="is not a plan, or only a part of one"):
        BatchPlan.load(file)


def test_a_name_that_no_system_takes(made):
    """A null in a name is bad input too."""
    with pytest.raises(PackingError, match="cannot be written to"):
        made.save("plan\0.npz")


class Bomb:
    """Unpickling it is noticed."""

    def __reduce__(self):
        return (pytest.fail, ("a plan's file was unpickled",))


def test_no_pickle(tmp_path):
    """An archive with a pickled object in it is refused, and nothing of it is run."""
    file = tmp_path / "plan.npz"
    np.savez(file, header=np.array([Bomb()], dtype=object))
    with pytest.raises(PackingError, match="is not a plan"):
        BatchPlan.load(file)


def test_no_advice_to_load_unsafely(tmp_path):
    """A file of text is no plan; that numpy would unpickle it if it were asked to is not said."""
    (tmp_path / "plan.json").write_text('{"lengths": [1, 2]}')
    with pytest.raises(PackingError, match="is not a plan. Give a file that BatchPlan.save wrote") as caught:
        BatchPlan.load(tmp_path / "plan.json")
    assert "pickle" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x93NUMPY", b"PK\x03\x04"])
def test_other_files(tmp_path, content):
    """Text, an empty file, an .npy, the beginning of a zip."""
    file = tmp_path / "plan.npz"
    file.write_bytes(content)
    with pytest.raises(PackingError, match="is not a plan"):
        BatchPlan.load(file)


def test_a_single_array(tmp_path):
    """An .npy file is read by the same numpy function, and is no plan."""
    np.save(tmp_path / "plan.npy", np.arange(3))
    with pytest.raises(PackingError, match=r"is not a plan.*a single array, int64\[3\]"):
        BatchPlan.load(tmp_path / "plan.npy")


def test_a_zip_of_something_else(tmp_path):
    """A zip that numpy did not write, and one that has a foreign member."""
    file = tmp_path / "plan.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("header", "hello")
    with pytest.raises(PackingError, match="is not a plan: it has no header"):
        BatchPlan.load(file)
    plan([1], batch_size=1, max_tokens=1).save(file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(PackingError, match=r"'notes\.txt' is no array"):
        BatchPlan.load(file)


def test_a_directory(tmp_path):
    """A directory is no plan."""
    with pytest.raises(PackingError, match="cannot be read"):
        BatchPlan.load(tmp_path)
