"""modelopt keeps no model: its import is made where nothing of ours is on the stack."""

import gc
import re
import sys
import weakref
from importlib import import_module
from pathlib import Path

import pytest

import quantize
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
