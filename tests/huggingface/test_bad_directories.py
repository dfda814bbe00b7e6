"""Contradictory fields, paths outside, missing files: one error that names the file and the field."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from roll_batching.errors import CheckpointError, DataError
from roll_batching.huggingface.config_json import translate
from roll_batching.huggingface.stored import StoredTensors
from roll_batching.jobs.texts import HFTokenizer
from tests.huggingface import tiny
from tests.huggingface.published import PUBLISHED

pytestmark = [pytest.mark.bad_input, pytest.mark.models]
SHARD = "model-00001-of-00001.safetensors"


def write_index(folder, name):
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    return folder


def write_shard(file):
    import torch
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.ones(2)}, file)


@pytest.mark.parametrize("name", [f"../{SHARD}", f"a/../../{SHARD}", "ABSOLUTE", "", "..", 3, None, ["a"], "a\0b"])
def test_an_index_that_points_outside_its_directory_is_refused(tmp_path, name):
    write_shard(tmp_path / SHARD)
    model = write_index(tmp_path / "model", str(tmp_path / SHARD) if name == "ABSOLUTE" else name)
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json names .* inside its directory"):
        StoredTensors(model)


@pytest.mark.parametrize("name", [SHARD, f"shards/{SHARD}"])
def test_shards_inside_the_directory_and_links_to_a_cache_are_read(tmp_path, name):
    write_shard(tmp_path / "blobs" / "0123")
    model = write_index(tmp_path / "model", name)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).symlink_to(tmp_path / "blobs" / "0123")
    assert StoredTensors(model).shapes == {"weight": (2,)}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    """As a process of its own: a read that waits cannot be interrupted by the test."""
    os.mkfifo(tmp_path / name)
    code = (
        "import sys; from pathlib import Path\n"
        "from roll_batching.huggingface.directory import read_json; from roll_batching.huggingface import stored\n"
        "path = Path(sys.argv[1])\n"
        "read_json(path) if path.suffix == '.json' else stored._header(path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / name)], capture_output=True, text=True, timeout=60, check=False
    )
    assert f"{name} cannot be read: " in done.stderr and "it is no regular file" in done.stderr, done.stderr


@pytest.mark.parametrize("section", ["rope_parameters", "rope_scaling"])
def test_two_bases_of_the_rotation_are_refused(section):
    config = PUBLISHED["Llama-2-7b"] | {"rope_theta": 1e4, section: {"rope_type": "default", "rope_theta": 5e5}}
    (problem,) = translate(config).problems
    assert problem == f"rope_theta: 10000.0 contradicts {section}.rope_theta: 500000.0; leave one of them out"
    assert not translate(config | {"rope_theta": 5e5}).problems
    del config["rope_theta"]
    found = translate(config)
    assert not found.problems and found.architecture["rotary_base"] == 5e5


def test_a_window_that_no_layer_has_is_refused():
    qwen = PUBLISHED["Qwen2.5-7B"] | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    full = {"layer_types": ["full_attention"] * 28}
    (problem,) = translate(qwen | full).problems
    assert problem.startswith("use_sliding_window: true contradicts layer_types, which are all full_attention")
    assert not translate(qwen | full | {"max_window_layers": 28}).problems
    assert not translate(qwen | full | {"use_sliding_window": False}).problems
    assert not translate(qwen | full | {"sliding_window": None}).problems


@pytest.mark.parametrize("left", ["config.json", "tokenizer_config.json"])
def test_a_tokenizer_whose_files_are_gone_is_one_error(tmp_path, left):
    tiny.write_model(tmp_path, "qwen2")
    tiny.write_tokenizer(tmp_path)
    assert HFTokenizer(tmp_path).encode("ab")
    (tmp_path / "tokenizer.json").unlink()
    if left == "config.json":
        (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"has special tokens only.*tokenizer\.json.*tokenizer\.name_or_path"):
        HFTokenizer(tmp_path)
