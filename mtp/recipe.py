"""A recipe: one TOML file, read into frozen dataclasses. Unknown keys are errors.

Defaults of training, evaluation and quantization live here and nowhere else. `recipes/` holds
recipes that were run, with what they gave and on which hardware.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graft.errors import UserError
from mtp.dspark.recipe import DSparkRecipe
from mtp.recipe_text import override
from mtp.recipe_values import build, read_toml

Runtime = typing.Literal["routed", "stock", "both"]


@dataclass(frozen=True, kw_only=True)
class BaseRecipe:
    """A small base for demos and benchmarks (`mtp nano base`).

    full_attention_interval: every n-th layer is full attention, the others gated delta net; 1
    makes all full, which vLLM's CPU build needs. rows_per_step: half of them traces, half code.
    """

    hidden_size: int = 128
    num_layers: int = 2
    full_attention_interval: int = 1
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 64
    steps: int = 500
    rows_per_step: int = 2
    row_length: int = 512
    learning_rate: float = 5e-3


@dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """num_layers: K; warm_start: auto, native, last or random (`mtp.warm_start.head_from_base`);
    train_router: whether the head's MoE routers learn, or stay as the warm start left them."""

    num_layers: int = 4
    warm_start: str = "auto"
    train_router: bool = True


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """Weights of the terms, defined in `mtp.losses.terms`."""

    ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0
    lk: float = 0.0
    e2e_tv: float = 0.0

    def __post_init__(self) -> None:
        if not any((self.ce, self.kl, self.tv, self.lk, self.e2e_tv)):
            raise UserError(
                "a loss with a term above 0 (ce, kl, tv, lk, e2e_tv)", "none", "correct the recipe"
            )


@dataclass(frozen=True, kw_only=True)
class LossStage(LossTerms):
    """Terms that hold up to a fraction of training; those it does not name are 0."""

    until: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RestrictedVocabulary:
    """Losses over a part of the vocabulary (`mtp.losses.restricted`): faster, and biased.

    top_p: share of the base's probability that each target keeps; 0 looks at all tokens.
    probe_every: every n-th target of a chunk shows which tokens the head favours.
    favourites: tokens that are kept for each such target and step.
    """

    top_p: float = 0.0
    probe_every: int = 8
    favourites: int = 16

    def __post_init__(self) -> None:
        if self.top_p > 1:
            raise UserError("top_p of at most 1", str(self.top_p), "correct the recipe")


@dataclass(frozen=True, kw_only=True)
class LossRecipe(LossTerms):
    """What is minimised.

    temperature: of base and head in every term; below 1 for greedy serving (docs/training.md).
    lk_eta: how fast LK turns from KL to TV.
    position_decay: step k weighs decay**k, normalised to 1.
    position_weights: one a step, as they stand, instead of position_decay.
    category_weights: of the rows of a category; 1 for those not named.
    schedule: stages ([[loss.schedule]]) that replace the terms above, `until` rising to 1.
    restricted: the part of the vocabulary to look at; all of it by default.
    """

    kl: float = 1.0
    ce: float = 0.1
    temperature: float = 1.0
    lk_eta: float = 3.0
    position_decay: float = 0.9
    position_weights: tuple[float, ...] = ()
    category_weights: dict[str, float] = field(default_factory=dict)
    schedule: tuple[LossStage, ...] = ()
    restricted: RestrictedVocabulary = field(default_factory=RestrictedVocabulary)

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = [stage.until for stage in self.schedule]
        if ends and (ends != sorted(set(ends)) or ends[-1] != 1):
            raise UserError(
                "stages of [[loss.schedule]] with `until` rising, the last 1.0",
                ", ".join(map(str, ends)),
                "correct the recipe",
            )
        if self.position_weights and not any(self.position_weights):
            raise UserError("a position weight above 0", "none", "correct the recipe")


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """How a draft is trained; the learning rate warms up over warmup_steps, then falls as a cosine.

    draft: what is trained: the MTP head, or DSpark ([dspark]).
    runtime: what will serve the head: "routed" (each speculative step on its own layer), "stock"
        (an unpatched vLLM: layer 0 at every step), or "both" (the sum of the two objectives).
    num_speculative_tokens: steps of a draft; 0 is one for each layer. A head of one layer that a
        stock vLLM will repeat needs it.
    steps: optimizer steps.
    tokens_per_batch: of an optimizer step, all processes together, padding counted.
    micro_batch_tokens: of one forward pass, what fits in memory; 0 takes a process's whole share.
    optimizer: adamw, or muon for matrices (each expert one) and AdamW for the rest.
    activation_checkpointing: compute layers again in the backward pass, to need less memory.
    eval_every: steps between two measurements of acceptance; 0 measures at the end only. The head
        that is written is the best of those measured.
    patience: measurements without a better one after which training ends; 0 never ends early.
    checkpoint_every: steps between two resume states; 0 writes one only when the run is stopped.
    keep_checkpoints: resume states that are kept, the newest.
    """

    runtime: Runtime = "routed"
    draft: typing.Literal["mtp", "dspark"] = "mtp"
    num_speculative_tokens: int = 0
    steps: int = 1000
    tokens_per_batch: int = 8192
    micro_batch_tokens: int = 0
    optimizer: typing.Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 5e-5
    min_learning_rate: float = 0.0
    warmup_steps: int = 30
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    activation_checkpointing: bool = False
    eval_every: int = 200
    patience: int = 0
    checkpoint_every: int = 200
    keep_checkpoints: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.min_learning_rate > self.learning_rate:
            raise UserError(
                f"train.min_learning_rate of at most train.learning_rate, {self.learning_rate:g}",
                f"{self.min_learning_rate:g}",
                "correct the recipe",
            )


@dataclass(frozen=True, kw_only=True)
class TeacherRecipe:
    """Where training takes the base's hidden states from (docs/teachers.md).

    kind: in_process, the base beside the head; cache, what `mtp data cache` wrote; server, a vLLM
        that extracts them.
    cache: folder of the cache.
    url, states: of the server, and the folder that it writes to.
    """

    kind: typing.Literal["in_process", "cache", "server"] = "in_process"
    cache: str = ""
    url: str = ""
    states: str = ""

    def __post_init__(self) -> None:
        wanted = {"in_process": (), "cache": ("cache",), "server": ("url", "states")}[self.kind]
        if missing := [f"teacher.{name}" for name in wanted if not getattr(self, name)]:
            raise UserError(
                f"{' and '.join(missing)} with teacher.kind = '{self.kind}'",
                "none",
                f"pass --set {missing[0]}=..., or add it to the recipe",
            )

    @property
    def cache_folder(self) -> Path | None:
        """The cache that is trained from, if one is."""
        return Path(self.cache) if self.kind == "cache" else None


@dataclass(frozen=True, kw_only=True)
class EvalRecipe:
    """Held-out prompts, the most tokens of each, and the tokens that the base continues."""

    num_prompts: int = 64
    max_prompt_tokens: int = 1024
    num_tokens: int = 200


@dataclass(frozen=True, kw_only=True)
class QuantizeRecipe:
    """Tokens of training data that calibrate the activation scales."""

    calibration_tokens: int = 65536


@dataclass(frozen=True, kw_only=True)
class MixRecipe:
    """What `mtp data prepare` trains on (`mtp.data.mix`).

    weights: by category (agent, chat, code) or by source; rows that none names are left out.
    tokens: of all parts together; 0 takes as many as there are without oversampling.
    max_repeats: how often a conversation may be seen.
    """

    weights: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    max_repeats: int = 4


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a head's weights and its measurements, but the base and the data."""

    base: BaseRecipe = field(default_factory=BaseRecipe)
    mix: MixRecipe = field(default_factory=MixRecipe)
    head: HeadRecipe = field(default_factory=HeadRecipe)
    loss: LossRecipe = field(default_factory=LossRecipe)
    teacher: TeacherRecipe = field(default_factory=TeacherRecipe)
    dspark: DSparkRecipe = field(default_factory=DSparkRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)
    eval: EvalRecipe = field(default_factory=EvalRecipe)
    quantize: QuantizeRecipe = field(default_factory=QuantizeRecipe)

    def __post_init__(self) -> None:
        train, num_layers = self.train, self.head.num_layers
        if train.draft != "mtp":
            return
        if len(self.loss.position_weights) not in (0, self.num_steps):
            raise UserError(
                f"{self.num_steps} position_weights, one for each speculative step",
                f"{len(self.loss.position_weights)}",
                "correct the recipe",
            )
        if train.runtime != "stock" and self.num_steps < num_layers:
            raise UserError(
                f"train.num_speculative_tokens of at least head.num_layers, {num_layers}: routed, "
                "each step has a layer, and the others would not be trained",
                f"{train.num_speculative_tokens}",
                f"set head.num_layers = {train.num_speculative_tokens}",
            )

    @property
    def num_steps(self) -> int:
        """Tokens that one round drafts, as it is served and measured."""
        if self.train.draft == "dspark":
            return self.dspark.num_speculative_tokens
        return self.train.num_speculative_tokens or self.head.num_layers

    def layers_read(self, depth: int) -> tuple[int, ...]:
        """Base layers, of so many, whose output the draft reads beside the final state."""
        return self.dspark.layers_read(depth) if self.train.draft == "dspark" else ()

    def as_record(self) -> dict[str, Any]:
        """The recipe as it is recorded with a run and a head: without the places of a teacher's
        states and of an earlier head, which may move, and which a published head has no business
        telling."""
        record = dataclasses.asdict(self)
        record["head"]["warm_start"] = Path(self.head.warm_start).name
        return record | {"teacher": {"kind": self.teacher.kind}}


def trained_for(
    provenance: Mapping[str, Any], num_layers: int
) -> tuple[int, typing.Literal["routed", "stock"]]:
    """Tokens a round that a head was trained to draft, and the runtime: its own recipe says so."""
    train = provenance.get("recipe", {}).get("train", {})
    tokens = train.get("num_speculative_tokens") or num_layers
    return tokens, "stock" if train.get("runtime") == "stock" else "routed"


# What a draft changes in the defaults of other tables.
DRAFT_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "mtp": {},
    "dspark": {"train": {"learning_rate": 3e-4}},
}


def load_recipe(path: Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe; None gives the defaults.

    Args:
        path: a TOML file.
        overrides: "table.key=value", each stronger than the file.

    Raises:
        UserError: no such file, not TOML, an unknown key, or a value of the wrong type.
    """
    values = {} if path is None else read_toml(path)
    where = str(path or "the recipe")
    for assignment in overrides:
        override(values, assignment)
        where += f" with --set {assignment}"
    _set_draft_defaults(values)
    return typing.cast(Recipe, build(Recipe, values, where))


def _set_draft_defaults(values: dict[str, Any]) -> None:
    """Defaults that follow from the draft, where the recipe says nothing. In place."""
    train = values.get("train")
    draft = train.get("draft") if isinstance(train, dict) else None
    for table, defaults in DRAFT_DEFAULTS.get(str(draft), {}).items():
        for key, value in defaults.items():
            values[table].setdefault(key, value)
