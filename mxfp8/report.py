"""Ways to show results: rich tables, matplotlib figures, JSON, and one self-contained HTML file.

A leaf: it takes plain names and numbers and knows nothing of who computed them. Matplotlib is imported only when a
figure is drawn, through its object interface: no pyplot, no global figure list, no display.
"""

import base64
import html
import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cell = str | float | int | None

#: Colours that keep their contrast on white and on dark backgrounds.
BLUE, ORANGE, GREEN, RED, GREY = "#3b7dd8", "#e8833a", "#2f9e6e", "#d9485f", "#8a93a3"
SERIES_COLORS = (BLUE, ORANGE, GREEN, "#9b6dd6", RED, GREY)
VERDICT_COLORS = {"pass": GREEN, "fail": RED, "inconclusive": "#c58a12"}
_RICH_STYLES = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}

# Text and grid are drawn in these two colours, which the SVG then turns into CSS variables that follow the theme.
_INK, _GRID = "#1f2430", "#d5dae1"
_STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "mxfp8",  # stable ids: the same numbers give the same file
}

# A string that reads as one number, possibly with a sign, separators, an exponent or a percent sign.
_NUMBER = re.compile(r"[+-]?[\d.,]+(e[+-]?\d+)?( ?%)?")

# --- text, tables, JSON ------------------------------------------------------------------------------------------


def percent(x: float, *, signed: bool = False) -> str:
    """``0.000213 -> "0.0213 %"``: three significant digits, at most five decimals; ``signed`` writes the plus too."""
    return f"{percent_number(x, signed=signed)} %"


def percent_number(x: float, *, signed: bool = False) -> str:
    """``percent`` without its sign, for a column that says so in its heading."""
    sign = "+" if signed else ""
    return f"{100 * x:{sign}.5f}" if 0 < abs(x) < 1e-6 else f"{100 * x:{sign}.3g}"


def format_cell(value: Cell) -> str:
    """Strings as they are, integers with thousands separators, floats to four digits, None as an en dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, caption: str | None = None) -> Table:
    """A rich table; numeric columns are right-aligned, verdict words coloured, markup in cells shown literally.

    ValueError when a row has another number of cells than there are columns (names the row).
    """
    _check_rows(columns, rows)
    out = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(columns):
        out.add_column(name, justify="right" if _is_numeric(rows, i) else "left", overflow="fold")
    for row in rows:
        out.add_row(*(Text(format_cell(c), style=_RICH_STYLES.get(str(c), "")) for c in row))
    return out


def _check_rows(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    for i, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"row {i} has {len(row)} cells for {len(columns)} columns ({', '.join(columns)}): {row}")


def _is_numeric(rows: Sequence[Sequence[Cell]], column: int) -> bool:
    cells = [row[column] for row in rows if row[column] is not None]
    return bool(cells) and all(isinstance(c, (int, float)) or _NUMBER.fullmatch(str(c)) for c in cells)


def to_jsonable(value: Any, where: str = "value") -> Any:
    """Plain JSON types from dataclasses, enums, paths, mappings, sequences, numpy and torch values.

    JSON has no NaN or Inf. They are neither dropped nor turned into null: they become the strings ``"NaN"``,
    ``"Infinity"``, ``"-Infinity"``, which ``float()`` reads back. TypeError names the place of anything else.
    """
    if isinstance(value, Enum):
        return to_jsonable(value.value, where)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name), f"{where}.{f.name}") for f in fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        odd = [k for k in value if not isinstance(k, str)]
        if odd:
            raise TypeError(f"{where}: JSON keys must be strings, got {odd[0]!r}")
        return {k: to_jsonable(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if hasattr(value, "tolist"):
        return to_jsonable(value.tolist(), where)
    raise TypeError(f"{where}: cannot write {type(value).__name__} as JSON")


def write_json(path: str | Path, value: Any) -> Path:
    """Writes ``to_jsonable(value)``, indented, all or nothing; creates the folder. Returns the path."""
    return write_text(path, json.dumps(to_jsonable(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def write_text(path: str | Path, text: str) -> Path:
    """Writes UTF-8 text all or nothing (a temporary file beside it, then a rename); creates the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


# --- figures -----------------------------------------------------------------------------------------------------


def _new_axes(height: float, width: float = 8.0) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    return figure, axes


def _styled() -> Any:
    import matplotlib

    return matplotlib.rc_context(_STYLE)  # type: ignore[arg-type]


def figure_to_data_uri(figure: "Figure", fmt: Literal["svg", "png"] = "svg") -> str:
    """The figure as a ``data:`` URI for an ``<img>``.

    SVG (default) stays sharp and its text and grid follow the reader's light or dark theme; PNG has a white background.
    """
    buffer = io.BytesIO()
    with _styled():
        if fmt == "svg":
            # No date and no links in the file: equal figures are equal bytes.
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        elif fmt == "png":
            figure.savefig(buffer, format="png", dpi=160, facecolor="white")
        else:
            raise ValueError(f"fmt must be 'svg' or 'png', got {fmt!r}")
    if fmt == "png":
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    svg = buffer.getvalue().decode()
    svg = svg[svg.index("<svg") :].replace(_INK, "var(--ink)").replace(_GRID, "var(--grid)")
    theme = (
        f"<style>svg{{--ink:{_INK};--grid:{_GRID}}}"
        "@media (prefers-color-scheme:dark){svg{--ink:#e3e7ee;--grid:#3a4150}}</style>"
    )
    head_end = svg.index(">") + 1
    return "data:image/svg+xml;base64," + base64.b64encode((svg[:head_end] + theme + svg[head_end:]).encode()).decode()


def plot_training_curves(
    curves: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]],
    *,
    title: str = "Training",
    xlabel: str = "step",
    ylabel: str = "normalised entropy",
) -> "Figure":
    """``{series: [(x, y) of each seed, ...]}``: every seed thin, their mean thick where the seeds share their x."""
    with _styled():
        figure, axes = _new_axes(3.6)
        for color, (name, runs) in zip(_colors(len(curves)), curves.items(), strict=True):
            shared = len({tuple(x) for x, _ in runs}) == 1
            for i, (x, y) in enumerate(runs):
                lone = name if not shared and i == 0 else None
                axes.plot(x, y, color=color, lw=0.8, alpha=0.35 if shared else 0.9, label=lone)
            if shared:
                mean = [math.fsum(column) / len(column) for column in zip(*(y for _, y in runs), strict=True)]
                axes.plot(runs[0][0], mean, color=color, lw=2, label=f"{name} (mean of {len(runs)})")
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        axes.margins(x=0.01)
        axes.legend()
        return figure


def _colors(n: int) -> list[str]:
    return [SERIES_COLORS[i % len(SERIES_COLORS)] for i in range(n)]


def plot_forest(
    rows: Sequence[tuple[str, float, float, float, str]],
    *,
    tolerance: float,
    title: str = "Relative NE difference",
) -> "Figure":
    """``(name, estimate, low, high, verdict)`` per row, as fractions, against the tolerance band.

    The axis is linear inside the tolerance and logarithmic outside: intervals of very different width stay legible.
    """
    with _styled():
        figure, axes = _new_axes(1.5 + 0.45 * len(rows))
        farthest = max([tolerance * 2, *(abs(v) for _, _, low, high, _ in rows for v in (low, high))])
        decades = [tolerance * 10**k for k in range(1 + math.ceil(math.log10(farthest / tolerance)))]
        reach = decades[-1] * 1.15
        axes.set_xscale("symlog", linthresh=tolerance, linscale=1.0)
        axes.axvspan(-tolerance, tolerance, color=GREEN, alpha=0.13, lw=0, zorder=0)
        axes.axvline(0.0, color=GREY, lw=0.9, zorder=1)
        for y, (_, estimate, low, high, verdict) in enumerate(rows):
            color = VERDICT_COLORS.get(verdict, GREY)
            axes.plot([low, high], [y, y], color=color, lw=2.6, zorder=3)
            axes.plot([estimate], [y], "o", color=color, ms=7, zorder=4)
            words = f"{percent(estimate, signed=True)}  {verdict}"
            axes.text(1.02, y, words, transform=axes.get_yaxis_transform(), va="center", color=color, weight="bold")
        ticks = [-d for d in reversed(decades)] + [0.0] + decades
        axes.set_xticks(ticks, [percent(v, signed=True) if v else "0" for v in ticks])
        axes.minorticks_off()
        axes.set_yticks(range(len(rows)), [row[0] for row in rows])
        axes.grid(axis="y", visible=False)
        axes.set(title=title, xlim=(-reach, reach), ylim=(len(rows) - 0.4, -0.6))
        axes.set_xlabel(f"candidate better  ←   0   →  candidate worse        band: tolerance ± {percent(tolerance)}")
        return figure


def plot_layer_sqnr(
    rows: Sequence[tuple[str, float]], *, floor_db: float | None = None, title: str = "SQNR per layer"
) -> "Figure":
    """``(layer, SQNR in dB)`` per bar, in the given order; a bar under ``floor_db`` is red.

    NaN and -inf get a red word instead of a bar, +inf (exact) a grey one.
    """
    with _styled():
        figure, axes = _new_axes(1.1 + 0.24 * len(rows))
        longest = max((db for _, db in rows if math.isfinite(db)), default=1.0)
        for y, (_, db) in enumerate(rows):
            finite = math.isfinite(db)
            words = f"{db:.1f}" if finite else ("exact" if db == math.inf else str(db))
            ink, x = _INK if finite else (GREY if db == math.inf else RED), 0.0
            if finite:
                axes.barh(y, db, height=0.72, color=RED if floor_db is not None and db < floor_db else BLUE)
                # The number stands in the foot of the bar, clear of the floor line, or after a bar too short for it.
                ink, x = ("white", 0.0) if db > 0.15 * longest else (_INK, max(db, 0.0))
            axes.annotate(words, (x, y), (5, 0), textcoords="offset points", va="center", color=ink)
        if floor_db is not None:
            axes.axvline(floor_db, color=RED, lw=1.2, ls=(0, (4, 3)), label=f"floor {floor_db:g} dB")
            figure.legend(loc="outside upper right")
        _layer_axis(axes, [name for name, _ in rows])
        axes.set(title=title, xlabel="dB, higher is better")
        return figure


def plot_health(
    rows: Sequence[tuple[str, float, float]], *, title: str = "Underflow and saturation per layer"
) -> "Figure":
    """``(layer, underflow fraction, saturated fraction)`` per line, in percent on a symmetric-log axis that shows 0.

    ValueError names the layer whose fraction is NaN or outside [0, 1]: a plot would leave it out.
    """
    odd = [row for row in rows if not (0 <= row[1] <= 1 and 0 <= row[2] <= 1)]
    if odd:
        raise ValueError(f"layer {odd[0][0]!r}: fractions must be in [0, 1], got {odd[0][1]} and {odd[0][2]}")
    with _styled():
        figure, axes = _new_axes(1.3 + 0.24 * len(rows))
        for index, (name, color, marker) in enumerate((("underflow", BLUE, "o"), ("saturated", ORANGE, "D"))):
            axes.plot([100 * row[1 + index] for row in rows], range(len(rows)), marker, color=color, ms=5.5, label=name)
        for y, row in enumerate(rows):
            axes.plot([100 * row[1], 100 * row[2]], [y, y], color=GREY, lw=0.9, alpha=0.6, zorder=1)
        axes.set_xscale("symlog", linthresh=1e-3)
        ticks = [0, 1e-3, 1e-2, 1e-1, 1, 10, 100]
        axes.set_xticks(ticks, [f"{v:g} %" for v in ticks])
        axes.minorticks_off()
        _layer_axis(axes, [row[0] for row in rows])
        axes.set(title=title, xlim=(-2e-4, 140), xlabel="share of elements")
        figure.legend(loc="outside upper right", ncols=2)
        return figure


def _layer_axis(axes: "Axes", names: Sequence[str]) -> None:
    # Full names of deep modules would leave no room for the data: keep both ends.
    short = [name if len(name) <= 52 else f"{name[:25]}…{name[-26:]}" for name in names]
    axes.set_yticks(range(len(names)), short)
    axes.grid(axis="y", visible=False)
    axes.set_ylim(len(names) - 0.4, -0.6)


def plot_calibration(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, title: str = "Calibration"
) -> "Figure":
    """``{series: (mean prediction, observed rate) of each bin}`` against the diagonal of a calibrated model."""
    with _styled():
        figure, axes = _new_axes(4.2, width=4.8)
        top = max([v for x, y in series.values() for v in (*x, *y)], default=1.0) * 1.05
        axes.plot([0, top], [0, top], color=GREY, lw=1, ls=(0, (4, 3)), label="calibrated")
        for color, (name, (x, y)) in zip(_colors(len(series)), series.items(), strict=True):
            axes.plot(x, y, "o-", color=color, lw=1.6, ms=4.5, label=name)
        axes.set(title=title, xlabel="mean prediction", ylabel="observed rate", xlim=(0, top), ylim=(0, top))
        axes.set_aspect("equal")
        axes.legend()
        return figure


# --- one HTML file -----------------------------------------------------------------------------------------------

_CSS = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1f2430;--soft:#5c6675;--line:#e1e5ea;--accent:#3b7dd8;
--pass:#23835a;--fail:#c73650;--inconclusive:#9a6a08}
@media (prefers-color-scheme:dark){:root{--bg:#14171d;--card:#1c2028;--ink:#e3e7ee;--soft:#9aa4b4;--line:#2d333e;
--accent:#6ea3ec;--pass:#4cc38f;--fail:#f0718a;--inconclusive:#e0b040}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:980px;margin:0 auto;padding:40px 20px 64px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:1.15rem;margin:40px 0 12px;padding-bottom:6px;border-bottom:1px solid var(--line)}
p{margin:10px 0;max-width:75ch}
.subtitle,figcaption,caption,.label{color:var(--soft)}
.subtitle{margin:0 0 20px}
.verdict{display:flex;gap:14px;align-items:center;background:var(--card);border:1px solid var(--line);
border-left:5px solid var(--tone);border-radius:10px;padding:14px 18px;margin:12px 0}
.verdict b{color:var(--tone);text-transform:uppercase;letter-spacing:.06em}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:16px 0}
.fact{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 16px}
.fact .label{font-size:.8rem}
.fact .value{font-size:1.2rem;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:14px 0;padding:8px 4px;
overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem}
caption{text-align:left;padding:6px 14px 8px;font-size:.88rem}
th,td{padding:6px 10px;text-align:left;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}
th{font-weight:600;color:var(--soft);vertical-align:bottom}
td.num,th.num{text-align:right;font-variant-numeric:tabular-nums}
td.num{white-space:nowrap}
td.pass,td.fail,td.inconclusive{font-weight:600;color:var(--tone)}
.pass{--tone:var(--pass)}.fail{--tone:var(--fail)}.inconclusive{--tone:var(--inconclusive)}
figure{margin:0;padding:10px 14px}
figure img{display:block;width:100%;height:auto}
figcaption{font-size:.86rem;margin-top:8px}
"""


class HtmlReport:
    """One HTML file with everything inside: no script, no link, light and dark. Text is escaped. Methods chain."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = html.escape(title)
        self._parts = [f"<h1>{self._title}</h1>"]
        if subtitle:
            self._parts.append(f'<p class="subtitle">{html.escape(subtitle)}</p>')

    def _add(self, part: str) -> "HtmlReport":
        self._parts.append(part)
        return self

    def heading(self, text: str) -> "HtmlReport":
        return self._add(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> "HtmlReport":
        return self._add(f"<p>{html.escape(text)}</p>")

    def verdict(self, verdict: Literal["pass", "fail", "inconclusive"], text: str) -> "HtmlReport":
        """A banner in the colour of the verdict; ValueError for any other word."""
        if verdict not in VERDICT_COLORS:
            raise ValueError(f"verdict must be one of {', '.join(VERDICT_COLORS)}, got {verdict!r}")
        return self._add(f'<div class="verdict {verdict}"><b>{verdict}</b><span>{html.escape(text)}</span></div>')

    def facts(self, facts: Mapping[str, Cell]) -> "HtmlReport":
        """Key figures as a row of cards."""
        cards = "".join(
            f'<div class="fact"><div class="label">{html.escape(name)}</div>'
            f'<div class="value">{html.escape(format_cell(value))}</div></div>'
            for name, value in facts.items()
        )
        return self._add(f'<div class="facts">{cards}</div>')

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, caption: str = "") -> "HtmlReport":
        """Same cells, alignment and errors as the rich ``table``."""
        _check_rows(columns, rows)
        numeric = ["num" if _is_numeric(rows, i) else "" for i in range(len(columns))]

        def cell(tag: str, value: Cell, css: str) -> str:
            css = str(value) if tag == "td" and str(value) in VERDICT_COLORS else css
            # A dotted name may break after its dots, so that a wide table fits the page.
            text = re.sub(r"(?<=\w)\.(?=[a-z])", ".<wbr>", html.escape(format_cell(value)))
            return f'<{tag} class="{css}">{text}</{tag}>'

        head = "".join(cell("th", c, n) for c, n in zip(columns, numeric, strict=True))
        body = "".join(
            "<tr>" + "".join(cell("td", c, n) for c, n in zip(row, numeric, strict=True)) + "</tr>" for row in rows
        )
        title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
        return self._add(
            f'<div class="card"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def figure(self, figure: "Figure", caption: str = "", *, fmt: Literal["svg", "png"] = "svg") -> "HtmlReport":
        alt = html.escape(caption or "figure", quote=True)
        shown = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
        width = round(96 * figure.get_figwidth() * 1.2)  # CSS pixels; a narrow figure is not blown up to the page
        image = f'<img style="max-width:{width}px" alt="{alt}" src="{figure_to_data_uri(figure, fmt)}">'
        return self._add(f'<div class="card"><figure>{image}{shown}</figure></div>')

    def render(self) -> str:
        """The whole document."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{self._title}</title><style>{_CSS}</style></head>\n<body><main>\n"
            + "\n".join(self._parts)
            + "\n</main></body></html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Writes the file all or nothing; creates the folder. Returns the path."""
        return write_text(path, self.render())
