"""`roll-batching report`: the page of a real run and of hostile ones, and what the command refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from roll_batching.cli import main
from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.tools.report.charts import smooth, window_of
from roll_batching.tools.report.page import make_sections, write_report
from roll_batching.tools.report.run_files import read_run
from tests.jobs.observe.rows import rl_rows
from tests.tools.report.pages import ReportPage

pytest.importorskip("plotly", reason="pip install plotly")
ROOT = Path(__file__).resolve().parents[3]


def write_run(folder: Path, rows: list[dict], rollouts: list[dict] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if rollouts is not None:
        (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rollouts))
    return folder


def rollout(**changes) -> dict:
    line = {"step": 1, "kind": "train", "version": 0, "id": 0, "prompt": "2+2=", "response": "4", "answer": "4"}
    line |= {"reward": 1.0, "marks": {}, "domain": "", "failed": False, "finished": True}
    return line | {"prompt_tokens": 4, "response_tokens": 1} | changes


def page_of(folder: Path, tmp_path: Path, *others: Path) -> ReportPage:
    target = tmp_path / "page.html"
    write_report([folder, *others], target)
    return ReportPage(target)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "rollouts.jsonl", "config.yaml", "last_plan.json", "logs/rank_1.log"]
)
def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path, name):
    run = write_run(tmp_path / "run", rl_rows(3), [rollout()])
    (run / "logs").mkdir()
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    code = "import sys; from roll_batching.cli import main; main(['report', sys.argv[1]])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=60, check=False
    )
    assert f"{Path(name).name} cannot be read: it is no regular file" in done.stderr, done.stderr
    assert done.returncode == (1 if name == "metrics.jsonl" else 0)


@pytest.mark.bad_input
def test_a_report_goes_neither_through_a_dangling_link_nor_into_a_new_folder(tmp_path):
    run = write_run(tmp_path / "run", rl_rows(3))
    (run / "report.html").symlink_to(tmp_path / "elsewhere.html")
    with pytest.raises(ConfigError, match="report.html is a link to .*elsewhere.html, which is not there"):
        write_report([run], None)
    with pytest.raises(ConfigError, match="the folder .*nowhere is not there"):
        write_report([run], tmp_path / "nowhere" / "page.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


# ---- a real run


def test_the_page_of_a_real_run_shows_its_numbers(real_run, tmp_path):
    page = page_of(real_run, tmp_path)
    rows = [row for row in read_metrics(real_run / "metrics.jsonl") if row["phase"] == "rl"]
    assert page.trace("training prompts")["y"] == pytest.approx([row["reward"] for row in rows], rel=1e-5)
    assert page.trace("policy")["y"] == pytest.approx([row["entropy"] for row in rows], rel=1e-5)
    held_out = [(row["eval_updates"], row["eval_reward"]) for row in rows if "eval_reward" in row]
    updates, rewards = zip(*held_out, strict=True)
    assert page.trace("held-out")["x"] == list(updates) and page.trace("held-out")["y"] == pytest.approx(rewards)
    lines = [json.loads(line) for line in (real_run / "rollouts.jsonl").read_text().splitlines()]
    assert [record["response"] for record in page.records] == [line["response"] for line in lines]
    assert [record["reward"] for record in page.records] == [line["reward"] for line in lines]
    plan = json.loads((real_run / "last_plan.json").read_text())
    assert (plan["phase"], plan["step"]) == ("rl", 3)
    (samples,) = [trace for chart in page.charts for trace in chart["data"] if trace["name"] == "samples"]
    assert sorted(samples["marker"]["color"]) == sorted(plan["plan"]["lengths"])
    for word in ("warmup: 4 of 4; rl: 3 of 3", "actor_train.training_args.learning_rate", "megatron-core"):
        assert word in page.text, word


def test_stacked_tokens_are_the_rows_of_the_run(real_run, tmp_path):
    page = page_of(real_run, tmp_path)
    (chart,) = [chart for chart in page.charts if any(trace["name"] == "saved: padding" for trace in chart["data"])]
    stacked = sum(np.array(trace["y"]) for trace in chart["data"])
    rows = [row for row in read_metrics(real_run / "metrics.jsonl") if row["phase"] == "rl"]
    assert stacked == pytest.approx([row["tokens_padded"] for row in rows], rel=1e-5)


def test_tokens_are_real_padding_shared_or_saved(tmp_path):
    row = {"phase": "rl", "tokens": 100, "shared_tokens": 30, "computed_tokens": 80, "tokens_padded": 200}
    page = page_of(write_run(tmp_path / "run", [row | {"step": step} for step in (1, 2)]), tmp_path)
    names = ("computed: real tokens", "computed: padding and fillers", "saved: common prefixes", "saved: padding")
    assert [page.trace(name)["y"] for name in names] == [[70, 70], [10, 10], [30, 30], [90, 90]]


def test_every_chart_is_valid_for_plotly(real_run, tmp_path):
    from plotly.graph_objects import Figure

    page = page_of(real_run, tmp_path)
    assert len(page.charts) > 15
    for chart in page.charts:
        Figure(chart)


def test_the_page_is_one_file_that_asks_for_nothing(real_run, tmp_path):
    page = page_of(real_run, tmp_path)
    assert [attributes for attributes, _ in page.scripts if "src" in attributes] == []
    assert [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "base", "object")] == []
    (policy,) = [
        attributes["content"]
        for _, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe-eval" not in policy


def test_a_run_keeps_its_environment_and_a_new_one_of_the_name_moves_it(real_run):
    info = json.loads((real_run / "run_info.json").read_text())
    assert info["environment"]["processes"] == 2 and "torch" in info["environment"]
    assert isinstance(info["notices"], list)


def test_what_a_run_lacks_is_said_at_the_end(real_run, tmp_path):
    folder = write_run(tmp_path / "bare", [{"step": 1, "phase": "sft", "loss": 2.0}])
    text = page_of(folder, tmp_path).text
    end = text[text.index("Not on this page") :]
    for words in ("The plan of bare", "Rollouts of bare", "Settings of bare", "Environment of bare", "Staleness"):
        assert words in end, words
    titles = [section.title for section in make_sections([read_run(folder, "bare")]) if not section.is_empty]
    assert titles == ["Overview", "Learning: sft"]


def test_two_runs_share_charts_and_different_phases_are_named(real_run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(real_run, other, ignore=shutil.ignore_patterns("checkpoints", "tensorboard", "model"))
    rows = [row | {"phase": "sft"} for row in read_metrics(real_run / "metrics.jsonl") if row["phase"] == "warmup"]
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = (other / "config.yaml").read_text()
    assert "max_steps: 3\n" in config
    (other / "config.yaml").write_text(config.replace("max_steps: 3\n", "max_steps: 5\n"))
    page = page_of(real_run, tmp_path, other)
    assert "other has no phase rl" in page.text and "tiny has no phase sft" in page.text
    assert page.trace("other: training")["y"] == pytest.approx([row["loss"] for row in rows], rel=1e-5)
    assert {record["run"] for record in page.records} == {"tiny", "other"}
    marked = [attributes for tag, attributes in page.tags if tag == "tr" and attributes.get("class") == "marked"]
    assert len(marked) == 1 and "1 of" in page.text
    shutil.rmtree(other)


def test_runs_of_one_name_are_told_apart(tmp_path):
    one, two = (write_run(tmp_path / place / "run", rl_rows(3)) for place in ("x", "y"))
    page = page_of(one, tmp_path, two)
    assert page.trace("A: run: training prompts") and page.trace("B: run: training prompts")


# ---- hostile content

ATTACK = "</script><script>window.hacked = 1</script><!-- <img src=x onerror='window.hacked=1'>"


def hostile_run(folder: Path) -> Path:
    """Every text of a run is an attack, and every file is broken somewhere."""
    rows = rl_rows(6)
    rows[0] |= {f"mark/{ATTACK}": 0.5, "loss": None, "entropy": 10**400, "reward/a%{x}": 1.0}
    rows[1]["grad_norm"] = "NaN"
    rows[2] |= {"phase": ATTACK, "reward": 0.25}
    lines = [json.dumps(row) for row in rows]
    lines.insert(2, '{"step": 2, "phase": "rl", "loss": NaN, "kl": Infinity, "reward": 1e999, "tokens": -Infinity}')
    lines.insert(3, "no json \x00\xff")
    lines.insert(4, "[" * 50_000)
    lines.insert(5, '{"step": true, "phase": 7}')
    lines.append('{"step": 7, "phase": "rl", "loss": 0.')
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    texts = [
        rollout(prompt=ATTACK, response=ATTACK, answer=ATTACK, domain=ATTACK, kind=ATTACK, marks={ATTACK: True}),
        rollout(response="\x1b[31mred\x1b[0m \x1b]0;title\x07nul\x00 half\ud800 \u202eright to left"),
        rollout(prompt="p" * 10_000_000),
        rollout(prompt=None, response=["x"], answer={"a": 1}, reward="high", step="one", marks=3, finished=1),
        rollout(reward=float("nan")),
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts) + "{")
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    (folder / "config.yaml").write_text(f"exp_name: '{ATTACK.replace(chr(39), '')}'\n{bomb}")
    (folder / "run_info.json").write_text(json.dumps({"environment": {ATTACK: ATTACK}, "notices": [ATTACK, 3]}))
    (folder / "last_plan.json").write_text('{"phase": "<b>", "plan": {}')
    (folder / "logs").mkdir()
    (folder / "logs" / "rank_0000.log").write_text(f"hello\nnotice: {ATTACK}\nnotice: \x1b[1mbold\n")
    return folder


@pytest.mark.bad_input
def test_hostile_texts_stay_texts(tmp_path):
    page = page_of(hostile_run(tmp_path / "<b>evil"), tmp_path)
    assert [attributes.get("type") for attributes, _ in page.scripts] == ["application/json"] * 2 + ["text/plain", None]
    assert [tag for tag, _ in page.tags if tag in ("img", "b")] == []
    assert ATTACK in page.text, "the attack is there to read"
    assert ATTACK[:100] in page.records[0]["response"]
    for chart in page.charts:
        assert not any("<" in trace["name"] for trace in chart["data"]), "plotly reads tags in names"
    shown = page.records[1]["response"]
    assert shown == "red nul\ufffd half\ufffd \ufffdright to left"
    assert len(page.records[2]["prompt"]) < 4000 and "9,997,000 more characters" in page.records[2]["prompt"]
    assert page.records[3]["reward"] is None and page.records[4]["reward"] is None


@pytest.mark.bad_input
def test_a_page_shows_no_secret_of_a_run(tmp_path):
    """Of a folder whose config.yaml an older version has written, and of its notices."""
    folder = write_run(tmp_path / "run", [{"step": 1, "phase": "rl", "loss": 1.0}])
    hub, password = "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ", "pass-7"
    settings = f"system_envs: {{LOGIN: {hub}, SORT_KEY: by-length, MY_API_KEY: short-7}}\nurl: http://me:{password}@h\n"
    (folder / "config.yaml").write_text(settings)
    path, _ = write_report([folder], tmp_path / "page.html")
    page = path.read_text()
    assert "by-length" in page and not any(text in page for text in (hub, password, "short-7"))


def test_broken_files_are_read_as_far_as_they_go_and_named(tmp_path, capsys):
    folder = hostile_run(tmp_path / "evil")
    with pytest.raises(SystemExit) as end:
        main(["report", str(folder), "--output", str(tmp_path / "page.html")])
    assert end.value.code == 0
    said = capsys.readouterr().err
    assert "metrics.jsonl: lines that cannot be read and are left out: 2; the first is line 4" in said
    assert "metrics.jsonl: the last line is incomplete" in said
    assert "metrics.jsonl: lines without a step and a phase, which are left out: 1" in said
    assert "rollouts.jsonl: the last line is incomplete" in said
    assert "last_plan.json: it holds no plan" in said
    page = ReportPage(tmp_path / "page.html")
    curves = [trace["y"] for chart in page.charts for trace in chart["data"] if trace["name"] == "training prompts"]
    assert [len(curve) for curve in curves] == [5, 1], "rows with a finite reward: of rl, and of the hostile phase"
    assert "loss is missing or not finite in 2 rows" in page.text and "bold" in page.text


def test_of_50_000_rollouts_1_000_are_shown_and_the_page_says_so(tmp_path):
    lines = [rollout(step=step // 50 + 1, id=step, response=f"r{step} " * 200) for step in range(50_000)]
    page = page_of(write_run(tmp_path / "many", rl_rows(3), lines), tmp_path)
    assert len(page.records) == 1000 and "1,000 of 50,000 recorded responses" in page.text
    assert [record["id"] for record in page.records[:3]] == [0, 50, 100] and page.records[-1]["id"] == 49_950
    assert (tmp_path / "page.html").stat().st_size < 12e6


def test_a_run_that_is_still_written_can_be_read_at_any_time(tmp_path):
    folder = write_run(tmp_path / "live", rl_rows(2))
    rows = rl_rows(3000)[2:]

    def write() -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            for row in rows:
                line = json.dumps(row) + "\n"
                for part in (line[:40], line[40:]):
                    file.write(part)
                    file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    counts = []
    while writer.is_alive():
        counts.append(len(read_run(folder, "live").rows))
    writer.join()
    assert counts == sorted(counts) and len(read_run(folder, "live").rows) == 3000
    assert any(2 < count < 3000 for count in counts), "some reads were in between"


# ---- what the command refuses


@pytest.mark.bad_input
def test_folders_that_are_no_runs_are_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(RollBatchingError, match="is not a folder"):
        write_report([file], tmp_path / "p.html")
    with pytest.raises(RollBatchingError, match="not the folder of a run"):
        write_report([tmp_path], tmp_path / "p.html")
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RollBatchingError, match=r"metrics\.jsonl cannot be read: Is a directory"):
        write_report([tmp_path], tmp_path / "p.html")
    empty = write_run(tmp_path / "empty", [])
    with pytest.raises(RollBatchingError, match="no row of metrics"):
        write_report([empty], tmp_path / "p.html")
    assert not (tmp_path / "p.html").exists()


@pytest.mark.bad_input
def test_one_or_two_different_runs_are_asked_for(tmp_path):
    run = write_run(tmp_path / "run", rl_rows(2))
    with pytest.raises(ConfigError, match="one run, or two side by side, and 3"):
        write_report([run] * 3, None)
    with pytest.raises(ConfigError, match="the same folder"):
        write_report([run, tmp_path / "x" / ".." / "run"], None)


@pytest.mark.bad_input
def test_only_reports_are_overwritten(tmp_path):
    run, other = (write_run(tmp_path / name, rl_rows(2)) for name in ("run", "a b"))
    path, _ = write_report([run], None)
    assert path == run / "report.html"
    assert write_report([run], None)[0] == path, "a report is replaced"
    assert write_report([run, other], None)[0] == run / "report-a_b.html"
    mine = tmp_path / "mine.html"
    mine.write_text("<html>my own page</html>")
    with pytest.raises(ConfigError, match="was not written by `roll-batching report`, so it is not overwritten"):
        write_report([run], mine)
    path.write_text("notes")
    with pytest.raises(ConfigError, match="Set --output to another file"):
        write_report([run], None)
    assert mine.read_text() == "<html>my own page</html>" and path.read_text() == "notes"
    with pytest.raises(ConfigError, match="is a folder"):
        write_report([run], tmp_path)
    with pytest.raises(RollBatchingError, match="cannot be written"):
        write_report([run], mine / "page.html")


@pytest.mark.bad_input
def test_without_plotly_the_extra_is_named(tmp_path):
    run = write_run(tmp_path / "run", rl_rows(2))
    script = (
        f"import sys; sys.modules['plotly'] = None; from roll_batching.cli import main; main(['report', {str(run)!r}])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "pip install 'roll-batching[report]'" in done.stderr
    assert not (run / "report.html").exists()


# ---- curves


def test_long_curves_are_means_over_windows_with_bands():
    rng = np.random.default_rng(0)
    steps, values = np.arange(1.0, 1001.0), rng.normal(size=1000)
    curve = smooth(steps, values)
    assert curve.window == window_of(1000) == 20 and len(curve.steps) <= 250
    assert curve.low is not None and curve.high is not None
    for at in (0, 100, len(curve.steps) - 1):
        centre = int(curve.steps[at]) - 1
        part = values[max(centre - 10, 0) : centre + 10]
        assert curve.means[at] == pytest.approx(part.mean())
        assert (curve.low[at], curve.high[at]) == pytest.approx(tuple(np.percentile(part, [10, 90])))
    short = smooth(steps[:80], values[:80])
    assert short.low is None and np.array_equal(short.means, values[:80])
