"""What one rank met is raised on all."""

from contextlib import nullcontext

import pytest
import torch

from forge_dist import ExportError
from forge_dist.ranks._errors_on_all_ranks import errors_on_all_ranks, exhausted, lacks_memory

from ...ranks import run_on_ranks

RAISED = {
    "export": ExportError("out exists"),
    "known": OSError(28, "No space left on device"),
    "bug": AttributeError("no such thing"),
    "device": torch.OutOfMemoryError("Tried to allocate 2 GiB"),
    "host": MemoryError("no room for the copy"),
    "allocator": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
}


def scenarios(ranks):
    """For each error and rank that meets it: the class and message that this rank raises."""
    reported = {}
    for name, error in RAISED.items():
        for rank in range(ranks.world_size):
            try:
                with errors_on_all_ranks(ranks, (OSError, RuntimeError), "out cannot be written"):
                    if ranks.rank == rank:
                        raise error
            except Exception as caught:
                reported[name, rank] = (type(caught).__name__, str(caught))
                reported[name, rank, "memory"] = lacks_memory(caught)
    with errors_on_all_ranks(ranks, (), "nothing"):
        reported["none"] = sum(ranks.sum([1.0]))
    return reported


@pytest.fixture(scope="module")
def reported():
    return run_on_ranks(scenarios, 2)


@pytest.mark.slow
def test_an_error_keeps_its_message(reported):
    """An ExportError of rank 0 is the same everywhere; one of another rank says on the others whose it was."""
    assert reported[0]["export", 0] == reported[1]["export", 0] == ("ExportError", "out exists")
    assert reported[1]["export", 1] == ("ExportError", "out exists")
    assert reported[0]["export", 1] == ("ExportError", "out exists (rank 1)")


@pytest.mark.slow
def test_a_known_kind_becomes_an_export_error(reported):
    """A full disk says what could not be done."""
    message = "out cannot be written: [Errno 28] No space left on device"
    assert reported[0]["known", 0] == reported[1]["known", 0] == ("ExportError", message)
    assert reported[0]["known", 1] == ("ExportError", message + " (rank 1)")


@pytest.mark.slow
def test_a_mistake_stays_one(reported):
    """Any other exception passes as it is where it happened; the other ranks do not wait, and hear of it."""
    assert reported[0]["bug", 0] == ("AttributeError", "no such thing")
    assert reported[1]["bug", 0] == ("ExportError", "AttributeError: no such thing")
    assert reported[0]["bug", 1] == ("ExportError", "AttributeError: no such thing (rank 1)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("device", "OutOfMemoryError"), ("host", "MemoryError"), ("allocator", "ExportError")]
)
def test_a_rank_without_memory_is_no_fault_of_a_file(name, kind, reported):
    """Every rank can tell a lack of memory on any of them from an export that differs."""
    for rank in (0, 1):
        assert reported[rank][name, rank][0] == kind
        assert reported[1 - rank][name, rank][0] == ("ExportError" if kind == "ExportError" else "OutOfMemoryError")
        assert "(rank 1)" in reported[0][name, 1][1]
        assert all(each[name, rank, "memory"] for each in reported)
    assert not reported[0]["known", 1, "memory"]
    assert not reported[1]["export", 0, "memory"]


@pytest.mark.slow
def test_nothing_raised_is_nothing_reported(reported):
    """Without an error all go on together."""
    assert [rank["none"] for rank in reported] == [2.0, 2.0]


@pytest.mark.parametrize("stop", [None, 0, 2])
def test_gathering_goes_to_the_end(stop):
    """However far the body comes, and whether it raises, all steps are made."""
    made = []

    def steps():
        for number in range(5):
            made.append(number)
            yield number

    with nullcontext() if stop is None else pytest.raises(OSError, match="full"), exhausted(steps()) as numbers:
        for number in numbers:
            if number == stop:
                raise OSError("full")
    assert made == [0, 1, 2, 3, 4]


def test_gradients_are_on_again():
    """Two iterators that switch gradients off, each for itself, leave them on when they have run side by side."""

    def steps():
        with torch.no_grad():
            yield from range(3)

    with exhausted(zip(steps(), steps(), strict=True)) as pairs:
        assert list(pairs) == [(0, 0), (1, 1), (2, 2)]
    assert torch.is_grad_enabled()
