"""Continuations beside a cache: several heads may train from it, and write them, at once."""

import torch

from mtp.acceptance import Continuations
from mtp.data.prompts import Prompt
from mtp.held_out import _read, _write


def test_a_writer_leaves_what_another_is_writing(tmp_path):
    prompt = Prompt(id="a@3", category="chat", token_ids=(1, 2, 3))
    text = Continuations([prompt], [[4, 5]], [torch.randn(5, 8)], 2, frozenset({0}))
    path = tmp_path / "continuations" / "name.safetensors"
    path.parent.mkdir()
    unfinished = path.with_suffix(".part")  # of another process
    unfinished.write_bytes(b"half")
    _write(path, text)
    assert unfinished.read_bytes() == b"half"
    found = _read(path, [prompt], 2)
    assert found.continuations == [[4, 5]]
    assert torch.equal(found.states[0], text.states[0])
    assert sorted(path.parent.iterdir()) == [unfinished, path]
