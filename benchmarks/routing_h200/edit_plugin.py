"""Copy mtp/ with an edited plugin: `python edit_plugin.py FROM TO compiled|counted`.

For the benchmark alone. FROM holds the folder `mtp`. "compiled": would routed be faster if its
forward were compiled, once for each index? vLLM drops the guards of what it compiles, so the index
would be frozen; torch.compile by itself keeps them. "counted": how often does the plugin's Python
run? Each call adds a byte to the file that MTP_GRAFT_CALLS names.
"""

import shutil
import sys
from pathlib import Path

OLD = """        return model.model(
            input_ids, positions, hidden_states, intermediate_tensors, inputs_embeds, spec_step_idx
        )
"""
COMPILED = """        k = spec_step_idx % len(compiled)
        with ir.enable_torch_wrap(False):  # vLLM's norms as plain torch, so that they fuse
            return compiled[k](input_ids, positions, hidden_states, inputs_embeds)

    import torch
    from vllm import ir

    torch._dynamo.config.recompile_limit = 64  # all indexes share one code object

    def of_index(k: int) -> Any:
        def run(input_ids: Any, positions: Any, hidden_states: Any, inputs_embeds: Any) -> Any:
            predictor = model.model
            return type(predictor).forward(
                predictor, input_ids, positions, hidden_states, None, inputs_embeds, k
            )

        return torch.compile(run, dynamic=True)

    compiled = [of_index(k) for k in range(model.model.num_mtp_layers)]
"""
COUNTED = (
    """        with open(os.environ["MTP_GRAFT_CALLS"], "ab") as calls:
            calls.write(b".")
"""
    + OLD
)
EDITS = {"compiled": COMPILED, "counted": COUNTED}


def main(source: Path, target: Path, kind: str) -> None:
    shutil.copytree(source / "mtp", target / "mtp", ignore=shutil.ignore_patterns("__pycache__"))
    path = target / "mtp" / "serving" / "vllm_plugin.py"
    text = path.read_text()
    if text.count(OLD) != 1:
        sys.exit(f"{path}: expected once, found {text.count(OLD)} times:\n{OLD}")
    path.write_text(text.replace(OLD, EDITS[kind]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
