"""ROLL's keys of a job that do nothing here: each is accepted with a notice, or refused with its reason.

They are the bases of the settings that are read (`job_keys`, `worker`), as those of `settings.roll_keys` are of a
strategy's, so that a file written for ROLL is read to its end and nothing in it is ignored silently.
"""

from __future__ import annotations

from typing import Any

from roll_batching.settings.fields import Settings, honoured, noticed, refused
from roll_batching.settings.roll_keys import ROUTER_REPLAY, VLM

CRITIC = "critics and value heads are not supported for now; use adv_estimator: grpo"
DISTILLATION = "distillation is not supported for now"


class RollDataArgs(Settings):
    """Of `data_args`: chats, mixtures of data sets, images."""

    template: str | None = noticed(
        None,
        help="Chat template.",
        notice="messages go through the tokenizer's own chat template, and prompts are used as their file has them",
    )
    dataset_type: str | None = refused(
        "json", help="Kind of file.", reason="only JSON lines are read", allowed=(None, "jsonl")
    )
    id: str | None = noticed(None, help="Key of the id.", notice="samples are numbered by the job")
    preprocessing_num_workers: int | None = noticed(
        None, help="Processes that tokenise.", notice="prompts are tokenised in the job's own process"
    )
    dataset_dir: str | None = noticed(None, help="Folder of data sets.", notice="file_name holds the whole path")
    interleave_probs: str | list[float] | None = noticed(
        None, help="Mixing of data sets.", notice="all prompts are drawn with equal probability"
    )
    image_folder: str | None = refused(None, help="Folder of images.", reason=VLM)
    video_folder: str | None = refused(None, help="Folder of videos.", reason=VLM)


class RollGeneratingArgs(Settings):
    """Of `generating_args`: an engine's sampling."""

    num_beams: int = refused(1, help="Beams.", reason="beam search is not supported; use 1")
    repetition_penalty: float = refused(
        1.0,
        help="Penalty on repeated tokens.",
        reason="it would make sampled log-probs differ from the model's; use 1.0",
    )
    length_penalty: float = refused(
        1.0, help="Length penalty of beam search.", reason="there is no beam search; use 1.0"
    )
    max_length: int | None = noticed(None, help="Longest prompt and response.", notice="max_new_tokens is the limit")
    stop_strings: list[str] | None = refused(
        None,
        help="Texts that end a response.",
        reason="a response ends at the tokenizer's end token; leave it out",
    )
    include_stop_str_in_output: bool | None = noticed(
        None, help="Keep the stop text.", notice="a response ends at the end token, which is kept"
    )
    logprobs: int | None = noticed(
        None, help="Log-probs returned by the engine.", notice="the sampled tokens' log-probs are always kept"
    )


class RouterReplay(Settings):
    """`router_replay`."""

    mode: str = refused("disable", help="Replay mode.", reason=ROUTER_REPLAY)


class RollWorkerKeys(Settings):
    """Of a role: Ray's workers, multi-token prediction, router replay."""

    logits_in_fp32: bool = noticed(
        False,
        help="Logits in fp32.",
        notice="log-probs and entropy are always computed in fp32, from logits of any precision",
    )
    name: str | None = noticed(None, help="Name of the role.", notice="a role's name is its key in the file")
    worker_cls: str | None = noticed(
        None,
        help="ROLL's worker class.",
        notice="there are no worker classes here; name your loss in loss_function",
    )
    num_gpus_per_worker: int | None = noticed(
        None, help="Devices per process.", notice="a process drives one device, and engines are not started"
    )
    world_size: int | None = noticed(None, help="Processes of the role.", notice="device_mapping counts the processes")
    max_concurrency: int | None = noticed(
        None, help="Ray actor's concurrency.", notice="a rank does one thing at a time"
    )
    model_update_frequency: int = refused(
        1,
        help="Steps between weight updates of the engine.",
        reason="rollouts always use the current weights; use 1",
    )
    offload_nccl: bool = noticed(False, help="Free NCCL buffers.", notice="roles share one process and its buffers")
    router_replay: RouterReplay = honoured(default_factory=RouterReplay, help="Router replay, refused for now.")
    mtp_training_mode: str | None = refused(
        "disabled",
        help="Multi-token prediction.",
        reason="multi-token prediction (MTP) is not supported for now",
        allowed=(None,),
    )
    opd_kl_coef: float | None = refused(None, help="Weight of on-policy distillation.", reason=DISTILLATION)


class RollJobKeys(Settings):
    """Of a job: trackers, Ray, critics, distillation, roles that do not exist here."""

    logging_dir: str | None = noticed(None, help="Folder of logs.", notice="everything a run leaves lies in its folder")
    checkpoint_config: dict[str, Any] | None = noticed(
        None,
        help="Where checkpoints go.",
        notice="checkpoints lie in the run's folder",
    )
    num_gpus_per_node: int | None = noticed(
        None, help="Devices per machine.", notice="actor_train.device_mapping counts the processes"
    )
    num_nodes: int | None = noticed(None, help="Machines.", notice="Ray, or one torchrun per machine, decides")
    rpc_timeout: int | None = noticed(None, help="Ray's timeout.", notice="backend_timeout limits collectives")
    val_batch_size: int | None = noticed(
        None, help="Prompts per evaluation batch.", notice="eval_samples is the number"
    )
    hydra: dict[str, Any] | None = noticed(None, help="Hydra's own section.", notice="Hydra is not used here")
    reward_pretrain: str | None = noticed(
        None, help="Checkpoint of a reward model.", notice="rewards come from reward_function, or from rewards"
    )
    global_template: str | None = noticed(
        None,
        help="Chat template.",
        notice="messages go through the tokenizer's own chat template, and prompts are used as their file has them",
    )
    offload_nccl: bool = noticed(False, help="Free NCCL buffers.", notice="roles share one process and its buffers")
    rollout_dump_dir: str | None = noticed(
        None,
        help="Folder that receives rollouts.",
        notice="rollouts.jsonl lies in the run's folder; rollout_samples says how many",
    )
    is_num_return_sequences_expand: bool = noticed(
        False,
        help="Send the engine every prompt as often as it is answered.",
        notice="the responses to a prompt are sampled together; which way does not change them",
    )
    enable_reference: bool = noticed(
        False, help="Build the reference.", notice="the reference is built when use_kl_loss is true"
    )
    enable_old_logprobs_recompute: bool = noticed(
        True, help="Compute old log-probs.", notice="actor_train.logprob_plan decides"
    )
    value_clip: float | None = noticed(None, help="Clip range of a critic.", notice="there is no critic")
    whiten_rewards: bool = refused(False, help="Whiten rewards.", reason="use norm_mean_type and norm_std_type")
    error_max_len_clip: bool = refused(False, help="Clip overlong errors.", reason="not supported")
    difficulty_loss_weight: bool = refused(False, help="Weight by difficulty.", reason="not supported")
    length_loss_weight: bool = refused(False, help="Weight by length.", reason="not supported")
    critic: dict[str, Any] | None = refused(None, help="Role of the critic.", reason=CRITIC)
    critic_warmup: int = refused(0, help="Steps that train only the critic.", reason=CRITIC)
    teacher: dict[str, Any] | None = refused(None, help="Role of a teacher.", reason=DISTILLATION)
    student_train: dict[str, Any] | None = refused(None, help="Role of a student.", reason=DISTILLATION)
    student_infer: dict[str, Any] | None = refused(None, help="Role of a student.", reason=DISTILLATION)
    is_pure_opd: bool = refused(False, help="On-policy distillation.", reason=DISTILLATION)
    use_opd: bool = refused(False, help="On-policy distillation beside rewards.", reason=DISTILLATION)
    reward: dict[str, Any] | None = refused(
        None, help="Reward role.", reason="name one Python function in reward_function instead"
    )
    sft_train: dict[str, Any] | None = refused(
        None, help="Role of supervised training.", reason="write task: sft and put its keys into actor_train"
    )
