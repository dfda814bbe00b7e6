"""Models, clusters and lengths on which context-parallel sizes are compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roll_batching.planning import FlopsCost
from roll_batching.planning.pack_times import PackTimes

SHAPES = {
    "8B": {"hidden_size": 4096, "ffn_hidden_size": 12288, "num_layers": 36, "num_attention_heads": 32},
    "32B": {"hidden_size": 5120, "ffn_hidden_size": 25600, "num_layers": 64, "num_attention_heads": 64},
}
COMMON = {"num_query_groups": 8, "kv_channels": 128, "vocab_size": 151936}


@dataclass(frozen=True)
class Setting:
    """A model on a number of GPUs, and the sequences of a step."""

    shape: str
    gpus: int
    tp: int
    longest: int
    cap: int
    """Most tokens of a rank."""
    lengths: str
    count: int
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Data- and context-parallel ranks."""
        return self.gpus // self.tp // self.pp

    def __str__(self) -> str:
        stages = f" PP {self.pp}" if self.pp > 1 else ""
        return f"{self.shape} {self.gpus} GPUs TP {self.tp}{stages} {self.lengths} {self.count}"

    def times(self, *, overlapped: bool) -> PackTimes:
        """Predicted times of packs on H100s."""
        shape = SHAPES[self.shape]
        return PackTimes.of_model(
            FlopsCost.from_model(**shape, **COMMON, tp_size=self.tp),
            num_layers=shape["num_layers"],
            hidden_size=shape["hidden_size"],
            num_query_groups=COMMON["num_query_groups"],
            kv_channels=COMMON["kv_channels"],
            tp_size=self.tp,
            pp_size=self.pp,
            overlapped_exchange=overlapped,
        )


SETTINGS = (
    Setting("8B", 64, 2, 32768, 8192, "math", 1024),
    Setting("8B", 256, 2, 32768, 8192, "math", 1024),
    Setting("8B", 256, 2, 32768, 8192, "math", 256),
    Setting("32B", 128, 8, 32768, 8192, "math", 1024),
    Setting("32B", 512, 8, 32768, 8192, "math", 1024),
    Setting("32B", 256, 8, 131072, 16384, "reasoning", 512),
    Setting("8B", 64, 2, 131072, 16384, "tail", 512),
    Setting("8B", 256, 2, 131072, 16384, "tail", 1024),
    Setting("8B", 256, 2, 131072, 16384, "tail", 256),
    Setting("8B", 64, 2, 131072, 16384, "mooncake", 256),
    Setting("8B", 256, 2, 131072, 16384, "mooncake", 1024),
    Setting("32B", 256, 8, 131072, 16384, "tail", 512),
    Setting("32B", 512, 8, 131072, 16384, "tail", 1024),
    Setting("32B", 512, 8, 131072, 16384, "tail", 256),
    Setting("32B", 512, 8, 131072, 16384, "mooncake", 512),
)
PIPELINES = (
    Setting("32B", 256, 8, 131072, 16384, "tail", 256, pp=4),
    Setting("32B", 512, 8, 131072, 16384, "tail", 512, pp=4),
    Setting("32B", 512, 4, 131072, 16384, "tail", 512, pp=4),
    Setting("32B", 512, 8, 131072, 16384, "mooncake", 256, pp=4),
    Setting("32B", 256, 4, 32768, 8192, "math", 512, pp=4),
)


def draw(setting: Setting, seed: int, traces: Path | None) -> np.ndarray:
    """Lengths of the sequences of a step, int64 [count]."""
    random, count, longest = np.random.default_rng(seed), setting.count, setting.longest
    if setting.lengths == "mooncake":
        assert traces is not None
        tokens = np.loadtxt(traces / "mooncake_synthetic.csv", delimiter=",", skiprows=1).sum(axis=1).astype(np.int64)
        return np.resize(np.roll(tokens, -int(random.integers(len(tokens)))), count).clip(16, longest)
    if setting.lengths == "tail":
        return random.lognormal(np.log(1500), 1.6, count).clip(32, longest).astype(np.int64)
    if setting.lengths == "math":
        prompts = random.lognormal(np.log(200), 0.5, count).clip(32, 1024)
        answers = random.lognormal(np.log(3500), 1.0, count)
    else:  # reasoning
        prompts, answers = (random.lognormal(np.log(median), s, count) for median, s in ((300, 0.5), (9000, 1.1)))
    return np.minimum(prompts + answers, longest).clip(16).astype(np.int64)
