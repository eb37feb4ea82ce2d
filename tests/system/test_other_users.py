# SPDX-License-Identifier: Apache-2.0
"""What another user of the host can do to commands: nothing. Attackers run as `nobody`, which takes root."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from programs import WEFT, environment, run_program

from weft import _core
from weft.runtime import top
from weft.runtime.files import write_file
from weft.runtime.logs import printable

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

# Holds counters that it is given, under the name that Weft gives them, until its input ends.
HOLDS_COUNTERS = """
import os, sys
length = int(sys.argv[1])
for _ in range(int(sys.argv[2])):
    memory = os.memfd_create("weft-tally")
    os.truncate(memory, length)
    os.pwrite(memory, sys.stdin.buffer.read(length) if _ == 0 else b"", 0)
print("ready", flush=True)
sys.stdin.buffer.read()
"""


@contextmanager
def fake(page: bytes, copies: int = 1, name: str = "python3") -> Iterator[int]:
    """Run a process of another user that has such counters; yield its number."""
    program = subprocess.Popen(
        [name, "-c", HOLDS_COUNTERS, str(len(page)), str(copies)],
        executable="/usr/bin/python3",
        cwd="/",
        env={},
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert program.stdin and program.stdout
    try:
        program.stdin.write(page)
        program.stdin.flush()
        assert program.stdout.readline() == b"ready\n"
        yield program.pid
    finally:
        program.stdin.close()
        program.stdout.close()
        program.wait(timeout=20)


def own_page() -> bytes:
    """Return the counters of this process, as others find them."""
    _core.tally()
    for descriptor in Path("/proc/self/fd").iterdir():
        if os.path.islink(descriptor) and "/memfd:weft-tally" in os.readlink(descriptor):
            return descriptor.read_bytes()
    raise AssertionError("no counters")


def hostile_page() -> bytes:
    """Return counters of the right form, in which every number and name is whatever hurts."""
    page = bytearray(own_page())
    with_header = page[:64]
    names = b"\x1b]0;owned\x07\x1b[31m\xff\n" + "‮".encode()
    page = bytearray((names * (len(page) // len(names) + 1))[: len(page)])
    page[:64] = with_header
    page[40:80] = struct.pack("<5Q", *[2**64 - 1] * 5)
    return bytes(page)


@pytest.fixture
def honest(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of this user that Weft counts in."""
    code = "import sys, weft; weft._core.tally(); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin and program.stdout and program.stdout.readline() == "ready\n"
        try:
            yield program
        finally:
            program.stdin.close()


@needs_root
def test_top_sees_processes_of_its_user_alone_unless_asked(honest: subprocess.Popen[str]) -> None:
    with fake(own_page()) as pid:
        seen = {one.pid for one in top.look()}
        assert honest.pid in seen and pid not in seen
        assert {honest.pid, pid} <= {one.pid for one in top.look(all_users=True)}


@needs_root
@pytest.mark.parametrize("kind", ["hostile", "zeros", "noise", "short", "long", "many"])
def test_fake_counters_hide_nothing_and_bring_no_control_characters(
    kind: str, honest: subprocess.Popen[str], tmp_path: Path
) -> None:
    real = own_page()
    pages = {
        "hostile": hostile_page(),
        "zeros": bytes(len(real)),
        "noise": os.urandom(len(real)),
        "short": real[:100],
        "long": real + bytes(1 << 20),
        "many": real,
    }
    with fake(pages[kind], 500 if kind == "many" else 1, name="\x1b]0;owned\x07") as pid:
        only = ["--pid", str(pid), "--pid", str(honest.pid), "--all-users"]
        shown = run_program([*WEFT, "top", "--once", "--seconds", "0.1", *only], tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert str(honest.pid) in shown.stdout
        for text in (shown.stdout, shown.stderr):
            assert "Traceback" not in text
            assert printable(text.replace("\n", "")) == text.replace("\n", ""), text
        listed = run_program([*WEFT, "top", "--json", *only], tmp_path)
        assert honest.pid in [one["pid"] for one in json.loads(listed.stdout)]
        recorded = run_program([*WEFT, "top", "--record", str(tmp_path / "calls_"), *only], tmp_path)
        assert recorded.returncode == 0, recorded.stderr


def test_names_that_are_no_text_are_read() -> None:
    counted = _core.tally_from(hostile_page())
    assert any("\\xff" in row["operation"] for row in counted["operations"])


@needs_root
def test_a_planted_link_is_refused_and_its_target_is_left_alone(
    honest: subprocess.Popen[str], tmp_path: Path
) -> None:
    target, shared = tmp_path / "precious", tmp_path / "shared"
    target.write_text("precious")
    shared.mkdir()
    shared.chmod(0o777)
    link = shared / "calls_0"
    link.symlink_to(target)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    command = [*WEFT, "top", "--record", str(shared / "calls_"), "--pid", str(honest.pid)]
    ran = run_program(command, tmp_path)
    assert ran.returncode == 1, ran.stdout
    assert f"a link of user {NOBODY}, allowed: a file, or a link of this user: '{link}'" in ran.stderr
    assert target.read_text() == "precious"
    link.unlink()
    assert run_program(command, tmp_path).stdout.strip() == str(link)


@needs_root
@pytest.mark.parametrize("option", ["--output", "--html"])
def test_commands_do_not_write_through_links_of_others(option: str, tmp_path: Path) -> None:
    target, link = tmp_path / "precious", tmp_path / "drawing"
    target.write_text("precious")
    link.symlink_to(target)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    ran = run_program([*WEFT, "show", "allgather_ring", "--ranks", "2", option, str(link)], tmp_path)
    assert ran.returncode == 1, ran.stdout
    assert "a link of user 65534" in ran.stderr
    assert target.read_text() == "precious"


def test_files_are_written_whole_and_own_links_are_followed(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to("file")
    write_file(link, "one")
    file.chmod(0o640)
    write_file(link, b"two")
    assert link.is_symlink() and file.read_text() == "two"
    assert file.stat().st_mode & 0o777 == 0o640
    with pytest.raises(OSError, match="nowhere"):
        write_file(tmp_path / "nowhere" / "file", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
    write_file(Path("/dev/null"), "")
    assert not os.path.islink("/dev/null")


@needs_root
def test_a_cache_below_a_folder_of_others_is_said_by_doctor(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "cache").mkdir(parents=True)
    shared.chmod(0o777)
    ran = run_program([*WEFT, "doctor", "--json"], tmp_path, more={"WEFT_CACHE_DIR": str(shared / "cache")})
    (finding,) = (one for one in json.loads(ran.stdout) if one["what"].startswith("cache "))
    assert finding["state"] == "wrong"
    assert f"{shared}: mode 0777, allowed: writable by its owner alone; chmod go-w {shared}" in finding["why"]
