"""The scripts and manifests for clusters: run, or checked, as far as can be without the cluster."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import paceline

ROOT = Path(__file__).parents[2]
SLURM, KUBERNETES = ROOT / "examples" / "slurm", ROOT / "examples" / "kubernetes"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >> srun-options; shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) "$@" & tasks+=($!)
done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
"""What Slurm's own does, on one computer: so many tasks, each told its number."""
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames $SLURM_JOB_NODELIST" ]] && printf '127.0.0.1\\nanother-node\\n'
"""
TELL = """
import json, os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PACELINE_RUN_DIR")
with open(f"told-{os.environ['RANK']}", "w") as file:
    json.dump({name: os.environ[name] for name in names}, file)
"""


class Cluster:
    """A folder with Slurm's commands, and the variables of a job."""

    def __init__(self, folder: Path, job: int) -> None:
        self.folder = folder
        self._commands = folder / "bin"
        self._commands.mkdir()
        self.command("srun", SRUN)
        self.command("scontrol", SCONTROL)
        self.command("python", f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
        self.command("paceline", f'#!/bin/bash\nexec "{sys.executable}" -m paceline.cli "$@"\n')
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "SLURM_"))}
        self.environment = {
            **own,
            "PATH": f"{self._commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(paceline.__file__).parents[1]),
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NODELIST": "node[1-2]",
        }

    def command(self, name: str, text: str) -> None:
        (self._commands / name).write_text(text)
        (self._commands / name).chmod(0o755)

    def start(self, *command: str | Path, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.environment, **more},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, job=os.getpid() * 31 % 1_000_000)


@pytest.mark.parametrize("script", sorted(SLURM.glob("*.sbatch")), ids=lambda path: path.stem)
def test_the_options_for_slurm_come_first_and_let_a_job_leave_and_return(script: Path) -> None:
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(asked) < first, "Slurm reads no options behind the first command"
    assert {"#SBATCH --requeue", "#SBATCH --signal=TERM@120"} <= {*lines}


def test_a_fixed_fleet_takes_its_ranks_from_slurm(cluster: Cluster) -> None:
    (cluster.folder / "train.py").write_text(TELL)
    job = cluster.start("bash", SLURM / "fixed.sbatch", "train.py", "--lr", "0.1", SLURM_NTASKS="4")
    assert job.wait(60) == 0, job.communicate()[0]
    told = [json.loads((cluster.folder / f"told-{rank}").read_text()) for rank in range(4)]
    assert [one["RANK"] for one in told] == ["0", "1", "2", "3"]
    assert [one["LOCAL_RANK"] for one in told] == ["0", "1", "0", "1"]
    assert {one["WORLD_SIZE"] for one in told} == {"4"}
    assert {one["MASTER_ADDR"] for one in told} == {"127.0.0.1"}, "the first node's"
    assert 20000 <= int(told[0]["MASTER_PORT"]) < 30000
    assert len({(one["MASTER_PORT"], one["PACELINE_RUN_DIR"]) for one in told}) == 1


def all_four(text: str) -> bool:
    """Whether all have trained together, in whatever order they came."""
    return any(sorted(json.loads(found)) == [0, 1, 2, 3] for found in re.findall(r'"workers": (\[[\d, ]*\])', text))


@pytest.mark.fleet
def test_the_launchers_of_a_slurm_job_join_the_roster_on_its_first_node(cluster: Cluster) -> None:
    shutil.copy(ROOT / "tests" / "launcher" / "roster_worker.py", cluster.folder / "train.py")
    log = cluster.folder / "log.jsonl"
    settings = {"SLURM_NTASKS": "2", "WORKERS": "2", "ADDRESS": "127.0.0.1", "STEPS": "100000", "LOG": str(log)}
    job = cluster.start("bash", SLURM / "elastic.sbatch", "train.py", **settings)
    try:
        until = time.monotonic() + 120
        while not log.exists() or not all_four(log.read_text()):
            assert job.poll() is None, job.communicate()[0]
            assert time.monotonic() < until, log.read_text()[-2000:] if log.exists() else "nobody has begun"
            time.sleep(0.1)
        (cluster.folder / "stop").touch()
        out, _ = job.communicate(timeout=60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert job.returncode == 0, out
    assert "the training has finished" in out
    options = {*(cluster.folder / "srun-options").read_text().split()}
    assert options == {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"}
    [folder] = (cluster.folder / "runs").iterdir()
    assert {"token", "roster.json", "roster.json.pem"} <= {file.name for file in folder.iterdir()}


# -- Kubernetes ------------------------------------------------------------------------------------------------------

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGT]|[KMGT]i)?")
LABELS: dict[str, Any] = {"*": NAME}
ENTRY = {
    "name!": re.compile("[A-Z_][A-Z0-9_]*"),
    "value": str,
    "valueFrom": {"secretKeyRef!": {"name!": NAME, "key!": str}},
}
RESOURCES = {"requests": {"*": QUANTITY}, "limits": {"*": QUANTITY}}
CONTAINER = {
    "name!": NAME,
    "image!": str,
    "workingDir": str,
    "command": [str],
    "args": [str],
    "env": [ENTRY],
    "ports": [{"name": NAME, "containerPort!": int}],
    "resources": RESOURCES,
    "volumeMounts": [{"name!": NAME, "mountPath!": str}],
}
VOLUME = {"name!": NAME, "emptyDir": {"medium": str, "sizeLimit": QUANTITY}}
POD = {"terminationGracePeriodSeconds": int, "containers!": [CONTAINER], "volumes": [VOLUME]}
SELECTOR = {"matchLabels!": LABELS}
SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("v1", "Service"): {
        "clusterIP": str,
        "publishNotReadyAddresses": bool,
        "selector!": LABELS,
        "ports!": [{"name": NAME, "port!": int, "targetPort": int}],
    },
    ("apps/v1", "Deployment"): {
        "replicas": int,
        "strategy": {"type!": re.compile("Recreate|RollingUpdate")},
        "selector!": SELECTOR,
        "template!": {"metadata!": {"labels!": LABELS}, "spec!": POD},
    },
    ("networking.k8s.io/v1", "NetworkPolicy"): {
        "podSelector!": {"matchLabels": LABELS},
        "policyTypes": [re.compile("Ingress|Egress")],
        "ingress": [{"from": [{"podSelector": {"matchLabels": LABELS}}]}],
    },
}
"""The fields that the manifests use, as Kubernetes' API describes them; ``!``: it must be there."""


def faults(value: Any, schema: Any, where: str) -> Iterator[str]:
    """What does not fit the schema."""
    if isinstance(schema, re.Pattern):
        if not isinstance(value, str) or not schema.fullmatch(value):
            yield f"{where} is {value!r}"
    elif isinstance(schema, list):
        if not isinstance(value, list) or not value:
            yield f"{where} is no list"
        else:
            for number, one in enumerate(value):
                yield from faults(one, schema[0], f"{where}[{number}]")
    elif isinstance(schema, Mapping):
        yield from _faults_of_fields(value, schema, where)
    elif type(value) is not schema:
        yield f"{where} is {value!r}"


def _faults_of_fields(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where} has no fields"
        return
    fields = {name.removesuffix("!"): name for name in schema}
    yield from (f"{where}.{name} is missing" for name in fields if name + "!" in schema and name not in value)
    for name, one in value.items():
        if name not in fields and "*" not in schema:
            yield f"{where}.{name} is unknown"
        else:
            yield from faults(one, schema[fields.get(name, "*")], f"{where}.{name}")


def manifests(path: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not here to read the manifest with")
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(kind: str, role: str) -> dict[str, Any]:
    found = [one for one in manifests(KUBERNETES / "elastic.yaml") if one["kind"] == kind]
    return next(one for one in found if one["metadata"]["name"] == f"paceline-{role}")


def script_of(role: str) -> str:
    [container] = of_kind("Deployment", role)["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    return str(container["args"][0])


def test_the_manifest_holds_what_kubernetes_knows_and_needs() -> None:
    for one in manifests(KUBERNETES / "elastic.yaml"):
        spec = SPECS[one["apiVersion"], one["kind"]]
        schema = {"apiVersion!": str, "kind!": str, "metadata!": {"name!": NAME}, "spec!": spec}
        assert not list(faults(one, schema, one["kind"]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"replica": 3}, "spec.replica is unknown"),
        ({"replicas": "3"}, "spec.replicas is '3'"),
        ({"selector": {}}, "spec.selector.matchLabels is missing"),
        ({"strategy": {"type": "Sometimes"}}, "spec.strategy.type is 'Sometimes'"),
    ],
)
def test_the_check_finds_what_kubernetes_would_refuse(change: dict[str, Any], said: str) -> None:
    spec = {**of_kind("Deployment", "worker")["spec"], **change}
    assert list(faults(spec, SPECS["apps/v1", "Deployment"], "spec")) == [said]


def test_the_parts_of_the_manifest_fit_each_other() -> None:
    service = of_kind("Service", "roster")["spec"]
    port = service["ports"][0]["port"]
    for role in ("roster", "worker"):
        spec = of_kind("Deployment", role)["spec"]
        labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert (service["selector"].items() <= labels.items()) == (role == "roster")
        [container] = pod["containers"]
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
        [token] = container["env"]
        assert (token["name"], token["valueFrom"]["secretKeyRef"]["name"]) == ("PACELINE_TOKEN", "paceline")
    assert service["clusterIP"] == "None", "the store's port is the system's choice, so no port can be mapped"
    assert f"--port {port} " in script_of("roster")
    assert f"--join paceline-roster:{port} " in script_of("worker")
    policies = [one["spec"] for one in manifests(KUBERNETES / "elastic.yaml") if one["kind"] == "NetworkPolicy"]
    assert [one["podSelector"]["matchLabels"] for one in policies] == [{"app": "paceline"}]


@pytest.mark.parametrize("role", ["roster", "worker"])
def test_the_command_of_a_pod_is_one_of_ours(role: str) -> None:
    from typer.testing import CliRunner

    from paceline.cli import app

    [line] = [line for line in script_of(role).splitlines() if line.startswith("paceline ")]
    words = line.partition(" & ")[0].split()[1:]
    options = [word for word in words if word.startswith("--")]
    told = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert all(option in told for option in options)


@pytest.mark.parametrize("role", ["roster", "worker"])
def test_a_pod_that_is_asked_to_leave_passes_that_on_and_one_that_has_finished_sleeps(
    role: str, cluster: Cluster
) -> None:
    leaves = "#!/bin/bash\ntrap 'touch left; exit 143' TERM\ntouch here\nwhile :; do sleep 0.05; done\n"
    for stub, file, code in ((leaves, "left", 143), ("#!/bin/bash\ntouch here\n", "", None)):
        cluster.command("paceline", stub)
        (cluster.folder / "here").unlink(missing_ok=True)
        pod = cluster.start("bash", "-c", script_of(role))
        until = time.monotonic() + 30
        while not (cluster.folder / "here").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        if file:
            pod.send_signal(signal.SIGTERM)
            assert pod.wait(30) == code
            assert (cluster.folder / file).exists()
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                pod.wait(0.5)
            pod.send_signal(signal.SIGTERM)
            pod.wait(30)
