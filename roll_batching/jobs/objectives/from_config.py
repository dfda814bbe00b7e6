"""Makes the loss, advantage estimator, schedule and sampling settings that a job's configuration names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from roll_batching.errors import ConfigError, LossError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS, GAE
from roll_batching.jobs.config.arguments import Arguments
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.losses import LOSSES
from roll_batching.jobs.config.objective_rules import AGGREGATIONS, advantage_arguments, loss_arguments, whitens
from roll_batching.jobs.config.worker import WorkerConfig
from roll_batching.jobs.objectives.advantages import AdvantageFunction, check_advantages
from roll_batching.jobs.objectives.gigpo import shuffled_turns, state_metrics
from roll_batching.jobs.objectives.stateful import DomainMoments, KlCoefficient, Stateful
from roll_batching.jobs.objectives.token_rewards import TokenRewards
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.losses import ValueLoss, constant_mean, constant_sum, loss_spec
from roll_batching.registry import describe_error
from roll_batching.settings import TrainingArgs
from roll_batching.strategy import GenerationSettings

_ESTIMATORS = {"kl": "k1", "mse": "k2"}
"""ROLL's names of KL estimators."""


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The advantage estimator of a job, called once per reward domain of a step."""

    name: str
    """Name of the estimator, for errors."""
    estimate: AdvantageFunction
    moments: DomainMoments | None = None
    """Moments of all rewards so far, where the estimator normalises by them."""
    of_turns: bool = False
    """Whether `estimate` is a `GiGPO`, which makes advantages of turns (`of_episodes`)."""
    greedy: bool = False
    """Whether `estimate` takes `baselines`, float64[prompts]: rewards of greedy responses."""
    of_tokens: TokenRewards | None = None
    """Turns advantages of samples into advantages of tokens; None: each token has its sample's advantage."""

    def __call__(
        self,
        rewards: np.ndarray,
        group_size: int,
        *,
        response_tokens: np.ndarray,
        domains: np.ndarray | None = None,
        baselines: np.ndarray | None = None,
    ) -> np.ndarray:
        """Computes the advantages, float64[n], of `rewards`, float64[n], which come group by group.

        `response_tokens`, int64[n], counts the tokens that the loss reads: 0 for masked responses. `domains`, text [n],
        names the reward domain of each; None: there is one. `baselines`, float64[prompts], is for a `greedy` estimator.
        """
        domains = np.full(len(rewards), "") if domains is None else domains
        result = np.empty(len(rewards))
        for domain in np.unique(domains).tolist():
            members = domains == domain
            options: dict[str, Any] = {} if baselines is None else {"baselines": baselines[members[::group_size]]}
            if self.moments is not None:
                options["running"] = self.moments.update(domain, rewards[members])
            # A boolean index copies: a user's function may work in place, and the rewards are logged later.
            advantages = self.estimate(
                rewards[members], group_size, response_tokens=response_tokens[members], **options
            )
            source = f"{self.name} for {domain}" if domain else self.name
            result[members] = check_advantages(advantages, rewards[members], source)
        return result

    def of_episodes(
        self, episodes: np.ndarray, group_size: int, rng: np.random.Generator | None
    ) -> tuple[list[np.ndarray], Metrics]:
        """Returns the advantages of each sample's turns, float64[turns], and metrics of the states.

        `episodes` are those of a step, by id. `rng` shuffles the advantages among all turns, for the control.
        """
        turns: Any = self.estimate(episodes.tolist(), group_size)
        if rng is not None:
            turns = shuffled_turns(turns, rng)
        return turns, state_metrics(episodes.tolist(), group_size)

    def stateful_parts(self) -> dict[str, Stateful]:
        """The parts that keep state between steps, by the name under which checkpoints save them."""
        kl = None if self.of_tokens is None else self.of_tokens.kl
        parts: dict[str, Stateful | None] = {"reward_moments": self.moments, "reward_kl": kl}
        return {name: part for name, part in parts.items() if part is not None}


def loss_of(config: JobConfig) -> Any:
    """Makes the loss that `loss_function` names. Raises ConfigFileError with the line of that key or of `loss_args`."""
    name, name_path, args_path = config.loss_function, ("loss_function",), ("loss_args",)
    try:
        make = LOSSES.load(name)
    except ConfigError as error:
        raise config.error(Problem(name_path, str(error))) from error
    registered = LOSSES.get(name)
    if registered is not None:
        arguments = loss_arguments(config, registered)
        if "aggregation" in arguments:
            arguments["aggregation"] = _aggregation(config, arguments["aggregation"])
        try:
            return make(**arguments)
        except LossError as error:  # settings that are valid one by one and not together
            raise config.error(Problem(name_path, str(error))) from error
    if not callable(make):
        raise config.error(Problem(name_path, f"{name!r} is a {type(make).__name__}: name a class of losses"))
    try:
        arguments, problems = Arguments.of(f"the loss {name!r}", make).read(config.loss_args, args_path)
    except ConfigError as error:
        raise config.error(Problem(name_path, str(error))) from error
    if problems:
        raise config.error(*problems)
    try:
        loss = make(**arguments)
    except (Exception, SystemExit) as error:  # a user's constructor may raise anything, and call sys.exit
        raise config.error(Problem(args_path, f"{name!r} refuses its settings: {describe_error(error)}")) from error
    try:
        loss_spec(loss)
    except LossError as error:
        raise config.error(Problem(name_path, str(error))) from error
    return loss


def advantages_of(config: JobConfig) -> Advantages:
    """Makes the advantage estimator that `adv_estimator` names. Raises ConfigFileError with the line of that key."""
    name = config.adv_estimator
    try:
        function = ADVANTAGE_ESTIMATORS.load(name)
    except ConfigError as error:
        raise config.error(Problem(("adv_estimator",), str(error))) from error
    if not callable(function):
        text = f"{name!r} is a {type(function).__name__}: name a function of (rewards, group_size, *, response_tokens)"
        raise config.error(Problem(("adv_estimator",), text))
    arguments = advantage_arguments(config)
    entry = ADVANTAGE_ESTIMATORS.get(name)
    of_turns = entry is not None and entry.of_turns
    return Advantages(
        name=name,
        estimate=function(**arguments) if of_turns else partial(function, **arguments),
        of_turns=of_turns,
        moments=DomainMoments() if "running" in (arguments.get("mean"), arguments.get("std")) else None,
        greedy=entry is not None and entry.greedy,
        of_tokens=_token_rewards(config) if config.advantages_of_tokens else None,
    )


def _token_rewards(config: JobConfig) -> TokenRewards:
    kl = None
    if config.add_token_level_kl:
        kl = KlCoefficient(config.init_kl_coef, target=config.target_kl, horizon=config.kl_horizon)
    return TokenRewards(
        gamma=config.gamma,
        lambd=config.lambd if config.adv_estimator == GAE else None,
        kl=kl,
        estimator=_ESTIMATORS.get(config.kl_penalty, config.kl_penalty),  # type: ignore[arg-type]
        whiten=whitens(config),
        clip=config.advantage_clip if ADVANTAGE_ESTIMATORS.get(config.adv_estimator) is not None else None,
    )


def schedule_of(config: JobConfig, dp_size: int) -> TrainingArgs:
    """Training arguments of the RL phase; `max_steps` counts optimizer steps."""
    args = config.actor_train.training_args
    if args.max_steps > 0 or not config.max_steps:
        return args
    return config.actor_train.with_training(max_steps=config.optimizer_steps(dp_size)).training_args


def critic_role(config: JobConfig, dp_size: int) -> WorkerConfig:
    """The role of the critic, with a schedule over its optimizer steps: `critic_epochs` passes in each RL step."""
    assert config.critic is not None
    if config.critic.training_args.max_steps > 0:
        return config.critic
    per_step = -(-config.samples_per_rollout // critic_mini_batch_size(config, dp_size)) * config.critic_epochs
    return config.critic.with_training(max_steps=config.max_steps * per_step)


def critic_mini_batch_size(config: JobConfig, dp_size: int) -> int:
    """Sequences of one optimizer step of the critic, over all data-parallel ranks."""
    assert config.critic is not None
    args = config.critic.training_args
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * dp_size


def value_loss_of(config: JobConfig) -> ValueLoss:
    """Makes the loss of the critic. `loss_agg_mode` averages tokens, as in the policy's loss."""
    return ValueLoss(clip=config.value_clip, aggregation=_aggregation(config, AGGREGATIONS[config.loss_agg_mode]))


def _aggregation(config: JobConfig, name: Any) -> Any:
    """The aggregation `name`; of constant_mean and constant_sum the function with its divisor."""
    if name == "constant_mean":
        return constant_mean(config.loss_agg_length or config.response_length or 1)
    return constant_sum(config.loss_agg_length or 1) if name == "constant_sum" else name


def supervised_schedule_of(config: JobConfig, texts: int, texts_per_step: int) -> TrainingArgs:
    """Training arguments of a job of task sft or dpo; `max_steps` counts optimizer steps."""
    steps = config.max_steps
    if config.num_train_epochs is not None and config.stream is None:
        steps = max(1, math.ceil(config.num_train_epochs * texts / texts_per_step))
    return config.actor_train.with_training(max_steps=steps).training_args


def steps_key(config: JobConfig, phase: str) -> str:
    """The configuration key that sets the number of steps of `phase`."""
    if phase == "warmup" and config.warmup is not None:
        return "warmup.training_args.max_steps" if config.warmup.num_train_epochs is None else "warmup.num_train_epochs"
    if config.is_supervised and config.stream is not None:
        return "train.max_num_steps"
    return "num_train_epochs" if config.is_supervised and config.num_train_epochs is not None else "max_steps"


def sampling_of(config: JobConfig, tokenizer: Tokenizer | None, *, held_out: bool = False) -> GenerationSettings:
    """Sampling settings of rollouts, or of `held_out` evaluation. Without a tokenizer, token 0 ends a response."""
    args = (config.validation if held_out else config.actor_infer).generating_args
    model = config.actor_train.model_args.architecture
    return GenerationSettings(
        max_new_tokens=args.max_new_tokens or 1,
        eos_token_id=0 if tokenizer is None else tokenizer.eos_token_id,
        stop_token_ids=() if tokenizer is None else tokenizer.stop_token_ids,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        greedy=not args.do_sample,
        num_return_sequences=args.num_return_sequences or 1,
        max_tokens_in_cache=args.max_tokens_in_cache,
        vocab_size=None if model is None else model.vocab_size,
    )
