"""Who writes which file of an export."""

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from forge_dist.exporting import _safetensors_writer
from forge_dist.exporting._layout import Layout, first_names, in_file_layout, layout_of
from forge_dist.exporting._safetensors_writer import split_into_files
from forge_dist.exporting._shares import Beside, by_tensor, destinations, files_of, next_rank, rank_of_files

from .test_layout import mixture


def layout_with(blocks, made):
    """A layout of which only the blocks matter."""
    return Layout(files={}, sources={}, aliases={}, blocks=blocks, made=made)


def apart(count):
    """A layout in which every one of some tensors is a block of its own."""
    each = {str(index): (str(index),) for index in range(count)}
    return layout_with(each, each)


@given(st.integers(1, 40), st.integers(1, 40))
def test_files_are_spread_over_ranks(count, world_size):
    """Each file has one writer; no rank has two more than another; with more ranks than files they lie far apart."""
    files = [f"{index}" for index in range(count)]
    ranks = rank_of_files(files, apart(2), world_size)
    shares = [len(files_of(ranks, rank)) for rank in range(world_size)]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1
    assert ranks["0"] == 0
    if count <= world_size:
        writers = sorted(ranks.values())
        assert min([b - a for a, b in pairwise(writers)], default=world_size) >= world_size // count
    assert world_size == 1 or all(next_rank(ranks, world_size)[file] != rank for file, rank in ranks.items())


def test_a_layout_in_one_block_has_one_writer():
    """Where all tensors are needed at once, one rank holds them all: no second one does as well."""
    whole = layout_with(dict.fromkeys("abc", tuple("abc")), dict.fromkeys("abc", ("a", "b")))
    assert rank_of_files(["1", "2"], whole, 8) == {"1": 0, "2": 0}


@pytest.mark.parametrize("architecture", ["qwen3", "mixtral"])
def test_every_writer_gets_what_its_files_are_made_of(architecture, make_model, monkeypatch):
    """Each rank can convert and write its own files from what comes to it, each tensor once, and ranks take turns."""
    monkeypatch.setattr(_safetensors_writer, "FILE_SIZE", 8000)
    model = mixture() if architecture == "mixtral" else make_model(architecture)
    layout, state = layout_of(model, None), model.state_dict()
    places = split_into_files(layout.files).tensor_to_filename
    owners = rank_of_files(list(dict.fromkeys(places.values())), layout, 3)
    wanted = destinations(layout, first_names(model), by_tensor(owners, places))
    written = []
    for rank in range(3):
        coming = [(name, state[name] if rank in ranks else None) for name, ranks in wanted.items()]
        written += [name for name, _ in in_file_layout(model, layout, iter(coming)) if owners[places[name]] == rank]
    assert sorted(written) == sorted(layout.files)
    first = [min(ranks) for ranks in wanted.values()]
    assert set(first[: 2 * 3 + 4]) == {0, 1, 2}


def test_a_call_beside_is_one_at_a_time():
    """The next call waits for the one before; what a call raised comes at the next or at the end; nothing is kept."""
    seen, gate = [], threading.Event()

    def slow(name, tensor):
        assert gate.wait(30)
        seen.append(name)
        if name == "bad":
            raise OSError("no room")

    with Beside(slow) as beside:
        beside.call("a", torch.zeros(1))
        assert seen == []
        gate.set()
        beside.call("b", torch.zeros(1))
    assert seen == ["a", "b"]
    with pytest.raises(OSError, match="no room"), Beside(slow) as beside:
        beside.call("bad", torch.zeros(1))
        beside.call("never", torch.zeros(1))
    with pytest.raises(OSError, match="no room"), Beside(slow) as beside:
        beside.call("bad", torch.zeros(1))
    assert seen == ["a", "b", "bad", "bad"]
