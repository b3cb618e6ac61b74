"""The demo: its sums, its refusals, and once for real with tiny settings."""

import json
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest
from shells import Shell, wait_for, wait_for_end

from paceline.cli import demo as command
from paceline.cli import examples as shipped
from paceline.machines import parse_fleet
from paceline.observe import read_log


def test_figures_leave_the_first_epoch_out() -> None:
    result = command.Result(
        epochs=(0, 0, 1, 1, 2, 2), seconds=(9.0, 9.0, 1.0, 0.5, 2.0, 0.5), samples=(128, 72) * 3, accuracy=0.97
    )
    assert result.seconds_an_epoch == 2.0
    assert result.samples_per_s == 100.0


def test_a_single_epoch_counts_whole() -> None:
    result = command.Result(epochs=(0, 0), seconds=(1.0, 3.0), samples=(10, 10), accuracy=0.5)
    assert (result.seconds_an_epoch, result.samples_per_s) == (4.0, 5.0)


def test_the_limit_is_the_sum_of_the_speeds_and_equal_shares_run_at_the_slowest() -> None:
    fleet = parse_fleet("1,1,2,4", sample_ms=4.0)
    assert command.limit(fleet, 0) == pytest.approx(2.75 * 250)
    assert command.equal_speed(fleet, 0) == pytest.approx(250)


def test_the_part_of_the_limit_follows_machines_that_change() -> None:
    fleet = parse_fleet("1,1@1:3", sample_ms=1.0)  # 2,000 samples/s in step 0, then 1,333
    result = command.Result(epochs=(0, 0), seconds=(2.0, 3.0), samples=(2000, 2000), accuracy=0.0)
    assert result.of_limit(fleet) == pytest.approx((1.0 + 1.5) / 5.0)


def test_without_scikit_learn_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'paceline\[demo\]'"):
        command.examples()


def test_without_its_examples_the_demo_says_where_it_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "lib" / "site" / "paceline" / "cli" / "shipped.py"))
    with pytest.raises(ValueError, match="not there"):
        command.examples()
    inside = tmp_path / "lib" / "site" / "paceline" / "examples"
    inside.mkdir(parents=True)
    for name in ("digits.py", "plain_ddp.py"):
        (inside / name).touch()
    assert command.examples() == inside


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--emulate", "1,x"], "emulated machine 2 ('x')"),
        (["--sample-ms", "0"], "sample_ms is 0"),
        (["--output-dir", "file/runs"], "cannot make a run folder"),
    ],
)
def test_a_wrong_request_is_one_line(shell: Shell, args: list[str], part: str) -> None:
    (shell.folder / "file").touch()
    done = shell.run("demo", *args)
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: demo: ")
    assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_plotly_the_demo_says_how_to_get_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "run", "name": "demo"}\n')
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    said = command.report_lines(tmp_path)
    assert said.startswith("No pictures: the page is drawn by Plotly")
    assert said.endswith(f"pip install 'paceline[view]'. Then: paceline report {tmp_path} --html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.fleet
def test_the_demo_trains_twice_and_compares(shell: Shell) -> None:
    process = shell.start("demo", "--emulate", "1,3", "--epochs", "2", "--sample-ms", "0.6")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (folder,) = (shell.folder / "runs").iterdir()
    log, plain = read_log(folder), json.loads((folder / "ddp.json").read_text())
    assert sum(record.total for record in log.records) == 2 * 1437
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert float(rows["plain torch DDP"][3]) == pytest.approx(sum(plain["seconds"][12:]), abs=0.006)
    assert float(rows["Paceline"][1]) == pytest.approx(sum(r.wall_s for r in log.records[12:]), abs=0.006)
    assert median(r.wall_s for r in log.records[12:]) < 1.5 * median(
        plain["seconds"][12:]
    )  # here, with others beside it
    assert rows["plain torch DDP"][-1] == f"{plain['accuracy']:.1%}"
    assert f"test accuracy {rows['Paceline'][-1]}" in out.split("plain torch DDP")[-2], "what the script printed last"
    assert re.search(r"of what these 2 machines.* can do together", err)
    assert f"paceline report runs/{folder.name}" in out
    assert out.splitlines()[-1] == f"runs/{folder.name}/report.html"
    assert re.search(r"of what these 2 machines.* can do together", (folder / "report.html").read_text())


@pytest.mark.fleet
def test_ctrl_c_ends_the_demo_and_leaves_nothing_running(shell: Shell) -> None:
    process = shell.start("demo", "--epochs", "50", PARTIAL_S="30")
    wait_for(lambda: len(children(process.pid)) >= 5, 60)  # four workers and the guard
    started = children(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Both" not in out
    wait_for_end(started)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # this thread has ended
            found += map(int, path.read_text().split())
    return found
