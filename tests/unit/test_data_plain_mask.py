"""`mtp data prepare` against masks that were made in another way: letter by letter, by hand.

Each conversation stands here twice: as a row of some format, and as the turns that a person reads
in it. The reference writes those turns out by the rules of two templates, notes for each letter
whether the served model generates it, and asks of each token whether all its letters are such.
"""

from __future__ import annotations

import json

import pytest
from data_helpers import make_base, write_jsonl

from graft.errors import UserError
from mtp.data.prepare import prepare
from mtp.data.render import load_tokenizer
from mtp.data.store import load_prepared

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ARGUMENTS = {"a": 1, "b": "two\nlines", "c": [True, None], "d": {"é": 1.5}, "e": False, "f": None}
CALLED = (
    "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ntwo\nlines\n</parameter>\n"
    '<parameter=c>\n[true, null]\n</parameter>\n<parameter=d>\n{"é": 1.5}\n</parameter>\n'
    "<parameter=e>\nFalse\n</parameter>\n<parameter=f>\nNone\n</parameter>\n</function>"
)
SHORT = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
TAGGED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def openai(identity, *turns, **fields):
    return {"id": identity, "messages": [{"role": r, **said} for r, said in turns], **fields}


# (row, the turns in it): (role, text), or (role, text, thinking, calls) of a reply to learn from.
# "context" is an assistant's turn that is not to be learned.
CASES = [
    (
        openai("plain", ("system", {"content": "Be brief."}), ("user", {"content": "Hi?"}),
               ("assistant", {"content": "Hello."}), ("user", {"content": " Bye. "}),
               ("assistant", {"content": "See you.\n"})),
        [("system", "Be brief."), ("user", "Hi?"), ("assistant", "Hello.", "", []),
         ("user", " Bye. "), ("assistant", "See you.\n", "", [])],
    ),
    (
        openai("thinking", ("user", {"content": "1+1?"}),
               ("assistant", {"content": "2", "reasoning_content": "One\n\nand one."}),
               ("user", {"content": "2+2?"}),
               ("assistant", {"content": "4", "reasoning": "Twice  that.\n"})),
        [("user", "1+1?"), ("assistant", "2", "One\n\nand one.", []),
         ("user", "2+2?"), ("assistant", "4", "Twice  that.\n", [])],
    ),
    (
        {"id": "inline", "conversations": [
            {"from": "human", "value": "Why?"},
            {"from": "gpt", "value": "<think>\nHm.\n</think>\n\nSo."},
            {"from": "human", "value": "And?"},
            {"from": "gpt", "value": "Well.\n</think>\n\nThe end is `</think>`."}]},
        [("user", "Why?"), ("assistant", "So.", "Hm.", []), ("user", "And?"),
         ("assistant", "The end is `</think>`.", "Well.", [])],
    ),
    (
        openai("calls", ("user", {"content": "Add."}),
               ("assistant", {"content": None, "tool_calls": [
                   {"id": "x", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}},
                   {"id": "y", "function": {"name": "add", "arguments": {"a": 1}}}]}),
               ("tool", {"tool_call_id": "y", "content": "1"}),
               ("tool", {"tool_call_id": "x", "content": "\n2"}),
               ("assistant", {"content": "Both."}), tools=[ADD]),
        [("user", "Add."), ("assistant", "", "", [CALLED, SHORT]), ("tool", "1"), ("tool", "\n2"),
         ("assistant", "Both.", "", [])],
    ),
    (
        {"id": "glaive", "tools": json.dumps([ADD["function"]]), "system": "Use tools.",
         "conversations": [
            {"from": "human", "value": "Add one."},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "assistant\nI am no assistant."},
            {"from": "gpt", "value": "1."}]},
        [("system", "Use tools."), ("user", "Add one."), ("assistant", "", "", [SHORT]),
         ("tool", "assistant\nI am no assistant."), ("assistant", "1.", "", [])],
    ),
    (
        {"id": "hermes", "tools": [ADD], "conversations": [
            {"from": "human", "value": "Add it."},
            {"from": "gpt", "value": f"<think>\nAdd.\n</think>\n\nAdding.\n{TAGGED}\n{TAGGED}"},
            {"from": "tool", "value": "<tool_response>\n1\n</tool_response>"},
            {"from": "tool", "value": "<tool_response>\n1\n</tool_response>"},
            {"from": "gpt", "value": "Done."}]},
        [("user", "Add it."), ("assistant", "Adding.", "Add.", [SHORT, SHORT]), ("tool", "1"),
         ("tool", "1"), ("assistant", "Done.", "", [])],
    ),
    (
        openai("letters", ("user", {"content": [
                   {"type": "text", "text": "é世"},
                   {"type": "text", "text": "🙂\r\n e\u0301\u2028?"}]}),
               ("assistant", {"content": [{"text": "\u2003世界 🙂🙂\x85 e\u0301 "}]})),
        [("user", "é世🙂\r\n e\u0301\u2028?"),
         ("assistant", "\u2003世界 🙂🙂\x85 e\u0301 ", "", [])],
    ),
    (
        openai("context", ("assistant", {"content": "How can I help?"}),
               ("user", {"content": "A?"}),
               ("assistant", {"content": "No.", "weight": 0}), ("user", {"content": "B?"}),
               ("assistant", {"content": "Yes."}), ("assistant", {"content": "And yes."})),
        [("context", "How can I help?"), ("user", "A?"), ("context", "No."), ("user", "B?"),
         ("assistant", "Yes.", "", []), ("assistant", "And yes.", "", [])],
    ),
    (
        openai("markers", ("user", {"content": "What is <|im_end|>\n<|im_start|>assistant\nA"}),
               ("assistant", {"content": "An end:\n<|im_end|>\n<|im_start|>user\nB"}),
               ("user", {"content": "</think><|im_end|>"}),
               ("assistant", {"content": "<|endoftext|>", "reasoning_content": "<|im_end|>"})),
        [("user", "What is <|im_end|>\n<|im_start|>assistant\nA"),
         ("assistant", "An end:\n<|im_end|>\n<|im_start|>user\nB", "", []),
         ("user", "</think><|im_end|>"), ("assistant", "<|endoftext|>", "<|im_end|>", [])],
    ),
    (
        openai("ends", ("developer", {"content": "One."}), ("system", {"content": "Two."}),
               ("user", {"content": "Go on."}), ("assistant", {"text": "assistant"}),
               ("user", {"content": "More?"})),
        [("system", "One.\n\nTwo."), ("user", "Go on."), ("assistant", "assistant", "", [])],
    ),
]  # fmt: skip
WITH_CALLS = ("calls", "glaive", "hermes")
TOOLS_HEAD = (
    "# Tools\n\n<tools>\n{}\n</tools>\n\nTo call:\n\n<tool_call>\n<function=function_name>\n"
    "<parameter=parameter_name>\nvalue\n</parameter>\n</function>\n</tool_call>\n\n"
    "A value may span lines; calls may follow each other."
)


def by_qwen(turns, thinking, tools):
    """[(text, kind)] of a conversation; kinds: "read", "prompt" of a reply, "learn", "known"."""
    pieces = []
    turns = list(turns)
    system = [turns.pop(0)[1].strip()] if turns[0][0] == "system" else []
    if tools:
        system = [TOOLS_HEAD.format(json.dumps(ADD)), *system]
    if system:
        pieces.append(("<|im_start|>system\n" + "\n\n".join(system) + "<|im_end|>\n", "read"))
    for number, (role, text, *more) in enumerate(turns):
        if role == "user":
            pieces.append((f"<|im_start|>user\n{text.strip()}<|im_end|>\n", "read"))
        elif role == "tool":
            first = turns[number - 1][0] != "tool"
            last = number + 1 == len(turns) or turns[number + 1][0] != "tool"
            body = f"\n<tool_response>\n{text.strip()}\n</tool_response>"
            text = ("<|im_start|>user" if first else "") + body + ("<|im_end|>\n" if last else "")
            pieces.append((text, "read"))
        else:
            thought, calls = more or ("", [])
            said = text.strip() + ("\n\n" if text.strip() and calls else "")
            said += "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
            head = "assistant\n<think>\n" + ("\n</think>\n\n" if thinking == "strip" else "")
            if thinking == "keep":
                said = f"{thought.strip()}\n</think>\n\n{said}"
            pieces += reply(head, said, role)
    return pieces


def by_chatml(turns, thinking, tools):
    pieces = []
    for role, text, *_ in turns:
        if role in ("assistant", "context"):
            pieces += reply("assistant\n", text, role)
        else:
            pieces.append((f"<|im_start|>{role}\n{text}<|im_end|>\n", "read"))
    return pieces


def reply(head, said, role):
    if role == "context":
        return [(f"<|im_start|>{head}{said}<|im_end|>\n", "read")]
    return [("<|im_start|>", "read"), (head, "prompt"), (said, "learn"), ("<|im_end|>", "known"),
            ("\n", "read")]  # fmt: skip


def reference(pieces, tokenizer):
    """(ids, mask) of the pieces: a reply's own text is spelt, all else read as a server does."""
    while pieces[-1][1] != "known":
        pieces.pop()
    parts = []  # (text, letters that are learned, whether it is spelt)
    for text, kind in pieces:
        spelt, learned = kind in ("prompt", "learn"), kind in ("learn", "known")
        if parts and parts[-1][2] == spelt:
            before = parts.pop()
            parts.append((before[0] + text, before[1] + [learned] * len(text), spelt))
        else:
            parts.append((text, [learned] * len(text), spelt))
    ids, mask = [], []
    for text, letters, spelt in parts:
        encoded = tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=spelt,
            return_offsets_mapping=True,
        )
        ids += encoded["input_ids"]
        mask += [
            start < end and all(letters[start:end]) for start, end in encoded["offset_mapping"]
        ]
    return ids, mask


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_base(folder / name, name) for name in ("qwen35", "chatml")}


@pytest.mark.parametrize(
    ("template", "thinking"), [("qwen35", "keep"), ("qwen35", "strip"), ("chatml", "keep")]
)
def test_masks_are_those_made_by_hand(template, thinking, bases, tmp_path):
    cases = [case for case in CASES if template == "qwen35" or case[0]["id"] not in WITH_CALLS]
    source = write_jsonl(tmp_path / "rows.jsonl", [row for row, _ in cases])
    out, tokenizer = tmp_path / "out", load_tokenizer(bases[template])
    settings = {"thinking": thinking, "held_out_percent": 0, "num_workers": 1}
    report = prepare(bases[template], [source], out, near_duplicates="ignore", **settings)
    assert report.rows_refused == 0 and report.train.rows == len(cases) >= 7
    found = {row["conversation_id"]: row for row in load_prepared(out)["train"].to_list()}
    write = {"qwen35": by_qwen, "chatml": by_chatml}[template]
    for row, turns in cases:
        ids, mask = reference(write(turns, thinking, row.get("tools")), tokenizer)
        made = found[row["id"]]
        assert made["input_ids"] == ids, tokenizer.decode(made["input_ids"])
        assert made["loss_mask"] == mask, row["id"]
        # The comparison can fail: with one turn less to learn it would.
        silent = [("context", t[1]) if t[0] == "assistant" else t for t in turns[:-1]]
        pieces = write([*silent, turns[-1]], thinking, row.get("tools"))
        num_replies = sum(turn[0] == "assistant" for turn in turns)
        if num_replies > 1 and pieces[-2][1] == "known":
            assert reference(pieces, tokenizer)[1] != mask


def test_a_template_that_leaves_calls_out_is_refused(bases, tmp_path):
    """Else a reply that is a call would be learned as an empty one."""
    rows = [row for row, _ in CASES if row["id"] in WITH_CALLS]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match="message 1: the chat template leaves its tool calls out"):
        prepare(bases["chatml"], [source], tmp_path / "out", num_workers=1)
