"""vLLM's drafts, step by step, against the chain in plain torch (float32, so ties hardly occur)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from build_tiny import TINY_NOISE, build
from comparison import LENGTHS, Comparison, prompts
from reference import Recorder, ReferenceChain

from mtp.serving.vllm_history import History

CASES: dict[str, dict[str, Any]] = {
    "one batch": {"max_num_batched_tokens": 512, "max_num_seqs": 16},
    "chunks, joining and leaving": {"max_num_batched_tokens": 24, "max_num_seqs": 3},
    "preemption": {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "num_gpu_blocks_override": 16,
        "block_size": 32,
        "max_model_len": 128,
    },
    "prefix caching": {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "enable_prefix_caching": True,
        "block_size": 32,
    },
}


def serve(engine: Any, folder: Path, num_steps: int, shared_prefix: int = 0, **options: Any) -> Any:
    from vllm import SamplingParams

    llm = engine(folder, num_steps, **options)
    recorder = Recorder().attach(llm)
    parameters = [
        SamplingParams(temperature=0, max_tokens=16 + 3 * i, ignore_eos=True, detokenize=False)
        for i in range(len(LENGTHS))
    ]
    outputs = llm.generate(prompts(shared_prefix), parameters, use_tqdm=False)
    return llm, recorder, outputs


@pytest.fixture(scope="module")
def reference(tiny: Path) -> ReferenceChain:
    return ReferenceChain(tiny)


@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_the_reference_chain(
    case: str, engine: Any, tiny: Path, reference: ReferenceChain
) -> None:
    shared_prefix = 70 if case == "prefix caching" else 0
    llm, recorder, outputs = serve(engine, tiny, 4, shared_prefix, **CASES[case])
    found = Comparison(reference, recorder.drafts, outputs)
    assert found.num_wrong == 0
    assert found.num_ties <= found.num_drafts // 100
    assert found.num_drafts > 60
    assert set(found.accepted) == {0, 1, 2, 3, 4}, "not every length of rejection occurred"
    if case == "chunks, joining and leaving":
        assert recorder.num_chunk_ends >= 5
        assert recorder.batch_sizes == {1, 2, 3}
    if case == "preemption":
        assert counter(llm, "vllm:num_preemptions") > 0
    if case == "prefix caching":
        assert counter(llm, "vllm:prefix_cache_hits") > 0


@pytest.mark.parametrize(("num_layers", "num_steps"), [(4, 2), (2, 2), (6, 6), (3, 3), (4, 1)])
def test_other_numbers_of_layers_and_steps(
    num_layers: int, num_steps: int, engine: Any, tmp_path: Path
) -> None:
    folder = build(tmp_path, num_mtp_layers=num_layers, **TINY_NOISE)
    _, recorder, outputs = serve(engine, folder, num_steps, **CASES["chunks, joining and leaving"])
    found = Comparison(ReferenceChain(folder), recorder.drafts, outputs)
    assert found.num_drafts > 60
    assert found.num_ties <= found.num_drafts // 100
    # One step is stock vLLM's own loop, which appends a wrong token at the end of a prompt chunk.
    assert found.num_wrong == 0 or num_steps == 1


def test_more_steps_than_layers_runs_and_loses_nothing(engine: Any, tiny: Path) -> None:
    _, recorder, outputs = serve(engine, tiny, 8, **CASES["one batch"])
    assert all(len(draft.tokens) == 8 for draft in recorder.drafts)
    _, _, plain = serve(engine, tiny, 4, **CASES["one batch"])
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]


@pytest.mark.parametrize("broken", ["reprefill", "known tokens"])
def test_the_comparison_sees_a_broken_chain(
    broken: str, engine: Any, tiny: Path, reference: ReferenceChain, monkeypatch: Any
) -> None:
    """The negative control of everything above."""
    from mtp.serving.vllm_chain import WindowChain

    if broken == "reprefill":
        original = WindowChain.__init__
        monkeypatch.setattr(
            WindowChain, "__init__", lambda self, p, r: original(self, p, r, reprefill=False)
        )
    else:
        monkeypatch.setattr(WindowChain, "_known_tokens", lambda self, metadata: None)
    case = "one batch" if broken == "reprefill" else "chunks, joining and leaving"
    _, recorder, outputs = serve(engine, tiny, 4, **CASES[case])
    assert Comparison(reference, recorder.drafts, outputs).num_wrong > 0


def test_a_full_table_forgets_only_requests_outside_the_batch() -> None:
    table = History([torch.arange(8), torch.zeros(8, 2)], num_rows=2, depth=3)
    first = table.rows(["a", "b"], alive={"a", "b"})
    assert sorted(first.tolist()) == [0, 1]
    again = table.rows(["b", "c"], alive={"a", "b", "c"})
    assert again.tolist() == [first[1], first[0]]
    assert table.row_of.keys() == {"b", "c"}


def test_history_keeps_the_newest_rows_across_windows() -> None:
    ids = torch.arange(100, 120)
    table = History([ids], num_rows=1, depth=3)
    row = table.rows(["a"], alive={"a"})
    zero = torch.tensor([0])
    table.push(row, [ids], starts=zero, first=zero, num_new=torch.tensor([2]))
    assert table.count.tolist() == [2] and table.columns[0][0, 1:].tolist() == [100, 101]
    table.push(row, [ids], torch.tensor([7]), first=torch.tensor([2]), num_new=torch.tensor([2]))
    assert table.count.tolist() == [3] and table.columns[0][0].tolist() == [101, 107, 108]
    # A window that does not follow on: what is older is no longer known.
    table.push(row, [ids], torch.tensor([3]), first=torch.tensor([9]), num_new=torch.tensor([1]))
    assert table.count.tolist() == [1] and table.end.tolist() == [10]


def counter(llm: Any, name: str) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == name)
