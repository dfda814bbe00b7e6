"""The SFT job through the stream, with cosmos-rl's keys: plans of what ranks formed, the end of the data, resuming."""

from __future__ import annotations

import json
import signal

import pytest

from roll_batching.jobs.config import ConfigFileError, config_from_dict, load_config
from tests.jobs.streams.jobs import settings, write_data
from tests.jobs.streams.test_jobs import HERE, rows_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.streams
OWN = "tests.jobs.streams.test_streamed_job:"
LIKE_SFT = {
    "load_balanced_pool_size": 6,
    "load_balanced_max_tokens_for_batch": 112,
    "load_balanced_batches_per_optimizer_step": 2,
    "dataloader_seed": 7,
}


def streamed(folder, name="tiny", *, task="sft", steps=5, packed=True, policy=(), **changes):
    job = settings(folder, task, exp_name=name, **changes)
    del job["max_steps"], job["actor_train"]["use_sequence_packing"], job["actor_train"]["sequence_packing_args"]
    del job["actor_train"]["training_args"]["per_device_train_batch_size"]
    job["train"] = {
        "max_num_steps": steps,
        "sequence_packing": packed,
        "train_policy": {"enable_dp_load_balancing": True, **LIKE_SFT, **dict(policy)},
    }
    return job


@pytest.fixture
def folder(tmp_path):
    write_data(tmp_path, 37)
    return tmp_path


def run_and_note(jobs):
    """On a rank: jobs one after the other; of each the lengths, micro-batches and fillers of its steps."""
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.jobs.streams.jobs import run

    seen, train_step = [], MegatronTrainStrategy.train_step

    def noted(self, batch, plan, loss, **more):
        seen[-1].append((sorted(plan.lengths.tolist()), plan.num_micro_batches, plan.report.fillers))
        return train_step(self, batch, plan, loss, **more)

    MegatronTrainStrategy.train_step = noted
    try:
        for job in jobs:
            seen.append([])
            run(job)
    finally:
        MegatronTrainStrategy.train_step = train_step
    return seen


def lengths_of(folder, task="sft"):
    rows = [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]
    answers = ["response"] if task == "sft" else ["chosen", "rejected"]
    return sorted(len(row["prompt"] + row[answer]) + 1 for row in rows for answer in answers)


def test_to_the_end_of_the_data_with_any_number_of_workers(folder):
    """Two ranks and one epoch: every text once, fillers where a rank has no more, the same with loader processes."""
    once = {"infinite_loop": False}
    jobs = [
        streamed(folder, "one", steps=50, policy=once),
        streamed(folder, "two", steps=50, policy=once | {"dataloader_num_workers": 2}),
        streamed(
            folder, "rectangles", steps=50, packed=False, policy=once | {"load_balanced_max_tokens_for_batch": 160}
        ),
        streamed(folder, "across", steps=50, policy=once | {"load_balanced_across_ranks": True}),
    ]
    one, two, rectangles, across = run_ranks(2, OWN + "run_and_note", jobs)[0]
    for seen in (one, two, rectangles, across):
        assert sorted(length for lengths, _, _ in seen for length in lengths) == lengths_of(folder)
        assert 1 < len(seen) < 50
    assert one == two and rows_of(folder, "one") == rows_of(folder, "two")
    assert any(fillers for _, _, fillers in one) and all(count <= 2 for _, count, _ in one)
    assert rows_of(folder, "one")[-1]["eval_updates"] == len(one), "the last step is measured"
    assert [lengths for lengths, _, _ in across] == [lengths for lengths, _, _ in one], "the same samples in each step"

    def spread(name):
        return sum(row["imbalance"] for row in rows_of(folder, name))

    assert spread("across") < spread("one")


def test_pairs_stay_together_to_the_end_of_the_data(folder):
    """Two ranks and one epoch: every pair once, in packs and rectangles of whole pairs (the loss refuses others)."""
    once, rows = {"infinite_loop": False}, {"load_balanced_max_tokens_for_batch": 160}
    jobs = [
        streamed(folder, "packs", task="dpo", steps=50, policy=once),
        streamed(folder, "workers", task="dpo", steps=50, policy=once | {"dataloader_num_workers": 2}),
        streamed(folder, "rectangles", task="dpo", steps=50, packed=False, policy=once | rows),
        streamed(folder, "across", task="dpo", steps=50, policy=once | {"load_balanced_across_ranks": True}),
    ]
    packs, workers, rectangles, across = run_ranks(2, OWN + "run_and_note", jobs)[0]
    for seen in (packs, rectangles, across):
        assert sorted(length for lengths, _, _ in seen for length in lengths) == lengths_of(folder, "dpo")
        assert 1 < len(seen) < 50
    assert packs == workers and rows_of(folder, "packs") == rows_of(folder, "workers")
    assert any(fillers for _, _, fillers in packs) and all(count <= 2 for _, count, _ in packs)
    first = rows_of(folder, "packs")[0]
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5), "the reference is the model as training begins"


def test_a_pool_of_two_epochs_may_hold_a_pair_twice(folder):
    """Four pairs and a pool of more: each occurrence is a pair of its own."""
    write_data(folder, 4)
    job = streamed(folder, task="dpo", steps=4, policy={"load_balanced_max_tokens_for_batch": 512})
    (seen,) = run_ranks(1, OWN + "run_and_note", [job])[0]
    assert max(len(lengths) for lengths, _, _ in seen) > 8, "more than the four pairs in one step"


@pytest.mark.parametrize("task", [pytest.param("sft", marks=pytest.mark.slow), "dpo"])
def test_killed_and_resumed_to_the_bit(folder, task):
    variant = {"task": task, "save_steps": 1, "steps": 6}
    variant["actor_train__model_args__architecture__hidden_dropout"] = 0.1
    run_ranks(2, HERE + "run_until", {"job": streamed(folder, "straight", **variant)})
    job = streamed(folder, "killed", resume_from_checkpoint=True, **variant)
    outcomes = run_ranks(2, HERE + "run_until", {"job": job, "die_after": 3}, check=False, timeout=90, grace=3)
    assert outcomes[1].returncode == -signal.SIGKILL, outcomes[1].output
    job["train"]["train_policy"]["dataloader_num_workers"] = 2
    run_ranks(2, HERE + "run_until", {"job": job})
    assert rows_of(folder, "killed") == rows_of(folder, "straight")


def test_another_number_of_ranks_is_refused_or_dealt_anew(folder):
    once = {"infinite_loop": False}
    first = run_ranks(2, OWN + "run_and_note", [streamed(folder, steps=1, save_steps=1, policy=once)])[0][0]
    more = {"steps": 50, "save_steps": 1, "resume_from_checkpoint": True}
    outcomes = run_ranks(1, HERE + "run_until", {"job": streamed(folder, policy=once, **more)}, check=False)
    assert "of 2 data-parallel ranks, and there are 1" in outcomes[0].output
    job = streamed(folder, policy=once | {"repartition": True}, **more)
    rest = run_ranks(1, OWN + "run_and_note", [job])[0][0]
    assert sorted(length for lengths, _, _ in first + rest for length in lengths) == lengths_of(folder)


def into_a_model_for_rows(packed):
    """On a rank: what is said when a model that Megatron built for rows is given a stream."""
    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.errors import RankError
    from roll_batching.jobs.config.job_sections import TrainSection
    from roll_batching.jobs.steps.planned_steps import Encoder
    from roll_batching.jobs.steps.streamed_steps import StreamedSteps
    from roll_batching.jobs.texts.texts import Document, TextDataset
    from roll_batching.jobs.texts.tokenizers import CharTokenizer
    from roll_batching.planning import BatchingSpec, ParallelDims
    from roll_batching.settings import BatchingConfig
    from roll_batching.strategy import MegatronTrainStrategy
    from tests.support.own_model import build

    make_layout(ParallelDims(dp_size=2), start_processes())
    spec = BatchingSpec(mode="dynamic", max_tokens=64)
    batching = BatchingConfig(train=spec, infer=spec, logprob_plan="none")
    strategy = MegatronTrainStrategy.from_parts(*build("stock"), batching, rows_form=True)
    texts = TextDataset([Document("ab", "ba"), Document("b", "a"), Document("aa", "bb")])
    encoder = Encoder(tokenizer=CharTokenizer("ab$", "$"), max_length=16)
    try:
        StreamedSteps(texts, encoder, strategy, TrainSection(sequence_packing=packed))
    except RankError as error:
        return str(error)
    return "nothing"


@pytest.mark.bad_input
def test_a_model_that_cannot_take_packs_is_an_error_on_all_ranks(report):
    one, other = run_ranks(2, OWN + "into_a_model_for_rows", True)
    assert one == other
    for words in ("train.sequence_packing is true", "cannot take packs", "packed_layer_spec(config)", "packing: false"):
        assert words in one, one
    assert run_ranks(2, OWN + "into_a_model_for_rows", False) == ["nothing"] * 2
    report(one)


def asked_again(payload):
    """On a rank: the lengths of steps where rank 1 cannot read a text at first, and of those where it can."""
    import torch.distributed as dist

    from roll_batching.errors import DataError, RankError
    from roll_batching.jobs.config import JobConfig
    from roll_batching.jobs.steps.planned_steps import Encoder
    from roll_batching.jobs.steps.streamed_steps import StreamedSteps
    from roll_batching.jobs.texts.texts import Document, TextDataset
    from roll_batching.jobs.texts.tokenizers import CharTokenizer
    from roll_batching.strategy import MegatronTrainStrategy

    class Texts(TextDataset):
        failures = 0

        def __getitem__(self, index):
            if self.failures and dist.get_rank() == 1 and index in (7, 17):
                self.failures -= 1
                raise DataError("this text cannot be read")
            return super().__getitem__(index)

    config = config_from_dict(payload)
    strategy = MegatronTrainStrategy(JobConfig.model_validate(config.to_dict()).actor_train, seed=1)
    strategy.initialize()
    encoder = Encoder(tokenizer=CharTokenizer("ab$", eos="$", pad="$"), max_length=40)
    found, errors = [], []
    for failures in (0, 3):
        texts = Texts([Document("b", "a" * (n + 1)) for n in range(20)])
        steps = StreamedSteps(texts, encoder, strategy, config.stream)
        texts.failures, said = failures, []
        while len(said) < 6:
            try:
                home, plan = next(steps)
                said.append((home.lengths.tolist(), plan.fingerprint))
            except RankError as error:
                errors.append(str(error))
        found.append(said)
    return found, errors


@pytest.mark.bad_input
def test_a_step_that_one_rank_could_not_draw_is_drawn_again_by_all(folder):
    (one, errors), (other, same) = run_ranks(2, OWN + "asked_again", streamed(folder))
    assert errors == same and len(errors) == 3 and "rank 1: DataError: Sample 17 cannot be read" in errors[0]
    assert one[0] == one[1] and other[0] == other[1]


def test_the_documents_file_as_toml(folder):
    """Its example with packing, as it stands there, beside what our job needs."""
    (folder / "job.toml").write_text(
        'task = "sft"\nsequence_length = 64\n[train]\nsequence_packing = true\nmax_num_steps = 1000\nepoch = 3\n'
        "[train.train_policy]\nenable_dp_load_balancing = true\nload_balanced_pool_size = 64\n"
        "load_balanced_max_tokens_for_batch = 65536\nload_balanced_batches_per_optimizer_step = 4\n"
        'dataloader_seed = 42\nload_balanced_batching_strategy = "prefer_first"\n'
    )
    config = load_config(folder / "job.toml")
    assert config.max_steps == 1000 and config.actor_train.batching().train.max_tokens == 65536
    noticed = {notice.path: notice.line for notice in config.notices}
    assert noticed == {"train.epoch": 6, "train.train_policy.load_balanced_batching_strategy": 13}
    with pytest.raises(ConfigFileError, match=r"job.toml:9: train.train_policy.load_balanced_pool_size: is 0"):
        text = (folder / "job.toml").read_text().replace("pool_size = 64", "pool_size = 0")
        (folder / "job.toml").write_text(text)
        load_config(folder / "job.toml")
    (folder / "job.toml").write_text("a = [\n")
    with pytest.raises(ConfigFileError, match="is not valid TOML"):
        load_config(folder / "job.toml")


def test_the_documents_defaults():
    train = config_from_dict({"task": "sft", "train": {}}).train
    policy = train.train_policy
    assert (policy.enable_dp_load_balancing, policy.load_balanced_pool_size) == (False, 32)
    assert (policy.load_balanced_max_tokens_for_batch, policy.load_balanced_batching_strategy) == (
        32768,
        "prefer_closest",
    )
    assert (train.batches_per_step, policy.infinite_loop, train.sequence_packing, train.max_num_steps) == (
        1,
        True,
        False,
        None,
    )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "change, path, words",
    [
        ({"max_num_steps": None}, "train.max_num_steps", "is missing"),
        ({"train_policy": {"enable_dp_load_balancing": False}}, "train.sequence_packing", "needs train.train_policy"),
        (
            {"train_policy": LIKE_SFT | {"enable_dp_load_balancing": True, "load_balanced_accumulate_steps": 3}},
            "train.train_policy.load_balanced_accumulate_steps",
            "another name",
        ),
        ({"train_policy": {"type": "grpo"}}, "train.train_policy.type", "is refused"),
    ],
)
def test_what_the_section_refuses(folder, change, path, words):
    job = streamed(folder)
    job["train"] |= change
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(job)
    assert any(".".join(p.path) == path and words in p.message for p in caught.value.problems), str(caught.value)


def test_what_the_stream_replaces_gets_a_notice(folder):
    job = streamed(folder)
    job["actor_train"]["training_args"]["per_device_train_batch_size"] = 4
    job["actor_train"]["use_sequence_packing"] = False
    paths = {notice.path for notice in config_from_dict(job).notices}
    assert paths == {"actor_train.use_sequence_packing", "actor_train.training_args.per_device_train_batch_size"}
    again = config_from_dict(job).to_dict()
    assert config_from_dict(again).actor_train == config_from_dict(job).actor_train
