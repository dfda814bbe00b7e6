"""Integrations replace what they say, refuse other signatures, and give everything back; for all hosts."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from roll_batching.errors import IntegrationError
from tests.integrations.hosts import HOSTS, IMPORTED, forget


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


@pytest.mark.parametrize("name", ["verl", "roll"])
def test_partitions_are_balanced_and_raise_as_the_hosts(host, name):
    ours = host(name)
    parts = ours.get_seqlen_balanced_partitions([5, 4, 3, 3, 2, 1], 2, True)
    assert [sum([5, 4, 3, 3, 2, 1][item] for item in part) for part in parts] == [9, 9]
    assert all(part == sorted(part) for part in parts) and {len(part) for part in parts} == {3}
    for arguments in (([1], 2, False), ([1, 2, 3], 2, True)):
        with pytest.raises(AssertionError):
            ours.get_seqlen_balanced_partitions(*arguments)


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
    assert given[0].lengths.tolist() == [5, 5] and "KeyError" in given[1]
    for rank in range(2):
        with pytest.raises(AssertionError) as raised:
            run(rank, given[:2])
        messages.append(str(raised.value))
    assert messages[0] == messages[1] == "no lengths to plan with from rank 1: KeyError: 'attention_mask'"
