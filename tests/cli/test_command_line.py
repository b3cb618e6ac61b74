"""The command itself: quick help, and one-line errors before anything is started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shells import Shell
from typer.testing import CliRunner

from paceline.cli import app


def test_help_and_wrong_options_need_no_torch(shell: Shell) -> None:
    probe = "import sys\nfrom paceline.cli import app\ntry: app(['run', '--help'])\nexcept SystemExit: pass\n"
    probe += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], env=shell.environment({}), capture_output=True, text=True)
    assert "--emulate" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_the_version_is_printed(shell: Shell) -> None:
    done = shell.run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("paceline ")


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["missing.py"], "'missing.py' does not exist"),
        (["."], "'.' is not a file"),
        (["-m", "no_such_module_here.train"], "no module named 'no_such_module_here.train'"),
        (["-n", "0", "train.py"], "a whole number from 1"),
        (["-n", "many", "train.py"], "a whole number from 1, not 'many'"),
        (["-n", "8:2", "train.py"], "write 2:8"),
        (["-n", "0:3", "train.py"], "write 1:3"),
        (["-n", "2:4", "--failures", "kill@3", "train.py"], "write it as kill:2@30"),
        (["-n", "4", "--failures", "kill:1@3", "train.py"], "only a fleet of -n MIN:MAX"),
        (["-n", "2:4", "--spot", "none.csv", "train.py"], "cannot read the spot trace none.csv"),
        (["-n", "2", "--host", "0.0.0.0", "train.py"], "--host is for fleets that others may join: give -n MIN:MAX"),
        (["-n", "1:2", "--host", "198.51.100.1", "train.py"], "not an address of this computer"),
        (["--join", "here", "--token-file", "secret", "train.py"], "--join: the roster's address is 'here'"),
        (["--join", "127.0.0.1:9", "train.py"], "set PACELINE_TOKEN, or give --token-file"),
        (["--join", "127.0.0.1:9", "--token-file", "secret", "-n", "1:2", "train.py"], "with --join give one number"),
        (["--join", "127.0.0.1:9", "--token-file", "secret", "--port", "5", "train.py"], "leave them out with --join"),
        (["--join", "127.0.0.1:9", "--token-file", "secret", "--failures", "join@3", "train.py"], "started here"),
        (["--devices", "cuda:0,,cpu", "train.py"], "--devices entry 2 is ''"),
        (["-n", "3", "--devices", "cpu,cpu", "train.py"], "3 workers, --devices names 2"),
        (["-n", "3", "--emulate", "1,2", "train.py"], "2 machines for 3 workers"),
        (["--devices", "cpu", "--emulate", "1,2", "train.py"], "2 machines for 1 workers"),
        (["--emulate", "1,x", "train.py"], "--emulate: emulated machine 2 ('x')"),
        (["--emulate", "none.csv", "train.py"], "--emulate: cannot read the trace none.csv"),
        (["--emulate", "1", "--sample-ms", "0", "train.py"], "sample_ms is 0"),
        (["--pace", "frantic", "train.py"], "--pace: "),
        (["-n", "3", "--pace", "fixed:1,2", "train.py"], "--pace: "),
        (["--combine", "blend", "train.py"], "unknown combine 'blend'; known: gradients, average, elastic-average"),
        (["--comm-dtype", "bf8", "train.py"], "--comm-dtype: unknown comm_dtype 'bf8'; known: float32, bf16"),
        (["--output-dir", "train.py/runs", "train.py"], "cannot make a run folder"),
    ],
)
def test_a_wrong_request_is_one_line_and_starts_nothing(
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    args: list[str],
    part: str,
) -> None:
    shell.script("open('started', 'w')")
    (shell.folder / "secret").write_text("12345678")
    monkeypatch.chdir(shell.folder)
    for name in [name for name in os.environ if name.startswith("PACELINE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as ended:
        app(["run", *args])
    said = capfd.readouterr().err
    assert ended.value.code == 2
    assert part in said
    assert said.startswith("paceline: ")
    assert len(said.splitlines()) == 1
    assert not (shell.folder / "started").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_one_line(shell: Shell, tmp_path: Path) -> None:
    shell.script("pass")
    (tmp_path / "shut").mkdir(mode=0o500)
    done = shell.run("run", "--output-dir", "shut", "train.py")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_the_help_of_run_fits_a_screen_and_has_its_options_in_panels() -> None:
    said = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    assert len(said.splitlines()) <= 60
    panels = [line.strip("╭─╮ ") for line in said.splitlines() if line.startswith("╭")]
    assert [panel.partition(" ")[0].rstrip(":") for panel in panels[2:]] == [
        "Workers", "Elastic", "Network", "Emulation", "On", "Output",
    ]  # fmt: skip
