"""vLLM plugin: run each MTP layer at its own speculative position.

Stock vLLM builds all layers of a Qwen3.5 MTP head and runs layer 0 at every position, since
`Qwen3_5MTP.forward` drops `spec_step_idx` (docs/serving.md). This plugin:

- marks the draft configuration of such a head with more than one layer, and sets
  `num_nextn_predict_layers` there, which makes vLLM plan for, and Model Runner V2 choose, its own
  multi-module speculator. The checkpoint's config stays as it is, harmless to a stock vLLM;
- after the weights are loaded, passes the index on in that one model, uncompiled, because a
  compiled forward has its first index baked in (CUDA graphs record the right layer and stay on);
- on Model Runner V1, gives the drafter the whole-window chain (`vllm_chain.py`).

Nothing is replaced in other engines of the process: the changes are made on the objects of a
marked engine. The mark travels to the worker processes inside the pickled configuration, so the
environment variable is read once, where the engine is configured.

`MTP_GRAFT_ROUTING=off` leaves vLLM as it is.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import vllm
from vllm.logger import init_logger

from mtp.serving.vllm_chain import WindowChain
from mtp.serving.vllm_signatures import Survey, survey

SWITCH = "MTP_GRAFT_ROUTING"
MARK = "mtp_graft_routing"
ARCHITECTURES = ("Qwen3_5MTP", "Qwen3_5MoeMTP")
# Below "vllm", so that vLLM's handlers print it.
logger = init_logger("vllm.mtp_graft")


def register() -> None:
    """Entry point of `vllm.general_plugins`; called in every vLLM process."""
    from vllm.config import SpeculativeConfig
    from vllm.v1.worker.worker_base import WorkerBase

    override = getattr(SpeculativeConfig, "hf_config_override", None)
    if override is None or not callable(getattr(WorkerBase, "__init__", None)):
        _loud_once(f"vLLM {vllm.__version__} has no SpeculativeConfig.hf_config_override")
        return
    if hasattr(override, MARK):
        return

    @functools.wraps(override)
    def marking_override(hf_config: Any, *args: Any, **kwargs: Any) -> Any:
        return mark(override(hf_config, *args, **kwargs))

    setattr(marking_override, MARK, True)
    SpeculativeConfig.hf_config_override = staticmethod(marking_override)

    initialise = WorkerBase.__init__

    @functools.wraps(initialise)
    def routing_init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, vllm_config, *args, **kwargs)
        if num_routed_layers(vllm_config) > 1:
            load_model = self.load_model

            @functools.wraps(load_model)
            def load_and_route(*load_args: Any, **load_kwargs: Any) -> Any:
                result = load_model(*load_args, **load_kwargs)
                route(self)
                return result

            self.load_model = load_and_route

    WorkerBase.__init__ = routing_init


def mark(hf_config: Any) -> Any:
    """Mark a draft configuration that this plugin shall route; returns it, as vLLM's hook does."""
    architectures = getattr(hf_config, "architectures", None) or [""]
    num_layers = getattr(hf_config, "n_predict", None) or 0
    if architectures[0] not in ARCHITECTURES or num_layers < 2:
        return hf_config
    if os.environ.get(SWITCH, "on").lower() == "off":
        logger.warning_once("mtp-graft: %s=off, so layer 0 serves every position", SWITCH)
        return hf_config
    found = installed()
    if found.problems:
        _loud_once("; ".join(found.problems))
    elif found.passes_index:
        logger.warning_once(
            "mtp-graft: vLLM %s passes spec_step_idx on by itself; left alone. Prove which layers "
            "run with `mtp verify --vllm`",
            vllm.__version__,
        )
    else:
        hf_config.update({"num_nextn_predict_layers": num_layers, MARK: num_layers})
    return hf_config


@functools.cache
def installed() -> Survey:
    """What the running vLLM looks like."""
    return survey(Path(vllm.__file__).parent, vllm.__version__)


def num_routed_layers(vllm_config: Any) -> int:
    """MTP layers of an engine that `mark` chose, else 0."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    return int(getattr(getattr(draft, "hf_config", None), MARK, 0))


def route(worker: Any) -> None:
    """Make the drafter that `worker` has just loaded run one layer a position.

    Raises:
        RuntimeError: the engine was planned for routing, and its drafter is not the expected one.
    """
    runner, vllm_config = worker.model_runner, worker.vllm_config
    # Only the last pipeline stage has a drafter.
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    if drafter is None or vllm_config.speculative_config.num_speculative_tokens == 1:
        return
    v1, kind = hasattr(runner, "drafter"), type(drafter).__name__
    if not v1 and not installed().wires_v2:
        _loud_once(
            f"Model Runner V2 of vLLM {vllm.__version__} never chooses its multi-module"
            " speculator; use 0.28 or later, or VLLM_USE_V2_MODEL_RUNNER=0"
        )
        return
    model = drafter.model.unwrap() if hasattr(drafter.model, "unwrap") else drafter.model
    expected = "EagleProposer" if v1 else "MultiModuleMTPSpeculator"
    if kind != expected or not hasattr(model.model, "num_mtp_layers"):
        raise RuntimeError(
            f"mtp-graft: expected a Qwen3.5 MTP model in {expected}, found"
            f" {type(model).__name__} in {kind}; set {SWITCH}=off and report this"
        )
    pass_index_on(model)
    if v1:
        drafter.propose = WindowChain(drafter, runner).propose
    if worker.rank == vllm_config.parallel_config.world_size - 1:
        _log_engine(vllm_config, "V1, whole-window chain" if v1 else f"V2, {kind}")


def pass_index_on(model: Any) -> None:
    """Make this `Qwen3_5MTP` hand `spec_step_idx` to its predictor, uncompiled."""

    def forward(
        input_ids: Any,
        positions: Any,
        hidden_states: Any,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        spec_step_idx: int = 0,
        **kwargs: Any,
    ) -> Any:
        return model.model(
            input_ids, positions, hidden_states, intermediate_tensors, inputs_embeds, spec_step_idx
        )

    model.forward = forward
    model.do_not_compile = model.model.do_not_compile = True


def _log_engine(vllm_config: Any, runner: str) -> None:
    num_steps = vllm_config.speculative_config.num_speculative_tokens
    num_layers = num_routed_layers(vllm_config)
    layers = ", ".join(f"{k + 1}: mtp.layers.{k % num_layers}" for k in range(num_steps))
    logger.info(
        "mtp-graft: routed on vLLM %s, Model Runner %s; position %s (%s)",
        vllm.__version__, runner, layers, Path(__file__).resolve(),
    )  # fmt: skip
    if num_steps > num_layers:
        logger.warning(
            "mtp-graft: %d positions over %d layers: each further round overwrites the caches of "
            "the first; num_speculative_tokens=%d is what the head was trained for",
            num_steps, num_layers, num_layers,
        )  # fmt: skip
    if vllm_config.speculative_config.disable_padded_drafter_batch and "V1" in runner:
        logger.warning(
            "mtp-graft: with disable_padded_drafter_batch, cache entries made from rejected "
            "drafts are not run again; acceptance is lower than it could be"
        )


@functools.cache
def _loud_once(reason: str) -> None:
    logger.error(
        "mtp-graft: NOT ROUTED, vLLM is left as it is and layer 0 serves every position: %s", reason
    )
