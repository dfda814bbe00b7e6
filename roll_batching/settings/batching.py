"""Batching of a role's passes: its keys, and the constraints that they give the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator

from roll_batching.errors import ConfigError, PlanError
from roll_batching.planning import BatchingSpec
from roll_batching.planning.batching_spec import Mode, Objective, Oversize, load_algorithm
from roll_batching.planning.registry import ALGORITHMS
from roll_batching.settings.fields import OR_NULL, Pass, RegisteredName, Settings, require_positive, setting

LogprobPlan = Literal["train", "own", "rollout", "none"]
SharePrefixes = bool | Literal["auto"]
TokenCap = Annotated[int | Literal["auto"] | None, AfterValidator(require_positive)]
"""Most tokens of a micro-batch; auto: the most that fit into the device's memory, found before a job is built."""
CAP_KEYS: dict[tuple[Mode, Pass], str] = {
    ("packed", "train"): "sequence_packing_args.max_packed_sequence_length_train",
    ("packed", "infer"): "sequence_packing_args.max_packed_sequence_length_forward",
    ("dynamic", "train"): "max_tokens_per_microbatch_in_train",
    ("dynamic", "infer"): "max_tokens_per_microbatch_in_infer",
}
"""Key of the cap by mode and kind of pass."""

PASSES_OF_ROLES: dict[str, tuple[Pass, ...]] = {
    "actor_train": ("train", "infer"),
    "actor_infer": (),
    "reference": ("infer",),
    "critic": ("train", "infer"),
    "teacher": ("infer",),
}
"""The planned passes of each role; rollouts are decoded, without a plan."""

PREFIX_OBSTACLES = {
    "mtp_num_layers": "heads of multi-token prediction read the token after each, which differs where samples part",
}
"""By key of the architecture, why each sample computes a prefix that it shares with others."""
CP_SIZE_OBSTACLES = {
    "vision": "a vision encoder is tested with one context-parallel size for all packs",
}
"""By key of the architecture, why all packs have the layout's context-parallel size."""
SLICE_OBSTACLES = {
    "mtp_num_layers": "which read tokens of the next slice",
    "gated_delta_net": "whose state is not handed over to the next slice",
    "hybrid": "whose state is not handed over to the next slice",
    "vision": "which is tested with whole packs",
    "router losses": "which are those of whole packs",
}
"""Why packs are not cut into slices, by key of the architecture; continues a sentence that names what it is about."""


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """Batching of training and forward-only passes. Raises ConfigError when inconsistent."""

    train: BatchingSpec
    """Passes with a backward."""
    infer: BatchingSpec
    """Passes without one: log-probs with their own plan, evaluation, the reference."""
    logprob_plan: LogprobPlan = "train"
    """Old log-probs: by training's plans ("train"), by their own ("own"), the sampler's ("rollout"), or none."""
    share_prefixes: SharePrefixes = "auto"
    """When packs compute shared prefixes once: where the model can and it pays ("auto"), always, or never."""

    def __post_init__(self) -> None:
        for name in ("train", "infer"):
            if not isinstance(getattr(self, name), BatchingSpec):
                raise ConfigError(f"{name} is a {type(getattr(self, name)).__name__}: give a BatchingSpec")
        if self.logprob_plan not in get_args(LogprobPlan):
            known = ", ".join(get_args(LogprobPlan))
            raise ConfigError(f"logprob_plan {self.logprob_plan!r} is unknown; choose one of {known}")
        if self.share_prefixes not in (True, False, "auto"):
            raise ConfigError(f"share_prefixes {self.share_prefixes!r} is unknown; choose auto, True or False")

    def load_algorithms(self) -> None:
        """Imports what forms the micro-batches, a user's module perhaps. Raises `PlanError` where that fails."""
        for spec in (self.train, self.infer):
            load_algorithm(spec)


def refuse_without_old_log_probs(samples: int, mini_batch_size: int, epochs: int) -> str | None:
    """Why a rollout of `samples` cannot be trained on under `logprob_plan: none`, or None if it can."""
    steps = -(-samples // mini_batch_size) * epochs
    if steps == 1:
        return None
    return (
        f"none allows one optimizer step per rollout, and the {samples} samples of a rollout make {steps} optimizer "
        f"steps (mini-batches of {mini_batch_size}, ppo_epochs {epochs}), whose ratios would all be 1; use train or "
        f"own, or mini-batches of {samples} (per_device_train_batch_size x gradient_accumulation_steps x DP) and "
        "ppo_epochs 1"
    )


class SequencePackingArgs(Settings):
    """`sequence_packing_args`: read when use_sequence_packing is true."""

    algorithm: Annotated[str, RegisteredName(ALGORITHMS["packed"])] = setting(
        "load_balance", help="How packs are formed and balanced, under the cap."
    )
    max_packed_sequence_length_train: TokenCap = setting(
        None,
        help="Most tokens of a pack in training; a hard cap. Required with packing in a role that trains. auto: the "
        "most that fit into the device's memory (docs/rehearsal-and-simulation.md).",
    )
    max_packed_sequence_length_forward: TokenCap = setting(
        None, help="Most tokens of a pack in passes without gradient, or auto. Default: the training cap."
    )
    min_num_micro_batches_train: int = setting(
        1, help="Fewest micro-batches per rank and optimizer step.", ge=1, passes=("train",)
    )
    min_num_micro_batches_forward: int = setting(1, help="Fewest micro-batches per rank and forward pass.", ge=1)
    pack_shapes: int | None = setting(
        None,
        help="Packs have one of this many lengths, the same in every step, for compiled kernels and static shapes; the "
        "rest is padding. Default: packs are as long as their samples.",
        ge=1,
        passes=("train", "infer"),
    )
    share_prefixes: SharePrefixes = setting(
        "auto",
        help="Samples of a pack that begin alike compute their common prefix once. auto: where the attention backend "
        "and dropout allow it, and it saves at least 5% of the tokens.",
        passes=("train", "infer"),
    )


class PlanningArgs(Settings):
    """`planning_args`: what ROLL has no name for. Every key has a good default."""

    oversize: Oversize = setting("error", help="What becomes of a sequence longer than the cap.")
    objective: Objective = setting(
        "auto",
        help="What is balanced: what the layout waits for (experts: every micro-batch across the ranks that share "
        "them; a pipeline: its makespan; else the sum per rank, then every micro-batch), the sum per rank alone, every "
        "micro-batch across all ranks, or the pipeline.",
    )
    dynamic_algorithm: Annotated[str, RegisteredName(ALGORITHMS["dynamic"])] = setting(
        "roll", help="How dynamic batching forms its rectangles.", mode="dynamic"
    )
    shared_shapes: bool = setting(
        False,
        help="Dynamic batching: one shape per step for all ranks, as ROLL does, instead of each rank's own.",
        mode="dynamic",
    )
    sequence_multiple: Annotated[int | Literal["2*cp*tp"] | None, AfterValidator(require_positive)] = setting(
        None,
        help="Round each sequence up to this multiple; default: 2 x CP with context parallelism, else 1.",
    )
    seed: int = setting(0, help="Seed of algorithms that draw at random.", ge=0)


class RoleBatching(Settings):
    """The batching keys of a role."""

    infer_batch_size: int = setting(
        16,
        help="Padded mode: sequences per micro-batch in passes without gradient.",
        ge=1,
        mode="padded",
        passes=("infer",),
    )
    use_sequence_packing: bool = setting(
        False, help="Packed mode for training and for passes without gradient.", passes=("train", "infer")
    )
    sequence_packing_args: Annotated[SequencePackingArgs, OR_NULL] = setting(
        default_factory=SequencePackingArgs, help="Settings of packed mode.", mode="packed", passes=("train", "infer")
    )
    use_dynamic_batching: bool | None = setting(
        None,
        help="Short form of use_dynamic_batching_in_train and use_dynamic_batching_in_infer.",
        passes=("train", "infer"),
    )
    use_dynamic_batching_in_train: bool = setting(False, help="Dynamic mode for training.", passes=("train",))
    max_tokens_per_microbatch_in_train: TokenCap = setting(
        None,
        help="Dynamic mode: most tokens (rows x length) of a micro-batch in training. auto: the most that fit into the "
        "device's memory.",
        mode="dynamic",
        passes=("train",),
    )
    sequence_length_round_in_train: int = setting(
        4,
        help="Dynamic mode: lengths are rounded up to a multiple; itself a multiple of TP x CP.",
        ge=1,
        mode="dynamic",
        passes=("train",),
    )
    use_dynamic_batching_in_infer: bool = setting(
        False, help="Dynamic mode for passes without gradient.", passes=("infer",)
    )
    max_tokens_per_microbatch_in_infer: TokenCap = setting(
        None,
        help="Dynamic mode: most tokens of a micro-batch in passes without gradient, or auto. Default: the training "
        "cap.",
        mode="dynamic",
        passes=("infer",),
    )
    sequence_length_round_in_infer: int = setting(
        4,
        help="As sequence_length_round_in_train, without gradient.",
        ge=1,
        mode="dynamic",
        passes=("infer",),
    )
    padded_length: Annotated[int | Literal["longest"] | None, AfterValidator(require_positive)] = setting(
        None,
        help="Padded mode: length of every row. Default: the job's sequence_length; longest: each "
        "micro-batch's longest.",
        mode="padded",
        passes=("train", "infer"),
    )
    planning_args: Annotated[PlanningArgs, OR_NULL] = setting(
        default_factory=PlanningArgs, help="Further settings of the planner.", passes=("train", "infer")
    )

    @property
    def dynamic_in_train(self) -> bool:
        """Whether training is batched dynamically, by either spelling."""
        return self.use_dynamic_batching_in_train or bool(self.use_dynamic_batching)

    @property
    def dynamic_in_infer(self) -> bool:
        """Whether passes without gradient are batched dynamically, by either spelling."""
        return self.use_dynamic_batching_in_infer or bool(self.use_dynamic_batching)

    def dynamic_cap(self, kind: Pass) -> TokenCap:
        """Most tokens of a dynamic micro-batch, resolved; `auto` before a job is built."""
        own = self.max_tokens_per_microbatch_in_infer if kind == "infer" else None
        return own or self.max_tokens_per_microbatch_in_train

    def cap_key(self, kind: Pass) -> str | None:
        """The key that gives the cap of passes of `kind`, its own or the other one's; None in padded mode."""
        if (mode := self.mode_of(kind)) == "padded":
            return None
        key, other = (CAP_KEYS[mode, each] for each in (kind, "infer" if kind == "train" else "train"))
        return other if self.cap_at(key) is None and self.cap_at(other) is not None else key

    def cap_at(self, key: str) -> TokenCap:
        """Value of a key of `CAP_KEYS`."""
        section, _, name = key.rpartition(".")
        value: TokenCap = getattr(getattr(self, section) if section else self, name)
        return value

    def mode_of(self, kind: Pass) -> Mode:
        """Batching of the passes with (`train`) or without (`infer`) gradient."""
        if self.use_sequence_packing:
            return "packed"
        return "dynamic" if (self.dynamic_in_train if kind == "train" else self.dynamic_in_infer) else "padded"

    def batching_spec(self, kind: Pass, *, train_rows: int) -> BatchingSpec:
        """The planner's constraints for such passes; `train_rows` sequences make a padded micro-batch in training.

        Raises ConfigError when the mode's cap is missing or not resolved yet.
        """
        planning, mode = self.planning_args, self.mode_of(kind)
        key = self.cap_key(kind)
        if key is not None and self.cap_at(key) == "auto":
            raise ConfigError(
                f"{key} is auto, which only `roll-batching train` (sft, dpo) resolves, in the free memory of its "
                "devices. Give the number of tokens that `roll-batching fit --config FILE` prints"
            )
        try:
            return BatchingSpec(
                mode=mode,
                sequence_multiple=planning.sequence_multiple,
                oversize=planning.oversize,
                objective=planning.objective,
                seed=planning.seed,
                **self._of_mode(mode, kind == "train", train_rows),
            )
        except PlanError as error:
            raise ConfigError(str(error)) from None

    def _of_mode(self, mode: Mode, train: bool, train_rows: int) -> dict[str, Any]:
        if mode == "packed":
            packing = self.sequence_packing_args
            train_cap, cap = packing.max_packed_sequence_length_train, packing.max_packed_sequence_length_forward
            if train:
                # A forward-only role may give the forward cap alone.
                return {
                    "algorithm": packing.algorithm,
                    "max_tokens": train_cap or cap,
                    "pack_shapes": packing.pack_shapes,
                    "min_num_micro_batches": packing.min_num_micro_batches_train,
                }
            return {
                "algorithm": packing.algorithm,
                "max_tokens": cap or train_cap,
                "pack_shapes": packing.pack_shapes,
                "min_num_micro_batches": packing.min_num_micro_batches_forward,
            }
        if mode == "dynamic":
            cap = self.dynamic_cap("train" if train else "infer")
            step = self.sequence_length_round_in_train if train else self.sequence_length_round_in_infer
            return {
                "algorithm": self.planning_args.dynamic_algorithm,
                "max_tokens": cap,
                "sequence_length_round": step,
                "shared_shapes": self.planning_args.shared_shapes,
            }
        return {
            "rows": train_rows if train else self.infer_batch_size,
            "padded_length": None if self.padded_length == "longest" else self.padded_length,
        }
