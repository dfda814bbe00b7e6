"""`MegatronInferStrategy`: a Megatron model that plans, packs and runs forward passes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from roll_batching.distributed import Facts, consensus, digest, host_group
from roll_batching.distributed.parallel_layout import ParallelLayout, join_layout, start_processes
from roll_batching.errors import CheckpointError, LayoutError, LossError
from roll_batching.losses.contract import LossSpec, loss_spec
from roll_batching.losses.head import HeadContext, check_temperature
from roll_batching.losses.metric_kinds import as_numbers
from roll_batching.losses.runner import LossRunner, Scaling
from roll_batching.modeling.builder import build_chunks, resolve_dtype
from roll_batching.modeling.cost import model_cost
from roll_batching.modeling.kernels import choose_kernels, tell
from roll_batching.packing.batch import PackedBatch, unpack_results
from roll_batching.planning import CostModel, ParallelDims, Plan, PlanConstraints, RolePlanner
from roll_batching.samples import FieldSpec, LengthTable, SampleBatch
from roll_batching.settings import BatchingConfig, RoleSettings
from roll_batching.strategy.copying import TakesWeights
from roll_batching.strategy.finite import ChecksOutputs
from roll_batching.strategy.inputs import counts_here, pack_inputs
from roll_batching.strategy.outcome import join_outcomes
from roll_batching.strategy.sampling import GenerationSettings
from roll_batching.strategy.saving import SavesState
from roll_batching.strategy.schedule import Packs, layouts_of, run_schedule
from roll_batching.strategy.settings import StepSettings
from roll_batching.strategy.state import ModelState

if TYPE_CHECKING:
    from roll_batching.strategy.tensor_stream import TensorStream

logger = logging.getLogger(__name__)


class MegatronInferStrategy(TakesWeights, SavesState, ChecksOutputs):
    """Forward passes of one Megatron model over planned micro-batches.

    Built from a role's settings; `initialize` builds the model. Every method is called by all ranks
    together. Results come back in the caller's order, on every rank of a replica.
    """

    def __init__(self, config: RoleSettings | None = None, *, seed: int = 0, temperature: float = 1.0) -> None:
        self.config, self.seed = config, seed
        self.temperature = check_temperature(temperature)
        """Logits are divided by it wherever log-probs are computed; rollouts should sample with the same."""
        self._state: ModelState | None = None
        self._noticed_fillers = False

    # ---- the model

    @property
    def state(self) -> ModelState:
        """The model and everything that belongs to it; `LayoutError` before there is one."""
        if self._state is None:
            raise LayoutError(
                f"this {type(self).__name__} has no model yet: call initialize() first, or make it with from_parts"
            )
        return self._state

    @state.setter
    def state(self, state: ModelState) -> None:
        self._state = state

    @property
    def layout(self) -> ParallelLayout:
        """The parallel layout, and this rank's place in it."""
        return self.state.layout

    @property
    def chunks(self) -> Sequence[Any]:
        """This pipeline stage's model chunks, one per virtual stage."""
        return self.state.chunks

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.state.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.state.dtype

    @property
    def cost(self) -> CostModel:
        """What a sequence costs the model, for the planner."""
        return self.state.cost

    @property
    def batching(self) -> BatchingConfig:
        """How passes are cut into micro-batches."""
        return self.state.batching

    @property
    def settings(self) -> StepSettings:
        """How a step runs."""
        return self.state.settings

    def initialize(self, *, weights: bool = True) -> None:
        """Joins the processes, creates Megatron's groups and builds the model.

        Its weights are those of `model_args.model_name_or_path`, else random; without `weights` they are left as they
        are, for callers that load or copy them.

        Raises `RankError` for a model directory that does not hold what it describes, `LayoutError` or `ConfigError`
        when model, layout and processes do not fit.
        """
        config = self._configured()
        architecture = config.model_args.architecture
        if architecture is None:
            raise LayoutError(
                "model_args.architecture is missing: it gives the shape of the model to build, unless "
                "model_args.model_name_or_path names a directory that does"
            )
        device = start_processes(config.backend_timeout)
        megatron = config.strategy_args.strategy_config
        with consensus(host_group(), "initialize") as facts:
            # Users' modules, perhaps, which one machine may lack.
            kernels = choose_kernels(megatron, architecture, device)
            batching = config.batching()
            batching.load_algorithms()
            words = repr((config.model_dump(exclude={"data_args"}), self.seed, self.temperature))
            facts.equal("the role's configuration", digest(words), "Start all ranks with the same settings")
            facts.equal("what the layers compute with", kernels.notice, "Install the same packages on all machines")
        if device.type == "cuda" and dist.get_rank() == 0:
            tell(kernels.notice)
        layout, groups = self._joined(megatron.parallel_dims(dist.get_world_size()), device)
        dtype = resolve_dtype(config.model_args.dtype, device)
        pretrained = config.model_args.model_name_or_path
        chunks = build_chunks(
            architecture,
            megatron,
            layout,
            dtype,
            kernels=kernels,
            seed=self.seed,
            initialize=weights and pretrained is None,
            groups=groups,
        )
        if weights and pretrained is not None:
            from roll_batching.modeling.pretrained import load_pretrained

            load_pretrained(chunks, architecture, pretrained, layout, config.model_args.family)
        built = ModelState(
            layout=layout,
            chunks=chunks,
            dtype=dtype,
            cost=model_cost(chunks[0].config, architecture.vocab_size, layout),
            batching=batching,
            settings=StepSettings.of(config),
            attention=kernels.attention,
            vocab_size=architecture.vocab_size,
            pg_collection=groups,
            architecture=architecture,
            own_family=config.model_args.family,
        )
        self.state = self._made_ready(built, config)

    def _joined(self, dims: ParallelDims, device: torch.device) -> tuple[ParallelLayout, Any]:
        """This rank's place in a layout, and the layout's groups: see `join_layout`."""
        return join_layout(dims, device)

    def _made_ready(self, built: ModelState, config: RoleSettings) -> ModelState:
        """The state of a model that was just built, for what this strategy does with it."""
        for chunk in built.chunks:
            chunk.eval()
        return built

    def _configured(self) -> RoleSettings:
        if self.config is None:
            raise LayoutError("this strategy has no RoleSettings to build a model of; from_parts takes one that exists")
        return self.config

    # ---- planning

    def constraints(self, *, forward: bool = False) -> PlanConstraints:
        """The rules of this role's plans; `forward`: of passes without gradient."""
        state = self.state
        batching = state.batching.infer if forward else state.batching.train
        return PlanConstraints.of(
            state.layout, batching, group_size=state.settings.group_size if state.layout.interleaved else None
        )

    @property
    def planner(self) -> RolePlanner:
        """What plans this role's steps; others can plan with it as well."""
        return RolePlanner(train=self.constraints(), infer=self.constraints(forward=True), cost=self.state.cost)

    def plan(self, table: LengthTable, *, forward: bool = False, group_ids: Any = None, home_rank: Any = None) -> Plan:
        """A plan over the samples of `table`, by this role's settings and the model's cost.

        `forward` plans a pass without gradient. Pure: all ranks get the same plan from the same table.
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
            local: this rank's samples, those that `plan` gives its replica (see `distribute`).
            plan: a plan over all ranks' samples.
            needs: any of "log_probs" and "entropy".
            masks: fields that say which rows are wanted; the others read 0. None: every row that predicts.

        Returns:
            A batch with `local`'s ids and lengths and the needed next_token fields, fp32, on the host.

        Raises:
            RankError: on all ranks, when any rank's input is wrong, before the model runs; or its output not finite.
        """
        with self._consensus("forward") as facts:
            wanted = [name for name in ("log_probs", "entropy") if name in needs]
            if not wanted or len(wanted) != len(set(needs)):
                raise LossError(f"forward(needs={sorted(needs)}): ask for log_probs, entropy or both")
            facts.equal("what is asked for", (wanted, masks))
            packs = self._pack(facts, local, plan, masks)
        head = self._head()

        def bind(pack: PackedBatch, chunk: Any) -> Any:
            def collect(output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
                idle = not pack.samples
                log_probs, entropy = head.log_probs(output, pack, chunk, entropy="entropy" in wanted, idle=idle)
                parts = {"log_probs": log_probs, "entropy": entropy}
                return torch.stack([x for name in wanted if (x := parts[name]) is not None], -1)

            return collect

        with torch.no_grad(), self._evaluating():
            results = self._run(plan, packs, bind, forward_only=True, collect=True)
        layout = self.layout
        rows = torch.zeros(local.num_tokens, len(wanted), dtype=self.state.result_dtype, device=layout.device)
        if layout.is_last_stage and len(local):
            rows = unpack_results(local, plan, layouts_of(packs), results, dp_rank=layout.dp_rank).to(rows.dtype)
        if layout.pp_size > 1:
            last = dist.get_global_rank(layout.pp_group, layout.pp_size - 1)
            dist.broadcast(rows, last, group=layout.pp_group)
        fields = {name: rows[:, i].contiguous().cpu() for i, name in enumerate(wanted)}
        kinds = dict.fromkeys(wanted, FieldSpec("next_token"))
        return self._finite(SampleBatch(local.ids, local.lengths, fields, kinds))

    def compute_log_probs(self, local: SampleBatch, plan: Plan, masks: Sequence[str] | None = None) -> SampleBatch:
        """Log-probability of every token given those before it, as `forward` returns it."""
        return self.forward(local, plan, masks=masks)

    def evaluate(self, local: SampleBatch, plan: Plan, loss: Any) -> dict[str, float]:
        """The loss (under "loss") and metrics of a loss object over the planned samples, without gradient."""
        with self._consensus("evaluate") as facts:
            spec = loss_spec(loss)
            packs = self._pack_for(facts, local, plan, spec)
            own = counts_here(self.layout, local, plan, spec)
            facts.count(own.vector())
        counts = own.with_vector(facts.total)
        scaling = Scaling(per_token=True, num_micro_batches=1, dp_size=1)
        runner = LossRunner(loss, spec, counts, self._head(), scaling, train=False)
        with torch.no_grad(), self._evaluating():
            records = self._run(plan, packs, runner.bind, forward_only=True)
        total, metrics, _ = join_outcomes(self.state, [r for r in records if r is not None], runner)
        return {"loss": total, **as_numbers(metrics)}

    def generate(
        self, prompts: SampleBatch, settings: GenerationSettings, draws: torch.Tensor | None = None
    ) -> SampleBatch:
        """Samples responses to this rank's prompts; see `strategy.generation.generate`."""
        from roll_batching.strategy.generation import check_generation, generate

        with self._consensus("generate") as facts:
            check_generation(facts, prompts, settings, self.state, draws)
        self.gather_parameters()  # not in the forward pass: ranks without prompts make none
        with self._evaluating():
            return self._finite(generate(self.state, prompts, settings, draws))

    # ---- model directories

    def export(self, path: str | Path, *, replaces: Callable[[Path], bool] = lambda path: False) -> None:
        """Writes the model as a Hugging Face directory, like the one of `model_args.model_name_or_path`. Collective.

        `path` appears as that of `save`; a folder that lies there is replaced where `replaces` says so.

        Raises:
            RankError: on all ranks: `path` is there, the model came from no such directory, or a rank could not write.
        """
        from roll_batching.strategy.export import export_model

        export_model(self.state, self._directory("export"), path, replaces=replaces)

    def tensor_stream(self) -> TensorStream:
        """The model's tensors under the names of its model directory, on rank 0, bucket by bucket. Collective.

        Raises `RankError` on all ranks where the model came from no such directory.
        """
        from roll_batching.strategy.tensor_stream import TensorStream

        return TensorStream(self.state, self._directory("tensor_stream"))

    def _directory(self, what: str) -> str:
        with self._consensus(what):
            source = self._configured().model_args.model_name_or_path
            if source is None:
                raise CheckpointError(
                    "this model started from model_args.architecture: only one that came from a model directory "
                    "(model_name_or_path) can be written as one"
                )
        return source

    # ---- shared by the strategies

    def _run(self, plan: Plan, packs: Packs, bind: Any, **options: Any) -> list[Any]:
        state = self.state
        return run_schedule(
            plan,
            packs,
            state.chunks,
            bind,
            state.layout,
            pipeline_shapes=state.settings.pipeline_shapes,
            rows_form=state.settings.rows_form,
            pg_collection=state.pg_collection,
            **options,
        )

    def _head(self) -> HeadContext:
        return HeadContext(layout=self.layout, vocab_size=self.state.vocab_size, temperature=self.temperature)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        chunks = self.chunks
        modes = [chunk.training for chunk in chunks]
        for chunk in chunks:
            chunk.eval()
        try:
            yield
        finally:
            for chunk, mode in zip(chunks, modes, strict=True):
                chunk.train(mode)

    def _consensus(self, what: str) -> contextlib.AbstractContextManager[Facts]:
        """See `Team.agree`; for what computes with the weights."""
        self._host.require(["parameters"], what)
        return self.layout.team.agree(what)

    def _pack(self, facts: Facts, local: SampleBatch, plan: Plan, masks: Sequence[str] | None) -> Packs:
        packs = pack_inputs(self.state, facts, local, plan, masks)
        self._notice_fillers(plan)
        return packs

    def _pack_for(self, facts: Facts, local: SampleBatch, plan: Plan, spec: LossSpec) -> Packs:
        """`_pack` for a loss, with its own look at the samples of each micro-batch."""
        facts.equal("the loss", spec.description)
        packs = self._pack(facts, local, plan, spec.masks)
        if spec.check is not None and (local.origin is None or self.layout.is_last_stage):
            mine = plan.micro_batches[self.layout.dp_rank]
            spec.check(local, [local.rows_of(plan.ids[mb.samples]).numpy() for mb in mine if not mb.is_filler])
        return packs

    def _notice_fillers(self, plan: Plan) -> None:
        if len(plan.samples) < self.layout.dp_size and dist.get_rank() == 0 and not self._noticed_fillers:
            self._noticed_fillers = True
            logger.warning(
                "a step has %d samples for %d data-parallel ranks: the others compute filler micro-batches, which "
                "change nothing in the result. Use larger mini-batches or fewer ranks (said once)",
                len(plan.samples),
                self.layout.dp_size,
            )
