"""Abuses of `MegatronTrainStrategy.from_parts`: programs that pass invalid models, optimizers or losses."""

from __future__ import annotations

import textwrap

from tests.campaigns.abuse.runner import FAILED, Abuse

_PROGRAM = """
import os, socket, sys
size, rank = {size}, 0
with socket.socket() as listener:  # chosen at run time, because a port chosen earlier may be in use by then
    listener.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(listener.getsockname()[1])
for other in range(1, size):
    if rank == 0 and os.fork() == 0:
        rank = other
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
import torch
from megatron.core import parallel_state
from roll_batching.settings import BatchingConfig
from roll_batching.samples import SampleBatch, distribute, gather_lengths
from roll_batching.distributed.parallel_layout import start_processes
from roll_batching.errors import RollBatchingError
from roll_batching.losses import SFTLoss
from roll_batching.planning import BatchingSpec, PlanConstraints, plan_step
from roll_batching.strategy import MegatronTrainStrategy
from tests.support.own_model import build

def adopt(**given):
    one = BatchingSpec(mode="packed", max_tokens=64)
    good = dict(model_chunks=parts[0], optimizer=parts[1], batching=BatchingConfig(train=one, infer=one))
    return MegatronTrainStrategy.from_parts(**{{**good, "vocab_size": 61, **given}})

def samples(**fields):
    rows = [torch.arange(1, 5 + n) for n in range(4)]
    lists = {{"input_ids": rows, "response_mask": [torch.ones(len(row)) for row in rows]}}
    lists |= {{name: [change(row) for row in lists[name]] for name, change in fields.items()}}
    return SampleBatch.from_lists(lists, dict.fromkeys(lists, "token"), ids=torch.arange(4) + 4 * rank)

def train(strategy=None, batch=None, **given):
    strategy, batch = strategy or adopt(), batch or samples()
    plan = strategy.plan(gather_lengths(batch))
    return strategy.train_step(**{{"local": distribute(batch, plan), "plan": plan, "loss": SFTLoss(), **given}})

try:
    if {start}:
        start_processes()
        parallel_state.initialize_model_parallel({tp})
        parts = build("packed", rotate="core")
{body}
    print("accepted", file=sys.stderr)
    code = 0
except RollBatchingError as error:
    if rank == 0:
        print(f"error: {{error}}", file=sys.stderr)
    code = 1
sys.stderr.flush()
if rank:
    os._exit(code)
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(1, size)]
sys.exit(code if all(one == code for one in codes) else f"ranks ended with {{[code, *codes]}}")
"""


def _handed(name: str, body: str, *words: str, size: int = 1, tp: int = 1, start: bool = True) -> Abuse:
    """Program of `size` processes that run `body`; each gets a RollBatchingError, and the first prints it."""
    text = _PROGRAM.format(size=size, tp=tp, start=start, body=textwrap.indent(body, " " * 4))
    return Abuse(
        name=f"from_parts: {name}",
        code=FAILED,
        arguments=("program.py",),
        files={"program.py": text},
        variables={"PYTHONWARNINGS": "ignore"},
        words=("error: ", *words),
    )


def _shared(name: str, change: str, *words: str) -> Abuse:
    """Two samples whose prompts of 30 tokens a plan shares, changed by `change` behind the plan."""
    body = f"""
from dataclasses import replace
from roll_batching.planning import SharedPrefixes
rows = [torch.cat([torch.arange(30), torch.tensor([n, n])]) for n in range(2)]
fields = {{"input_ids": torch.cat(rows), "response_mask": torch.ones(64)}}
batch = SampleBatch(torch.arange(2), torch.tensor([32, 32]), fields, dict.fromkeys(fields, "token"))
table = gather_lengths(batch)
strategy, ids = adopt(), fields["input_ids"].clone()
table = replace(table, prefixes=SharedPrefixes.of_groups([0, 0], [30, 30], table.lengths))
{change}
plan = strategy.plan(table)
assert plan.shared.any()
strategy.train_step(batch, plan, SFTLoss())
"""
    return _handed(f"shared prefixes: {name}", body, *words)


def _other_token(place: int) -> str:
    return f'ids[{place}] += 1; batch = batch.with_fields({{"input_ids": ids}}, {{"input_ids": "token"}})'


PARTS = [
    _shared("another first token", _other_token(32), "share 29 positions with sample 0", "token 0", "input_ids"),
    _shared("another last token", _other_token(61), "share 29 positions with sample 0", "token 29", "input_ids"),
    _shared(
        "a prefix that is too long",
        "table = replace(table, prefixes=SharedPrefixes.of_groups([0, 0], [32, 32], table.lengths))",
        "share 31 positions",
        "token 30",
        "find_shared_prefixes",
    ),
    _shared(
        "samples in another order",
        "batch = batch.with_ids(torch.tensor([1, 0])).with_fields({'input_ids': ids.flip(0)}, {'input_ids': 'token'})",
        "share 29 positions",
        "input_ids",
    ),
    _shared(
        "experts for a dense model",
        "batch = batch.with_fields({'routed_experts': torch.zeros(64, 2, 2).short()}, {'routed_experts': 'token'})",
        "no mixture of experts",
    ),
    _handed("the optimizer of another model", "adopt(optimizer=build('packed')[1])", "optimizer", "another model"),
    _handed("the class of an optimizer", "adopt(optimizer=torch.optim.SGD)", "optimizer", "get_megatron_optimizer"),
    _handed("temperature -1", "adopt(temperature=-1.0)", "temperature=-1.0"),
    _handed("temperature inf", "adopt(temperature=float('inf'))", "temperature=inf"),
    _handed("a forgotten list", "adopt(model_chunks=parts[0][0])", "model_chunks must be a list"),
    _handed("a dict for batching", "adopt(batching={'max_tokens': 64})", "batching"),
    _handed(
        "a dict inside batching",
        "adopt(batching=BatchingConfig(train={'max_tokens': 64}, infer={}))",
        "train is a dict",
        "BatchingSpec",
    ),
    _handed("a lambda for cost", "adopt(cost=lambda n: n)", "cost is a function"),
    _handed("the class of a loss", "train(loss=SFTLoss)", "loss", "the class SFTLoss"),
    _handed("NaN in a mask", "train(batch=samples(response_mask=lambda row: row * float('nan')))", "'response_mask'"),
    _handed(
        "tokens outside the vocabulary",
        "train(batch=samples(input_ids=lambda row: row + 60))",
        "sample 0 has the token 61 at position 0",
        "tokens 0 to 60",
    ),
    _handed("lengths for a table", "adopt().plan([5, 6, 7, 8])", "table is a list", "gather_lengths"),
    _handed(
        "the plan of shorter samples",
        "cut = dict.fromkeys(('input_ids', 'response_mask'), lambda row: row[:-1])\n"
        "strategy = adopt()\n"
        "train(strategy, plan=strategy.plan(gather_lengths(samples(**cut))))",
        "plan",
    ),
    _handed(
        "before torch.distributed",
        "parts = [[torch.nn.Linear(2, 2)], None]; adopt()",
        "no process group: call torch.distributed.init_process_group",
        start=False,
    ),
    _handed(
        "a head that gathers under TP 2",
        "parts = build('packed', parallel_output=False); adopt()",
        "parallel_output=True",
        size=2,
        tp=2,
    ),
    _handed(
        "another temperature on a rank", "adopt(temperature=1.0 + rank)", "ranks differ in the temperature", size=2
    ),
]
