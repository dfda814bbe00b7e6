"""Models and data sets come from the hub by name, and exports go there: over HTTP, against a server of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from roll_batching.huggingface.hub import is_hub_name
from tests.huggingface import tiny
from tests.support.hub_server import hub_server

pytestmark = pytest.mark.models
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""
LOAD = """
import sys
from roll_batching.errors import DataError
from roll_batching.jobs.texts import PromptDataset
for name in sys.argv[1:]:
    try:
        prompts = PromptDataset.from_jsonl(name, prompt_key="question")
        print([prompt.prompt for prompt in prompts], prompts[0].source)
    except DataError as error:
        print(error)
"""


@pytest.fixture
def hub(tmp_path):
    """The folder of a hub with a data set and a model, and variables for its users."""
    data = tmp_path / "hub" / "datasets" / "own" / "sums"
    data.mkdir(parents=True)
    (data / "README.md").write_text(CARD)
    for name, question in (("train", "1+1="), ("test", "2+2=")):
        (data / f"{name}.jsonl").write_text(json.dumps({"question": question, "answer": "it is 2\n#### 2"}) + "\n")
    model = tmp_path / "hub" / "models" / "own" / "tiny"
    tiny.write_model(model, "qwen3")
    tiny.write_tokenizer(model)
    (model / "pytorch_model.bin").write_bytes(b"not wanted")
    with hub_server(tmp_path / "hub") as (variables, requests):
        yield tmp_path, variables, requests


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True)


@pytest.mark.bad_input
def test_data_sets_have_names(hub, report):
    folder, variables, requests = hub
    name = "hf://own/sums?name=main&split="
    done = run(
        folder, "-c", LOAD, f"{name}train", f"{name}no", "hf://own/sums", "hf://own/no", f"{name}train&x=1",
        f"{name}train+test", f"{name}train&split=test", **variables,
    )  # fmt: skip
    good, split, several, missing, option, joined, twice = done.stdout.splitlines()
    assert joined.startswith("['1+1=', '2+2=']") and "has an option twice" in twice
    assert good == f"['1+1='] {name}train:1", done.stderr
    assert "Unknown split" in split and "'train', 'test'" in split
    assert "has the splits train, test, and one is read. Add ?split=NAME" in several
    assert "own/no" in missing and "Not Found" in missing
    assert "has the option 'x'; there are name, split, revision, data_files, data_dir" in option
    report("\n".join((split, several, option)))
    count = len(requests)
    offline = run(folder, "-c", LOAD, f"{name}test", "hf://own/no?split=train", **variables, HF_HUB_OFFLINE="1")
    cached, missing = offline.stdout.splitlines()
    assert cached.startswith("['2+2=']") and "Couldn't reach" in missing and len(requests) == count


def test_paths_with_dots_name_no_model():
    assert is_hub_name("own/tiny") and not is_hub_name("./tiny") and not is_hub_name("../tiny")


def test_without_the_package_the_extra_is_named(tmp_path):
    code = "import sys; sys.modules['datasets'] = None\n" + LOAD
    assert "pip install 'roll-batching[datasets]'" in run(tmp_path, "-c", code, "hf://own/sums").stdout


@pytest.mark.slow
def test_a_job_begins_and_ends_on_the_hub(hub, report):
    folder, variables, requests = hub
    job = {
        "task": "sft", "exp_name": "hub", "output_dir": "runs", "sequence_length": 64, "max_steps": 2, "save_steps": 2,
        "pretrain": "own/tiny", "eval_samples": 0,
        "actor_train": {
            "data_args": {"file_name": ["hf://own/sums?split=train", "hf://./private?split=train"],
                          "prompt": "question", "response": "answer",
                          "token_cache": "tokens"},
            "training_args": {"per_device_train_batch_size": 2, "learning_rate": 1e-3},
            "device_mapping": "0", "use_sequence_packing": True,
            "sequence_packing_args": {"max_packed_sequence_length_train": 128},
        },
    }  # fmt: skip
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    offline = run(folder, "-m", "roll_batching", "sft", "--config", "job.yaml", **variables, HF_HUB_OFFLINE="1")
    assert offline.returncode and "is neither a directory on this machine" in offline.stderr and not requests
    (folder / "private").mkdir()
    for file in (folder / "hub/datasets/own/sums/train.jsonl", folder / "private/train.jsonl"):
        file.write_text('{"question": "1+1=", "answer": "2"}\n' * 4)
    done = run(folder, "-m", "roll_batching", "sft", "--config", "job.yaml", **variables)
    assert done.returncode == 0, done.stderr
    assert not [request for request in requests if "pytorch_model.bin" in request]
    export = ("-m", "roll_batching", "export", "runs/hub", "--to")
    refused = run(folder, *export, "no", "--push", "own/new", **variables, HF_HUB_OFFLINE="1")
    assert refused.returncode and "--push own/new: the repository cannot be made" in refused.stderr
    assert not (folder / "no").exists()
    pushed = run(folder, *export, "yes", "--push", "own/new", **variables, HF_TOKEN="hf_x")
    assert pushed.returncode == 0, pushed.stderr
    uploaded = folder / "hub/models/own/new"
    for file in (folder / "yes").iterdir():
        assert (uploaded / file.name).read_bytes() == file.read_bytes()
    card = (uploaded / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {"library_name": "transformers", "base_model": "own/tiny", "datasets": ["own/sums"],
                     "tags": ["roll-batching", "sft"]}  # fmt: skip
    assert "phase `sft`, step 2" in card and "private" not in card, "a folder of this machine is not on the hub"
    report(card)
