"""Every prefix of a conversation through one chat template, each turn rendered about once.

The proof of a mask (mask.py) needs the render of each prefix of a conversation. Asked for one by
one they cost the square of its length, and nearly all of it repeats what was rendered before. Here
the template itself is what it was, but its loops remember: an iteration that would see the same
item, neighbours and variables as in an earlier render is not run again, its text and what it left
in namespaces are taken from memory. All else of the template (what precedes and follows its loops,
scans of other shapes) runs anew each time, so the result is the template's own, whatever the
messages say.

What an iteration sees is known from the template's syntax tree (names, macros) and from watching
it run (`loop.last`, `loop.nextitem`, `messages[loop.index0 + 1]`). That holds for templates within
the subset of template_subset.py; in any other no loop remembers. A loop of theirs that could see
more than that (`break`, an `else`, the whole of `messages`) is left as it is, only slower.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, Undefined, nodes
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Macro
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from mtp.data.template_subset import LAZY_FILTERS, has_jump, is_in_subset, loop_attribute

# Names that no template can spell, but that may be part of a Python name when compiled.
_MEMORY = "0remembered_loop"  # under which a render gets its memory
_UNUSED = "0messages"
_EVERYTHING = 1 << 60
CHANGING = frozenset(("messages", "tools", "add_generation_prompt"))


def wanted_variables(source: str, environment: Environment) -> set[str]:
    """Names that a template may ask for, without those that its environment knows."""
    return find_undeclared_variables(environment.parse(source)) - set(environment.globals)


class PrefixTemplate:
    """A template that is rendered with growing lists of the same messages.

    Args:
        source: the template.
        environment: what it is compiled in, its sandbox included.
        variables: those that never change; `messages`, `tools` and `add_generation_prompt` may.

    Attributes:
        num_remembered: loops that remember; 0 where the template is not in the subset.
    """

    def __init__(self, source: str, environment: Environment, variables: dict[str, Any]) -> None:
        tree = environment.parse(source)
        self.num_remembered = 0
        if is_in_subset(tree, environment):
            rewriter = _Rewriter(tree)
            tree = rewriter.visit(tree)
            self.num_remembered = rewriter.num_loops
        self._environment = environment
        self._compiled = environment.from_string(tree)
        self._variables = {**self._compiled.globals, **variables}

    def new_memory(self) -> Memory:
        """For the renders of one conversation, whose messages must stay the same objects."""
        return Memory(self._environment)

    def render(
        self, memory: Memory, messages: list[Any], tools: list[Any] | None, *, prompt: bool
    ) -> str:
        """What the template makes of its variables and these.

        Raises:
            jinja2.TemplateError, TypeError: as the template does.
        """
        variables = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": prompt,
            _MEMORY: memory.loop,
        }
        # As `Template.render`, which would copy the variables once more.
        context = self._compiled.new_context(variables, shared=True)
        return "".join(self._compiled.root_render_func(context))


@dataclass(kw_only=True)
class _Run:
    """The iterations of one loop, begun with one state of its variables.

    Args:
        items: what they were over.
        texts: what each wrote.
        reaches: for each, the largest index of `items` that it or an earlier one has seen.
        states: the namespaces after each, by place and name.
    """

    items: list[Any] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reaches: list[int] = field(default_factory=list)
    states: list[list[dict[str, Any]]] = field(default_factory=list)

    def num_valid(self, items: list[Any]) -> int:
        """Iterations that would see in `items` what they saw."""
        if not self.texts:
            return 0
        same = list(map(operator.is_, self.items, items))
        common = len(same) if all(same) else same.index(False)
        if common == len(self.items) == len(items):
            return len(self.texts)
        return bisect_left(self.reaches, common)

    def cut(self, num_valid: int, items: list[Any]) -> None:
        """Forget later iterations."""
        if num_valid < len(self.texts):
            for column in (self.texts, self.reaches, self.states):
                del column[num_valid:]
        self.items = items


class Memory:
    """What the loops of a template did for the prefixes of one conversation."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._runs: dict[Any, _Run] = {}
        self._kept: dict[int, Any] = {}  # so that no id is given to a second object

    def loop(self, site: int, iterable: Any, seen: list[Any], *, caller: Macro) -> str:
        """What a loop of the template writes.

        Args:
            site: which loop.
            iterable: what it is over.
            seen: the values of all variables that its body can see.
            caller: runs the body for an item, with `loop` and, if it looks at neighbours that
                way, `messages`.
        """
        items = list(iterable)
        key = (site, *map(self._frozen, seen)) if seen else site
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = _Run()
        spaces = [value for value in seen if isinstance(value, Namespace)]
        start = run.num_valid(items)
        run.cut(start, items)
        if start and spaces:
            for space, state in zip(spaces, run.states[-1], strict=True):
                for name, value in state.items():
                    space[name] = value
        reach = run.reaches[-1] if run.reaches else -1
        for position in range(start, len(items)):
            loop = _Loop(items, position, self._environment)
            text = str(caller(items[position], loop, _Neighbours(loop, iterable)))
            reach = max(reach, loop.reach)
            run.texts.append(text)
            run.reaches.append(reach)
            run.states.append([dict(_attributes(space)) for space in spaces])
        return "".join(run.texts)

    def _frozen(self, value: Any) -> Any:
        """Equal for values between which no template can tell."""
        if value is None or type(value) in (str, int, bool):
            return type(value), value
        if type(value) is float:
            return float, repr(value)  # -0.0 == 0.0
        if isinstance(value, Undefined):
            return Undefined
        if isinstance(value, Namespace):
            pairs = _attributes(value).items()
            return Namespace, tuple((name, self._frozen(inner)) for name, inner in pairs)
        self._kept[id(value)] = value
        return "object", id(value)


class _Loop:
    """A loop's `loop`, which notes how far ahead it was asked."""

    def __init__(self, items: list[Any], index0: int, environment: Environment) -> None:
        self._items, self._environment = items, environment
        self.index0 = self.reach = index0

    @property
    def index(self) -> int:
        return self.index0 + 1

    @property
    def first(self) -> bool:
        return self.index0 == 0

    @property
    def last(self) -> bool:
        self.reach = max(self.reach, self.index0 + 1)
        return self.index0 + 1 == len(self._items)

    @property
    def previtem(self) -> Any:
        if self.first:
            return self._environment.undefined("there is no previous item")
        return self._items[self.index0 - 1]

    @property
    def nextitem(self) -> Any:
        if self.last:
            return self._environment.undefined("there is no next item")
        return self._items[self.index0 + 1]

    def at(self, index: int, of: Any) -> Any:
        """As from the list `of`; from its end, if negative, and then nothing can be remembered."""
        self.reach = max(self.reach, index if index >= 0 else _EVERYTHING)
        try:
            return self._items[index]
        except IndexError:
            return self._environment.undefined(obj=of, name=index)  # type: ignore[arg-type]


class _Neighbours:
    """`messages` in the body of a loop over it that only asks for `messages[loop.index0 + 1]`."""

    def __init__(self, loop: _Loop, messages: Any) -> None:
        self._loop, self._messages = loop, messages

    def __getitem__(self, index: int) -> Any:
        return self._loop.at(index, self._messages)


def _attributes(space: Namespace) -> dict[str, Any]:
    return object.__getattribute__(space, "_Namespace__attrs")


class _Rewriter(NodeTransformer):
    """Puts `{% call(item, loop, messages) remembered_loop(...) %}` in the place of loops."""

    def __init__(self, tree: nodes.Template) -> None:
        self.num_loops = 0
        macros = list(tree.find_all(nodes.Macro))
        # A macro may be called from a body, and sees the template's variables too.
        self._names_of_macros = set().union(*map(_names, macros)) - {"loop"}
        # All else is local to a body or a macro, or always the same.
        self._changing = CHANGING | _assigned(tree)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """Left alone: it may run in any loop."""
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        """Left alone, as macros are."""
        return node

    def visit_For(self, node: Any) -> nodes.Node:
        """Loops inside of it are part of its iterations."""
        body = nodes.Scope(node.body)
        if not _is_watchable(node, body):
            return node
        own = {"loop", node.target.name}
        if _asks_for_neighbours_only(node.iter, body):
            own.add("messages")
        seen = sorted(((_names(body) - own) | self._names_of_macros) & self._changing)
        if "messages" in seen:
            return node  # another list in each render: nothing could be remembered
        self.num_loops += 1
        arguments = [
            nodes.Const(self.num_loops),
            node.iter,
            nodes.List([nodes.Name(name, "load") for name in seen]),
        ]
        parameters = [node.target.name, "loop", "messages" if "messages" in own else _UNUSED]
        return nodes.CallBlock(
            nodes.Call(nodes.Name(_MEMORY, "load"), arguments, [], None, None),
            [nodes.Name(name, "param") for name in parameters],
            [],
            node.body,
        ).set_lineno(node.lineno)


def _assigned(node: nodes.Node) -> set[str]:
    """Names that a template gives values to, outside of its loops and macros."""
    names = set()
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Name) and child.ctx in ("store", "param"):
            names.add(child.name)
        if not isinstance(child, nodes.For | nodes.Macro | nodes.CallBlock):
            names |= _assigned(child)
    return names


def _is_watchable(node: nodes.For, body: nodes.Scope) -> bool:
    """Whether all that an iteration can see and do is known."""
    if node.test is not None or node.else_:
        return False
    if not isinstance(node.target, nodes.Name) or node.target.name == "messages":
        return False
    # A list from its end has nothing in common with a longer one.
    if any(part.step is not None for part in node.iter.find_all(nodes.Slice)):
        return False
    # Such a list would be made in full before the first iteration.
    iterable = nodes.Output([node.iter])
    if any(part.name in LAZY_FILTERS for part in iterable.find_all(nodes.Filter)):
        return False
    return not has_jump(_of_this_loop(body))


def _of_this_loop(node: nodes.Node) -> Iterator[Any]:
    """All nodes inside in which `loop` and `break` are this loop's."""
    for child in node.iter_child_nodes():
        yield child
        if isinstance(child, nodes.For):
            yield from _of_this_loop(nodes.Scope([nodes.Output([child.iter])]))
        else:
            yield from _of_this_loop(child)


def _asks_for_neighbours_only(iterable: nodes.Node, body: nodes.Scope) -> bool:
    """Whether a loop over `messages` uses that list only as `messages[loop.index0 + 1]`."""
    if not (isinstance(iterable, nodes.Name) and iterable.name == "messages"):
        return False
    neighbours = [
        node.node
        for node in _of_this_loop(body)
        if isinstance(node, nodes.Getitem)
        and isinstance(node.node, nodes.Name)
        and isinstance(node.arg, nodes.Add | nodes.Sub)
        and loop_attribute(node.arg.left) in ("index", "index0")
        and isinstance(node.arg.right, nodes.Const)
        and isinstance(node.arg.right.value, int)
    ]
    uses = [name for name in body.find_all(nodes.Name) if name.name == "messages"]
    return {id(name) for name in uses} <= {id(name) for name in neighbours}


def _names(node: nodes.Node) -> set[str]:
    """All names that stand inside a node, those of namespaces that it sets included."""
    found: Iterator[Any] = node.find_all((nodes.Name, nodes.NSRef))
    return {name.name for name in found}
