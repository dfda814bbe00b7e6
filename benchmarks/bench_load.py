"""Load a model directory: peak memory over the rank's own weights, and time over `cat` of the files.

    python benchmarks/bench_load.py                     a 3B-shaped bf16 model at TP 2 (6.2 GB are written to --folder)
    python benchmarks/bench_load.py --layers 4 --cold   fewer layers; page cache dropped before each reading

Writes random safetensors in the shape of Qwen2.5-3B if they are missing, builds the model on `--tp` processes, and
loads them. Memory is the peak resident set, with mapped pages of the files, minus that before the model was built. Time
is that of `load_pretrained`. `cat` runs in the same state of the page cache: warm after a first reading, or cold with
--cold. On the CPU, the time includes the kernel's clearing of new memory pages; a second load into the same memory does
not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported, here and in the ranks

SHAPE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LARGEST_FILE = 4 * 10**9


def write_model(folder: Path, layers: int) -> None:
    """Write random tensors into files of up to 4 GB, as transformers does."""

    from roll_batching.huggingface.families import load_family, rules_of
    from roll_batching.huggingface.tensors import Sizes, expected_tensors
    from roll_batching.settings import ModelArgs

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": layers}))
    architecture = ModelArgs(model_name_or_path=str(folder)).architecture
    assert architecture is not None
    shapes = expected_tensors(rules_of(load_family("qwen2"), architecture), Sizes.of(architecture))
    files: list[dict[str, torch.Tensor]] = [{}]
    place: dict[str, str] = {}
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)
        if files[-1] and sum(t.nbytes for t in files[-1].values()) + tensor.nbytes > LARGEST_FILE:
            _write(folder, len(files), files[-1])
            files[-1] = {}
            files.append({})
        files[-1][name] = tensor
        place[name] = f"model-{len(files)}.safetensors"
    _write(folder, len(files), files[-1])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))


def _write(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / f"model-{number}.safetensors", metadata={"format": "pt"})


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cat(folder: Path) -> float:
    """Seconds of `cat` on the files."""
    files = sorted(map(str, folder.glob("*.safetensors")))
    started = time.perf_counter()
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def resident(field: str) -> int:
    """Bytes in a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def load_on_a_rank(folder: Path, out: Path, tp: int) -> None:
    """On a rank: build and load the model, and write seconds and bytes to `out`."""
    import torch.distributed as dist

    from roll_batching.distributed.parallel_layout import make_layout, start_processes
    from roll_batching.modeling.builder import build_chunks
    from roll_batching.modeling.kernels import choose_kernels
    from roll_batching.modeling.pretrained import load_pretrained
    from roll_batching.settings import MegatronConfig, ModelArgs

    device = start_processes()
    megatron = MegatronConfig(tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
    layout = make_layout(megatron.parallel_dims(tp), device)
    architecture = ModelArgs(model_name_or_path=str(folder)).architecture
    assert architecture is not None
    kernels = choose_kernels(megatron, architecture, device)
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    before = resident("VmRSS")
    options: dict[str, Any] = {"kernels": kernels, "seed": 0, "initialize": False}
    chunks = build_chunks(architecture, megatron, layout, torch.bfloat16, **options)
    dist.barrier()
    started = time.perf_counter()
    load_pretrained(chunks, architecture, str(folder), layout)
    seconds = time.perf_counter() - started
    peak = resident("VmHWM") - before
    dist.barrier()
    started = time.perf_counter()
    load_pretrained(chunks, architecture, str(folder), layout)
    again = time.perf_counter() - started
    weights = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    found = {"seconds": seconds, "again": again, "weights": weights, "peak": peak}
    (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))


def measure(folder: Path, tp: int, port: int) -> list[dict[str, float]]:
    """Figures of each rank."""
    command = [sys.executable, __file__, "--folder", str(folder), "--tp", str(tp), "--rank-of", str(folder)]
    ranks = []
    for rank in range(tp):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": tp, "LOCAL_WORLD_SIZE": tp, "MASTER_PORT": port}
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        ranks.append(subprocess.Popen(command, env=env | {name: str(value) for name, value in place.items()}))
    if any([rank.wait() for rank in ranks]):
        sys.exit("a rank failed")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(tp)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("data/bench_load"), help="folder of the model")
    parser.add_argument("--layers", type=int, default=36, help="number of layers; the 3B shape has 36")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each reading")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of is not None:
        load_on_a_rank(args.folder, args.rank_of, args.tp)
        return
    config = args.folder / "config.json"
    if not config.exists() or json.loads(config.read_text())["num_hidden_layers"] != args.layers:
        write_model(args.folder, args.layers)
    size = sum(file.stat().st_size for file in args.folder.glob("*.safetensors"))
    print(f"{size / 1e9:.2f} GB of bf16 tensors, TP {args.tp}, page cache {'cold' if args.cold else 'warm'}")
    if not args.cold:
        cat(args.folder)
    for number in range(args.repeat):
        reading, ranks = 0.0, []
        # Alternate the order: a cache below the page cache may favour the second reader.
        for first in (number % 2 == 0, number % 2 == 1):
            if args.cold:
                forget(args.folder)
            if first:
                reading = cat(args.folder)
            else:
                ranks = measure(args.folder, args.tp, 29600 + number)
        slowest = max(rank["seconds"] for rank in ranks)
        share = max(rank["peak"] / rank["weights"] for rank in ranks)
        print(
            f"{'cat first' if number % 2 == 0 else 'cat last'}: cat {reading:.2f} s, loading {slowest:.2f} s "
            f"({slowest / reading:.2f} x), into memory used before {max(rank['again'] for rank in ranks):.2f} s; "
            f"a rank's weights {ranks[0]['weights'] / 1e9:.2f} GB, its peak {share:.2f} x of them",
            flush=True,
        )


if __name__ == "__main__":
    main()
