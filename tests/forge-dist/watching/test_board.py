"""A rank's beats as another process reads them."""

import threading

import pytest

from forge_dist.watching._board import Beat, Board


def test_what_is_written_is_read(tmp_path):
    """Each record is read as it was written, its text cut at the room that there is."""
    written, read = Board(tmp_path / "beats", make=True), Board(tmp_path / "beats", make=False)
    assert read.read() is None
    for count in range(1, 4):
        beat = Beat(count, count - 2, 600.0, 20.0, f"exporting ż {count}")
        written.write(beat)
        assert read.read() == beat
    written.write_elsewhere(7)
    assert read.read() == Beat(3, 1, 600.0, 20.0, "exporting ż 3", 7)
    written.write(Beat(4, 1, 1.0, 1.0, "ż" * 100))
    assert read.read().doing == "ż" * 80


def test_a_file_that_is_not_there_yet(tmp_path):
    """A reader is told by OSError, also where the file is still empty."""
    with pytest.raises(OSError, match="beats"):
        Board(tmp_path / "beats", make=False)
    (tmp_path / "beats").touch()
    with pytest.raises(OSError, match="not written yet"):
        Board(tmp_path / "beats", make=False)


def test_a_record_is_read_whole_while_others_are_written(tmp_path):
    """A reader beside a writer never sees parts of two records."""
    written, read = Board(tmp_path / "beats", make=True), Board(tmp_path / "beats", make=False)
    over = threading.Event()

    def write():
        for count in range(1, 20_000):
            written.write(Beat(count, count, float(count), float(count), str(count)))
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    last = 0
    while not over.is_set():
        found = read.read()
        if found is not None:
            assert found == Beat(found.count, found.count, float(found.count), float(found.count), str(found.count))
            assert found.count >= last
            last = found.count
    writer.join()
    assert read.read().count == 19_999
