# SPDX-License-Identifier: Apache-2.0
"""Two guests under QEMU, each with a kernel of its own and RDMA devices in software (rdma_rxe), joined by cables.

    with Cluster(image, cards=1) as (one, two):
        one.run("ibv_devinfo")                       # what it says; an error if it fails
        server = one.start("python server.py")       # a Job that goes on beside this
        two.run("python client.py 10.9.0.1")
        server.wait(60)
        one.fork("traffic", "owner verbs").wait(60)  # traffic.main() in a process that has imported it: see warm.py

No KVM is needed: QEMU translates. A guest's root is the host's, read-only, so paths are the same on both sides. Card c
of guest g is net<c> with 10.9.<c>.<g> and RDMA device rxe<c>. Nothing outlives a Cluster: guests end with this process,
and their folder is removed. Threads: one per guest at a time.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEWER_LIBFABRIC = ROOT / "build" / "mpich" / "lib" / "mpich" / "libfabric.so.1"  # see tools/newer-libfabric
BOOT_SECONDS = 180.0
BOOTS = 3  # QEMU's translation lets a kernel panic now and then, while its second CPU starts
WARM_SECONDS = 900.0  # torch in a guest on a busy machine
PAUSE_SECONDS = 0.05  # between looks at a file
MEMORY_MIB = 3072
# Takes away what a test may have left in a guest.
MENDED = (
    "for card in $(cd /sys/class/net && ls -d net*); do tc qdisc del dev $card root 2>/dev/null; "
    "ip link set $card up mtu 9000; done; busybox killall -q -9 owner writer; true"
)
WARM = {"plain": ("traffic",), "torch": ("ranks", "guide")}  # programs that one process imports: see warm.py
NICE = {"plain": 0, "torch": 10}  # an import gives way to what a test does
MTU_MAX = 9000
NIC_SLOT = 0x10  # on the PCI bus, of the first card


class GuestError(RuntimeError):
    """A guest, or a job in one, that did not do what it should."""


@dataclass(frozen=True)
class Image:
    """What guests boot: tools/rdma-test makes it."""

    folder: Path

    @property
    def kernel(self) -> Path:
        """Return the compressed kernel."""
        return next(iter((self.folder / "root" / "boot").glob("vmlinuz-*")))

    @property
    def modules(self) -> Path:
        """Return the folder that guests mount on /lib/modules."""
        return self.folder / "root" / "lib" / "modules"

    @property
    def initramfs(self) -> Path:
        """Return the root that a guest starts with."""
        return self.folder / "initramfs.gz"


class Job:
    """A command that runs in a guest."""

    def __init__(self, guest: Guest, command: str, name: str, suffix: str = ".cmd") -> None:
        """Start it; see Guest.start() and Guest.fork()."""
        self.guest, self.command, self._at = guest, command, guest.folder / name
        new = self._at.with_suffix(".new")
        new.write_text(command + "\n")
        new.rename(self._at.with_suffix(suffix))

    def output(self) -> str:
        """Return what it has said until now."""
        out = self._at.with_suffix(".out")
        return out.read_text(errors="replace") if out.exists() else ""

    def status(self) -> int | None:
        """Return how it ended; None: it goes on."""
        rc = self._at.with_suffix(".rc")
        return int(rc.read_text()) if rc.exists() else None

    def until(self, words: str, seconds: float) -> str:
        """Wait until it has said `words`, and return all that it has said."""
        end = time.monotonic() + seconds
        while words not in (said := self.output()):
            if self.status() is not None and words not in self.output():
                raise GuestError(f"{self}: ended with {self.status()} before it said {words!r}:\n{said}")
            self._pause(end, f"did not say {words!r} within {seconds} s", said)
        return said

    def wait(self, seconds: float) -> str:
        """Wait for its end, which must be a success, and return what it said."""
        status, said = self.wait_status(seconds)
        if status != 0:
            raise GuestError(f"{self}: ended with {status}:\n{said}")
        return said

    def wait_status(self, seconds: float) -> tuple[int, str]:
        """Wait for its end, whatever that is, and return the status and what it said."""
        end = time.monotonic() + seconds
        while (status := self.status()) is None:
            self._pause(end, f"did not end within {seconds} s", self.output())
        return status, self.output()

    def _pause(self, end: float, what: str, said: str) -> None:
        if not self.guest.is_up():
            raise GuestError(f"{self}: the guest is gone:\n{said}\n{self.guest.console()}")
        if time.monotonic() > end:
            raise GuestError(f"{self}: {what}:\n{said}")
        time.sleep(PAUSE_SECONDS)

    def __str__(self) -> str:
        """Return where it runs, and what."""
        return f"guest {self.guest.number}: {self.command}"


class Guest:
    """One guest; Cluster makes it."""

    def __init__(self, image: Image, folder: Path, number: int, cards: int, mtu: int, cpus: int) -> None:
        """Boot it, without waiting until it is up."""
        self.number, self.folder, self._jobs = number, folder / f"guest{number}", 0
        self._warm: dict[str, Job] = {}
        self.folder.mkdir()
        shutil.copy(HERE / "guest" / "agent", self.folder)
        log = (self.folder / "qemu.log").open("w")
        command = self._command(image, folder, cards, mtu, cpus)
        self._qemu = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=end_with_parent
        )
        log.close()

    def _command(self, image: Image, folder: Path, cards: int, mtu: int, cpus: int) -> list[str]:
        # On a busy host a guest may stand still while its kernel looks at its timers.
        timers = "no_timer_check nowatchdog"
        own = f"guest={self.number} mtu={mtu} modules={image.modules}"
        line = f"console=ttyS0 panic=-1 quiet mitigations=off nokaslr {timers} {own}"
        command = shlex.split(
            f"qemu-system-x86_64 -accel tcg,thread=multi,tb-size=256 -M q35 -cpu max -m {MEMORY_MIB} -smp {cpus} "
            f"-display none -nodefaults -no-reboot -device virtio-rng-pci -serial file:{self.folder}/console "
            f"-monitor unix:{self.folder}/monitor,server=on,wait=off -kernel {image.kernel} -initrd {image.initramfs}"
        )
        command += ["-append", line]
        for tag, path, mode in (
            ("root", Path("/"), ",readonly=on,multidevs=remap"),
            ("ctl", self.folder, ""),
        ):
            command += ["-fsdev", f"local,id={tag},path={path},security_model=none{mode}"]
            command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        for card in range(cards):
            cable, name = folder / f"cable{card}", f"card{card}"
            ends = f"local.path={cable}-{self.number},remote.type=unix,remote.path={cable}-{3 - self.number}"
            command += ["-netdev", f"dgram,id={name},local.type=unix,{ends}"]
            mac = f"52:54:00:09:{card:02}:{self.number:02}"
            place = f"addr={NIC_SLOT + card:#x},mac={mac},host_mtu={MTU_MAX}"
            command += ["-device", f"virtio-net-pci,netdev={name},id=nic{card},{place}"]
        return command

    def wait_up(self) -> None:
        """Wait until it takes jobs."""
        end = time.monotonic() + BOOT_SECONDS
        while not (self.folder / "up").exists():
            if not self.is_up() or time.monotonic() > end:
                raise GuestError(f"guest {self.number} did not come up:\n{self.console()}")
            time.sleep(PAUSE_SECONDS)

    def is_up(self) -> bool:
        """Return whether its QEMU goes on."""
        return self._qemu.poll() is None

    def console(self) -> str:
        """Return the end of what QEMU and the guest's kernel said."""
        texts = [self.folder / name for name in ("qemu.log", "console")]
        return "\n".join(text.read_text(errors="replace")[-3000:] for text in texts if text.exists())

    def start(self, command: str) -> Job:
        """Start a command for bash, which goes on beside the caller."""
        self._jobs += 1
        return Job(self, command, f"job{self._jobs}")

    def warm(self, program: str) -> None:
        """Start the process whose forks run a program of this folder; it imports it while the caller goes on."""
        group = next(name for name, programs in WARM.items() if program in programs)
        if group not in self._warm:
            search = os.pathsep.join([str(HERE), str(ROOT / "tests" / "system"), *filter(None, sys.path)])
            programs = " ".join(WARM[group])
            self._warm[group] = self.start(
                f"PYTHONPATH={search} OMP_NUM_THREADS=1 exec nice -n {NICE[group]} {sys.executable} "
                f"{HERE}/warm.py /ctl/{group} {programs}"
            )

    def fork(self, program: str, arguments: str) -> Job:
        """Run main() of a program of this folder, which goes on beside the caller. Waits until it has been imported."""
        self.warm(program)
        group = next(name for name, programs in WARM.items() if program in programs)
        self._warm[group].until("warm", WARM_SECONDS)
        self._jobs += 1
        return Job(self, f"{program} {arguments}", f"{group}-{self._jobs}", ".fork")

    def run(self, command: str, seconds: float = 120) -> str:
        """Run a command, which must succeed, and return what it said."""
        return self.start(command).wait(seconds)

    def monitor(self, command: str) -> None:
        """Give QEMU's monitor a command: stop, cont, set_link card0 off."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(10)
            line.connect(str(self.folder / "monitor"))
            said = b""
            for words in ("", command + "\n"):
                line.sendall(words.encode())
                said = b""
                while not said.endswith(b"(qemu) "):
                    said += line.recv(4096)

    def kill(self) -> None:
        """End it as a power cut does."""
        self._qemu.kill()
        self._qemu.wait()

    def stop(self) -> None:
        """Let it end by itself; kill it if it does not."""
        (self.folder / "stop").touch()
        try:
            self._qemu.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()


class Cluster:
    """Two guests for the length of a `with`."""

    def __init__(self, image: Image, cards: int = 1, mtu: int = MTU_MAX, cpus: int = 2) -> None:
        """Boot both, and wait until they are up and reach each other."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the folder goes then, too
        self._folder = Path(tempfile.mkdtemp(prefix="weft-rdma-"))
        self._parts = image, self._folder
        self._shape = cards, mtu, cpus
        self.guests: list[Guest] = []
        try:
            self.guests = [Guest(*self._parts, number, *self._shape) for number in (1, 2)]
            self._meet()
        except BaseException:
            self.close()
            raise

    def _meet(self) -> None:
        for number in (1, 2):
            self._wait_up(number)
        for card in range(self._shape[0]):
            self.guests[0].run(f"busybox ping -c 1 -W 10 10.9.{card}.2")

    def _wait_up(self, number: int) -> None:
        for left in reversed(range(BOOTS)):
            try:
                return self.guests[number - 1].wait_up()
            except GuestError as error:
                if left == 0:
                    raise
                print(f"guest {number} boots again: {error}", file=sys.stderr)
                self._replace(number)

    def _replace(self, number: int) -> None:
        old = self.guests[number - 1]
        if old.is_up():
            old.kill()
        shutil.rmtree(old.folder)
        for cable in self._folder.glob(f"cable*-{number}"):
            cable.unlink()
        self.guests[number - 1] = Guest(*self._parts, number, *self._shape)

    def again(self, number: int) -> Guest:
        """Boot a guest that has ended once more, and return it."""
        self._replace(number)
        self._meet()
        return self.guests[number - 1]

    def close(self) -> None:
        """End both, and remove their folder."""
        for guest in self.guests:
            guest.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> list[Guest]:
        """Return the two guests."""
        return self.guests

    def __exit__(self, *_: object) -> None:
        """End them."""
        self.close()


def end_with_parent() -> None:
    """Let a child get SIGKILL when this process ends, however it ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    os.setpgrp()


if __name__ == "__main__":  # guests.py IMAGE: whether guests come up here
    try:
        with Cluster(Image(Path(sys.argv[1]).resolve())):
            print("guests: two came up, and reached each other")
    except GuestError as said:
        sys.exit(str(said))
