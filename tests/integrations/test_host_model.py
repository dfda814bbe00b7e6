"""A host's loss function on planned packs: equal to our own loss over the same samples, in every kind of layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.exact import DTYPE, EXACT, OF_ROUTERS
from tests.support.ranks import RanksFailed, run_ranks

WIDTH, VOCABULARY, CLIP = 40, 61, (0.2, 0.28)
EXPERTS = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 32}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp1 to 2": (2, {"host_cp_size": 2}),
    "vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
}


def reading(rows: list[torch.Tensor], masks: list[torch.Tensor]) -> Any:
    """A function that gives these samples, as `HostModel.run` takes them."""
    from roll_batching.samples import SampleBatch

    kinds = {"input_ids": "token", "counted": "token"}
    return lambda: SampleBatch.from_lists({"input_ids": rows, "counted": masks}, kinds)


def host_rows(batch: Any) -> Any:
    """A host's batch for `HostModel.run`, here of our own kind."""
    from roll_batching.integrations.host_rows import HostRows
    from roll_batching.samples import SampleBatch

    return HostRows(batch, SampleBatch.select, SampleBatch.concat)


def padded(rows: list[torch.Tensor], width: int) -> torch.Tensor:
    return torch.stack([torch.cat([row, row.new_zeros(width - len(row))]) for row in rows])


class HostFunction:
    """A clipped policy loss as a host writes it: over rows [samples, width], divided by a count over all ranks."""

    def __init__(self, tokens: int, form: str) -> None:
        self.tokens, self.form, self.shapes = tokens, form, []

    def __call__(self, rows: Any, log_probs: torch.Tensor, entropy: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        assert entropy is not None
        fields = {name: rows.to_lists(name) for name in rows.schema}
        self.shapes.append(tuple(log_probs.shape[:1]))
        if self.form == "jagged":
            log_probs, entropy = (padded(list(x.unbind()), WIDTH)[:, : WIDTH - 1] for x in (log_probs, entropy))
        old, ref = (padded(fields[name], WIDTH)[:, : WIDTH - 1] for name in ("old_log_probs", "ref_log_probs"))
        mask = padded(fields["response_mask"], WIDTH)[:, 1:]
        advantages = torch.stack([torch.as_tensor(row) for row in fields["advantages"]])[:, None]
        ratio = (log_probs - old).exp()
        gain = torch.min(ratio * advantages, ratio.clip(1 - CLIP[0], 1 + CLIP[1]) * advantages)
        gap = ref - log_probs
        per_token = -gain + 0.05 * (gap.exp() - 1 - gap) - 0.02 * entropy
        loss = (per_token * mask).sum() / self.tokens
        return loss, {"loss": float(loss.detach()), "log_probs": list(log_probs.detach())}


def with_siblings(batch: Any) -> Any:
    """The samples, which all begin as the first one does, as far as its first 18 tokens go."""
    rows = [row.clone() for row in batch.to_lists("input_ids")]
    for row in rows:
        shared = min(18, len(row) - 1)
        row[:shared] = rows[0][:shared]
    return batch.with_fields({"input_ids": torch.cat(rows)}, {"input_ids": "token"})


def check_temperatures(plain: Any, cold: Any, warm: Any, mixed: Any, samples: int) -> float:
    """Difference of a pass with a temperature per sample from passes with one temperature each."""
    from roll_batching.integrations.host_model import in_order

    ordered = [
        in_order([(ids, answer["log_probs"]) for ids, answer in one], samples) for one in (plain, cold, warm, mixed)
    ]
    assert max(float((a - b).abs().max()) for a, b in zip(ordered[0], ordered[1], strict=True)) > 1e-3
    return max(float((ordered[3][n] - ordered[1 + n % 2][n]).abs().max()) for n in range(samples))


def compare(megatron: dict[str, Any]) -> dict[str, Any]:
    """Worst relative differences of gradients to our own loss, and of results without a gradient."""
    from roll_batching.integrations.host_model import HostModel, in_order
    from roll_batching.losses import PolicyLoss
    from roll_batching.samples import gather_lengths
    from tests.losses.steps import make_strategy, mine, refill, step
    from tests.support.models import ARCHITECTURE, random_batch, whole_gradients, worst_difference

    megatron = {"calculate_per_token_loss": False, **megatron}
    experts, max_cp_size = megatron.pop("experts", None), megatron.pop("host_cp_size", 1)
    architecture = {**ARCHITECTURE, "num_layers": 4, **({"moe": experts} if experts else {})}
    strategy = make_strategy(megatron=megatron, architecture=architecture, dtype=DTYPE)
    whole = with_siblings(random_batch(3, 11, WIDTH))
    loss = PolicyLoss(clip_low=CLIP[0], clip_high=CLIP[1], kl_coef=0.05, kl_bound=None, entropy_coef=0.02)
    result, expected = step(strategy, whole, loss)
    host = HostModel(strategy.chunks, "a host", max_tokens=64, vocab_size=VOCABULARY, max_cp_size=max_cp_size)
    local, computed = mine(strategy, whole), []
    # A sample above a rank's cap can only be computed by several ranks.
    assert max_cp_size == 1 or whole.max_length > 64 // max_cp_size
    # All chunks compute all tokens, of which a rank has its part.
    strategy.chunks[0].register_forward_pre_hook(
        lambda chunk, args, kwargs: computed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    tokens = sum(int(mask[1:].sum()) for mask in whole.to_lists("response_mask"))
    rows, masks = local.to_lists("input_ids"), local.to_lists("response_mask")
    report: dict[str, Any] = {"loss": result.loss, "gradients": []}
    for form, by_sample in (("padded", False), ("jagged", False), ("padded", True)):
        refill(strategy)
        strategy.zero_grad()
        function = HostFunction(tokens, form)
        width = WIDTH - 1 if form == "padded" else None
        options = {"form": form, "width": width, "entropy": True, "by_sample": by_sample}
        computed.clear()
        answers = host.run(reading(rows, masks), host_rows(local), function, backward=True, mask="counted", **options)
        report["computed"] = sum(computed) * strategy.layout.cp_size / local.num_tokens
        found = whole_gradients(strategy.chunks, VOCABULARY, strategy.layout.tp_rank, False)
        report["gradients"].append(max(worst_difference(found, expected)[0], found["spread"]))
        report["last_stage"] = strategy.layout.is_last_stage
        report.setdefault("losses", []).append(sum(answer["loss"] for _, answer in answers))
        report.setdefault("calls", []).append(len(answers))
    refill(strategy)
    read = reading(rows, masks)
    function = HostFunction(tokens, "padded")
    answers = host.run(read, host_rows(local), function, backward=False, width=WIDTH - 1, entropy=True)
    numbers = torch.arange(len(rows))
    cold, warm, mixed = (
        host.run(
            read, host_rows(local), function, backward=False, width=WIDTH - 1, entropy=True, temperatures=temperatures
        )
        for temperatures in (0.5, 2.0, torch.where(numbers % 2 == 0, 0.5, 2.0))
    )
    table = gather_lengths(local)
    exact = strategy.compute_log_probs(local, strategy.plan(table, forward=True, home_rank=table.location))
    if answers:
        ordered = in_order([(ids, answer["log_probs"]) for ids, answer in answers], len(rows))
        pairs = zip(ordered, exact.to_lists("log_probs"), rows, strict=True)
        report["temperatures"] = check_temperatures(answers, cold, warm, mixed, len(rows))
        gaps = [(own[: len(row) - 1] - right[: len(row) - 1]).abs() for own, right, row in pairs]
        report["log_probs"] = float(torch.cat(gaps).max())
    return report


SLOW: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"expert_model_parallel_size": 2, "experts": EXPERTS}),
    "pp2, cp1 to 2": (4, {"pipeline_model_parallel_size": 2, "host_cp_size": 2}),
    "tp2, cp1 to 2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "host_cp_size": 2}),
    "cp1 to 4": (4, {"host_cp_size": 4}),
}


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_host_s_function_trains_as_our_loss_does(name: str) -> None:
    ranks, megatron = {**LAYOUTS, **SLOW}[name]
    reports = run_ranks(ranks, "tests.integrations.test_host_model:compare", payload=megatron)
    for report in reports:
        assert max(report["gradients"]) < (OF_ROUTERS if name == "ep2" else EXACT)
    # Packs under context parallelism have padding, and more of it than these few samples share.
    if "host_cp_size" not in megatron:
        assert max(report["computed"] for report in reports) < (1.2 if name == "cp2" else 0.9)
    last = [report for report in reports if report["last_stage"]]
    copies = 2 if name == "cp2" or "tp2" in name else 1
    for one in range(3):
        total = sum(report["losses"][one] for report in last[::copies])
        assert total == pytest.approx(last[0]["loss"], rel=EXACT)
    assert all(report["calls"][0] < report["calls"][2] for report in last)
    if "host_cp_size" in megatron:  # so that all ranks have metrics, and equally many
        assert {report["calls"][0] for report in last} == {1}
    assert all(report["log_probs"] < EXACT and report["temperatures"] < EXACT for report in last)


def train_on_means(unused: None) -> dict[str, Any]:
    """A pass whose loss Megatron divides by the number of micro-batches, beside the same without the division."""
    from roll_batching.integrations.host_model import HostModel
    from tests.losses.steps import make_strategy, refill
    from tests.support.models import random_batch, whole_gradients, worst_difference

    strategy = make_strategy(megatron={"calculate_per_token_loss": False}, dtype=DTYPE)
    whole = with_siblings(random_batch(3, 11, WIDTH))
    rows, masks = whole.to_lists("input_ids"), whole.to_lists("response_mask")
    found, calls = {}, {}
    for scaled in (True, False):
        host = HostModel(strategy.chunks, "a host", max_tokens=64, vocab_size=VOCABULARY, apply_loss_scale=scaled)
        refill(strategy)
        strategy.zero_grad()
        options = {"backward": True, "mask": "counted", "width": WIDTH - 1, "entropy": True}
        calls[scaled] = len(host.run(reading(rows, masks), host_rows(whole), HostFunction(1, "padded"), **options))
        found[scaled] = whole_gradients(strategy.chunks, VOCABULARY, strategy.layout.tp_rank, False)
    times = {name: value * calls[False] if torch.is_tensor(value) else value for name, value in found[False].items()}
    whole_packs = -(-sum(len(row) for row in rows) // 64)
    return {"calls": calls, "gap": worst_difference(times, found[True])[0], "whole_packs": whole_packs}


def test_megatrons_mean_over_micro_batches_is_over_those_of_whole_samples() -> None:
    (report,) = run_ranks(1, "tests.integrations.test_host_model:train_on_means")
    assert report["gap"] < EXACT
    assert report["calls"][False] >= report["whole_packs"] > report["calls"][True]


class Unreadable:
    """A row that rank 1 alone cannot read."""

    def __setstate__(self, state: Any) -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise OSError("no memory for the rows")

    def __getstate__(self) -> dict[str, Any]:
        return {"row": 0}


def misbehave(kind: str) -> None:
    from roll_batching.integrations.host_model import HostModel
    from roll_batching.integrations.host_rows import HostRows
    from tests.losses.steps import make_strategy

    strategy = make_strategy(megatron={"calculate_per_token_loss": False})
    kind, max_cp_size = (kind.removesuffix(" cp"), 2) if kind.endswith(" cp") else (kind, 1)
    host = HostModel(strategy.chunks, "a host", max_tokens=64, vocab_size=VOCABULARY, max_cp_size=max_cp_size)
    rows = [torch.randint(0, VOCABULARY, (9,)) for _ in range(3)]
    masks = [torch.ones(9) for _ in rows]
    functions = {
        "no tuple": lambda ids, log_probs, entropy: log_probs.sum(),
        "raises": lambda ids, log_probs, entropy: log_probs[len(ids) + 7],
        "detached": lambda ids, log_probs, entropy: (log_probs.detach().sum(), None),
        "nan": lambda ids, log_probs, entropy: ((log_probs * float("nan")).sum(), None),
        "infinite gradient": lambda ids, log_probs, entropy: ((log_probs - log_probs).clamp(min=0).sqrt().sum(), None),
        "narrow": lambda ids, log_probs, entropy: (log_probs.sum(), None),
    }
    if kind == "short mask" and strategy.layout.dp_rank == 1:  # on one rank alone
        masks[1] = torch.ones(8)
    if kind == "nan mask" and strategy.layout.dp_rank == 1:
        masks[1][3] = float("nan")
    temperatures = torch.ones(2) if kind == "temperatures" and strategy.layout.dp_rank == 1 else 1.0
    width = 5 if kind == "narrow" else None
    if kind == "other width":
        width = 9 + strategy.layout.dp_rank

    def concat(parts: list[list[int]]) -> list[int]:
        if kind == "concat" and strategy.layout.dp_rank == 1:
            raise KeyError("response_mask")
        return sum(parts, start=[])

    def select(rows: list[torch.Tensor], numbers: list[int]) -> Any:
        return [Unreadable()] if kind == "unreadable" else numbers

    host_rows = HostRows(rows, select, concat)
    function = functions.get(kind, functions["narrow"])
    host.run(
        reading(rows, masks), host_rows, function, backward=True, mask="counted", width=width, temperatures=temperatures
    )


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("no tuple", "must return (loss, result)"),
        ("raises", "IndexError"),
        ("detached", "without a gradient to the model"),
        ("nan", "the loss is nan"),
        ("infinite gradient", "the gradient is not finite"),
        ("narrow", "would cut a sample of 9 tokens"),
        ("short mask", "'counted', row 1: 8 values for a sample of 9 tokens"),
        ("nan mask", "the mask 'counted' of sample 1099511627777 is nan at position 3"),
        ("temperatures", "2 temperatures for 3 samples"),
        ("raises cp", "IndexError"),
        ("concat cp", "rows of the host's batch: rank 1: KeyError: 'response_mask'"),
        ("unreadable cp", "rows of the host's batch: rank 1: OSError: no memory for the rows"),
        ("other width cp", "ranks differ in the width of rows: 9 on rank 0, 10 on rank 1"),
    ],
)
def test_a_host_s_mistake_is_one_error_on_all_ranks(kind: str, text: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, "tests.integrations.test_host_model:misbehave", payload=kind)
    assert str(failed.value).count(text) >= 2
