"""What quantized tensors mean.

NVFP4 (modelopt): a weight [out, in] is stored as U8 [out, in/2], two 4-bit codes a byte with the
even column in the low nibble; `weight_scale` F8_E4M3 [out, in/16], one for 16 columns;
`weight_scale_2` F32 [], one for the tensor; `input_scale` F32 [] for the activations.
value = code * weight_scale * weight_scale_2.

compressed-tensors holds the same bytes as `weight_packed` and `weight_scale`, and the reciprocals
of both tensor scales as `weight_global_scale` and `input_global_scale`, F32 [1]. W4A16 is either
without the input scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from graft.config_kinds import check_quantization
from graft.errors import UserError
from graft.index import read_json
from graft.layout import Shape, head_tensor_shapes, is_moe
from graft.reader import Checkpoint

if TYPE_CHECKING:
    import torch

Form = Literal[
    "bf16-fused",
    "bf16-per-expert",
    "nvfp4-modelopt",
    "nvfp4-modelopt-w4a16",
    "nvfp4-compressed-tensors",
    "nvfp4-compressed-tensors-w4a16",
]
FORMS: tuple[Form, ...] = get_args(Form)
NVFP4_BLOCK = 16
NVFP4_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NVFP4_SCALES = (
    "weight_scale", "weight_scale_2", "input_scale", "weight_global_scale", "input_global_scale",
)  # fmt: skip
# Of each NVFP4 form: weight, its tensor scale, the input scale if any, and the scales' shape.
NVFP4_PARTS: dict[Form, tuple[str, str, str | None, Shape]] = {
    "nvfp4-modelopt": ("weight", "weight_scale_2", "input_scale", ()),
    "nvfp4-modelopt-w4a16": ("weight", "weight_scale_2", None, ()),
    "nvfp4-compressed-tensors":
        ("weight_packed", "weight_global_scale", "input_global_scale", (1,)),
    "nvfp4-compressed-tensors-w4a16": ("weight_packed", "weight_global_scale", None, (1,)),
}  # fmt: skip


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

    values = NVFP4_CODES + tuple(-code for code in NVFP4_CODES)
    table = torch.tensor(values, device=weight.device)
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
        if kind == "weight_packed":
            scale, scale_2 = (
                tensors[f"{module}.{s}"] for s in ("weight_scale", "weight_global_scale")
            )
            twin[f"{module}.weight"] = dequantize_nvfp4(
                tensor, scale, 1.0 / scale_2.reshape(())
            ).to(torch.bfloat16)
            continue
        if kind == "weight" and f"{module}.weight_scale" in tensors:
            scale, scale_2 = (tensors[f"{module}.{s}"] for s in ("weight_scale", "weight_scale_2"))
            tensor = dequantize_nvfp4(tensor, scale, scale_2).to(torch.bfloat16)
        twin[name] = tensor
    return twin


def head_form(names: Iterable[str]) -> Form:
    """In which form these head tensors are stored, from their names (dense counts as fused)."""
    parts = {name.rpartition(".")[2] for name in names if ".experts." in name}
    if "weight_packed" in parts:
        plain = "input_global_scale" not in parts
        return "nvfp4-compressed-tensors-w4a16" if plain else "nvfp4-compressed-tensors"
    if "weight_scale" in parts:
        return "nvfp4-modelopt" if "input_scale" in parts else "nvfp4-modelopt-w4a16"
    return "bf16-per-expert" if "weight" in parts else "bf16-fused"


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
    if form in NVFP4_PARTS and not is_moe(text_config):
        raise UserError(
            "a mixture-of-experts base for a head with NVFP4 experts",
            "a dense base",
            "graft the BF16 head",
        )
    wanted: dict[str, tuple[str, Shape]] = {}
    for name, shape in head_tensor_shapes(text_config, num_layers, "per_expert").items():
        if form in NVFP4_PARTS and ".mlp.experts." in name:
            wanted |= _nvfp4_matrix(name.removesuffix(".weight"), shape, form)
        else:
            wanted[name] = ("BF16", shape)
    return wanted


def _nvfp4_matrix(module: str, shape: Shape, form: Form) -> dict[str, tuple[str, Shape]]:
    weight, tensor_scale, input_scale, scalar = NVFP4_PARTS[form]
    rows, columns = shape
    parts: dict[str, tuple[str, Shape]] = {
        f"{module}.{weight}": ("U8", (rows, columns // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (rows, columns // NVFP4_BLOCK)),
        f"{module}.{tensor_scale}": ("F32", scalar),
    }
    if input_scale is not None:
        parts[f"{module}.{input_scale}"] = ("F32", scalar)
    return parts


def quantization_blocks(
    checkpoint: Checkpoint,
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """`quantization_config` of config.json and the contents of `hf_quant_config.json`, or None.

    Raises:
        UserError: for a block that holds something else than quantizers write.
    """
    block = checkpoint.config.get("quantization_config")
    block = block if block is not None else checkpoint.text_config.get("quantization_config")
    check_quantization(block, checkpoint.folder / "config.json")
    path = checkpoint.folder / "hf_quant_config.json"
    if not path.exists():
        return block, None
    file = read_json(path)
    inner = file.get("quantization")
    if not isinstance(inner, dict) or not inner:
        # vLLM raises for such a file too, where config.json does not hide it.
        raise UserError(f"a quantization block in {path}", ascii(inner)[:80], "restore that file")
    check_quantization(inner, path)
    return block, file


def describe_quantization(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The base's quantization in two words ({"method", "algo"}), or None if it has none."""
    block, file = quantization_blocks(checkpoint)
    inner = (file or {}).get("quantization", {})
    if not block and not inner:
        return None
    block = block or {}
    algo = block.get("quant_algo") or inner.get("quant_algo") or block.get("format")
    return {"method": block.get("quant_method", "modelopt"), "algo": algo}
