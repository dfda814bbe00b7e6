"""Integrations replace what they say, keep the hosts' contracts, and give everything back."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roll_batching.errors import IntegrationError
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


def test_nemo_rl_bins_dealt_in_turn_are_the_plan(host):
    ours = host("nemo_rl")
    from nemo_rl.distributed.batched_data_dict import get_packer

    assert get_packer("modified_first_fit_decreasing", 100) == "NeMo-RL"
    packer = get_packer("roll_batching", 4096, min_bin_count=8, bin_count_multiple=8)
    lengths = np.random.default_rng(1).integers(1, 4000, 256).tolist()
    bins = packer.pack(lengths)
    assert len(bins) % 8 == 0 and all(bins) and sorted(sum(bins, [])) == list(range(256))
    assert max(sum(lengths[item] for item in one) for one in bins) <= 4096
    totals = [sum(lengths[item] for one in bins[rank::8] for item in one) for rank in range(8)]
    assert max(totals) < 1.01 * sum(totals) / 8
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

    assert ours.ActorWorker is ActorWorker
