# SPDX-License-Identifier: Apache-2.0
"""How pictures of results look: one style, one colour per system, values at bars, settings under the title.

    python -m weft.bench.pictures bench/results/h200-x4-collective.json collective.png

draws a benchmark's JSON again. A call that was measured at one size is a group of bars, one at several sizes a panel
with a line per system. ``floor`` is a short black line: what the machine would need at best, as the benchmark says.
"""

from __future__ import annotations

import io
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import invalid
from weft.runtime.files import write_file
from weft.runtime.tables import size_text

if TYPE_CHECKING:
    from weft.bench.report import Row

WEFT = "#1f6feb"
FLOOR = "#111111"
# The same system has the same colour in every picture; baselines are muted beside Weft.
COLORS = {
    "weft": WEFT,
    "nccl": "#76b041",
    "gloo": "#9b7fd1",
    "deep_ep": "#e8833a",
    "nixl": "#d1495b",
    "mooncake": "#2a9d8f",
    "raw": "#8d99ae",
    "one_write": "#c9ada7",
    "memcpy": "#b8bec8",
}
_OTHERS = ("#b5838d", "#6d6875", "#457b9d", "#bc6c25")
_SHADES = (WEFT, "#0b3d91", "#58a6ff", "#003f5c", "#8ab8ff", "#3a0ca3")
_SETTINGS = ("ranks", "tokens", "hidden", "top_k", "experts", "sms", "routes")
# What a call is, where its name does not say it: for the footnote.
_CALLS = {
    "write_imm_latency": "half a round trip",
    "write_rate": "a write, 64 under way",
    "paged_write": "1000 pages of 4 KiB in random order",
    "scatter": "8 writes to 8 places",
}


def color_of(system: str) -> str:
    """Return the colour of a system, always the same one."""
    return COLORS.get(system) or _OTHERS[sum(system.encode()) % len(_OTHERS)]


def time_text(us: float) -> str:
    """Return microseconds as three digits with a unit: 3.45 us, 1.00 ms, 124 ms."""
    amount, unit = (us / 1e6, "s") if us >= 999_500 else (us / 1e3, "ms") if us >= 999.5 else (us, "us")
    return f"{amount:#.3g}".rstrip(".") + f" {unit}"


def settings_of(rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> str:
    """Return what all rows of a document share, and the machine, for a subtitle."""
    gpus = machine.get("gpus") or []
    on_gpu = bool(gpus) and any(row.get("device", "cuda") == "cuda" for row in rows)
    where = (
        f"{len(gpus)} {gpus[0]}"
        if on_gpu
        else f"{machine.get('cpu', 'CPU')}, {machine.get('cores', '?')} cores"
    )
    parts = [where]
    for name in _SETTINGS:
        values = {row.get(name) for row in rows if row.get(name) is not None}
        if len(values) == 1:
            parts.append(f"{name.replace('_', '-')} {values.pop()}")
    dtypes = sorted({row["dtype"] for row in rows} - {"bytes", "int64"})
    return ", ".join([*parts, *dtypes])


@contextmanager
def picture(
    path: Path, title: str, subtitle: str = "", shape: tuple[int, int] = (1, 1), panel: Any = (9.0, 4.8)
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its panels, [rows][columns] of axes, in the one style; write it as PNG in the end.

    Args:
        title: one line: what is compared. subtitle: the settings.
        shape: rows and columns of panels. panel: width and height of one, in inches.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": "#e6e8ec",
        "legend.frameon": False,
        "axes.titlesize": 11,
    }
    with pyplot.rc_context(style):
        rows, columns = shape
        size = (columns * panel[0], rows * panel[1] + 0.8)
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
        try:
            yield figure, axes
            head = 0.8 / size[1]
            figure.text(0.01, 1 - 0.28 * head, title, fontsize=14, fontweight="bold", va="top")
            figure.text(0.01, 1 - 0.66 * head, subtitle, fontsize=9.5, color="#57606a", va="top")
            lines = sum(text.get_text().count("\n") + 1 for text in figure.texts[:-2])
            figure.tight_layout(rect=(0, max(0.03, (0.15 * lines + 0.05) / size[1]), 1, 1 - head))
            drawn = io.BytesIO()
            figure.savefig(drawn, dpi=120, facecolor="white", format=path.suffix[1:].lower())
            write_file(path, drawn.getvalue())
        finally:
            pyplot.close(figure)


def footnote(figure: Any, text: str) -> None:
    """Put a text under all panels, such as what the floor means, in as many lines as it takes."""
    wrapped = textwrap.fill(text, int(15 * figure.get_figwidth()))
    figure.text(0.01, 0.008, wrapped, fontsize=8, color="#57606a", va="bottom")


def draw_bars(axes: Any, groups: Sequence[str], values: Mapping[str, Sequence[float | None]]) -> None:
    """Draw a group of bars per name, a bar per system, each with its time.

    Args:
        groups: below the bars. values: system -> microseconds by group, None where it was not measured.
    """
    width = 0.82 / len(values)
    for index, (system, of_groups) in enumerate(values.items()):
        at = [(place - 0.41 + width * (index + 0.5), us) for place, us in enumerate(of_groups) if us]
        bars = axes.bar(
            [x for x, _ in at], [us for _, us in at], width * 0.94, color=color_of(system), label=system
        )
        size = 8.5 if len(values) * len(groups) < 9 else 7.5
        axes.bar_label(bars, [time_text(us) for _, us in at], padding=2, fontsize=size)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.16)


def mark_floors(axes: Any, floors: Sequence[float | None], half: float = 0.43) -> None:
    """Mark the floor of each group of bars by a line across it, with its time."""
    label = "floor"
    for place, us in enumerate(floors):
        if us:
            axes.plot([place - half, place + half], [us, us], color=FLOOR, linewidth=1.4, label=label)
            at = {"ha": "right", "va": "bottom", "fontsize": 8.5, "path_effects": _outline()}
            axes.text(place + half, us, f"floor {time_text(us)}", **at)
            label = "_nolegend_"


def time_axis(axes: Any, is_log: bool = True) -> None:
    """Show times with units on the y axis, enough of them on a logarithmic one."""
    from matplotlib import ticker

    if is_log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        steps = (1.0,) if high / low > 300 else (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=steps, numticks=12))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda us, _: _tick_text(us)))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.tick_params(axis="y", labelsize=8.5)


def _tick_text(us: float) -> str:
    """Return a round time without the zeroes behind its point."""
    amount, unit = time_text(us).split()
    return f"{float(amount):g} {unit}" if us else "0"


def _outline() -> list[Any]:
    from matplotlib import patheffects

    return [patheffects.withStroke(linewidth=2.5, foreground="white")]


def size_axis(axes: Any, sizes: Sequence[int]) -> None:
    """Scale x by powers of two, with sizes as KiB and MiB below the points."""
    axes.set_xscale("log", base=2)
    shown = sorted(set(sizes))
    shown = shown[:: -(-len(shown) // 9)]
    axes.set_xticks(shown, [size_text(size) for size in shown], fontsize=8.5)
    axes.minorticks_off()


def draw_rows(title: str, rows: Sequence[Row], path: Path, subtitle: str = "", note: str = "") -> None:
    """Draw measured rows beside their baselines and floors, a panel for each call of several sizes; write a PNG.

    Args:
        subtitle: the settings. note: what the floor means.
    """
    calls = list(dict.fromkeys(row.call for row in rows))
    of_calls = [[row for row in rows if row.call == call] for call in calls]
    if not any(_has_sizes(of_call) for of_call in of_calls):
        with picture(path, title, subtitle, panel=(max(7.5, 2.4 * len(rows)), 4.4)) as (figure, axes):
            _draw_groups(axes[0][0], [f"{row.label}\n{row.dtype}" for row in rows], rows)
            footnote(figure, note)
        return
    columns = 1 if len(calls) == 1 else 2
    with picture(path, title, subtitle, (-(-len(calls) // columns), columns), (6.6, 3.6)) as (figure, axes):
        panels = list(axes.flat)
        for call, of_call, panel in zip(calls, of_calls, panels, strict=False):
            if _has_sizes(of_call):
                _draw_lines(panel, of_call)
            else:
                names = [f"{size_text(row.bytes)}\n{row.series}".rstrip() for row in of_call]
                _draw_groups(panel, names, of_call)
            panel.set_title(call, loc="left", fontweight="bold")
        for unused in panels[len(calls) :]:
            unused.set_axis_off()
        footnote(figure, note)


def _has_sizes(rows: Sequence[Row]) -> bool:
    return len({row.bytes for row in rows}) > 2


def _baselines(rows: Sequence[Row]) -> list[str]:
    """Return the other systems of these rows, peers first."""
    known = list(COLORS)
    names = {name for row in rows for name in row.baselines}
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def _draw_groups(axes: Any, groups: Sequence[str], rows: Sequence[Row]) -> None:
    """A group of bars per row: Weft's and its baselines'."""
    values: dict[str, list[float | None]] = {"weft": [row.us for row in rows]}
    values |= {name: [row.baselines.get(name) for row in rows] for name in _baselines(rows)}
    draw_bars(axes, groups, values)
    mark_floors(axes, [row.floor_us for row in rows])
    measured = [us for of_system in values.values() for us in of_system if us]
    time_axis(axes, is_log=max(measured) / min(measured) > 500)
    axes.margins(y=0.2)
    axes.set_ylabel("median, slowest rank", fontsize=9)
    axes.legend(
        ncols=len(values) + 1, fontsize=8.5, loc="lower right", bbox_to_anchor=(1, 1), columnspacing=1
    )


def _draw_lines(axes: Any, rows: Sequence[Row]) -> None:
    """One call at several sizes: a line per system; at Weft's points the first peer's time as a multiple."""
    names = _baselines(rows)
    labels = list(dict.fromkeys(row.series for row in rows))
    for index, series in enumerate(labels):
        mine = sorted((row for row in rows if row.series == series), key=lambda row: row.bytes)
        label = f"weft {series}".rstrip()
        if len(labels) == 1 and names:
            label += f"; Nx: time of {names[0]} over it"
            _note_ratios(axes, mine, names[0])
        color = _SHADES[index % len(_SHADES)]
        axes.plot(
            [row.bytes for row in mine], [row.us for row in mine], "o-", color=color, label=label, zorder=3
        )
    for name in names:
        points = sorted({(row.bytes, row.baselines[name]) for row in rows if name in row.baselines})
        axes.plot(*zip(*points, strict=True), "s--", color=color_of(name), label=name, markersize=4)
    floors = sorted({(row.bytes, row.floor_us) for row in rows if row.floor_us})
    if floors:
        axes.plot(*zip(*floors, strict=True), ":", color=FLOOR, label="floor")
    axes.margins(y=0.16)
    time_axis(axes)
    size_axis(axes, [row.bytes for row in rows])
    axes.set_ylabel("median, slowest rank", fontsize=9)
    axes.legend(fontsize=8.5)


def _note_ratios(axes: Any, rows: Sequence[Row], name: str) -> None:
    for row in rows:
        if name in row.baselines:
            at = {"xytext": (0, -14), "textcoords": "offset points", "ha": "center", "zorder": 5}
            ratio = f"{row.baselines[name] / row.us:.1f}x"
            text = axes.annotate(ratio, (row.bytes, row.us), fontsize=8, color=WEFT, **at)
            text.set_path_effects(_outline())


def explanations(notes: Sequence[str]) -> str:
    """Return what a report says of its floor and of raw baselines, for the footnote."""
    found = (re.search(rf"(?<!\w){name}: .*", note) for note in notes for name in ("floor", "raw"))
    return "; ".join(said[0].rstrip(".") for said in found if said)


def draw_document(document: Mapping[str, Any], path: Path) -> None:
    """Draw a benchmark's JSON (``weft.bench.report`` says what it holds)."""
    from weft.bench.report import Row, check_document

    if wrong := check_document(dict(document)):
        raise invalid("document", "; ".join(wrong[:3]), "the JSON of a weft bench command")
    rows = [
        Row(
            *(row["call"], row["dtype"], row["tokens"], row["bytes"]),
            [row["us_min"], row["us"], row["us_max"]],
            row["floor_us"],
            row["checked"],
            row["baselines"],
            series=row.get("series") or _pages(row),
        )
        for row in document["rows"]
    ]
    words = [word for word in document["command"].split() if "=" not in word]
    title = " ".join(words[:3])
    subtitle = settings_of(document["rows"], document["machine"])
    if provider := re.search(r"--provider (\S+)", document["command"]):
        subtitle += f", {provider[1]}"
    called = dict.fromkeys(row.call for row in rows)
    notes = [f"{call}: {_CALLS[call]}" for call in called if call in _CALLS]
    note = "; ".join(filter(None, [*notes, explanations(document.get("notes", []))]))
    draw_rows(title, rows, path, subtitle, note)


def _pages(row: Mapping[str, Any]) -> str:
    """Return which pages of its pool a paged write took; "" for other calls."""
    if "pool" not in row:
        return ""
    return "all pages" if row["pool"] == 1 else f"one page in {row['pool']}"


def main() -> None:
    """Draw argv[1], a benchmark's JSON, into argv[2]."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m weft.bench.pictures RESULT.json PICTURE.png")
    draw_document(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    print(f"wrote {sys.argv[2]}")


if __name__ == "__main__":
    main()
