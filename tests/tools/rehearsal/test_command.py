"""`roll-batching rehearse`: output, exit codes and errors."""

from __future__ import annotations

import json

import pytest

from roll_batching.cli import main

pytestmark = pytest.mark.rehearse

DEMO = ["rehearse", "--config", "configs/demo_grpo.yaml"]


def test_the_report_of_a_job_that_fits_has_every_phase(capsys):
    with pytest.raises(SystemExit) as end:
        main([*DEMO, "--no-advice", "--json"])
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out)
    (stage,) = found["stages"]
    assert found["fits"] and found["need"] < found["gpu_memory"]
    assert {"old log-probs", "forward", "backward", "optimizer"} <= set(stage["peaks"])
    assert stage["kept"]["optimizer"] == 3 * 4 * stage["parameters"], "fp32 weights and two moments"
    assert not [words for words in stage["host_reads"] if words.startswith(("forward", "backward"))]


@pytest.mark.slow
def test_a_job_is_rehearsed_in_python():
    from roll_batching.jobs.config import load_config
    from roll_batching.tools.rehearsal import lines_of, rehearse_job, totals_of

    found = rehearse_job(load_config("configs/dpo_demo.yaml"), world_size=2, lengths=[90, 40] * 32)
    assert found.dims.dp_size == 2 and found.fits(8 << 30) and not found.fits(1 << 20)
    assert "reference" in found.worst.report.peaks
    totals = totals_of(found)
    assert totals.micro_batches == 3 and 0 <= totals.padding < 0.05  # 32 pairs of 130 tokens under 1,024: 7 in a pack
    assert 0.5 < totals.useful < 1
    assert next(iter(lines_of(found, 8 << 30))).startswith("fits 8.00 GiB: the only stage needs ")
    assert any("2 = 2 ranks" in line or "= 2 ranks" in line for line in lines_of(found, 8 << 30))


def test_lengths_of_the_jobs_own_first_step(tmp_path):
    """Of pairs both responses, each with its prompt and the end token."""
    from roll_batching.errors import ConfigError
    from roll_batching.jobs.config import load_config
    from roll_batching.tools.rehearsal.lengths import lengths_of_data

    sizes = [3, 5, 9, 2] * 16
    rows = [{"prompt": "ab=", "chosen": "c" * size, "rejected": "d" * (size + 1)} for size in sizes]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = load_config("configs/dpo_demo.yaml", [f"actor_train.data_args.file_name={path}", "eval_samples=0"])
    found = lengths_of_data(job, 2)
    assert len(found) == job.mini_batch_size(2) == 64
    assert {(a, b) for a, b in zip(found[::2], found[1::2], strict=True)} == {(s + 4, s + 5) for s in (3, 5, 9, 2)}
    with pytest.raises(ConfigError, match="before they are sampled"):
        lengths_of_data(load_config("configs/demo_grpo.yaml"), 2)
    with pytest.raises(ConfigError, match="stream"):
        lengths_of_data(load_config("configs/sft_demo.yaml"), 2)


def test_a_job_that_does_not_fit_exits_with_1(capsys):
    with pytest.raises(SystemExit) as end:
        main([*DEMO, "--no-advice", "--gpu-memory", "1MiB"])
    assert end.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("does not fit 0.00 GiB") and len(lines) <= 15
    peaks = [
        float(line.split()[-1]) for line in lines if line.startswith(("  forward ", "  backward ", "  optimizer "))
    ]
    assert len(peaks) == 3 and max(peaks) > 0 and "--verbose" in lines[-1]


def test_a_copy_without_context_parallelism_samples_and_is_counted(capsys):
    with pytest.raises(SystemExit) as end:
        main([*DEMO, "--no-advice", "--json", "actor_train.strategy_args.strategy_config.context_parallel_size=2"])
    assert end.value.code == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    (copy,) = (margin["bytes"] for margin in stage["margins"] if "copy that samples" in margin["reason"])
    assert copy == stage["kept"]["weights"] > 0


@pytest.mark.slow
def test_packs_of_each_context_parallel_size_are_rehearsed(capsys):
    with pytest.raises(SystemExit) as end:
        main([*DEMO, "--no-advice", "actor_train.strategy_args.strategy_config.context_parallel_size=auto"])
    assert end.value.code == 0
    assert "each pack has its own context-parallel size" in " ".join(capsys.readouterr().out.split())


def test_a_sampler_with_its_own_layout_is_refused_by_name(capsys):
    sizes = "actor_infer.strategy_args.strategy_config.tensor_model_parallel_size=2"
    with pytest.raises(SystemExit) as end:
        main([*DEMO, "--no-advice", sizes])
    assert end.value.code == 2
    assert "A rehearsal does not support that" in " ".join(capsys.readouterr().err.split())


def test_an_attention_backend_that_no_rehearsal_counts_is_refused_by_name(capsys):
    with pytest.raises(SystemExit) as end:
        main([*DEMO, "--no-advice", "actor_train.strategy_args.strategy_config.attention_backend=flash_attn_4"])
    assert end.value.code == 2
    assert "flash_attn_4 has kernels that a rehearsal cannot count" in " ".join(capsys.readouterr().err.split())


def test_an_invalid_memory_size(capsys):
    with pytest.raises(SystemExit) as end:
        main([*DEMO, "--gpu-memory", "much"])
    assert end.value.code == 2
    assert "80GiB" in capsys.readouterr().err
