"""The file of rows that is written while preparing: nothing of it is mapped into memory."""

from __future__ import annotations

import datasets
import numpy as np
import pyarrow as pa
import pytest

from mtp.data.store import RowWriter, load_prepared, write_manifest

NUM_ROWS, NUM_TOKENS = 600, 30


@pytest.fixture
def opened(monkeypatch):
    """Rows of every file that `datasets` opens; opening one maps its batches."""
    found: list[int] = []
    from_file = datasets.Dataset.from_file

    def noted(file: str) -> datasets.Dataset:
        with pa.OSFile(file) as stream:
            found.append(pa.ipc.open_stream(stream).read_all().num_rows)
        return from_file(file)

    monkeypatch.setattr(datasets.Dataset, "from_file", noted)
    return found


@pytest.mark.parametrize("held_out", [0, 50])
def test_saving_opens_no_more_than_a_row(tmp_path, opened, held_out):
    writer = RowWriter(tmp_path / ".rows")
    ids = np.arange(NUM_ROWS * NUM_TOKENS, dtype=np.int32).reshape(NUM_ROWS, NUM_TOKENS)
    for number, row in enumerate(ids):
        writer.add(
            input_ids=row,
            loss_mask=row % 3 == 0,
            category="chat",
            conversation_id=f"row-{number}",
            source="rows",
            num_replies=1,
            num_replies_with_calls=0,
        )
    is_held_out = np.arange(NUM_ROWS) >= NUM_ROWS - held_out
    copies = {"train": 1 - is_held_out, "held_out": is_held_out.astype(int)}
    writer.save(tmp_path / "out", copies)
    assert sorted(opened) == [min(1, held_out), 1]
    write_manifest(tmp_path / "out", {})
    data = load_prepared(tmp_path / "out")
    for split, rows in (("train", ids[~is_held_out]), ("held_out", ids[is_held_out])):
        assert data[split]["input_ids"][:] == rows.tolist()
        assert data[split]["loss_mask"][:] == (rows % 3 == 0).tolist()
    assert not (tmp_path / ".rows").exists()
    # Control: the check sees the rows of a file that is opened whole.
    datasets.Dataset.from_file(str(next((tmp_path / "out/train").glob("*.arrow"))))
    assert opened[-1] == NUM_ROWS - held_out
