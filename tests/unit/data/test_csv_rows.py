"""CSV: the first line names the columns; what does not fit is named by its line."""

import gzip

import pytest

from muster.core.errors import UsageError
from muster.data.files.row_files import locate, read_rows


def test_quotes_line_ends_a_mark_at_the_start_and_gzip(tmp_path):
    text = '\ufeffprompt,completion\r\n"a, ""b""","x\ny"\r\n\r\nq,é\r\n'
    (tmp_path / "a.csv").write_text(text, newline="")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    rows = [{"prompt": 'a, "b"', "completion": "x\ny"}, {"prompt": "q", "completion": "é"}]
    assert list(read_rows(tmp_path / "a.csv")) == list(read_rows(tmp_path / "a.csv.gz")) == rows
    assert locate([tmp_path / "a.csv"], 1) == f"{tmp_path}/a.csv:5"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a,b\n1,2\n1\n", "x.csv:3: 1 values for 2 columns"),
        ("a,a\n1,2\n", "x.csv:1: column 'a' occurs twice"),
        ('a\n"1\n', "x.csv:2: not CSV"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, text, wanted):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UsageError, match=wanted):
        list(read_rows(tmp_path / "x.csv"))


def test_a_long_field(tmp_path):
    (tmp_path / "x.csv").write_text("text\n" + "word " * 60_000 + "\n")
    assert len(next(read_rows(tmp_path / "x.csv"))["text"]) == 300_000
