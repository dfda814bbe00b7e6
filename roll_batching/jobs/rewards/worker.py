"""The worker process that runs a reward function, started by `process.RewardProcess`.

It imports neither torch nor Megatron, so that it starts in a fraction of a second. Results have a separate socket:
the function may print to standard output, or close it. Standard input is empty.
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
from roll_batching.jobs.rewards.contract import Completion, LoadedReward, RewardFunction, check_score, load_reward
from roll_batching.registry import describe_error, printable


def serve(connection: Connection, memory: int) -> None:
    """Loads the function that the first message names, then serves calls until `connection` closes.

    A call is a completion to score, or a list of lines to check.

    `memory`: MiB that calls may allocate beyond the process's memory after the import; 0: no limit.
    """
    path, arguments, is_ours = connection.recv()
    function: LoadedReward | None = None
    try:
        function = load_reward(path, arguments)
        reply: dict[str, Any] = {"notice": function.notice, "checks": function.check is not None}
    except ConfigError as error:
        reply = {"error": str(error)}
    if memory:
        _limit_memory(memory << 20)
    _reply(connection, 0, reply)
    while function is not None:
        try:
            number, seed, call = connection.recv()
        except EOFError:
            return
        if isinstance(call, Completion):
            _reply(connection, number, _score(function, call, seed, is_ours=is_ours))
        else:
            _reply(connection, number, {"faults": [printable(function.fault(line), characters=300) for line in call]})


def _limit_memory(additional: int) -> None:
    """Allows `additional` bytes of private writable memory (RLIMIT_DATA), to this and to each child process."""
    with open("/proc/self/status", encoding="ascii") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = (kib << 10) + additional
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def _score(function: RewardFunction, completion: Completion, seed: int, *, is_ours: bool) -> dict[str, Any]:
    """Calls the function with seeded random numbers; returns its reward and marks, or its error.

    `is_ours`: a registered function, whose ValueErrors are written for users.
    """
    process = os.getpid()
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    reply: dict[str, Any]
    try:
        result = function(completion)
        try:
            score = check_score(result)
            reply = {"reward": score.reward, "marks": dict(score.marks)}
        except (TypeError, ValueError) as error:
            reply = {"error": str(error)}
    except BaseException as error:  # also SystemExit: the job must get an error, not a closed connection
        reply = {"error": str(error) if is_ours and type(error) is ValueError else describe_error(error)}
    if os.getpid() != process:  # a fork would reply a second time
        print("a copy of the reward's process, forked by the reward function, has returned from it too and ends here")
        os._exit(1)
    return reply


def _reply(connection: Connection, number: int, reply: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps([number, reply]).encode())
