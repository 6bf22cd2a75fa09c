"""README and docs against the program: commands, options, help text and file tree are true."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from mtp.cli import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")),
             *sorted((ROOT / "recipes").rglob("README.md"))]  # fmt: skip


def documented_commands():
    for document in DOCUMENTS:
        for block in re.findall(r"```(?:bash|sh)?\n(.*?)```", document.read_text(), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"\$? ?mtp [a-z]", line):
                    yield pytest.param(line.lstrip("$ "), id=f"{document.name}: {line[:60]}")


def problems_of(line):
    """Why this command line could not run, from the program's own declarations."""
    words = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        name = words.pop(0)
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    options = {name for parameter in command.params for name in parameter.opts}
    unknown = [w for w in words if w.startswith("--") and w.split("=")[0] not in options]
    return f"no option {unknown}" if unknown else None


@pytest.mark.parametrize("line", list(documented_commands()))
def test_documented_command_exists(line):
    assert problems_of(line) is None


def test_the_check_can_fail():
    assert problems_of("mtp nonsense") == "no command nonsense"
    assert "--nonsense" in problems_of("mtp graft --nonsense")


def every_command(command=None, words=("mtp",)):
    command = command or typer.main.get_command(app)
    if not hasattr(command, "commands"):
        yield pytest.param(command, words, id=" ".join(words))
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, (*words, name))


@pytest.mark.parametrize(("command", "words"), list(every_command()))
def test_the_example_of_a_commands_help_can_be_pasted(command, words):
    text = command.get_help(command.make_context(words[-1], [], resilient_parsing=True))
    example = text.split("Example:\n")[1].split("\n\n")[0]
    line = " ".join(example.replace("\\\n", " ").split())
    assert "\n" not in example.replace("\\\n", " ").strip()
    assert line.startswith(" ".join(words) + " ") and problems_of(line) is None
    needed = [item.opts[0] for item in command.params if item.required and item.opts[0][0] == "-"]
    assert [option for option in needed if option not in line.split()] == []


def test_no_message_sends_people_to_pypi_for_this_package():
    sources = [
        path for part in ("graft", "mtp", "quantize") for path in (ROOT / part).rglob("*.py")
    ]
    named = [
        path for path in sources if re.search(r"mtp-graft\[|install mtp-graft`", path.read_text())
    ]
    assert len(sources) > 100 and named == []


def test_help_in_readme_is_the_programs():
    text = (ROOT / "README.md").read_text()
    shown = re.search(r"<!-- help -->\n```\n(.*?)```", text, re.S).group(1)
    printed = subprocess.run(
        [sys.executable, "-m", "mtp.cli", "--help"],
        capture_output=True, text=True, check=True,
        env={"COLUMNS": "100", "TERMINAL_WIDTH": "100", "PATH": ""}, cwd=ROOT,
    ).stdout  # fmt: skip
    lines = [line.rstrip() for line in printed.strip().splitlines()]
    assert shown.strip().splitlines()[1:] == lines[1:]  # the first line names the program file


def test_the_readme_tree_is_the_repositorys():
    text = (ROOT / "README.md").read_text()
    tree = re.search(r"<!-- tree -->\n```\n(.*?)```", text, re.S).group(1)
    folder, paths = Path(), []
    for line in tree.splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else Path()
        paths.append(folder / name)
        if name.endswith("/") and not line.startswith(" "):
            folder = Path(name)
    assert len(paths) > 20
    assert [str(path) for path in paths if not (ROOT / path).exists()] == []
    listed = {ROOT / path for path in paths}
    packages = [ROOT / "graft", ROOT / "mtp", ROOT / "quantize"]
    modules = {path for folder in packages for path in folder.glob("*.py")}
    assert sorted(modules - listed - {folder / "__init__.py" for folder in packages}) == []
