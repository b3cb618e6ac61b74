"""A worker that is a group of processes: what each is told, and that they end together. Scripts without torch."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shells import Shell, alive, wait_for, wait_for_end

from paceline.launcher.process_group import GROUP_VARIABLES, WRAPPER, outcome, processes, shard_environment

START = """
import json, os, pathlib, signal, sys, time
shard = int(os.environ['PACELINE_SHARD'])
def note(name, text=''):
    hidden = pathlib.Path(name).with_name('.' + os.path.basename(name))
    hidden.write_text(text)
    os.replace(hidden, name)
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""
STAY = "note(f'pid-{os.getpid()}', str(shard))\ntime.sleep(60)"
SAY = (
    "names = ['RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'PACELINE_WORKER', 'PACELINE_DEVICE']\n"
    "names += ['PACELINE_PROCS_PER_WORKER']\n"
    "sys.stdout.write('said ' + ' '.join([os.environ.get(name, '-') for name in names] + [str(shard)]) + '\\n')\n"
)
Group = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def group(shell: Shell) -> Iterator[Group]:
    """Starts a group of processes of a script in the shell's folder."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *, size: int = 2, wrapper: tuple[str, ...] = WRAPPER, **variables: str) -> Any:
        (shell.folder / "tmp").mkdir()
        (shell.folder / "train.py").write_text(START + script)
        given = {"PACELINE_PROCS_PER_WORKER": str(size), "PACELINE_GROUP_FIRST": "0"}
        given["TMPDIR"] = str(shell.folder / "tmp")
        started.append(
            subprocess.Popen(
                [*wrapper, sys.executable, "-u", "train.py"],
                cwd=shell.folder,
                env=shell.environment({**given, **variables}),
                start_new_session=True,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def shards(shell: Shell, count: int) -> dict[int, int]:
    """The process numbers of those that run `STAY`, by shard."""
    return {int((shell.folder / f"pid-{pid}").read_text()): pid for pid in shell.pids(count)}


def assert_nothing_left(shell: Shell) -> None:
    assert list((shell.folder / "tmp").iterdir()) == []


# -- pure ----------------------------------------------------------------------------------------------------------


def test_processes_are_counted_through_a_list_that_begins_again() -> None:
    assert [processes((2,), workers) for workers in range(4)] == [0, 2, 4, 6]
    assert [processes((1, 2, 4), workers) for workers in range(6)] == [0, 1, 3, 7, 8, 10]


def test_devices_are_for_processes_and_begin_again() -> None:
    given = {
        "PACELINE_PROCS_PER_WORKER": "2",
        "PACELINE_GROUP_FIRST": "2",
        "PACELINE_GROUP_DEVICES": "cpu,cuda:0,cuda:1",
        "A": "1",
    }
    told = [shard_environment(shard, "/there", given) for shard in range(2)]
    assert [own["PACELINE_DEVICE"] for own in told] == ["cuda:1", "cpu"]
    assert told[1] == {
        "A": "1", "PACELINE_PROCS_PER_WORKER": "2", "PACELINE_SHARD": "1", "PACELINE_GROUP_DIR": "/there",
        "LOCAL_RANK": "3",
        "PACELINE_DEVICE": "cpu",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ([(0, 0), (1, 0)], 0),
        ([(1, 0), (0, 0)], 0),
        ([(0, 0), (1, 1)], 0),
        ([(1, 1), (0, 0)], 1),
        ([(1, 3)], 3),
        ([(0, 143), (1, 1)], 143),
        ([(1, 1), (0, 143)], 143),
        ([(1, -9), (0, 1)], -9),
        ([(0, 1), (1, -9)], 1),
        ([(2, 1), (1, -11), (0, 75)], -11),
        ([(1, 1), (0, 75)], 1),
        ([(0, 75), (1, 1)], 1),
        ([(0, 75), (1, 75)], 75),
        ([(1, 0), (2, 4)], 4),
    ],
)
def test_a_group_ends_as_its_head_unless_a_follower_explains_more(ended: list[tuple[int, int]], code: int) -> None:
    assert outcome(ended) == code


# -- one group -----------------------------------------------------------------------------------------------------


@pytest.mark.fleet
def test_each_process_is_told_its_shard_and_the_folder_is_theirs_alone(shell: Shell, group: Group) -> None:
    wrapper = group(
        "own = {k: v for k, v in os.environ.items() if k.startswith(('PACELINE_', 'LOCAL_'))}\n"
        "folder = own.pop('PACELINE_GROUP_DIR')\n"
        "note(f'said-{shard}', json.dumps([own, folder, os.stat(folder).st_mode & 0o777, os.getpgid(0)]))\n"
        "note(os.path.join(folder, f'kept-{shard}'))",
        PACELINE_GROUP_FIRST="3",
        PACELINE_GROUP_DEVICES="cpu,cuda:0",
        LOCAL_RANK="1",
    )
    assert wrapper.wait(20) == 0
    told = [json.loads((shell.folder / f"said-{shard}").read_text()) for shard in range(2)]
    for shard, (own, folder, mode, session) in enumerate(told):
        assert own == {
            "PACELINE_PROCS_PER_WORKER": "2", "PACELINE_SHARD": str(shard), "LOCAL_RANK": str(3 + shard),
            "PACELINE_DEVICE": ["cuda:0", "cpu"][shard],
        }  # fmt: skip
        assert (mode, session) == (0o700, wrapper.pid)
        assert re.fullmatch(r"paceline-group-\w+", Path(folder).name)
    assert told[0][1] == told[1][1]
    assert_nothing_left(shell)


@pytest.mark.fleet
@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_is_killed_ends_its_group_the_same_way(shell: Shell, group: Group, victim: int) -> None:
    wrapper = group(STAY, size=3)
    pids = shards(shell, 3)
    os.kill(pids[victim], signal.SIGKILL)
    assert wrapper.wait(20) == -signal.SIGKILL
    assert not any(map(alive, pids.values()))
    wait_for(lambda: not any((shell.folder / "tmp").iterdir()))


@pytest.mark.fleet
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_reaches_the_head_alone_which_decides(shell: Shell, group: Group, number: int) -> None:
    wrapper = group(
        f"signal.signal({number:d}, lambda *_: (note(f'asked-{{shard}}'), sys.exit(143)))\n"
        "note(f'pid-{os.getpid()}')\nwait('asked-0')"
    )
    shell.pids(2)
    wrapper.send_signal(number)
    assert wrapper.wait(20) == 143
    assert {path.name for path in shell.folder.glob("asked-*")} == {"asked-0"}
    assert_nothing_left(shell)


@pytest.mark.fleet
def test_an_exit_code_is_passed_on_and_the_others_are_ended(shell: Shell, group: Group) -> None:
    wrapper = group("if shard == 1:\n    wait('ready')\n    sys.exit(3)\nnote('ready')\n" + STAY)
    assert wrapper.wait(20) == 3
    wait_for_end(shell.pids(1))
    assert_nothing_left(shell)


@pytest.mark.fleet
def test_another_signal_is_passed_on_as_well(group: Group) -> None:
    assert group("os.kill(os.getpid(), signal.SIGTERM)", size=1).wait(20) == -signal.SIGTERM


@pytest.mark.fleet
def test_followers_have_a_while_when_the_head_has_ended_well_and_are_then_ended(shell: Shell, group: Group) -> None:
    program = (
        "import os, sys, paceline.launcher.process_group as group; group.FOLLOW_S = 1.0; "
        "sys.exit(group.run_group(sys.argv[1:], os.environ))"
    )
    script = (
        "if shard == 0:\n    wait('pid')\n    sys.exit(0)\nif shard == 1:\n    note('pid')\n    time.sleep(0.2)\n"
        "    note('late')\n    sys.exit(1)\n"
    )
    wrapper = group(script + STAY, size=3, wrapper=(sys.executable, "-c", program))
    assert wrapper.wait(20) == 0
    assert (shell.folder / "late").exists()
    wait_for_end(shell.pids(1))


@pytest.mark.fleet
def test_a_wrapper_that_is_killed_leaves_no_process_and_no_folder(shell: Shell, group: Group) -> None:
    wrapper = group(STAY)
    pids = shards(shell, 2)
    wrapper.kill()
    assert wrapper.wait(20) == -signal.SIGKILL
    wait_for_end([*pids.values()])
    wait_for(lambda: not any((shell.folder / "tmp").iterdir()))


@pytest.mark.fleet
def test_the_wrapper_is_light_and_says_who_starts_it(shell: Shell) -> None:
    done = subprocess.run(
        [WRAPPER[0], "-X", "importtime", *WRAPPER[1:]], env=shell.environment({}), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "paceline run --procs-per-worker" in done.stderr
    assert not re.search(r"\| +(torch|numpy|typer)\b", done.stderr)


# -- through the command line ----------------------------------------------------------------------------------------


@pytest.mark.fleet
def test_workers_of_a_fixed_fleet_are_groups(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(START + SAY)
    done = shell.run("run", "-n", "2", "--procs-per-worker", "2", "--devices", "cpu,cuda:0,cuda:1,cpu", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        "[1] said 1 2 4 - cuda:1 2 0", "[1] said 1 3 4 - cpu 2 1", "said 0 0 4 - cpu 2 0", "said 0 1 4 - cuda:0 2 1",
    ]  # fmt: skip


@pytest.mark.fleet
def test_in_an_elastic_fleet_a_group_that_lost_a_process_comes_back_whole(shell: Shell) -> None:
    broken = "if os.environ['PACELINE_WORKER'] == '1' and not os.path.exists('broken'):\n"
    broken += "    time.sleep(60) if shard == 0 else (note('broken'), os.kill(os.getpid(), signal.SIGKILL))\n"
    (shell.folder / "train.py").write_text(START + broken + "wait('broken')\n" + SAY)
    done = shell.run("run", "-n", "1:2", "--procs-per-worker", "1,2", "train.py", FIRST_S="0.05")
    assert done.returncode == 0
    assert "worker 1 was killed by signal 9 (SIGKILL); it is started again" in done.stderr
    said = sorted(line for line in done.stdout.splitlines() if "said" in line)
    assert said == ["[1] said - 1 - 1 - 2 0", "[1] said - 2 - 1 - 2 1", "said - 0 - 0 - 1 0"]


@pytest.mark.fleet
def test_workers_that_join_a_fleet_elsewhere_may_be_groups(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(START + SAY)
    done = shell.run(
        "run", "--join", "127.0.0.1:9", "--procs-per-worker", "2", "train.py", PACELINE_TOKEN="s3cret-token"
    )
    assert done.returncode == 0
    assert len(re.findall(r"said - \d+ - \d+ - 2 [01]\n", done.stdout)) == 2


@pytest.mark.fleet
def test_a_launch_without_groups_tells_its_workers_nothing_of_an_outer_one(shell: Shell) -> None:
    shell.script("sys.stdout.write(' '.join(name for name in os.environ if name in sys.argv) + '\\n')")
    done = shell.run("run", "train.py", *GROUP_VARIABLES, **dict.fromkeys(GROUP_VARIABLES, "1"))
    assert (done.returncode, done.stdout) == (0, "\n")
