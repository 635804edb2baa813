"""What code that has taken over a verifier can do to the machine: nothing.

Each attack runs inside a worker and in a program of the verifier `command`; the same code in a program that is confined
in nothing shows that it is an attack at all.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import trio

from verifiers.base import Task, TaskRef
from verifiers.sandbox import Sandbox, open_sandbox
from verifiers.settings import CommandSettings, VerifierSettings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="confinement is the Linux kernel's")

VERIFIER = """
from verifiers.base import Task, canonical_json

class Overtaken:
    name, version = "overtaken", "1"

    def canonical(self, config):
        return canonical_json(config)

    def make(self, ref):
        return Task(ref, "overtaken", "p", None)

    def score(self, task, answer):
        scope = {}
        exec(answer, scope)
        return float(bool(scope.get("got")))
"""

PROGRAM = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    reply = {"prompt": "p", "answer": None}
    if request["op"] == "score":
        scope = {}
        try:
            exec(request["answer"], scope)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        reply = {"reward": float(bool(scope.get("got")))}
    print(json.dumps(reply), flush=True)
"""

EVERYWHERE = {
    "reads the identity key": "got = open(KEY).read() == 'SECRET'",
    "reads the identity key beside packages": "got = open(NEAR_KEY).read() == 'SECRET'",
    "reads a key of the user": "got = open(HOME + '/.ssh/id_ed25519').read() == 'SECRET'",
    "reads the environment of the node": "got = 'SECRET' in open(f'/proc/{VICTIM}/environ').read()",
    "reads the memory of the node": "got = bool(open(f'/proc/{VICTIM}/mem', 'rb'))",
    "traces the node": "got = libc.ptrace(0x4206, VICTIM, 0, 0) == 0",
    "kills the node": "os.kill(VICTIM, signal.SIGCONT); got = True",
    "kills whatever it can": "got = libc.kill(VICTIM, 0) == 0",
    "starves the node of files": "resource.prlimit(VICTIM, resource.RLIMIT_CORE, (0, 0)); got = True",
    "has the kernel signal the node": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, VICTIM); got = True",
    "outlives the node": "got = libc.prctl(1, 0, 0, 0, 0) == 0",
    "connects over TCP": "got = bool(socket.create_connection(('127.0.0.1', TCP), timeout=2))",
    "sends over UDP": ("got = bool(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP)))"),
    "connects to a service of the machine": "s = socket.socket(socket.AF_UNIX); s.connect(UNIX); got = True",
    "connects to a nameless service": "s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + ABSTRACT); got = True",
    "listens": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); got = True",
    "writes a file": "open(FOLDER + '/new', 'w').close(); got = True",
    "makes a folder": "os.mkdir(FOLDER + '/folder'); got = True",
    "writes to what all can write to": "open('/tmp/' + NAME, 'w').close(); got = True",
    "deletes a file": "os.unlink(FOLDER + '/delete'); got = True",
    "empties a file": "os.truncate(FOLDER + '/empty', 0); got = True",
    "renames a file": "os.rename(FOLDER + '/rename', FOLDER + '/renamed'); got = True",
    "opens a file to all": "os.chmod(FOLDER + '/open', 0o666); got = True",
    "links to the key": "os.link(KEY, FOLDER + '/link'); got = True",
    "keeps memory that stays": ("i = libc.shmget(0, 4096, 0o1600); got = i != -1; got and libc.shmctl(i, 0, None)"),
    "becomes root in a system of its own": "got = libc.unshare(0x10000000) == 0",
    "fills the memory": "got = bool(bytearray(2**30))",
}

OF_WORKERS = {
    "forks": "got = bool(os.fork() or os._exit(0))",
    "starts a program": "got = subprocess.run(['true']).returncode == 0",
    "starts a thread": "t = threading.Thread(target=int); t.start(); got = True",
    "keeps memory as a file": "got = os.memfd_create('x') > 0",
}

OF_PROGRAMS = {
    "bombs with forks": """
started = []
try:
    while len(started) < 520:
        started.append(os.fork())
        if not started[-1]:
            time.sleep(60)
            os._exit(0)
finally:
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    for pid in started:
        os.waitpid(pid, 0)
got = True
""",
    "fills the disk": """
for number in range(4):
    with open(os.path.join(tempfile.gettempdir(), f'{NAME}-{number}'), 'wb') as file:
        file.write(bytes(3 * 2**20))
got = True
""",
    "writes one huge file": """
with open(os.path.join(tempfile.gettempdir(), NAME + '-huge'), 'wb') as file:
    os.truncate(file.fileno(), 9 * 2**20)
got = True
""",
}

PRECIOUS = ("delete", "empty", "rename", "open")

FORBIDDEN_TO_ALL = ("reads the memory of the node", "traces the node", "becomes root in a system of its own")
"""Attacks that some systems do not let an ordinary user make, wherever from."""


@dataclass
class Campaign:
    """What came of all attacks by each way in."""

    rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    changes: dict[str, list[str]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    isolation: dict[str, bool] = field(default_factory=dict)


@pytest.fixture(scope="module")
def campaign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    """All attacks, made once; of a single one's tests that one alone."""
    calls = [
        item.callspec
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    chosen = {call.params["attack"] for call in calls if "attack" in call.params}
    base = tmp_path_factory.mktemp("campaign")
    home = base / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_ed25519").write_text("SECRET")
    script = home / "program.py"
    script.write_text(PROGRAM)
    site = _site(base)
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"KEY": "SECRET"})
    with pytest.MonkeyPatch.context() as patch, _Services(base) as services:
        patch.setenv("PYTHONPATH", str(site))
        patch.setenv("HOME", str(home))
        patch.setenv("TMPDIR", str(base))
        names = {"HOME": str(home), "VICTIM": victim.pid, **services.names}
        try:
            yield trio.run(_attack, base, site, script, names, chosen)
        finally:
            victim.kill()
            victim.communicate()


def _site(base: Path) -> Path:
    """A folder of packages, with the verifier in it, and beside that a node's data directory."""
    site = base / "site"
    information = site / "overtaken-1.0.dist-info"
    information.mkdir(parents=True)
    (site / "overtaken.py").write_text(VERIFIER)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: overtaken\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[swarmnode.verifiers]\novertaken = overtaken:Overtaken\n")
    for data in (site / "node", base / "node"):
        data.mkdir()
        (data / "identity.key").write_text("SECRET")
    return site


class _Services:
    """Sockets that others of this machine serve."""

    def __init__(self, base: Path) -> None:
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", 0))
        # The path of a socket is short.
        self._path = Path(f"/tmp/swarmnode-test-{os.getpid()}")
        self._unix, self._abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self._unix.bind(str(self._path))
        self._abstract.bind(f"\0swarmnode-test-{os.getpid()}")
        self._unix.listen()
        self._abstract.listen()
        self.names = {
            "TCP": self._tcp.getsockname()[1],
            "UDP": self._udp.getsockname()[1],
            "UNIX": str(self._path),
            "ABSTRACT": f"swarmnode-test-{os.getpid()}",
        }

    def __enter__(self) -> "_Services":
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._tcp, self._udp, self._unix, self._abstract):
            each.close()
        self._path.unlink()


async def _attack(base: Path, site: Path, script: Path, names: dict[str, object], chosen: AbstractSet[str]) -> Campaign:
    argv = [sys.executable, str(script)]
    commands = {
        "program": CommandSettings(argv=argv),
        "free": CommandSettings(argv=argv, needs=["everything"]),
    }
    settings = VerifierSettings(answer_seconds=20, memory_mb=768, disk_mb=8, commands=commands)
    campaign = Campaign()
    async with open_sandbox(settings, [base / "node", site / "node"]) as sandbox:
        for way, more in (("worker", OF_WORKERS), ("program", OF_PROGRAMS), ("free", OF_WORKERS | OF_PROGRAMS)):
            folder = base / way
            folder.mkdir()
            for name in PRECIOUS:
                (folder / name).write_text("precious")
                (folder / name).chmod(0o600)
            here = {
                "FOLDER": str(folder),
                "NAME": f"swarmnode-test-{os.getpid()}-{way}",
                "KEY": str(base / "node" / "identity.key"),
                "NEAR_KEY": str(site / "node" / "identity.key"),
                **names,
            }
            task = await _task(sandbox, way)
            attacks = {name: code for name, code in (EVERYWHERE | more).items() if not chosen or name in chosen}
            texts = [_text(code, here) for code in attacks.values()]
            campaign.rewards[way] = dict(zip(attacks, await sandbox.score(task, texts), strict=True))
            campaign.changes[way] = _changes(folder)
            if way != "free":
                campaign.outcomes.update(sandbox.outcomes)
                sandbox.outcomes.clear()
        campaign.isolation = dict(sandbox.isolation)
    for left in Path("/tmp").glob(f"swarmnode-test-{os.getpid()}-*"):
        left.unlink()
    return campaign


async def _task(sandbox: Sandbox, way: str) -> Task:
    verifier, config = ("overtaken", {}) if way == "worker" else ("command", {"name": way})
    version, canonical = await sandbox.canonical(verifier, config)
    return await sandbox.make(TaskRef(verifier, version, canonical, 0, 0))


def _text(code: str, names: dict[str, object]) -> str:
    imports = "import ctypes, fcntl, os, resource, signal, socket, subprocess, tempfile, threading, time"
    return "\n".join(
        [imports, "libc = ctypes.CDLL(None)", *(f"{name} = {value!r}" for name, value in names.items()), code]
    )


def _changes(folder: Path) -> list[str]:
    """What is not as it was made."""
    there = {path.name for path in folder.iterdir()}
    same = {
        name
        for name in there & set(PRECIOUS)
        if (folder / name).read_text() == "precious" and (folder / name).stat().st_mode & 0o777 == 0o600
    }
    return sorted(set(PRECIOUS) - same | there - set(PRECIOUS))


def _fully_confined(campaign: Campaign) -> None:
    lacking = [name for name, done in campaign.isolation.items() if not done]
    if lacking:
        pytest.skip(f"this system does not let a process limit: {', '.join(lacking)}")


@pytest.mark.parametrize("attack", EVERYWHERE | OF_WORKERS)
def test_code_in_a_worker_never(campaign: Campaign, attack: str) -> None:
    _fully_confined(campaign)
    assert campaign.rewards["worker"][attack] == 0


@pytest.mark.parametrize("attack", EVERYWHERE | OF_PROGRAMS)
def test_a_program_never(campaign: Campaign, attack: str) -> None:
    _fully_confined(campaign)
    assert campaign.rewards["program"][attack] == 0


@pytest.mark.parametrize("attack", EVERYWHERE | OF_WORKERS | OF_PROGRAMS)
def test_without_confinement_a_program_does(campaign: Campaign, attack: str) -> None:
    if not campaign.rewards["free"][attack] and attack in FORBIDDEN_TO_ALL:
        pytest.skip("this system lets nobody do so")
    assert campaign.rewards["free"][attack] == 1


def test_no_attack_changes_a_file_or_ends_its_process(campaign: Campaign) -> None:
    _fully_confined(campaign)
    assert len(campaign.changes["free"]) > len(PRECIOUS)
    assert (campaign.changes["worker"], campaign.changes["program"]) == ([], [])
    assert not set(campaign.outcomes) - {"scored", "raised"} - {"memory"}


@dataclass
class Case:
    """A folder, with a program that executes what it is given and a verifier that does."""

    folder: Path
    script: Path

    async def score(self, codes: list[str], needs: list[str] | None = None, seconds: float = 20.0) -> list[float]:
        """What a program with these needs makes of each piece of code."""
        command = CommandSettings(argv=[sys.executable, str(self.script)], needs=needs or [])
        settings = VerifierSettings(answer_seconds=seconds, disk_mb=8, commands={"program": command})
        async with open_sandbox(settings, [self.folder / "node"]) as sandbox:
            task = await _task(sandbox, "program")
            return await sandbox.score(task, [_text(code, {"FOLDER": str(self.folder)}) for code in codes])


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setenv("PYTHONPATH", str(_site(tmp_path)))
    script = tmp_path / "scripts" / "program.py"
    script.parent.mkdir()
    script.write_text(PROGRAM)
    return Case(tmp_path, script)


async def test_a_reply_before_its_request_is_no_reply(case: Case) -> None:
    """An overtaken worker knows the number of the next request, and puts replies to it right behind its last one."""
    code = """
import sys
from verifiers.process import Channel
from verifiers.codec import pack
send = Channel.send
def early(self, value):
    if value[1] != 'ok':
        return send(self, value)
    Channel.send = send
    values = [value, *([value[0] + 1, *rest] for rest in (['ready'], ['reward', 1.0, 'scored'], ['ok', None]))]
    frames = [pack(each) for each in values]
    self._socket.sendall(b''.join(len(frame).to_bytes(4, 'big') + frame for frame in frames))
Channel.send = early
"""
    async with open_sandbox(VerifierSettings(), []) as sandbox:
        task = await _task(sandbox, "worker")
        assert await sandbox.score(task, [code]) == [0]
        assert sandbox.restarts == 0
        assert await sandbox.score(task, ["got = False", "got = True"]) == [0, 1]
        assert sandbox.restarts == 1


@pytest.mark.parametrize("way", ["ends", "hangs", "is ended"])
async def test_nothing_that_a_program_started_outlives_it(case: Case, way: str) -> None:
    """Not even what left its session, and has no parent that anybody could know it by."""
    mark = f"{time.time_ns() % 10**9 + 10**6}"
    flee = f"""
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execvp('sleep', ['sleep', '{mark}'])
    os._exit(0)
os.wait()
while b'{mark}' not in subprocess.run(['cat', *__import__('glob').glob('/proc/[0-9]*/cmdline')],
                                      capture_output=True).stdout:
    time.sleep(0.02)
"""
    codes = [flee + {"ends": "os._exit(1)", "hangs": "time.sleep(1000)", "is ended": "got = True"}[way]]
    rewards = await case.score(codes, seconds=3.0)
    assert rewards == [float(way == "is ended")]
    with trio.move_on_after(5):
        while left := [process for process in psutil.process_iter() if mark in _arguments(process)]:
            await trio.sleep(0.02)
    for process in left:
        process.kill()
    assert not left


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


async def test_a_program_does_what_programs_do(case: Case) -> None:
    """Its own files, modules and libraries, temporary files, processes, pipes and locks are there."""
    (case.script.parent / "beside.py").write_text("VALUE = 7")
    (case.script.parent / "data.txt").write_text("data")
    codes = [
        f"got = open({str(case.script.parent / 'data.txt')!r}).read() == 'data'",
        f"import sys; sys.path.insert(0, {str(case.script.parent)!r}); import beside; got = beside.VALUE == 7",
        "import sqlite3, ssl, numpy; got = numpy.ones(3).sum() == 3",
        "got = subprocess.run(['sh', '-c', 'echo $((6 * 7)) | cat'], capture_output=True).stdout == b'42\\n'",
        "f = tempfile.NamedTemporaryFile('w+'); f.write('x'); f.seek(0); os.chmod(f.name, 0o600); got = f.read()",
        "import multiprocessing; p = multiprocessing.get_context('fork').Pool(2); got = p.map(abs, [-1]) == [1]",
        "import asyncio; got = asyncio.run(asyncio.sleep(0, 1)) == 1",
        "t = threading.Thread(target=int); t.start(); t.join(); got = True",
        "got = open('/proc/self/status').read().count('VmRSS') == 1 and time.localtime().tm_year > 2000",
    ]
    assert await case.score(codes) == [1] * len(codes)


async def test_a_program_gets_what_its_settings_say_that_it_needs(case: Case) -> None:
    (case.folder / "models").mkdir()
    (case.folder / "models" / "weights").write_text("x")
    (case.folder / "out").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        codes = [
            "got = open(FOLDER + '/models/weights').read() == 'x'",
            "open(FOLDER + '/out/new', 'w').write('y'); got = True",
            f"got = bool(socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5))",
        ]
        assert await case.score(codes) == [0, 0, 0]
        needs = [str(case.folder / "models"), f"write:{case.folder / 'out'}", "network"]
        more = ["got = open(FOLDER + '/node/identity.key').read()", "s = socket.socket(socket.AF_UNIX); got = True"]
        assert await case.score(codes + more, needs) == [1, 1, 1, 0, 0]
        # Not even leave for everything around it opens the data directory.
        assert await case.score(codes[:2] + more, [f"write:{case.folder}"]) == [1, 1, 0, 0]
    assert (case.folder / "out" / "new").read_text() == "y"


def test_needs_that_are_none_are_explained() -> None:
    with pytest.raises(ValueError, match="'internet' is none of network, devices, everything, nor a full path"):
        CommandSettings(argv=["x"], needs=["internet"])


LACKING = """
import errno, json, sys, trio
from verifiers import seccomp
from verifiers.isolation import give_up_privileges
from verifiers.sandbox import open_sandbox
from verifiers.settings import CommandSettings, VerifierSettings
from tests.verifiers.test_confinement import _task

seccomp._NUMBERS["landlock_create_ruleset"] = (444, 444)
give_up_privileges()
assert seccomp.restrict([
    seccomp.Refused("unshare"),
    seccomp.Refused("landlock_create_ruleset", error=errno.ENOSYS),
    seccomp.Refused("prctl", "among", 0, (22,)),
])

async def main():
    command = CommandSettings(argv=[sys.executable, sys.argv[1]])
    async with open_sandbox(VerifierSettings(commands={"program": command}), []) as sandbox:
        scores = []
        for way in ("worker", "program"):
            task = await _task(sandbox, way)
            scores += await sandbox.score(task, ["got = True", "got = False", "got = bool(__import__('os').getpid())"])
        print(json.dumps([scores, dict(sandbox.isolation)]))

trio.run(main)
"""


def test_a_system_that_offers_nothing_runs_verifiers_all_the_same_and_is_reported(case: Case) -> None:
    """As an old kernel, or a container that forbids it all."""
    environment = {**os.environ, "PYTHONPATH": f"{case.folder / 'site'}:{Path(__file__).parents[2]}"}
    done = subprocess.run(
        [sys.executable, "-c", LACKING, str(case.script)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    scores, isolation = json.loads(done.stdout)
    assert scores == [1, 0, 1] * 2
    kept = {"memory", "files", "privileges", "program memory", "program privileges"}
    assert {name for name, done in isolation.items() if done} == kept
    assert set(isolation) - kept == {
        *("network", "secrets", "processes", "program network", "program disk", "program processes"),
        *("program files", "program calls"),
    }
