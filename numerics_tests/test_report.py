"""Reports: one self-contained HTML file, JSON that hides nothing, and figures that show the numbers given."""

import base64
import io
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from rich.console import Console

from mxfp8 import report

FOREST = [("trained", 0.001, -0.002, 0.004, "inconclusive"), ("same weights", 0.01, 0.009, 0.011, "fail")]


# --- text and tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "plain", "signed"),
    [
        (0.000213, "0.0213 %", "+0.0213 %"),
        (-0.5, "-50 %", "-50 %"),
        (0.0, "0 %", "+0 %"),
        (7.7e-7, "0.00008 %", "+0.00008 %"),
        (math.nan, "nan %", "+nan %"),
    ],
)
def test_percent(x: float, plain: str, signed: str) -> None:
    assert report.percent(x) == plain
    assert report.percent(x, signed=True) == signed


def test_rich_table_shows_cells_literally() -> None:
    table = report.table("T", ["layer", "count", "db"], [["[bold]x[/bold]", 12345, 31.5312], ["y", None, math.nan]])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    for words in ("[bold]x[/bold]", "12,345", "31.53", "–", "nan"):
        assert words in text
    assert [c.justify for c in table.columns] == ["left", "right", "right"]


def test_strings_that_are_numbers_are_right_aligned() -> None:
    table = report.table("T", ["a", "b", "c"], [["+0.1", "1 %", "0.fc1"], ["-1e-05", "2", "0.fc2"]])
    assert [c.justify for c in table.columns] == ["right", "right", "left"]


@pytest.mark.parametrize("make", [lambda c, r: report.table("T", c, r), report.HtmlReport("t").table])
def test_a_row_of_another_length_is_named(make: Any) -> None:
    with pytest.raises(ValueError, match=r"row 1 has 1 cells for 2 columns \(a, b\)"):
        make(["a", "b"], [["1", "2"], ["3"]])


# --- JSON --------------------------------------------------------------------------------------------------------


class Color(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    value: float
    path: Path


def test_json_spells_what_json_lacks(tmp_path: Path) -> None:
    data = {
        "inner": Inner(math.nan, Path("a/b")),
        "extremes": (math.inf, -math.inf),
        "enum": Color.RED,
        "numpy": np.array([[1.5, math.nan]]),
        "scalar": np.float32(0.5),
        "torch": torch.tensor([1, 2]),
        "none": None,
        "true": True,
    }
    path = report.write_json(tmp_path / "new" / "folder" / "x.json", data)

    def refuse(word: str) -> None:
        raise AssertionError(f"bare {word} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "inner": {"value": "NaN", "path": "a/b"},
        "extremes": ["Infinity", "-Infinity"],
        "enum": "red",
        "numpy": [[1.5, "NaN"]],
        "scalar": 0.5,
        "torch": [1, 2],
        "none": None,
        "true": True,
    }
    assert float("Infinity") == math.inf  # the spelling reads back


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {"b": object()}]}, r"value\.a\[1\]\.b: cannot write object as JSON"),
        ({"a": {1: 2}}, r"value\.a: JSON keys must be strings, got 1"),
    ],
)
def test_unwritable_values_are_named_and_nothing_is_written(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(TypeError, match=message):
        report.write_json(path, value)
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert path.read_text() == "old"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        report.HtmlReport("t").write(path)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "old"


# --- HTML --------------------------------------------------------------------------------------------------------


class Collector(HTMLParser):
    """Every tag with its attributes, every text, and whether the tags nest."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page() -> report.HtmlReport:
    hostile = "<script>alert('x')</script> & \"q\""
    out = report.HtmlReport(hostile, hostile).heading(hostile).text(hostile).facts({hostile: hostile})
    out.verdict("fail", hostile).table([hostile, "n"], [[hostile, 1.0], ["pass", 2.0]], caption=hostile)
    return out.figure(report.plot_forest(FOREST, tolerance=2e-4), hostile)


def test_html_is_one_escaped_self_contained_file(tmp_path: Path) -> None:
    text = page().write(tmp_path / "r.html").read_text(encoding="utf-8")
    seen = Collector(text)
    assert seen.open == []
    tags = {tag for tag, _ in seen.tags}
    assert not tags & {"script", "link", "iframe", "object", "base"}
    for tag, attributes in seen.tags:
        assert not set(attributes) & {"href", "onclick", "onload", "srcset"}
        assert (attributes.get("src") or "data:").startswith("data:"), tag
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    # title, h1, subtitle, h2, p, fact label and value, banner, th, td, table caption, figcaption
    assert sum("alert('x')" in t for t in seen.texts) == 12
    assert ("td", {"class": "pass"}) in seen.tags


def test_html_is_reproducible() -> None:
    assert page().render() == page().render()


def test_html_rejects_an_unknown_verdict() -> None:
    verdict: Any = "ok"
    with pytest.raises(ValueError, match="verdict must be one of pass, fail, inconclusive, got 'ok'"):
        report.HtmlReport("t").verdict(verdict, "")


# --- figures -----------------------------------------------------------------------------------------------------


def xs(line: Line2D) -> list[float]:
    values: list[float] = np.asarray(line.get_xdata()).tolist()
    return values


def ys(line: Line2D) -> list[float]:
    values: list[float] = np.asarray(line.get_ydata()).tolist()
    return values


def decoded(uri: str, mime: str) -> bytes:
    head, data = uri.split(",", 1)
    assert head == f"data:{mime};base64"
    return base64.b64decode(data, validate=True)


def test_svg_is_valid_and_follows_the_theme() -> None:
    svg = decoded(report.figure_to_data_uri(report.plot_forest(FOREST, tolerance=2e-4)), "image/svg+xml").decode()
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme:dark" in svg
    assert svg.count("var(--ink)") > 5
    assert svg.count("var(--grid)") > 2
    assert svg.count("#1f2430") == 1  # only where the light theme defines it


def test_png_and_unknown_format() -> None:
    figure = report.plot_layer_sqnr([("a", 30.0)])
    assert decoded(report.figure_to_data_uri(figure, "png"), "image/png").startswith(b"\x89PNG\r\n\x1a\n")
    fmt: Any = "gif"
    with pytest.raises(ValueError, match="fmt must be 'svg' or 'png', got 'gif'"):
        report.figure_to_data_uri(figure, fmt)


def test_forest_shows_intervals_band_and_verdicts() -> None:
    axes = report.plot_forest(FOREST, tolerance=2e-4).axes[0]
    lines = [line for line in axes.lines if line.get_marker() == "None" and len(set(ys(line))) == 1]
    assert [xs(line) for line in lines] == [[-0.002, 0.004], [0.009, 0.011]]
    assert [line.get_color() for line in lines] == [
        report.VERDICT_COLORS["inconclusive"],
        report.VERDICT_COLORS["fail"],
    ]
    assert [t.get_text() for t in axes.texts] == ["+0.1 %  inconclusive", "+1 %  fail"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["trained", "same weights"]
    low, high = axes.get_xlim()
    assert low < -0.011
    assert high > 0.011
    assert {"-0.02 %", "0", "+0.02 %"} <= {t.get_text() for t in axes.get_xticklabels()}


def test_forest_of_zero_width_intervals() -> None:
    axes = report.plot_forest([("same", 0.0, 0.0, 0.0, "pass")], tolerance=2e-4).axes[0]
    assert axes.get_xlim()[1] >= 2e-4


def test_sqnr_bars_mark_what_is_low_lost_or_exact() -> None:
    rows = [("nan", math.nan), ("lost", -math.inf), ("low", 20.0), ("fine", 30.0), ("exact", math.inf)]
    axes = report.plot_layer_sqnr(rows, floor_db=28.0).axes[0]
    bars = [p for p in axes.patches if isinstance(p, Rectangle)]
    assert [(b.get_width(), to_hex(b.get_facecolor())) for b in bars] == [(20.0, report.RED), (30.0, report.BLUE)]
    assert [t.get_text() for t in axes.texts] == ["nan", "-inf", "20.0", "30.0", "exact"]


def test_health_and_calibration_and_curves_show_their_numbers() -> None:
    health = report.plot_health([("a", 0.0, 0.5), ("b", 1e-4, 0.0)]).axes[0]
    assert [xs(line) for line in health.lines[:2]] == [[0.0, 0.01], [50.0, 0.0]]
    calibration = report.plot_calibration({"bf16": ([0.1, 0.5], [0.2, 0.4])}).axes[0]
    assert ys(calibration.lines[1]) == [0.2, 0.4]
    curves = report.plot_training_curves({"bf16": [([0, 1], [1.0, 0.5]), ([0, 1], [3.0, 1.5])]}).axes[0]
    assert ys(curves.lines[-1]) == [2.0, 1.0]  # the mean over seeds
    ragged = report.plot_training_curves({"bf16": [([0, 1], [1.0, 0.5]), ([0], [3.0])]}).axes[0]
    assert len(ragged.lines) == 2  # seeds that do not share their steps have no mean
    assert ragged.lines[0].get_label() == "bf16"


@pytest.mark.parametrize("bad", [math.nan, 1.5, -0.1])
def test_health_never_leaves_a_layer_out(bad: float) -> None:
    with pytest.raises(ValueError, match=r"layer 'b': fractions must be in \[0, 1\]"):
        report.plot_health([("a", 0.0, 0.5), ("b", 0.0, bad)])


def test_long_layer_names_keep_both_ends() -> None:
    name = "first." + "x" * 80 + ".last"
    shown = report.plot_layer_sqnr([(name, 30.0)]).axes[0].get_yticklabels()[0].get_text()
    assert shown.startswith("first.")
    assert shown.endswith(".last")
    assert len(shown) == 52


def test_matplotlib_is_imported_only_to_draw_and_never_pyplot() -> None:
    code = (
        "import sys; from mxfp8 import report; assert 'matplotlib' not in sys.modules;"
        "report.figure_to_data_uri(report.plot_layer_sqnr([('a', 30.0)]));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    root = Path(report.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
