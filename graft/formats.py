"""What quantized tensors mean.

NVFP4 (modelopt): a weight [out, in] is stored as U8 [out, in/2], two 4-bit codes a byte with the
even column in the low nibble; `weight_scale` F8_E4M3 [out, in/16], one for 16 columns;
`weight_scale_2` F32 [], one for the tensor; `input_scale` F32 [] for the activations.
value = code * weight_scale * weight_scale_2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from graft.errors import UserError
from graft.index import read_json
from graft.layout import Shape, head_tensor_shapes, is_moe
from graft.reader import Checkpoint

if TYPE_CHECKING:
    import torch

Form = Literal["bf16-fused", "bf16-per-expert", "nvfp4-modelopt"]
FORMS: tuple[Form, ...] = ("bf16-fused", "bf16-per-expert", "nvfp4-modelopt")
NVFP4_BLOCK = 16
NVFP4_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NVFP4_SCALES = ("weight_scale", "weight_scale_2", "input_scale")


def dequantize_nvfp4(
    weight: torch.Tensor, weight_scale: torch.Tensor, weight_scale_2: torch.Tensor
) -> torch.Tensor:
    """Give back the float32 values of one NVFP4 matrix.

    Args:
        weight: U8 [out, in/2].
        weight_scale: float8_e4m3fn [out, in/16], not swizzled.
        weight_scale_2: float32 [].

    Returns:
        float32 [out, in].
    """
    import torch

    table = torch.tensor(NVFP4_CODES + tuple(-code for code in NVFP4_CODES))
    codes = torch.stack([weight & 0xF, weight >> 4], dim=-1).reshape(weight.shape[0], -1)
    blocks = table[codes.int()].reshape(weight.shape[0], -1, NVFP4_BLOCK)
    scales = weight_scale.float() * weight_scale_2.float()
    return (blocks * scales[..., None]).reshape(weight.shape[0], -1)


def dequantize_head(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The BF16 per-expert twin of an NVFP4 head; unquantized tensors pass through."""
    import torch

    twin: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind in NVFP4_SCALES:
            continue
        if kind == "weight" and f"{module}.weight_scale" in tensors:
            scale, scale_2 = (tensors[f"{module}.{s}"] for s in ("weight_scale", "weight_scale_2"))
            tensor = dequantize_nvfp4(tensor, scale, scale_2).to(torch.bfloat16)
        twin[name] = tensor
    return twin


def head_form(names: Iterable[str]) -> Form:
    """In which form these head tensors are stored, from their names (dense counts as fused)."""
    names = list(names)
    if any(".experts." in name and name.endswith(".weight_scale") for name in names):
        return "nvfp4-modelopt"
    per_expert = any(".experts." in name and name.endswith("_proj.weight") for name in names)
    return "bf16-per-expert" if per_expert else "bf16-fused"


def head_tensors(
    text_config: Mapping[str, Any], num_layers: int, form: Form
) -> dict[str, tuple[str, Shape]]:
    """Names, dtypes (as safetensors spells them) and shapes of a complete head in `form`.

    Raises:
        UserError: for an NVFP4 head on a base without experts.
    """
    if form == "bf16-fused":
        shapes = head_tensor_shapes(text_config, num_layers, "fused")
        return {name: ("BF16", shape) for name, shape in shapes.items()}
    if form == "nvfp4-modelopt" and not is_moe(text_config):
        raise UserError(
            "a mixture-of-experts base for a head with NVFP4 experts",
            "a dense base",
            "graft the BF16 head",
        )
    wanted: dict[str, tuple[str, Shape]] = {}
    for name, shape in head_tensor_shapes(text_config, num_layers, "per_expert").items():
        if form == "nvfp4-modelopt" and ".mlp.experts." in name:
            rows, columns = shape
            module = name.removesuffix(".weight")
            wanted[name] = ("U8", (rows, columns // 2))
            wanted[f"{module}.weight_scale"] = ("F8_E4M3", (rows, columns // NVFP4_BLOCK))
            wanted[f"{module}.weight_scale_2"] = ("F32", ())
            wanted[f"{module}.input_scale"] = ("F32", ())
        else:
            wanted[name] = ("BF16", shape)
    return wanted


def quantization_blocks(
    checkpoint: Checkpoint,
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """`quantization_config` of config.json and the contents of `hf_quant_config.json`, or None."""
    block = checkpoint.config.get("quantization_config")
    block = block if block is not None else checkpoint.text_config.get("quantization_config")
    file = checkpoint.folder / "hf_quant_config.json"
    return block, read_json(file) if file.exists() else None


def describe_quantization(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The base's quantization in two words ({"method", "algo"}), or None if it has none."""
    block, file = quantization_blocks(checkpoint)
    inner = (file or {}).get("quantization", {})
    if not block and not inner:
        return None
    block = block or {}
    algo = block.get("quant_algo") or inner.get("quant_algo") or block.get("format")
    return {"method": block.get("quant_method", "modelopt"), "algo": algo}
