"""Secrets are masked where they stand, never shown, and look-alikes are left alone."""

from __future__ import annotations

import base64
import json
from collections import Counter

import pytest
from data_helpers import make_base, write_jsonl

from graft.errors import UserError
from mtp.data.conversation import Conversation, Document, Message, ToolCall
from mtp.data.prepare import prepare

pytest.importorskip("detect_secrets", reason="the optional extra `scan` is not installed")

from mtp.data.secrets import masked


def part(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


# Put together here, so that no scanner of this repository takes them for real ones.
AWS = "AKIA" + "QWERTYUIOPASDFGH"
GITHUB = "gh" + "p_" + "a1B2" * 9
SLACK = "xox" + "b-123456789012-123456789012-" + "aB3" * 8
STRIPE = "sk" + "_live_" + "a1B2c3" * 4
JWT = f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part({'sub': '1234567890'})}.{'aB3' * 14}"
KEY = "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIE\nabc/+\n-----END RSA PRIVATE" + " KEY-----"
SECRETS = {
    "AWS Access Key": AWS, "GitHub Token": GITHUB, "Slack Token": SLACK,
    "Stripe Access Key": STRIPE, "JSON Web Token": JWT, "private key": KEY,
    "e-mail address": "jane.doe@company.org", "Public IP (ipv4)": "8.8.4.4",
}  # fmt: skip


@pytest.mark.parametrize("kind", SECRETS)
def test_each_kind_is_masked_and_nothing_else(kind):
    text = f"before {SECRETS[kind]} after"
    item, counts = masked(Document(text=text))
    assert item.text == f"before <{kind} removed> after"
    assert counts == {kind: 1}


def test_only_the_password_of_a_url_goes():
    item, _ = masked(Document(text="pass = 1; get('ftp://user:pass@host/pass')"))
    assert item.text == "pass = 1; get('ftp://user:<Basic Auth Credentials removed>@host/pass')"


@pytest.mark.parametrize(
    "text",
    [
        'password = get_password("x")',
        "sha256 = 'e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'",
        "git@github.com:a/b.git and user@example.com and x@127.0.0.1, 10.0.0.1, 127.0.0.1",
        "@decorator\ndef f(a @ b): ...",
        "eyJhb.eyJ.zzz",
        "-----BEGIN PUBLIC KEY-----",
    ],
)
def test_look_alikes_stay(text):
    item, counts = masked(Document(text=text))
    assert item.text == text and not counts


def test_arguments_stay_json_and_schemas_are_scanned():
    arguments = json.dumps({"cmd": f'echo "{AWS}"\n{KEY}', "n": [1, None]})
    call = ToolCall(name="run", arguments=arguments)
    tool = json.dumps({"type": "function", "function": {"name": "f", "description": GITHUB}})
    messages = (
        Message(role="user", content=f"use {AWS}"),
        Message(role="assistant", reasoning=GITHUB, tool_calls=(call,)),
    )
    item, counts = masked(Conversation(messages=messages, tools=(tool,)))
    parsed = json.loads(item.messages[1].tool_calls[0].arguments)
    assert parsed["cmd"] == 'echo "<AWS Access Key removed>"\n<private key removed>'
    assert parsed["n"] == [1, None]
    assert counts == Counter({"AWS Access Key": 2, "GitHub Token": 2, "private key": 1})
    assert AWS not in repr(item) and GITHUB not in repr(item)
    clean = Conversation(messages=(Message(role="user", content="a"),), tools=('{"b":  1}',))
    assert masked(clean) == (clean, Counter())


def test_prepare_masks_or_drops_and_never_prints(tmp_path):
    def row(name, text):
        turns = [{"role": "user", "content": "q " + name}, {"role": "assistant", "content": text}]
        return {"id": name, "messages": turns}

    rows = [row("a", f"key {AWS}, {AWS}"), row("b", "nothing"), row("c", f"mail {GITHUB}")]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    base = make_base(tmp_path / "base", "chatml")
    reports = {
        scan: prepare(base, [source], tmp_path / str(scan), scan=scan, held_out_percent=0)
        for scan in ("mask", "drop", None)
    }
    found = {"AWS Access Key": 2, "GitHub Token": 1}
    assert reports["mask"].secrets == found and reports["mask"].train.conversations == 3
    assert reports["drop"].secrets == found and reports["drop"].train.conversations == 1
    assert reports["drop"].dropped == {"holds a secret": 2}
    assert not reports[None].secrets and reports[None].train.conversations == 3
    for scan, report in reports.items():
        shown = report.as_text() + (tmp_path / str(scan) / "data.json").read_text()
        assert AWS not in shown and GITHUB not in shown
    assert "AWS Access Key 2" in reports["mask"].as_text()
    with pytest.raises(UserError, match="--scan mask or drop"):
        prepare(base, [source], tmp_path / "x", scan="all")
