"""Fleets whose workers come and go, with real processes: who is started again, what ends a run, and who may join."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from shells import Shell, alive, wait_for, wait_for_end

from ports import own_port

pytestmark = pytest.mark.fleet

WORKER = (Path(__file__).parent / "roster_worker.py").read_text()
PID = (
    "import os, sys, time, signal, subprocess\nnumber = int(os.environ['PACELINE_WORKER'])\n"
    "open(f'pid-{os.getpid()}', 'w').close()\nopen(f'lives-{number}', 'a').write(f'{os.getpid()}\\n')\n"
)
CHILD = "open(f'pid-{subprocess.Popen([\"sleep\", \"60\"]).pid}', 'w').close()\n"
NOBODY_RETURNS = {"FIRST_S": "20", "SOON_S": "60", "HOLD_S": "30", "PARTIAL_S": "30"}
"""For a launcher that hears of every failure before it starts anybody again."""


def script(shell: Shell, before: str = "", *, then: str = WORKER) -> None:
    (shell.folder / "train.py").write_text(PID + before + then)


def lives(shell: Shell, number: int) -> list[int]:
    """The processes that this worker has had so far."""
    file = shell.folder / f"lives-{number}"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def notes(text: str) -> list[str]:
    """What the launcher said, but for whom the fleet waits: a slow start is enough for that."""
    said = [line.removeprefix("paceline: ") for line in text.splitlines() if line.startswith("paceline: ")]
    return [note for note in said if not note.startswith("waiting for")]


def said_until(launcher: "subprocess.Popen[str]", last: str) -> str:
    """What is printed on stderr until this text is there; the rest can still be read."""
    assert launcher.stderr is not None
    too_late = threading.Timer(120, launcher.kill)
    too_late.start()
    said = b""
    try:
        while last.encode() not in said:
            more = os.read(launcher.stderr.fileno(), 4096)
            assert more, f"it ended after: {said.decode()}"
            said += more
    finally:
        too_late.cancel()
    return said.decode()


def entered(shell: Shell, count: int) -> None:
    """Wait until so many steps are logged."""
    wait_for(lambda: len(steps(shell)) > count, 60)


def steps(shell: Shell) -> list[dict[str, Any]]:
    """The steps that are logged so far."""
    text = "".join(log.read_text() for log in shell.folder.glob("runs/*/events.jsonl"))
    whole = text.splitlines()[: text.count("\n")]
    return [json.loads(line) for line in whole if '"event": "step"' in line]


def end(shell: Shell) -> tuple[str, str]:
    """How the run ended, by its log."""
    last = json.loads(next(shell.folder.glob("runs/*/events.jsonl")).read_text().splitlines()[-1])
    return last.get("reason", last["event"]), last.get("text", "")


def finish(shell: Shell, launcher: "subprocess.Popen[str]") -> tuple[str, str]:
    """Have the training end; what was printed."""
    (shell.folder / "stop").touch()
    return launcher.communicate(timeout=30)


def test_every_worker_learns_where_the_roster_is_and_lists_begin_again(shell: Shell) -> None:
    script(
        shell,
        "import json\nkeys = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'OMP_NUM_THREADS']\n"
        "own = {k: v for k, v in os.environ.items() if k.startswith('PACELINE_') or k in keys}\n"
        "json.dump([own, sys.argv[1:]], open(f'said-{number}', 'w'))\n",
    )
    launcher = shell.start(
        "run", "-n", "1:4", "--devices", "cpu,cpu:0", "--emulate", "1,2", "--failures", "join@5,lost:0.1", "train.py",
        "--lr", "0.1", RANK="7", MASTER_ADDR="elsewhere", STEPS="100000",
    )  # fmt: skip
    entered(shell, 5)
    wait_for(lambda: len(steps(shell)[-1]["workers"]) == 3, 60)
    _, err = finish(shell, launcher)
    assert launcher.returncode == 0, err
    said = [json.loads((shell.folder / f"said-{number}").read_text()) for number in range(3)]
    assert [args for _, args in said] == [["--lr", "0.1"]] * 3
    assert [own["PACELINE_DEVICE"] for own, _ in said] == ["cpu", "cpu:0", "cpu"]
    assert [own["PACELINE_WORKER"] for own, _ in said] == ["0", "1", "2"]
    assert len({own["PACELINE_ROSTER"] for own, _ in said}) == len({own["PACELINE_TOKEN"] for own, _ in said}) == 1
    for own, _ in said:
        assert re.fullmatch(r"127\.0\.0\.1:\d+#[0-9a-f]{64}", own["PACELINE_ROSTER"])
        assert own["PACELINE_LAUNCHER"] == str(launcher.pid)
        assert (own["PACELINE_FAILURES"], own["OMP_NUM_THREADS"]) == ("lost:0.1", "1")
        assert not own.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


def test_a_killed_worker_is_started_again_and_the_run_ends_well(shell: Shell) -> None:
    script(shell)
    launcher = shell.start("run", "-n", "2:3", "train.py", STEPS="100000")
    entered(shell, 10)
    before = steps(shell)[-1]["generation"]
    os.kill(lives(shell, 1)[0], signal.SIGKILL)
    wait_for(lambda: len(lives(shell, 1)) == 2, 60)
    wait_for(lambda: steps(shell)[-1]["generation"] > before and len(steps(shell)[-1]["workers"]) == 3, 60)
    number = next(step["generation"] for step in reversed(steps(shell)) if len(step["workers"]) == 3)
    out, err = finish(shell, launcher)
    assert launcher.returncode == 0, err
    assert "worker 1 was killed by signal 9 (SIGKILL); it is started again" in notes(err)
    assert [len(lives(shell, number)) for number in range(3)] == [1, 2, 1]
    assert out.count(f"generation {number} ") == 3  # the returned one and both others are in one again
    wait_for_end(shell.pids(4))


def test_events_at_steps_strike_real_processes(shell: Shell) -> None:
    script(shell)
    launcher = shell.start(
        "run", "-n", "1:4", "--emulate", "1,1,2",
        "--failures", "kill:1@20,join@40,join@41,leave:2@60,freeze:0@80:300ms", "train.py", STEPS="100000",
    )  # fmt: skip
    said = said_until(launcher, "freeze:0@80")
    wait_for(lambda: [len(lives(shell, number)) for number in range(4)] == [1, 2, 1, 1], 60)
    _, err = finish(shell, launcher)
    assert launcher.returncode == 0, err
    assert notes(said + err)[1:] == [
        "kill:1@20: worker 1 is killed",
        "join@40: worker 3 is started",
        "join@41: skipped, the fleet is full",
        "leave:2@60: worker 2 is asked to leave",
        "freeze:0@80:300ms: worker 0 stands still for 0.3 s",
    ]


def test_a_worker_that_is_killed_to_stay_away_stays_away(shell: Shell) -> None:
    script(shell)
    done = shell.run("run", "-n", "1:2", "--failures", "kill:1@10:stay", "train.py", STEPS="120")
    assert done.returncode == 0, done.stderr
    assert [len(lives(shell, number)) for number in range(2)] == [1, 1]


def test_when_nobody_is_left_and_nobody_returns_the_run_ends_with_an_error(shell: Shell) -> None:
    script(shell)
    done = shell.run("run", "-q", "-n", "1:1", "--failures", "kill:0@10:stay", "train.py", STEPS="1000")
    assert done.returncode == 137
    assert done.stderr.startswith("paceline: no worker is left and none returns. Nothing was saved")
    assert len(done.stderr.splitlines()) == 1


def test_a_script_that_crashes_everywhere_ends_the_run_with_one_traceback_and_its_code(shell: Shell) -> None:
    script(shell, then="raise ValueError('no such thing')")
    done = shell.run("run", "-n", "2:4", "train.py", **NOBODY_RETURNS)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: no such thing") == 1
    assert notes(done.stderr)[-1] == "every worker failed the same way: the run was ended."
    assert not (shell.folder / "runs").exists()


def test_a_worker_that_crashes_three_times_before_it_was_in_the_fleet_ends_the_run(shell: Shell) -> None:
    script(
        shell,
        "if number == 1:\n"
        "    while not (os.path.exists('lives-0') and os.path.exists('lives-2')): time.sleep(0.01)\n"
        "    print('no', 'device', file=sys.stderr)\n    sys.exit(3)\n",
    )
    done = shell.run("run", "-n", "1:3", "train.py", STEPS="100000")
    assert done.returncode == 3
    assert notes(done.stderr)[-1].startswith("worker 1 failed 3 times without ever being in the fleet: the run was")
    assert len(lives(shell, 1)) == 3
    wait_for_end(shell.pids(5))


def test_a_crash_after_it_was_in_the_fleet_is_shown_and_the_worker_returns(shell: Shell) -> None:
    crash = "    if number == 1 and len(open('lives-1').read().split()) == 1: raise OSError('disk')\n"
    broken = WORKER.replace("    while (step :=", crash + "    while (step :=")
    script(shell, then=broken)
    launcher = shell.start("run", "-n", "1:2", "train.py", STEPS="100000")
    wait_for(lambda: len(lives(shell, 1)) == 2, 60)
    _, err = finish(shell, launcher)
    assert launcher.returncode == 0, err
    assert err.count("[1] OSError: disk") == 1
    assert "worker 1 ended with exit code 1; it is started again" in notes(err)
    assert [len(lives(shell, number)) for number in range(2)] == [1, 2]


def test_a_script_that_crashes_everywhere_in_mid_training_ends_the_run_too(shell: Shell) -> None:
    script(shell, then=WORKER.replace("        if leaving:", "        assert step < 10, 'at ten'\n        if leaving:"))
    done = shell.run("run", "-n", "1:3", "train.py", STEPS="100000", **NOBODY_RETURNS)
    assert done.returncode == 1
    assert done.stderr.count("AssertionError: at ten") == 1
    assert notes(done.stderr)[-1].startswith("every worker failed the same way: the run was ended.")
    assert "started again" not in done.stderr, "nobody was"
    reason, text = end(shell)
    assert reason == "error"
    assert re.fullmatch(r"worker \d ended with exit code 1: AssertionError: at ten", text)


def test_below_the_minimum_the_launcher_says_for_whom_the_fleet_waits(shell: Shell) -> None:
    script(shell)
    launcher = shell.start("run", "-n", "2:2", "--failures", "kill:1@10:stay", "train.py", STEPS="100000")
    said_until(launcher, "paceline: waiting for")
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 130


def test_a_worker_that_ends_well_before_the_others_is_not_started_again(shell: Shell) -> None:
    script(shell, "if number == 1: sys.exit(0)\n")
    done = shell.run("run", "-n", "1:2", "train.py", STEPS="60")
    assert done.returncode == 0, done.stderr
    assert len(lives(shell, 1)) == 1
    assert len(notes(done.stderr)) == 1


def test_a_crash_after_the_trainings_end_is_not_hidden(shell: Shell) -> None:
    script(shell, then=WORKER + "\nif number == 0: raise KeyError('metrics')\n")
    done = shell.run("run", "-n", "1:2", "train.py")
    assert done.returncode == 1
    assert done.stderr.count("KeyError: 'metrics'") == 1
    assert len(lives(shell, 0)) == 1


def test_a_script_that_joins_no_fleet_just_runs(shell: Shell) -> None:
    script(shell, then="sys.stdout.write(f'alone {number}\\n')")
    done = shell.run("run", "-q", "-n", "1:2", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[1] alone 1", "alone 0"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_all_quietly(shell: Shell, number: int, code: int) -> None:
    script(shell, CHILD)
    launcher = shell.start("run", "-n", "1:2", "train.py", STEPS="100000", LEAVE_S="60", PARTIAL_S="30")
    pids = shell.pids(4)
    entered(shell, 5)
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == code, err
    assert "Traceback" not in err
    assert [len(lives(shell, worker)) for worker in range(2)] == [1, 1]
    wait_for_end(pids)
    assert end(shell) == ("interrupted", "")


def test_workers_leave_by_themselves_when_the_launcher_is_asked_to_end(shell: Shell) -> None:
    marked = "            open(f'left-{number}', 'w')\n            sys.exit(143)"
    script(shell, then=WORKER.replace("            sys.exit(143)", marked))
    launcher = shell.start("run", "-n", "1:2", "train.py", STEPS="100000", LEAVE_S="60")
    entered(shell, 5)
    launcher.terminate()
    launcher.communicate(timeout=30)
    assert launcher.returncode == 143
    assert len(list(shell.folder.glob("left-*"))) == 2


def test_killing_the_launcher_leaves_nothing_running_not_even_the_restarted(shell: Shell) -> None:
    script(shell, CHILD)
    launcher = shell.start("run", "-n", "1:2", "train.py", STEPS="100000")
    shell.pids(4)
    os.kill(lives(shell, 1)[0], signal.SIGKILL)
    pids = shell.pids(6)
    launcher.kill()
    wait_for_end(pids)


def test_a_frozen_worker_does_not_hold_up_the_end(shell: Shell) -> None:
    script(shell)
    freeze = ["--failures", "freeze:1@5:120s"]
    launcher = shell.start("run", "-n", "1:2", *freeze, "train.py", STEPS="100000", LEAVE_S="60")
    said_until(launcher, "freeze:1@5")
    launcher.terminate()
    launcher.communicate(timeout=30)
    assert launcher.returncode == 143
    wait_for_end(shell.pids(2))


def invited(launcher: "subprocess.Popen[str]") -> tuple[str, str]:
    """Address and token, as the launcher's first line gives them."""
    assert launcher.stderr is not None
    line = launcher.stderr.readline()
    found = re.search(r"PACELINE_TOKEN=(\S+) paceline run --join (\S+) train.py", line)
    assert found is not None, line
    return found[2], found[1]


def test_another_launcher_joins_with_the_printed_line_under_numbers_of_its_own(shell: Shell) -> None:
    script(shell)
    first = shell.start("run", "-n", "2:4", "--emulate", "1,1", "train.py", STEPS="100000")
    address, token = invited(first)
    entered(shell, 5)
    log = str(next(shell.folder.glob("runs/*/events.jsonl")))
    joining = ["run", "--join", address, "-n", "2", "train.py"]
    second = shell.start(*joining, STEPS="100000", LOG=log, PACELINE_TOKEN=token)
    wait_for(lambda: any(len(step["workers"]) == 4 for step in steps(shell)), 60)
    _, err = finish(shell, second)
    assert second.returncode == 0, err
    out, err = first.communicate(timeout=30)
    assert first.returncode == 0, err
    assert [len(lives(shell, number)) for number in range(4)] == [1, 1, 1, 1]
    assert any(len(line.split()) == 6 for line in out.splitlines() if line.startswith("generation")), out


def test_the_roster_stays_for_those_who_joined_when_all_workers_here_have_gone(shell: Shell) -> None:
    script(shell)
    first = shell.start("run", "-n", "1:3", "--emulate", "1", "train.py", STEPS="100000")
    address, token = invited(first)
    entered(shell, 5)
    log = str(next(shell.folder.glob("runs/*/events.jsonl")))
    second = shell.start("run", "--join", address, "train.py", STEPS="100000", LOG=log, PACELINE_TOKEN=token)
    wait_for(lambda: len(steps(shell)[-1]["workers"]) == 2, 60)
    os.kill(lives(shell, 0)[0], signal.SIGTERM)
    wait_for(lambda: steps(shell)[-1]["workers"] == [1])
    wait_for(lambda: not alive(lives(shell, 0)[0]))
    time.sleep(1.0)  # long enough for a launcher that would not stay
    assert first.poll() is None
    _, err = finish(shell, second)
    assert second.returncode == 0, err
    _, err = first.communicate(timeout=30)
    assert first.returncode == 0, err
    assert "worker 0 left; it is not started again" in notes(err)


def test_a_wrong_token_is_refused_in_one_line_and_the_fleet_goes_on(shell: Shell) -> None:
    script(shell, "sys.excepthook = lambda kind, e, t: (print('paceline:', e, file=sys.stderr), os._exit(75))\n")
    first = shell.start("run", "-n", "1:4", "--emulate", "1", "train.py", STEPS="100000")
    address, _ = invited(first)
    entered(shell, 5)
    done = shell.run("run", "--join", address, "train.py", PACELINE_TOKEN="not-this-one")
    assert done.returncode == 75
    assert "does not know this run's token" in done.stderr
    _, err = finish(shell, first)
    assert first.returncode == 0, err


def test_a_roster_by_itself_serves_a_fleet_outlives_its_own_restart_and_ends_with_the_training(shell: Shell) -> None:
    script(shell)
    port = str(own_port())
    host = ["host", "--min", "2", "--max", "4", "--port", port, "--token-file", "token", "--state", "roster.json"]
    roster = shell.start(*host)
    assert roster.stderr is not None
    assert f"roster at 127.0.0.1:{port} for 2 to 4 workers" in roster.stderr.readline()
    with_launcher, by_other_means = roster.stderr.readline(), roster.stderr.readline()
    assert 'PACELINE_TOKEN="$(cat token)" paceline run --join' in with_launcher
    assert (shell.folder / "token").read_text().strip() not in with_launcher + by_other_means
    address = re.search(r"--join (\S+) ", with_launcher)
    assert address is not None
    assert re.fullmatch(rf"127\.0\.0\.1:{port}#[0-9a-f]{{64}}", address[1])
    assert f"PACELINE_ROSTER={address[1]} " in by_other_means
    launcher = shell.start("run", "--join", address[1], "--token-file", "token", "-n", "2", "train.py",
                           STEPS="100000")  # fmt: skip
    entered(shell, 20)
    roster.send_signal(signal.SIGINT)
    assert roster.wait(timeout=30) == 0
    again = shell.start(*host)
    wait_for(lambda: steps(shell)[-1]["generation"] >= 2, 60)
    _, err = finish(shell, launcher)
    assert launcher.returncode == 0, err
    _, said = again.communicate(timeout=30)
    assert again.returncode == 0, said
    assert "generation 2: workers" in said
    assert "the training has finished" in said
    for secret in ("token", "roster.json.pem"):
        assert (shell.folder / secret).stat().st_mode & 0o777 == 0o600


def test_a_spot_trace_does_not_keep_a_script_that_joins_no_fleet(shell: Shell) -> None:
    script(shell, then="")
    (shell.folder / "spot.csv").write_text("0,add,a\n900000000,add,b\n")
    done = shell.run("run", "-q", "-n", "1:2", "--spot", "spot.csv", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(lives(shell, 0)) == 1


def test_a_spot_trace_is_played_to_its_end(shell: Shell) -> None:
    script(shell)
    (shell.folder / "spot.csv").write_text(
        "0,add,a\n0,add,b\n0,add,c\n600000,remove,a\n700000,remove,b\n800000,add,d\n"
    )
    began = time.monotonic()
    spot = ["--spot", "spot.csv", "--speed-up", "300", "--spot-notice", "1s"]
    launcher = shell.start("run", "-n", "1:2", *spot, "train.py", STEPS="100000")
    heard = said_until(launcher, "spot: d comes as worker")
    assert time.monotonic() - began > 800 / 300
    _, err = finish(shell, launcher)
    assert launcher.returncode == 0, err
    said = [note for note in notes(heard + err) if note.startswith("spot: ")]
    assert {"spot: a comes as worker 0", "spot: b comes as worker 1"} < {*said}
    assert "spot: c and further nodes wait until there is room" in said
    assert "spot: a is reclaimed, worker 0 goes" in said
    assert "spot: c comes as worker 0" in said
    assert sum("spared" in note for note in said) >= 1
    wait_for_end(shell.pids(2))
