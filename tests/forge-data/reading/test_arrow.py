"""Arrow files, with footer and without."""

import pyarrow as pa
import pytest

from forge_data import DataError
from forge_data.reading._arrow import ArrowFile
from forge_data.reading._file import DataFile

ROWS = [{"text": f"row {i}", "id": i} for i in range(100)]


def write(path, new):
    table = pa.Table.from_pylist(ROWS)
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=30)
    return ArrowFile(path.name, DataFile(str(path)))


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_rows(tmp_path, new):
    """Rows come in order with 1-based numbers."""
    reader = write(tmp_path / "a.arrow", new)
    got = [record for chunk in reader.chunks(500) for record in chunk.records()]
    assert [(record.row, record.fields) for record in got] == list(enumerate(ROWS, start=1))
    assert got[4].place == "a.arrow:5"


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_broken(tmp_path, new):
    """A file that breaks off, or is not an Arrow file, is refused by name."""
    write(tmp_path / "a.arrow", new)
    whole = (tmp_path / "a.arrow").read_bytes()
    for data in (whole[: len(whole) * 2 // 3], b"nothing of the kind" * 9):
        (tmp_path / "a.arrow").write_bytes(data)
        with pytest.raises(DataError, match="a.arrow: unreadable after row"):
            for chunk in ArrowFile("a.arrow", DataFile(str(tmp_path / "a.arrow"))).chunks(500):
                list(chunk.records())
