"""Files for other places: the Dockerfile, Slurm, KubeRay, workflows, forms and the citation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

import roll_batching
from tests.scripts.test_pages import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"


def test_the_dockerfile_copies_and_installs_what_is_here():
    text = (ROOT / "Dockerfile").read_text()
    (extras,) = re.findall(r"'\.\[([\w,-]+)\]'", text)
    assert set(extras.split(",")) <= set(EXTRAS) and "CONSTRAINT=constraints.txt" in text
    (command,) = (json.loads(line.removeprefix("CMD ")) for line in text.splitlines() if line.startswith("CMD"))
    assert command == ["roll-batching", "doctor"]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ".venv*" in ignored and not {"roll_batching", "pyproject.toml", "constraints.txt", "README.md"} & set(
        ignored
    )


def test_the_slurm_script_starts_torchrun(tmp_path):
    """Without Slurm it is one node; torchrun reads its options and starts two processes of our command."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
    variables |= {"NPROC": "2", "PYTHONPATH": str(ROOT), "MASTER_PORT": "0"}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables["PATH"]])
    done = subprocess.run(["bash", SBATCH, "--help"], env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == 2 and "--launcher" in done.stdout
    head = re.findall(r"^#SBATCH --([\w-]+)", SBATCH.read_text(), re.MULTILINE)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "requeue"} <= set(head)


def test_the_ray_job_asks_for_a_cluster_that_runs_our_command():
    job = yaml.safe_load((ROOT / "examples" / "kuberay" / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"]["entrypoint"].startswith("roll-batching train --config /shared/job.yaml --launcher ray ")
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_workflows_run_scripts_that_are_here():
    steps = re.findall(r"run: (\S+)", (ROOT / ".github" / "workflows" / "checks.yml").read_text())
    assert steps and all(os.access(ROOT / step, os.X_OK) for step in steps)
    for file in (ROOT / ".github").rglob("*.yml"):
        assert isinstance(yaml.safe_load(file.read_text()), dict), file


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == roll_batching.__version__ and {"cff-version", "title", "message", "authors"} <= set(
        cited
    )
