"""A small row of every format, in our own words, and the messages that must come of it.

Expected messages are (role, text) or (role, text, calls): calls as [(name, arguments)] of an
assistant turn; the id of the answered call for a tool turn that has one.
"""

from __future__ import annotations

import json
from typing import Any

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
SCHEMA = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": ADD},
}
FLAT = {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD}
BARE = {"name": "add", "description": "Adds.", "parameters": ADD}
ANTHROPIC = {"name": "add", "description": "Adds.", "input_schema": ADD}


def call(identity: str, a: int, b: int, *, as_text: bool = True) -> dict[str, Any]:
    arguments = {"a": a, "b": b}
    function = {"name": "add", "arguments": json.dumps(arguments) if as_text else arguments}
    return {"id": identity, "type": "function", "function": function}


ADDED = ("add", {"a": 1, "b": 2})
ADDED_TOO = ("add", {"a": 3, "b": 4})
PARALLEL: list[Any] = [
    ("system", "Be brief."),
    ("user", "1+2 and 3+4?"),
    ("assistant", "Adding.", [ADDED, ADDED_TOO]),
    ("tool", "3", "c1"),
    ("tool", "7", "c2"),
    ("assistant", "3 and 7."),
]
WITHOUT_IDS = [turn[:2] if turn[0] == "tool" else turn for turn in PARALLEL]
SILENT = [("assistant", "", t[2]) if len(t) > 2 and t[0] == "assistant" else t for t in PARALLEL]
CHAT = [("user", "Hi?"), ("assistant", "Hello."), ("user", "Bye."), ("assistant", "See you.")]
ASKED = [("user", "Say a word."), ("assistant", "Word.")]
TEXT_AGENT = [
    ("system", "One command a turn."),
    ("user", "List the files."),
    ("assistant", "Looking.\n```\nls\n```"),
    ("user", "a.py"),
    ("assistant", "Done.\n```\nsubmit\n```"),
]
OPENAI = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "1+2 and "}, {"text": "3+4?"}]},
    {"role": "assistant", "content": "Adding.",
     "tool_calls": [call("c1", 1, 2), call("c2", 3, 4, as_text=False)]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "tool", "tool_call_id": "c2", "content": "7"},
    {"role": "assistant", "content": "3 and 7."},
]  # fmt: skip
FROM_VALUE = [
    {"from": "human", "value": "Hi?"},
    {"from": "gpt", "value": "Hello."},
    {"from": "human", "value": "Bye."},
    {"from": "gpt", "value": "See you."},
]


def turns(items: list[Any]) -> list[dict[str, Any]]:
    """Plain turns as OpenAI dicts."""
    return [{"role": role, "content": text} for role, text in items]


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def function_text(a: int, b: int) -> str:
    return (
        f"<function=add>\n<parameter=a>\n{a}\n</parameter>\n<parameter=b>\n{b}\n</parameter>\n"
        "</function>"
    )


HERMES_SYSTEM = (
    "Be brief.\n\nYou may call functions. Their signatures stand within <tools></tools> tags:\n"
    f"<tools>\n{json.dumps([SCHEMA])}\n</tools>\nFor each call return a JSON object within tags:\n"
    '<tool_call>\n{"name": "...", "arguments": {}}\n</tool_call>'
)
RESPONSE_TOOL = '<tool_response>\n{"name": "add", "content": %s}\n</tool_response>'
HERMES = [
    {"from": "system", "value": HERMES_SYSTEM},
    {"from": "human", "value": "1+2 and 3+4?"},
    {"from": "gpt", "value": "Adding.\n"
     + tagged("{'name': 'add', 'arguments': {'a': 1, 'b': 2}}") + "\n"
     + tagged('{"name": "add", "arguments": {"a": 3, "b": 4}}')},
    {"from": "tool", "value": RESPONSE_TOOL % 3 + "\n" + RESPONSE_TOOL % '"7"'},
    {"from": "gpt", "value": "3 and 7."},
]  # fmt: skip
QWEN_TEXT = turns(
    [
        ("system", f"Be brief.\n\n# Tools\n\nCall them.\n<tools>\n{json.dumps(SCHEMA)}\n</tools>"),
        ("user", "1+2 and 3+4?"),
        ("assistant", f"Adding.\n\n{tagged(function_text(1, 2))}\n{tagged(function_text(3, 4))}"),
        (
            "user",
            "<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>",
        ),
        ("assistant", "3 and 7."),
    ]
)
STRINGS = [("add", {"a": "1", "b": "2"}), ("add", {"a": "3", "b": "4"})]
SWIFT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+2 and 3+4?"},
    {"role": "assistant", "content": "Adding."},
    {"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 1, "b": 2}}'},
    {"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 3, "b": 4}}'},
    {"role": "tool_response", "content": "3"},
    {"role": "tool_response", "content": "7"},
    {"role": "assistant", "content": "3 and 7."},
]
GLAIVE = [
    {"from": "human", "value": "1+2?"},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": 2}}'},
    {"from": "observation", "value": "3"},
    {"from": "gpt", "value": "3."},
]
ONE_CALL = [
    ("system", "Be brief."),
    ("user", "1+2?"),
    ("assistant", "", [ADDED]),
    ("tool", "3"),
    ("assistant", "3."),
]
QWEN_AGENT = [
    {"role": "system", "content": "<|im_system|>tool_declare<|im_middle|>"
     + json.dumps([SCHEMA]) + "<|im_end|>"},
    {"role": "user", "content": "1+2 and 3+4?"},
    {"role": "assistant", "content": "Adding."},
    {"role": "assistant", "content": "",
     "function_call": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
    {"role": "assistant", "content": "",
     "function_call": {"name": "add", "arguments": '{"a": 3, "b": 4}'}},
    {"role": "function", "name": "add", "content": "3"},
    {"role": "function", "name": "add", "content": "7"},
    {"role": "assistant", "content": "3 and 7."},
]  # fmt: skip
SWE_HISTORY = [
    {"role": "system", "content": "Be brief.", "agent": "main", "message_type": "system_prompt"},
    {"role": "user", "content": "1+2?", "agent": "main"},
    {"role": "assistant", "content": "", "thought": "", "action": "add 1 2",
     "tool_calls": [call("c1", 1, 2)]},
    {"role": "tool", "content": "3", "tool_call_ids": ["c1"]},
    {"role": "assistant", "content": "3."},
]  # fmt: skip
OLD_HISTORY = [
    {"role": role, "content": text, "thought": "?", "action": "?", "agent": "primary"}
    for role, text in TEXT_AGENT
]


def model_response(identity: str, message: dict[str, Any]) -> dict[str, Any]:
    return {"id": identity, "choices": [{"message": {"role": "assistant", **message}}]}


def event_metadata(number: int) -> dict[str, Any]:
    calls = [call("c1", 1, 2), call("c2", 3, 4)]
    response = model_response("r1", {"content": "Adding.", "tool_calls": calls})
    return {"function_name": "add", "tool_call_id": f"c{number}", "model_response": response}


EVENTS = [
    {"id": 0, "source": "agent", "action": "system",
     "args": {"content": "Be brief.", "tools": [SCHEMA]}},
    {"id": 1, "source": "user", "action": "message", "args": {"content": "1+2 and 3+4?"}},
    {"id": 2, "source": "user", "action": "recall", "args": {"query": "1+2 and 3+4?"}},
    {"id": 3, "source": "environment", "observation": "recall", "content": "x", "extras": {}},
    {"id": 4, "source": "agent", "action": "run", "args": {"thought": "Adding."},
     "tool_call_metadata": event_metadata(1)},
    {"id": 5, "source": "agent", "observation": "run", "content": "3", "extras": {},
     "tool_call_metadata": event_metadata(1)},
    {"id": 6, "source": "agent", "action": "run", "args": {},
     "tool_call_metadata": event_metadata(2)},
    {"id": 7, "source": "agent", "observation": "run", "content": "7", "extras": {},
     "tool_call_metadata": event_metadata(2)},
    {"id": 8, "source": "agent", "action": "message", "args": {"content": "3 and 7."}},
]  # fmt: skip
REQUEST = {"model": "m", "messages": OPENAI[:5], "tools": [SCHEMA]}
BLOCKS = [
    {"role": "user", "content": "1+2 and 3+4?"},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Two sums.", "signature": "s"},
        {"type": "text", "text": "Adding."},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "b": 2}},
        {"type": "tool_use", "id": "c2", "name": "add", "input": {"a": 3, "b": 4}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c1", "content": "3"},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "7"}]}]},
]  # fmt: skip
AS_TEXT = [("system", "Call <function=...>."), ("user", "1+2?")]
NOT_CLOSED = function_text(1, 2).removesuffix("\n</function>")
ITEMS = [
    {"role": "system", "content": "Be brief.", "type": "message"},
    {"role": "user", "content": [{"type": "input_text", "text": "1+2 and 3+4?"}]},
]
OUTPUT = [
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant",
     "content": [{"type": "output_text", "text": "Adding."}]},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 2}'},
    {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 3, "b": 4}'},
    {"type": "function_call_output", "call_id": "c1", "output": "3"},
    {"type": "function_call_output", "call_id": "c2", "output": "7"},
    {"type": "message", "role": "assistant",
     "content": [{"type": "output_text", "text": "3 and 7."}]},
]  # fmt: skip
ATIF = {
    "schema_version": "ATIF-v1.4",
    "session_id": "s",
    "agent": {"name": "x", "model_name": "m", "tool_definitions": [SCHEMA]},
    "steps": [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {"step_id": 2, "source": "user", "message": "1+2 and 3+4?"},
        {"step_id": 3, "source": "agent", "message": "Adding.", "reasoning_content": "Hm.",
         "tool_calls": [
             {"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 1, "b": 2}},
             {"tool_call_id": "c2", "function_name": "add", "arguments": {"a": 3, "b": 4}}],
         "observation": {"results": [
             {"source_call_id": "c1", "content": "3"}, {"source_call_id": "c2", "content": "7"}]}},
        {"step_id": 4, "source": "agent", "message": "3 and 7."},
    ],
}  # fmt: skip
ADP = {
    "id": "t1",
    "schema_version": "1.2.0",
    "content": [
        {"class_": "text_observation", "content": "1+2?", "source": "user"},
        {"class_": "api_action", "function": "add", "kwargs": {"a": 1, "b": 2},
         "description": "Adding.", "reasoning_content": "Hm."},
        {"class_": "text_observation", "content": "3", "source": "environment"},
        {"class_": "code_action", "language": "python", "content": "print(3)", "description": None},
        {"class_": "text_observation", "content": "3\n", "source": "environment"},
        {"class_": "message_action", "content": "3."},
    ],
    "details": {},
}  # fmt: skip
INFERENCES = [
    {"completion": "bad", "pass_rate": 0.2, "model_name": "a"},
    {"completion": "Word.", "pass_rate": "1.0", "model_name": "b"},
    {"completion": "late", "pass_rate": 1.0, "model_name": "c"},
]
SOLVED = ("def one():\n", "    return 1\n")

# (format, row, messages or the text of a document, number of tool schemas)
ROWS: list[tuple[str, Any, Any, int]] = [
    ("openai-messages", {"messages": OPENAI, "tools": [json.dumps(SCHEMA)]}, PARALLEL, 1),
    ("openai-messages", {"messages": BLOCKS + turns([("assistant", "3 and 7.")]),
                         "system": "Be brief.", "tools": [ANTHROPIC]}, PARALLEL, 1),
    ("openai-messages", {"messages": FROM_VALUE}, CHAT, 0),
    ("message-list", OPENAI, PARALLEL, 0),
    ("json-text-messages", {"messages": json.dumps(OPENAI), "tools": json.dumps([SCHEMA]),
                            "reward": 1.0}, PARALLEL, 1),
    ("json-text-messages", {"messages": json.dumps(QWEN_AGENT), "target_tools": "add",
                            "available_tools": json.dumps([SCHEMA]), "metadata": "{}"},
     WITHOUT_IDS[1:], 1),
    ("json-text-messages", {"messages": json.dumps(QWEN_TEXT)},
     [(*t[:2], STRINGS) if t[1] == "Adding." else t for t in WITHOUT_IDS], 1),
    ("swift-chatml", {"messages": SWIFT, "tools": json.dumps([BARE])}, WITHOUT_IDS, 1),
    ("sharegpt", {"conversations": FROM_VALUE}, CHAT, 0),
    ("sharegpt", {"conversations": GLAIVE, "system": "Be brief.", "tools": json.dumps([BARE])},
     ONE_CALL, 1),
    ("sharegpt", {"conversation": [{"role": "user", "text": "Hi?"},
                                   {"role": "model", "text": "Hello."}]}, CHAT[:2], 0),
    ("hermes", {"conversations": HERMES, "id": "h", "category": "math"}, WITHOUT_IDS, 1),
    ("trajectory", {"trajectory": OPENAI, "instance_id": "i", "tools": [SCHEMA]}, PARALLEL, 1),
    ("tau-bench", {"traj": OPENAI, "task_id": 3, "reward": 1.0, "info": {}, "trial": 0},
     PARALLEL, 0),
    ("swe-agent", {"history": SWE_HISTORY, "trajectory": [{"messages": SWE_HISTORY[:2]}],
                   "info": {}}, [(*t[:2], "c1") if t[0] == "tool" else t for t in ONE_CALL], 0),
    ("swe-agent", {"history": OLD_HISTORY, "trajectory": [], "info": {}}, TEXT_AGENT, 0),
    ("mini-swe-agent", {"messages": [*turns(TEXT_AGENT), {"role": "exit", "content": "diff"}],
                        "info": {"mini_version": "2.0"}, "trajectory_format": "mini-swe-agent-1.1"},
     TEXT_AGENT, 0),
    ("openhands-events", {"instance_id": "i", "history": EVENTS, "instruction": "x",
                          "metadata": {"llm_config": {"model": "m"}}}, PARALLEL, 1),
    ("openhands-events", EVENTS, PARALLEL, 1),
    ("request-log", {**REQUEST, "response": model_response("r", {"content": "3 and 7."}),
                     "kwargs": {"tools": [SCHEMA]}, "cost": 0.1}, PARALLEL, 1),
    ("request-log", {"request": {"system": [{"type": "text", "text": "Be brief."}],
                                 "messages": BLOCKS, "tools": [ANTHROPIC]},
                     "response": {"role": "assistant", "type": "message", "model": "m",
                                  "content": [{"type": "text", "text": "3 and 7."}]}}, PARALLEL, 1),
    ("request-log", {"messages": turns(AS_TEXT), "tools": [SCHEMA], "raw_messages": [],
                     "response": model_response("r", {"tool_calls": [call("c1", 1, 2)]}),
                     "raw_response": model_response("r", {"content": NOT_CLOSED})},
     [*AS_TEXT, ("assistant", function_text(1, 2))], 0),
    ("openai-responses", {"responses_create_params": {"input": ITEMS, "tools": [FLAT]},
                          "response": {"output": OUTPUT, "model": "m"}}, PARALLEL, 1),
    ("openai-responses", {"instructions": "Be brief.", "input": "1+2 and 3+4?", "output": OUTPUT,
                          "tools": [FLAT]}, PARALLEL, 1),
    ("atif", ATIF, PARALLEL, 1),
    ("adp", ADP, [("user", "1+2?"), ("assistant", "Adding.", [ADDED]), ("tool", "3"),
                  ("assistant", "```python\nprint(3)\n```"), ("user", "3\n"),
                  ("assistant", "3.")], 0),
    ("xlam", {"id": 1, "query": "1+2 and 3+4?", "tools": json.dumps([BARE]),
              "answers": json.dumps([{"name": n, "arguments": a} for n, a in (ADDED, ADDED_TOO)])},
     [("user", "1+2 and 3+4?"), ("assistant", "", [ADDED, ADDED_TOO])], 1),
    ("acecode", {"id": "1", "question": "Say a word.", "test_cases": ["assert"],
                 "inferences": INFERENCES}, ASKED, 0),
    ("humaneval", {"task_id": "H/0", "prompt": SOLVED[0], "canonical_solution": SOLVED[1],
                   "test": "assert one() == 1", "entry_point": "one"}, "".join(SOLVED), 0),
    ("opencode-instruct", {"id": "1", "input": "Say a word.", "output": "Word.",
                           "average_test_score": "1", "unit_tests": "[]"}, ASKED, 0),
    ("magicoder", {"lang": "python", "problem": "Say a word.", "solution": "Word.",
                   "raw_index": 1}, ASKED, 0),
    ("bfcl-prompts", {"id": "m_0", "question": [turns([("user", "1+2?")])], "function": [BARE]},
     [("user", "1+2?")], 1),
    ("spec-bench-prompts", {"question_id": 81, "category": "writing", "turns": ["One.", "Two."],
                            "reference": ["no"]}, [("user", "One."), ("user", "Two.")], 0),
    ("prompt-completion", {"prompt": "Say a word.", "completion": "Word."}, ASKED, 0),
    ("prompt-completion", {"instruction": "Say", "input": "a word.", "output": "Word."},
     [("user", "Say\n\na word."), ASKED[1]], 0),
    ("prompt-completion", {"prompt": turns(CHAT[:3]), "completion": turns(CHAT[3:])}, CHAT, 0),
    ("prompt-completion", {"input": turns(CHAT[:3]), "output": "See you.", "generator": "m"},
     CHAT, 0),
    ("prompts", {"prompt": "Say a word.", "chosen": "a", "rejected": "b"}, ASKED[:1], 0),
    ("code-rows", {"content": "x = 1\n", "lang": "Python", "licenses": ["MIT"]}, "x = 1\n", 0),
]  # fmt: skip
# Formats of whole files, tested on lines: the expected conversations.
TAU2 = {
    "info": {
        "environment_info": {"domain_name": "d", "policy": "Be brief."},
        "agent_info": {"implementation": "llm_agent", "llm": "some-model"},
    },
    "tasks": [{"id": "0"}],
    "simulations": [
        {"id": "s1", "task_id": "0", "messages": [
            {"role": "assistant", "content": "How can I help?", "tool_calls": None},
            {"role": "user", "content": "1+2 and 3+4?", "tool_calls": None},
            {"role": "assistant", "content": "Adding.", "tool_calls": [
                {"id": "c1", "name": "add", "arguments": {"a": 1, "b": 2},
                 "requestor": "assistant"},
                {"id": "c2", "name": "add", "arguments": {"a": 3, "b": 4},
                 "requestor": "assistant"}]},
            {"role": "tool", "id": "c2", "content": "7", "requestor": "assistant"},
            {"role": "tool", "id": "c1", "content": "3", "requestor": "assistant"},
            {"role": "assistant", "content": "3 and 7. Look at it."},
            {"role": "user", "content": None, "tool_calls": [
                {"id": "u1", "name": "look", "arguments": {}, "requestor": "user"}]},
            {"role": "tool", "id": "u1", "content": "seen", "requestor": "user"},
            {"role": "user", "content": "Good."},
            {"role": "assistant", "content": "Bye."}]},
        {"id": "s2", "task_id": "0", "messages": [{"role": "robot", "content": "x"}]},
    ],
}  # fmt: skip
LOG = {"isSidechain": False, "sessionId": "s", "userType": "external"}


def line(uuid: str, parent: str | None, speaker: str, content: Any, **more: Any) -> dict[str, Any]:
    """A line of a Claude Code log."""
    message = {"role": speaker, "content": content, **more.pop("message", {})}
    return {**LOG, "parentUuid": parent, "type": speaker, "uuid": uuid, "message": message, **more}


SAID = {"message": {"id": "m1", "model": "claude"}}
USE = BLOCKS[1]["content"]
RESULTS = BLOCKS[2]["content"]
CLAUDE = [
    {"type": "summary", "summary": "Adding", "leafUuid": "u7"},
    line("u1", None, "user", "1+2 and 3+4?"),
    line("u2", "u1", "assistant", USE[:2], **SAID),
    line("u3", "u2", "assistant", USE[2:3], **SAID),
    # The first result came before the second call was written, and hangs on its own call.
    line("u4", "u3", "user", RESULTS[:1]),
    line("u5", "u3", "assistant", USE[3:], **SAID),
    line("x1", None, "user", "Look.", isSidechain=True),
    line("x2", "x1", "assistant", "Seen.", isSidechain=True),
    line("u6", "u5", "user", RESULTS[1:]),
    line("o1", "u6", "assistant", "Abandoned.", message={"id": "m9", "model": "claude"}),
    line("u7", "u6", "assistant", "3 and 7.", message={"id": "m2", "model": "claude"}),
]
