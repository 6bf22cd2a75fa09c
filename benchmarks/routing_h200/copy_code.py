"""Copy Python source of installed packages: `python copy_code.py OUT MEGABYTES PACKAGE...`.

Files are drawn by the hash of their path, so that a small limit still takes from all packages.
"""

import hashlib
import importlib.util
import shutil
import sys
from pathlib import Path

SMALLEST, LARGEST = 2_000, 60_000


def main(out: Path, megabytes: float, packages: list[str]) -> None:
    candidates = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        root = Path(spec.submodule_search_locations[0])
        candidates += [(path, path.relative_to(root.parent)) for path in root.rglob("*.py")]
    candidates.sort(key=lambda pair: hashlib.sha256(str(pair[1]).encode()).digest())
    num_files, num_bytes = 0, 0
    for path, name in candidates:
        size = path.stat().st_size
        if any("test" in part for part in name.parts) or not SMALLEST <= size <= LARGEST:
            continue
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / name)
        num_files, num_bytes = num_files + 1, num_bytes + size
        if num_bytes > megabytes * 1e6:
            break
    print(f"{out}: {num_files} files, {num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
