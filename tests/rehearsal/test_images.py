"""Rehearsed jobs of a model with a vision encoder, against real steps on CPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rehearsal.jobs import ARCHITECTURE, job_of, task_of

pytestmark = pytest.mark.rehearse

VISION = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_heads": 4,
    "patch_size": 4,
    "window_size": 32,
    "fullatt_block_indexes": [1],
    "mrope_section": [4, 6, 6],
    "image_token_id": 507,
    "video_token_id": 508,
    "vision_start_token_id": 509,
    "vision_end_token_id": 510,
}


def vision_job(pixels: int = 8192, **keys: Any) -> dict[str, Any]:
    """A job whose images have at most `pixels`, 64 of them a token."""
    data = {"file_name": "data.jsonl", "messages": "messages", "images": "images", "image_max_pixels": pixels}
    train = {"data_args": data, **keys.pop("train", {})}
    return job_of(architecture={"vision": VISION}, train=train, pretrain="Qwen2.5-VL", **keys)
