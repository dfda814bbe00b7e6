"""Abuses of `convert-config`: malformed files of ROLL, NeMo-RL and verl."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.campaigns.abuse.runner import DONE, LAUGHS, REFUSED, Abuse, Lost

SECRET = "sk-7f3a9"


@contextlib.contextmanager
def clean(home: Path) -> Iterator[Lost]:
    """The output has no invalid keys or numbers outside its comments."""

    def left() -> str:
        if not (home / "out.yaml").exists():
            return ""
        text = (home / "out.yaml").read_text()
        settings = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        wrong = [word for word in (".nan", ".inf") if word in settings] + [SECRET] * (SECRET in text)
        return f"out.yaml holds {', '.join(wrong)}" if wrong else ""

    yield left


@contextlib.contextmanager
def unchanged(home: Path) -> Iterator[Lost]:
    """The files of the scene are as they were."""
    before = {path: path.read_bytes() for path in home.iterdir() if path.is_file()}

    def left() -> str:
        lost = [path.name for path, text in before.items() if path.read_bytes() != text]
        return f"{', '.join(lost)} was overwritten" if lost else ""

    yield left


def _overwrites(name: str, files: dict[str, str | bytes], *arguments: str, words: tuple[str, ...] = ()) -> Abuse:
    """A command whose output is a file of the user's."""
    return Abuse(
        name=f"output: {name}",
        code=REFUSED,
        seconds=60,
        arguments=("-m", "roll_batching.cli", *arguments),
        files=files,
        words=("error: ", *(words or ("was not written by", "so it is not overwritten"))),
        lines=3,
        memory=2 << 30,
        scene=unchanged,
    )


def _converted(name: str, text: str | bytes, *words: str, framework: str = "roll", code: int = DONE) -> Abuse:
    command = ("-m", "roll_batching.cli", "convert-config", "--from", framework, "job.yaml", "--output", "out.yaml")
    return Abuse(
        name=f"convert: {framework}: {name}",
        code=code,
        seconds=30,
        arguments=command,
        files={"job.yaml": text},
        words=words,
        lines=3,
        memory=2 << 30,
        scene=clean,
    )


def _refused(name: str, text: str | bytes, *words: str, framework: str = "roll") -> Abuse:
    return _converted(name, text, "error: ", "job.yaml", *words, framework=framework, code=REFUSED)


TWO_REWARDS = "rewards: {a: {worker_cls: b.MathRuleRewardWorker}, judge: {worker_cls: b.LLMJudgeRewardWorker}}\n"
OF_ROLL = "rollout_batch_size: 8\nrewards: {math: {worker_cls: a.MathRuleRewardWorker}}\n"
OF_NEMO_RL = "policy: {model_name: a, train_global_batch_size: 8}\ngrpo: {num_prompts_per_step: 2}\n"
SCRIPT = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=/m\n"
EDITED = "# Converted from run.sh by roll-batching convert-config.\nmax_steps: 7\n"
LENGTHS = "length\n64\n32\n"
AGENTIC = "rollout_batch_size: 64\nadv_estimator: grpo\ncustom_envs: {a: {env_type: b}}\n"
OF_AGENTS = {
    "a list of environments": "train_env_manager: [1, 2]\n",
    "no trajectories in a group": "train_env_manager: {group_size: 0}\n",
    "half a group": "train_env_manager: {group_size: 7}\n",
    "a name for a normalisation": "train_env_manager: {group_size: 8}\nreward_normalization: batch\n",
    "a list for a method": "train_env_manager: {group_size: 8, tags: 3}\nreward_normalization: {method: [1]}\n",
}
"""By name, the rest of an agentic file of ROLL."""
OF_VERL = "data: {train_batch_size: 64}\ntrainer: {total_training_steps: 20"
COUNTS = {
    "NaN for a share": "}\nactor_rollout_ref: {actor: {optim: {lr_warmup_steps_ratio: .nan}}}\n",
    "a text for parts of a step": (
        ", v1: {trainer_mode: separate_async, separate_async: {parameter_sync_step: many}}}\n"
        "actor_rollout_ref: {actor: {optim: {lr_warmup_steps: 3}}}\n"
    ),
    "a schedule of minus one step": "}\nactor_rollout_ref: {actor: {optim: {lr_decay_steps: -1}}}\n",
}
"""By name, the rest of a file of verl."""
TORCH = "grpo: {}\npolicy:\n  model_name: a\n  train_global_batch_size: 8\n  optimizer: {name: torch.optim.AdamW}\n"
_SCHEDULES = "torch.optim.lr_scheduler"
SCHEDULERS = {
    "a list for a factor": f"  scheduler: [{{name: {_SCHEDULES}.ConstantLR, kwargs: [1]}}]\n",
    "texts for milestones": (
        f"  scheduler: [{{name: {_SCHEDULES}.LinearLR, kwargs: {{start_factor: .nan}}}}, "
        f"{{name: {_SCHEDULES}.CosineAnnealingLR, kwargs: {{T_max: -3}}}}, {{milestones: [soon]}}]\n"
    ),
}
"""By name, the end of the section `policy` of a file of NeMo-RL."""
BINARY = bytes(range(256)) * 16
UNKNOWN = "left out that matter"

CONVERSIONS = [
    _refused("billion laughs", LAUGHS, "holds more than 20,000 values"),
    _refused("defaults from elsewhere", "defaults: [../../../../etc/passwd]\n", "cannot be composed"),
    _refused("defaults that lead back", "defaults: [job]\nexp_name: a\n", "defaults: inherit from each other"),
    _refused("an empty file", "", "is empty: there is nothing to convert"),
    _refused("a binary file", BINARY, "is not UTF-8 text"),
    _refused("a list for a file", "- exp_name\n- seed\n", "must hold keys and values"),
    _refused("a file of NeMo-RL's", OF_NEMO_RL, "was written for NeMo-RL", "--from nemo_rl"),
    _converted("a device as data file", TWO_REWARDS + "actor_train: {data_args: {file_name: [/dev/zero]}}\n"),
    _converted("a variant that is a list", "actor_train: {pg_variant: [topr]}\n", "1 left out that matter"),
    _converted("no room for a response", "sequence_length: 8\nprompt_length: 32\nactor_train: {}\n"),
    _converted("a list for a section", OF_ROLL + "actor_train: [1, 2]\n", UNKNOWN),
    _converted("a correction that is true", OF_ROLL + "train_infer_correction: {is_weight: true}\n", UNKNOWN),
    _converted(
        "a misspelt bound",
        OF_ROLL + "train_infer_correction: {is_weight: {enabled: true, uper_bound: 2}}\n",
        UNKNOWN,
    ),
    _converted("NaN for a rate", OF_ROLL + "actor_train: {training_args: {learning_rate: .nan}}\n", UNKNOWN),
    _converted(
        "keys that are secret",
        OF_ROLL + f"track_with: wandb\ntracker_kwargs: {{api_key: {SECRET}}}\nsystem_envs: {{HF_TOKEN: {SECRET}}}\n",
    ),
    _converted("a URL with a password", OF_ROLL + f"pretrain: https://me:{SECRET}@hub/model\n", UNKNOWN),
    _refused("billion laughs", LAUGHS + "\n" + OF_NEMO_RL, "holds more than 20,000 values", framework="nemo_rl"),
    _refused("defaults that lead back", "defaults: job.yaml\n", "inherit from each other", framework="nemo_rl"),
    _refused(
        "defaults from nowhere", "defaults: ../../no.yaml\n", "defaults: names ../../no.yaml", framework="nemo_rl"
    ),
    *(_converted(f"units: {name}", AGENTIC + text, UNKNOWN) for name, text in OF_AGENTS.items()),
    *(_converted(f"units: {name}", OF_VERL + text, UNKNOWN, framework="verl") for name, text in COUNTS.items()),
    *(_converted(f"units: {name}", TORCH + text, UNKNOWN, framework="nemo_rl") for name, text in SCHEDULERS.items()),
    _refused("an empty file", "", "is empty: there is nothing to convert", framework="nemo_rl"),
    _refused("a binary file", BINARY, "is not UTF-8 text", framework="nemo_rl"),
    _refused("a file of ROLL's", OF_ROLL, "was written for ROLL", "--from roll", framework="nemo_rl"),
    _refused("a list for the policy", "policy: [1, 2]\ngrpo: {}\n", "policy: is [1, 2]", framework="nemo_rl"),
    _refused(
        "NaN for a size",
        "policy: {train_global_batch_size: .nan}\ngrpo: {}\n",
        "policy.train_global_batch_size: is nan",
        framework="nemo_rl",
    ),
    _converted(
        "keys that are secret",
        OF_NEMO_RL + f"logger: {{wandb_enabled: true, wandb: {{project: p, api_key: {SECRET}}}}}\n",
        framework="nemo_rl",
    ),
]

OUTPUTS = [
    _overwrites("the script itself", {"run.sh": SCRIPT}, "convert-config", "run.sh", "--output", "run.sh"),
    _overwrites("the script, as a report", {"run.sh": SCRIPT}, "convert-config", "run.sh", "--report", "run.sh"),
    _overwrites(
        "a job edited since its conversion",
        {"run.sh": SCRIPT, "job.yaml": EDITED},
        *("convert-config", "run.sh", "--output", "job.yaml"),
    ),
    _overwrites("data under a plot", {"a.csv": LENGTHS, "b.png": BINARY}, "plan", "a.csv", "--plot", "b.png"),
    _overwrites(
        "lengths under figures",
        {"a.csv": LENGTHS},
        *("simulate", "--model", "qwen3-1.7b", "--lengths", "a.csv", "--json", "a.csv"),
    ),
    _overwrites(
        "a script as a job",
        {"run.sh": SCRIPT},
        *("train", "--config", "run.sh"),
        words=("convert-config --from verl run.sh --output job.yaml",),
    ),
]
