"""Settings of a role that a strategy reads: model, optimizer, layout and batching, in ROLL's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import PrivateAttr, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from roll_batching.errors import LayoutError
from roll_batching.settings.batching import BatchingConfig, LogprobPlan, RoleBatching
from roll_batching.settings.fields import OLD_LOG_PROBS, OR_NULL, POLICY, TRAINED, Roles, Settings, setting
from roll_batching.settings.megatron_config import ENGINE_STRATEGIES, MEGATRON_STRATEGIES, MegatronConfig
from roll_batching.settings.model import ArchitectureConfig, ModelArgs
from roll_batching.settings.training import TrainingArgs

MEETING = Roles(names=("actor_train",), otherwise="actor_train's is used")


class StrategyArgs(Settings):
    """`strategy_args`: the strategy's name and its settings."""

    strategy_name: Literal["megatron_train", "megatron_infer", "vllm", "sglang", "hf_infer"] = setting(
        "megatron_train",
        help="megatron_train, megatron_infer, or for actor_infer an engine that samples rollouts: sglang or vllm "
        "(servers at engine_args.urls, or that the job starts), hf_infer. Engines read model directories: without "
        "`pretrain` rollouts run on the Megatron model itself, with a notice.",
    )
    strategy_config: Annotated[MegatronConfig, OR_NULL] = setting(
        default_factory=MegatronConfig,
        help="Settings of the Megatron strategies; under sglang and vllm the options of servers that the job starts, "
        "in the names of their command lines with underscores (gpu_memory_utilization: 0.8).",
    )
    _engine_options: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def runs_on_megatron(self) -> bool:
        """Whether the role names a Megatron strategy, not an engine."""
        return self.strategy_name in MEGATRON_STRATEGIES

    @property
    def engine_options(self) -> dict[str, Any]:
        """Settings written for an engine: options of the servers that the job starts."""
        return dict(self._engine_options)

    @model_validator(mode="wrap")
    @classmethod
    def _set_engine_options_aside(cls, data: Any, handler: ModelWrapValidatorHandler[StrategyArgs]) -> StrategyArgs:
        if not isinstance(data, dict):
            return handler(data)
        data = dict(data)
        is_engine = data.get("strategy_name") in ENGINE_STRATEGIES and isinstance(data.get("strategy_config"), dict)
        options: Any = data.pop("strategy_config") if is_engine else {}
        args = handler(data)
        args._engine_options = options
        return args


class RoleSettings(RoleBatching, read_if={"logprob_plan": OLD_LOG_PROBS}):
    """Model, optimizer, layout and batching of a `MegatronTrainStrategy` or `MegatronInferStrategy`."""

    model_args: Annotated[ModelArgs, OR_NULL] = setting(default_factory=ModelArgs, help="The model.")
    training_args: Annotated[TrainingArgs, OR_NULL] = setting(
        default_factory=TrainingArgs, help="Optimizer and mini-batch.", roles=TRAINED
    )
    strategy_args: Annotated[StrategyArgs, OR_NULL] = setting(default_factory=StrategyArgs, help="The strategy.")

    logprob_plan: LogprobPlan = setting(
        "train",
        roles=POLICY,
        help="Old log-probs: on training's plans, so that the first ratio is exactly 1 (train); with the caps for "
        "passes without gradient (own, the default where a key for them differs from training's); those that the "
        "rollouts were drawn with (rollout, the default under async_generation_ratio without "
        "loss_args.engine_ratio_cap); or none, for one optimizer step per rollout.",
    )
    apply_loss_scale: bool = setting(
        True,
        roles=TRAINED,
        help="true: a loss enters the gradient as its value says. false: it enters as Megatron scales "
        "it, divided by "
        "micro-batches x data-parallel ranks.",
    )
    backend_timeout: float = setting(
        30,
        roles=MEETING,
        help="Minutes that a collective may wait for another rank before the job ends; 0.5 is half a minute.",
        gt=0,
    )

    def with_training(self, **changes: Any) -> Self:
        """A copy whose `training_args` have the given values, checked. Raises pydantic's ValidationError."""
        values = {**self.training_args.model_dump(), **changes}
        return self.model_copy(update={"training_args": TrainingArgs.model_validate(values)})

    def require_fit(self, architecture: ArchitectureConfig, layers: str, *, trains: bool) -> None:
        """Raises `LayoutError` for adapters that do not fit, and for options of a role that trains without effect.

        Likewise for Muon with parts, precision or layout that it does not go with.
        """
        layout = self.strategy_args.strategy_config
        self.model_args.require_adapters_fit(architecture, layers, layout)
        if trains:
            from roll_batching.settings import support
            from roll_batching.settings.idle_options import idle_options_of_role

            parts = support.Parts(self.model_args, architecture, layout, layers, training=self.training_args)
            muon = {support.MUON, support.MUON_OF_HEADS}
            rows = (row for row in support.ROLE_REFUSALS if muon & {row.feature, row.other})
            refused = [row.error(parts) for row in support.refused_pairs(rows, parts)]
            if problems := [*idle_options_of_role(self), *refused]:
                raise LayoutError("; ".join(problems))

    def batching(self) -> BatchingConfig:
        """Batching of this role's passes. Raises ConfigError when caps are missing."""
        rows = self.training_args.per_device_train_batch_size
        return BatchingConfig(
            train=self.batching_spec("train", train_rows=rows),
            infer=self.batching_spec("infer", train_rows=rows),
            logprob_plan=self.chosen_logprob_plan,
            share_prefixes=self.use_sequence_packing and self.sequence_packing_args.share_prefixes,
        )

    @property
    def chosen_logprob_plan(self) -> LogprobPlan:
        """`logprob_plan` if it is set; otherwise `own` if passes without gradient have `infer_keys`, else `train`."""
        if "logprob_plan" in self.model_fields_set:
            return self.logprob_plan
        return "own" if self.infer_keys else "train"

    @property
    def infer_keys(self) -> list[tuple[str, ...]]:
        """Paths of the keys that are set and batch passes without gradient differently from training."""
        mode = self.mode_of("infer")
        section: Settings = self
        prefix: tuple[str, ...] = ()
        trained: dict[str, int | None]
        if mode == "packed":
            section, prefix = self.sequence_packing_args, ("sequence_packing_args",)
            keys = ("max_packed_sequence_length", "min_num_micro_batches")
            trained = {f"{key}_forward": getattr(section, f"{key}_train") for key in keys}
        elif mode == "dynamic":
            keys = ("max_tokens_per_microbatch", "sequence_length_round")
            trained = {f"{key}_in_infer": getattr(self, f"{key}_in_train") for key in keys}
        else:
            trained = {"infer_batch_size": self.training_args.per_device_train_batch_size}
        if mode != self.mode_of("train"):
            trained = {**dict.fromkeys(trained), "use_dynamic_batching_in_infer": None}
        values = {key: getattr(section, key) for key in trained if key in section.model_fields_set}
        return [(*prefix, key) for key, value in values.items() if value not in (None, trained[key])]
