"""Safetensors files written tensor by tensor are those of safetensors' own writer."""

import resource

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from forge_dist.exporting import _safetensors_writer as _stream
from forge_dist.exporting._safetensors_writer import SafetensorsWriter

TYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.float64,
    torch.int64,
]


def written(folder, tensors, order=None):
    """Write `tensors` in some order; returns the one file."""
    folder.mkdir(exist_ok=True)
    with SafetensorsWriter(folder, {n: t.to("meta") for n, t in tensors.items()}, parameters=7) as stream:
        for name in order or tensors:
            stream.write(name, tensors[name])
    return folder / "model.safetensors"


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=5),
        st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 4), max_size=3)),
        min_size=1,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_bytes_are_those_of_the_library(tmp_path_factory, described, random):
    """Whatever names, types and shapes (no elements and no dimensions included), in whatever order they come."""
    folder = tmp_path_factory.mktemp("stream")
    tensors = {
        name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in described.items() if name != "__metadata__"
    }
    if not tensors:
        return
    names = list(tensors)
    random.shuffle(names)
    file = written(folder / "ours", tensors, names)
    save_file(tensors, folder / "theirs.safetensors", metadata={"format": "pt"})
    assert file.read_bytes() == (folder / "theirs.safetensors").read_bytes()


def test_all_types_lie_in_the_library_s_order(tmp_path):
    """A file with every type there is: the same bytes, and it loads."""
    tensors = {str(dtype): torch.tensor([1, 0, 1]).to(dtype) for dtype in TYPES}
    file = written(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert file.read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert all(torch.equal(load_file(file)[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_is_cast_and_made_contiguous(tmp_path):
    """What comes in another type or with strides is written as announced."""
    tensor = torch.randn(3, 5)
    with SafetensorsWriter(tmp_path, {"a": torch.empty(5, 3, dtype=torch.bfloat16, device="meta")}, parameters=15) as stream:
        stream.write("a", tensor.t())
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], tensor.t().bfloat16())


def test_several_files_are_those_of_transformers(make_model, tmp_path, monkeypatch):
    """Above the size of a file the division, the index and every byte are what save_pretrained makes, with a tensor that is
    larger than one.
    """
    monkeypatch.setattr(_stream, "FILE_SIZE", 2500)
    model = make_model("qwen3")
    model.save_pretrained(tmp_path / "theirs", max_shard_size=2500)
    written(tmp_path / "ours", model.state_dict(), sorted(model.state_dict(), reverse=True))
    index = tmp_path / "ours" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(": 7,", f": {model.num_parameters()},"))
    names = sorted(file.name for file in (tmp_path / "ours").iterdir())
    assert len(names) > 4
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


def test_what_was_not_announced_is_refused(tmp_path):
    """Another shape, an unknown name, a tensor twice, one that never comes, a type that models do not have."""
    announced = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(ValueError, match="tensor b never came"):
        written(tmp_path / "1", announced, ["a"])
    with pytest.raises(ValueError, match="tensor a came twice"):
        written(tmp_path / "2", announced, ["a", "a"])
    (tmp_path / "3").mkdir()
    with SafetensorsWriter(tmp_path / "3", announced, parameters=1) as stream:
        with pytest.raises(ValueError, match=r"came with shape \[3\] instead of \[2\]"):
            stream.write("a", torch.zeros(3))
        with pytest.raises(KeyError):
            stream.write("c", torch.zeros(3))
        stream.write("a", torch.zeros(2))
        stream.write("b", torch.zeros(3))
    with pytest.raises(ValueError, match="complex64, which is not written"):
        SafetensorsWriter(tmp_path, {"z": torch.zeros(1, dtype=torch.complex64)}, parameters=1)


def test_a_full_disk_is_an_error(tmp_path):
    """A file that cannot become as long as it must be is an OSError, not a shorter file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            written(tmp_path / "full", {"a": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
