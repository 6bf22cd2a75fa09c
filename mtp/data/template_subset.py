"""Which chat templates are simple enough to be remembered (template.py).

A list of what is allowed, not of what is known to go wrong: a template with anything else in it
is left to transformers, which is only slower. What the list has to keep true:

- Values never change after they are made. The sandbox keeps lists and dicts so; iterators that
  filters make are used up where they are made; namespaces, which do change, have one name each.
- What an iteration sees has a name: `loop` is only asked for an attribute that is watched, in the
  body of its own loop; macros are always the same ones and only called; `messages` is never more
  than a slice of the conversation.
- Functions, filters and tests give the same for the same, and do nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import Environment, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

WATCHED = frozenset(("index", "index0", "first", "last", "previtem", "nextitem"))
LAZY_FILTERS = frozenset(
    ("batch", "items", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice")
)
# They use up what a lazy filter gives.
_EAGER_CONSUMERS = ("count", "first", "join", "length", "list", "max", "min", "sort", "sum")
_CONSUMERS = LAZY_FILTERS | set(_EAGER_CONSUMERS)
_FILTERS = _CONSUMERS | {
    *("abs", "capitalize", "d", "default", "dictsort", "e", "escape", "float", "indent", "int"),
    *("last", "lower", "replace", "round", "safe", "string", "title", "tojson", "trim", "upper"),
}
_TESTS = frozenset(
    (
        *("boolean", "defined", "divisibleby", "eq", "equalto", "even", "false", "float", "ge"),
        *("gt", "in", "integer", "iterable", "le", "lower", "lt", "mapping", "ne", "none"),
        *("number", "odd", "sequence", "string", "true", "undefined", "upper"),
    )
)
# Filters that are told another, or a test: at which place, and which ones.
_CALLEES = {
    "map": (0, _FILTERS - LAZY_FILTERS),
    "select": (0, _TESTS),
    "reject": (0, _TESTS),
    "selectattr": (1, _TESTS),
    "rejectattr": (1, _TESTS),
}
_FUNCTIONS = frozenset(("dict", "namespace", "raise_exception", "range", "strftime_now"))
_OF_MACROS = frozenset(("caller", "kwargs", "self", "super", "varargs"))
_KINDS = frozenset(
    (
        *("Template", "Output", "TemplateData", "If", "For", "Break", "Continue", "Assign"),
        *("AssignBlock", "Macro", "CallBlock", "ExtensionAttribute", "Call", "Keyword", "Filter"),
        *("Test", "Name", "NSRef", "Getattr", "Getitem", "Slice", "Const", "List", "Tuple", "Dict"),
        *("Pair", "CondExpr", "Compare", "Operand", "And", "Or", "Not", "Add", "Sub", "Mul", "Div"),
        *("FloorDiv", "Mod", "Pow", "Neg", "Pos", "Concat"),
    )
)


def is_in_subset(tree: nodes.Template, environment: Environment) -> bool:
    """Whether all of a template, as parsed, is of the kinds listed here."""
    macros = [node.name for node in tree.find_all(nodes.Macro)]
    of_top_level = [node.name for node in tree.body if isinstance(node, nodes.Macro)]
    if len(set(macros)) != len(macros) or macros != of_top_level:
        return False
    functions = (_FUNCTIONS & set(environment.globals)) | set(macros)
    reserved = set(environment.globals) | set(macros)
    return (
        isinstance(environment, ImmutableSandboxedEnvironment)
        and all(_is_known(node, parent) for node, parent in _with_parents(tree))
        and all(_is_plain_name(node, parent, functions, reserved) for node, parent in _names(tree))
        and _namespaces_are_plain(tree)
        and _loops_are_plain(tree, in_body=False)
    )


def loop_attribute(node: Any) -> str:
    """The attribute that a node takes of `loop`, else ""."""
    named = isinstance(node, nodes.Getattr | nodes.Getitem) and isinstance(node.node, nodes.Name)
    if not named or node.node.name != "loop":
        return ""
    if isinstance(node, nodes.Getattr):
        return node.attr
    return str(node.arg.value) if isinstance(node.arg, nodes.Const) else ""


def _with_parents(node: nodes.Node) -> Iterator[tuple[Any, Any]]:
    for child in node.iter_child_nodes():
        yield child, node
        yield from _with_parents(child)


def _names(tree: nodes.Node) -> Iterator[tuple[Any, Any]]:
    return ((node, parent) for node, parent in _with_parents(tree) if isinstance(node, nodes.Name))


def _is_known(node: Any, parent: Any) -> bool:
    """Whether a node is of a listed kind, its own names aside."""
    kind = type(node).__name__
    if kind not in _KINDS:
        return False
    if kind == "CallBlock":  # of transformers' `{% generation %}`, which gives back what it gets
        return isinstance(node.call.node, nodes.ExtensionAttribute) and not node.args
    if kind == "ExtensionAttribute":
        return node.name == "_generation_support"
    if kind == "Call":
        return isinstance(node.node, nodes.Name | nodes.Getattr | nodes.ExtensionAttribute)
    if kind == "Test":
        return node.name in _TESTS
    return kind != "Filter" or _is_known_filter(node, parent)


def _is_known_filter(node: nodes.Filter, parent: Any) -> bool:
    if node.name not in _FILTERS:
        return False
    if node.name not in LAZY_FILTERS:
        return True
    place, known = _CALLEES.get(node.name, (0, None))
    for callee in node.args[place : place + 1]:
        if known and not (isinstance(callee, nodes.Const) and callee.value in known):
            return False
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    if isinstance(parent, nodes.For):
        return parent.iter is node
    return isinstance(parent, nodes.Filter) and parent.node is node and parent.name in _CONSUMERS


def _is_plain_name(
    node: nodes.Name, parent: Any, functions: frozenset[str], reserved: set[str]
) -> bool:
    """Whether a name stands for a value, or for a known function that is called at once."""
    if node.name in _OF_MACROS:
        return False
    if node.ctx != "load":
        if node.name == "messages":
            return isinstance(parent, nodes.Assign) and _is_slice_of_messages(parent.node)
        return node.name not in reserved and node.name != "loop"
    if isinstance(parent, nodes.Call) and parent.node is node:
        return node.name in functions
    is_asked_for = isinstance(parent, nodes.Test) and parent.name in ("defined", "undefined")
    return is_asked_for or node.name not in reserved


def _is_slice_of_messages(node: Any) -> bool:
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Slice)
        and isinstance(node.node, nodes.Name)
        and node.node.name == "messages"
    )


def _namespaces_are_plain(tree: nodes.Template) -> bool:
    """Whether each is made in a `set`, under a name of namespaces only, and used by attribute."""

    def makes_one(node: Any) -> bool:
        is_named = isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name)
        return is_named and node.node.name == "namespace"

    spaces = set()
    for node, parent in _with_parents(tree):
        if makes_one(node):
            if not (isinstance(parent, nodes.Assign) and isinstance(parent.target, nodes.Name)):
                return False
            spaces.add(parent.target.name)
    for node, parent in _names(tree):
        if node.name not in spaces:
            continue
        is_made = isinstance(parent, nodes.Assign) and parent.target is node
        is_read = isinstance(parent, nodes.Getattr | nodes.Getitem) and parent.node is node
        if not (is_read or (is_made and makes_one(parent.node))):
            return False
    return all(node.name in spaces for node in tree.find_all(nodes.NSRef))


def _loops_are_plain(node: Any, *, in_body: bool) -> bool:
    """Whether `loop` and jumps are those of the loop in whose own body they stand."""
    if isinstance(node, nodes.Name):
        return node.name != "loop"
    if loop_attribute(node):
        return in_body and loop_attribute(node) in WATCHED
    if isinstance(node, nodes.For):
        # There they are those of a loop further out, or of none.
        elsewhere = nodes.Scope([*node.else_, *([node.test] if node.test is not None else [])])
        names = {name.name for name in elsewhere.find_all(nodes.Name)}
        if node.recursive or "loop" in names or has_jump(elsewhere.find_all(nodes.Node)):
            return False
        return _loops_are_plain(node.iter, in_body=in_body) and all(
            _loops_are_plain(child, in_body=True) for child in node.body
        )
    is_inside = in_body and not isinstance(node, nodes.Macro)
    return all(_loops_are_plain(child, in_body=is_inside) for child in node.iter_child_nodes())


def has_jump(found: Iterator[Any]) -> bool:
    """Whether `break` or `continue` is among these nodes."""
    return any(type(node).__name__ in ("Break", "Continue") for node in found)
