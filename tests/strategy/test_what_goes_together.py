"""Combinations of features that no table of support refuses train like the same on one rank.

The design has every pair of levels of `FACTORS` that no row of the tables refuses, and triples as they come. Each
combination passes the schema of a job, then trains two steps in its layout and mode. Losses, gradient norms and
gradients are those of the same model on one rank, padded, in fp64, within the limits of `test_layouts`.
`COMBINATIONS_SEED=7` draws another design. `COMBINATIONS_MORE=20` adds so many combinations on up to eight ranks, for
triples that the others have not.
"""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roll_batching.jobs.config import ConfigFileError, config_from_dict
from roll_batching.jobs.config import features as f
from roll_batching.jobs.config.support import PACKING_REFUSALS, REFUSALS
from roll_batching.jobs.config.trained_together import TRAINED_TOGETHER, trained_pairs
from roll_batching.settings import support as s
from roll_batching.settings.megatron_config import MegatronConfig
from roll_batching.settings.model import ArchitectureConfig, ModelArgs, MoEConfig
from tests.jobs.config.test_idle_keys import job_of
from tests.losses.steps import mine, refill
from tests.strategy.test_layouts import FP64_LIMIT, FP64_STEPS_LIMIT, LIMIT, STEPS_LIMIT
from tests.strategy.test_shared_prefixes import batch, losses
from tests.support.combinations import Case, Factors, Level, levels_of
from tests.support.exact import limit_of
from tests.support.models import ARCHITECTURE, whole_gradients, worker_config, worst_difference
from tests.support.ranks import RanksFailed, meet, part, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.layouts]

HERE = "tests.strategy.test_what_goes_together:"
SEED = int(os.environ.get("COMBINATIONS_SEED", "1"))
MORE = int(os.environ.get("COMBINATIONS_MORE", "2"))
MOST_RANKS = 4
ALL_REFUSALS = (*s.ROLE_REFUSALS, *PACKING_REFUSALS, *REFUSALS)
LAYERS, CAP = 4, 200

SWITCHES = (
    *("micro_batch_mean", "clipped", "offload", "uneven", "tied", "qk_norm", "grouped", "one_group", "windows"),
    *("sinks", "gates", "sandwich", "biases", "latent", "delta", "hybrid", "heads", "experts", "router_loss"),
    *("moving_bias", "replay", "adapters", "frozen"),
)
FACTORS: dict[str, tuple[Any, ...]] = {
    "mode": ("padded", "dynamic", "packed", "shared prefixes"),
    "loss": ("policy", "sft", "sequences", "logits", "dpo", "kto", "distill", "values"),
    "tp": (1, 2, "2 without sp"),
    **dict.fromkeys(("pp", "vpp", "dp", "ep"), (1, 2)),
    "cp": (1, 2, "auto"),
    "slices": (1, 3),
    "optimizer": ("plain", "distributed", "overlapped"),
    "recompute": (None, "full", "selective"),
    **dict.fromkeys(SWITCHES, (False, True)),
}
WITHOUT_CRITIC, UNSHARED = FACTORS["loss"][:-1], FACTORS["mode"][:-1]
NEEDS: dict[Level, dict[str, tuple[Any, ...]]] = {
    ("vpp", 2): {"pp": (2,)},
    ("uneven", True): {"pp": (2,)},
    ("cp", "auto"): {"dp": (2,), "mode": ("packed", "shared prefixes")},
    ("slices", 3): {"mode": ("packed", "shared prefixes")},
    ("ep", 2): {"experts": (True,), "dp": (2,)},
    # Router losses and counts of tokens depend on the micro-batches in a mean of these, and take a shared token once.
    ("router_loss", True): {"experts": (True,), "micro_batch_mean": (False,), "mode": UNSHARED},
    ("moving_bias", True): {"experts": (True,), "mode": UNSHARED},
    ("replay", True): {"experts": (True,), "loss": ("policy", "sequences", "logits")},
    ("heads", True): {"loss": WITHOUT_CRITIC},
    ("one_group", True): {"grouped": (True,), "tp": (2, "2 without sp")},  # fewer than tensor-parallel ranks
}
"""By level, the levels of other factors without which it has no meaning. Limitations stand in the tables."""
ON_ONE_RANK: Case = {
    name: FACTORS[name][0]
    for name in (
        *("mode", "tp", "pp", "vpp", "dp", "ep", "cp", "slices", "optimizer", "recompute"),
        *("micro_batch_mean", "offload", "uneven"),
    )
}
"""Levels of the combination that is the right result."""

# ---- a combination as settings

TASKS = {"sft": "sft", "dpo": "dpo", "kto": "kto", "distill": "distill", "values": "ppo"}
"""Names of jobs by loss; others are GRPO's."""
CANDIDATES = 5
"""A teacher's tokens."""

PARTS = {
    **{"tied": "tie_word_embeddings", "qk_norm": "qk_layernorm", "sinks": "attention_sinks"},
    **{"gates": "attention_output_gate", "sandwich": "sandwich_norms", "biases": "add_bias_linear"},
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}
DELTA = {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 6, "value_head_dim": 5, "layers": (1, 0, 1, 0)}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 6, "mamba_num_groups": 4, "mamba_state_dim": 5, "pattern": "M-*M"}
SHARDED = {"use_distributed_optimizer": True}
SHAPES: dict[Level, dict[str, Any]] = {
    **{(name, True): {key: True} for name, key in PARTS.items()},
    ("grouped", False): {"num_query_groups": 4},
    ("one_group", True): {"num_query_groups": 1},
    ("windows", True): {"sliding_window": 16, "window_layers": (1, 0, 1, 0)},
    ("latent", True): {"multi_latent_attention": LATENT},
    ("delta", True): {"gated_delta_net": DELTA},
    ("hybrid", True): {"hybrid": MAMBA},
    ("experts", True): {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}},
}
"""Keys of the architecture."""
LAYOUTS: dict[Level, dict[str, Any]] = {
    ("tp", 2): {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ("tp", "2 without sp"): {"tensor_model_parallel_size": 2},
    ("pp", 2): {"pipeline_model_parallel_size": 2},
    ("vpp", 2): {"virtual_pipeline_model_parallel_size": 2},
    ("cp", 2): {"context_parallel_size": 2},
    ("cp", "auto"): {"context_parallel_size": "auto"},
    ("slices", 3): {"pipeline_slices": 3},
    ("ep", 2): {"expert_model_parallel_size": 2},
    ("optimizer", "distributed"): SHARDED,
    ("optimizer", "overlapped"): SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True},
    ("recompute", "full"): {"recompute_granularity": "full"},
    ("recompute", "selective"): {"recompute_granularity": "selective"},
    ("micro_batch_mean", True): {"calculate_per_token_loss": False},
    ("moving_bias", True): {"moe_router_bias_update_rate": 0.01},
    ("heads", True): {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3},
}
"""Keys of `strategy_config`."""
MODELS: dict[Level, dict[str, Any]] = {
    ("adapters", True): {"lora_target": ("all-linear",), "lora_rank": 4},
    ("frozen", True): {"freeze_module_prefix": ("embedding",)},
}
"""Keys of `model_args`."""
OF_JOBS: dict[s.Feature, tuple[Level, ...]] = {
    f.REPLAY: (("replay", True),),
    **dict.fromkeys((f.CP_PER_PACK, f.SIZE_PER_PACK), (("cp", "auto"),)),
    **dict.fromkeys((f.SHARED_PREFIXES, f.SHARED_PACKS), (("mode", "shared prefixes"),)),
    f.UNPACKED: (("mode", "padded"), ("mode", "dynamic")),
    f.SLICED: (("slices", 3),),
    f.TEACHER: (("loss", "distill"),),
    f.CRITIC: (("loss", "values"),),
    f.KTO: (("loss", "kto"),),
    f.ADAPTERS: (("adapters", True),),
}
"""Features of a job's tables, by the levels that switch them on here. Those of a role's table read the settings."""

FEATURES = {
    *(feature for feature in TRAINED_TOGETHER if feature not in OF_JOBS),
    *(feature for row in s.ROLE_REFUSALS for feature in (row.feature, row.other)),
    *f.ROLE_PARTS,
}
"""Features of a role's model and layout."""


def keys_of(case: Case, table: dict[Level, dict[str, Any]]) -> dict[str, Any]:
    return {key: value for level in case.items() for key, value in table.get(level, {}).items()}


def architecture(case: Case) -> dict[str, Any]:
    shape = {**ARCHITECTURE, "num_layers": LAYERS, **keys_of(case, SHAPES)}
    if case["experts"]:
        shape["moe"] = shape["moe"] | ({"z_loss_coeff": 0.02} if case["router_loss"] else {})
        if case["moving_bias"]:
            shape["moe"] |= {"router_score_function": "sigmoid", "router_expert_bias": True}
        if case["hybrid"]:
            shape["moe"] |= {"layer_freq": (0, 1, 0, 0)}
            shape["hybrid"] = shape["hybrid"] | {"pattern": "ME*M"}
    return shape


def layout(case: Case) -> dict[str, Any]:
    stages = {"pipeline_model_parallel_layout": "Ett|t|t|L" if case["vpp"] == 2 else "Et|tttL"}
    return keys_of(case, LAYOUTS) | (stages if case["uneven"] else {})


def features_of(case: Case) -> set[s.Feature]:
    """Features of the tables that are on."""
    shape, config = architecture(case), layout(case)
    shape |= {"moe": MoEConfig(**shape["moe"]) if case["experts"] else None, "mtp_num_layers": 2 * case["heads"]}
    model = ModelArgs.model_construct(**keys_of(case, MODELS), value_head=case["loss"] == "values")
    built = (ArchitectureConfig.model_construct(**shape), MegatronConfig.model_construct(**config))
    parts = s.Parts(model, *built, "local")
    of_job = {feature for feature, levels in OF_JOBS.items() if not case.items().isdisjoint(levels)}
    of_model = {feature for feature in FEATURES if feature.is_on(parts)}
    return of_job | of_model | {f.ROLE_PARTS[feature] for feature in of_model if feature in f.ROLE_PARTS}


def role_of(case: Case) -> Any:
    """The role that trains, of a job with the features of a case. Raises ConfigFileError where the schema refuses."""
    mode = "packed" if case["mode"] == "shared prefixes" else case["mode"]
    # Where packs have their own sizes, one rank's: below the longest samples, or pairs of them.
    cap = CAP if case["cp"] != "auto" else 70 if case["loss"] == "dpo" else 40
    rows = {"per_device_train_batch_size": 4}
    role = worker_config(mode, cap, architecture=architecture(case), megatron=layout(case), training=rows)
    job, settings = job_of(TASKS.get(case["loss"], "grpo")), role.model_dump(exclude_unset=True)
    settings["model_args"] |= keys_of(case, MODELS) | {"dtype": "fp64" if case["optimizer"] == "plain" else "fp32"}
    if mode == "packed":
        settings["sequence_packing_args"]["share_prefixes"] = case["mode"] == "shared prefixes"
    if case["replay"]:
        settings["router_replay"] = {"mode": "R2"}
    settings |= {"data_args": job["actor_train"]["data_args"], "device_mapping": list(range(ranks_of(case)))}
    job |= {"actor_train": settings, "sequence_length": 96, "prompt_length": 64, "response_length": 32}
    if case["loss"] == "distill":
        job["logits_topk"] = CANDIDATES
    if case["loss"] == "values":
        job["critic"] = {key: value for key, value in settings.items() if key != "device_mapping"}
    checked = config_from_dict(job)
    return checked.critic if case["loss"] == "values" else checked.actor_train


def ranks_of(case: Case) -> int:
    return math.prod({"auto": 1, "2 without sp": 2}.get(case[name], case[name]) for name in ("tp", "pp", "dp", "cp"))


def shown(case: Case) -> str:
    on = (name if level is True else f"{name}={level}" for name, level in case.items() if level != FACTORS[name][0])
    return " ".join(on) or "defaults"


def is_possible(case: Case, most_ranks: int) -> bool:
    """Whether the case fits the ranks, and no row of the tables refuses it."""
    if ranks_of(case) > most_ranks or (case["experts"] and case["tp"] == "2 without sp"):  # rule of `model_fits`
        return False
    on = features_of(case)
    return not any(row.feature in on and row.other in on for row in ALL_REFUSALS)


COMBINATIONS = Factors(FACTORS, NEEDS, is_possible)


# ---- training


def samples_of(case: Case) -> Any:
    """Samples in groups with common prefixes, with the fields of all losses and, for replay, experts of each token."""
    from roll_batching.samples.fields import EXPERTS_SPEC

    g = torch.Generator().manual_seed(5)
    whole = batch("groups", g)
    fields = {
        "desirable": torch.arange(len(whole)) % 3 > 0,
        "reference_point": torch.full((len(whole),), 0.3),
        "teacher_log_probs": torch.randn(whole.num_tokens, CANDIDATES, generator=g).log_softmax(-1) - 0.1,
        "teacher_ids": torch.rand(whole.num_tokens, 61, generator=g).topk(CANDIDATES).indices.int(),
    }
    kinds = dict.fromkeys(fields, "sample") | dict.fromkeys(("teacher_log_probs", "teacher_ids"), "next_token")
    whole = whole.with_fields(fields, kinds)
    if case["replay"]:  # by token, so that samples with a common prefix have the same experts there
        scores = torch.rand(61, 1 if case["hybrid"] else LAYERS, 4, generator=g)
        experts = scores.topk(2).indices.to(torch.int16)[whole["input_ids"]]
        whole = whole.with_fields({"routed_experts": experts}, {"routed_experts": EXPERTS_SPEC})
    return whole


Steps = list[tuple[float, float, dict[str, torch.Tensor]]]
"""Loss, norm of the gradients and gradients of two steps."""


def train(case: Case, role: Any) -> Steps:
    """Two steps from the weights that names stand for."""
    from roll_batching.losses import KTOLoss
    from roll_batching.losses.distillation import DistillLoss
    from roll_batching.samples import distribute
    from roll_batching.settings import TrainingArgs
    from roll_batching.strategy import MegatronTrainStrategy
    from roll_batching.strategy.pack_features import gather_table

    strategy = MegatronTrainStrategy(role)
    strategy.initialize()
    refill(strategy)
    strategy.start_phase(TrainingArgs(learning_rate=1e-3, max_grad_norm=0.05 if case["clipped"] else 0.0))
    loss = {**losses(), "kto": KTOLoss(), "distill": DistillLoss()}[case["loss"]]
    whole, steps = samples_of(case), []
    place = {sample: i for i, sample in enumerate(whole.ids.tolist())}
    for _ in range(2):
        local = mine(strategy, whole)
        table = gather_table(strategy.state, local)
        pairs = [place[sample] // 2 for sample in table.ids.tolist()] if case["loss"] == "dpo" else None
        plan = strategy.plan(table, group_ids=pairs)
        assert case["cp"] != "auto" or max(mb.cp_size for rank in plan.micro_batches for mb in rank) > 1
        assert case["slices"] == 1 or plan.slices is not None
        assert case["mode"] != "shared prefixes" or pairs is not None or plan.report.shared_tokens > 0
        result = strategy.train_step(distribute(local, plan), plan, loss)
        gradients = whole_gradients(strategy.chunks, 61, strategy.layout.tp_rank, case["optimizer"] != "plain")
        steps.append((result.loss, result.grad_norm, gradients))
        if case["offload"]:
            strategy.offload_states()
            strategy.load_states()
    return steps


def train_all(payload: tuple[str, list[tuple[Case, Any]]]) -> None:
    """Writes into the folder, by case, right results and their rounding in fp32, or how it differs from these."""
    folder = Path(payload[0])
    for number, (case, role) in enumerate(payload[1]):
        meet(number)
        steps, file = train(case, role), folder / f"{shown(case | ON_ONE_RANK)}.pt"
        if case == case | ON_ONE_RANK:
            in_fp32 = role.model_copy(update={"model_args": role.model_args.model_copy(update={"dtype": "fp32"})})
            torch.save((steps, worst_difference(train(case, in_fp32)[0][2], steps[0][2])[0]), file)
        if dist.get_rank() == 0:
            found = difference(steps, *torch.load(file), exact=case["optimizer"] == "plain")
            (folder / f"{shown(case)}.outcome").write_text(found)
        part()


def difference(steps: Steps, right: Steps, rounding: float, *, exact: bool) -> str:
    """What is beyond its limit in two steps, or "". In fp32, where Adam divides by rounding, of the second the loss."""
    limits = (FP64_LIMIT, FP64_STEPS_LIMIT) if exact else (max(LIMIT, limit_of(rounding)), STEPS_LIMIT)
    for number, (found, expected) in enumerate(zip(steps, right, strict=True)):
        gaps = {word: abs(found[i] / expected[i] - 1) for i, word in enumerate(("loss", "gradient norm"))}
        if exact or number == 0:
            gap, name = worst_difference(found[2], expected[2])
            gaps |= {f"gradient of {name}": gap, "replicas": found[2]["spread"]}
        if not max(gaps.values()) < limits[number]:
            return f"step {number + 1}: " + ", ".join(f"{word} {gap:.1e}" for word, gap in gaps.items())
    return ""


def run_all(cases: list[tuple[Case, Any]], folder: Path) -> list[str]:
    """What is wrong, by case. Another launch goes on behind a case whose ranks fail."""
    files = {shown(case): folder / f"{shown(case)}.outcome" for case, _ in cases}
    while cases:
        try:
            run_ranks(ranks_of(cases[0][0]), HERE + "train_all", (str(folder), cases), timeout=600)
        except RanksFailed as error:
            files[next(shown(case) for case, _ in cases if not files[shown(case)].exists())].write_text(str(error))
        cases = [item for item in cases if not files[shown(item[0])].exists()]
    return [f"{name}\n    {text}" for name, file in files.items() if (text := file.read_text())]


# ---- tests


@pytest.fixture(scope="module")
def design() -> list[Case]:
    return COMBINATIONS.draw(SEED, MOST_RANKS, MORE)


def test_the_design_has_every_pair_of_the_trained_features(design: list[Case], report: Any) -> None:
    triples = set().union(*(levels_of(case, 3) for case in design))
    pairs = COMBINATIONS.pairs(MOST_RANKS)
    report(f"{len(design)} combinations of seed {SEED} have {len(pairs)} pairs and {len(triples)} triples")
    assert pairs <= set().union(*(levels_of(case, 2) for case in design))
    together = set().union(*(set(itertools.permutations(features_of(case), 2)) for case in design))
    assert not {(one.name, other.name) for one, other in set(trained_pairs()) - together}


def test_combinations_train_like_one_rank(design: list[Case], tmp_path: Path, report: Any) -> None:
    wrong, roles = [], {}
    for case in design:
        try:
            roles |= {shown(one): (one, role_of(one)) for one in (case | ON_ONE_RANK, case)}
        except ConfigFileError as error:
            wrong.append(f"{shown(case)}\n    {error}")
    right = {name: item for name, item in roles.items() if item[0] == item[0] | ON_ONE_RANK}
    wrong += run_all(list(right.values()), tmp_path)
    others = [item for name, item in roles.items() if name not in right]
    for ranks in sorted({ranks_of(case) for case, _ in others}):
        wrong += run_all([item for item in others if ranks_of(item[0]) == ranks], tmp_path)
    assert not wrong, f"{len(wrong)} combinations of {len(design)}:\n" + "\n".join(wrong)
