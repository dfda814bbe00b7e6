"""The process that a reward function runs in; `process` starts it and speaks with it.

Neither torch nor Megatron is imported here, so that it starts in a fraction of a second. Standard input is empty;
standard output is the function's to use, or to close: answers have a socket of their own.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from roll_batching.errors import ConfigError
from roll_batching.jobs.rewards.contract import Completion, LoadedReward, RewardFunction, checked, load_reward
from roll_batching.lifetime import die_with_parent
from roll_batching.registry import describe_error


def serve(descriptor: int, parent: int, memory: int) -> None:
    """Loads the function that the first message names, then answers completions until the other end closes.

    Calls may take `memory` MiB beyond what the process has by then; 0: what they want.
    """
    die_with_parent(parent)
    connection = Connection(descriptor)
    path, arguments = connection.recv()
    function: LoadedReward | None = None
    try:
        function = load_reward(path, arguments)
        said: dict[str, Any] = {"notice": function.notice}
    except ConfigError as error:
        said = {"error": str(error)}
    if memory:
        _limit_memory(memory << 20)
    _answer(connection, 0, said)
    while function is not None:
        try:
            number, seed, completion = connection.recv()
        except EOFError:
            return
        _answer(connection, number, _scored(function, completion, seed))


def _limit_memory(more: int) -> None:
    """Private writable memory (RLIMIT_DATA), of this process and of each that it starts."""
    with open("/proc/self/status", encoding="ascii") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("VmData:"))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = (kib << 10) + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most < 0 else min(limit, most), most))


def _scored(function: RewardFunction, completion: Completion, seed: int) -> dict[str, Any]:
    here = os.getpid()
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    try:
        said = _plain(function(completion))
    except BaseException as error:  # also SystemExit: whatever it is, the job must hear of it
        said = {"error": describe_error(error)}
    if os.getpid() != here:
        print("a copy of the reward's process, forked by the reward function, has returned from it too and ends here")
        os._exit(1)
    return said


def _plain(result: Any) -> dict[str, Any]:
    try:
        score = checked(result)
    except (TypeError, ValueError) as error:
        return {"error": str(error)}
    return {"reward": score.reward, "marks": dict(score.marks)}


def _answer(connection: Connection, number: int, said: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps([number, said]).encode())
