"""Copy vLLM and edit the copy so that it routes by itself: `python edit_vllm.py FROM TO`.

For the benchmark alone: what the plugin does at run time, written into vLLM's files instead, to
measure what the plugin itself costs. FROM holds the folder `vllm`. Nothing of this is published.
"""

import re
import shutil
import sys
from pathlib import Path

EDITS = {
    "vllm/model_executor/models/qwen3_5_mtp.py": [
        (
            "        hidden_states = self.model(\n"
            "            input_ids, positions, hidden_states, intermediate_tensors, inputs_embeds\n"
            "        )",
            "        hidden_states = self.model(\n"
            "            input_ids, positions, hidden_states, intermediate_tensors,\n"
            "            inputs_embeds, kwargs.get('spec_step_idx', 0)\n"
            "        )",
        ),
    ],
    "vllm/config/speculative.py": [
        (
            '                    "architectures": ["Qwen3_5MoeMTP" if is_moe else "Qwen3_5MTP"],\n',
            '                    "architectures": ["Qwen3_5MoeMTP" if is_moe else "Qwen3_5MTP"],\n'
            '                    "num_nextn_predict_layers": n_predict,\n',
        ),
    ],
}
MTP_MODEL = "vllm/model_executor/models/qwen3_5_mtp.py"
# It compiles the forward, which freezes the first index.
DECORATOR = re.compile(r"^@support_torch_compile\(\n.*?^\)\n", re.M | re.S)


def main(source: Path, target: Path) -> None:
    shutil.copytree(source, target, symlinks=True)
    for name, edits in EDITS.items():
        path = target / name
        text = path.read_text()
        for old, new in edits:
            if text.count(old) != 1:
                sys.exit(f"{name}: expected once, found {text.count(old)} times:\n{old}")
            text = text.replace(old, new)
        path.write_text(text)
    path = target / MTP_MODEL
    text, num_removed = DECORATOR.subn("", path.read_text())
    if num_removed != 2:
        sys.exit(f"{MTP_MODEL}: expected 2 decorators, removed {num_removed}")
    path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
