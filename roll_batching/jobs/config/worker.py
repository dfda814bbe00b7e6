"""Settings of one role (`actor_train`, `actor_infer`, `reference`, `critic`), in ROLL's names, and its engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from roll_batching.jobs.config.devices import parse_devices
from roll_batching.registry import Entry, Registry
from roll_batching.settings.fields import (
    MOST_TOKENS,
    OLD_LOG_PROBS,
    OR_NULL,
    POLICY,
    AlsoInFile,
    Roles,
    Settings,
    Switch,
    setting,
    tasks,
)
from roll_batching.settings.role import RoleSettings


def _to_strings(value: Any) -> Any:
    if not isinstance(value, dict):
        return {} if value is None else value
    return {k: str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for k, v in value.items()}


def _read_devices(value: Any) -> Any:
    return None if value is None else tuple(parse_devices(value))


Environment = Annotated[dict[str, str], AlsoInFile(dict[str, float | str] | None, _to_strings)]
"""Environment variables; numbers become strings."""

PROMPTED = Roles(names=("actor_train",), otherwise="prompts are described by actor_train.data_args")
SAMPLED = Roles(names=("actor_infer",), otherwise="rollouts are sampled as actor_infer.generating_args says")


_PROMPTS = tasks("grpo", "distill", otherwise="which has no prompts")
_NO_CHATS = "messages is given"
_READ_IF = {
    "eval_file_name": Switch(
        lambda job: job.without_evaluation is None, "{0.without_evaluation}: nothing is evaluated", of_job=True
    ),
    "prompt": (
        Switch(lambda data: data.messages is None, _NO_CHATS),
        Switch(lambda data: data.input_ids is None, "input_ids is given"),
    ),
    "input_ids token_cache": tasks("sft", otherwise="which reads texts anew at each start"),
    "tag": (
        _PROMPTS,
        Switch(lambda job: job.rewards, "there are no `rewards`, whose prompts tags select", of_job=True),
    ),
    "domain_interleave_probs long_prompts": _PROMPTS,
    "response": (
        tasks("grpo", "distill", "sft", "kto", otherwise="whose answers are `chosen` and `rejected`"),
        Switch(lambda job: job.task != "sft" or job.actor_train.data_args.messages is None, _NO_CHATS, of_job=True),
    ),
    "chosen rejected": tasks("dpo", otherwise="which has no pairs"),
    "label": tasks("kto", otherwise="which has no verdicts"),
}


class DataArgs(Settings, read_if=_READ_IF):
    """`data_args`: where prompts come from. Read from actor_train."""

    file_name: str | list[str] | None = setting(
        None,
        help="File or files of prompts (sft: of texts, dpo: of pairs, kto: of judged answers), relative to the "
        "working directory: JSONL, one object per line; Parquet; a folder that `datasets` saved; a data set of the "
        "hub, `hf://openai/gsm8k?name=main&split=train`; sft: the prefix of Megatron's .bin and .idx.",
    )
    eval_file_name: str | list[str] | None = setting(
        None, help="Files of held-out prompts, texts or pairs, in the same formats."
    )
    seeds: int | None = setting(
        None,
        help="rollout_function: in place of file_name, the number of prompts, `{prompt: N, seed: N}`, for environments "
        "that begin by a seed. The next eval_samples numbers are held out, unless eval_file_name is given.",
        ge=1,
    )
    prompt: str = setting("prompt", help="Key of the prompt.")
    messages: str | None = setting(
        None,
        help="Key of a chat's messages, which become the prompt through the tokenizer's chat template; `prompt` is not "
        "read.",
    )
    chat: bool = setting(
        False,
        help="true: the prompt is a user's turn, `response` (task: sft), `chosen` and `rejected` (task: dpo) are the "
        "assistant's, and they go through the tokenizer's chat template. false: texts are used unchanged.",
    )
    query: str | None = setting(
        None, help="chat: key of a text that is appended to the prompt on a new line; it may be empty."
    )
    system: str | None = setting(
        None, help="chat: key of the system message. Default, and for an empty text: that of the template."
    )
    tools: str | None = setting(
        "tools",
        help="Key of a chat's tools, for the chat template: a list of objects, as in requests of OpenAI's API, or its "
        "JSON text. Records without it have none. null: tools are not shown.",
    )
    chat_template_columns: dict[str, str] = setting(
        default_factory=dict,
        help="Other variables of the chat template, each with the key of a record that holds its value, such as "
        "`{enable_thinking: thinking}`. A record without the key leaves the template's default.",
    )
    chat_template_kwargs: dict[str, Any] = setting(
        default_factory=dict,
        help="Variables of the chat template with one value for all records, such as `{enable_thinking: false}`. A "
        "record's own key `chat_template_kwargs`, an object, adds to them and precedes them.",
    )
    input_ids: str | None = setting(
        None,
        help="task: sft: key of a record's token ids, which are read as they are. A record's `labels` (-100: not "
        "trained) or `loss_mask` says which tokens are trained; default: all.",
    )
    token_cache: str | None = setting(
        None,
        help="task: sft: folder that keeps the tokens of texts between starts, memory-mapped, 4 bytes per token. "
        "Changed files, tokenizers, templates or settings of texts are tokenised anew.",
    )
    images: str | None = setting(
        None,
        help="Key of a record's images, for a model that reads images: a list of paths relative to the data file, "
        "absolute paths, data: URLs or base64, or of bytes in Parquet. `<image>` in a text, or an image part of a "
        "message, is the place of each. Default: texts alone.",
    )
    image_min_pixels: int | None = setting(
        None,
        help="images: a smaller image is enlarged to this many pixels. Default: as in preprocessor_config.json.",
        ge=1,
    )
    image_max_pixels: int | None = setting(
        None,
        help="images: a larger image is reduced to this many pixels. Default: as in preprocessor_config.json.",
        ge=1,
    )
    tag: str = setting("tag", help="Key of a prompt's tag, by which `rewards` select prompts.")
    domain_interleave_probs: dict[str, float] | None = setting(
        None,
        help="By domain of `rewards`, its part of every step's prompts, rounded down to whole prompts; the last domain "
        "has the rest. Default: prompts are drawn regardless of their domain.",
    )
    long_prompts: Literal["error", "drop"] = setting(
        "error",
        help="A prompt with more than prompt_length tokens is an error that names its line (error), or is left out; a "
        "notice counts those left out (drop).",
    )
    response: str = setting(
        "answer",
        help="Key of the reference answer for the reward function; task: sft: of the text to train on; task: kto: of "
        "the judged answer.",
    )
    chosen: str = setting("chosen", help="task: dpo: key of the better answer.")
    rejected: str = setting("rejected", help="task: dpo: key of the worse answer.")
    label: str = setting("label", help="task: kto: key of the verdict, true for a desirable answer.")

    @property
    def prompts(self) -> str | list[str] | range | None:
        """The files of prompts, or the numbers of `seeds`."""
        return self.file_name if self.seeds is None else range(self.seeds)

    def held_out_prompts(self, count: int) -> str | list[str] | range | None:
        """The files of held-out prompts, or `count` numbers behind `seeds`."""
        if self.eval_file_name is not None or self.seeds is None:
            return self.eval_file_name
        return range(self.seeds, self.seeds + count)


_GREEDY = 1e-4
"""A top_p or temperature up to this counts as greedy decoding: in practice only the likeliest token is taken."""


def _unless_greedy(key: str) -> Switch:
    """The switch of the sampling key `key`, which is read unless another key makes decoding greedy."""
    return Switch(lambda args: args.greedy in (None, key), "{0.greedy} is {0.greedy_value}: decoding is greedy")


class GeneratingArgs(Settings, read_if={key: _unless_greedy(key) for key in ("top_p", "top_k")}):
    """`generating_args`: how rollouts are sampled. Read from actor_infer."""

    max_new_tokens: int | None = setting(
        None, help="Longest response. Default: the job's response_length.", gt=0, le=MOST_TOKENS
    )
    temperature: float = setting(1.0, help="Sampling temperature.", gt=0)
    top_p: float = setting(1.0, help="Sample among the most likely tokens whose probabilities sum to this.", gt=0, le=1)
    top_k: Annotated[int, AlsoInFile(Literal[-1], lambda value: 0 if value == -1 else value)] = setting(
        0, help="Sample among this many most likely tokens; 0, or -1 as in engines: all.", ge=0
    )
    do_sample: bool = setting(True, help="false: greedy decoding.")
    num_return_sequences: int | None = setting(
        None, help="Responses per prompt when num_return_sequences_in_group is not given.", ge=1
    )
    max_tokens_in_cache: int | None = setting(
        None,
        help="Limit of a rank's KV cache in tokens: sequences sampled together times (longest prompt + "
        "max_new_tokens). Further sequences are sampled afterwards, with the same result. A token takes 2 x layers x "
        "key-value heads / tensor parallel size x head_dim numbers of the model's precision. Default: no limit, "
        "since no derived one would be equal on all ranks and in every run.",
        gt=0,
    )

    @property
    def greedy(self) -> str | None:
        """The key that makes decoding greedy, or None if tokens are sampled."""
        if not self.do_sample:
            return "do_sample"
        if self.top_k == 1:
            return "top_k"
        return next((key for key in ("temperature", "top_p") if getattr(self, key) <= _GREEDY), None)

    @property
    def greedy_value(self) -> str:
        """The value of the key `greedy` names, for messages; call it only if decoding is greedy."""
        return "false" if self.greedy == "do_sample" else f"{getattr(self, self.greedy or ''):g}"


class ValidationConfig(Settings):
    """`validation`: sampling of the evaluation on actor_train.data_args.eval_file_name."""

    generating_args: GeneratingArgs = setting(
        default_factory=GeneratingArgs,
        help="Sampling of held-out answers. Keys that are not given are actor_infer's; num_return_sequences: 1.",
    )


class RouterReplay(Settings):
    """`router_replay`: whose experts the tokens of a mixture have in training."""

    mode: Annotated[
        Literal["disabled", "R2", "R3"],
        AlsoInFile(Literal["disable"], lambda value: "disabled" if value == "disable" else value),
    ] = setting(
        "disabled",
        help="R2: the experts that routers chose in the pass of old log-probs are the experts of training, in all "
        "optimizer steps of a rollout. R3: the experts with which the engine (sglang or vllm) sampled, in the pass of "
        "old log-probs too. disabled: routers choose anew in each pass.",
    )


# ---- rollout engines


ENGINES: Registry[Entry] = Registry(
    "rollout engine",
    Entry(name="sglang", target="roll_batching.jobs.engines.sglang:sglang_engine", summary="SGLang servers"),
    Entry(name="vllm", target="roll_batching.jobs.engines.vllm:vllm_engine", summary="vLLM servers"),
    Entry(
        name="hf_infer", target="roll_batching.jobs.engines.hf:hf_engine", summary="transformers in the job's processes"
    ),
)


class EngineArgs(Settings):
    """`engine_args`: servers of a rollout engine, requests, and weight updates."""

    urls: list[str] = setting(
        default_factory=list,
        help="sglang, vllm: running servers, http://host:port each, all of the same model. Default: the job starts "
        "servers on actor_infer.device_mapping, with strategy_args.strategy_config as their options.",
    )
    command: list[str] | None = setting(
        None,
        help="Command of a server that the job starts, before its options. Default: [vllm, serve]; for sglang the "
        "job's Python with -m sglang.launch_server.",
    )
    start_timeout: float = setting(1800.0, help="Seconds until a server that the job starts must respond.", gt=0)
    request_timeout: float = setting(600.0, help="Seconds per attempt of a request.", gt=0)
    max_in_flight: int = setting(128, help="Most concurrent requests per server and data-parallel rank.", ge=1)
    retries: int = setting(3, help="Further attempts of a failed request, on other servers where there are any.", ge=0)
    update_weights_from: Literal["disk", "distributed"] = setting(
        "disk",
        help="How the engine gets new weights. disk: from a model directory. distributed: from rank 0 over a process "
        "group with each server, in buckets, without a file; sglang only.",
    )
    weights_folder: str | None = setting(
        None,
        help="Folder of the model directories for engines, on a file system that engines and all ranks share. Each run "
        "has a subfolder, named by the run and a digest of its path. Default: engine_weights in the run's folder.",
    )
    gap_warning: float = setting(
        0.05,
        help="Warn when the engine's log-probs differ from the trainer's by more than this, in the mean over tokens.",
        gt=0,
    )


# ---- the role


class WorkerConfig(RoleSettings, read_if={"router_replay logprob_temperature": OLD_LOG_PROBS}):
    """One role of the job."""

    data_args: Annotated[DataArgs, OR_NULL] = setting(default_factory=DataArgs, help="The data.", roles=PROMPTED)
    generating_args: Annotated[GeneratingArgs, OR_NULL] = setting(
        default_factory=GeneratingArgs, help="Sampling.", roles=SAMPLED
    )
    engine_args: Annotated[EngineArgs, OR_NULL] = setting(
        default_factory=EngineArgs, help="Engine of the rollouts.", roles=SAMPLED
    )
    device_mapping: Annotated[tuple[int, ...] | None, AlsoInFile(int | str, _read_devices)] = setting(
        None,
        help="Devices of the role, one process each: a list, `list(range(0,8))` or `0-7`. On a machine without GPUs it "
        "only counts processes. actor_infer and reference share all devices of actor_train (the default), or have "
        "other devices with separate processes and their own layout. Under async_generation_ratio the sampler is one "
        "process on the device of rank 0 unless actor_infer has other devices.",
    )
    system_envs: Environment = setting(
        default_factory=dict, help="Environment variables, set before the workers import anything."
    )

    router_replay: RouterReplay = setting(
        default_factory=RouterReplay, help="Experts of a mixture in training.", roles=POLICY
    )
    logprob_temperature: float | None = setting(
        None,
        roles=POLICY,
        help="RL: temperature of the log-probs in the loss: the policy's, old ones and the reference's. Default: the "
        "sampling temperature, so that they are those of the sampled distribution; ROLL: 1.",
        gt=0,
    )
