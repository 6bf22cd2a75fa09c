"""Tasks that change files or run code: document, rename, repair, and recover from real errors.

A task returns False, having asked nothing, when the module offers nothing to ask about.
"""

from __future__ import annotations

import re
from pathlib import Path

from mtp.nano.session import (
    Module,
    Session,
    edit,
    first_match,
    grep,
    read,
    run,
    source_lines,
)


def compile_check(path: str) -> str:
    return f"compile(open('{path}').read(), '{path}', 'exec')\nprint('{path} compiles')"


def add_docstring(session: Session, module: Module) -> bool:
    """Give a function without docstring one, and check that the file still compiles.

    On a method the first edit is often tried from memory, with the wrong indentation, and fails.
    """
    lines = _lines(session, module)
    functions = [
        f
        for f in module.functions
        if f.docstring is None
        and f.body_line == f.line + 1
        and "\n".join(lines).count(lines[f.line - 1]) == 1
    ]
    if not functions:
        return False
    function = session.rng.choice(functions)
    if not function.is_searchable:
        return False
    name, indent = function.name, " " * function.indent
    words = name.strip("_").replace("_", " ")
    subject = " and ".join(function.arguments[-2:]) or "nothing"
    docstring = f'"""{words.capitalize()} of {subject}."""'
    session.ask(
        f"Add a docstring to `{name}` in {module.path}.",
        f"`{name}` in {module.path} has no docstring. Please write a short one.",
    )
    [found] = session.act(f"First I find {name}.", grep(rf"def {name}\(", module.path))
    path, line = first_match(found)
    if function.indent > 4 and session.rng.random() < 0.7:
        header = lines[line - 1].strip()
        wrong_old = f"\n{header}\n"
        [failed] = session.act(
            f"The line is `{header}`. I put the docstring below it.",
            edit(path, wrong_old, f"{wrong_old}    {docstring}\n"),
        )
        thought = f"The edit failed: {failed.removeprefix('error: ')}. It is indented: I read it."
    else:
        thought = f"It is at line {line}. I read it to get the indentation right."
    [shown] = session.act(thought, read(path, line, min(line + 6, function.end_line)))
    header = source_lines(shown)[0]
    session.act(
        f"The body is indented by {function.indent} spaces. The docstring goes on its first line.",
        edit(path, header, f"{header}\n{indent}{docstring}"),
    )
    [result] = session.act("Now I check that the file still compiles.", run(compile_check(path)))
    session.answer(
        f"The check printed: {result}.",
        f"`{name}` now has a docstring: {docstring.strip(chr(34))} The file compiles.",
    )
    return True


def rename_local(session: Session, module: Module) -> bool:
    """Rename a local variable through one exact edit of the whole function."""
    text = "\n".join(_lines(session, module))
    lines = text.splitlines()
    choices = [
        (f, name)
        for f in module.functions
        if f.end_line - f.line < 12
        for name in f.local_names
        if len(name) < 8 and _can_rename(name, text, "\n".join(lines[f.line - 1 : f.end_line]))
    ]
    if not choices:
        return False
    function, old_name = session.rng.choice(choices)
    new_name = f"{old_name.strip('_')}_{session.rng.choice(['value', 'item', 'result'])}"
    session.ask(
        f"In {module.path}, rename the variable `{old_name}` of `{function.name}` to `{new_name}`.",
        f"Rename local `{old_name}` to `{new_name}` in `{function.name}` ({module.path}).",
    )
    [shown] = session.act(
        f"I read {function.name} first.", read(module.path, function.line, function.end_line)
    )
    old = "\n".join(source_lines(shown))
    pattern = rf"(?<![\w.]){old_name}(?!\w)"
    count = len(re.findall(pattern, old))
    session.act(
        f"`{old_name}` occurs {count} times there. I replace the function as a whole.",
        edit(module.path, old, re.sub(pattern, new_name, old)),
    )
    [left], [result] = (
        session.act("I look for what is left.", grep(rf"\b{new_name}\b", module.path)),
        session.act("And I check that it compiles.", run(compile_check(module.path))),
    )
    session.answer(
        f"{len(left.splitlines())} lines hold the new name, and: {result}.",
        f"Renamed `{old_name}` to `{new_name}` in `{function.name}`; {module.path} compiles.",
    )
    return True


def fix_snippet(session: Session, module: Module) -> bool:
    """Run a snippet against the module, see the real error, run a corrected one."""
    names = [f.name for f in module.functions if f.is_public_top_level and len(f.name) > 4]
    if not names:
        return False
    module_name, name = module.name, session.rng.choice(names)
    right = f"import inspect\nimport {module_name}\nprint(inspect.signature({module_name}.{name}))"
    wrong, lesson = session.rng.choice(
        [
            (right.replace(name, name[:-1]), f"The name is {name}, a letter was missing."),
            (right.removeprefix("import inspect\n"), "The import of inspect was missing."),
            (right[:-1], "A closing parenthesis was missing."),
            (right.replace("signature", "signatures"), "The function is called signature."),
        ]
    )
    session.ask(
        f"Run this and fix it if it fails:\n\n```python\n{wrong}\n```",
        f"Why does this fail?\n\n```python\n{wrong}\n```",
    )
    [error] = session.act("I run it as it is.", run(wrong))
    reason = _last_line(error)
    [output] = session.act(f"It fails with: {reason} {lesson}", run(right))
    if "[exit code" in output:
        session.answer("It still fails.", f"It failed with `{reason}`, and now:\n\n{output}")
        return True
    session.answer(
        f"This time it printed {output}.",
        f"It failed with `{reason}` {lesson} Corrected, it prints `{output}`.",
    )
    return True


def call_wrongly(session: Session, module: Module) -> bool:
    """Call a function with a keyword it does not take; learn from the error and the source."""
    functions = [
        f for f in module.functions if f.is_public_top_level and f.is_strict and len(f.name) > 3
    ]
    if not functions:
        return False
    function = session.rng.choice(functions)
    if not function.is_searchable:
        return False
    name = function.name
    code = f"import {module.name}\n{module.name}.{name}(unknown=1)"
    session.ask(f"What happens if I call `{module.name}.{name}(unknown=1)`?")
    error, found = session.act(
        "I try it, and look up the definition at the same time.",
        run(code),
        grep(rf"^def {name}\(", module.path),
    )
    reason = _last_line(error)
    path, line = first_match(found)
    session.act(f"It says: {reason}. The definition is at line {line}.", read(path, line, line + 5))
    session.answer(
        "The definition shows what it takes.",
        f"It raises `{reason}`. `{name}` is defined at {path}:{line}.",
    )
    return True


def repair_module(session: Session, module: Module) -> bool:
    """A module that someone broke: run it, read the SyntaxError, repair the line."""
    lines = _lines(session, module)
    functions = [
        f
        for f in module.functions
        if lines[f.line - 1].rstrip().endswith("):") and lines.count(lines[f.line - 1]) == 1
    ]
    if not functions:
        return False
    function = session.rng.choice(functions)
    right = lines[function.line - 1]
    wrong = right.rstrip()[: -session.rng.choice([1, 2])]
    if "\n".join(lines).count(right) != 1:
        return False
    path = session.workspace.root / module.path
    path.write_text(path.read_text(encoding="utf-8").replace(right, wrong), encoding="utf-8")
    session.ask(
        f"`import {module.name}` fails here. Please repair it.",
        f"Someone broke {module.path}. Find the error and fix it.",
    )
    [error] = session.act("I compile it to see the error.", run(compile_check(module.path)))
    reason = _last_line(error)
    line = int(re.findall(r"line (\d+)", error)[-1])
    first, last = min(line, function.line) - 3, max(line, function.line) + 3
    session.act(
        f"{reason} It points at line {line}. I read there.",
        read(module.path, max(first, 1), last),
    )
    session.act(
        f"Line {function.line} lacks `{right.rstrip()[len(wrong) :]}` at its end.",
        edit(module.path, f"{wrong}\n", f"{right}\n"),
    )
    [result] = session.act("I compile it again.", run(compile_check(module.path)))
    session.answer(
        f"The check printed: {result}.",
        f"Line {function.line} of {module.path} was broken ({reason}); it is repaired.",
    )
    return True


def _last_line(output: str) -> str:
    """The line of a traceback that says what is wrong."""
    return next(row for row in reversed(output.splitlines()) if not row.startswith("[exit"))


def _can_rename(name: str, module_text: str, function_text: str) -> bool:
    # A keyword argument of the same name, or a global, would change meaning.
    is_keyword = re.search(rf"[(,]\s*{name}\s*=(?!=)", function_text)
    is_outer = re.search(r"\b(global|nonlocal) ", function_text)
    return module_text.count(function_text) == 1 and not is_keyword and not is_outer


def _lines(session: Session, module: Module) -> list[str]:
    path: Path = session.workspace.root / module.path
    return path.read_text(encoding="utf-8").splitlines()
