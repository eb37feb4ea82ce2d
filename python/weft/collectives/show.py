# SPDX-License-Identifier: Apache-2.0
"""``weft show``: draw the schedule of a collective program and sum it up.

    weft show algo.xml -o algo.svg           # time by rank and block, an arrow for every message
    weft show allreduce_allpairs --ranks 4 --bytes 1M --html algo.html
    weft show allreduce_allpairs --ranks 8 --chunk 3.0 -o way.svg     # the way of rank 3's chunk 0 alone

A drawing of many blocks has no arrows but those of the chunk that is named; the page shows those of the step under the
mouse, with what it waits for, and zooms with the wheel. Times are the cost model's for one slice of every chunk, not
measurements.
"""

from __future__ import annotations

import argparse
import html
import math
from collections import defaultdict
from pathlib import Path

from weft.collectives.chunk_names import chunk_names
from weft.collectives.compile import add_source_arguments, read_arguments
from weft.collectives.cost import MACHINES, Estimate, Machine, estimate
from weft.collectives.ir import Algorithm, Op
from weft.collectives.structure import VerificationError
from weft.collectives.verifier import verify
from weft.errors import Error, invalid
from weft.runtime.files import write_file
from weft.runtime.tables import size, size_text

Names = dict[tuple[int, int, int], tuple[str, ...]]  # of the chunks that a step moves

_COLORS = {
    Op.SEND: "#4c78a8",
    Op.RECV: "#72b7b2",
    Op.RECV_COPY_SEND: "#54a24b",
    Op.RECV_REDUCE_SEND: "#eeca3b",
    Op.RECV_REDUCE_COPY: "#f58518",
    Op.RECV_REDUCE_COPY_SEND: "#e45756",
    Op.COPY: "#bab0ac",
    Op.REDUCE: "#b279a2",
}
_MEANINGS = {
    Op.SEND: "send",
    Op.RECV: "receive",
    Op.RECV_COPY_SEND: "receive, store, forward",
    Op.RECV_REDUCE_SEND: "receive, add, forward",
    Op.RECV_REDUCE_COPY: "receive, add, store",
    Op.RECV_REDUCE_COPY_SEND: "receive, add, store, forward",
    Op.COPY: "copy",
    Op.REDUCE: "add",
}
ALL = "all"  # messages have arrows
_MOST_ROWS_WITH_ARROWS = 40
_ROW, _GAP, _LEFT, _RIGHT, _TOP, _WIDTH = 16, 8, 180, 36, 60, 1140
_LETTER = 5.2  # of a name on a bar: its width at most
_MOST_TICKS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_source_arguments(parser)
    parser.add_argument("--bytes", type=size, default="1M", help="of the algorithm buffer, for the times")
    parser.add_argument(
        "--machine",
        choices=sorted(MACHINES),
        help="of the cost model (default: nvlink where there are GPUs, else cpu)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the drawing there as SVG")
    parser.add_argument(
        "--chunk",
        default="",
        metavar="RANK.INDEX",
        help="draw the arrows of the messages with this chunk alone",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write a page whose steps say what they do under the mouse"
    )


def run(args: argparse.Namespace) -> int:
    """Print the summary; write the drawings that were asked for. Returns 1 where the algorithm is wrong."""
    algorithm = read_arguments(args)
    machine = MACHINES[args.machine or here()]
    print(summary(algorithm, args.bytes, machine))
    guess = estimate(algorithm, args.bytes, machine)
    subtitle = f"{size_text(args.bytes)} on {machine.name}, {time_parts(guess, machine)}"
    known = {name for names in chunk_names(algorithm).values() for name in names}
    if args.chunk and args.chunk not in known:
        raise invalid("chunk", args.chunk, "RANK.INDEX of a chunk that some step moves, such as 0.0")
    if args.output:
        rows = sum(1 for _ in algorithm.blocks())
        followed = args.chunk or (ALL if rows <= _MOST_ROWS_WITH_ARROWS else "")
        write_file(Path(args.output), svg(algorithm, guess, subtitle, followed))
        print(f"wrote {args.output}")
    if args.html:
        drawing = svg(algorithm, guess, subtitle, args.chunk or ALL, waits=True)
        text = page(algorithm, drawing, facts(algorithm, args.bytes, machine), args.chunk)
        write_file(Path(args.html), text)
        print(f"wrote {args.html}")
    try:
        verify(algorithm)
    except VerificationError as error:
        print(f"wrong: {error}")
        return 1
    return 0


def here() -> str:
    """Return which of MACHINES this one is like: it has GPUs, or has not."""
    try:
        from weft import _core

        return "nvlink" if _core.gpus() else "cpu"
    except (ImportError, Error):  # programs are drawn without the extension, too
        return "cpu"


def what_it_is(algorithm: Algorithm) -> str:
    """Return the collective, the protocol and the forms in a line."""
    forms = [
        name
        for name, is_on in (("in place", algorithm.inplace), ("out of place", algorithm.outofplace))
        if is_on
    ]
    return f"{algorithm.collective}, {algorithm.protocol}, {' and '.join(forms)}"


def facts(algorithm: Algorithm, num_bytes: int, machine: Machine) -> list[tuple[str, str]]:
    """Return steps, bytes per link, the critical path and the predicted time, by what they are called."""
    guess = estimate(algorithm, num_bytes, machine)
    kinds: dict[str, int] = defaultdict(int)
    for _, _, _, step in algorithm.steps():
        kinds[step.op.value] += 1
    links = guess.link_bytes
    (src, dst), most = max(links.items(), key=lambda item: item[1], default=((0, 0), 0))
    sent: dict[int, int] = defaultdict(int)
    for (sender, _), count in links.items():
        sent[sender] += count
    blocks = [len(program.blocks) for program in algorithm.ranks]
    by_kind = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return [
        ("ranks", f"{algorithm.num_ranks}, {algorithm.chunks} chunks"),
        ("blocks", f"{_span(blocks)} on a rank, {algorithm.channels} channel{'s'[: algorithm.channels > 1]}"),
        ("scratch", f"{max(p.scratch_chunks for p in algorithm.ranks)} chunks"),
        ("steps", f"{sum(kinds.values())}: {by_kind}"),
        ("critical path", f"{guess.critical_steps} steps"),
        (
            f"links, for {size_text(num_bytes)}",
            f"{len(links)}, at most {size_text(most)} on one ({src} to {dst}), "
            f"{size_text(max(sent.values(), default=0))} out of a rank",
        ),
        (f"predicted on {machine.name}", f"{guess.total_us:.1f} us: {time_parts(guess, machine)}"),
    ]


def _span(numbers: list[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(most) if least == most else f"{least} to {most}"


def summary(algorithm: Algorithm, num_bytes: int, machine: Machine) -> str:
    """Return what the program is and its facts, as lines of text."""
    lines = [f"{algorithm.name}: {what_it_is(algorithm)}"]
    return "\n".join(lines + [f"  {name}: {value}" for name, value in facts(algorithm, num_bytes, machine)])


def time_parts(guess: Estimate, machine: Machine) -> str:
    """Return what the predicted time is made of: the drawing shows the first slice alone."""
    drawn_us = max((event.end_us for event in guess.events), default=0.0)
    parts = [f"launch {machine.launch_us:.1f} us", f"first slice, as drawn, {drawn_us:.1f} us"]
    rest_us = guess.total_us - machine.launch_us - drawn_us
    if rest_us > 0.05:
        parts.append(f"further slices {rest_us:.1f} us")
    return " + ".join(parts)


def svg(
    algorithm: Algorithm, guess: Estimate, subtitle: str = "", followed: str = ALL, waits: bool = False
) -> str:
    """Return the drawing: a row per block, a bar per step, an arrow per message; ``subtitle`` under the title.

    ``followed``: ALL messages have arrows, or those with the chunk RANK.INDEX; "" none. ``waits``: of a step for one
    of another block, too, dashed.
    """
    names = chunk_names(algorithm)
    rows: dict[tuple[int, int], int] = {}
    at = _TOP
    for rank, number, _ in algorithm.blocks():
        if number == 0 and rank:
            at += _GAP
        rows[rank, number] = at
        at += _ROW
    end_us = max((event.end_us for event in guess.events), default=1.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / end_us
    height = at + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="10">',
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="5" markerHeight="5" orient="auto">'
        '<path d="M0 0L6 3L0 6z" fill="#555"/></marker></defs>',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="18" font-size="14">{_text(algorithm.name)}: {algorithm.collective}, {algorithm.num_ranks} '
        f"ranks, {algorithm.protocol}</text>",
        f'<text x="10" y="34" fill="#57606a">{_text(subtitle)}</text>',
    ]
    parts += _row_labels(algorithm, rows)
    parts += _bars(algorithm, guess, rows, scale, names)
    parts += _arrows(algorithm, guess, rows, scale, names, followed)
    if waits:
        parts += _wait_lines(algorithm, guess, rows, scale)
    parts += _axis(end_us, scale, at)
    return "\n".join([*parts, *_legend(algorithm, at + 34, waits), "</svg>", ""])


_STYLE = """
:root{color-scheme:light}
body{margin:0 auto;max-width:1240px;padding:16px 24px;font:14px/1.45 system-ui,sans-serif;color:#1f2328;background:#fff}
h1{font-size:20px;margin:0 0 2px}
.what{color:#57606a;margin:0 0 14px}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:8px;margin:0 0 14px}
dl div{border:1px solid #d0d7de;border-radius:6px;padding:6px 10px}
dt{color:#57606a;font-size:12px}
dd{margin:0;font-variant-numeric:tabular-nums}
form{display:flex;flex-wrap:wrap;gap:6px 18px;align-items:center;margin:0 0 8px}
.hint{color:#57606a}
input[type=text]{width:6em;font:inherit;border:1px solid #d0d7de;border-radius:4px;padding:1px 6px}
figure{margin:0;border:1px solid #d0d7de;border-radius:6px;overflow:hidden}
svg{display:block;width:100%;height:auto;cursor:grab}
rect.step:hover{stroke:#000;stroke-width:2}
rect.on{stroke:#d00;stroke-width:1.5}
path.message,path.wait{pointer-events:none}
path.wait{stroke:#06c;stroke-width:1.2;display:none}
svg.few path.message:not(.on){display:none}
svg path.on{display:inline;stroke:#d00;stroke-width:1.6}
svg path.wait.on{stroke:#06c}
svg.following path.message:not(.on){opacity:.25}
"""
_SCRIPT = """
const svg = document.querySelector("svg"), all = (q) => svg.querySelectorAll(q);
const follow = (names, id) => {
  all(".on").forEach((e) => e.classList.remove("on"));
  all("[data-chunks]").forEach((e) => {
    if (e.dataset.chunks.split(" ").some((n) => names.has(n))) e.classList.add("on");
  });
  all("path.wait").forEach((e) => { if (e.dataset.of === id) e.classList.add("on"); });
  svg.classList.add("following");
};
const asked = document.querySelector("input[type=text]"), every = document.querySelector("input[type=checkbox]");
const clear = () => { all(".on").forEach((e) => e.classList.remove("on")); svg.classList.remove("following"); };
const show_asked = () => (asked.value.trim() ? follow(new Set([asked.value.trim()]), "") : clear());
asked.oninput = show_asked;
every.onchange = () => svg.classList.toggle("few", !every.checked);
document.querySelector("form").onsubmit = (e) => e.preventDefault();
all("rect.step").forEach((e) => {
  e.onmouseenter = () => follow(new Set(e.dataset.chunks.split(" ").slice(0, 1)), e.id);
  e.onmouseleave = show_asked;
});
const whole = svg.getAttribute("viewBox").split(" ").map(Number);
document.querySelector("button").onclick = () => { box = [...whole]; show(); };
show_asked();
let box = svg.getAttribute("viewBox").split(" ").map(Number);
const show = () => svg.setAttribute("viewBox", box.join(" "));
svg.onwheel = (e) => {
  e.preventDefault();
  const by = e.deltaY < 0 ? 0.8 : 1.25, r = svg.getBoundingClientRect();
  const x = box[0] + ((e.clientX - r.left) / r.width) * box[2];
  const y = box[1] + ((e.clientY - r.top) / r.height) * box[3];
  box = [x - (x - box[0]) * by, y - (y - box[1]) * by, box[2] * by, box[3] * by];
  show();
};
svg.onmousemove = (e) => {
  if (e.buttons !== 1) return;
  const r = svg.getBoundingClientRect();
  box[0] -= (e.movementX / r.width) * box[2];
  box[1] -= (e.movementY / r.height) * box[3];
  show();
};
"""


def page(algorithm: Algorithm, drawing: str, facts: list[tuple[str, str]], followed: str = "") -> str:
    """Return an HTML page with the drawing and what is known of the program.

    A step under the mouse shows what it does, the arrows of the first chunk that it moves and what it waits for; a
    chunk's name can be typed; the wheel zooms, dragging moves. Of many blocks, the way of one chunk is shown first.
    """
    is_small = sum(1 for _ in algorithm.blocks()) <= _MOST_ROWS_WITH_ARROWS or followed
    few, checked = ("", " checked") if is_small else ("few", "")
    shown = followed or (
        "" if is_small else min(name for names in chunk_names(algorithm).values() for name in names)
    )
    known = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts)
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{_text(algorithm.name)}</title><style>{_STYLE}</style>\n"
        f"<h1>{_text(algorithm.name)}</h1>"
        f"<p class='what'>{_text(what_it_is(algorithm))}</p>\n<dl>{known}</dl>\n"
        f"<form><label>chunk <input type='text' value='{shown}' placeholder='0.0' "
        "aria-label='chunk, as RANK.INDEX'></label>"
        f"<label><input type='checkbox'{checked}> all messages</label>"
        "<button type='button'>whole drawing</button>"
        "<span class='hint'>A step under the mouse shows the way of its first chunk, and what it waits for. "
        "Wheel: zoom. Drag: move.</span></form>\n"
        f"<figure>{drawing.replace('<svg ', f'<svg class={chr(34)}{few}{chr(34)} ', 1)}</figure>"
        f"<script>{_SCRIPT}</script></html>\n"
    )


def _row_labels(algorithm: Algorithm, rows: dict[tuple[int, int], int]) -> list[str]:
    parts = []
    for rank, number, block in algorithm.blocks():
        y = rows[rank, number]
        peers = (f" to {block.send}" if block.send >= 0 else "") + (
            f" from {block.recv}" if block.recv >= 0 else ""
        )
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW - 2}" fill="#f4f4f4"/>'
        )
        parts.append(f'<text x="10" y="{y + 11}">rank {rank} block {number}{peers}</text>')
    return parts


def _bars(
    algorithm: Algorithm,
    guess: Estimate,
    rows: dict[tuple[int, int], int],
    scale: float,
    names: Names,
) -> list[str]:
    parts = []
    for event in guess.events:
        step = algorithm.ranks[event.rank].blocks[event.block].steps[event.step]
        x = _LEFT + event.start_us * scale
        width = max(1.5, (event.end_us - event.start_us) * scale)
        reads = f" {step.src}" if step.op.reads_src else ""
        writes = f" into {step.dst}" if step.op.writes_dst else ""
        moved = names.get((event.rank, event.block, event.step), ())
        tip = (
            f"{algorithm.place(event.rank, event.block, event.step)}:{reads}{writes}, {step.count} chunks "
            f"({' '.join(moved[:8])}{' ...' if len(moved) > 8 else ''}), "
            f"{event.start_us:.2f} to {event.end_us:.2f} us"
        )
        parts.append(
            f'<rect class="step" id="s{event.rank}-{event.block}-{event.step}" data-chunks="{" ".join(moved)}" '
            f'x="{x:.1f}" y="{rows[event.rank, event.block]}" width="{width:.1f}" '
            f'height="{_ROW - 2}" fill="{_COLORS[step.op]}"><title>{_text(tip)}</title></rect>'
        )
        label = moved[0] + (f" +{len(moved) - 1}" if len(moved) > 1 else "") if moved else ""
        if label and width > _LETTER * len(label) + 4:
            y = rows[event.rank, event.block] + _ROW - 5
            parts.append(
                f'<text class="name" x="{x + 2:.1f}" y="{y}" font-size="9" fill="white" pointer-events="none">{label}'
                "</text>"
            )
    return parts


def _arrows(
    algorithm: Algorithm,
    guess: Estimate,
    rows: dict[tuple[int, int], int],
    scale: float,
    names: Names,
    followed: str,
) -> list[str]:
    sends: dict[tuple[int, int, int], list[tuple[float, int, tuple[str, ...]]]] = defaultdict(list)
    parts = []
    for event in guess.events:
        block = algorithm.ranks[event.rank].blocks[event.block]
        y = rows[event.rank, event.block] + _ROW // 2 - 1
        op = block.steps[event.step].op
        if op.receives:
            source = sends[block.recv, event.rank, block.channel].pop(0)
            x0, x1 = _LEFT + source[0] * scale, _LEFT + event.start_us * scale
            tip = (
                f"rank {block.recv} to rank {event.rank}, channel {block.channel}: {' '.join(source[2][:8])}"
            )
            arrow = (
                f'<path class="message" data-chunks="{" ".join(source[2])}" '
                f'd="M{x0:.1f} {source[1]}L{x1:.1f} {y}" stroke="#555" stroke-width="0.7" '
                f'fill="none" marker-end="url(#tip)"><title>{tip}</title></path>'
            )
            if followed == ALL or followed in source[2]:
                parts.append(arrow)
        if op.sends:
            moved = names.get((event.rank, event.block, event.step), ())
            sends[event.rank, block.send, block.channel].append((event.end_us, y, moved))
    return parts


def _wait_lines(
    algorithm: Algorithm, guess: Estimate, rows: dict[tuple[int, int], int], scale: float
) -> list[str]:
    """Draw what steps wait for in other blocks of their rank."""
    ends = {(event.rank, event.block, event.step): event.end_us for event in guess.events}
    parts = []
    for event in guess.events:
        step = algorithm.ranks[event.rank].blocks[event.block].steps[event.step]
        y = rows[event.rank, event.block] + _ROW // 2 - 1
        for block, at in step.depends:
            x0 = _LEFT + ends[event.rank, block, at] * scale
            y0 = rows[event.rank, block] + _ROW // 2 - 1
            parts.append(
                f'<path class="wait" data-of="s{event.rank}-{event.block}-{event.step}" stroke-dasharray="3 2" '
                f'fill="none" d="M{x0:.1f} {y0}L{_LEFT + event.start_us * scale:.1f} {y}"/>'
            )
    return parts


def _axis(end_us: float, scale: float, y: int) -> list[str]:
    """Draw round times, above and below, and the end."""
    power = 10.0 ** math.floor(math.log10(end_us))
    step_us = next(power * part for part in (0.1, 0.2, 0.5, 1, 2) if end_us / (power * part) <= _MOST_TICKS)
    times = [step_us * tick for tick in range(int(end_us / step_us) + 1)]
    if (end_us - times[-1]) * scale < 60:  # room for the end's own label
        times.pop()
    parts = []
    for us in (*times, end_us):
        x = _LEFT + us * scale
        text = f"{us:.1f} us" if us == end_us else f"{us:g} us"
        parts.append(f'<path d="M{x:.1f} {_TOP}V{y}" stroke="#ccc" stroke-width="0.5"/>')
        for height in (_TOP - 3, y + 12):
            parts.append(f'<text x="{x:.1f}" y="{height}" text-anchor="middle">{text}</text>')
    return parts


def _legend(algorithm: Algorithm, y: int, waits: bool) -> list[str]:
    used = {step.op for _, _, _, step in algorithm.steps()}
    parts, x = [], _LEFT
    for op, color in _COLORS.items():
        if op in used:
            parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
            parts.append(f'<text x="{x + 14}" y="{y}">{op.value}: {_MEANINGS[op]}</text>')
            x += 32 + 6 * len(f"{op.value}: {_MEANINGS[op]}")
    lines = [("message", "#555", "none")] + ([("wait for another block", "#06c", "3 2")] if waits else [])
    for meaning, color, dashes in lines:
        parts.append(
            f'<path d="M{x} {y - 4}h18" stroke="{color}" stroke-width="1.2" stroke-dasharray="{dashes}"/>'
        )
        parts.append(f'<text x="{x + 22}" y="{y}">{meaning}</text>')
        x += 44 + 6 * len(meaning)
    return parts


def _text(text: str) -> str:
    return html.escape(text)
