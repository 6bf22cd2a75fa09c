"""What a checkpoint is, and what vLLM will do with it, from headers and configs alone.

A base of 124,468 tensors is answered for in seconds, because no weight is read but the head's
small input norms. The price: values are not looked at; `verify` does that.

Rules of vLLM 0.32 that are stated here, with their source:
- `num_speculative_tokens` may be anything up to the declared number of MTP layers, and past it a
  multiple of it; without a declared number it is free but must be given
  (`SpeculativeConfig.__post_init__`, `hf_config_override`).
- `Qwen3_5MTP.forward` and `Qwen3NextMTP.forward` drop `spec_step_idx`, so layer 0 runs at every
  position; the plugin of mtp-graft routes the first class only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from graft.errors import UserError
from graft.formats import head_form
from graft.head_check import is_fp8_block, norms_near_one, shape_problems
from graft.index import index_of
from graft.layout import (
    TRUNK_PREFIXES,
    base_tensor_names,
    count_head_layers,
    count_key,
    declared_layers,
    is_moe,
    unrouted_layers,
)
from graft.manifest import MANIFEST_NAME
from graft.matching import ENGINE
from graft.modules import is_multimodal
from graft.reader import HEAD_PREFIX, Checkpoint
from graft.schemes import SCHEMES, precision_problems, read_statement

SCHEMA_VERSION = 1
NUM_SHOWN = 10
# model_type -> what people call it, and the class that vLLM builds for its head.
FAMILIES = {
    "qwen3_next": ("Qwen3-Next", "Qwen3NextMTP"),
    "qwen3_5_moe": ("Qwen3.5 or 3.6 MoE", "Qwen3_5MoeMTP"),
    "qwen3_5_moe_text": ("Qwen3.5 or 3.6 MoE", "Qwen3_5MoeMTP"),
    "qwen3_5": ("Qwen3.5 or 3.6 dense", "Qwen3_5MTP"),
    "qwen3_5_text": ("Qwen3.5 or 3.6 dense", "Qwen3_5MTP"),
}
ROUTED_CLASSES = ("Qwen3_5MoeMTP", "Qwen3_5MTP")
STOCK = "layer 0 at every position"
INCOMPLETE = "the head is not complete"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An error makes the checkpoint unservable or its drafts garbage; a warning does not."""

    severity: Literal["error", "warning"]
    what: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """The MTP head that was found; `complete` speaks of names, dtypes and shapes."""

    num_layers: int
    form: str
    num_tensors: int
    num_bytes: int
    shards: tuple[str, ...]
    complete: bool


@dataclass(frozen=True, kw_only=True)
class SpeculationFacts:
    """What vLLM makes of the head. `max_free` tokens or a multiple of it; None for no limit."""

    head_class: str
    stock: str
    with_plugin: str
    max_free: int | None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What was found in one checkpoint folder. Sizes are bytes of tensors.

    `quantization_checked_for` is the engine by whose rules the quantization config was held against
    the tensors: engines disagree about the same list. None where nothing was checked.
    """

    folder: Path
    model_type: str | None
    family: str | None
    architectures: tuple[str, ...]
    config: Literal["flat", "nested"]
    multimodal: bool
    grafted: bool
    trunk_prefix: str | None
    trunk_experts: Literal["fused", "per expert", "none"]
    storage: str
    num_shards: int
    num_tensors: int
    bytes_by_dtype: dict[str, int]
    quantization: str | None
    quantization_checked_for: str | None
    declared_layers: int | None
    head: HeadFacts | None
    speculation: SpeculationFacts | None
    problems: tuple[Problem, ...]

    @property
    def servable(self) -> bool:
        """Whether no problem is an error."""
        return all(problem.severity != "error" for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """The inspection for `--json`."""
        found = asdict(self) | {"folder": str(self.folder)}
        return {"schema_version": SCHEMA_VERSION, "servable": self.servable, **found}

    def as_text(self) -> str:
        """The inspection for people: a line a topic, each problem with its first ten details."""
        kind = "multimodal" if self.multimodal else "text-only"
        made = "; grafted by mtp-graft" if self.grafted else ""
        dtypes = ", ".join(f"{d} {_size(n)}" for d, n in self.bytes_by_dtype.items())
        rows = [
            ("model", f"{self.family or 'not supported'} ({self.model_type}), {kind}, "
                      f"{self.config} config{made}"),
            ("weights", f"{self.storage}; {self.num_tensors} tensors, {dtypes}"),
            ("trunk", f"{self.trunk_prefix or 'not found'}*, experts: {self.trunk_experts}"),
            ("quantized", self._quantization_words()),
            ("head", self._head_words()),
        ]  # fmt: skip
        if self.speculation:
            rows += [
                ("stock vLLM", f"{self.speculation.head_class}: {self.speculation.stock}"),
                ("with plugin", self.speculation.with_plugin),
                ("tokens", f"num_speculative_tokens {_tokens_words(self.speculation.max_free)}"),
            ]
        lines = [str(self.folder), *(f"  {name:<11} {words}" for name, words in rows)]
        if not self.problems:
            lines.append("  no problems found")
        for problem in self.problems:
            lines.append(f"  {problem.severity}: {problem.what}")
            lines += [f"      {detail}" for detail in problem.details[:NUM_SHOWN]]
            if len(problem.details) > NUM_SHOWN:
                lines.append(f"      and {len(problem.details) - NUM_SHOWN} more (see --json)")
        return "\n".join(lines)

    def _quantization_words(self) -> str:
        if self.quantization is None:
            return "no"
        if self.quantization_checked_for is None:
            return self.quantization
        return f"{self.quantization}; checked for {self.quantization_checked_for}, no other engine"

    def _head_words(self) -> str:
        if self.head is None:
            return "none"
        head = self.head
        return (
            f"{head.num_layers} layer{'s' * (head.num_layers != 1)}, {head.form}, "
            f"{head.num_tensors} tensors, {_size(head.num_bytes)} in {', '.join(head.shards)}; "
            f"{'complete' if head.complete else 'not complete'}"
        )


def inspect_checkpoint(folder: Path) -> Inspection:
    """Look at one checkpoint.

    Raises:
        UserError: for a folder whose files are missing or broken, so that nothing can be said.
    """
    checkpoint = Checkpoint(folder)
    num_layers = count_head_layers(checkpoint.head_names)
    problems = list(_problems(checkpoint, num_layers))
    model_type = checkpoint.config.get("model_type")
    family, head_class = FAMILIES.get(str(model_type), (None, None))
    sizes: Counter[str] = Counter()
    for info in checkpoint.infos():
        sizes[info.dtype] += info.nbytes
    names = set(checkpoint.names)
    quantization = _quantization(checkpoint)
    return Inspection(
        folder=checkpoint.folder,
        model_type=model_type,
        family=family,
        architectures=tuple(checkpoint.config.get("architectures") or ()),
        config="flat" if checkpoint.text_config is checkpoint.config else "nested",
        multimodal=is_multimodal(checkpoint.config),
        grafted=(checkpoint.folder / MANIFEST_NAME).exists(),
        trunk_prefix=next((p for p in TRUNK_PREFIXES if f"{p}embed_tokens.weight" in names), None),
        trunk_experts=_trunk_experts(checkpoint),
        storage=_storage(checkpoint),
        num_shards=len(checkpoint.shards),
        num_tensors=len(names),
        bytes_by_dtype=dict(sizes.most_common()),
        quantization=quantization,
        quantization_checked_for=ENGINE if quantization in SCHEMES else None,
        declared_layers=declared_layers(checkpoint.config) if family else None,
        head=_head_facts(checkpoint, num_layers, problems) if checkpoint.head_names else None,
        speculation=_speculation(checkpoint, head_class, num_layers) if num_layers else None,
        problems=tuple(problems),
    )


def _problems(checkpoint: Checkpoint, num_layers: int) -> Iterator[Problem]:
    yield from _file_problems(checkpoint)
    try:
        checkpoint.require_supported()
        base_tensor_names(checkpoint)
    except UserError as error:
        yield Problem(severity="error", what=str(error))
        return
    key, declared = count_key(checkpoint.config), declared_layers(checkpoint.config)
    stated = any(key in config for config in (checkpoint.config, checkpoint.text_config))
    if num_layers and declared != num_layers:
        yield Problem(severity="error", what=f"{key} is {declared}, found {num_layers} MTP layers")
    elif not num_layers and stated and declared:
        what = f"declared {declared} MTP layers, found none; mtp graft adds a head"
        yield Problem(severity="error", what=what)
    if checkpoint.head_names:
        form = head_form(checkpoint.head_names)
        try:
            wrong = shape_problems(
                checkpoint, checkpoint.text_config, max(num_layers, 1), form,
                fp8_block=is_fp8_block(checkpoint),
            )  # fmt: skip
        except UserError as error:
            wrong = [str(error)]
        if wrong:
            what = f"{INCOMPLETE}: {len(wrong)} wrong of a {num_layers}-layer {form} head"
            yield Problem(severity="error", what=what, details=tuple(wrong))
    if near_one := norms_near_one(checkpoint):
        what = "norms stored with the 1 that the model adds (means near 1)"
        yield Problem(severity="error", what=what, details=tuple(near_one))
    try:
        found = precision_problems(checkpoint)
    except UserError as error:
        found = [str(error)]
    if isinstance(found, str):
        yield Problem(severity="warning", what=found)
    elif found:
        what = f"the quantization config does not match the tensors, as {ENGINE} reads it"
        yield Problem(severity="error", what=what, details=tuple(found))
    if words := unrouted_layers(checkpoint.config.get("model_type"), num_layers):
        yield Problem(severity="warning", what=words)


def _file_problems(checkpoint: Checkpoint) -> Iterator[Problem]:
    for name in checkpoint.unindexed:
        if name in checkpoint.standalone_head:
            yield Problem(
                severity="error",
                what=f"{name} holds a head and is not in the index: vLLM will not read it",
            )
        else:
            yield Problem(severity="warning", what=f"{name} is not in the index: nobody reads it")
    if checkpoint.weight_map is None:
        return
    unlisted = [
        name
        for shard, header in checkpoint.shards.items()
        if shard not in checkpoint.standalone_head
        for name in header
        if checkpoint.weight_map.get(name) != shard
    ]
    if unlisted:
        yield Problem(
            severity="warning",
            what="tensors of indexed shards that the index does not list (vLLM reads them anyway)",
            details=tuple(unlisted),
        )
    listed = (i for i in checkpoint.infos() if i.shard.name not in checkpoint.standalone_head)
    wanted = index_of(listed, {})["metadata"]["total_size"]
    size = checkpoint.index_metadata.get("total_size")
    if size != wanted:
        yield Problem(severity="warning", what=f"the index's total_size is {size}, not {wanted}")


def _head_facts(checkpoint: Checkpoint, num_layers: int, problems: list[Problem]) -> HeadFacts:
    infos = [checkpoint.info(name) for name in checkpoint.head_names]
    return HeadFacts(
        num_layers=num_layers,
        form="fp8-block" if is_fp8_block(checkpoint) else head_form(checkpoint.head_names),
        num_tensors=len(infos),
        num_bytes=sum(info.nbytes for info in infos),
        shards=tuple(sorted({info.shard.name for info in infos})),
        complete=not any(problem.what.startswith(INCOMPLETE) for problem in problems),
    )


def _speculation(
    checkpoint: Checkpoint, head_class: str | None, num_layers: int
) -> SpeculationFacts | None:
    if head_class is None:
        return None
    routed = head_class in ROUTED_CLASSES and num_layers > 1
    return SpeculationFacts(
        head_class=head_class,
        stock=STOCK,
        with_plugin="each layer at its own position" if routed else "the same",
        max_free=_stated_layers(checkpoint),
    )


def _stated_layers(checkpoint: Checkpoint) -> int | None:
    """vLLM's `n_predict`: the key itself, without the meaning of its absence."""
    key = count_key(checkpoint.config)
    value = checkpoint.config.get(key)
    return checkpoint.text_config.get(key) if value is None else value


def _tokens_words(max_free: int | None) -> str:
    if not max_free:
        return "any number; it must be given"
    limit = "any number" if max_free == 1 else f"1 to {max_free}, or a multiple of {max_free}"
    return f"{limit}; always give it (vllm#55323)"


def _quantization(checkpoint: Checkpoint) -> str | None:
    try:
        name = read_statement(checkpoint).name
    except UserError as error:
        return error.found
    return None if name == "none" else name


def _trunk_experts(checkpoint: Checkpoint) -> Literal["fused", "per expert", "none"]:
    if not is_moe(checkpoint.text_config):
        return "none"
    trunk = (n for n in checkpoint.names if not n.startswith(HEAD_PREFIX) and ".experts." in n)
    return "fused" if any(".experts.gate_up_proj" in name for name in trunk) else "per expert"


def _storage(checkpoint: Checkpoint) -> str:
    number = len(checkpoint.shards)
    if checkpoint.weight_map is None:
        return "a single file" if number == 1 else f"{number} files, no index"
    return f"{number} shards, indexed"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
