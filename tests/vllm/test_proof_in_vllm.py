"""`mtp verify --vllm` on the demo: all three verdicts, each from a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp.serving.proof_prompts import built_in_prompts
from mtp.serving.routing_proof import RoutingProof, prove_routing, scrambled_twin
from mtp.serving.vllm_plugin import SWITCH


def proof_of(checkpoint: Path, vllm_python: Path) -> RoutingProof:
    return prove_routing(checkpoint, built_in_prompts(checkpoint), vllm_python=vllm_python)


def test_with_the_plugin_the_layers_are_routed(
    demo: Path, vllm_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    siblings = set(demo.iterdir())
    proof = proof_of(demo / "grafted", vllm_python)
    assert (proof.verdict, proof.routed_layers) == ("routed", 4), proof.as_text()
    assert max(proof.twin["cumulative"][1:]) < 0.03  # noise is right now and then
    assert proof.same_tokens == proof.num_prompts
    assert set(demo.iterdir()) == siblings


def test_without_it_only_layer_0_runs(
    demo: Path, vllm_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly: noise in the other layers moves no counter."""
    monkeypatch.setenv(SWITCH, "off")
    proof = proof_of(demo / "grafted", vllm_python)
    assert (proof.verdict, proof.routed_layers) == ("layer 0 only", 0), proof.as_text()
    counters = "num_drafts", "accepted_per_position"
    assert [proof.original[k] for k in counters] == [proof.twin[k] for k in counters]
    assert proof.same_tokens == proof.num_prompts


def test_a_head_that_is_noise_itself_proves_nothing(
    demo: Path, vllm_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    with scrambled_twin(demo / "grafted") as noise:
        proof = proof_of(noise, vllm_python)
    assert proof.verdict == "broken" and "too little to compare" in proof.reason, proof.as_text()
