"""Tasks that look: find, count, summarise, search again after a miss.

A task returns False, having asked nothing, when the module offers nothing to ask about.
"""

from __future__ import annotations

from mtp.nano.session import (
    Module,
    Session,
    first_match,
    grep,
    read,
    run,
    signature,
    source_lines,
)


def locate(session: Session, module: Module) -> bool:
    """Find where a function is defined and report its signature."""
    functions = [f for f in module.functions if len(f.name) > 3]
    if not functions:
        return False
    function = session.rng.choice(functions)
    if not function.is_searchable:
        return False
    name = function.name
    session.ask(
        f"Where is `{name}` defined, and what is its signature?",
        f"Find the definition of `{name}` and tell me its arguments.",
        f"Which file defines `{name}`? Quote the signature.",
    )
    [found] = session.act(
        f"I need the definition of {name}. Searching for `def {name}` gives the file and the line.",
        grep(rf"def {name}\("),
        say=session.rng.choice(["", f"Searching for `{name}`."]),
    )
    path, line = first_match(found)
    [shown] = session.act(
        f"It is in {path} at line {line}. I read from there to see the whole signature.",
        read(path, line, line + 7),
    )
    count = len(found.splitlines())
    others = "" if count == 1 else f" (the first of {count} definitions)"
    session.answer(
        f"The signature starts at line {line} of {path}.",
        f"`{name}` is defined in `{path}` at line {line}{others}:\n\n"
        f"```python\n{signature(source_lines(shown))}\n```",
    )
    return True


def count_classes(session: Session, module: Module) -> bool:
    """Count the classes of a module, then check the count by importing its syntax tree."""
    if not 1 <= module.num_classes <= 10:
        return False
    path = module.path
    session.ask(
        f"How many top-level classes does {path} define?",
        f"Count the classes in `{path}` and list their names.",
    )
    check = (
        f"import ast\ntree = ast.parse(open('{path}').read())\n"
        "print(sum(isinstance(node, ast.ClassDef) for node in tree.body))"
    )
    found, counted = session.act(
        f"A search for lines that start with `class` in {path} lists them; the syntax tree gives "
        "a count that a string cannot fool. Both can run at once.",
        grep(r"^class \w+", path),
        run(check),
    )
    lines = [line.split(":", 2)[2] for line in found.splitlines()]
    names = [line.removeprefix("class ").split("(")[0].split(":")[0] for line in lines]
    agreement = "agree" if len(names) == int(counted) else f"differ, the tree says {counted}"
    session.answer(
        f"The search shows {len(names)} and the syntax tree {counted}: they {agreement}.",
        f"`{path}` defines {counted} top-level classes: "
        + ", ".join(f"`{name}`" for name in names)
        + ".",
    )
    return True


def summarise(session: Session, module: Module) -> bool:
    """Read a documented function (and the head of the file at the same time) and summarise it."""
    functions = [f for f in module.functions if f.docstring and f.end_line - f.line < 30]
    if not functions:
        return False
    function = session.rng.choice(functions)
    path = module.path
    session.ask(
        f"Read lines {function.line} to {function.end_line} of {path} and summarise them.",
        f"What does the code at {path}:{function.line}-{function.end_line} do?",
    )
    calls = [read(path, function.line, function.end_line)]
    thought = f"I read lines {function.line} to {function.end_line} of {path}."
    if session.rng.random() < 0.5:
        calls.append(read(path, 1, 12))
        thought += " The head of the file gives the context, so I read it too."
    session.act(thought, *calls)
    first_sentence = " ".join((function.docstring or "").split("\n\n")[0].split())
    arguments = ", ".join(f"`{name}`" for name in function.arguments) or "no arguments"
    session.answer(
        f"The lines define {function.name}; its docstring states the purpose.",
        f"They define `{function.name}`, which takes {arguments}. {first_sentence}",
    )
    return True


def search_again(session: Session, module: Module) -> bool:
    """A misremembered name: the first search finds nothing, a shorter one does."""
    functions = [f for f in module.functions if "_" in f.name.strip("_")]
    if not functions:
        return False
    name = session.rng.choice(functions).name
    stem = max(name.strip("_").split("_"), key=len)
    wrong = name.replace("_", "") if name.count("_") else name + "s"
    session.ask(
        f"Show me the function `{wrong}`.",
        f"I remember a function called `{wrong}`, where is it?",
    )
    [missed] = session.act(
        f"I search for the definition of {wrong}.", grep(rf"def {wrong}\("), ("list_files", {})
    )[:1]
    [found] = session.act(
        f"The search says: {missed}. The name may be spelled with underscores, so I search for a "
        f"part of it, `{stem}`.",
        grep(rf"def \w*{stem}\w*\("),
        say="No function has exactly that name. Trying a part of it.",
    )
    line_text = next((row for row in found.splitlines() if f"def {name}(" in row), None)
    if line_text is None:
        session.answer(
            "Several functions match, the user has to choose.",
            f"There is no `{wrong}`. These are close:\n\n{found}",
        )
        return True
    path, line = first_match(line_text)
    session.act(f"{name} at {path}:{line} must be the one. I read it.", read(path, line, line + 9))
    session.answer(
        f"The function is called {name}.",
        f"There is no `{wrong}`; the function is `{name}`, in `{path}` at line {line}.",
    )
    return True
