from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_runs import calm_run, record, run_event, run_with_a_death, run_with_deadlines, step, write

from paceline.observe import read_log, verdict
from paceline.observe.page import html as page
from paceline.observe.page import report_page
from paceline.observe.page.answers import tiles
from paceline.observe.page.drawing import small
from paceline.observe.page.html import tell
from paceline.observe.page.moments import in_words, last_steps, timeline
from paceline.observe.page.pictures import changes, pictures, presence, shares, speed
from paceline.observe.page.whatif import Answer, WhatIf, what_if
from paceline.simulate.recorded import longest_stretch

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
        (calm_run()[:-1], '{"event": "step", "st', "lines of the log could not be read"),
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
    story = tell(log, verdict(log))
    assert changes(story) == "Worker 2 left after step 29."
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
    assert sum(pictures_of["late"]["data"][0]["y"]) == 10 * 23
    assert "Worker 3 (cpu) was late most often: 10 steps." in pictures_of["late"]["caption"]
    calm = drawn(report_page(log_of(tmp_path / "calm", calm_run())))
    assert "late" not in calm
    assert "deadline" not in {trace["name"] for trace in calm["timeline"]["data"]}


def test_speed_is_drawn_against_the_limit(tmp_path):
    log = log_of(tmp_path, calm_run())
    limit, reached = speed(tell(log, verdict(log))).data
    assert limit["y"][-1] == pytest.approx(1375, rel=1e-3)
    assert reached["y"][-1] == pytest.approx(256 / 0.198, rel=1e-3)


def test_many_workers_are_stacked_by_speed_and_a_picture_holds_a_bounded_number_of_slices():
    from paceline.observe.chronicle import Chronicle
    from paceline.observe.page.pictures import Story

    fast = [1.0 + k % 3 for k in range(100)]
    records = [record(k, [8] * 100, speeds=fast) for k in range(40)]
    chronicle = Chronicle.of(records, range(40))
    story = Story(chronicle.buckets(), chronicle.workers, {})
    order = [int(trace["name"].split()[1]) for trace in shares(story).data]
    assert [fast[worker] for worker in order] == sorted(fast)
    assert len(presence(story).data[0]["z"]) == 64
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
    assert tried.of("equal").seconds == pytest.approx(tried.actual_s, rel=0.02)
    assert tried.of("adaptive").seconds == pytest.approx(60 * (256 / 1375 + 0.01), rel=0.1)
    said = in_words(tried, verdict(log))
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
    tried = WhatIf((Answer("joint", 50.0), Answer("adaptive", 51.0), Answer("equal", 60.0)), actual_s=60.0)
    assert tried.better_than("equal") == Answer("adaptive", 51.0)
    far = WhatIf((Answer("joint", 40.0), *tried.answers[1:]), actual_s=60.0)
    assert far.better_than("equal") == Answer("joint", 40.0)


def test_what_if_replays_the_longest_stretch_with_the_same_workers(tmp_path):
    log = log_of(tmp_path, run_with_a_death(before=30, after=25))
    assert [r.step for r in longest_stretch(log.records)] == list(range(30))
    assert what_if(log.records).replayed == 30
    assert in_words(what_if(log.records), verdict(log)).startswith("Steps 0 to 29, the longest stretch")


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
    assert pictures(tell(log, verdict(log))) == []


def test_without_plotly_the_page_names_the_extra(tmp_path, monkeypatch):
    import sys

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
