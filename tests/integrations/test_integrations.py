"""Integrations replace what they say, keep the hosts' contracts, and give everything back."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roll_batching.errors import IntegrationError, PlanError
from roll_batching.integrations.host_plans import WORKLOAD, cut_rectangles, gather_lengths, plan_on_home_ranks
from roll_batching.planning import PlanConstraints
from roll_batching.planning.cost_model import FIXED_TOKENS
from tests.integrations import hosts

HOSTS = {"verl": hosts.VERL, "nemo_rl": hosts.NEMO_RL, "slime": hosts.SLIME, "roll": hosts.ROLL}
IMPORTED = {  # a module of the host that imported a replaced name before
    "verl": ("verl.workers.engine_utils", "rearrange_micro_batches"),
    "nemo_rl": ("nemo_rl.distributed.batched_data_dict", "get_packer"),
    "slime": ("slime.ray.rollout", "build_dp_schedule"),
    "roll": ("roll.utils.functionals", "get_seqlen_balanced_partitions"),
}


def forget(*packages):
    for name in list(sys.modules):
        if name.split(".")[0] in packages:
            del sys.modules[name]


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Installs a host, or another text of one of its modules, and imports our module for it."""

    def install(name, **changed):
        forget(name)
        hosts.write(tmp_path, HOSTS[name] | changed)
        monkeypatch.syspath_prepend(str(tmp_path))
        module, _ = IMPORTED[name]
        importlib.import_module(module)
        sys.modules.pop(f"roll_batching.integrations.{name}", None)
        return importlib.import_module(f"roll_batching.integrations.{name}")

    yield install
    forget(*HOSTS)
    for name in HOSTS:
        sys.modules.pop(f"roll_batching.integrations.{name}", None)


@pytest.mark.parametrize("name", HOSTS)
def test_importing_patches_and_unpatching_gives_the_host_back(host, name, caplog):
    ours = host(name)
    module, function = IMPORTED[name]
    there = importlib.import_module(module)
    assert getattr(there, function) is getattr(ours, function)
    (line,) = [record.message for record in caplog.records]
    assert "roll-batching plans for" in line and function in line
    ours.patch()  # again: nothing changes, nothing is said
    assert len(caplog.records) == 1
    ours.unpatch()
    ours.unpatch()
    assert getattr(there, function).__module__.startswith(name)
    ours.patch()
    assert getattr(there, function) is getattr(ours, function)
    ours.unpatch()


def test_a_method_is_given_back(host):
    ours = host("roll")
    from roll.utils.sequence_packing import LoadBalancePacker

    assert (
        LoadBalancePacker.make_micro_batch_iter_for_sequence_packing is ours.make_micro_batch_iter_for_sequence_packing
    )
    ours.unpatch()
    assert LoadBalancePacker(None).make_micro_batch_iter_for_sequence_packing(None, 1, 1, 1) == "ROLL"


@pytest.mark.bad_input
@pytest.mark.parametrize("name", HOSTS)
def test_another_signature_is_refused_and_nothing_is_replaced(host, name):
    path, text = next(iter(HOSTS[name].items()))
    function = IMPORTED[name][1]
    if name == "roll":
        path, text = "roll/utils/functionals.py", HOSTS["roll"]["roll/utils/functionals.py"]
    with pytest.raises(IntegrationError, match=rf"{function} has the parameters \(new, "):
        host(name, **{path: text.replace(f"def {function}(", f"def {function}(new, ")})
    module, _ = IMPORTED[name]
    assert getattr(importlib.import_module(module), function).__module__.startswith(name)
    forget(name)
    with pytest.raises(IntegrationError, match=f"has no .*{function}.*install one of these"):
        host(
            name,
            **{
                path: text.replace(f"def {function}(", "def other("),
                **{f"{IMPORTED[name][0].replace('.', '/')}.py": ""},
            },
        )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "path", "function"),
    [
        ("nemo_rl", "nemo_rl/distributed/batched_data_dict.py", "shard_by_batch_size"),
        ("roll", "roll/utils/dynamic_batching.py", "dynamic_batching_shard"),
        ("roll", "roll/utils/sequence_packing.py", "make_micro_batch_iter_for_sequence_packing"),
        ("verl", "verl/utils/seqlen_balancing.py", "get_seqlen_balanced_partitions"),
    ],
)
def test_another_signature_of_one_function_replaces_none(host, name, path, function):
    text = HOSTS[name][path]
    wrong = re.sub(rf"def {function}\((self, )?", rf"def {function}(\g<1>new, ", text)
    with pytest.raises(IntegrationError, match=rf"{function} has the parameters \((self, )?new, "):
        host(name, **{path: wrong})
    module, first = IMPORTED[name]
    assert getattr(importlib.import_module(module), first).__module__.startswith(name)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", HOSTS)
def test_a_host_that_is_not_installed(name):
    command = [sys.executable, "-W", "ignore", "-c", f"import roll_batching.integrations.{name}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "importing" in done.stderr and "IntegrationError" in done.stderr


def jagged(lengths):
    rows = [torch.full((length,), number) for number, length in enumerate(lengths)]
    return {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}


def test_verl_plans_keep_its_contract(host):
    ours = host("verl")
    ours.unpatch()
    generator = np.random.default_rng(0)
    for _ in range(30):
        ranks, multiple, group = (int(generator.integers(1, top)) for top in (5, 5, 3))
        parts = [generator.integers(1, 500, 40 * group).astype(np.int64) for _ in range(ranks)]
        bins = ours.plan_bins(parts, 2000, multiple=multiple, least=3, group_size=group)
        counts = {len(of_rank) for of_rank in bins}
        assert len(counts) == 1 and counts.pop() % multiple == 0
        for part, of_rank in zip(parts, bins, strict=True):
            assert sorted(sum(of_rank, [])) == list(range(len(part))) and all(of_rank)
            assert all(indices == sorted(indices) and part[indices].sum() <= 2000 for indices in of_rank)
            for indices in of_rank:
                assert {index // group for index in indices} == {i // group for i in indices[::group]}


def test_verl_takes_jagged_and_padded_batches(host):
    ours = host("verl")
    lengths = [5, 90, 40, 60, 7]
    mask = torch.arange(90) < torch.tensor(lengths)[:, None]
    padded = {"input_ids": torch.zeros(5, 90, dtype=torch.long), "attention_mask": mask.long()}
    _, bins = ours.rearrange_micro_batches(padded, 100)
    assert sorted(sum(bins, [])) == list(range(5)) and len(bins) == 3
    with pytest.raises(AssertionError, match="max_token_len must be greater"):
        ours.rearrange_micro_batches(padded, 80)
    assert ours._lengths(jagged(lengths)).tolist() == lengths


@pytest.mark.parametrize("name", ["verl", "roll"])
def test_partitions_are_balanced_and_raise_as_the_hosts(host, name):
    ours = host(name)
    parts = ours.get_seqlen_balanced_partitions([5, 4, 3, 3, 2, 1], 2, True)
    assert [sum([5, 4, 3, 3, 2, 1][item] for item in part) for part in parts] == [9, 9]
    assert all(part == sorted(part) for part in parts) and {len(part) for part in parts} == {3}
    for arguments in (([1], 2, False), ([1, 2, 3], 2, True)):
        with pytest.raises(AssertionError):
            ours.get_seqlen_balanced_partitions(*arguments)


def lockstep_of(lengths, bins, ranks):
    cost = [sum(lengths[i] * (24576 + lengths[i]) for i in one) for one in bins]
    return sum(max(cost[first : first + ranks]) for first in range(0, len(cost), ranks))


def test_nemo_rl_bins_dealt_in_turn_are_the_plan(host):
    ours = host("nemo_rl")
    from nemo_rl.distributed.batched_data_dict import get_packer

    assert get_packer("modified_first_fit_decreasing", 100) == "NeMo-RL"
    packer = get_packer("roll_batching_rank_totals", 4096, min_bin_count=8, bin_count_multiple=8)
    lengths = np.random.default_rng(1).integers(1, 4000, 256).tolist()
    bins = packer.pack(lengths)
    assert len(bins) % 8 == 0 and all(bins) and sorted(sum(bins, [])) == list(range(256))
    assert max(sum(lengths[item] for item in one) for one in bins) <= 4096
    totals = [sum(lengths[item] for one in bins[rank::8] for item in one) for rank in range(8)]
    assert max(totals) < 1.01 * sum(totals) / 8
    by_name = {
        name: get_packer(name, 4096, min_bin_count=8, bin_count_multiple=8).pack(lengths) for name in ours.OBJECTIVES
    }
    lockstep = {name: lockstep_of(lengths, bins, 8) for name, bins in by_name.items()}
    assert lockstep["roll_batching"] <= lockstep["roll_batching_rank_totals"]
    with pytest.raises(ValueError, match="fewer samples than"):
        packer.pack([1, 2, 3])
    with pytest.raises(ValueError, match="exceeds max_tokens=4096"):
        ours.plan_bins([5000], 4096, 1)


def test_slime_schedules_keep_its_contract(host):
    ours = host("slime")
    generator = np.random.default_rng(2)
    for dp, cp, vpp, group in ((1, 1, 1, 1), (4, 2, 1, 1), (2, 1, 2, 4)):
        lengths = generator.integers(1, 900, 130).tolist()
        lengths[7] = 1300  # above the cap: alone
        rollouts = [number // 3 for number in range(130)]
        args = SimpleNamespace(
            use_dynamic_batch_size=True, max_tokens_per_gpu=1000 // cp, pipeline_model_parallel_size=1
        )
        sizes = {"dp_size": dp, "cp_size": cp, "vpp_size": vpp, "microbatch_group_size_per_vp_stage": group}
        parts, indices, counts, batches = ours.build_dp_schedule(
            args, sizes, lengths, global_batch_size=20, rollout_indices=rollouts
        )
        assert batches == [20, 20] and all(count % (group if vpp > 1 else 1) == 0 for count in counts)
        assert sorted(sum(parts, [])) == list(range(120))  # 44 rollouts: the last four are left out
        for of_rank, of_batches in zip(parts, indices, strict=True):
            assert sum(of_batches, []) == list(range(len(of_rank))) and len(of_batches) == sum(counts)
            for step in (0, 1):
                own = of_batches[sum(counts[:step]) : sum(counts[: step + 1])]
                assert {rollouts[of_rank[i]] // 20 for one in own for i in one} == {step}
            for one in of_batches:
                tokens = sum(lengths[of_rank[i]] for i in one)
                assert tokens <= 1000 or len(one) == 1
    args.use_dynamic_batch_size = False
    assert ours.build_dp_schedule(args, sizes, lengths, global_batch_size=20, rollout_indices=rollouts) == "slime"
    assert ours.cost_of(args).quadratic == 1 and ours.cost_of(args).linear == 1500
    assert ours.cost_of(args).fixed == 1500 * FIXED_TOKENS
    assert ours.constraints_of(args, sizes).objective == "auto"
    args.expert_model_parallel_size = 8
    assert ours.constraints_of(args, sizes).objective == "lockstep"


def test_roll_plans_keep_its_contract(host):
    ours = host("roll")
    generator = np.random.default_rng(3)
    for cp, vp in ((1, 1), (2, 1), (1, 4)):
        parts = [generator.integers(1, 300, 64).astype(np.int64) for _ in range(3)]
        bins = ours.plan_bins(parts, 1024, cp_size=cp, vp_size=vp, least=2, sequence_multiple=16)
        assert len({len(one) for one in bins}) == 1 and len(bins[0]) % vp == 0
        for part, of_rank in zip(parts, bins, strict=True):
            assert sorted(sum(of_rank, [])) == list(range(64)) and all(of_rank)
            padded = -(-part // 16) * 16
            assert all(padded[indices].sum() <= 1024 for indices in of_rank)
    with pytest.raises(AssertionError, match="2000"):
        ours.plan_bins([np.array([2000])], 1024)
    from roll.pipeline.base_worker import ActorWorker

    assert issubclass(ours.BaseActorWorker, ActorWorker) and ours.BaseActorWorker.__module__ == ours.__name__


def greedy_cuts(widths, cap):
    """ROLL's and NeMo-RL's cuts: a micro-batch takes positions while its rectangle is below the cap."""
    cuts, widest = [[0, 0]], 0
    for position, width in enumerate(widths):
        widest = max(widest, width)
        if (position + 1 - cuts[-1][0]) * widest <= cap:
            cuts[-1][1] += 1
        else:
            cuts.append([position, position + 1])
            widest = width
    return cuts


def tokens_of(widths, cuts):
    return sum((end - first) * max(widths[first:end]) for first, end in cuts)


def test_cuts_are_never_behind_greedy_ones():
    generator = np.random.default_rng(4)
    ahead = 0
    for _ in range(200):
        widths = np.sort(generator.lognormal(5, 1, int(generator.integers(1, 90))).astype(int) // 16 * 16 + 16)
        cap = int(widths.max() * generator.integers(1, 9))
        cuts, greedy = cut_rectangles(widths, cap), greedy_cuts(widths, cap)
        assert [first for first, _ in cuts] == [0, *(end for _, end in cuts[:-1])] and cuts[-1][1] == len(widths)
        assert all((end - first) * max(widths[first:end]) <= cap for first, end in cuts)
        assert len(cuts) <= len(greedy)
        if len(cuts) == len(greedy):
            assert tokens_of(widths, cuts) <= tokens_of(widths, greedy)
            ahead += tokens_of(widths, cuts) < tokens_of(widths, greedy)
        multiple = int(generator.integers(2, 5))
        if len(widths) >= -(-len(cuts) // multiple) * multiple:
            more = cut_rectangles(widths, cap, multiple)
            assert len(more) == -(-len(cuts) // multiple) * multiple and tokens_of(widths, more) <= tokens_of(
                widths, cuts
            )
    assert ahead > 50


@pytest.mark.bad_input
def test_cuts_that_cannot_be():
    assert cut_rectangles([], 8) == []
    with pytest.raises(AssertionError, match="a row of 9 tokens is longer than a micro-batch of 8"):
        cut_rectangles([1, 9], 8)
    with pytest.raises(AssertionError, match="3 positions cannot form a multiple of 4"):
        cut_rectangles([1, 2, 3], 8, 4)


@pytest.mark.parametrize("shards", [1, 4])
def test_nemo_rl_dynamic_batches_keep_its_contract(host, shards):
    host("nemo_rl")
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    lengths = torch.from_numpy(np.random.default_rng(5).integers(1, 500, 64))
    batch = BatchedDataDict(ids=torch.arange(64)[:, None].expand(64, 500), lengths=lengths)
    arguments = {
        "input_key": "ids",
        "input_lengths_key": "lengths",
        "sequence_length_round": 64,
        "max_tokens_per_microbatch": 2048,
    }
    sharded, order = batch.shard_by_batch_size(shards, 32, dynamic_batching_args=arguments)
    assert sorted(order) == list(range(64)) and len(sharded) == shards
    assert torch.cat([shard["ids"][:, 0] for shard in sharded]).tolist() == order
    indices, columns = sharded[0].micro_batch_indices, sharded[0].micro_batch_lengths
    assert len(indices) == len(columns) == 2
    for shard in sharded:
        assert shard.micro_batch_indices == indices and shard.micro_batch_lengths == columns
        for chunk, (cuts, widths) in enumerate(zip(indices, columns, strict=True)):
            of_chunk = shard["lengths"].reshape(2, -1)[chunk]
            assert [first for first, _ in cuts] == [0, *(end for _, end in cuts[:-1])] and cuts[-1][1] == len(of_chunk)
            for (first, end), width in zip(cuts, widths, strict=True):
                assert of_chunk[first:end].max() <= width <= 500 and (width % 64 == 0 or width == 500)
                assert (end - first) * width <= 2048
    assert batch.shard_by_batch_size(shards) == "NeMo-RL"
    with pytest.raises(AssertionError, match="longer than a micro-batch of 100"):
        batch.shard_by_batch_size(shards, dynamic_batching_args=arguments | {"max_tokens_per_microbatch": 100})


@pytest.mark.parametrize(("pp", "vp"), [(1, None), (2, None), (4, 2)])
def test_roll_dynamic_batches_keep_its_contract(host, pp, vp):
    ours = host("roll")
    from roll.utils.dynamic_batching import dynamic_batching_shard

    assert dynamic_batching_shard is ours.dynamic_batching_shard
    lengths = torch.from_numpy(np.random.default_rng(6).integers(0, 500, 64))  # a sample without tokens as well
    lengths[3] = 0
    mask = (torch.arange(500) < lengths[:, None]).long()
    batch = SimpleNamespace(batch={"attention_mask": mask}, meta_info={"global_step": 3})
    shard, metrics = dynamic_batching_shard(batch, 4, 2048, 64, pp, vp, "train")
    facts = shard.meta_info
    cuts, widths = facts["global_micro_batch_indices"], facts["global_micro_batch_lengths"]
    assert facts["num_micro_batchs"] == len(cuts) == len(widths) and len(cuts) % (pp if vp else 1) == 0
    assert facts["micro_batch_indices"] == cuts and facts["micro_batch_lengths"] == widths and facts["global_step"] == 3
    assert [first for first, _ in cuts] == [0, *(end for _, end in cuts[:-1])] and cuts[-1][1] == 16
    of_ranks = shard.batch["attention_mask"].sum(1).reshape(4, 16)
    for (first, end), width in zip(cuts, widths, strict=True):
        assert of_ranks[:, first:end].max() <= width and width % 64 == 0 and (end - first) * width <= 2048
    tokens = 4 * sum((end - first) * width for (first, end), width in zip(cuts, widths, strict=True))
    assert metrics["dynamic_batching/train/actual_tokens"] == tokens
    assert metrics["dynamic_batching/train/removed_padding_tokens"] == 64 * 500 - tokens
    with pytest.raises(AssertionError, match="longer than a micro-batch of 100"):
        dynamic_batching_shard(batch, 4, 100, 64)


@pytest.mark.bad_input
def test_lengths_that_are_none():
    (own,), rank = gather_lengths(lambda: np.array([3.0, 0.0]), None)
    assert own.tolist() == [3, 1] and own.dtype == np.int64 and rank == 0  # a sample without tokens takes one
    for wrong in (np.nan, np.inf, -1.0, 1.5):
        with pytest.raises(ValueError, match=f"sample 1 has the length {wrong}"):
            gather_lengths(lambda wrong=wrong: np.array([3.0, wrong]), None)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["verl", "roll"])
def test_a_rank_without_lengths_is_an_error_on_all_ranks(host, name, monkeypatch):
    """Each rank gathers what the others have, lengths or an error, and raises the same."""
    import torch.distributed as dist

    ours = host(name)
    good, bad = torch.ones(2, 5, dtype=torch.long), {"input_ids": torch.zeros(2, 5)}
    batches = [{"input_ids": good, "attention_mask": good}, bad]
    given = []

    def run(rank, gathered):
        def gather(parts, own, group):
            given.append(own)
            parts[:] = gathered or [None] * len(parts)

        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        monkeypatch.setattr(dist, "get_rank", lambda group: rank)
        monkeypatch.setattr(dist, "all_gather_object", gather)
        if name == "verl":
            return ours.rearrange_micro_batches(batches[rank], 100, dp_group="group")
        batch = SimpleNamespace(batch=batches[rank])
        packer = SimpleNamespace(config=None)
        return list(ours.make_micro_batch_iter_for_sequence_packing(packer, batch, 1, 1, 1, dp_group="group"))

    messages = []
    for rank in range(2):  # the first round only collects what each rank gives
        with pytest.raises(Exception):  # noqa: B017
            run(rank, None)
    assert given[0].tolist() == [5, 5] and "KeyError" in given[1]
    for rank in range(2):
        with pytest.raises(AssertionError) as raised:
            run(rank, given[:2])
        messages.append(str(raised.value))
    assert messages[0] == messages[1] == "no lengths to plan with from rank 1: KeyError: 'attention_mask'"


@pytest.mark.bad_input
def test_abuse_of_home_plans():
    rules = {"max_tokens": 100, "fillers": False, "oversize": "alone"}
    with pytest.raises(PlanError, match=r"ranks \[1\] have no samples"):
        plan_on_home_ranks([np.array([3]), np.array([], dtype=np.int64)], PlanConstraints(dp_size=2, **rules))
    assert plan_on_home_ranks([np.array([3, 4])], PlanConstraints(dp_size=1, **rules)) == [[[0, 1]]]
    alone = plan_on_home_ranks([np.array([3, 400, 4])], PlanConstraints(dp_size=1, **rules))
    assert sorted(alone[0]) == [[0, 2], [1]]
    with pytest.raises(PlanError, match="exceeds max_tokens=100"):
        plan_on_home_ranks([np.array([400])], PlanConstraints(dp_size=1, **rules | {"oversize": "error"}))


def test_a_host_cost_has_a_fixed_part_so_that_pipelines_do_not_split_to_the_end():
    lengths = np.clip(np.random.default_rng(7).lognormal(6.5, 0.9, 512), 16, 8192).astype(np.int64)
    rules = PlanConstraints(
        dp_size=2, max_tokens=32768, pp_size=4, num_micro_batches_multiple=8, fillers=False, objective="auto"
    )
    (first, _) = plan_on_home_ranks([lengths[:256], lengths[256:]], rules)
    assert WORKLOAD.fixed == 24576 * FIXED_TOKENS and len(first) <= 48  # 256 with a fixed cost near 0


@pytest.mark.bad_input
def test_verl_groups_that_do_not_divide_and_partitions_of_nan(host):
    ours = host("verl")
    mask = torch.ones(5, 9, dtype=torch.long)
    with pytest.raises(AssertionError, match=r"Batch sizes \[5\] must be divisible by force_group_size 2"):
        ours.rearrange_micro_batches({"input_ids": mask, "attention_mask": mask}, 100, force_group_size=2)
    with pytest.raises(AssertionError, match="weights must be finite"):
        ours.get_seqlen_balanced_partitions([1.0, float("nan")], 2, True)
    with pytest.raises(AssertionError, match="number of items"):
        ours.get_seqlen_balanced_partitions([], 2, True)
    assert ours.get_seqlen_balanced_partitions([3, 1], 1, True) == [[0, 1]]
