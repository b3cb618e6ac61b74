"""Recorded traces as emulated machines."""

from pathlib import Path

import numpy as np
import pytest

from paceline.machines import parse_fleet, read_trace


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_values_over_the_median_are_factors_and_the_record_wraps_around(tmp_path: Path) -> None:
    path = write(tmp_path, "step,w0,w4\n16,2.0,4.0\n21,2.0,8.0\n27,2.0,2.0\n")
    fast, slow = parse_fleet(str(path), sample_ms=10.0)
    assert [fast.seconds(step, 1) for step in range(4)] == pytest.approx([0.01] * 4)
    assert [slow.seconds(step, 1) for step in range(7)] == pytest.approx([0.02, 0.04, 0.01] * 2 + [0.02])
    assert slow.describe() == "w4 of trace.csv, 1x to 4x slower"


def test_a_header_is_optional_and_blank_lines_and_marks_are_forgiven(tmp_path: Path) -> None:
    plain = read_trace(write(tmp_path, "1,2.0,3.0\n2,4.0,5.0\n"))
    (tmp_path / "marked.csv").write_bytes(b"\xef\xbb\xbfstep,a,b\r\n1,2.0,3.0\r\n\r\n2, 4.0 ,5.0\r\n")
    marked = read_trace(tmp_path / "marked.csv")
    assert np.array_equal(plain.seconds, marked.seconds)
    assert plain.steps == marked.steps == (1, 2)
    assert (plain.workers, marked.workers) == (("worker 0", "worker 1"), ("a", "b"))


def test_fewer_workers_than_columns_take_the_first_and_more_are_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path, "step,w0,w1,w2\n1,1.0,1.0,2.0\n"))
    assert len(parse_fleet(path, sample_ms=1.0, workers=2)) == 2
    with pytest.raises(ValueError, match="3 columns for 4 workers"):
        parse_fleet(path, sample_ms=1.0, workers=4)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("step,w0,w1\n1,1.0,nan\n", "line 2, column 3: seconds are finite"),
        ("step,w0\n1,1.0\n2,-3\n", "line 3, column 2: seconds are finite and above 0, not -3"),
        ("step,w0\n1,0\n", "line 2, column 2"),
        ("step,w0\n1,inf\n", "line 2, column 2"),
        ("step,w0,w1\n1,1.0,2.0\n2,1.0\n", "line 3, column 3: 2 values where the first line has 3"),
        ("step,w0\n1,1.0,9.0\n", "line 2, column 3: 3 values"),
        ("step,w0,w1\n1,1.0,\n", "line 2, column 3: '' is not a number"),
        ("0,add,node1\n", "line 1, column 2: 'add' is not a number"),
        ("step,w0\nx,1.0\n", "line 2, column 1: 'x' is not a step's number"),
        ("step,w0\n1.5,1.0\n", "line 2, column 1"),
        ("step,w0\n", "holds no steps"),
        ("", "holds no steps"),
        ("1\n2\n", "line 1: no workers"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused_with_line_and_column(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_fleet(str(write(tmp_path, text)), sample_ms=1.0)
    assert part in str(caught.value)
    assert "trace.csv" in str(caught.value)


def test_a_file_that_cannot_be_read_is_a_value_error(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\x93\xff\x00\x01")
    for path, part in [("none.csv", "No such file"), (".", "directory"), ("binary.csv", "not a text file")]:
        with pytest.raises(ValueError, match=part):
            read_trace(tmp_path / path)
