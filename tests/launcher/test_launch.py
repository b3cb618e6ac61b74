"""The launcher with real workers: what it passes on, how it fails, and that it leaves nothing behind."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
import urllib.request
from contextlib import suppress

import pytest
from shells import Shell, wait_for, wait_for_end

pytestmark = pytest.mark.fleet

PID = "open(f'pid-{os.getpid()}', 'w').close()\n"
CHILD = "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\nopen(f'pid-{child.pid}', 'w').close()\n"
STORE = """
from torch.distributed import TCPStore
store = TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)
"""
UNHURRIED = {"HOLD_S": "30", "PARTIAL_S": "30", "GRACE_S": "30"}
"""For a launcher that hears its workers out, however slowly a busy computer lets them speak and end."""


def test_every_worker_gets_its_place_and_the_arguments_untouched(shell: Shell) -> None:
    shell.script(
        "import json\nkeys = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'OMP_NUM_THREADS',"
        "'TORCHELASTIC_USE_AGENT_STORE']\n"
        "own = {k: v for k, v in os.environ.items() if k.startswith('PACELINE_') or k in keys}\n"
        "json.dump([own, sys.argv[1:]], open(f'said-{rank}', 'w'))"
    )
    done = shell.run(
        "run", "--devices", "cpu,cpu", "--emulate", "1,2", "--sample-ms", "3", "--name", "try", "--seed", "5",
        "train.py", "--lr", "0.1", "-n", "7", "--", "--emulate",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for rank in range(2):
        own, args = json.loads((shell.folder / f"said-{rank}").read_text())
        assert args == ["--lr", "0.1", "-n", "7", "--", "--emulate"]
        assert re.fullmatch(r".*/runs/[0-9]{8}-[0-9]{6}-try", own.pop("PACELINE_RUN_DIR"))
        assert own.pop("PACELINE_LAUNCHER").isdigit()
        assert own == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
            "PACELINE_NAME": "try", "PACELINE_DEVICE": "cpu", "PACELINE_EMULATE": "1,2",
            "PACELINE_SAMPLE_MS": "3", "PACELINE_SEED": "5",
        }  # fmt: skip
    assert not (shell.folder / "runs").exists()  # nobody joined a fleet


def test_worker_0_prints_as_if_alone_and_a_module_can_be_run(shell: Shell) -> None:
    shell.script("sys.stdout.write(f'out {rank}\\n')\nsys.stderr.write(f'err {rank}\\n')", name="module.py")
    done = shell.run("run", "-n", "2", "-m", "module", OMP_NUM_THREADS="3")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[1] out 1", "out 0"]
    assert sorted(done.stderr.splitlines()) == ["[1] err 1", "err 0"]


def test_workers_meet_through_the_launchers_store_and_reduce(shell: Shell) -> None:
    shell.script(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nt = torch.tensor([rank + 1.0])\n"
        "dist.all_reduce(t)\nsys.stdout.write(f'{t.item()}\\n')\ndist.destroy_process_group()"
    )
    done = shell.run("run", "-n", "2", "train.py")
    own = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]  # torch 2.9 and 2.10 print such lines
    assert sorted(own) == ["3.0", "[1] 3.0"]
    assert done.returncode == 0


def test_a_script_that_raises_everywhere_shows_its_traceback_once_and_keeps_its_code(shell: Shell) -> None:
    shell.script("def f():\n    raise ValueError('no such thing')\nf()")
    done = shell.run("run", "-n", "3", "train.py", **UNHURRIED)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ValueError: no such thing") == 1
    assert re.search(r"\(workers \d and \d failed the same way\)", done.stderr)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(", "SyntaxError"),
        ("import argparse\nargparse.ArgumentParser().parse_args()", "unrecognized arguments: --wrong"),
    ],
)
def test_errors_without_a_traceback_are_shown_once_as_well(shell: Shell, text: str, said: str) -> None:
    shell.script(text)
    done = shell.run("run", "-n", "2", "train.py", "--wrong", **UNHURRIED)
    assert done.returncode in (1, 2)
    assert done.stderr.count(said) == 1
    assert "failed the same way" in done.stderr


def test_one_worker_that_raises_stops_the_others_which_learn_its_name(shell: Shell) -> None:
    shell.script(
        PID + "if rank == 2:\n    " + "time.sleep(0.3)\n    sys.exit(3)\n" + STORE + "store.get('paceline/died/2')\n"
        "sys.stderr.write(f'paceline: worker 2 {store.get(\"paceline/died/2\").decode()}\\n')\nsys.exit(75)"
    )
    done = shell.run("run", "-n", "4", "train.py")
    assert done.returncode == 3
    assert done.stderr.splitlines() == ["paceline: worker 2 ended with exit code 3; the other 3 were stopped."]
    wait_for_end(shell.pids(4))


def test_a_failure_that_only_the_fleet_knows_is_told_once(shell: Shell) -> None:
    shell.script("sys.stderr.write('paceline: worker 1 went silent\\n')\nsys.exit(75)")
    done = shell.run("run", "-n", "3", "train.py", **UNHURRIED)
    assert (done.returncode, done.stderr.count("worker 1 went silent")) == (75, 1)
    assert len(done.stderr.splitlines()) == 1


def test_words_of_a_worker_that_takes_long_to_end_are_not_repeated_for_one_that_ends_at_once(shell: Shell) -> None:
    shell.script(
        "slow = rank == 2\ntime.sleep(0.0 if slow else 2.6)\n"
        "sys.stderr.write('Traceback (most recent call last):\\nOSError: disk\\n')\n"
        "sys.stderr.flush()\ntime.sleep(4.5 if slow else 0.0)\nsys.exit(1)"
    )
    done = shell.run("run", "-n", "3", "train.py")
    assert (done.returncode, done.stderr.count("OSError: disk")) == (1, 1)


def test_the_traceback_of_a_worker_that_ends_more_slowly_than_those_it_failed_is_the_one_to_see(shell: Shell) -> None:
    shell.script(
        "import atexit\nif rank == 1:\n    atexit.register(time.sleep, 1.2)\n    raise KeyError('oops')\n"
        "time.sleep(0.3)\nsys.stderr.write('paceline: worker 1 ended with KeyError\\n')\nsys.exit(75)"
    )
    done = shell.run("run", "-n", "3", "train.py", **UNHURRIED)
    assert done.returncode == 1
    assert done.stderr.count("KeyError: 'oops'") == 1
    assert done.stderr.count("Traceback") == 1
    assert "paceline: worker 1 ended with KeyError\n" not in done.stderr


def test_a_killed_worker_is_named_and_stubborn_survivors_end_too(shell: Shell) -> None:
    shell.script(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + PID + CHILD + "if rank == 1:\n"
        "    while sum(name.startswith('pid-') for name in os.listdir()) < 4: time.sleep(0.01)\n"
        "    os.kill(os.getpid(), 9)\ntime.sleep(60)"
    )
    done = shell.run("run", "-n", "2", "train.py", GRACE_S="0.5")
    assert done.returncode == 137
    assert "worker 1 was killed by signal 9 (SIGKILL); the other one was stopped." in done.stderr
    assert len(done.stderr.splitlines()) == 1
    wait_for_end(shell.pids(4))


def test_a_handled_exception_is_not_the_end(shell: Shell) -> None:
    shell.script("import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\ntime.sleep(0.8)")
    done = shell.run("run", "-n", "2", "train.py")
    assert done.returncode == 0
    assert done.stderr.count("ZeroDivisionError") == 2
    assert "failed" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_launcher_ends_all_workers_and_their_children_quietly(
    shell: Shell, number: int, code: int
) -> None:
    shell.script(CHILD + PID + "time.sleep(60)")
    launcher = shell.start("run", "-n", "2", "train.py", PARTIAL_S="30")
    pids = shell.pids(4)
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == code
    assert "Traceback" not in err
    wait_for_end(pids)


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_under_nohup_or_in_the_background_what_is_ignored_stays_ignored_and_sigterm_ends(
    shell: Shell, ignored: signal.Signals
) -> None:
    shell.script(PID + "while True:\n    open(f'lives-{rank}', 'a').write('.')\n    time.sleep(0.01)")
    launcher = shell.start("run", "-n", "2", "train.py", ignoring=[ignored])
    pids, lives = shell.pids(2), [shell.folder / f"lives-{rank}" for rank in range(2)]
    wait_for(lambda: all(file.exists() for file in lives))
    for pid in (launcher.pid, *pids):
        os.kill(pid, ignored)
    before = [file.stat().st_size for file in lives]
    wait_for(lambda: all(file.stat().st_size > size + 5 for file, size in zip(lives, before, strict=True)))
    assert launcher.poll() is None
    launcher.terminate()
    launcher.communicate(timeout=30)
    assert launcher.returncode == 143
    wait_for_end(pids)


@pytest.mark.parametrize(("ignoring", "code"), [([signal.SIGHUP], 0), ([], 129)])
def test_a_terminal_that_is_closed_ends_a_run_unless_hang_ups_are_ignored(
    shell: Shell, ignoring: list[int], code: int
) -> None:
    shell.script(PID + "while not os.path.exists('closed'): time.sleep(0.01)\nprint('after', flush=True)")
    ours, theirs = os.openpty()
    environment = shell.environment({})
    command = [sys.executable, "-m", "paceline.cli", "run", "-q", "-n", "1", "train.py"]
    launcher = subprocess.Popen(
        command, cwd=shell.folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: [*(signal.signal(n, signal.SIG_IGN) for n in ignoring), fcntl.ioctl(0, termios.TIOCSCTTY)],
    )  # fmt: skip
    shell.started.append(launcher)
    os.close(theirs)
    pids = shell.pids(1)
    os.close(ours)
    (shell.folder / "closed").touch()
    assert launcher.wait(timeout=30) == code
    wait_for_end(pids)


def test_a_second_ctrl_c_kills_at_once(shell: Shell) -> None:
    shell.script("signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + PID + "time.sleep(60)")
    launcher = shell.start("run", "-n", "2", "train.py", INTERRUPT_GRACE_S="60")
    pids = shell.pids(2)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stderr is not None
    assert "stopping" in launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    wait_for_end(pids)


def test_an_import_that_turns_ctrl_c_into_another_error_prints_no_traceback(shell: Shell) -> None:
    (shell.folder / "heavy.py").write_text(
        "import time\ntry:\n    time.sleep(60)\nexcept BaseException:\n    pass\nraise RecursionError('half way')\n"
    )
    shell.script(PID + "import heavy")
    launcher = shell.start("run", "-n", "2", "train.py")
    shell.pids(2)
    time.sleep(0.2)  # they are inside the import
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert "stopping" in err
    assert "Traceback" not in err


def test_an_error_of_before_ctrl_c_is_printed(shell: Shell) -> None:
    shell.script(
        "import traceback\nsignal.signal(signal.SIGINT, lambda *_: os._exit(3))\n"
        "try:\n    raise ValueError('an early error')\nexcept ValueError:\n    traceback.print_exc()\n"
        + PID
        + "time.sleep(60)"
    )
    launcher = shell.start("run", "-n", "2", "train.py", HOLD_S="60")
    shell.pids(2)
    time.sleep(0.5)  # the launcher has read the traceback
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert "ValueError: an early error" in err


def test_a_script_that_takes_its_time_to_leave_after_ctrl_c_gets_it(shell: Shell) -> None:
    shell.script(
        f"try:\n    {PID}    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(0.5)\n    open(f'saved-{rank}', 'w')"
    )
    launcher = shell.start("run", "-n", "2", "train.py", INTERRUPT_GRACE_S="60")
    shell.pids(2)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert len(list(shell.folder.glob("saved-*"))) == 2


def test_killing_the_launcher_itself_leaves_nothing_running(shell: Shell) -> None:
    shell.script(CHILD + PID + "time.sleep(60)")
    launcher = shell.start("run", "-n", "2", "train.py")
    pids = shell.pids(4)
    launcher.kill()
    wait_for_end(pids)


HELD_UP = """
import subprocess, time
import paceline.launcher.worker_process as processes

class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if "train.py" in command:
            time.sleep(600)

processes.subprocess.Popen = Popen
from paceline.cli import main
main()
"""
"""A launcher that does not get to run again once its first worker is started, as on a busy computer."""


def test_killing_a_launcher_that_has_only_just_started_a_worker_leaves_nothing_running(shell: Shell) -> None:
    shell.script(CHILD + PID + "time.sleep(60)")
    (shell.folder / "held_up.py").write_text(HELD_UP)
    launcher = shell.start("run", "-n", "2", "train.py", program="held_up.py")
    pids = shell.pids(2)
    launcher.kill()
    wait_for_end(pids)


def test_a_child_that_a_finished_worker_left_behind_is_ended(shell: Shell) -> None:
    shell.script(CHILD)
    done = shell.run("run", "-n", "2", "train.py")
    assert done.returncode == 0
    wait_for_end(shell.pids(2))


def test_a_reader_that_goes_away_ends_the_run(shell: Shell) -> None:
    shell.script(PID + "while True:\n    print('x', flush=True)\n    time.sleep(0.01)")
    launcher = shell.start("run", "-n", "2", "train.py")
    pids = shell.pids(2)
    assert launcher.stdout is not None
    launcher.stdout.close()
    launcher.wait(timeout=30)
    assert launcher.returncode == 128 + signal.SIGPIPE
    wait_for_end(pids)


LOGGING = """
import json
def say(**event):
    with open(os.environ['PACELINE_RUN_DIR'] + '/events.jsonl', 'a') as log:
        log.write(json.dumps({'t': time.time(), **event}) + '\\n')
def step(i):
    say(event='step', step=i, epoch=0, generation=0, workers=[0, 1], planned=[8, 8], samples=[8, 8],
        seconds=[0.01, 0.02], wall_s=0.02, loss=1.0 / (i + 1))
if rank == 0:
    say(event='run', version=1, run_id='r', name='train', pace='equal', workers=[{'rank': 0}, {'rank': 1}])
    for i in range(20): step(i)
"""


def test_a_run_that_logs_is_shown_and_judged_at_the_end(shell: Shell) -> None:
    shell.script(LOGGING)
    done = shell.run("run", "-n", "2", "train.py")
    assert done.returncode == 0
    assert "step 20" in done.stderr or "step 19" in done.stderr
    assert "samples/s" in done.stderr
    assert re.search(r"^run folder: runs/\d{8}-\d{6}-train$", done.stderr, re.MULTILINE)
    assert done.stdout == ""


def test_a_quiet_run_keeps_its_log_and_says_nothing(shell: Shell) -> None:
    shell.script(LOGGING + "sys.stdout.write('mine\\n')")
    done = shell.run("run", "-q", "-n", "2", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[1] mine", "mine"]
    assert len(list((shell.folder / "runs").glob("*/events.jsonl"))) == 1


def test_a_quiet_run_still_shows_warnings(shell: Shell) -> None:
    notes = "".join(
        f"if rank == 0: say(event='note', level='{level}', text='{level} told')\n" for level in ("info", "warning")
    )
    shell.script(LOGGING + notes)
    done = shell.run("run", "-q", "-n", "2", "train.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "warning: warning told\n")


def test_a_run_that_dies_tells_where_to_resume_and_still_gives_its_verdict(shell: Shell) -> None:
    shell.script(
        LOGGING + "if rank == 0: say(event='save', step=12, path='best.pt')\n" + PID + "time.sleep(60)",
    )
    launcher = shell.start("run", "-n", "2", "train.py", GRACE_S="0.5")
    pids = shell.pids(2)
    wait_for(lambda: any("best.pt" in log.read_text() for log in shell.folder.glob("runs/*/events.jsonl")))
    os.kill(pids[0], signal.SIGKILL)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 137
    last = err.splitlines()[-1]
    assert "was killed by signal 9 (SIGKILL)" in last
    assert "The last checkpoint is best.pt (step 12)" in last
    assert "samples/s" in err
    assert "run folder: " in err


LOADED = "say(event='load', step=7, path='first.pt')"
SAVED = "say(event='save', step=12, path='best.pt')"


@pytest.mark.parametrize(
    ("events", "hint"),
    [
        ([], "Nothing was saved with fleet.save: the next run starts from the beginning."),
        ([LOADED], "Nothing was saved since first.pt (step 7) was loaded: a script that calls fleet.load starts from"),
        ([LOADED, SAVED], "The last checkpoint is best.pt (step 12): start again"),
    ],
)
def test_a_failed_run_names_the_checkpoint_it_saved_or_was_loaded_from(
    shell: Shell, events: list[str], hint: str
) -> None:
    told = "".join(f"if rank == 0: {event}\n" for event in events)
    shell.script(LOGGING + told + "sys.exit(3)")
    done = shell.run("run", "-n", "1", "train.py")
    assert done.returncode == 3
    assert hint in done.stderr.splitlines()[-1]


def test_ctrl_c_prints_the_verdict_of_what_was_done(shell: Shell) -> None:
    shell.script(LOGGING + PID + "time.sleep(60)")
    launcher = shell.start("run", "-n", "2", "train.py", PARTIAL_S="30")
    shell.pids(2)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert "run folder: " in err
    assert "samples/s" in err
    assert "Traceback" not in err


def test_a_watched_run_has_a_live_page_that_ends_with_it(shell: Shell) -> None:
    shell.script(LOGGING + "while not os.path.exists('seen'): time.sleep(0.02)")
    launcher = shell.start("run", "--watch", "-n", "2", "train.py")
    assert launcher.stderr is not None
    said = launcher.stderr.readline()
    found = re.fullmatch(r"paceline: live page at (http://127\.0\.0\.1:\d+/)\n", said)
    assert found is not None, said

    def shown() -> bool:
        with suppress(OSError):
            metrics = urllib.request.urlopen(f"{found[1]}metrics", timeout=5).read().decode()
            return re.search(r"^paceline_step\S* 20", metrics, re.MULTILINE) is not None
        return False

    wait_for(shown, 60)
    (shell.folder / "seen").touch()
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 0, err
    assert "run folder: " in err
    with pytest.raises(OSError):
        urllib.request.urlopen(found[1], timeout=2)


@pytest.mark.parametrize("missing", ["plotly", "starlette", "uvicorn"])
def test_what_the_live_page_lacks_is_said_before_anything_starts(shell: Shell, missing: str) -> None:
    shell.script("open('started', 'w')")
    (shell.folder / f"{missing}.py").write_text("raise ImportError('not here')")
    done = shell.run("run", "--watch", "-n", "2", "train.py", PYTHONPATH=str(shell.folder))
    assert done.returncode == 2
    assert re.fullmatch(r"paceline: --watch: .*pip install 'paceline\[view\]'\n", done.stderr), done.stderr
    assert not (shell.folder / "started").exists()
    assert not (shell.folder / "runs").exists()
