"""What is in memory: modelopt keeps no model, and experts are read one by one."""

import gc
import re
import sys
import weakref
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tiny import write_base, write_tiny_head

import quantize
from graft.formats import dequantize_head
from graft.layout import fuse_experts
from graft.manifest import HeadFolder
from quantize.layerwise import layer_tensors
from quantize.lazy_modelopt import import_apart

KEEPS_AN_ERROR = """
try:
    import no_such_module_anywhere
except ImportError as error:
    KEPT = error
"""


class Model:
    """Something large."""


@pytest.mark.parametrize(
    ("load", "kept"), [(import_apart, False), (import_module, True)], ids=["apart", "plainly"]
)
def test_a_module_that_keeps_an_error_does_not_keep_what_is_calibrated(
    tmp_path, monkeypatch, load, kept
):
    """modelopt 0.47 keeps such errors; a plain import shows what that does to its caller."""
    name = f"keeps_an_error_{'plainly' if kept else 'apart'}"
    (tmp_path / f"{name}.py").write_text(KEEPS_AN_ERROR)
    monkeypatch.syspath_prepend(tmp_path)

    def calibrate(model):
        return load(name)

    model = Model()
    alive = weakref.ref(model)
    calibrate(model)
    del model
    gc.collect()
    assert (alive() is not None) == kept
    del sys.modules[name]


def test_modelopt_is_imported_in_no_other_way():
    folder = Path(quantize.__file__).parent
    found = [path.name for path in folder.glob("*.py")
             if re.search(r"^\s*(import|from) modelopt", path.read_text(), re.M)]  # fmt: skip
    assert found == []


class Watched(HeadFolder):
    """A head that knows how many of the expert matrices that it read are still alive."""

    def __init__(self, folder):
        super().__init__(folder)
        self.read, self.most = [], 0

    def load(self, name):
        tensor = super().load(name)
        if ".mlp.experts." in name:
            self.read.append(weakref.ref(tensor))
            self.most = max(self.most, sum(one() is not None for one in self.read))
        return tensor


@pytest.mark.parametrize("form", ["bf16-per-expert", "nvfp4-modelopt", "nvfp4-compressed-tensors"])
def test_experts_stored_one_by_one_are_read_one_by_one(tmp_path, form):
    base = write_base(tmp_path / "base")
    head = Watched(write_tiny_head(tmp_path / "head", base, num_layers=2, form=form))
    found = layer_tensors(head, 1)
    num_read = len(head.read)
    assert num_read >= 4 * 3 and head.most <= 2 * num_read / 4  # one expert, and the one before
    everything = fuse_experts(dequantize_head(head.load_all()))
    assert head.most >= num_read  # what reading all at once takes is seen
    wanted = {name: t for name, t in everything.items() if name.startswith("mtp.layers.1.")}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
