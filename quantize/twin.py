"""The BF16 twin of an NVFP4 head, for engines without NVFP4 kernels, as on a CPU, and to compare.

Matrix by matrix from file to file: a full-size head takes 6.7 GB in BF16, and none of it need be in
memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graft.convert import convert_head
from graft.errors import UserError
from graft.formats import Form
from graft.index import write_json
from graft.manifest import HEAD_METADATA, HEAD_WEIGHTS, HeadFolder
from graft.place import require_space
from graft.staging import staged_folder
from graft.writer import write_shard
from quantize.head_source import require_sound

SCHEMA_VERSION = 1
TWIN: Form = "bf16-per-expert"


def dequantize(head_folder: Path, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the BF16 twin of an NVFP4 head.

    Args:
        head_folder: an NVFP4 head in any of its forms.
        out: the head folder to write.
        overwrite: replace an existing `out`.

    Returns:
        Where, the form it was made from, and bytes of tensors before and after.

    Raises:
        UserError: the head is not NVFP4 or not whole, or `out` cannot be written.
    """
    source = HeadFolder(head_folder)
    if not source.form.startswith("nvfp4"):
        raise UserError(
            "an NVFP4 head", f"form {source.metadata['form']!r}", "use it as it is: it is BF16"
        )
    with staged_folder(
        out, overwrite=overwrite, sources=[head_folder], mark=HEAD_METADATA
    ) as staging:
        require_sound(source)
        tensors = convert_head(source.infos(), source.form, TWIN)
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        require_space(staging, num_bytes)
        write_shard(staging / HEAD_WEIGHTS, tensors)
        metadata = {**source.metadata, "form": TWIN, "quantization": None}
        write_json(staging / HEAD_METADATA, metadata)
    return {
        "schema_version": SCHEMA_VERSION,
        "out": str(out),
        "form_before": source.form,
        "bytes_before": sum(info.nbytes for info in source.infos()),
        "bytes_after": num_bytes,
    }
