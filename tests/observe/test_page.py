from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from page_runs import calm_run, record, run_event, run_with_a_death, run_with_deadlines, step, write

from paceline.observe import read_log, verdict
from paceline.page import html as page
from paceline.page import report_page
from paceline.page.answers import tiles
from paceline.page.drawing import RED, small
from paceline.page.html import part, picture_data, workers
from paceline.page.live import LiveRun
from paceline.page.pictures import (
    last_steps,
    membership_text,
    pictures,
    presence,
    shares,
    speed,
    timeline,
    what_if_words,
)
from paceline.page.whatif import Answer, WhatIf, instead, what_if
from paceline.simulate.matrices import longest_stretch

pytest.importorskip("plotly", reason="the page is drawn by Plotly (extra view)")


class Reader(HTMLParser):
    """Tags, attributes that fetch something, and the text outside scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.fetched, self.words, self._script = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._script = tag in ("script", "style")
        self.fetched += [
            value for name, value in attrs if name in ("src", "href", "action") and not value.startswith("data:")
        ]

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        if not self._script:
            self.words.append(data)


@pytest.fixture
def small_plotly(monkeypatch):
    """The page without the five megabytes that draw it."""
    monkeypatch.setattr(page, "plotly_js", lambda: "/* plotly */")


def workers_table(judged):
    return part("workers", **workers(judged))


def log_of(tmp_path, events, **more):
    return read_log(write(tmp_path / "run", events, **more))


def drawn(text):
    data = re.search(r"<script type='application/json' id='figures'>(.*?)</script>", text, re.DOTALL)
    return {picture["name"]: picture for picture in json.loads(data[1])}


def test_the_page_is_one_file_that_fetches_nothing_and_says_the_verdict_first(tmp_path):
    log = log_of(tmp_path, calm_run())
    text = report_page(log)
    reader = Reader(text)
    assert reader.fetched == []
    words = " ".join(" ".join(reader.words).split())
    first, second = verdict(log).text.splitlines()[:2]
    assert words.index(first) < words.index(second) < words.index("How fast?") < words.index("The last steps")
    assert len(text) < 12e6


@pytest.mark.slow
def test_every_picture_is_one_that_plotly_accepts_and_has_words_for_those_who_cannot_see_it(tmp_path, small_plotly):
    import plotly.graph_objects as go

    for number, events in enumerate((calm_run(), run_with_a_death(), run_with_deadlines())):
        text = report_page(log_of(tmp_path / str(number), events))
        for picture in drawn(text).values():
            go.Figure(data=picture["data"], layout=picture["layout"])
            assert picture["title"]
            assert picture["caption"]
            assert f"<figure id='{picture['name']}'" in text
        assert text.count("role='img'") == len(drawn(text))


def test_names_with_html_in_them_are_text_wherever_they_appear(tmp_path, small_plotly):
    bad = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    machines = [{"rank": r, "device": bad, "emulated": bad} for r in range(2)]
    events = [run_event(name=bad, pace=bad, workers=machines), *(step(k, (5, 5), sums={bad: 1.0}) for k in range(30))]
    events += [
        {"event": "note", "t": 1.0, "level": bad, "text": bad},
        {"event": "evaluate", "step": 3, "result": {bad: 1.0}},
    ]
    events += [{"event": "end", "t": 2.0, "reason": bad, "text": bad}]
    text = report_page(log_of(tmp_path, events))
    reader = Reader(text)
    assert "img" not in reader.tags
    assert reader.tags.count("script") == 3
    assert reader.fetched == []
    for picture in drawn(text).values():  # Plotly reads HTML in its own texts
        told = json.dumps([picture["data"], picture["layout"]]).replace("<extra>", "").replace("</extra>", "")
        assert "<script" not in told
        assert "<img" not in told


@pytest.mark.parametrize(
    ("events", "tail", "expected"),
    [
        ([run_event()], "", "No steps were recorded"),
        ([run_event(1), *(step(k, (8,), speeds=(80.0,)) for k in range(30))], "", "one machine"),
        (calm_run()[:-1], '{"event": "step", "st', "1 line of the log could not be read"),
        ([run_event(version=99), {"event": "dance", "t": 1.0, "steps": {"a": [1]}}, *calm_run()[1:]], "", "94 % of"),
        ([step(k) for k in range(30)], "", "samples/s"),
        ([run_event(), step(0)], "", "1 step only"),
        ([run_event(), *(step(k, seconds=[None] * 4, t=None, loss=None) for k in range(30))], "", "samples/s"),
    ],
    ids=["zero steps", "one worker", "cut off", "newer version, unknown event", "no run event", "one step", "no times"],
)
def test_a_log_that_lacks_something_still_becomes_a_page(tmp_path, small_plotly, events, tail, expected):
    words = " ".join(Reader(report_page(log_of(tmp_path, events, tail=tail))).words)
    assert expected in " ".join(words.split())


def test_a_death_is_shown_with_its_step_and_the_new_shares(tmp_path, small_plotly):
    log = log_of(tmp_path, run_with_a_death())
    run_data = picture_data(log, verdict(log))
    assert membership_text(run_data) == "Worker 2 left after step 29."
    text = report_page(log)
    assert text.index("<p class='moved'>Worker 2 left") < text.index("How fast?")
    assert "worker 2 was killed by signal 9 (SIGKILL)" in text
    strip = drawn(text)["presence"]["data"][0]["z"][2]
    assert strip == [2] * 30 + [None] * 30
    parts = {trace["name"][:8]: trace["y"] for trace in drawn(text)["shares"]["data"]}
    assert (parts["worker 2"][29], parts["worker 2"][30]) == (pytest.approx(18.36, abs=0.01), 0.0)
    assert sum(y[30] for y in parts.values()) == pytest.approx(100, abs=0.1)


def test_deadlines_and_lateness_are_drawn_where_there_are_any(tmp_path, small_plotly):
    pictures_of = drawn(report_page(log_of(tmp_path, run_with_deadlines())))
    kinds = {trace["name"] for trace in pictures_of["timeline"]["data"]}
    assert {"deadline", "late: unfinished when the round closed", "own compute"} <= kinds
    assert sum(pictures_of["handed-back"]["data"][0]["y"]) == 10 * 23
    assert pictures_of["handed-back"]["data"][0]["marker"]["color"] != RED, "it is no loss"
    calm = drawn(report_page(log_of(tmp_path / "calm", calm_run())))
    assert "handed-back" not in calm
    assert "deadline" not in {trace["name"] for trace in calm["timeline"]["data"]}


def columns(log):
    return re.findall(r"<th[^>]*>([^<]*)</th>", workers_table(verdict(log)))


def test_with_deadlines_the_page_tells_of_missed_rounds_and_nobody_is_called_the_last(tmp_path, small_plotly):
    log = log_of(tmp_path, run_with_deadlines())
    assert columns(log)[5:] == ["waiting", "missed", "stuck", "cut off"]
    assert columns(log_of(tmp_path / "calm", calm_run()))[-2:] == ["last in", "waited for"]
    pictures_of = drawn(report_page(log))
    assert "wait for nobody" in pictures_of["timeline"]["caption"]
    strip = pictures_of["presence"]["data"][0]["z"]
    missed = [row.count(3) for row in strip]
    assert missed == [0, 0, 0, 10]
    assert missed[3] - 2 == verdict(log).figures.workers[3].missed  # two of them during warm-up
    assert not any(1 in row for row in strip), "nobody sat out"
    assert {tile.question: tile for tile in tiles(verdict(log), WhatIf())}["Who held us back?"].answer == "nobody"


def test_the_caption_of_the_last_steps_names_who_was_waited_for_longest_and_not_who_was_last_most_often():
    seconds = [[0.11, 0.1, 0.1]] * 15 + [[0.1, 0.1, 3.1]]
    records = [
        record(k, (10, 10, 10), speeds=(1.0,) * 3, seconds=s, wall_s=max(s), round_s=0.0) for k, s in enumerate(seconds)
    ]
    picture = timeline(last_steps(records, [float("nan")] * 16, workers=3), {}, {})
    assert "The others waited most for worker 2: 95 % of the waiting, which was 44 % of all time" in picture.caption
    turns = [record(k, (k % 2 + 1, 2 - k % 2), speeds=(1.0,) * 2, other_s=0.0) for k in range(10)]
    shared = timeline(last_steps(turns, [float("nan")] * 10, workers=2), {}, {})
    assert "No single worker was waited for most; 25 % of all time" in shared.caption
    alone = [record(k, (10, 0), speeds=(1.0,) * 2) for k in range(9)]
    assert "was waiting" in timeline(last_steps(alone, [float("nan")] * 9, workers=2), {}, {}).caption
    lone = [record(k, (10,), speeds=(1.0,)) for k in range(9)]
    assert timeline(last_steps(lone, [float("nan")] * 9, workers=1), {}, {}).caption.endswith("one row per worker.")


def test_a_run_of_one_step_is_drawn_with_marks_and_whole_steps(tmp_path, small_plotly):
    evaluated = {"event": "evaluate", "t": 1002.0, "step": 1, "result": {"correct": 3, "count": 10}}
    text = report_page(log_of(tmp_path, [run_event(), step(0), evaluated]))
    pictures_of = drawn(text)
    assert {trace["type"] for trace in pictures_of["shares"]["data"]} == {"bar"}
    for name in ("speed", "learning"):
        assert all("markers" in trace["mode"] for trace in pictures_of[name]["data"]), name
    for name in ("speed", "shares", "learning", "presence"):
        assert pictures_of[name]["layout"]["xaxis"]["range"] == [-0.5, 1.5]
        assert pictures_of[name]["layout"]["xaxis"]["dtick"] == 1
    assert pictures_of["learning"]["layout"]["yaxis2"]["range"] == [0, 1.05]
    assert pictures_of["timeline"]["caption"].startswith("Step 0, one row")
    assert "<p>1 step, 256 samples" in text
    assert "Too short: 1 step with" in text
    assert "after warm-up" not in text


def test_of_a_run_without_steps_the_table_says_who_was_there(tmp_path):
    log = log_of(tmp_path, [run_event()])
    assert columns(log) == ["worker", "machine"]
    assert workers_table(verdict(log)).count("<td>cpu</td>") == 4
    assert workers_table(verdict([])) == ""


def test_the_heading_says_how_many_workers_there_were_where_they_came_and_went(tmp_path, small_plotly):
    text = report_page(log_of(tmp_path, [*run_with_a_death()[:-1]]))
    assert "<p id='run'>3 to 4 workers, pace adaptive" in text
    named = report_page(log_of(tmp_path / "b", [run_event(name="a: 9 workers"), *calm_run()[1:]]))
    assert "<p id='run'>4 workers, pace adaptive" in named


def test_speed_is_drawn_against_the_limit(tmp_path):
    log = log_of(tmp_path, calm_run())
    limit, reached = speed(picture_data(log, verdict(log))).data
    assert limit["y"][-1] == pytest.approx(1375, rel=1e-3)
    assert reached["y"][-1] == pytest.approx(256 / 0.198, rel=1e-3)


def test_many_workers_are_stacked_by_speed_and_a_picture_holds_a_bounded_number_of_slices():
    from paceline.observe.analysis.downsampling import DownsampledRun
    from paceline.page.pictures import PictureData

    fast = [1.0 + k % 3 for k in range(100)]
    records = [record(k, [8] * 100, speeds=fast) for k in range(40)]
    run = DownsampledRun.from_records(records, range(40))
    run_data = PictureData(run.buckets(), run.workers, {})
    order = [int(trace["name"].split()[1]) for trace in shares(run_data).data]
    assert [fast[worker] for worker in order] == sorted(fast)
    assert len(presence(run_data).data[0]["z"]) == 64
    steps = last_steps(records, range(40), workers=100)
    picture = timeline(steps, {}, {99: 1.0})
    assert sum(len(trace["x"]) for trace in picture.data) < 8000
    assert "36 of 100 workers are left out" in picture.caption
    assert 99 in {custom[1] for trace in picture.data for custom in trace["customdata"]}


def test_what_if_says_what_another_pace_would_have_taken(tmp_path):
    events = [run_event(pace="equal"), *(step(k, (64,) * 4) for k in range(60))]
    log = log_of(tmp_path, events)
    tried = what_if(log.records)
    assert tried.actual_s == pytest.approx(60 * (64 / 125 + 0.01))
    assert tried.answer_for("equal").seconds == pytest.approx(tried.actual_s, rel=0.02)
    assert tried.answer_for("adaptive").seconds == pytest.approx(60 * (256 / 1375 + 0.01), rel=0.1)
    said = what_if_words(tried, verdict(log))
    assert re.search(r"With \w+ this run would have taken 1\d s instead of 31 s", said)
    advice = {tile.question: tile for tile in tiles(verdict(log), tried)}["What to change?"]
    assert advice.answer.startswith("--pace ")
    assert "instead of 31 s" in advice.reason


def test_a_replay_that_does_not_know_the_run_gives_no_advice():
    tried = WhatIf((Answer("adaptive", 50.0), Answer("equal", 60.0)), actual_s=100.0)
    assert tried.better_than("equal") is None
    assert WhatIf(tried.answers, actual_s=61.0).better_than("equal") == Answer("adaptive", 50.0)
    assert WhatIf(tried.answers, actual_s=51.0).better_than("adaptive") is None


def test_of_two_paces_that_are_as_good_the_default_is_advised():
    tried = WhatIf((Answer("joint", 50.0), Answer("auto", 51.0), Answer("equal", 60.0)), actual_s=60.0)
    assert tried.better_than("equal") == Answer("auto", 51.0)
    far = WhatIf((Answer("joint", 40.0), *tried.answers[1:]), actual_s=60.0)
    assert far.better_than("equal") == Answer("joint", 40.0)


def change(events, tmp_path, tried):
    judged = verdict(log_of(tmp_path, events))
    return next(tile for tile in tiles(judged, tried) if tile.question == "What to change?")


def held_up(steps=40):
    """Every tenth step worker 2 takes a second more, which no share foresees."""
    return [run_event(), *(step(k, seconds=[0.186, 0.186, 0.188 + (k % 10 == 9), 0.184]) for k in range(steps))]


def test_without_a_replay_the_verdicts_own_advice_is_the_answer(tmp_path):
    events = [event | ({"wall_s": max(event["seconds"]) + 0.01} if "seconds" in event else {}) for event in held_up()]
    far_off = WhatIf((Answer("joint", 5.0), Answer("adaptive", 8.0)), actual_s=20.0)
    for number, tried in enumerate((WhatIf(why_not="not replayed"), far_off)):
        told = change(events, tmp_path / str(number), tried)
        assert told.answer == "--pace joint"
        assert re.fullmatch(r"up to [\d,]+ samples/s are in reach, by an estimate", told.reason)


def test_near_the_limit_there_is_little_to_change_whether_it_was_replayed_or_not(tmp_path):
    found = change(calm_run(), tmp_path, WhatIf(why_not="known when the run has ended"))
    assert found.answer == "nothing much"
    assert found.reason.endswith("of what these machines can do is reached")


def test_that_nothing_would_help_is_said_only_after_a_replay_that_knows_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.page.answers.NEAR", 1.0)
    knows = WhatIf((Answer("adaptive", 7.9), Answer("equal", 20.0)), actual_s=8.0)
    assert change(calm_run(), tmp_path / "a", knows).answer == "nothing"
    off = change(calm_run(), tmp_path / "b", WhatIf(knows.answers, actual_s=9.8))
    assert (off.answer, off.reason) == ("not known", "the replay is off by 19 %, too far to tell")
    assert change(calm_run(10), tmp_path / "c", WhatIf(why_not="Too short.")) == off.__class__(
        "What to change?", "not known", "Too short."
    )
    assert change(calm_run(2), tmp_path / "d", WhatIf()).reason.startswith("too few steps to tell")


def test_the_live_page_does_not_say_that_nothing_would_help(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.page.answers.NEAR", 1.0)
    live = LiveRun(tmp_path)
    for event in calm_run()[:-1]:
        live.add(event)
    said = live.full()["parts"]["verdict"]
    assert "nothing" not in said
    assert "known when the run has ended: paceline report" in said
    live.add(calm_run()[-1])
    said = live.full()["parts"]["verdict"]
    assert "known when the run has ended" not in said
    assert "a replay of the run tells, in the whole report: paceline report" in said


def test_advice_from_a_stretch_says_which_steps_it_is_about(tmp_path):
    tried = WhatIf((Answer("joint", 6.0), Answer("adaptive", 9.0)), actual_s=9.0, span=(22, 59))
    assert change(calm_run(), tmp_path, tried).reason == (
        "about 6 s instead of 9 s for steps 22 to 59, the longest stretch with the same workers"
    )


def test_a_gain_of_a_few_tenths_of_a_second_can_be_seen():
    assert instead(6.0, 9.4) == "6 s instead of 9 s"
    assert instead(8.6, 9.1) == "8.6 s instead of 9.1 s"


def test_what_if_replays_the_longest_stretch_with_the_same_workers(tmp_path):
    log = log_of(tmp_path, run_with_a_death(before=30, after=25))
    assert [r.step for r in longest_stretch(log.records)] == list(range(30))
    assert what_if(log.records).replayed == 30
    assert what_if_words(what_if(log.records), verdict(log)).startswith("Steps 0 to 29, the longest stretch")


@pytest.mark.parametrize(("count", "workers"), [(0, 4), (5, 4), (40, 1)])
def test_what_if_says_why_it_has_no_answer(count, workers):
    tried = what_if([record(k, (8,) * workers, speeds=(80.0,) * workers) for k in range(count)])
    assert not tried.answers
    assert tried.why_not.endswith(".")


def test_the_four_questions_name_the_worker_that_held_the_fleet_back(tmp_path):
    events = [run_event(), *(step(k, (64,) * 4, speeds=(500.0, 500.0, 500.0, 100.0)) for k in range(40))]
    judged = verdict(log_of(tmp_path, events))
    told = {tile.question: tile for tile in tiles(judged, WhatIf())}
    assert told["How fast?"].answer == "394 samples/s"
    assert told["How far from the limit?"].answer == "25 % of it reached"
    assert told["Who held us back?"].answer == "worker 3 (cpu)"


def test_pictures_of_a_run_without_steps_are_none(tmp_path):
    log = log_of(tmp_path, [run_event()])
    assert pictures(picture_data(log, verdict(log))) == []


def test_without_plotly_the_page_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ValueError, match=r"paceline\[view\]"):
        report_page(log_of(tmp_path, calm_run()))


@given(st.lists(st.floats(min_value=-1e12, max_value=1e12), max_size=20))
def test_small_numbers_are_those_with_four_digits(values):
    found = small([*values, float("nan"), float("inf")])
    assert found[-2:] == [None, None]
    for value, short in zip(values, found):
        assert short == pytest.approx(value, rel=6e-4, abs=1e-299)
        assert len(f"{abs(short):.15g}".replace(".", "").split("e")[0].strip("0")) <= 4


@pytest.mark.parametrize("skew_s", [0.0, 300.0, -420.0])
def test_a_run_on_a_computer_with_another_clock_is_not_taken_for_silent(tmp_path, monkeypatch, skew_s):
    live, now = LiveRun(tmp_path), 1e9
    monkeypatch.setattr("paceline.concurrency.time", lambda: now)
    monkeypatch.setattr("paceline.concurrency.monotonic", lambda: now)
    first, old, *steps = calm_run(5)[:5]
    live.add({**first, "t": now + skew_s - 60})
    for event in (old, steps[0]):
        live.add({**event, "t": now + skew_s - 50})
    assert live.full()["last"] == now + skew_s - 50, "what was in the log already says nothing of clocks"
    now += 1
    live.add({**steps[1], "t": now + skew_s})
    message = live.full()
    assert message["now"] - message["last"] == 0


def test_templates_escape_what_they_print_and_refuse_a_name_that_nobody_set():
    assert part("now", line="<b>&'") == "&lt;b&gt;&amp;&#39;"
    with pytest.raises(UndefinedError):
        page.templates().from_string("{{ nobody }}").render()


def test_nothing_imports_jinja2_before_a_page_is_made():
    probe = "import sys, paceline, paceline.cli, paceline.page.server; print('jinja2' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", probe], text=True) == "False\n"
