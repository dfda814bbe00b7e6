"""Long texts of a job whose packs have their own context-parallel sizes: the cap is that of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_batching.errors import DataError
from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.inputs import load_inputs
from tests.jobs.streams.jobs import settings, write_data


def inputs_of(folder: Path, cap: int, devices: list[int] | None = None, **layout: Any) -> Any:
    """Inputs of a job whose longest document has 44 tokens."""
    job = settings(folder, "sft")
    train = job["actor_train"] | {
        "sequence_packing_args": {"max_packed_sequence_length_train": cap},
        "strategy_args": {"strategy_config": {"context_parallel_size": "auto"} | layout},
        "device_mapping": devices,
    }
    return load_inputs(config_from_dict(job | {"actor_train": train}))


def test_a_text_may_be_as_long_as_the_caps_of_all_ranks_of_a_pack(tmp_path: Path) -> None:
    write_data(tmp_path, 37)
    for cap, options in (
        (22, {"max_context_parallel_size": 2}),
        (11, {"devices": [0, 1, 2, 3]}),
        (8, {}),  # how many ranks there are is not known before the job starts
    ):
        assert inputs_of(tmp_path, cap, **options).corpus is not None
    with pytest.raises(DataError, match=r"44 tokens.*more than the 42 allowed") as caught:
        inputs_of(tmp_path, 21, max_context_parallel_size=2)
    assert "max_packed_sequence_length_train (on each of 2 ranks of a pack)" in str(caught.value)
    with pytest.raises(DataError, match="more than the 40 allowed"):
        inputs_of(tmp_path, 10, devices=[0, 1, 2, 3])
