"""The live page's state and its server, over real sockets on this computer."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from itertools import islice
from urllib.parse import urlsplit

import pytest
import typer
from page_runs import calm_run, run_event, run_with_a_death, run_with_deadlines, step, write
from typer.testing import CliRunner

pytest.importorskip("starlette", reason="the live page needs starlette (extra view)")
pytest.importorskip("plotly", reason="the page is drawn by Plotly (extra view)")

from paceline.cli.watch import address, check, remote_events, watch
from paceline.page import server
from paceline.page.live import BUCKETS, LiveRun, metrics, server_sent_event
from paceline.page.server import LivePage
from ports import own_port

TRICKS = (
    "/static/../../secret.txt",
    "/static/..%2f..%2fsecret.txt",
    "/static/%2e%2e/server.py",
    "/static//etc/passwd",
    "/../../../etc/passwd",
    "/static/page.css/../../server.py",
    "/static/page.css%00",
    "/log?from=-1",
    "/log?from=x",
    "/log?from=../../secret.txt",
    f"/log?from={1 << 63}",
    f"/log?from={'9' * 5000}",
    "/log?from=%D9%A3",
    "/nothing",
)


def taken(events, path="."):
    live = LiveRun(path)
    for event in events:
        live.add(event)
    return live


@contextmanager
def served(folder, **settings):
    page = LivePage(folder, **settings)
    try:
        yield page
    finally:
        page.close()


def ask(page, path, *, headers=None, method="GET"):
    """Return status and body; the path is sent unchanged, which a tidier client would not do."""
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(page.url).port, timeout=30)
    connection.putrequest(method, path, skip_host=bool(headers and "Host" in headers))
    for name, value in (headers or {}).items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def messages(page):
    """Yield the server-sent messages."""
    with urllib.request.urlopen(
        page.url.replace("/?", "/events?") if "?" in page.url else page.url + "events", timeout=30
    ) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def append(folder, *events):
    with (folder / "events.jsonl").open("a") as log:
        log.write("".join(json.dumps(event) + "\n" for event in events))


def eventually(true, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_metrics_parse_and_say_what_the_log_says():
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    odd = 'a "b" \\ c\nd'
    live = taken([run_event(name=odd), *calm_run(40)[1:]])
    families = {family.name: family for family in parser.text_string_to_metric_families(metrics(live))}
    assert all(family.documentation and family.type in ("gauge", "counter") for family in families.values())
    assert families["paceline_run_info"].samples[0].labels["name"] == odd
    assert families["paceline_samples"].samples[0].value == 40 * 256
    assert families["paceline_run_ended"].samples[0].value == 1
    speeds = {s.labels["worker"]: s.value for s in families["paceline_worker_samples_per_second"].samples}
    assert speeds == pytest.approx({"0": 500.0, "1": 500.0, "2": 250.0, "3": 125.0})


def test_metrics_before_the_first_step_are_still_well_formed():
    parser = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(metrics(taken([])))}
    assert families["paceline_steps"].samples[0].value == 0
    assert families["paceline_loss"].samples == []


def test_a_long_run_is_held_in_a_bounded_number_of_points():
    live = taken([run_event(), *(step(k, (8, 8), speeds=(8.0, 4.0)) for k in range(2000))])
    drawn = {picture["name"]: picture for picture in live.full()["pictures"]}
    assert live.steps == 2000
    assert all(len(trace["x"]) <= BUCKETS for trace in drawn["speed"]["data"])
    assert len(server_sent_event(live.full())) < 200_000


@pytest.mark.parametrize(
    "events",
    [
        [],
        [run_event()],
        [step(0)],
        run_with_a_death(),
        run_with_deadlines(),
        [{"event": "step"}, {"event": "x"}],
        [run_event(1), step(0, (5,))],
    ],
    ids=["nothing", "no steps", "no run", "death", "deadlines", "nonsense", "one worker"],
)
def test_whatever_the_log_holds_both_messages_can_be_sent(events):
    live = taken(events)
    for message in (live.quick(), live.full()):
        sent = server_sent_event(message)
        assert sent.count(b"\n") == 2
        assert json.loads(sent[6:])["revision"] == len(events)


def test_a_run_started_again_in_the_same_folder_begins_anew():
    live = taken([*calm_run(10), run_event(name="again"), step(0)])
    assert (live.steps, live.end, live.run["name"]) == (1, None, "again")


def test_html_in_a_live_runs_texts_is_escaped():
    bad = "<img src=x onerror=alert(1)>"
    live = taken([run_event(name=bad), step(0), {"event": "note", "level": "info", "text": bad}])
    assert "<img" not in json.dumps(live.full()["parts"])


@pytest.mark.slow
def test_a_step_reaches_a_viewer_within_a_second_and_a_new_viewer_begins_with_everything(tmp_path):
    folder = write(tmp_path / "run", calm_run(30)[:-1])
    with served(folder) as page:
        eventually(lambda: page.live.steps == 30)
        stream = messages(page)
        first = next(stream)
        assert {"timeline", "speed", "shares"} <= {picture["name"] for picture in first["pictures"]}
        assert "verdict" in first["parts"]
        append(folder, step(30))
        second = next(message for message in stream if message["revision"] > first["revision"])
        assert server.SLOWEST_QUICK_S + 0.2 < 1.0  # the log is read every fifth of a second
        assert second["parts"]["now"].startswith("step 31")
        assert next(messages(page))["parts"]["heading"]  # a reload


def test_a_log_cut_off_in_mid_line_is_taken_up_when_the_line_is_whole(tmp_path):
    folder = write(tmp_path / "run", calm_run(5)[:-1], tail='{"event": "no')
    with served(folder) as page:
        eventually(lambda: page.live.steps == 5)
        with (folder / "events.jsonl").open("a") as log:
            log.write('te", "level": "warning", "text": "worker 2 died"}\n')
        eventually(lambda: "worker 2 died" in page.live.quick()["parts"]["notes"])


def test_a_line_that_makes_no_sense_does_not_end_the_page(tmp_path):
    folder = write(tmp_path / "run", calm_run(5)[:-1])
    with served(folder) as page:
        eventually(lambda: page.live.steps == 5)
        append(folder, {**step(5), "planned": 7, "loss": {}}, step(6))
        eventually(lambda: page.live.newest.step == 6)
        assert any("step 7" in message["parts"]["now"] for message in islice(messages(page), 1))


@pytest.mark.slow
def test_a_viewer_that_leaves_at_once_costs_nothing(tmp_path):
    with served(write(tmp_path / "run", calm_run(5))) as page:
        for _ in range(5):
            stream = messages(page)
            next(stream)
            stream.close()
        eventually(lambda: page._publisher.viewers == 0)
        spent = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - spent < 0.3


def test_tricks_with_paths_hosts_and_methods_are_refused(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    with served(write(tmp_path / "run", calm_run())) as page:
        for path in TRICKS:
            status, body = ask(page, path)
            assert status == 404, path
            assert b"secret" not in body
        assert ask(page, "/", headers={"Host": "evil.example"})[0] == 403
        assert ask(page, "/", headers={"Host": "127.0.0.1.evil.example:80"})[0] == 403
        assert ask(page, "/", method="POST")[0] == 405
        assert ask(page, "/")[0] == ask(page, "/static/live.js")[0] == ask(page, "/metrics")[0] == 200


def test_beyond_this_computer_every_address_asks_for_the_token(tmp_path):
    with served(write(tmp_path / "run", calm_run()), host="0.0.0.0") as page:
        token = page.url.rpartition("token=")[2]
        assert len(token) > 16
        assert "0.0.0.0" not in page.url, "nobody reaches that from elsewhere"
        for path in ("/", "/events", "/report", "/metrics", "/log", "/static/page.js"):
            assert ask(page, path)[0] == 403
            assert ask(page, f"{path}?token={token[:-1]}")[0] == 403
        assert ask(page, "/metrics", headers={"Authorization": f"Bearer {token}"})[0] == 200
        status, body = ask(page, f"/?token={token}")
        assert status == 200
        assert body.count(token.encode()) == body.count(b"src=") + body.count(b"stylesheet") + body.count(
            b"href='report"
        )


def test_the_whole_report_is_one_address_away(tmp_path):
    with served(write(tmp_path / "run", calm_run())) as page:
        status, body = ask(page, "/report")
    assert status == 200
    assert b"What if?" in body


@pytest.mark.slow
def test_a_run_is_followed_through_the_page_of_another_machine(tmp_path):
    folder = write(tmp_path / "run", calm_run(10)[:-1])
    with served(folder, host="0.0.0.0") as there:
        _, port, token = address(there.url)
        host = "127.0.0.1"
        check(host, port, token)
        with served(folder, source=lambda stop: remote_events(host, port, token, stop)) as here:
            eventually(lambda: here.live.steps == 10)
            append(folder, step(10))
            eventually(lambda: here.live.steps == 11)
            assert ask(here, "/log")[0] == 404


@pytest.mark.slow
def test_a_broken_connection_is_taken_up_where_it_broke_off(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.cli.watch.AGAIN_S", 0.05)
    told = calm_run(10)
    folder = write(tmp_path / "run", told[:6])
    stop = threading.Event()
    page = LivePage(folder, port=own_port())
    host, port, token = address(page.url)
    events = remote_events(host, port, token, stop)
    first = list(islice(events, 6))
    page.close()
    page._threads[-1].join(30)  # its port is free
    append(folder, *told[6:])
    with served(folder, port=port):
        rest = list(islice(events, 6))
    stop.set()
    assert [event.get("step") for event in first + rest] == [None, *range(10), None]


def test_an_address_is_host_and_port_or_what_was_printed():
    assert address("box:8080") == ("box", 8080, "")
    assert address("http://10.0.0.1:99/?token=abc") == ("10.0.0.1", 99, "abc")
    assert address("[::1]:80") == ("::1", 80, "")
    for bad in ("box", "box:port", ":80", "https://box:1/", "box:99999", "a b:80"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            address(bad)


def test_a_page_that_is_not_there_or_refuses_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="no live page at"):
        check("127.0.0.1", 9, "")
    with served(write(tmp_path / "run", calm_run()), host="0.0.0.0") as page, pytest.raises(ValueError, match="token"):
        check("127.0.0.1", address(page.url)[1], "wrong")


def test_closing_leaves_no_thread_behind_even_with_a_viewer(tmp_path):
    before = threading.active_count()
    page = LivePage(write(tmp_path / "run", calm_run()))
    stream = messages(page)
    next(stream)
    page.close()
    eventually(lambda: threading.active_count() <= before)
    stream.close()


def test_the_command_refuses_what_it_cannot_watch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(watch)
    run = write(tmp_path / "a", calm_run())
    with served(run) as page:
        taken_port = urlsplit(page.url).port
        for words in (
            [],
            ["nowhere"],
            [str(run), "--connect", "x:1"],
            ["--connect", "x"],
            [str(run), "--port", str(taken_port)],
        ):
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 2, words
            assert result.stderr.startswith("paceline: watch: ")
            assert result.stderr.count("\n") == 1
