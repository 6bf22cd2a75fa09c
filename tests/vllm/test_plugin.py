"""When the plugin acts, and above all when it does not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from build_tiny import build
from reference import model_runner

from mtp.serving.vllm_signatures import METHODS, MTP_MODEL, NAMES, V2_CHOICE, Survey, survey

KNOWN = Survey(problems=(), passes_index=False, wires_v2=True)


class DraftConfig(SimpleNamespace):
    def update(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


def draft_config(architecture: str = "Qwen3_5MoeMTP", num_layers: int | None = 4) -> DraftConfig:
    return DraftConfig(architectures=[architecture], n_predict=num_layers)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    from mtp.serving import vllm_plugin

    monkeypatch.delenv("MTP_GRAFT_ROUTING", raising=False)
    monkeypatch.setattr(vllm_plugin, "installed", lambda: KNOWN)
    return vllm_plugin


def test_marks_a_head_of_several_layers(plugin: Any) -> None:
    config = plugin.mark(draft_config())
    assert config.num_nextn_predict_layers == 4 and config.mtp_graft_routing == 4


@pytest.mark.parametrize(
    "config",
    [
        draft_config("DeepSeekMTPModel"),
        draft_config("InternS2MobiusMTP"),
        draft_config("EagleLlamaForCausalLM", None),
        draft_config(num_layers=1),
        DraftConfig(architectures=None),
    ],
)
def test_leaves_every_other_draft_alone(plugin: Any, config: DraftConfig) -> None:
    before = dict(vars(config))
    assert vars(plugin.mark(config)) == before


def test_can_be_switched_off(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTP_GRAFT_ROUTING", "off")
    assert not hasattr(plugin.mark(draft_config()), "mtp_graft_routing")


@pytest.mark.parametrize(
    "found",
    [
        Survey(problems=("version 0.99 is outside",), passes_index=False, wires_v2=True),
        Survey(problems=(), passes_index=True, wires_v2=True),
    ],
)
def test_leaves_unknown_and_already_routing_vllm_alone_and_says_so(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, found: Survey
) -> None:
    said: list[str] = []
    for level in ("error", "warning_once"):
        monkeypatch.setattr(plugin.logger, level, lambda text, *values: said.append(text % values))
    monkeypatch.setattr(plugin, "installed", lambda: found)
    plugin._loud_once.cache_clear()
    for _ in range(2):
        assert not hasattr(plugin.mark(draft_config()), "num_nextn_predict_layers")
    assert any("left" in text for text in said)
    if found.problems:
        assert len(said) == 1 and "NOT ROUTED" in said[0]


def test_registering_twice_wraps_once() -> None:
    from vllm.config import SpeculativeConfig
    from vllm.v1.worker.worker_base import WorkerBase

    from mtp.serving.vllm_plugin import register

    register()
    hooks = SpeculativeConfig.hf_config_override, WorkerBase.__init__
    register()
    assert (SpeculativeConfig.hf_config_override, WorkerBase.__init__) == hooks


def test_only_a_routed_engine_is_changed(
    engine: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MTP
    from vllm.v1.spec_decode.eagle import EagleProposer

    classes = dict(vars(Qwen3_5MTP)), dict(vars(EagleProposer))
    routed = model_runner(engine(tiny, 4)).drafter
    assert {"forward", "do_not_compile"} <= vars(routed.model).keys()
    assert routed.model.do_not_compile and routed.model.model.do_not_compile
    assert "propose" in vars(routed)
    assert (dict(vars(Qwen3_5MTP)), dict(vars(EagleProposer))) == classes

    one_layer = build(tmp_path / "one", num_mtp_layers=1)
    for folder, steps, switch in ((one_layer, 2, "on"), (tiny, 4, "off")):
        monkeypatch.setenv("MTP_GRAFT_ROUTING", switch)
        llm = engine(folder, steps)
        drafter = model_runner(llm).drafter
        assert "forward" not in vars(drafter.model) and "propose" not in vars(drafter)
        draft = llm.llm_engine.vllm_config.speculative_config.draft_model_config
        assert getattr(draft.hf_config, "num_nextn_predict_layers", None) is None


@pytest.fixture(scope="module")
def package() -> Path:
    import vllm

    return Path(vllm.__file__).parent


@pytest.fixture
def copied(package: Path, tmp_path: Path) -> Path:
    """The sources that the survey reads, to be spoiled."""
    for file in {*METHODS, *NAMES, V2_CHOICE}:
        target = tmp_path / "vllm" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package / file, target)
    return tmp_path / "vllm"


def test_knows_the_installed_vllm(package: Path, copied: Path) -> None:
    import vllm

    assert survey(package, vllm.__version__) == KNOWN
    assert survey(copied, vllm.__version__) == KNOWN


@pytest.mark.parametrize("version", ["0.26.9", "0.34.0", "1.0", "dev"])
def test_refuses_versions_it_was_not_checked_on(package: Path, version: str) -> None:
    assert "outside 0.27 to 0.33" in survey(package, version).problems[0]


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        (MTP_MODEL, "spec_step_idx: int = 0,\n    ) -> torch.Tensor:", ") -> torch.Tensor:",
         "Qwen3_5MultiTokenPredictor.forward"),
        ("v1/spec_decode/llm_base_proposer.py", "def set_inputs_first_pass(\n        self,",
         "def set_inputs_first_pass(\n        self, extra,", "takes (self, extra"),
        ("v1/spec_decode/llm_base_proposer.py", "def _sample_draft_tokens", "def _sample_drafts",
         "has no SpecDecodeBaseProposer._sample_draft_tokens"),
        ("v1/worker/gpu_input_batch.py", "num_tokens_no_spec", "renamed", "num_tokens_no_spec"),
    ],
)  # fmt: skip
def test_names_what_changed(copied: Path, file: str, old: str, new: str, complaint: str) -> None:
    text = (copied / file).read_text()
    assert old in text
    (copied / file).write_text(text.replace(old, new))
    assert any(complaint in problem for problem in survey(copied, "0.32.0").problems)


def test_sees_a_vllm_that_passes_the_index_on(copied: Path) -> None:
    text = (copied / MTP_MODEL).read_text()
    old = "input_ids, positions, hidden_states, intermediate_tensors, inputs_embeds\n"
    new = old.replace("\n", ", kwargs.get('spec_step_idx', 0)\n")
    assert old in text
    (copied / MTP_MODEL).write_text(text.replace(old, new))
    assert survey(copied, "0.32.0").passes_index


@pytest.mark.skipif(
    "MTP_VLLM_SOURCES" not in os.environ,
    reason="MTP_VLLM_SOURCES names no folder of unpacked wheels (VERSION/vllm/...)",
)
def test_knows_every_wheel_from_0_27_to_0_33() -> None:
    folders = sorted(p for p in Path(os.environ["MTP_VLLM_SOURCES"]).iterdir() if p.is_dir())
    found = {p.name: survey(p / "vllm", p.name) for p in folders}
    assert {v.rsplit(".", 1)[0] for v in found} >= {f"0.{minor}" for minor in range(27, 34)}
    assert {v: s.problems for v, s in found.items() if s.problems} == {}
    assert not any(s.passes_index for s in found.values())
    assert {v for v, s in found.items() if not s.wires_v2} <= {"0.27.0", "0.27.1"}
