"""Record agent traces on the spot: a script that really uses tools on real modules.

Scripted, so that it needs no model and no network; real, because every result is what the tool
printed on a copy of a standard-library module, failures included.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mtp.nano import tasks_edit, tasks_read
from mtp.nano.session import Session, parse_module
from mtp.nano.stdlib import LICENCE, stdlib_root
from mtp.nano.workspace import Workspace
from mtp.progress import track

SOURCE = "nano-agent"
TASKS = (
    tasks_read.locate,
    tasks_read.count_classes,
    tasks_read.summarise,
    tasks_read.search_again,
    tasks_edit.add_docstring,
    tasks_edit.rename_local,
    tasks_edit.fix_snippet,
    tasks_edit.call_wrongly,
    tasks_edit.repair_module,
)
# Importable without side effects, quick to import, and with functions worth asking about.
MODULE_NAMES = (
    "argparse", "ast", "base64", "bdb", "bisect", "calendar", "cmd", "code", "codeop",
    "colorsys", "configparser", "contextlib", "copy", "csv", "dataclasses", "difflib", "dis",
    "filecmp", "fileinput", "fnmatch", "fractions", "ftplib", "functools", "getopt", "getpass",
    "gettext", "glob", "graphlib", "gzip", "heapq", "hmac", "imaplib", "inspect", "ipaddress",
    "linecache", "locale", "mailbox", "mimetypes", "netrc", "ntpath", "numbers", "nturl2path",
    "optparse", "pickle", "pickletools", "pkgutil", "platform", "plistlib", "poplib",
    "posixpath", "pprint", "profile", "pstats", "pyclbr", "queue", "quopri", "random",
    "reprlib", "rlcompleter", "sched", "secrets", "selectors", "shelve", "shlex", "shutil",
    "smtplib", "socketserver", "statistics", "string", "stringprep", "symtable", "tabnanny",
    "tarfile", "tempfile", "textwrap", "timeit", "tokenize", "trace", "traceback", "types",
    "uuid", "warnings", "wave", "weakref", "zipapp", "zipfile",
)  # fmt: skip
SYSTEM_PROMPTS = (
    "You are a coding agent. Use the tools, look before you edit, check what you changed.",
    "You work on a folder of Python modules. Be brief and exact.",
)


def record_traces(
    out: Path, *, num_conversations: int, seed: int = 0, num_workers: int | None = None
) -> dict[str, int]:
    """Write recorded conversations to a JSONL file, one a line.

    Args:
        out: the file to write; replaced when it exists.
        num_conversations: how many to record.
        seed: the same seed and interpreter record the same file.
        num_workers: conversations recorded at once; the number of cores when None.

    Returns:
        How often each kind of task was carried out.
    """
    workers = num_workers or os.cpu_count() or 1
    counts: dict[str, int] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="mtp-agent-") as scratch,
            ThreadPoolExecutor(workers) as pool,
            partial.open("w", encoding="utf-8") as stream,
        ):
            roots = [Path(scratch) / str(index) for index in range(num_conversations)]
            recorded = pool.map(
                lambda item: _record_and_clean(item[0], seed, item[1]), enumerate(roots)
            )
            for row, kinds in track(recorded, "recording", total=num_conversations):
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                for kind in kinds:
                    counts[kind] = counts.get(kind, 0) + 1
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return counts


def record_conversation(index: int, seed: int, root: Path) -> tuple[dict[str, Any], list[str]]:
    """Record one conversation of one or two tasks; its workspace stays in `root`.

    Returns:
        The row, and the names of the tasks in order.
    """
    rng = random.Random(f"{seed}:{index}")
    available = [name for name in MODULE_NAMES if (stdlib_root() / f"{name}.py").exists()]
    names = rng.sample(available, rng.randint(3, 6))
    root.mkdir(parents=True)
    for name in names:
        shutil.copyfile(stdlib_root() / f"{name}.py", root / f"{name}.py")
    session = Session(Workspace(root), rng, thinks=rng.random() < 0.8)
    session.messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    # Each task has a module to itself, so none meets a file that an earlier one changed.
    kinds: list[str] = []
    for name in names[: 1 + (rng.random() < 0.4)]:
        module = parse_module(stdlib_root() / f"{name}.py")
        for task in rng.sample(TASKS, len(TASKS)):
            if task(session, module):
                kinds.append(task.__name__)
                break
    if not kinds:
        raise AssertionError(f"no task applies to any of {names}")
    return session.record(f"{SOURCE}/{seed}/{index}", source=SOURCE, licence=LICENCE), kinds


def _record_and_clean(index: int, seed: int, root: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        return record_conversation(index, seed, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
