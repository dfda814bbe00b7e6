"""`MegatronInferStrategy`: plans, packs and runs forward passes of a Megatron model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed import Facts, consensus, digest, host_group
from roll_batching.distributed.parallel_layout import ParallelLayout, join_layout, start_processes
from roll_batching.errors import ConfigError, LayoutError, LossError
from roll_batching.losses.contract import VALUES, LossSpec, as_numbers, loss_spec
from roll_batching.losses.head import HeadContext, check_temperature
from roll_batching.losses.runner import LossRunner, Scaling
from roll_batching.modeling.cost import planning_cost
from roll_batching.packing.batch import PackedBatch, StepPacks
from roll_batching.planning import CostModel, ParallelDims, Plan, PlanConstraints, RolePlanner
from roll_batching.planning.arrays import integer_of
from roll_batching.samples import LengthTable, SampleBatch
from roll_batching.samples.fields import ROUTED_EXPERTS
from roll_batching.settings import BatchingConfig, RoleSettings
from roll_batching.strategy.fault_messages import require_finite_outputs
from roll_batching.strategy.model_io import ModelIOMixin
from roll_batching.strategy.model_state import ModelState, StepSettings
from roll_batching.strategy.optimizer_step import join_results, share_outputs
from roll_batching.strategy.pack_features import (
    constraints_of,
    gather_table,
    pack_times_of,
    require_pack_features,
    sharing_of,
)
from roll_batching.strategy.sampling import GenerationSettings
from roll_batching.strategy.schedule import Packs, layouts_of, run_schedule
from roll_batching.strategy.step_inputs import check_candidates, count_all, count_local, pack_inputs

logger = logging.getLogger(__name__)


class MegatronInferStrategy(ModelIOMixin):
    """Forward passes of one Megatron model over planned micro-batches.

    Made from a role's settings; `initialize` builds the model. Methods are collective: all ranks call them. Results are
    in the caller's order, on every rank of a replica.
    """

    builds_heads = trains = False
    """Whether `initialize` builds the heads of multi-token prediction (mtp_num_layers); whether the model trains."""

    def __init__(self, config: RoleSettings | None = None, *, seed: int = 0, temperature: float = 1.0) -> None:
        self.config, self.seed = config, integer_of("seed", seed, 0, error=ConfigError)
        self.temperature = check_temperature(temperature)
        """Divides the logits of all log-probs; rollouts should sample with the same."""
        self.temperature_field: str | None = None
        """A sample field with a temperature for each sample, which divides the logits of its log-probs as well."""
        self._state: ModelState | None = None
        self._warned_of_fillers = False

    @classmethod
    def from_model(
        cls,
        model_chunks: Sequence[Any],
        batching: BatchingConfig,
        *,
        pg_collection: Any = None,
        defer_head: bool = False,
        vocab_size: int | None = None,
        temperature: float = 1.0,
        cost: CostModel | None = None,
        settings: StepSettings | None = None,
    ) -> MegatronInferStrategy:
        """A strategy for the forward passes of an existing Megatron model. Collective.

        Arguments and errors are those of `MegatronTrainStrategy.from_parts`.
        """
        from roll_batching.strategy import from_parts as parts  # loops of other models alone need it

        parts.require_process_group()
        strategy = MegatronInferStrategy(None, temperature=temperature)
        strategy.state = parts.state_from_parts(
            parts.list_of_chunks(model_chunks),
            batching,
            settings or StepSettings(),
            pg_collection=pg_collection,
            vocab_size=vocab_size,
            cost=cost,
            training=None,
            defer_head=defer_head,
        )
        strategy.state = parts.with_proof(strategy)
        return strategy

    # ---- the model

    @property
    def state(self) -> ModelState:
        """The model, its layout and its settings. Raises `LayoutError` before there is a model."""
        if self._state is None:
            raise LayoutError(
                f"this {type(self).__name__} has no model yet: call initialize() first, or make it with from_parts"
            )
        return self._state

    @state.setter
    def state(self, state: ModelState) -> None:
        require_pack_features(state)
        self._state = state

    @property
    def layout(self) -> ParallelLayout:
        """The parallel layout, with this rank's coordinates."""
        return self.state.layout

    @property
    def chunks(self) -> Sequence[Any]:
        """This pipeline stage's model chunks, one per virtual stage."""
        return self.state.chunks

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.state.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.state.dtype

    @property
    def cost(self) -> CostModel:
        """The planner's cost model."""
        return self.state.cost

    @property
    def batching(self) -> BatchingConfig:
        """Settings that form the micro-batches."""
        return self.state.batching

    @property
    def settings(self) -> StepSettings:
        """Settings of the schedule."""
        return self.state.settings

    def initialize(self, *, weights: bool = True) -> None:
        """Initialises torch.distributed and Megatron's process groups, and builds the model.

        Args:
            weights: load `model_args.model_name_or_path`, or initialise at random without one. False: leave weights
                uninitialised, for callers that load or copy them.

        Raises:
            RankError: for a model directory whose files do not match its description.
            LayoutError: (or `ConfigError`) when model, layout and number of processes do not fit.
        """
        # Imported here: loops that bring their own model do not need it.
        from roll_batching.modeling.builder import build_chunks, resolve_dtype
        from roll_batching.modeling.kernels import choose_kernels, tell

        config = self._require_config()
        megatron = config.strategy_args.strategy_config
        architecture = config.model_args.architecture_to_build(megatron.mtp_num_layers if self.builds_heads else 0)
        device = start_processes(config.backend_timeout)
        with consensus(host_group(), "initialize") as facts:
            # Both may import a user's modules, which one machine may lack.
            kernels = choose_kernels(megatron, architecture, device)
            config.require_fit(architecture, kernels.layers, trains=self.trains)
            batching = config.batching()
            batching.load_algorithms()
            settings = repr((config.model_dump(exclude={"data_args"}), self.seed, self.temperature))
            facts.equal("the role's configuration", digest(settings), "Start all ranks with the same settings")
            facts.equal("the kernels of the layers", kernels.notice, "Install the same packages on all machines")
        if device.type == "cuda" and dist.get_rank() == 0:
            tell(kernels.notice)
        layout, groups = self._create_layout(megatron.parallel_dims(dist.get_world_size()), device)
        dtype = resolve_dtype(config.model_args.dtype, device)
        pretrained = config.model_args.model_name_or_path
        draw = weights and pretrained is None
        value_head = config.model_args.value_head
        chunks = build_chunks(
            architecture, megatron, layout, dtype, kernels=kernels, seed=self.seed, initialize=draw, groups=groups,
            value_head=value_head, value_head_std=config.model_args.value_head_std,
        )  # fmt: skip
        if weights and pretrained is not None:
            from roll_batching.modeling.pretrained import load_pretrained

            load_pretrained(chunks, architecture, pretrained, layout, config.model_args.family, value_head)
        of_step, outputs = StepSettings.of(config, layout.dp_size), 1 if value_head else architecture.vocab_size
        built = ModelState(
            layout=layout, chunks=chunks, dtype=dtype,
            cost=planning_cost(chunks[0].config, outputs, layout, of_step.cluster), batching=batching,
            settings=of_step, attention=kernels.attention, vocab_size=architecture.vocab_size, pg_collection=groups,
            architecture=architecture, own_family=config.model_args.family, value_head=value_head,
        )  # fmt: skip
        if config.model_args.trains_part:
            from roll_batching.strategy.partial_training import prepare_partial_training  # few models need it

            built = prepare_partial_training(built, config.model_args, self.seed, weights=weights)
        self.state = self._prepare(built, config)

    def _create_layout(self, dims: ParallelDims, device: torch.device) -> tuple[ParallelLayout, Any]:
        """(layout, its process groups), see `join_layout`. Roles that do not train have groups of their own."""
        return join_layout(dims, device)

    def _prepare(self, built: ModelState, config: RoleSettings) -> ModelState:
        """Prepares a model that was just built for this kind of strategy."""
        for chunk in built.chunks:
            chunk.eval()
        return built

    # ---- planning

    def constraints(self, *, forward: bool = False) -> PlanConstraints:
        """Constraints of this role's plans; `forward`: for passes without gradient."""
        batching = self.state.batching
        return constraints_of(self.state, batching.infer if forward else batching.train)

    @property
    def planner(self) -> RolePlanner:
        """Planner with this role's settings, to plan in another process, for example."""
        return RolePlanner(
            train=self.constraints(),
            infer=self.constraints(forward=True),
            cost=self.state.cost,
            share_prefixes=sharing_of(self.state),
            times=pack_times_of(self.state),
        )

    def gather_table(self, local: SampleBatch, group: Any = None) -> LengthTable:
        """The table of all samples for `plan`, with shared prefixes; see `pack_features.gather_table`. Collective."""
        return gather_table(self.state, local, group)

    def plan(self, table: LengthTable, *, forward: bool = False, group_ids: Any = None, home_rank: Any = None) -> Plan:
        """A plan over the samples of `table`, with this role's settings and cost model.

        A pure function, not collective: all ranks get the same plan from the same table.

        Args:
            table: ids and lengths of all ranks' samples, from `gather_table` or `gather_lengths`.
            forward: plan a pass without gradient.
            group_ids: int [n]; samples with one id share a micro-batch.
            home_rank: int [n]; the data-parallel rank on which each sample stays. None: any.
        """
        return self.planner.plan(table, forward=forward, group_ids=group_ids, home_rank=home_rank)

    # ---- forward passes

    def forward(
        self,
        local: SampleBatch,
        plan: Plan,
        needs: Collection[str] = ("log_probs",),
        masks: Sequence[str] | None = None,
    ) -> SampleBatch:
        """Per-token results of the model, in the order of `local`.

        Args:
            local: this rank's samples, as `distribute` returns them.
            plan: a plan over all ranks' samples.
            needs: any of "log_probs" and "entropy"; with a value head, "values"; in addition "routed_experts", the
                token field of the experts that routers chose.
            masks: names of fields; tokens that none of them counts read 0. None: all tokens that predict.

        Returns:
            A batch with `local`'s ids and lengths and the needed next_token fields, fp32, on the host.

        Raises:
            RankError: on all ranks, before the model runs for wrong input of any, or for outputs that are not finite.
        """
        with self._consensus("forward") as facts:
            names = [name for name in ("log_probs", "entropy", VALUES) if name in needs]
            if not names or len(names) != len(set(needs) - {ROUTED_EXPERTS}):
                raise LossError(f"forward(needs={sorted(needs)}): ask for log_probs, entropy or both; a critic: values")
            self._head().require(names, "forward")
            facts.equal("needs and masks", (names, ROUTED_EXPERTS in needs, masks))
            experts = None
            if ROUTED_EXPERTS in needs:
                from roll_batching.modeling.router_replay import PassExperts, require_replay  # few passes record

                require_replay(self.chunks, plan, rows_form=self.settings.rows_form)
                experts = PassExperts(self.chunks, record=True)
            packs = self._pack(facts, local, plan, masks)
        head = self._head()
        results = self._collect(plan, packs, lambda out, pack, chunk: head.results(out, pack, chunk, names), experts)
        outputs = self._require_finite(share_outputs(self.state, local, plan, packs, results, names))
        return outputs if experts is None else experts.add_recorded(outputs, plan, layouts_of(packs), self.layout)

    def _collect(self, plan: Plan, packs: Packs, compute: Callable[..., Any], experts: Any = None) -> list[Any]:
        """Results of `compute`(output, pack, chunk) for each micro-batch, on the last stage, without gradient."""

        def bind(pack: PackedBatch, chunk: Any) -> Any:
            return lambda output, non_loss_data=True: compute(output, pack, chunk)

        with torch.no_grad(), self._evaluating():
            return self._run(plan, packs, bind, experts=experts, forward_only=True, collect=True)

    def compute_log_probs(self, local: SampleBatch, plan: Plan, masks: Sequence[str] | None = None) -> SampleBatch:
        """Log-probs of all tokens given the tokens before them; see `forward`."""
        return self.forward(local, plan, masks=masks)

    def evaluate(self, local: SampleBatch, plan: Plan, loss: Any) -> dict[str, float]:
        """Loss (under "loss") and metrics of a loss object over the planned samples, without gradient."""
        with self._consensus("evaluate") as facts:
            spec = loss_spec(loss)
            packs = self._pack_for(facts, local, plan, spec)
            local_counts = count_local(self.layout, local, plan, spec)
            facts.count(local_counts.vector())
        counts = count_all(self.layout.team, local_counts, facts.total)
        # Without a backward pass nothing reads the scale.
        scaling = Scaling(per_token=True, num_micro_batches=1, dp_size=1)
        runner = LossRunner(loss, spec, counts, self._head(), scaling, train=False)
        with torch.no_grad(), self._evaluating():
            records = self._run(plan, packs, runner.bind, forward_only=True)
        total, metrics, _ = join_results(self.state, [r for r in records if r is not None], runner)
        return {"loss": total, **as_numbers(metrics)}

    def generate(
        self, prompts: SampleBatch, settings: GenerationSettings, draws: torch.Tensor | None = None
    ) -> SampleBatch:
        """Samples responses to this rank's prompts; see `strategy.generation.generate`."""
        from roll_batching.strategy.generation import check_generation, generate

        with self._consensus("generate") as facts:
            self._head().require(("log_probs",), "generate")
            if self.settings.pack_multiple > 1:
                raise LayoutError("generate is not supported in FP8: sample with an engine, or a model in bf16")
            check_generation(facts, prompts, settings, self.state, draws)
        self.gather_parameters()  # here, as a rank without prompts may run no forward pass that would
        with self._evaluating():
            return self._require_finite(generate(self.state, prompts, settings, draws))

    # ---- shared by the strategies

    def _run(self, plan: Plan, packs: Packs, bind: Any, **options: Any) -> list[Any]:
        state, experts = self.state, options.pop("experts", None)
        if experts is None and isinstance(packs, StepPacks) and packs.routed_experts is not None:
            from roll_batching.modeling.router_replay import PassExperts  # as above

            experts = PassExperts(self.chunks)
        with contextlib.nullcontext() if experts is None else experts.installed():
            return run_schedule(
                plan, packs, state.chunks, bind, state.layout, rows_form=state.settings.rows_form,
                pg_collection=state.pg_collection, experts=experts, **options,
            )  # fmt: skip

    def _head(self) -> HeadContext:
        return HeadContext(
            layout=self.layout,
            vocab_size=self.state.vocab_size,
            temperature=self.temperature,
            temperature_field=self.temperature_field,
            value_head=self.state.value_head,
        )

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Context with the model in evaluation mode (no dropout)."""
        chunks = self.chunks
        modes = [chunk.training for chunk in chunks]
        for chunk in chunks:
            chunk.eval()
        try:
            yield
        finally:
            for chunk, mode in zip(chunks, modes, strict=True):
                chunk.train(mode)

    def _pack(self, facts: Facts, local: SampleBatch, plan: Plan, masks: Sequence[str] | None) -> Packs:
        packs = pack_inputs(self.state, facts, local, plan, masks)
        if len(plan.samples) < self.layout.dp_size and dist.get_rank() == 0 and not self._warned_of_fillers:
            self._warned_of_fillers = True
            logger.warning(
                "a step has %d samples for %d data-parallel ranks: the others compute filler micro-batches, which "
                "change nothing in the result. Use larger mini-batches or fewer ranks (logged once)",
                len(plan.samples),
                self.layout.dp_size,
            )
        return packs

    def _pack_for(self, facts: Facts, local: SampleBatch, plan: Plan, spec: LossSpec) -> Packs:
        """`_pack` for a loss, with the loss's own checks of the samples in each micro-batch."""
        facts.equal("the loss", spec.description)
        self._head().require(spec.needs, spec.name)
        # Earlier pipeline stages may lack the loss's fields. `_pack` names what else `local` is.
        has_fields = isinstance(local, SampleBatch) and (local.origin is None or self.layout.is_last_stage)
        if has_fields:
            spec.require_prepared(local)
        if isinstance(local, SampleBatch):
            check_candidates(local, spec.candidates, self.state)
        packs = self._pack(facts, local, plan, spec.masks)
        if spec.check is not None and has_fields:
            micro_batches = [mb for mb in plan.micro_batches[self.layout.dp_rank] if not mb.is_filler]
            spec.check(local, [local.rows_of(plan.ids[mb.samples]).numpy() for mb in micro_batches])
        return packs

    def _require_finite(self, outputs: SampleBatch) -> SampleBatch:
        return require_finite_outputs(self.state, outputs)
