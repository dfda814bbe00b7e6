"""Keys of images in files of ROLL and NeMo-RL and in scripts of verl."""

from __future__ import annotations

import pytest
import yaml

from roll_batching.tools.conversion import ORIGINS, convert_file
from tests.tools.conversion import test_nemo_rl_defaults as nemo_rl
from tests.tools.conversion import test_verl as verl
from tests.tools.conversion.test_roll_domains import FILE

pytestmark = pytest.mark.config


def roll(folder, data_args, model_args="{}"):
    text = FILE.format(estimator="reinforce", second="")
    text = text.replace(
        "{file_name: [prompts.jsonl]}", f"{{file_name: [prompts.parquet], messages: prompt, {data_args}}}"
    )
    text = text.replace("actor_train:\n", f"actor_train:\n  model_args: {model_args}\n", 1)
    (folder / "roll.yaml").write_text(f"pretrain: Qwen/Qwen2.5-VL-7B-Instruct\n{text}")
    done = convert_file(folder / "roll.yaml", ORIGINS["roll"])
    return done, done.settings["actor_train"]


def test_limits_of_pixels_in_rolls_files_tell_of_images(tmp_path):
    done, train = roll(
        tmp_path, "image_max_pixels: 1048576, video_fps: 2.0, image_folder: x", "{freeze_module_prefix: vision_model}"
    )
    data = train["data_args"]
    assert (data["images"], data["messages"], data["tag"]) == ("images", "prompt", "data_source")
    assert any(text.startswith("actor_train.data_args.response: write") for text in done.missing)
    assert (data["image_max_pixels"], data["image_min_pixels"]) == (1048576, 3136), "the other one is ROLL's default"
    assert train["model_args"]["freeze_module_prefix"] == "visual"
    assert done.settings["actor_infer"]["strategy_args"]["strategy_name"] == "sglang"
    refused = {one.key: one.why for one in done.left_out_as("refused")}
    assert {"actor_train.data_args.video_fps", "actor_train.data_args.image_folder"} <= refused.keys()


def test_without_them_there_are_none(tmp_path):
    _, train = roll(tmp_path, "preprocessing_num_workers: 2", "{freeze_module_prefix: vision_model}")
    assert "images" not in train["data_args"] and "freeze_module_prefix" not in train["model_args"]


@pytest.mark.parametrize(
    ("overrides", "images", "frozen"),
    [
        ("", None, None),
        ("actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct", "images", None),
        ("actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct data.image_key=pictures", "pictures", None),
        ("actor_rollout_ref.actor.freeze_vision_tower=True", "images", "visual"),
    ],
)
def test_models_that_see_in_verls_scripts(tmp_path, overrides, images, frozen):
    whole = verl.converted(tmp_path, overrides).settings
    settings = whole["actor_train"]
    assert whole["actor_infer"]["strategy_args"]["strategy_name"] == ("sglang" if images else "vllm")
    assert settings["data_args"].get("images") == images
    assert settings.get("model_args", {}).get("freeze_module_prefix") == frozen


def test_nemo_rls_processor_of_images_names_their_key(tmp_path):
    file = nemo_rl.file_of("grpo")
    file["data"].setdefault("default", {})["processor"] = "vlm_hf_data_processor"
    (tmp_path / "nemo.yaml").write_text(yaml.safe_dump(file))
    settings = convert_file(tmp_path / "nemo.yaml", ORIGINS["nemo_rl"]).settings
    assert settings["actor_train"]["data_args"]["images"] == "images"
