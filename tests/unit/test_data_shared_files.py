"""The real files of /work/shared/data, each by its recognised format; skipped where absent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from data_helpers import make_base

from mtp.data.conversation import Conversation, RowError, checked, cut_at_mismatch
from mtp.data.mask import render_rows
from mtp.data.render import Renderer, load_tokenizer
from mtp.data.sources import Reading, read_source

SHARED = Path("/work/shared/data")
# file: (formats of its rows, conversations or documents, refused rows, how many are prompts only)
FILES = {
    "spec_bench/question.jsonl": ({"spec-bench-prompts": 480}, 480, 0, 480),
    "agent_traces/sweagent_fncall_marshmallow.traj": ({"swe-agent": 1}, 1, 0, 0),
    "agent_traces/sweagent_thought_action_pydicom.traj": ({"swe-agent": 1}, 1, 0, 0),
    "agent_traces/miniswe_github_issue.traj.json": ({"message-list": 1}, 1, 0, 0),
    "agent_traces/openhands_output_multi_swe.jsonl": ({"openhands-events": 3}, 3, 0, 0),
    "agent_traces/openhands_events_2048.json": ({"openhands-events": 1}, 1, 0, 0),
    "agent_traces/openhands_sdk_llmlog_fncall.json": ({"request-log": 1}, 1, 0, 0),
    "agent_traces/openhands_sdk_llmlog_nonfncall.json": ({"request-log": 1}, 1, 0, 0),
    "agent_traces/hermes_function_calling_examples.json": ({"hermes": 2, "sharegpt": 2}, 3, 1, 0),
    "agent_traces/glaive_toolcall_en_sharegpt.json": ({"sharegpt": 250}, 250, 0, 0),
    "agent_traces/sharegpt_plain_long_chat.json": ({"sharegpt": 1}, 1, 0, 0),
    "agent_traces/taubench_airline_gpt4o.json": ({"tau-bench": 60}, 60, 0, 0),
    "agent_traces/bfcl_v4_multiple.json": ({"bfcl-prompts": 200}, 200, 0, 200),
    "agent_traces/nemogym_workplace_rollouts.jsonl": ({"openai-responses": 5}, 5, 0, 0),
    "agent_traces/claude_code_session.jsonl": ({"claude-code": 53}, 3, 0, 0),
    "agent_traces/swe_traces_like.parquet": ({"trajectory": 4}, 4, 0, 0),
    "code/HumanEval.jsonl.gz": ({"humaneval": 164}, 164, 0, 0),
    "code/oasst_code_prompt_completion.jsonl": ({"prompt-completion": 151}, 151, 0, 0),
    "code/acecode_one_record.jsonl": ({"acecode": 1}, 1, 0, 0),
    "code/nemogym_text_to_sql_rollouts.jsonl": ({"openai-responses": 5}, 5, 0, 0),
}


@pytest.fixture(scope="module")
def items():
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}")
    return {name: list(read_source(SHARED / name, Counter(), Reading())) for name in FILES}


def test_all_files_are_here(items):
    found = {str(path.relative_to(SHARED)) for path in SHARED.rglob("*") if path.is_file()}
    assert found - {"README.md"} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_file_goes_in_by_its_format(items, name):
    formats, num_values, num_refused, num_prompts = FILES[name]
    counted: Counter[str] = Counter()
    for item in items[name]:
        counted[item.format] += item.num_rows
    assert counted == formats
    values = [item.value for item in items[name] if not isinstance(item.value, RowError)]
    assert (len(values), len(items[name]) - len(values)) == (num_values, num_refused)
    conversations = [value for value in values if isinstance(value, Conversation)]
    assert sum(value.is_prompts_only for value in conversations) == num_prompts
    for value in conversations:
        if value.is_prompts_only:
            continue
        whole = cut_at_mismatch(value)
        assert whole == value, "no call of these files lacks its result"
        checked(whole, allow_missing_tools=True)


def test_what_is_peculiar_about_each(items):
    """The README's last column, where a reader had to mind it."""

    def first(name):
        return items[name][0].value

    fncall = first("agent_traces/sweagent_fncall_marshmallow.traj")
    assert fncall.messages[3].tool_call_id == "call_9diWc1DYm4RLmPfHgIaP2wd"
    assert sum(message.role == "assistant" for message in fncall.messages) == 13
    old = first("agent_traces/sweagent_thought_action_pydicom.traj")
    assert old.category == "agent" and "```" in old.messages[3].content and not old.tools
    events = first("agent_traces/openhands_output_multi_swe.jsonl")
    assert sum(len(message.tool_calls) for message in events.messages) == 23
    assert len(events.tools) == 4 and "llama-4-maverick" in events.teacher
    as_text = first("agent_traces/openhands_sdk_llmlog_nonfncall.json")
    assert as_text.messages[-1].content.endswith("</parameter>\n</function>")
    assert not any(message.tool_calls for message in as_text.messages)
    refused = items["agent_traces/hermes_function_calling_examples.json"][1]
    assert str(refused.value) == "message 1: a tool call without a function name"
    glaive = [item.value for item in items["agent_traces/glaive_toolcall_en_sharegpt.json"]]
    assert sum(len(m.tool_calls) for value in glaive for m in value.messages) == 170
    tau = [item.value for item in items["agent_traces/taubench_airline_gpt4o.json"]]
    assert sum(len(m.tool_calls) for value in tau for m in value.messages) == 361
    main, *sides = [item.value for item in items["agent_traces/claude_code_session.jsonl"]]
    assert len(sides) == 2 and [len(m.tool_calls) for m in main.messages[4:5]] == [3]
    solved = first("code/HumanEval.jsonl.gz")
    compile(solved.text, "HumanEval/0", "exec")
    assert "check(" not in solved.text and "METADATA" not in solved.text
    best = first("code/acecode_one_record.jsonl")
    assert best.teacher == "codellama_instruct" and "def parse_tokens" in best.messages[-1].content
    judged = first("code/nemogym_text_to_sql_rollouts.jsonl")
    assert [message.role for message in judged.messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize("template", ["qwen35", "drops_thinking"])
def test_rows_are_those_of_plain_renders(items, tmp_path, template):
    """One conversation of each file and each twentieth: the same with and without memory."""
    tokenizer = load_tokenizer(make_base(tmp_path / "base", template))
    fast, plain = Renderer(tokenizer, num_checked=0), Renderer(tokenizer)
    plain.template(()).remembering = None
    num_rows = 0
    for some in items.values():
        for item in some[::20]:
            value = item.value
            if isinstance(value, Conversation) and not value.is_prompts_only:
                conversation = checked(value, allow_missing_tools=True)
                rows = render_rows(conversation, fast)
                assert rows == render_rows(conversation, plain)
                num_rows += len(rows)
    assert num_rows > 30 and fast.template(()).remembering is not None
