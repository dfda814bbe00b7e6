"""Packages with the modules and signatures of hosts, as they were at the commits named: what integrations rely on.

The bodies are this file's own. Tests against the hosts' code run from checkouts (`scripts/hosts.sh`).
"""

from __future__ import annotations

import sys
from pathlib import Path

VERL = {  # 0.9.1, and main at 1dda039
    "verl/utils/seqlen_balancing.py": """
def rearrange_micro_batches(batch, max_token_len, dp_group=None, num_batches_divided_by=None,
                            same_micro_num_in_dp=True, min_num_micro_batch=None, use_dynamic_bsz_balance=True,
                            force_group_size=1):
    return "verl"

def get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size):
    return "verl"
""",
    "verl/utils/tensordict_utils.py": """
def index_select_tensor_dict(batch, indices):
    return {name: tensor[indices] for name, tensor in batch.items()}
""",
    "verl/workers/engine_utils.py": "from verl.utils.seqlen_balancing import *\n",
}
NEMO_RL = {  # 7ea279a
    "nemo_rl/data/packing/algorithms.py": """
class SequencePacker:
    def __init__(self, bin_capacity, collect_metrics=False, min_bin_count=None, bin_count_multiple=None):
        self.bin_capacity, self.min_bin_count, self.bin_count_multiple = bin_capacity, min_bin_count, bin_count_multiple

    def pack(self, sequence_lengths):
        return self._pack_implementation(sequence_lengths)

def get_packer(algorithm, bin_capacity, collect_metrics=False, min_bin_count=None, bin_count_multiple=None):
    return "NeMo-RL"
""",
    "nemo_rl/distributed/batched_data_dict.py": """
from nemo_rl.data.packing.algorithms import *

class BatchedDataDict(dict):
    def shard_by_batch_size(self, shards, batch_size=None, allow_uneven_shards=False, dynamic_batching_args=None,
                            sequence_packing_args=None):
        if dynamic_batching_args is None:
            return "NeMo-RL"
        lengths = self[dynamic_batching_args["input_lengths_key"]]
        size = batch_size or len(lengths)
        firsts = range(0, len(lengths), size)
        chunks = [sorted(range(first, first + size), key=lambda i: lengths[i]) for first in firsts]
        order = [[i for chunk in chunks for i in chunk[shard::shards]] for shard in range(shards)]
        sharded = [BatchedDataDict({key: value[of_shard] for key, value in self.items()}) for of_shard in order]
        for shard in sharded:  # one sample per micro-batch: NeMo-RL's own cuts are not this file's matter
            shard.micro_batch_indices = [[[i, i + 1] for i in range(size // shards)] for _ in chunks]
            shard.micro_batch_lengths = [[0] * (size // shards) for _ in chunks]
        return sharded, sum(order, [])
""",
}
SLIME = {  # 624b824a
    "slime/utils/dp_schedule.py": """
def build_dp_schedule(args, train_parallel_config, total_lengths, *, global_batch_size, rollout_indices):
    return "slime"
""",
    "slime/utils/flops_utils.py": """
def calculate_fwd_flops(seqlens, args):
    return sum(3_000 * length + 2 * length**2 for length in seqlens)
""",
    "slime/ray/rollout.py": "from slime.utils.dp_schedule import *\n",
}
ROLL = {  # 8eb27cc
    "roll/utils/sequence_packing.py": """
class SequencePackingPacker:
    def make_micro_batch_iter_for_sequence_packing(self, mini_batch, tp_size, cp_size, vp_size, is_train=False,
                                                   dp_group=None, micro_batch_size=None):
        return "ROLL"

class LoadBalancePacker(SequencePackingPacker):
    def __init__(self, config):
        self.config = config

    def get_pad_factor(self, cp_size, tp_size):
        return 16

    def make_micro_batch_iter_for_sequence_packing(self, mini_batch, tp_size, cp_size, vp_size, is_train=False,
                                                   dp_group=None, micro_batch_size=None):
        return "ROLL"
""",
    "roll/utils/functionals.py": """
def get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size):
    return "ROLL"
""",
    "roll/utils/dynamic_batching.py": """
import copy

def dynamic_batching_shard(origin_batch, dp_size, max_tokens_per_microbatch, sequence_length_round,
                           pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None, log_prefix=None):
    mask = origin_batch.batch["attention_mask"]
    order = mask.sum(1).argsort(stable=True)
    batch = copy.copy(origin_batch)
    batch.batch = {"attention_mask": mask[[i for rank in range(dp_size) for i in order[rank::dp_size]]]}
    batch.meta_info = dict(origin_batch.meta_info)
    prefix = f"dynamic_batching/{log_prefix}" if log_prefix else "dynamic_batching"
    return batch, {f"{prefix}/actual_tokens_origin": mask.numel(), f"{prefix}/valid_tokens": int(mask.sum())}
""",
    "roll/pipeline/base_worker.py": "class ActorWorker: ...\n",
}
HOSTS = {"verl": VERL, "nemo_rl": NEMO_RL, "slime": SLIME, "roll": ROLL}
IMPORTED = {  # a module of the host that imported a replaced name before
    "verl": ("verl.workers.engine_utils", "rearrange_micro_batches"),
    "nemo_rl": ("nemo_rl.distributed.batched_data_dict", "get_packer"),
    "slime": ("slime.ray.rollout", "build_dp_schedule"),
    "roll": ("roll.utils.functionals", "get_seqlen_balanced_partitions"),
}


def write(folder: Path, files: dict[str, str]) -> None:
    """Writes a host's modules under `folder`, packages above them."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(folder).parents:
            if parent != Path("."):
                (folder / parent / "__init__.py").touch()


def forget(*packages: str) -> None:
    """Removes imported modules of packages."""
    for name in list(sys.modules):
        if name.split(".")[0] in packages:
            del sys.modules[name]
