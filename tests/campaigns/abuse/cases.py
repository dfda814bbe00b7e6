"""All abuses with their expected outcomes."""

from __future__ import annotations

import io
import json

import numpy as np

from tests.campaigns.abuse.adapters import ADAPTERS
from tests.campaigns.abuse.convert import CONVERSIONS, OUTPUTS
from tests.campaigns.abuse.critics import CRITICS
from tests.campaigns.abuse.engines import ENGINES
from tests.campaigns.abuse.frozen import FREEZING
from tests.campaigns.abuse.host_rewards import HOST_REWARDS
from tests.campaigns.abuse.hybrids import HYBRIDS
from tests.campaigns.abuse.limits import LIMITS
from tests.campaigns.abuse.losses import LOSSES
from tests.campaigns.abuse.objectives import OBJECTIVES
from tests.campaigns.abuse.parts import PARTS
from tests.campaigns.abuse.resume import PLATFORM, RESUMES
from tests.campaigns.abuse.rollouts import ROLLOUTS
from tests.campaigns.abuse.runner import DONE, FAILED, LAUGHS, REFUSED, SAVING, TRAIN, Abuse, free_port, lines_of
from tests.campaigns.abuse.scenes import (
    FILLING_REWARD,
    RESUMING,
    WAITING,
    complete,
    cut,
    damaged,
    earlier_run,
    goes_on,
    kill_launcher,
    kill_rank,
    not_begun,
    other_run,
    press_key,
    scribbled,
    small_disk,
)
from tests.campaigns.abuse.teachers import TEACHERS
from tests.campaigns.abuse.texts import TEXTS
from tests.campaigns.abuse.verdicts import VERDICTS

SOON = 30.0
"""Time limit in seconds for errors that are found before any rank starts."""
GIBI = 1 << 30


def _rewarding(text: str) -> dict[str, str]:
    return {"scoring.py": f"import os, sys, time\nfrom roll_batching.jobs.rewards import Score\n{text}\n"}


def _call(body: str) -> dict[str, str]:
    """Reward module whose function runs `body`."""
    return _rewarding(f"def reward(completion):\n    {body}")


def _failing(name: str, body: str, *words: str) -> Abuse:
    where = ("rank ", "reward function scoring:reward failed on sample ")  # one line per rank
    return Abuse(name=f"reward: {name}", code=FAILED, files=_call(body), words=(*where, *words), lines=1)


def _unimportable(name: str, text: str, *words: str) -> Abuse:
    return Abuse(
        name=f"reward: {name}",
        code=REFUSED,
        seconds=SOON,
        files=_rewarding(text),
        words=("reward function 'scoring:reward'", *words),
        scene=not_begun,
    )


SLOW = """import pathlib
def reward(completion):
    if os.environ["RANK"] == "1" and not pathlib.Path("slept").exists():
        pathlib.Path("slept").touch()
        time.sleep(20)
    return completion.tokens / 10"""

# Code of a model: folders nested deeper than the recursion limit, and a writer in its own session.
JUDGED = """from dataclasses import replace
from roll_batching.jobs.rewards.code import code_tests
CODE = '''
import os, time
if os.fork() == 0:
    os.setsid()
    while True: open(f'x{time.time_ns()}', 'w')
for _ in range(1500):
    os.mkdir('d'); os.chdir('d')
'''
def reward(completion):
    fence = '`' * 3
    record = {'test_cases': ['assert f() == 1']}
    judged = replace(completion, response=f'{fence}python{CODE}{fence}', record=record)
    return code_tests(judged, run='subprocess').reward + completion.tokens / 10"""

REWARDS = [
    _failing("sys.exit(0)", "sys.exit(0)", "SystemExit: 0"),
    _unimportable("sys.exit(0) on import", "sys.exit(0)", "SystemExit: 0"),
    _failing("os._exit(0)", "os._exit(0)", "its process ended with exit code 0"),
    Abuse(
        name="reward: never returns",
        code=FAILED,
        settings={"reward_timeout": 2},
        files=_call("time.sleep(100000)"),
        words=("rank ", "scoring:reward did not return within 2 s on sample ", "raise reward_timeout"),
        lines=1,
    ),
    Abuse(
        name="reward: forks and returns twice",
        code=DONE,
        files=_call("return 1.0 if os.fork() else 2.0"),
        scene=complete,
    ),
    _unimportable("SyntaxError", "def", "SyntaxError", "scoring.py, line 3"),
    _unimportable("import fails", "import no_such_module", "no_such_module"),
    _failing("Score(marks=None)", "return Score(reward=1.0, marks=None)", "Score.marks is a NoneType"),
    _failing("returns text", "return '1.0'", "returned a str, '1.0', not a number"),
    _failing("returns None", "return None", "returned a NoneType, None, not a number"),
    _failing("returns NaN", "return float('nan')", "the reward is nan"),
    Abuse(
        name="reward: closes standard output",
        code=DONE,
        files=_call("os.closerange(0, 3); return 1.0"),
        scene=complete,
    ),
    Abuse(
        name="reward: an error of 2,000 lines, with escapes",
        code=FAILED,
        files=_call("raise RuntimeError('\\x1b[31mred' + '\\nline' * 2000)"),
        words=("rank ", "scoring:reward failed on sample ", r"RuntimeError: \x1b[31mred", " more characters)"),
    ),
    Abuse(name="reward: judged code leaves folders and a writer", code=DONE, files=_rewarding(JUDGED), scene=complete),
    _failing("kills itself", "os.kill(os.getpid(), 9)", "its process ended by signal 9 (SIGKILL)"),
    Abuse(
        name="reward: slower than backend_timeout",
        code=DONE,
        settings={"actor_train.backend_timeout": 0.2},
        files=_rewarding(SLOW),
        scene=complete,
    ),
]

RUNS = [
    Abuse(
        name="runs: two of one name at once",
        code=FAILED,
        seconds=SOON,
        files=WAITING,
        words=("is in use by another run (process ", "another exp_name or output_dir"),
        scene=other_run,
    ),
    Abuse(
        name="runs: again without resume",
        code=DONE,
        words=("files of an earlier run of this name are now in",),
        scene=earlier_run,
    ),
    Abuse(
        name="runs: resume from a cut checkpoint",
        code=FAILED,
        settings=RESUMING,
        words=("is cut off: it has ", "The checkpoint before it is complete: resume with resume_from_checkpoint="),
        scene=damaged(cut),
    ),
    Abuse(
        name="runs: resume from a garbled checkpoint",
        code=FAILED,
        settings=RESUMING,
        words=(".metadata cannot be read", "resume_from_checkpoint="),
        scene=damaged(scribbled),
    ),
    Abuse(
        name="runs: the disk is full at a checkpoint",
        code=FAILED,
        settings=SAVING,
        files={"scoring.py": FILLING_REWARD},
        words=("rl-000002", " is free there", "rl-000001 is complete: resume with resume_from_checkpoint=true"),
        lines=1,
        scene=small_disk,
    ),
    Abuse(
        name="runs: SIGKILL of the launcher",
        code=-9,
        settings=SAVING,
        files=WAITING,
        lines=0,
        scene=goes_on,
        meddle=kill_launcher,
    ),
    Abuse(
        name="runs: SIGKILL of a rank",
        code=FAILED,
        files=WAITING,
        words=("rank 1 was ended by signal 9 (SIGKILL)",),
        meddle=kill_rank,
    ),
    Abuse(
        name="runs: a key pressed (SIGINT)",
        code=FAILED,
        files=WAITING,
        words=("stopped by SIGINT; all ranks were ended",),
        meddle=press_key,
    ),
]

GOOD = [{"prompt": f"{word}=", "answer": word} for word in ("abc", "bcd", "cde", "def") * 50]
LONG = "abcdefabcdefabcdefabcdef="
HUGE = "a" * 10_000_000 + "="


def _badly_fed(name: str, file: str, row: dict[str, str], *words: str) -> Abuse:
    """Abuse with a fault on the second to last line of `file`."""
    answers = "response" if file == "corpus.jsonl" else "answer"
    good = [{"prompt": one["prompt"], answers: one["answer"]} for one in GOOD]
    warmup = {"warmup.file_name": file, "warmup.training_args.max_steps": 1}
    return Abuse(
        name=f"data: {name}",
        code=FAILED,
        seconds=SOON,
        settings={"warmup": {}, **warmup} if file == "corpus.jsonl" else {},
        files={file: lines_of([*good, row, good[0]])},
        words=(f"{file}:{len(good) + 1}", *words),
        lines=4,
        scene=not_begun,
    )


DATA = [
    _badly_fed("a prompt too long", "prompts.jsonl", {"prompt": LONG, "answer": "a"}, "prompt_length"),
    _badly_fed("unknown characters", "prompts.jsonl", {"prompt": "ab%=", "answer": "ab"}, "'%'"),
    _badly_fed("a line of 10 MB", "prompts.jsonl", {"prompt": HUGE, "answer": "a"}),
    _badly_fed("a document too long", "corpus.jsonl", {"prompt": LONG, "response": "a"}, "prompt_length"),
    _badly_fed("a document's unknown characters", "corpus.jsonl", {"prompt": "ab=", "response": "a%"}, "'%'"),
    _badly_fed("a document of 10 MB", "corpus.jsonl", {"prompt": "ab=", "response": HUGE}),
]


def _written(name: str, text: str, *words: str, lines: int = 3) -> Abuse:
    """Abuse whose settings file contains only `text`."""
    return Abuse(
        name=f"YAML: {name}",
        code=REFUSED,
        seconds=SOON,
        files={"job.yaml": text},
        words=("job.yaml", *words),
        lines=lines,
        memory=2 * GIBI,
        scene=not_begun,
    )


CHAIN = "".join(f'b{i}: "${{b{i + 1}}}${{b{i + 1}}}"\n' for i in range(40)) + "b40: x\n"

YAML = [
    _written("billion laughs", LAUGHS, "holds more than 20,000 values"),
    _written("a chain of ${a}${a}", CHAIN, "once references (${name}) are expanded"),
    _written("a reference to itself", "exp_name: ${exp_name}", "refers to itself"),
    _written("deep nesting", "a: " + "[" * 100_000, "more than 32 sections or lists inside each other"),
    _written("NUL", "exp_name: a\0b", "the character U+0000 cannot stand in it"),
    _written("!!int abc", "seed: !!int abc", "'abc' cannot be read as int"),
    _written(
        "device_mapping=0-99999999999",
        "actor_train: {device_mapping: 0-99999999999}",
        "names more than 65,536 devices",
    ),
    _written("a name that leaves the folder", "exp_name: ../../x", "job.yaml:1: exp_name: is '../../x'; it names one"),
    _written("a number of YAML 1.1", "max_steps: 1:30", "job.yaml:1: max_steps: YAML 1.1 reads '1:30' as 90"),
    _written("a response without end", "response_length: 1e8", "response_length: is 100000000.0; it must be at most "),
    Abuse(
        name="YAML: an override without effect",
        code=REFUSED,
        seconds=SOON,
        arguments=(*TRAIN, "value_clip=0.5"),
        words=("override 'value_clip=0.5': value_clip: has no effect: ", "leave it out"),
        lines=3,
        scene=not_begun,
    ),
    _written("an unknown key", "qqqqqqq: 1", "qqqqqqq: unknown key", "docs/configuration.md"),
    _written(
        "a misspelt key beside rewards",
        "rewards: {math: {reward_function: math_verify}}\nmax_stepz: 1",
        "job.yaml:2: max_stepz: unknown key; did you mean 'max_steps'?",
    ),
    _written(
        "a misspelt key in a file of ROLL's",
        "rewards: {math: {worker_cls: a.MathRuleRewardWorker}}\nmax_stepz: 1",
        "convert-config --from roll",
        "max_stepz: unknown key",
        lines=5,
    ),
    _written(
        "log-probs kept at another temperature",
        "actor_train: {logprob_plan: rollout, logprob_temperature: 0.5}",
        "actor_train.logprob_temperature",
        "logprob_plan: train",
    ),
]


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _planned(name: str, file: str, content: bytes) -> Abuse:
    return Abuse(
        name=f"plan: {name}",
        code=REFUSED,
        seconds=SOON,
        arguments=("-m", "roll_batching.cli", "plan", file),
        files={file: content},
        words=(file,),
    )


PLANS = [
    _planned("2^63 in an npy of uint64", "lengths.npy", _npy(np.array([5, 2**63], np.uint64))),
    _planned("2^70 in a CSV", "lengths.csv", f"length\n5\n{2**70}\n".encode()),
    _planned("2^64 in JSON lines", "lengths.jsonl", f"{json.dumps({'length': 2**64})}\n".encode()),
]


def _place(rank: int, size: int) -> dict[str, str]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), **where}


PLACES = [
    Abuse(
        name="places: WORLD_SIZE=2, rank 0 alone",
        code=FAILED,
        settings={"actor_train.backend_timeout": 0.1},
        variables=_place(0, 2),
        words=("rank 1 of 2 did not start within 0.1 minutes", "actor_train.backend_timeout"),
    ),
    Abuse(
        name="places: WORLD_SIZE=2, rank 1 alone",
        code=FAILED,
        settings={"actor_train.backend_timeout": 0.1},
        variables=_place(1, 2),
        words=("rank 1 of 2 could not meet the others at 127.0.0.1:", "within 0.1 minutes"),
    ),
    Abuse(
        name="places: RANK without MASTER_ADDR",
        code=REFUSED,
        seconds=SOON,
        variables={"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"},
        words=("MASTER_ADDR is not set in the environment, though RANK is",),
    ),
    Abuse(
        name="places: torchrun starts 3, device_mapping names 2",
        code=FAILED,
        arguments=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", *TRAIN),
        words=("error: actor_train.device_mapping names 2 devices and 3 processes were started",),
        foreign=True,
        scene=not_begun,
    ),
]

CASES = [
    *(*REWARDS, *RUNS, *RESUMES, *CRITICS, *PLATFORM, *LOSSES, *DATA, *YAML, *CONVERSIONS, *OUTPUTS, *PLANS, *PLACES),
    *(*ENGINES, *PARTS, *FREEZING),
    *(*ROLLOUTS, *ADAPTERS, *TEACHERS, *OBJECTIVES, *VERDICTS, *HYBRIDS, *LIMITS),
    *(*HOST_REWARDS, *TEXTS),
]
