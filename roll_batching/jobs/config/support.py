"""What goes with what in a job: pairs of features that are refused, and pairs that a test trains."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.jobs.config import features as f
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.settings.batching import CP_SIZE_OBSTACLES, PREFIX_OBSTACLES
from roll_batching.settings.support import ARCHITECTURE_FEATURES, DROPOUT, ENGINE_LAYERS, refusals_of, refused_pairs

_REFUSED = {
    (f.GREEDY_ESTIMATOR, f.ASYNC): (
        "{0.adv_estimator} needs greedy completions from the current weights, which a separate sampler cannot give; "
        "set async_generation_ratio to 0, or choose another"
    ),
    (f.GREEDY_ESTIMATOR, f.OWN_SAMPLER): (
        "{0.adv_estimator} needs greedy completions from the current weights, which a separate sampler cannot give; "
        "leave actor_infer.device_mapping out, or choose another"
    ),
    (f.NO_PLAN, f.ASYNC): (
        "none assumes that the current weights sampled, which is wrong under async_generation_ratio; leave it out, or "
        "use rollout"
    ),
    (f.CURRENT_PLAN, f.ASYNC): (
        "{0.actor_train.logprob_plan} takes old log-probs from the current weights, but older ones sampled "
        "(async_generation_ratio); use rollout, or correct for them with train_infer_correction.is_weight or "
        "loss_args.engine_ratio_cap (truncated importance sampling)"
    ),
    (f.DYNAMIC, f.NOT_GRPO): "compares rewards, which task: {0.task} does not have; set it to false",
    (f.DYNAMIC, f.SINGLE): (
        "compares the responses to one prompt, and there is one; raise num_return_sequences_in_group"
    ),
    (f.DYNAMIC, f.ASYNC): (
        "needs async_generation_ratio: 0, since prompts are drawn once a step is known to need more; set that, or this "
        "to false"
    ),
    (f.IN_FLIGHT, f.NO_SERVERS): (
        "is for the servers of an engine, which take weights while they sample; set "
        "actor_infer.strategy_args.strategy_name to sglang or vllm, or this to false"
    ),
    (f.IN_FLIGHT, f.REPLAY_3): (
        "is true, and router replay R3 takes the experts of one generation; use R2, or set this to false"
    ),
    (f.PARTIAL, f.ALTERNATING): (
        "is true, and new weights would wait for the rollouts under way; set in_flight_updates to true"
    ),
    (f.STALE_TOKENS, f.GIGPO): (
        "lets the loss skip tokens, and gigpo reads turns as runs of tokens; leave it out under in_flight_updates"
    ),
    (f.PARTIAL, f.SHARES): (
        "is true, and which prompts come first would decide the shares that domain_interleave_probs fixes; leave one "
        "of the two out"
    ),
    (f.DYNAMIC, f.SHARES): (
        "would change the shares of domains that domain_interleave_probs fixes; leave one of the two out"
    ),
    (f.DYNAMIC, f.GREEDY_ESTIMATOR): (
        "does not work with the greedy responses of {0.adv_estimator}; choose another adv_estimator"
    ),
    (f.SCALED, f.OVERLONG, f.NOT_GRPO): "changes rewards, which task: {0.task} does not have; leave it out",
    (f.SCALED, f.OVERLONG, f.GREEDY_ESTIMATOR): (
        "does not change the rewards of the greedy responses that {0.adv_estimator} compares with; choose another "
        "adv_estimator"
    ),
    (f.SCALED, f.OVERLONG, f.GIGPO): ("changes rewards of whole samples, and gigpo reads those of turns; leave it out"),
    (f.GIGPO, f.NO_FUNCTION): (
        "gigpo compares the turns of samples that reach equal states; set rollout_function to a function that returns "
        "states and a reward for each turn (docs/rollouts.md), or choose grpo"
    ),
    (f.FUNCTION_REWARD, f.DOMAIN_REWARDS, f.GIGPO): (
        "scores whole samples, and gigpo reads a reward for each turn, which rollout_function returns; leave it out"
    ),
    (f.WIDE_NORM, f.GIGPO): (
        "is {0.norm_std_type}, and gigpo compares groups of states; group divides by their deviation, ~ does not"
    ),
    (f.REWARD_KL, f.DISCOUNT, f.GIGPO): (
        "makes advantages of tokens, and gigpo has those of turns (step_reward_gamma); leave it out"
    ),
    (f.REPLAY, f.DENSE): (
        "is {0.actor_train.router_replay.mode}, but the model has no mixture of experts (architecture.moe); leave it "
        "out"
    ),
    (f.REPLAY_3, f.NO_SERVERS): (
        "is R3, router replay with the experts of the sampler, which servers return; set "
        "actor_infer.strategy_args.strategy_name to sglang or vllm and pretrain to a model directory, or use R2, "
        "which replays the experts of the pass of old log-probs"
    ),
    (f.REPLAY_3, f.FUNCTION): (
        "is R3, and rollout_function makes samples of several generations, whose experts it does not return; use R2"
    ),
    (f.REPLAY_2, f.NO_PLAN): (
        "is R2: it records experts in the pass of old log-probs, which logprob_plan: {0.actor_train.logprob_plan} "
        "omits; set logprob_plan to train or own"
    ),
    (f.REPLAY_2, f.SAMPLED_PLAN): (
        "is R2: it records experts in the pass of old log-probs, which logprob_plan: {0.actor_train.logprob_plan} "
        "omits; set logprob_plan to train or own"
    ),
    (f.REPLAY, f.CP_PER_PACK): (
        "is {0.actor_train.router_replay.mode}, which needs one context-parallel size; set context_parallel_size to a "
        "number instead of auto"
    ),
    (f.REPLAY, f.SLICED): (
        "is {0.actor_train.router_replay.mode}, which needs whole packs; set "
        "actor_train.strategy_args.strategy_config.pipeline_slices to 1"
    ),
    (f.SLICED, f.STREAM): "cuts packs of planned steps, and the section train forms packs from a stream; leave it out",
    (f.CORRECTION, f.DISTILL): "concerns old log-probs, which task: distill does not have; leave it out",
    (f.RATIO_CAP, f.CORRECTION): (
        "corrects in the loss what train_infer_correction corrects before it; keep one of the two"
    ),
    (f.NO_PLAN, f.CORRECTION): (
        "none computes no old log-probs, so train_infer_correction has nothing to compare; use train or own"
    ),
    (f.SAMPLED_PLAN, f.CORRECTION): (
        "rollout takes the sampler's log-probs for old ones, so train_infer_correction has nothing to compare; use "
        "train or own"
    ),
    (f.DROPPED, f.CORRECTION): (
        "leaves groups without old log-probs, which train_infer_correction reads; set it to false"
    ),
    (f.DROPPED, f.LOSS_KL): "such groups still learn from kl_loss_coef; set kl_loss_coef to 0 or this to false",
    (f.DROPPED, f.ENTROPY): (
        "such groups still learn from entropy_loss_coef; set entropy_loss_coef to 0 or this to false"
    ),
    (f.DROPPED, f.REWARD_KL): "such groups still learn from add_token_level_kl; set this to false",
    (f.DROPPED, f.CRITIC): "such groups still learn from the critic; set this to false",
    (f.DROPPED, f.WHITENING): "such groups still learn from whitening; set this to false",
    (f.REWARD_KL, f.USES_KL, f.NO_REFERENCE): (
        "needs the role `reference`; add that section (`reference: {{}}` takes actor_train's)"
    ),
    (f.NO_PLAN, f.REWARD_KL): "add_token_level_kl reads old log-probs; use train or own",
    (f.OWN_CRITIC, f.CRITIC): ("differs from actor_train's: the critic shares its devices for now; leave it out here"),
    (f.BATCH_BALANCE, f.CRITIC): (
        "is true, and the critic's mini-batches are drawn over all ranks; set it to false under gae"
    ),
    (f.ASYNC, f.STUDENT): (
        "lets older weights sample, and a teacher corrects the tokens of the current ones; leave it out"
    ),
    (f.OWN_SAMPLER, f.STUDENT): (
        "differs from actor_train's: with a teacher the student samples on actor_train's devices for now, or an "
        "engine does; leave it out here"
    ),
    (f.GIVEN_CRITIC, f.STUDENT): "has no part in task: distill, whose loss reads no rewards; leave it out",
    (f.DROPPED, f.REWARD_KL, f.GIVEN_WHITENING, f.STUDENT): (
        "concerns advantages, which task: distill does not have; set it to false"
    ),
    (f.SHARED_PREFIXES, f.TEACHER): (
        "is true, and each sample has the teacher's tokens at its own positions; set it to auto or false"
    ),
    (
        f.STREAM_SWITCH,
        f.ROLLOUTS,
    ): "is for task: sft or dpo, and this job's is {0.task}; leave the section `train` out",
    (f.STREAM, f.KTO): (
        "forms steps while it reads, and the reference point of KTO is over planned mini-batches; leave it out"
    ),
    (f.STREAM, f.TEACHER): "forms steps while it reads, without a teacher for now; leave it out",
    (f.BUDGET, f.STREAM): "is the cap of planned packs, but the section train forms its own batches; keep one",
    (f.BUDGET, f.UNPACKED): "packs samples, and actor_train.use_sequence_packing is false; leave one of them out",
    (f.WARMUP, f.SUPERVISED): (
        "precedes RL, and task: {0.task} has one phase; put its keys into actor_train, or choose task: grpo"
    ),
    (f.OTHER_OPTIMIZER, f.WARMUP): (
        "is {0.warmup.training_args.optimizer}, and actor_train's is {0.actor_train.training_args.optimizer}, for "
        "which the model is wrapped; set the same"
    ),
    (f.ADAPTERS, f.CRITIC): "is set, and adapters are not supported with a critic (gae) for now; leave it out",
    (f.OWN_REFERENCE, f.ADAPTERS): (
        "differs from actor_train's, and with lora_target the reference is the policy without its adapters; leave it "
        "out"
    ),
    (f.WARMUP, f.ADAPTERS_AND_REFERENCE): (
        "is given, and with lora_target the reference would be the model before the warm-up; train the warm-up in a "
        "separate job (task: sft) and start from its export, or train without a reference"
    ),
    (f.IMAGES, f.NOT_SFT_OR_GRPO): (
        "is not supported under task: {0.task} for now; tasks with images: sft, grpo; leave it out"
    ),
    (f.CHARACTERS, f.IMAGES): "is char, which has no tokens of images; leave it out",
    (
        *(f.STREAM, f.ASYNC, f.FUNCTION, f.CRITIC_ESTIMATOR, f.OWN_SAMPLER, f.OWN_REFERENCE),
        f.IMAGES,
    ): "{1.name} is not supported with images (actor_train.data_args.images) for now; leave one of them out",
    (f.TEXT_ENGINE, f.IMAGES): (
        "sampling with {0.actor_infer.strategy_args.strategy_name} is not supported with images "
        "(actor_train.data_args.images) for now; choose sglang or megatron_infer, or leave images out"
    ),
}
"""By row of features, why its last feature is refused with each of the others, and the cure."""
REFUSALS = refusals_of(_REFUSED)

PACKING_REFUSALS = refusals_of(
    {
        **{
            (f.SIZE_PER_PACK, other): f"auto gives each pack its own size, which needs {needed}; set it, or give a size"
            for other, needed in f.OTHER_PACKING.items()
        },
        (f.SIZE_PER_PACK, f.JOB_BALANCE): (
            "auto places samples on several ranks, and batch_balance keeps each on one; leave it out"
        ),
        (f.SIZE_PER_PACK, f.JOB_STREAM): (
            "auto needs planned mini-batches, and the section train forms packs from a stream; give a size"
        ),
        (f.SIZE_PER_PACK, f.FEW_SHAPES): (
            "auto gives each pack its own size, and sequence_packing_args.pack_shapes needs one size; leave that out"
        ),
        (f.SIZE_PER_PACK, f.OVERSIZE_ALONE): (
            "auto gives longer sequences more ranks, and planning_args.oversize is {0.role.planning_args.oversize}; "
            "set error, truncate or drop"
        ),
        **{
            (f.OVERSIZE_SLICED, f.ROLE_PARTS[other]): (
                f"is slice, and packs are not cut with {other.name} for now; set alone, truncate or drop"
            )
            for other in f.UNCUT
        },
        **{
            (f.OVERSIZE_SLICED, other): f"is slice, which needs {needed}; set it, or alone, truncate or drop"
            for other, needed in f.OTHER_PACKING.items()
            if other.key == "use_sequence_packing"
        },
        **{
            (f.OVERSIZE_SLICED, other): f"is slice, which {other.name} does not know; set alone, truncate or drop"
            for other in (f.JOB_STREAM, f.JOB_REPLAY)
        },
        (f.OVERSIZE_SLICED, f.KEPT_ACTIVATIONS): (
            "is slice, and a pack is forward as a whole before its first backward pass, whose activations are kept "
            "without full recompute; set recompute_granularity: full and recompute_method: uniform"
        ),
        (f.SIZE_PER_PACK, f.ROLE_PARTS[ENGINE_LAYERS]): (
            "auto needs transformer_impl: local, as TransformerEngine's layers have one context-parallel group; set "
            "that, or give a size"
        ),
        **{
            (
                f.SIZE_PER_PACK,
                f.ROLE_PARTS[ARCHITECTURE_FEATURES[key]],
            ): f"auto gives each pack its own size, and {reason}; give a size"
            for key, reason in CP_SIZE_OBSTACLES.items()
        },
        **{
            (
                f.SHARED_PACKS,
                f.ROLE_PARTS[ARCHITECTURE_FEATURES[key]],
            ): f"is true, but {reason}; set it to auto or false"
            for key, reason in PREFIX_OBSTACLES.items()
        },
        (f.SHARED_PACKS, f.ROLE_PARTS[DROPOUT]): (
            "is true, but samples with a common prefix would share the random numbers of hidden_dropout; set this to "
            "auto or false, or hidden_dropout to 0"
        ),
    }
)
"""Pairs of features of a role's packing and layout that are refused."""
PACKING_TESTED = {
    (f.SHARED_PACKS, f.ROLE_PARTS[ARCHITECTURE_FEATURES["vision"]]): "huggingface/test_vision.py",
    **{
        (f.SHARED_PACKS, f.ROLE_PARTS[ARCHITECTURE_FEATURES[key]]): "strategy/test_trees_with_states.py"
        for key in ("gated_delta_net", "hybrid")
    },
}
"""Pairs of such features that a test trains together, and the test below `tests`."""

TESTED = {
    (f.DYNAMIC, f.ROLLOUTS): "jobs/rl/test_dynamic_sampling.py",
    (f.ASYNC, f.ROLLOUTS): "jobs/rl/test_async_rollouts.py",
    (f.CRITIC, f.ROLLOUTS): "jobs/rl/test_ppo.py",
    (f.CORRECTION, f.ROLLOUTS): "jobs/rl/test_train_infer.py",
    (f.TEACHER, f.DISTILL): "jobs/rl/test_distillation.py",
    (f.FUNCTION, f.ROLLOUTS): "jobs/rollouts/test_function_rollouts.py",
    (f.STREAM, f.SUPERVISED): "jobs/streams/test_streamed_job.py",
    (f.IMAGES, f.SERVERS): "jobs/engines/test_images.py",
    (f.DYNAMIC, f.SERVERS): "jobs/engines/test_dynamic_sampling.py",
    (f.ASYNC, f.SERVERS): "jobs/engines/test_ahead.py",
    (f.IN_FLIGHT, f.SERVERS): "jobs/engines/test_in_flight.py",
    (f.PARTIAL, f.SERVERS): "jobs/engines/test_in_flight.py",
    (f.REPLAY_3, f.SERVERS): "jobs/engines/test_routed_experts.py",
    (f.OWN_SAMPLER, f.ROLLOUTS): "jobs/roles/test_own_devices.py",
}
"""Pairs of features that a test trains together, and the test below `tests`."""


def pair_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of pairs of features of `job` that do not go together."""
    for row in refused_pairs(REFUSALS, job):
        yield Problem(row.path, row.message(job))
    for name, role in job.roles.items():
        role_of_job = f.RoleOfJob(name, role, job)
        for row in refused_pairs(PACKING_REFUSALS, role_of_job):
            yield Problem((name, *row.path), row.message(role_of_job))
