"""A real Ray of two workers on the loopback: kills, crashes, Ctrl-C, wrong addresses."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from leakbound import audit, cluster
from leakbound.assess.record import Assessment, decode, encode
from leakbound.cluster import connection

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.linux,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # files that Ray leaves open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TABLE = {
    "name": "tiny",
    "seeds": [0, 1],
    "data": {"source": "digits"},
    "models": [{"name": "mlp", "hidden": [16]}],
    "attacks": [{"name": "linear_inversion"}, {"name": "inverting_gradients", "steps": [60, 61]}],
    "defenses": [{"name": "none"}, {"name": "gaussian_noise", "noise_std": 0.01}],
    "utility": {"rounds": 2, "repeats": 2},
}
MODEL = """
import os, time, torch
from pathlib import Path
class Noted(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        {at_forward}
        return self.inner(x)
def build(input_shape, classes):
    return Noted(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes)))
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A model in a folder that this process and the workers search; it does something first."""

    def write(name, at_forward):
        folder = tmp_path / "code"
        folder.mkdir()
        monkeypatch.syspath_prepend(str(folder))
        (folder / f"{name}.py").write_text(MODEL.format(at_forward=at_forward), encoding="utf-8")
        return f"{name}:build"

    return write


def processes():
    """Every living process: number and what started it, to tell reused numbers apart."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = (fields := stat.read_text().rpartition(")")[2].split())
            line = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if state != "Z":
            found[int(stat.parent.name), fields[19]] = (int(parent), line)
    return found


def descendants(pid):
    every, own = processes(), {pid}
    for _ in range(8):
        own |= {key[0] for key, (parent, _) in every.items() if parent in own}
    return {key for key in every if key[0] in own - {pid}}


@contextmanager
def leaving_nothing():
    """No process that is started meanwhile lives on, and no folder of Ray's."""
    before = descendants(os.getpid())
    yield
    limit = time.monotonic() + 600
    while descendants(os.getpid()) - before and time.monotonic() < limit:
        time.sleep(0.05)
    left = descendants(os.getpid()) - before
    assert not left, [processes().get(key) for key in left]
    assert not list(Path("/tmp").glob(f"leakbound-ray-{os.getpid()}-*"))


@pytest.fixture
def nothing_left():
    with leaving_nothing():
        yield


def outcome(out):
    pictures = {p.name: p.read_bytes() for p in (out / "pictures").iterdir()}
    return pictures | {n: (out / n).read_bytes() for n in ("records.jsonl", "utility.jsonl")}


def runs_of(out):
    return Counter(json.loads(t)["id"] for t in (out / "timings.jsonl").read_bytes().splitlines())


COMMAND = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); \
import leakbound.report as r; r.write = lambda out, images: out; \
from leakbound.cli import main; main()"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A plan of 24 cells, and its records by this process alone."""
    place = tmp_path_factory.mktemp("reference")
    text = "\n".join(
        f"[[attacks]]\nname = 'inverting_gradients'\nsteps = {steps}" for steps in (60, 61, 62, 63)
    )
    (place / "tiny.toml").write_text(
        "seeds = [0, 1, 2, 3, 4, 5]\n[data]\nsource = 'digits'\n"
        f"[[models]]\nname = 'mlp'\n{text}\n",
        encoding="utf-8",
    )
    audit.audit(audit.load(place / "tiny.toml"), place / "run")
    return place / "tiny.toml", (place / "run" / "records.jsonl").read_bytes()


def start(plan, out):
    line = [sys.executable, "-c", COMMAND, "audit", str(plan), "--out", str(out)]
    line += ["--workers", "2", "--engine", "ray"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, start_new_session=True)
    limit, records = time.monotonic() + 600, out / "records.jsonl"
    while process.poll() is None and time.monotonic() < limit:
        if records.exists() and records.read_bytes().count(b"\n") >= 3:
            return process
        time.sleep(0.02)
    process.kill()
    raise AssertionError(process.communicate()[1])


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_stopped_and_gone_on(reference, tmp_path, how):
    """Ctrl-C or a kill of the command: nothing lost, nothing left running; then to the end."""
    out, (plan, records) = tmp_path / "run", reference
    process = start(plan, out)
    own = descendants(process.pid)
    assert len(own) >= 5
    if how is signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.kill()
    _, errors = process.communicate(timeout=600)
    if how is signal.SIGINT:
        assert process.returncode == 130
        last = errors.strip().splitlines()[-1]
        assert last == "leakbound: stopped; nothing is lost: run the same command again to go on"
        assert "Traceback" not in errors
    limit = time.monotonic() + 600  # after a kill, Ray's own watchers end the rest
    while own & set(processes()) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not own & set(processes())
    if how is signal.SIGKILL:
        (left,) = Path("/tmp").glob(f"leakbound-ray-{process.pid}-*")
        shutil.rmtree(left)  # as docs/many_machines.md says
    kept = (out / "records.jsonl").read_bytes().count(b"\n")
    audit.audit(audit.load(plan), out)
    assert kept >= 3
    assert (out / "records.jsonl").read_bytes() == records
    assert set(runs_of(out).values()) == {1}


ASK = """
from ray._raylet import GcsClient
print(len(GcsClient(address={!r}).internal_kv_keys(b"", b"fun", 5)))
"""


def asked(address, given):
    """What a process with those variables learns of the pickles that workers will run."""
    kept = {name: value for name, value in os.environ.items() if "RAY_AUTH" not in name}
    line = [sys.executable, "-c", ASK.format(address)]
    return subprocess.run(line, env=kept | given, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_only_who_has_the_secret_is_let_in_and_only_the_loopback_listens(monkeypatch):
    """Loopback is open to every account; twice, as Ray keeps the first secret in mind."""
    import ray

    told, fresh = [], secrets.token_hex
    monkeypatch.setattr(secrets, "token_hex", lambda n: told.append(fresh(n)) or told[-1])
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    before = dict(os.environ)

    def check(*wrong):
        address = ray.get_runtime_context().gcs_address
        assert "RAY_AUTH_TOKEN" not in os.environ
        for given in wrong:
            outsider = asked(address, given)
            assert outsider.returncode != 0
            assert "InvalidAuthToken" in outsider.stderr
        assert (
            int(asked(address, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": told[-1]}).stdout) > 0
        )
        lines = " ".join(line for _, line in processes().values())
        assert told[-1] not in lines  # which every account can read
        pids = {os.getpid(), *(pid for pid, _ in descendants(os.getpid()))}
        listening = set().union(*(addresses(pid) for pid in pids))
        assert listening
        assert listening <= {"127.0.0.1", "::1"}

    with connection.connected(None, 1):
        assert ray.get(ray.remote(lambda: 7).remote()) == 7
        check({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
    with closing(cluster.run(audit.parse(TABLE), workers=1)) as flow:  # left in the middle
        next(flow)
        check({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": told[0]})
    assert len(set(told)) == 2
    assert all(len(one) == 64 for one in told)
    after = dict(os.environ)
    after.pop("PYTHONBREAKPOINT", None)  # Ray's debugger
    assert after == before


def test_a_ray_without_secrets_is_not_started(monkeypatch):
    import ray._raylet

    monkeypatch.delattr(ray._raylet, "AuthenticationTokenLoader")
    with (
        pytest.raises(ValueError, match=r"every account.*ray>=2\.52"),
        connection.connected(None, 1),
    ):
        raise AssertionError("it was started")


@pytest.fixture
def place(monkeypatch):
    """A folder for temporary files whose name is short enough for Ray."""
    with tempfile.TemporaryDirectory(prefix="x", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.mark.parametrize(
    "name",
    ["lb-2024-results", "lb-99999999999999999999-x", "lb-4194305-x", "leakbound-ray-4194305-abc"],
)
def test_only_the_own_folder_is_removed(name, place, monkeypatch):
    """Whatever a name looks like: a process that is not here may live elsewhere."""
    monkeypatch.setattr(os, "getpid", lambda: 7)  # whatever this process's number is, it fits
    (place / name / "results").mkdir(parents=True)
    with connection._temporary_folder() as folder:
        assert Path(folder).parent == place
        assert Path(folder).stat().st_mode & 0o77 == 0
    assert [p.name for p in place.iterdir()] == [name]
    assert (place / name / "results").exists()


@pytest.mark.parametrize("longer", [1, 5, 6, 7, 8, 9, 40])
@pytest.mark.parametrize("number", [7, 4194304])
def test_sockets_have_names_that_fit(longer, number, place, monkeypatch):
    """107 bytes: what Linux takes."""
    deep = place / ("d" * longer)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(os, "getpid", lambda: number)
    with connection._temporary_folder() as folder:
        session = f"{folder}/session_2026-01-01_00-00-00_000000_{number}"
        assert len(os.fsencode(f"{session}/sockets/plasma_store")) <= 107


def test_on_windows_the_folder_is_the_usual_one(place, monkeypatch):
    """There is no /tmp, and Ray has no sockets with names."""
    deep = place / ("d" * 40)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(connection, "os", SimpleNamespace(**vars(os) | {"name": "nt"}))
    with connection._temporary_folder() as folder:
        assert Path(folder).parent == deep


def addresses(pid):
    """The addresses that a process listens on."""
    sockets = set()
    with_files = Path(f"/proc/{pid}/fd")
    for entry in with_files.iterdir() if with_files.exists() else ():
        try:
            sockets.add(str(entry.readlink()))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                raw = bytes.fromhex(fields[1].rpartition(":")[0])
                words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.add(socket.inet_ntoa(words[-4:]))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_a_cluster_of_others_stays_up(tmp_path):
    """We connect to it from another process, run, and it works on."""
    plan = audit.parse(TABLE)
    local = sorted(encode(result.record) for result in audit.run(plan))
    script = tmp_path / "head.py"
    script.write_text(
        "import sys\n"
        "from leakbound.cluster import connection\n"
        "connection._start_here = lambda ray, cpus, folder: ray.init(\n"
        "    address='local', num_cpus=cpus, include_dashboard=False, _temp_dir=folder,\n"
        "    log_to_driver=False, logging_level=50)\n"
        "with connection._loopback(), connection.connected(None, 2):\n"
        "    import ray\n"
        "    print(ray.get_runtime_context().gcs_address, flush=True)\n"
        "    sys.stdin.readline()\n"
        "    print(ray.get(ray.remote(lambda: 'still here').remote()), flush=True)\n",
        encoding="utf-8",
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as head:
        address = head.stdout.readline().strip()
        try:
            results = list(cluster.run(plan, workers=0, address=address))
        finally:
            out, _ = head.communicate("go\n", timeout=600)
    assert out.strip() == "still here"
    assert sorted(encode(result.record) for result in results) == local


@contextmanager
def two_nodes(place):
    """A Ray of two raylets with one CPU each, which listen on the loopback alone."""
    from ray.cluster_utils import Cluster

    (place / "ray").mkdir()
    settings = connection.MORTAL | connection.QUIET | {"RAY_TMPDIR": str(place)}
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    with connection._loopback(), connection.environment(settings):
        nodes = Cluster(shutdown_at_exit=False)
        try:
            first = nodes.add_node(**node, include_dashboard=False)
            second = nodes.add_node(**node)
            listening = set().union(*(addresses(pid) for pid, _ in descendants(os.getpid())))
            assert listening
            assert listening <= {"127.0.0.1", "::1"}
            raylets = [n.all_processes["raylet"][0].process.pid for n in (first, second)]
            yield nodes.address, raylets
        finally:
            nodes.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_a_node_that_is_lost_in_mid_run_changes_no_byte(user_module, place, tmp_path):
    """Both raylets run experiments; then one of them gets SIGKILL, and its worker ends with it.

    Workers wait for each other, and that of the lost raylet stays at what it runs.
    """
    pids, held = tmp_path / "pids", tmp_path / "held"
    pids.mkdir()
    held.mkdir()
    free = (
        f"len(os.listdir({str(pids)!r})) > 1 and not Path({str(held)!r}, str(os.getpid())).exists()"
    )
    note = f"Path({str(pids)!r}, str(os.getpid())).touch()"
    wait = f"any({free} or time.sleep(0.01) for _ in range(60_000))"
    name = user_module("held", f"os.getpid() == {os.getpid()} or ({note}, {wait})")
    plan = audit.parse(TABLE | {"models": [*TABLE["models"], {"name": name}]})
    audit.audit(plan, tmp_path / "local")
    killed = []

    def watch(now):
        if killed or now.result is None:
            return
        at_work = {int(p.name) for p in pids.iterdir()}
        own = [at_work & {pid for pid, _ in descendants(raylet)} for raylet in raylets]
        if all(own):
            killed.append(now.done)
            (held / str(own[1].pop())).touch()
            os.kill(raylets[1], signal.SIGKILL)

    out = tmp_path / "ray"
    with two_nodes(place) as (address, raylets):
        result = audit.audit(plan, out, workers=0, run=cluster.engine(address), watch=watch)
    assert killed
    assert killed[0] < 24, "the run was over"
    assert result.failed == 0
    assert outcome(out) == outcome(tmp_path / "local")
    runs = runs_of(out)
    assert set(runs.values()) == {1}
    assert len(runs) == len(plan.experiments()) + len(plan.trainings()) == 24 + 8


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "nothing answers"),
        ("head", 'give "auto" or host:port'),
        ("ray://127.0.0.1:10001", 'give "auto" or host:port'),
        ("127.0.0.1:99999", 'give "auto" or host:port'),
    ],
)
def test_a_wrong_address_is_refused(address, words):
    plan = audit.parse(TABLE)
    with pytest.raises(ValueError, match=words) as caught:
        list(cluster.run(plan, address=address))
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["http", "none"])
def test_an_address_where_something_else_answers(answer, monkeypatch):
    import threading

    monkeypatch.setattr(connection, "ANSWER", 0.5)
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        line, _ = server.accept()
        line.recv(100)
        line.sendall(answer)
        if answer:
            line.close()
        else:
            time.sleep(1)
            line.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with pytest.raises(ValueError, match=r"another program|nothing answers"):
            connection._reach(f"127.0.0.1:{server.getsockname()[1]}")
    finally:
        thread.join()
        server.close()


def test_a_gpu_is_refused():
    class PlanContext:
        device = type("Device", (), {"type": "cuda"})()

    with pytest.raises(ValueError, match="on CPUs"):
        list(cluster.run(audit.parse(TABLE), context=PlanContext()))


@pytest.fixture(scope="class")
def one_ray():
    with leaving_nothing(), connection.connected(None, 2):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("one_ray")
class TestOneRay:
    """What needs no Ray of its own: `cluster.run` takes the one that this process is connected to.

    The last in the file: the tests above start their own.
    """

    def test_a_worker_killed_in_mid_run_changes_no_byte(self, user_module, tmp_path):
        """The worker tells its number through the model that it runs."""
        pids = tmp_path / "pids"
        pids.mkdir()
        name = user_module("noted", f"Path({str(pids)!r}, str(os.getpid())).touch()")
        table = TABLE | {"models": [*TABLE["models"], {"name": name}]}
        plan = audit.parse(table)
        audit.audit(plan, tmp_path / "local")
        killed = []

        def watch(now):
            workers = {int(p.name) for p in pids.iterdir()} - {os.getpid(), *killed}
            due = now.result is not None and now.done >= 4 + 10 * len(killed)
            if due and len(killed) < 2 and workers:
                killed.append(min(workers))
                os.kill(killed[-1], signal.SIGKILL)

        out = tmp_path / "ray"
        result = audit.audit(plan, out, workers=2, run=cluster.engine(), watch=watch)
        assert len(killed) == 2
        assert result.failed == 0
        assert outcome(out) == outcome(tmp_path / "local")
        runs = runs_of(out)
        assert set(runs.values()) == {1}
        assert len(runs) == len(plan.experiments()) + len(plan.trainings()) == 24 + 8

    def test_a_unit_that_no_worker_survives_is_recorded_as_failed(self, user_module, tmp_path):
        here = os.getpid()
        name = user_module("deadly", f"os.getpid() == {here} or os.kill(os.getpid(), 9)")
        table = TABLE | {"models": [*TABLE["models"], {"name": name}], "seeds": [0]}
        table |= {"attacks": TABLE["attacks"][:1], "utility": {"rounds": 0}}
        plan = audit.parse(table | {"defenses": [{"name": "none"}]})
        result = audit.audit(plan, tmp_path / "run", workers=2, run=cluster.engine())
        assert result.failed == 1
        lines = (tmp_path / "run" / "records.jsonl").read_bytes().splitlines()
        rows = [decode(line, Assessment) for line in lines]
        assert [row.status for row in rows] == ["ok", "failed"]
        assert rows[1].reason == "its process died (out of memory, or a crash)"
        assert rows[1].verdict == "undecided"
        assert (
            rows[0]
            == audit.run_experiment(plan.experiments()[0], audit.PlanContext(plan.data)).record
        )

    def test_a_node_that_differs_is_named(self, monkeypatch):
        from leakbound.cluster import workers

        facts = workers.facts
        monkeypatch.setattr(workers, "facts", lambda *a: facts(*a) | {"versions": {"torch": "0.1"}})
        with pytest.raises(ValueError, match=r"node .* has other versions \(versions\.\w+ is"):
            list(cluster.run(audit.parse(TABLE), workers=1))
