from __future__ import annotations

import ast
import importlib.util
import io
import sys
import time
from pathlib import Path

import pytest

import paceline.observe
from paceline.observe import make_view, verdict
from paceline.observe.analysis.progress import Progress
from paceline.observe.views import LiveView, PlainView, SilentView, table
from paceline.observe.words.numbers import duration, machines, number, percent

SPEEDS = (500.0, 500.0, 250.0, 125.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def feed(make_record, run_event, *, steps=40, shares=(93, 93, 47, 23), every_s=0.5, **more):
    """A run event, a loop of 113 steps, and the first steps of it."""
    yield run_event
    yield {"event": "steps", "t": 1000.0, "steps": 113, "epochs": 3, "first_step": 0, "global_batch": 256}
    for k in range(steps):
        record = make_record(k, SPEEDS, shares, epoch=k // 38, loss=0.4123, **more)
        yield {"event": "step", "t": 1000.0 + every_s * k, **vars(record)}


def test_plain_lines_say_what_a_person_needs_at_most_every_two_seconds(make_record, run_event):
    out, clock = io.StringIO(), Clock()
    view = PlainView(out, clock=clock)
    for event in feed(make_record, run_event):
        view.show(event)
        clock.now += 0.5
    view.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "digits: 4 workers, pace adaptive, combine gradients, gloo"
    assert lines[-1] == (
        "step 40/113  epoch 2/3  1,362 samples/s (99 % of limit)  shares 93 93 47 23  loss 0.412  37 s left"
    )
    printed = [int(line.split()[1].split("/")[0]) for line in lines[1:]]
    assert printed == [1, *range(5, 40, 4), 40]


def test_plain_lines_grow_rarer_in_a_long_run(make_record, run_event):
    out, clock = io.StringIO(), Clock()
    view = PlainView(out, clock=clock)
    for event in feed(make_record, run_event, steps=3600):
        view.show(event)
        clock.now += 1.0
    assert 200 < out.getvalue().count("\n") < 300  # 1,800 if every two seconds


def test_notes_results_and_a_bad_end_get_a_line_at_once():
    out = io.StringIO()
    view = make_view(out)
    view.show({"event": "note", "level": "warning", "text": "memory is short"})
    view.show({"event": "evaluate", "step": 7, "result": {"accuracy": 0.93125}})
    view.show({"event": "save", "step": 7, "path": "best.pt"})
    view.show({"event": "comet"})
    view.show({"event": "end", "reason": "error", "text": "worker 2 died"})
    assert out.getvalue().splitlines() == [
        "warning: memory is short",
        "evaluated after step 7: accuracy 0.931",
        "saved step 7 to best.pt",
        "warning: the run ended (error): worker 2 died",
    ]


def test_plain_lines_survive_a_closed_stream_and_a_terminal_without_the_character():
    ascii_out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainView(ascii_out).show({"event": "note", "text": "größer"})
    ascii_out.seek(0)
    assert ascii_out.read() == "gr??er\n"
    ascii_out.close()
    PlainView(ascii_out).show({"event": "note", "text": "too late"})


def test_the_view_suits_the_stream(monkeypatch):
    assert isinstance(make_view(Terminal(), quiet=True), SilentView)
    assert isinstance(make_view(io.StringIO()), PlainView)
    live = make_view(Terminal())
    live.close()
    assert isinstance(live, LiveView)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert isinstance(make_view(Terminal()), PlainView)


def test_nothing_in_observe_needs_rich_to_be_imported():
    for file in Path(paceline.observe.__file__).parent.glob("*.py"):
        top = [node for node in ast.parse(file.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {getattr(node, "module", None) or node.names[0].name for node in top}
        assert not any(name.split(".")[0] in ("rich", "typer", "torch") for name in names), file


def console(width, *, height=25, **more):
    from rich.console import Console

    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None, **more)


def drawn(events, *, width=80, **more):
    progress = Progress()
    for event in events:
        progress.add(event)
    screen = console(width, **more)
    screen.print(table(progress.snapshot(), console=screen))
    return screen.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_table_shows_the_run_and_every_worker_in_the_width_there_is(make_record, run_event, width):
    text = drawn(feed(make_record, run_event), width=width)
    lines = text.splitlines()
    assert lines[0] == "digits · adaptive · step 40/113 · epoch 2/3 · 37 s left"
    assert lines[1] == "1,362 samples/s · 99 % of the limit (1,375) · loss 0.412"
    assert lines[3].split() == ["worker", "machine", "share", "samples/s", "waiting"]
    assert lines[4].split()[:5] == ["0", "cpu,", "emulated", "1x", "93"]
    assert lines[7].rstrip().endswith("slowest")
    assert max(map(len, lines)) <= width
    assert lines[4].count("█") > lines[6].count("█") > lines[7].count("█") > 0


def test_a_long_machine_name_yields_before_the_figures_do(make_record, run_event):
    run_event["workers"][3]["emulated"] = "2x slower, 8x from step 40, jitter 0.2"
    lines = drawn(feed(make_record, run_event, shares=(64, 64, 64, 64))).splitlines()
    assert lines[3].split() == ["worker", "machine", "share", "samples/s", "waiting"]
    assert lines[7].rstrip().endswith("0 %  waited for")
    assert "…" in lines[7]


def test_a_terminal_without_unicode_is_told_all_the_same(make_record, run_event, monkeypatch):
    class Old(io.TextIOWrapper):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    run_event["name"] = "m\u00fcller"
    run_event["workers"][3]["emulated"] = "2x slower, 8x from step 40, jitter 0.2"
    stream = Old(io.BytesIO(), encoding="ascii", write_through=True)
    view = LiveView(stream)
    for event in feed(make_record, run_event):
        view.show(event)
    view.close()
    text = stream.buffer.getvalue().decode("ascii")
    assert "m?ller - adaptive - step 40/113" in text
    assert "cpu, emulated 2x slowe~" in text


def test_the_worker_the_others_wait_for_is_marked(make_record, run_event):
    lines = drawn(feed(make_record, run_event, shares=(64, 64, 64, 64))).splitlines()
    assert "75 %" in lines[4]
    assert lines[7].rstrip().endswith("waited for")


def test_a_worker_without_a_share_is_said_to_sit_out(make_record, run_event):
    lines = drawn(feed(make_record, run_event, shares=(100, 100, 50, 0))).splitlines()
    assert lines[7].rstrip().endswith("sits out")


def big_fleet(make_record, run_event, size, **more):
    record = make_record(0, (100.0,) * (size - 1) + (10.0,), (10,) * size, **more)
    return [run_event, {"event": "step", "t": 1.0, **vars(record)}]


def test_a_fleet_that_does_not_fit_the_screen_is_shown_in_groups_and_nobody_is_left_out(make_record, run_event):
    lines = drawn(big_fleet(make_record, run_event, 64), height=24).splitlines()
    assert len(lines) < 24
    assert [line.split()[0] for line in lines[3:]] == [f"{k}-{k + 3}" for k in range(0, 64, 4)]
    assert lines[-1].rstrip().endswith("68 %  63 waited for")
    assert lines[-1].split()[1] == "40"  # four shares of 10
    assert "310" in lines[-1]  # and three times 100 samples/s and one of 10


@pytest.mark.parametrize(("size", "shown"), [(64, 64), (65, 33), (200, 50)])
def test_up_to_64_workers_have_rows_of_their_own_where_there_is_room(make_record, run_event, size, shown):
    height = 100 if size < 100 else 70
    lines = drawn(big_fleet(make_record, run_event, size), height=height).splitlines()
    assert len(lines) == 3 + shown


def late_step(make_record, k, *, samples=(93, 93, 0, 23), behind=(0, 0, 3, 0)):
    stuck = tuple(0.0 if n else 0.19 for n in samples)
    return make_record(
        k, SPEEDS, samples, planned=(120, 120, 60, 30), deadline_s=0.19, unfinished_s=stuck, behind=behind,
        micro_batches=(6, 6, 0, 2), wall_s=0.2, epoch=k // 38, loss=0.4123,
    )  # fmt: skip


def with_deadlines(make_record, run_event, **more):
    """The same loop under joint; worker 2 comes late in the last step."""
    yield from feed(make_record, run_event | {"pace": "joint"}, steps=39)
    yield {"event": "step", "t": 1020.0, **vars(late_step(make_record, 39, **more))}


def test_a_late_worker_says_how_far_it_is_behind_and_the_step_its_deadline_and_count(make_record, run_event):
    lines = drawn(with_deadlines(make_record, run_event)).splitlines()
    assert lines[2].rstrip() == "209 of 256 samples in the step · deadline 190 ms"
    assert lines[4].split() == ["worker", "machine", "share", "samples/s", "waiting"]
    assert lines[7].rstrip().endswith("-  late, 3 rounds behind")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("behind", "mark"), [(0, "late"), (1, "late, 1 round behind")])
def test_a_worker_that_has_just_missed_a_round_is_late(make_record, run_event, behind, mark):
    lines = drawn(with_deadlines(make_record, run_event, behind=(0, 0, behind, 0))).splitlines()
    assert lines[7].rstrip().endswith(f"-  {mark}")


def test_columns_stay_where_they_are_when_a_worker_is_late_and_when_it_is_back(make_record, run_event):
    events = list(with_deadlines(make_record, run_event))
    on_time = late_step(make_record, 40, samples=(93, 93, 47, 23), behind=(0, 0, 0, 0))
    late, back = drawn(events), drawn([*events, {"event": "step", "t": 1021.0, **vars(on_time)}])
    assert "late" not in back
    heads = [text.splitlines()[4] for text in (late, back)]
    assert heads[0] == heads[1]


def test_plain_lines_name_the_late_worker_or_count_them(make_record, run_event):
    def last_line(**more):
        out = io.StringIO()
        view = PlainView(out)
        for event in with_deadlines(make_record, run_event, **more):
            view.show(event)
        view.close()
        return out.getvalue().splitlines()[-1]

    assert "  209 of 256 samples in the step  deadline 190 ms  worker 2 late, 3 rounds behind  loss" in last_line()
    both = last_line(samples=(93, 93, 0, 0), behind=(0, 0, 3, 4))
    assert "  2 workers late (worker 3: 4 rounds behind)  loss" in both


def test_a_group_says_how_many_of_it_are_late(make_record, run_event):
    size = 100
    samples = tuple(0 if rank in (17, 18) else 10 for rank in range(size))
    behind = tuple(2 if rank == 18 else 0 for rank in range(size))
    late = {"deadline_s": 0.1, "unfinished_s": tuple(0.0 if n else 0.1 for n in samples), "behind": behind}
    record = make_record(0, (100.0,) * size, samples, planned=(10,) * size, wall_s=0.1, **late)
    lines = drawn([run_event, {"event": "step", "t": 1.0, **vars(record)}], height=40).splitlines()
    (marked,) = [line for line in lines if "late" in line]
    assert marked.split()[0] == "16-19"
    assert marked.rstrip().endswith("2 late, by 2 rounds")


def test_a_terminal_without_unicode_gets_plain_characters(make_record, run_event):
    screen = console(80)
    screen.file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    progress = Progress()
    for event in feed(make_record, run_event):
        progress.add(event)
    screen.print(table(progress.snapshot(), console=screen))
    screen.file.seek(0)
    lines = screen.file.read().splitlines()
    assert lines[0].startswith("digits - adaptive - step 40/113")
    assert lines[4].count("#") > lines[7].count("#") > 0


def test_a_stuck_fleet_does_not_look_alive(make_record, run_event):
    progress, screen = Progress(), console(100)
    for event in feed(make_record, run_event):
        progress.add(event)
    screen.print(table(progress.snapshot(), console=screen, silence_s=12.0))
    assert "no step for 12 s" in screen.file.getvalue()


def patient(view):
    """The view; closing it waits for its last drawing, however busy the computer is."""
    join = view._thread.join
    view._thread.join = lambda timeout: join(30)
    return view


def test_the_live_view_prints_notes_above_the_table_and_leaves_the_last_state(make_record, run_event):
    screen = console(100)
    view = patient(LiveView(console=screen))
    for event in feed(make_record, run_event):
        view.show(event)
    view.show({"event": "note", "level": "warning", "text": "memory is short"})
    view.close()
    view.close()
    text = screen.file.getvalue()
    assert "warning: memory is short" in text
    assert text.rindex("warning: memory is short") < text.rindex("step 40/113")
    assert text.endswith("\x1b[?25h")  # the cursor is back
    assert "\x1b[2J" not in text  # drawn in place: a cleared screen flickers


def test_what_the_process_prints_appears_above_the_live_table(make_record, run_event, monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    view = patient(LiveView(console=console(100)))
    for event in feed(make_record, run_event):
        view.show(event)
    print("epoch done")
    screen = view._console.file.getvalue
    view.close()
    assert "epoch done" in screen()
    assert sys.stdout is out


def test_what_the_process_prints_into_a_file_stays_in_the_file(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    view = LiveView(console=console(100))
    print("result 7")
    view.close()
    assert out.getvalue() == "result 7\n"


def test_names_that_look_like_markup_are_shown_as_they_are(make_record, run_event):
    run_event["name"] = "[red]<b>run</b>[/red]"
    run_event["workers"][0]["device"] = "[bold]cpu[/bold]"
    events = list(feed(make_record, run_event))
    assert "[red]<b>run</b>[/red] · adaptive" in drawn(events, width=120)
    assert "[bold]cpu[/bold]" in drawn(events, width=120)
    screen = console(100)
    view = patient(LiveView(console=screen))
    view.show({"event": "note", "text": "[/oops] [link=x]"})
    view.close()
    assert "[/oops] [link=x]" in screen.file.getvalue()


def test_showing_an_event_costs_the_training_thread_next_to_nothing(make_record, run_event):
    events = list(feed(make_record, run_event))
    view = LiveView(console=console(100))
    costs = []
    for event in events * 10:
        started = time.perf_counter()
        view.show(event)
        costs.append(time.perf_counter() - started)
    view.close()
    assert sorted(costs)[len(costs) // 2] < 20e-6


def test_a_resumed_loop_counts_on_and_an_endless_one_has_no_time_left(make_record, run_event):
    events = list(feed(make_record, run_event, steps=3))
    endless = [run_event, {"event": "steps", "steps": None, "epochs": None, "first_step": 0}, *events[2:]]
    assert "step 3 · epoch 1\n" in drawn(endless).replace(" \n", "\n")
    progress = Progress()
    progress.add({"event": "steps", "steps": 113, "first_step": 113, "epochs": 1})
    progress.add({"event": "step", "t": 1.0, **vars(make_record(120, SPEEDS, (1, 1, 1, 1)))})
    assert (progress.snapshot().step, progress.snapshot().steps) == (121, 226)


def test_a_broken_step_event_is_passed_over(run_event):
    progress = Progress()
    for event in (run_event, {"event": "step", "step": "x"}, {"event": "step"}):
        progress.add(event)
    assert progress.snapshot().step is None


def test_speeds_follow_the_last_steps_only(make_record, run_event):
    progress = Progress()
    for k in range(60):
        speeds = (100.0, 100.0) if k < 30 else (50.0, 50.0)
        progress.add({"event": "step", "t": float(k), **vars(make_record(k, speeds, (10, 10)))})
    assert progress.snapshot().limit == pytest.approx(100)
    assert verdict([]).figures.limit == 0


def test_numbers_read_as_people_write_them():
    assert [number(x) for x in (0, 0.123456, 34.26, 99.96, 1289.4, float("nan"))] == [
        "0", "0.123", "34.3", "100", "1,289", "?",
    ]  # fmt: skip
    assert [percent(x) for x in (0, 0.001, 0.934, 1.2)] == ["0 %", "under 1 %", "93 %", "120 %"]
    assert [duration(x) for x in (0, 0.034, 12.3, 125, 7260, 200_000)] == [
        "0 s", "34 ms", "12 s", "2 min 05 s", "2 h 01 min", "2 d 7 h",
    ]  # fmt: skip
    assert machines({"workers": [{"device": "cuda:0", "emulated": None}, "odd", {"rank": 2}]}) == {0: "cuda:0", 2: ""}
