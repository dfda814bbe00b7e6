"""`MegatronInferStrategy`: a Megatron model that plans, packs and runs forward passes."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.config import BatchingConfig, WorkerConfig
from roll_batching.data import FieldSpec, LengthTable, SampleBatch
from roll_batching.data.checks import content_digest
from roll_batching.data.table import require_batch
from roll_batching.distributed import Facts, consensus, digest, exchange, host_group
from roll_batching.errors import LayoutError, LossError
from roll_batching.losses.contract import LossSpec, loss_spec
from roll_batching.losses.denominators import StepCounts, local_counts, truncated_lengths
from roll_batching.losses.head import HeadContext
from roll_batching.losses.metric_kinds import HostMetric, as_numbers, join_parts, to_host
from roll_batching.losses.runner import LossRunner, MicroBatchRecord, Scaling
from roll_batching.modeling.builder import build_chunks, resolve_dtype
from roll_batching.modeling.cost import model_cost
from roll_batching.modeling.parallel import ParallelLayout, make_layout, start_processes
from roll_batching.packing.batch import PackedBatch, pack_step, unpack_results
from roll_batching.planning import CostModel, Plan, PlanConstraints, plan_step
from roll_batching.strategy.built import of_built_model
from roll_batching.strategy.checkpoint import load_strategy, save_strategy
from roll_batching.strategy.generation import GenerationSettings, check_generation, generate
from roll_batching.strategy.schedule import run_schedule
from roll_batching.strategy.settings import StepSettings
from roll_batching.strategy.weights import check_same_parameters, copy_parameters, gather_parameters

logger = logging.getLogger(__name__)

_SAME_SAMPLES = "Give all tensor-, context- and pipeline-parallel ranks of a data-parallel rank the same samples"


class MegatronInferStrategy:
    """Forward passes of one Megatron model over planned micro-batches.

    Built from a role's settings; `initialize` builds the model. Every method is called by all ranks
    together. Results come back in the caller's order, on every rank of a replica.
    """

    layout: ParallelLayout = of_built_model()
    chunks: list[Any] = of_built_model()
    dtype: torch.dtype = of_built_model()
    batching: BatchingConfig = of_built_model()
    settings: StepSettings = of_built_model()

    def __init__(self, config: WorkerConfig | None = None, *, seed: int = 0, temperature: float = 1.0) -> None:
        self.config, self.seed = config, seed
        if config is not None:  # else the caller's parts bring their own
            self.batching, self.settings = config.batching(), StepSettings.of(config)
        self.temperature = temperature
        """Logits are divided by it wherever log-probs are computed; rollouts should sample with the same."""
        self.pg_collection: Any = None
        """Megatron's process groups, where they are not those of its parallel state."""
        self.cost: CostModel | None = None
        self.vocab_size: int | None = None
        self._noticed_fillers = False

    # ---- building

    def initialize(self) -> None:
        """Joins the processes, creates Megatron's groups and builds the model.

        Raises `LayoutError` or `ConfigError` when model, layout and processes do not fit.
        """
        config = self._configured()
        architecture = config.model_args.architecture
        if architecture is None:
            raise LayoutError("model_args.architecture is missing: it gives the shape of the model to build")
        device = start_processes(config.backend_timeout)
        with consensus(host_group(), "initialize") as facts:
            words = repr((config.model_dump(exclude={"data_args"}), self.seed, self.temperature))
            facts.equal("the role's configuration", digest(words), "Start all ranks with the same settings")
        settings = config.strategy_args.strategy_config
        self.layout = make_layout(settings.parallel_dims(dist.get_world_size()), device)
        self.vocab_size = architecture.vocab_size
        self.dtype = resolve_dtype(config.model_args.dtype, device)
        self._build()
        self.cost = model_cost(self.chunks[0].config, architecture.vocab_size, self.layout)

    def _configured(self) -> WorkerConfig:
        if self.config is None:
            raise LayoutError("this strategy has no WorkerConfig to build a model of; from_parts takes one that exists")
        return self.config

    def _build(self) -> None:
        self.chunks = self._build_chunks()
        for chunk in self.chunks:
            chunk.eval()

    def _build_chunks(self) -> list[Any]:
        config = self._configured()
        architecture = config.model_args.architecture
        assert architecture is not None  # checked by initialize
        return build_chunks(
            architecture,
            config.strategy_args.strategy_config,
            self.layout,
            self.dtype,
            seed=self.seed,
        )

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.layout.device

    def gather_parameters(self) -> None:
        """Makes parameters whole on every rank: before you read those of `chunks` yourself. Collective."""
        gather_parameters(self.chunks)

    def copy_weights_from(self, other: MegatronInferStrategy) -> None:
        """Takes over the parameters of a strategy with the same model and layout (else `LayoutError`). Collective."""
        with self._consensus("copy_weights_from"):
            check_same_parameters(other.chunks, self.chunks)
        copy_parameters(other.chunks, self.chunks)

    # ---- planning

    def plan(self, table: LengthTable, *, forward: bool = False, group_ids: Any = None, home_rank: Any = None) -> Plan:
        """A plan over the samples of `table`, by this role's settings and the model's cost.

        `forward` plans a pass without gradient. Pure: all ranks get the same plan from the same table.
        """
        batching = self.batching.infer if forward else self.batching.train
        constraints = PlanConstraints.of(
            self.layout, batching, group_size=self.settings.group_size if self.layout.interleaved else None
        )
        return plan_step(
            table.lengths,
            constraints,
            cost=self.cost,
            ids=table.ids,
            group_ids=group_ids,
            home_rank=home_rank,
            location=table.location,
        )

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
            RankError: when any rank's input is wrong, on all ranks, before the model runs.
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
                log_probs, entropy = head.log_probs(
                    output, pack, chunk, entropy="entropy" in wanted, idle=not pack.samples
                )
                parts = {"log_probs": log_probs, "entropy": entropy}
                return torch.stack([x for name in wanted if (x := parts[name]) is not None], -1)

            return collect

        with torch.no_grad(), self._evaluating():
            results = self._run(plan, packs, bind, forward_only=True, collect=True)
        rows = torch.zeros(local.num_tokens, len(wanted), dtype=self.result_dtype, device=self.device)
        if self.layout.is_last_stage and len(local):
            rows = unpack_results(local, packs, results).to(rows.dtype)
        if self.layout.pp_size > 1:
            last = dist.get_global_rank(self.layout.pp_group, self.layout.pp_size - 1)
            dist.broadcast(rows, last, group=self.layout.pp_group)
        fields = {name: rows[:, i].contiguous().cpu() for i, name in enumerate(wanted)}
        return SampleBatch(local.ids, local.lengths, fields, {name: FieldSpec("next_token") for name in wanted})

    def compute_log_probs(self, local: SampleBatch, plan: Plan, masks: Sequence[str] | None = None) -> SampleBatch:
        """Log-probability of every token given those before it, as `forward` returns it."""
        return self.forward(local, plan, ("log_probs",), masks)

    def evaluate(self, local: SampleBatch, plan: Plan, loss: Any) -> dict[str, float]:
        """The loss (under "loss") and metrics of a loss object over the planned samples, without gradient."""
        with self._consensus("evaluate") as facts:
            spec = loss_spec(loss)
            packs = self._pack_for(facts, local, plan, spec)
            own = self._local_counts(local, plan, spec)
        counts = self._reduce_counts(own)
        scaling = Scaling(per_token=True, num_micro_batches=1, dp_size=1)
        runner = LossRunner(loss, spec, counts, self._head(), scaling, train=False)
        with torch.no_grad(), self._evaluating():
            records = self._run(plan, packs, runner.bind, forward_only=True)
        total, metrics = self._finish([r for r in records if r is not None], runner)
        return {"loss": total, **as_numbers(metrics)}

    def generate(self, prompts: SampleBatch, settings: GenerationSettings) -> SampleBatch:
        """Samples responses to this rank's prompts; see `strategy.generation.generate`."""
        with self._consensus("generate") as facts:
            check_generation(prompts, settings)
            facts.equal("the settings", settings)
            facts.equal_in_part(
                "the prompts of a replica", content_digest(prompts.ids, prompts.lengths, prompts.fields), _SAME_SAMPLES
            )
        self.gather_parameters()  # not in the forward pass: ranks without prompts make none
        with self._evaluating():
            return generate(self, prompts, settings)

    # ---- checkpoints

    def save(self, path: str | Path) -> None:
        """Writes weights, and with an optimizer its state, schedule position and skipped steps, to the folder `path`.

        Collective; `path` is on a file system that all ranks see. It appears when it is whole and not before; a
        checkpoint that was there is replaced. Any parallel layout can load it.

        Raises:
            RankError: on all ranks: `path` holds something else, the optimizer is Megatron's distributed one,
                psutil is missing, or a rank could not write.
        """
        save_strategy(self, path)

    def load(self, path: str | Path, *, optimizer: bool = True) -> None:
        """Takes over what `save` wrote, in this or another parallel layout. Collective.

        Learning rate, decay and the like stay as configured: the schedule goes on from the saved position. With
        `optimizer=False`, and in a strategy that has none, only the weights are read.

        Raises:
            RankError: on all ranks, before anything is changed: there is no such checkpoint, it belongs to a model of
                another shape or architecture (both named), or holds no optimizer.
        """
        load_strategy(self, path, optimizer=optimizer and hasattr(self, "optimizer"))

    # ---- shared by the strategies

    def _run(self, plan: Plan, packs: list[PackedBatch], bind: Any, **options: Any) -> list[Any]:
        return run_schedule(
            plan,
            packs,
            self.chunks,
            bind,
            self.layout,
            pipeline_shapes=self.settings.pipeline_shapes,
            rows_form=self.settings.rows_form,
            pg_collection=self.pg_collection,
            **options,
        )

    def _head(self) -> HeadContext:
        return HeadContext(layout=self.layout, vocab_size=self.vocab_size, temperature=self.temperature)

    @property
    def result_dtype(self) -> torch.dtype:
        """What per-token results are returned in: fp32, or fp64 for an fp64 model."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        try:
            yield
        finally:
            for chunk, mode in zip(self.chunks, modes, strict=True):
                chunk.train(mode)

    def _consensus(self, what: str) -> contextlib.AbstractContextManager[Facts]:
        """See `distributed.consensus`, among all ranks, with replicas as parts."""
        layout = self.layout
        return consensus(layout.host_group, what, part=layout.dp_rank, parts=layout.dp_size)

    def _pack(self, facts: Facts, local: SampleBatch, plan: Plan, masks: Sequence[str] | None) -> list[PackedBatch]:
        """Packs this rank's micro-batches, and states what other ranks must have as well. Inside a consensus."""
        require_batch("a pass", local)
        self._check_plan(plan)
        facts.equal("the plan", plan.fingerprint, "Plan on all ranks from the same lengths and constraints")
        packs = pack_step(
            local,
            plan,
            dp_rank=self.layout.dp_rank,
            cp_rank=self.layout.cp_rank,
            device=self.device,
            masks=masks,
            tokens=int(plan.tokens.max()) if self.settings.pipeline_shapes == "shared" else None,
        )
        if self.layout.tp_size * self.layout.cp_size * self.layout.pp_size > 1:
            facts.equal_in_part(
                "the batch of a replica", content_digest(local.ids, local.lengths, local.fields), _SAME_SAMPLES
            )
        self._notice_fillers(plan)
        return packs

    def _pack_for(self, facts: Facts, local: SampleBatch, plan: Plan, spec: LossSpec) -> list[PackedBatch]:
        """`_pack` for a loss, with its own look at the samples of each micro-batch."""
        facts.equal("the loss", spec.words)
        packs = self._pack(facts, local, plan, spec.masks)
        if spec.check is not None:
            spec.check(local, [local.rows_of(pack.ids).numpy() for pack in packs if pack.samples])
        return packs

    def _notice_fillers(self, plan: Plan) -> None:
        placed = len(plan.samples)
        if placed < self.layout.dp_size and dist.get_rank() == 0 and not self._noticed_fillers:
            self._noticed_fillers = True
            logger.warning(
                "a step has %d samples for %d data-parallel ranks: the others compute filler micro-batches, which "
                "change nothing in the result. Use larger mini-batches or fewer ranks (said once)",
                placed,
                self.layout.dp_size,
            )

    def _check_plan(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise LayoutError(f"plan is a {type(plan).__name__}: pass what strategy.plan(table) or plan_step returns")
        planned, layout = plan.constraints, self.layout
        for name in ("dp_size", "tp_size", "cp_size", "pp_size", "vpp_size", "ep_size", "sequence_parallel"):
            if getattr(planned, name) != getattr(layout, name):
                raise LayoutError(
                    f"the plan was made for {name}={getattr(planned, name)} and this job runs {getattr(layout, name)}: "
                    "plan with strategy.plan(...) or with the constraints of this layout"
                )

    def _local_counts(self, local: SampleBatch, plan: Plan | None, spec: LossSpec) -> StepCounts:
        used = truncated_lengths(plan, self.layout.dp_rank) if plan is not None else None
        counted = local
        if plan is not None:
            counted = local.select_ids(plan.ids[plan.rank_samples(self.layout.dp_rank)])
        return local_counts(counted, spec.masks, spec.sums, used)

    def _reduce_counts(self, counts: StepCounts) -> StepCounts:
        vector = counts.vector()
        layout = self.layout
        if layout.tp_rank or layout.cp_rank or layout.pp_rank:  # one voice per replica
            vector.zero_()
        dist.all_reduce(vector, group=layout.host_group)
        return counts.with_vector(vector)

    def _finish(self, records: list[MicroBatchRecord], runner: LossRunner) -> tuple[float, dict[str, HostMetric]]:
        """(loss of the step, metrics over all ranks); raises what any rank found, on all.

        The first host read of the step. Every rank tells its loss, its metrics and, where a loss is
        not finite or broke its contract, what is wrong and with which samples.
        """
        everyone = exchange(self.layout.host_group, "the step's loss", lambda: self._outcome(records, runner))
        problems = list(dict.fromkeys(text for text, _, _ in everyone if text))
        if problems:
            raise LossError("; ".join(problems)) from runner.breach
        return sum(loss for _, loss, _ in everyone), join_parts(part for _, _, part in everyone)

    def _outcome(
        self, records: list[MicroBatchRecord], runner: LossRunner
    ) -> tuple[str | None, float, dict[str, HostMetric]]:
        """What is wrong with this rank's loss, the loss, and its metrics: one device read."""
        losses, metrics = to_host([r.loss for r in records], [r.metrics for r in records])
        problem = None if runner.breach is None else str(runner.breach)
        bad = [r for r, value in zip(records, losses, strict=True) if not math.isfinite(value)]
        if problem is None and bad:
            samples = sorted({sample for record in bad for sample in record.culprits()})
            value = losses[records.index(bad[0])]
            problem = (
                f"the loss is {value} for sample{'s' if len(samples) > 1 else ''} {', '.join(map(str, samples[:16]))}: "
                "look at these samples' fields and at what the loss computes from them. The optimizer made no step"
            )
        layout = self.layout
        speaks = layout.is_last_stage and layout.tp_rank == 0 and (layout.cp_rank == 0 or runner.partial_over_cp)
        return (problem, sum(losses), metrics) if speaks else (problem, 0.0, {})
