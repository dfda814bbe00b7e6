"""One rank fails while a checkpoint is written or read: all ranks end soon, with its error.

What can fail before a library's collectives is one error on all ranks. A failure inside them cannot be told to the
ranks that wait there, so it ends the rank's process, and that ends theirs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.huggingface import tiny
from tests.jobs.launch.commands import done, train, write_job
from tests.support.checkpoints import without_manifest
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks

HERE = "tests.strategy.test_lone_failures:"
SOON = 40


def strategy(**options: bool) -> Any:
    from tests.strategy.test_checkpoint import steps, strategy_of

    made = strategy_of({"fill": True, "layout": Layout(dp=2, distopt=True).megatron() | options})
    steps(made, 0, 1)
    return made


def break_shards(made: Any) -> None:
    """A module of rank 1 says that its weight is a copy of nobody's, so that two ranks write it."""
    from dataclasses import replace

    from roll_batching.modeling.head import gpt_of

    gpt = gpt_of(made.chunks[0])
    whole = gpt.sharded_state_dict

    def wrong(*arguments: Any, **options: Any) -> Any:
        shards = whole(*arguments, **options)
        return {name: replace(one, replica_id=(0, 0, 0)) if "final" in name else one for name, one in shards.items()}

    gpt.sharded_state_dict = wrong


def break_module(made: Any) -> None:
    """A module of rank 1 cannot describe its shards."""
    from roll_batching.modeling.head import gpt_of

    def fail(*arguments: Any, **options: Any) -> Any:
        raise KeyError("no such shard")

    gpt_of(made.chunks[0]).sharded_state_dict = fail


def break_allocation(made: Any) -> None:
    """Rank 1 runs out of memory where the optimizer's state is created."""
    (part,) = made.optimizer.chained_optimizers

    def fail(*arguments: Any) -> None:
        raise MemoryError("no memory for the moments")

    part.init_state_fn = fail


def break_writes(made: Any) -> None:
    """Rank 1 fails outside of what Megatron catches around its writes."""
    from roll_batching.strategy import checkpoint_writer

    def fail(*arguments: Any) -> None:
        raise MemoryError("no memory for the file")

    checkpoint_writer.write_bucket = fail


TOLD = {"shards": break_shards, "module": break_module, "allocation": break_allocation, "writes": break_writes}
EXPECTED = {
    "shards": "ranks? 0.*: CheckpointError: the shards of all ranks do not make whole tensors .*Invalid access pattern",
    "module": "rank 1: KeyError: 'no such shard'",
    "allocation": "rank 1: MemoryError: no memory for the moments",
    "writes": "rank 1: CheckpointError: .*__1_0.distcp cannot be written: MemoryError: no memory for the file",
}


def told(payload: tuple[str, str, str]) -> tuple[str, float]:
    """The error of saving or loading on this rank, and the seconds to it."""
    import torch.distributed as dist

    from roll_batching.errors import RankError
    from roll_batching.strategy.checkpoint_folder import AtomicFolder

    fault, act, path = payload
    made = strategy()
    if act == "load":
        made.save(path)
    if dist.get_rank() == 1:
        TOLD[fault](made)
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        if act == "save in the background":
            from roll_batching.strategy.checkpoint import write_state

            with AtomicFolder(path, made.layout.host_group).writing() as folder:
                write_state(made.state, folder, background=True).finish()
        else:
            getattr(made, act)(path)
    return str(caught.value), time.monotonic() - started


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("fault", "act"),
    [
        (fault, act)
        for fault in TOLD
        for act in ("save", "save in the background", "load")
        if (fault, act) != ("writes", "load")
    ],
)
def test_a_failure_of_one_rank_before_collectives_is_raised_on_all(tmp_path: Any, fault: str, act: str) -> None:
    first, second = run_ranks(2, HERE + "told", (fault, act, str(tmp_path / "state")), timeout=100)
    assert first[0] == second[0] and re.search(EXPECTED[fault], first[0]), first
    assert max(first[1], second[1]) < SOON
    assert not list(tmp_path.glob("*.partial")), "what was begun is gone"


# ---- two machines that see other files


def load_here(folder: str) -> tuple[str, float]:
    """Loads the checkpoint `state` of this rank's own folder."""
    from roll_batching.errors import RankError

    made = strategy()
    os.chdir(Path(folder) / os.environ["RANK"])
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        made.load("state", verify=False)
    return str(caught.value), time.monotonic() - started


def save_whole(path: str) -> None:
    strategy().save(path)


def spoil_common(state: Path) -> str:
    """Damages what each rank reads by itself, so that only reading it can tell."""
    import torch

    common = state / "common.pt"
    if common.exists():  # Megatron before 0.19
        torch.save({"a": Fraction(1, 2)}, common)  # a class that no checkpoint holds
        return "rank 1: CheckpointError: state cannot be read: it names fractions.Fraction"
    file = next(state.glob("__0_*.distcp"))
    raw = bytearray(file.read_bytes())
    raw[:] = b"\0" * len(raw)
    file.write_bytes(raw)
    return "rank 1: CheckpointError: state cannot be read"


@pytest.mark.bad_input
def test_a_common_part_that_one_rank_cannot_read_is_raised_on_all(tmp_path: Any, report: Any) -> None:
    whole = tmp_path / "0" / "state"
    run_ranks(2, HERE + "save_whole", str(whole))
    without_manifest(whole)
    expected = spoil_common(Path(shutil.copytree(whole, tmp_path / "1" / "state")))
    first, second = run_ranks(2, HERE + "load_here", str(tmp_path), timeout=100)
    report(first[0])
    assert first[0] == second[0] and expected in first[0]
    assert max(first[1], second[1]) < SOON


# ---- inside the libraries' collectives


def fail_inside(payload: tuple[str, str]) -> None:
    """Rank 1 fails between two collectives of Megatron's; both ranks end by an error."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy

    act, path = payload
    gathers = act.startswith("gather")
    made = strategy(**(dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), True) if gathers else {}))
    loads = act in ("load", "gather to load")
    if loads:
        made.save(path)
    if dist.get_rank() == 1:

        def fail(*arguments: Any, **options: Any) -> None:
            raise MemoryError("no memory for the plan")

        if gathers:
            made.chunks[0].start_param_sync = fail
        elif act == "assemble":
            made.optimizer.chained_optimizers[0]._get_main_param_and_optimizer_states = fail
        else:
            torch_strategy.mcore_to_pyt_state_dict = fail
    getattr(made, "load" if loads else "save")(path)


@pytest.mark.bad_input
@pytest.mark.parametrize("act", ["save", "load", "assemble", "gather to save", "gather to load"])
def test_a_failure_inside_collectives_ends_its_rank_and_so_the_others(tmp_path: Any, act: str, report: Any) -> None:
    started = time.monotonic()
    outcomes = run_ranks(2, HERE + "fail_inside", (act, str(tmp_path / "state")), timeout=150, check=False, grace=60)
    assert all(one.returncode > 0 for one in outcomes), "none is killed, and none goes on"
    assert time.monotonic() - started < 3 * SOON
    line = next(line for line in outcomes[1].output.splitlines() if "CollectiveError: " in line)
    report(line)
    assert "failed on rank 1, and the other ranks cannot be told: MemoryError: no memory for the plan" in line


# ---- model directories


def export_alone(folder: str) -> tuple[str, float]:
    """Rank 0, which writes the files, cannot convert a tensor."""
    import torch.distributed as dist

    from roll_batching.errors import RankError
    from roll_batching.strategy import MegatronTrainStrategy, export
    from tests.te.engine import role

    made = MegatronTrainStrategy(role(folder + "/model", Layout(tp=2).megatron(), dtype="fp32"))
    made.initialize()
    if dist.get_rank() == 0:

        def fail(*arguments: Any) -> None:
            raise MemoryError("no memory for the copy")

        export.cast_to_file_dtype = fail
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        made.export(folder + "/exported")
    return str(caught.value), time.monotonic() - started


@pytest.mark.models
@pytest.mark.bad_input
def test_an_export_that_one_rank_cannot_write_is_an_error_on_all(tmp_path: Any) -> None:
    tiny.write_model(tmp_path / "model", "qwen3")
    first, second = run_ranks(2, HERE + "export_alone", str(tmp_path), timeout=100)
    assert first[0] == second[0] and "rank 0: MemoryError: no memory for the copy" in first[0]
    assert max(first[1], second[1]) < SOON and not list(tmp_path.glob("exported*"))


@pytest.mark.slow
@pytest.mark.bad_input
def test_a_job_ends_with_the_error_of_its_rank(tmp_path: Any) -> None:
    """The rank's error is the job's, and the other rank, which waits inside Megatron, is ended by the launcher."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import importlib.abc, sys\n"
        "    from importlib.util import find_spec\n"
        "    NAME = 'megatron.core.dist_checkpointing.strategies.torch'\n"
        "    class Finder(importlib.abc.MetaPathFinder):\n"
        "        def find_spec(self, name, path, target=None):\n"
        "            if name != NAME: return None\n"
        "            sys.meta_path.remove(self)\n"
        "            spec = find_spec(name)\n"
        "            run = spec.loader.exec_module\n"
        "            def load(module):\n"
        "                run(module)\n"
        "                def fail(*a, **k): raise OSError(5, 'Input/output error')\n"
        "                module.mcore_to_pyt_state_dict = fail\n"
        "            spec.loader.exec_module = load\n"
        "            return spec\n"
        "    sys.meta_path.insert(0, Finder())\n"
    )
    job = write_job(tmp_path, max_steps=1, save_steps=1, eval_samples=0, output_dir="runs", warmup=None)
    root = str(Path(__file__).parents[2])
    started = time.monotonic()
    code, said = done(tmp_path, *train(job), PYTHONPATH=f"{tmp_path}:{root}")
    assert code == 1 and time.monotonic() - started < 3 * SOON
    assert "failed on rank 1, and the other ranks cannot be told: Input/output error (EIO)" in said, said
    assert json.loads(job.read_text())["save_steps"] == 1
