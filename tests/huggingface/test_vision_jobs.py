"""Jobs with images from tiny vision-language models: losses against transformers, GRPO, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.jobs.observe.run_files import read_metrics
from tests.huggingface.vision import FAMILIES
from tests.support import vision
from tests.support.ranks import run_ranks
from tests.support.tiny_job import with_changes

pytestmark = pytest.mark.models
SIZES = [(70, 50), (), (28, 28), (200, 90), (56, 56), (), (90, 40), (30, 120)]
"""Width and height of the image of each record; () for none."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_job_files(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


@pytest.fixture(scope="module", params=FAMILIES)
def family_folder(request, tmp_path_factory):
    return write_job_files(tmp_path_factory.mktemp("vision"), request.param)


def write_job_files(folder: Path, family: str) -> Path:
    """A model directory and records with images in `folder`."""
    vision.write_directory(folder / "model", family=family)
    rows = []
    for number, size in enumerate(SIZES):
        content = f"what is {number}?"
        row = {"answer": str(number % 3)}
        if size:
            vision.picture(number, *size).save(folder / f"{number}.png")
            row["images"] = [f"{number}.png"] * (1 + number % 2)
            content += "<image>and " * len(row["images"])
        user = {"role": "user", "content": content}
        rows.append(row | {"messages": [user, {"role": "assistant", "content": f"#{number}"}], "prompt": [user]})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def job(folder: Path, name: str, **changes):
    """SFT of the records, all in one mini-batch on one rank."""
    base = {
        "exp_name": name,
        "task": "sft",
        "seed": 3,
        "output_dir": str(folder / "runs"),
        "pretrain": str(folder / "model"),
        "max_steps": 3,
        "sequence_length": 64,
        "actor_train": {
            "training_args": {"learning_rate": 1e-3, "per_device_train_batch_size": 8, "weight_decay": 0.0},
            "data_args": {"file_name": str(folder / "data.jsonl"), "messages": "messages", "images": "images"},
            "use_sequence_packing": True,
            "sequence_packing_args": {"max_packed_sequence_length_train": 96},
        },
    }
    return with_changes(base, changes)


def rl(folder: Path, name: str, **changes):
    """GRPO on the records, with the different characters of responses as reward."""
    data = job(folder, name, task="grpo", max_steps=2)
    del data["sequence_length"]
    data["actor_train"]["data_args"] |= {"messages": "prompt", "eval_file_name": str(folder / "data.jsonl")}
    data |= {
        "prompt_length": 64,
        "response_length": 8,
        "rollout_batch_size": 8,
        "num_return_sequences_in_group": 2,
        "adv_estimator": "grpo",
        "reward_function": "tests.support.vision:reward",
        "eval_steps": 0,
        "eval_samples": 8,
    }
    data["actor_train"]["training_args"]["per_device_train_batch_size"] = 16
    return with_changes(data, changes)


def losses(folder: Path, name: str):
    return [row["loss"] for row in read_metrics(folder / "runs" / name / "metrics.jsonl")]


def losses_of_transformers(folder: Path, steps: int):
    """Losses of AdamW steps over all records, by transformers' processor, model and torch alone."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    processor = vision.processor(folder / "model")
    samples = []
    for line in (folder / "data.jsonl").read_text().splitlines():
        row = json.loads(line)
        texts = []
        for messages in (row["messages"][:1], row["messages"]):
            parts = []
            for number, text in enumerate(messages[0]["content"].split("<image>")):
                parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}]
            chat = [{"role": "user", "content": parts}, *messages[1:]]
            texts.append(processor.apply_chat_template(chat, add_generation_prompt=len(messages) == 1))
        images = [Image.open(folder / name) for name in row.get("images", [])] or None
        before, whole = (processor(text=[text], images=images, return_tensors="pt") for text in texts)
        samples.append((whole, before["input_ids"].shape[1]))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    found = []
    for _ in range(steps):
        values = []
        for whole, start in samples:
            logits = model(**whole).logits[0, start - 1 : -1].log_softmax(-1)
            values.append(-logits.gather(1, whole["input_ids"][0, start:, None])[:, 0])
        loss = torch.cat(values).mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        found.append(loss.item())
    return found


LAYOUTS = {
    "dp2": {"actor_train__training_args__per_device_train_batch_size": 4},
    "tp2sp": {
        "actor_train__strategy_args__strategy_config": {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    },
    "pp2": {"actor_train__strategy_args__strategy_config": {"pipeline_model_parallel_size": 2}},
    "cp2": {"actor_train__strategy_args__strategy_config": {"context_parallel_size": 2}},
}


def test_losses_of_a_job_are_those_of_transformers(family_folder, report):
    run_ranks(1, "tests.jobs.rl.jobs:run", job(family_folder, "one"))
    expected = losses_of_transformers(family_folder, 3)
    torch.testing.assert_close(losses(family_folder, "one"), expected, atol=2e-5, rtol=1e-5)
    report(f"losses of three steps: {losses(family_folder, 'one')}, transformers {expected}")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_do_not_depend_on_the_layout(family_folder, layout):
    run_ranks(2, "tests.jobs.rl.jobs:run", job(family_folder, layout, **LAYOUTS[layout]))
    expected = losses_of_transformers(family_folder, 3)
    torch.testing.assert_close(losses(family_folder, layout), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rows", "dynamic"])
def test_padded_and_dynamic_batches_give_the_same_losses(folder, mode):
    changes = {"actor_train__use_sequence_packing": False}
    if mode == "dynamic":
        changes |= {
            "actor_train__use_dynamic_batching_in_train": True,
            "actor_train__max_tokens_per_microbatch_in_train": 128,
            "actor_train__sequence_length_round_in_train": 8,
        }
    run_ranks(1, "tests.jobs.rl.jobs:run", job(folder, mode, **changes))
    torch.testing.assert_close(losses(folder, mode), losses_of_transformers(folder, 3), atol=2e-5, rtol=1e-5)


REFUSED = {
    "dpo": ({"task": "dpo"}, "task: dpo"),
    "kto": ({"task": "kto"}, "task: kto"),
    "a stream": (
        {"train": {"train_policy": {"enable_dp_load_balancing": True}, "max_num_steps": 2}}, "a stream of texts",
    ),
    "no image key": (
        {"actor_train__data_args__images": None, "actor_train__data_args__image_max_pixels": 9}, "no effect",
    ),
    "limits": (
        {"actor_train__data_args__image_min_pixels": 99, "actor_train__data_args__image_max_pixels": 9},
        "is 99, above image_max_pixels = 9",
    ),
    "characters": ({"tokenizer": {"type": "char", "vocabulary": "ab$", "eos_token": "$"}}, "no tokens of images"),
}  # fmt: skip
REFUSED_IN_RL = {
    "async": ({"async_generation_ratio": 1}, "sampling ahead of training"),
    "rollout function": ({"rollout_function": "x:y"}, "a rollout function"),
    "critic": ({"adv_estimator": "gae", "critic": {}}, "an advantage estimator with a critic"),
    "vllm": ({"actor_infer__strategy_args__strategy_name": "vllm"}, "vllm is not supported with images"),
    "transformers": (
        {"actor_infer__strategy_args__strategy_name": "hf_infer"},
        "hf_infer is not supported with images",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("case", [*REFUSED, *REFUSED_IN_RL])
def test_what_is_not_tested_with_images_is_refused_by_name(folder, case, report):
    make, (changes, message) = (job, REFUSED[case]) if case in REFUSED else (rl, REFUSED_IN_RL[case])
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(make(folder, "refused", **changes))
    assert message in str(caught.value), caught.value
    report(str(caught.value))


def test_a_model_that_reads_images_says_that_a_job_has_none(folder):
    def texts(**changes):
        return [notice.text for notice in config_from_dict(job(folder, "notice", **changes)).notices]

    assert any("this job none" in text for text in texts(actor_train__data_args__images=None))
    assert not any("this job none" in text for text in texts())


def test_qwen3_5_has_its_encoder_in_jobs_with_images(tmp_path):
    """In all roles, also in those that name the directory; a job of texts has the text model."""
    vision.write_directory(tmp_path / "model", weights=False, family="qwen3_5")
    named = {"model_args": {"model_name_or_path": str(tmp_path / "model")}}
    for images in ("images", None):
        changes = {"actor_train__data_args__images": images, "reference": named}
        checked = config_from_dict(rl(tmp_path, "encoder", **changes))
        for one in (checked, config_from_dict(checked.to_dict())):
            built = [role.model_args.architecture.vision is not None for role in one.roles.values()]
            assert built == [images is not None] * 3
        assert not any("this job none" in notice.text for notice in checked.notices)
    heads = {"actor_train__strategy_args__strategy_config": {"mtp_num_layers": 1}}
    with pytest.raises(ConfigFileError, match="mtp_num_layers: is not supported with vision for now"):
        config_from_dict(rl(tmp_path, "heads", **heads))
    without = {"actor_train__model_args": {"vision_encoder": False}}
    with pytest.raises(ConfigFileError, match="has no vision encoder that is trained"):
        config_from_dict(rl(tmp_path, "without", **without))


@pytest.mark.bad_input
def test_a_text_model_takes_no_images(folder, tmp_path, report):
    from tests.huggingface import tiny

    tiny.write_model(tmp_path, "qwen3")
    tiny.write_tokenizer(tmp_path)
    with pytest.raises(ConfigFileError, match="has no vision encoder that is trained") as caught:
        config_from_dict(job(folder, "text", pretrain=str(tmp_path)))
    report(str(caught.value))


@pytest.mark.bad_input
def test_a_broken_image_ends_the_job_before_it_starts(folder, tmp_path, report):
    text = (folder / "data.jsonl").read_text().replace('["4.png"]', '["lost.png"]')
    (folder / "lost.jsonl").write_text(text)
    errors = run_ranks(
        2,
        "tests.jobs.rl.jobs:refusal",
        job(folder, "lost", actor_train__data_args__file_name=str(folder / "lost.jsonl")),
    )
    assert len({*errors}) == 1 and "lost.jsonl:5: the image" in errors[0] and "lost.png does not exist" in errors[0]
    report(errors[0])


def test_a_rehearsal_reads_the_sizes_of_images_and_samples(folder):
    from roll_batching.tools.rehearsal.fake_data import image_sizes
    from roll_batching.tools.rehearsal.lengths import lengths_of_data

    limited = {"actor_train__data_args__image_max_pixels": 1280}
    own, given = (image_sizes(config_from_dict(job(folder, "rehearsed", **changes))) for changes in ({}, limited))
    processor = vision.processor(folder / "model").image_processor
    pixels = (processor.patch_size * processor.merge_size) ** 2
    assert own.most == processor.size["longest_edge"] // pixels and own.least == given.least >= 1
    assert given.most == 1280 // pixels and given.prompt is None
    assert image_sizes(config_from_dict(rl(folder, "rehearsed", **limited))).prompt == 64
    found = lengths_of_data(config_from_dict(job(folder, "rehearsed")), 1)
    assert len(found) == 8 and max(found) > 30, "tokens of images are counted"


RL_LAYOUTS = {
    "rl tp2sp": LAYOUTS["tp2sp"],
    "rl pp2": LAYOUTS["pp2"],
    "rl cp2": {
        **LAYOUTS["cp2"],
        "actor_infer__strategy_args__strategy_config": {"context_parallel_size": 1, "tensor_model_parallel_size": 2},
    },
}


def progress(folder: Path, name: str):
    """Of each step: reward, loss, norm of the gradient; of the evaluations: reward."""
    rows = read_metrics(folder / "runs" / name / "metrics.jsonl")
    return [[row[key] for key in ("reward", "loss", "grad_norm", "eval_reward")] for row in rows]


def test_grpo_samples_from_images(folder, report):
    run_ranks(
        2, "tests.jobs.rl.jobs:run", rl(folder, "rl dp2", actor_train__training_args__per_device_train_batch_size=8)
    )
    found = progress(folder, "rl dp2")
    assert len(found) == 2 and all(norm > 0 for _, _, norm, _ in found)
    (line, *_) = (folder / "runs" / "rl dp2" / "rollouts.jsonl").read_text().splitlines()
    assert json.loads(line)["prompt_tokens"] > 10
    report(str(found))


def test_grpo_with_fewer_held_out_prompts_than_ranks_and_masked_samples(folder):
    changes = {"eval_samples": 1, "max_len_mask": True, "max_steps": 1}
    job = rl(folder, "rl few", actor_train__training_args__per_device_train_batch_size=8, **changes)
    run_ranks(2, "tests.jobs.rl.jobs:run", job)
    assert len(progress(folder, "rl few")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", RL_LAYOUTS)
def test_grpo_does_not_depend_on_the_layout(family_folder, layout, report):
    if not (family_folder / "runs" / "rl one").exists():
        run_ranks(1, "tests.jobs.rl.jobs:run", rl(family_folder, "rl one"))
    run_ranks(2, "tests.jobs.rl.jobs:run", rl(family_folder, layout, **RL_LAYOUTS[layout]))
    report(f"{progress(family_folder, layout)}")
    expected = progress(family_folder, "rl one")
    torch.testing.assert_close(progress(family_folder, layout), expected, atol=2e-5, rtol=1e-5)
