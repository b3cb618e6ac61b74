"""The pages in a real browser: what a person sees, and that the browser has nothing to complain about."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser_rig import browser, complaints, until
from elastic_runs import after_it, before_the_leaders_death
from page_runs import calm_run, run_event, run_with_a_death, run_with_deadlines, step, write

from paceline.observe import read_log
from paceline.page import report_page
from ports import own_port

pytest.importorskip("plotly", reason="the page is drawn by Plotly (extra view)")
pytest.importorskip("starlette", reason="the live page needs starlette (extra view)")

from paceline.page.server import LivePage

pytestmark = pytest.mark.browser

PLOTS = "document.querySelectorAll('.plot.js-plotly-plot').length"
TEXT = "document.body.innerText"


@pytest.fixture(scope="module")
def opened():
    with browser() as driver:
        yield driver


@pytest.fixture
def window(opened):
    """The window, empty, and with nothing in its console from the test before."""
    opened.get("about:blank")
    opened.get_log("browser")
    return opened


@pytest.fixture
def page(tmp_path):
    """A live page of a run of 20 steps that goes on."""
    live = LivePage(write(tmp_path / "run", calm_run(20)[:-1]), port=own_port())
    yield live
    live.close()


def append(page, *events):
    with (page.live.path / "events.jsonl").open("a") as log:
        log.write("".join(json.dumps(event) + "\n" for event in events))


def open_report(window, tmp_path, events):
    file = tmp_path / "report.html"
    file.write_text(report_page(read_log(write(tmp_path / "run", events))), encoding="utf-8")
    window.get(file.as_uri())
    until(window, "document.documentElement.dataset.drawn === 'yes'")


def colour(window, selector, what):
    return window.execute_script(f"return getComputedStyle(document.querySelector('{selector}')).{what}")


@pytest.mark.parametrize(
    "events",
    [calm_run(), run_with_a_death(), run_with_deadlines(), [*before_the_leaders_death(), *after_it()]],
    ids=["calm", "death", "late", "elastic"],
)
def test_every_picture_of_the_report_is_drawn_and_the_browser_complains_of_nothing(window, tmp_path, events):
    open_report(window, tmp_path, events)
    assert window.execute_script(f"return {PLOTS}") == window.execute_script(
        "return document.querySelectorAll('figure').length"
    )
    assert "How fast?" in window.execute_script(f"return {TEXT}")
    assert complaints(window) == []


def test_a_report_of_a_run_without_steps_opens_without_complaint(window, tmp_path):
    open_report(window, tmp_path, [run_event()])
    assert "No steps were recorded" in window.execute_script(f"return {TEXT}")
    assert complaints(window) == []


def test_names_with_html_in_them_run_no_script_and_are_read_as_they_are(window, tmp_path):
    bad = "<img src=x onerror='window.caught=1'><b>bold</b>"
    machines = [{"rank": r, "device": bad} for r in range(4)]
    open_report(
        window, tmp_path, [run_event(name=bad, workers=machines), *(step(k, sums={bad: 1.0}) for k in range(30))]
    )
    assert bad in window.execute_script("return document.querySelector('h1').innerText")
    assert window.execute_script("return [window.caught, document.querySelectorAll('img, .plot b').length]") == [
        None,
        0,
    ]
    assert "<b>bold</b>" in window.execute_script("return document.querySelector('#timeline .ytick text').textContent")


def test_light_dark_and_print_each_have_their_own_colours(window, tmp_path):
    open_report(window, tmp_path, calm_run())
    seen = {}
    for scheme, medium in (("light", ""), ("dark", ""), ("dark", "print")):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": medium, "features": features})
        seen[scheme, medium] = [colour(window, "body", "backgroundColor"), colour(window, "#speed .xtick text", "fill")]
    window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert seen["light", ""] == ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
    assert seen["dark", ""] == ["rgb(15, 20, 25)", "rgb(230, 237, 243)"]
    assert seen["dark", "print"] == seen["light", ""]


def test_on_paper_no_legend_is_cut_and_every_size_is_smaller_and_all_comes_back(window, tmp_path):
    machines = [{"rank": r, "device": "cpu", "emulated": f"{r + 1}x slower, jitter 0.5"} for r in range(4)]
    open_report(window, tmp_path, [run_event(pace="joint", workers=machines), *run_with_deadlines()[1:]])
    sizes = "return [...document.querySelectorAll('.plot')].map((place) => [place.offsetWidth, place.offsetHeight])"
    window.execute_script("dispatchEvent(new Event('resize'))")
    until(window, "document.querySelector('#timeline .plot').layout.height === undefined")
    before = window.execute_script(sizes)
    window.execute_script("dispatchEvent(new Event('beforeprint'))")
    bars = window.execute_script(
        "return [...document.querySelectorAll('.legend .scrollbar')].map((bar) => bar.getBBox().height)"
    )
    assert bars
    assert not any(bars)
    rows = "return document.querySelector('#timeline .plot')._fullLayout.yaxis._length"
    assert window.execute_script(rows) >= 4 * 20, "four workers, each with room"
    window.execute_script("dispatchEvent(new Event('afterprint'))")
    assert window.execute_script(sizes) == before
    window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    assert [colour(window, name, "fontSize") for name in ("html", "body", ".tile h2")] == ["11px", "11px", "9.9px"]
    window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_the_live_page_shows_a_death_the_new_shares_and_the_end_and_survives_a_reload(window, page):
    window.get(page.url)
    until(window, f"{TEXT}.includes('step 20')")
    death = run_with_a_death(before=20, after=20)
    append(page, *death[21:-1])
    until(window, f"{TEXT}.includes('worker 2 was killed by signal 9')")
    until(window, f"{TEXT}.includes('Worker 2 left after step 19')")
    window.execute_script("document.querySelector('#shares').scrollIntoView()")
    until(window, "document.querySelector('#shares .plot').data?.[2].y.at(-1) === 0")
    window.refresh()
    until(window, f"{TEXT}.includes('step 40') && {TEXT}.includes('Worker 2 left after step 19')")
    append(page, death[-1])
    until(window, "document.getElementById('link').textContent === 'ended'")
    until(window, f"{TEXT}.includes('finished')")
    assert complaints(window) == []


def test_the_live_page_of_an_elastic_run_shows_who_left_and_who_joined_and_goes_on(window, tmp_path):
    page = LivePage(write(tmp_path / "run", before_the_leaders_death(), tail='{"event": "step", "st'))
    try:
        window.get(page.url)
        until(window, f"{TEXT}.includes('worker 4 joined at step 60: 4 workers')")
        until(window, f"{TEXT}.includes('step 81/100')")  # the leader's word alone
        with (page.live.path / "events.jsonl").open("a") as log:
            log.write("\n")
        append(page, *after_it(90))
        until(window, f"{TEXT}.includes('3 workers go on from step 80') && {TEXT}.includes('step 90/100')")
        window.execute_script("document.querySelector('#presence').scrollIntoView()")
        gaps = "document.querySelector('#presence .plot').data?.[0].z.map((row) => row.includes(null))"
        until(window, f"JSON.stringify({gaps}) === '[true,true,false,false,true]'")
        until(window, f"{TEXT}.includes('Worker 1 was killed by signal 9 (SIGKILL) at step 20; the others went on')")
        assert complaints(window) == []
    finally:
        page.close()


def test_a_step_is_on_the_screen_within_a_second(window, page):
    window.get(page.url)
    until(window, f"{TEXT}.includes('step 20')")
    took = []
    for k in range(20, 25):
        append(page, step(k))
        started = time.monotonic()
        until(window, f"{TEXT}.includes('step {k + 1}')")
        took.append(time.monotonic() - started)
    assert min(took) < 1.5  # a second, and the browser's driver looks only every tenth of one


def test_a_server_that_goes_away_is_said_so_and_found_again(window, page):
    window.get(page.url)
    until(window, f"{TEXT}.includes('step 20')")
    port = int(page.url.rstrip("/").rpartition(":")[2])
    page.close()
    page._threads[-1].join(30)  # its port is free
    until(window, f"{TEXT}.includes('connection lost')")
    again = LivePage(page.live.path, port=port)
    try:
        until(window, "document.getElementById('link').textContent !== 'connection lost; trying again'")
        append(page, step(20))
        until(window, f"{TEXT}.includes('step 21')")
    finally:
        again.close()


@pytest.mark.fleet
def test_a_real_run_with_a_killed_worker_is_seen_to_die_and_who_died_is_named(window, tmp_path):
    script = Path(__file__).parents[2] / "examples" / "digits.py"
    command = [
        sys.executable,
        "-m",
        "paceline.cli",
        "run",
        "-q",
        "-n",
        "4",
        "--emulate",
        "1,1,2,4",
        "--output-dir",
        str(tmp_path),
    ]
    run = subprocess.Popen(
        [*command, str(script), "--epochs", "200"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        folder = _eventually(lambda: next(iter(tmp_path.glob("*/events.jsonl")), None)).parent
        page = LivePage(folder)
        window.get(page.url)
        until(window, f"{TEXT}.includes('samples/s') && {PLOTS} > 2")
        os.kill(page.live.run["workers"][2]["pid"], signal.SIGKILL)
        until(window, "document.getElementById('link').textContent === 'ended'")
        said = until(window, f"{TEXT}.includes('error: ') && {TEXT}")
        assert "worker 2" in said
        assert "SIGKILL" in said
        assert complaints(window) == []
        page.close()
    finally:
        run.kill()
        run.wait()


def _eventually(found, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


def test_in_a_narrow_window_no_legend_lies_under_its_picture_or_is_cut_off(window, tmp_path):
    two = [event | {key: event[key][2:] for key in PER_WORKER if event.get(key)} for event in run_with_deadlines()]
    size = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    open_report(window, tmp_path, two)
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        until(window, LEGENDS_ARE_WHOLE)
        window.get(window.current_url)
        until(window, "document.documentElement.dataset.drawn === 'yes'")
        until(window, LEGENDS_ARE_WHOLE)
    finally:
        window.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert complaints(window) == []


PER_WORKER = ("workers", "planned", "samples", "seconds", "forecast_s", "micro_batches", "unfinished_s", "late_s")
LEGENDS_ARE_WHOLE = """[...document.querySelectorAll('.plot.js-plotly-plot')].every((place) => {
  const legend = place.querySelector('.legend'), names = [...place.querySelectorAll('.legend .traces')];
  if (!legend) return true;
  const end = Math.max(...names.map((name) => name.getBoundingClientRect().bottom));
  const picture = place.querySelector('rect.nsewdrag').getBoundingClientRect();
  return end <= picture.top + 2 && end <= legend.getBoundingClientRect().bottom + 2 && picture.height >= 60;
})"""
