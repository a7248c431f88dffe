"""How processes are told to find each other: flags, launchers' variables, and the file for Kubernetes."""

import os
from pathlib import Path

import pytest
import yaml

from shared.cli.main import COMMANDS, parse
from shared.runtime.processes import Cluster, join, launched_processes

ROOT = Path(__file__).parents[3]


ERRORS = {
    Cluster(processes=2): "--coordinator, --processes and --process-id go together; give all three or none",
    Cluster("localhost:1", 2): "go together",
    Cluster("localhost:1", 2, 2): "process_id is 2; give a number from 0 to 1",
    Cluster("localhost:1", 0, 0): "processes is 0; give at least 1",
    Cluster("localhost", 2, 0): "coordinator is localhost; give HOST:PORT",
    Cluster("localhost:x", 2, 0): "coordinator is localhost:x; give HOST:PORT",
    Cluster(heartbeat=0): "heartbeat is 0; give at least 1 and at most 86400",
}


@pytest.mark.parametrize("cluster", ERRORS)
def test_flags_that_cannot_work(cluster: Cluster):
    with pytest.raises(ValueError, match=ERRORS[cluster]):
        join(cluster)


def test_launchers_are_noticed(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if name.startswith(("SLURM", "OMPI")):
            monkeypatch.delenv(name)
    assert launched_processes() == 1
    monkeypatch.setenv("SLURM_NTASKS", "4")  # as `salloc` leaves it in a shell that no `srun` started
    assert launched_processes() == 1
    for name in ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "0")
    assert launched_processes() == 4


def test_the_kubernetes_job_is_whole():
    """As far as can be told without a cluster: it parses, its counts agree, and its flags are ones that `train` has."""
    service, job = yaml.safe_load_all((ROOT / "docs" / "clusters" / "job.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    flags = dict(argument.split("=", 1) if "=" in argument else (argument, "") for argument in container["args"])
    assert spec["completions"] == spec["parallelism"] == int(flags["--processes"])
    assert spec["completionMode"] == "Indexed"
    assert flags["--coordinator"].split(":")[0] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    *_, program, name = container["command"]
    assert (program, name) == ("explicit_shardmap", "train")
    arguments = [argument.replace("$(JOB_COMPLETION_INDEX)", "3") for argument in container["args"]]
    command = parse({name: kind for name, (kind, _) in COMMANDS.items()}, program, [name, *arguments])
    assert (command.cluster.process_id, command.resume) == (3, True)
