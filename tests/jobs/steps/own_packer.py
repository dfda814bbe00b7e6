"""A packer of somebody's own that behaves on rank 1 as its `mood` says."""

from __future__ import annotations

import os
import time

from roll_batching.planning.packers import Items
from roll_batching.planning.packers.bin_packing import first_fit_decreasing

mood = "well"


def pack(items: Items) -> list[list[int]]:
    while mood == "stuck everywhere" or (mood == "stuck" and os.environ["RANK"] == "1"):
        time.sleep(0.05)
    bins = first_fit_decreasing(items)
    if os.environ["RANK"] != "1" or mood == "well":
        return bins
    if mood == "fails":
        raise FileNotFoundError("my table of costs")
    return [[item] for members in bins for item in members]
