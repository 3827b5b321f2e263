"""Run an NVFlare job in its simulator, and keep what the server sees of some rounds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from nvflare.fuel.utils.config_factory import ConfigFactory

from leakbound import check
from leakbound.captured import declared, updates_in
from leakbound.client_side.captures import declares, ready_folder, undeclared
from leakbound.client_side.round import computes_anew
from leakbound.defenses import Defense, chain
from leakbound.nvflare.filter import MARKS, chain_of
from leakbound.nvflare.watch import DONE, PROBLEM, ClientWatch, ServerWatch
from leakbound.risk.deployment.nvflare import (
    ALL_SITES,
    OWN,
    filters_of,
    refuse_without_training,
    sites_in,
    workflows_in,
)

META = "meta"
SERVER = "config_fed_server"
CLIENT = "config_fed_client"
NO_CHANGE = "ConvertWeights"
"""NVFlare 2.9 clears the task's data before filters of results run, so it changes nothing."""
FORMATS = (".json", ".conf", ".yml")
MOST_BYTES = 2**30
"""The most bytes of a job folder; a simulation copies it for every client."""
GRACE = 20.0
"""Seconds that the simulator has to end by itself after the last round."""
POLL = 0.2
MOST_LOG = 1500
"""Bytes of the end of the simulator's log that an error holds."""
Say = Callable[[str], None]


def capture_job(
    folder: Path | str,
    out: Path | str,
    *,
    rounds: Sequence[int] = (1,),
    clients: int = 2,
    seconds: float = 3600.0,
    on_progress: Say | None = None,
) -> list[Path]:
    """Run a job in NVFlare's simulator and keep what its server sees; returns the files.

    This runs the job's code, in processes on this machine that talk over the loopback and end with
    this call. They use a copy of the job, to which a `ServerWatch` is added. The job stops after
    the last requested round. Each client keeps its own process, so that its filters keep their
    state.

    Args:
        folder: of the job, with its meta.json. It is not written to.
        out: a folder for the captured updates (docs/captured_updates.md has its form).
        rounds: which rounds to keep, from 1.
        clients: how many, for a job that is for all sites; otherwise the job names them.
        seconds: time limit of the simulation.
        on_progress: called with a sentence at every step.

    Raises:
        ValueError: the folder holds no job, the job fails, or no requested result came; the text
            has the end of the simulator's log.
    """
    check.count(clients=clients)
    check.positive(seconds=seconds)
    wanted = ServerWatch(str(out), rounds).rounds
    say = on_progress or (lambda text: None)
    place = Path(folder).resolve()
    meta_path = _config(place, META)
    if meta_path is None:
        raise ValueError(f"folder is {str(folder)!r}, which has no meta.json; give a job folder")
    meta = _load(meta_path)
    names = _clients(meta, clients)
    ready_folder(out)
    with tempfile.TemporaryDirectory(prefix="leakbound-nvflare-") as made:
        base = Path(made)
        size = sum(path.lstat().st_size for path in place.rglob("*"))
        if size > MOST_BYTES:
            raise ValueError(
                f"folder {str(place)!r} holds {size} bytes, but the limit is {MOST_BYTES}; keep "
                "data outside of the job"
            )
        shutil.copytree(place, base / "job")
        watch = {
            "out": str(Path(out).resolve()),
            "rounds": wanted,
            "clients": names,
            "notes": str(base),
            "defenses": _defenses(base / "job", meta, names),
        }
        _add_watch(base / "job", watch)
        _add_component(base / "job", CLIENT, ClientWatch, lambda _: {"notes": str(base)})
        say(f"running {place.name} with {len(names)} clients (this runs the job's code)")
        _simulate(base, names, seconds, say)
        kept: list[tuple[int, int, Path]] = []
        with suppress(ValueError):  # there is none
            kept = updates_in(Path(out))
        missing = sorted({*wanted} - {number for number, *_ in kept})
        if missing:
            problem = base / PROBLEM
            log = (base / "log.txt").read_bytes()[-MOST_LOG:].decode("utf-8", "replace")
            why = problem.read_text("utf-8").strip() if problem.exists() else ""
            raise ValueError(f"no result of round {missing[0]} was kept: {why or log}")
    return [path for number, _, path in kept if number in wanted]


def _config(folder: Path, name: str) -> Path | None:
    """A file of settings, in the order in which NVFlare looks for its formats."""
    paths = (folder / f"{name}{ending}" for ending in FORMATS)
    return next((path for path in paths if path.is_file()), None)


def _load(path: Path) -> dict[str, Any]:
    try:
        return dict(ConfigFactory.load_config(path.name, [str(path.parent)]).to_dict())
    except Exception as error:
        raise ValueError(f"{str(path)!r} cannot be read: {type(error).__name__}: {error}") from None


def _clients(meta: Mapping[str, Any], count: int) -> list[str]:
    """The sites that a job names, or so many for a job of all sites."""
    apps = dict(meta.get("deploy_map") or {})
    sites = set[str]().union(*map(sites_in, apps.values()))
    named = [site for site in sites if site != "server" and site.upper() != ALL_SITES]
    return sorted(named) or [f"site-{number + 1}" for number in range(count)]


def _add_watch(job: Path, watch: dict[str, Any]) -> None:
    """Add the component with these arguments to the configuration of each app for a server."""

    def arguments(settings: dict[str, Any]) -> dict[str, Any]:
        refuse_without_training(job, workflows_in(settings))
        return watch | {"about": _model(settings.get("components", []))}

    if not _add_component(job, SERVER, ServerWatch, arguments):
        raise ValueError(f"the job has no app with config/{SERVER}.json; give a whole job folder")


def _add_component(
    job: Path,
    name: str,
    kind: type,
    arguments: Callable[[dict[str, Any]], dict[str, Any]],
) -> int:
    """Add a component to every configuration of this name; returns how many there are.

    `arguments` makes the component's from the settings of the configuration.
    """
    paths = [path for app in sorted(job.iterdir()) if (path := _config(app / "config", name))]
    for path in paths:
        settings = _load(path)
        component = {
            "id": f"leakbound_{kind.__name__}",
            "path": f"{kind.__module__}.{kind.__name__}",
            "args": arguments(settings),
        }
        path.unlink()
        text = json.dumps(settings | {"components": [*settings.get("components", []), component]})
        path.with_suffix(".json").write_text(text, "utf-8")
    return len(paths)


def _defenses(
    job: Path,
    meta: Mapping[str, Any],
    names: Sequence[str],
) -> dict[str, dict[str, str]]:
    """By site, what its filters do to a result, as metadata of its update."""
    defenses = dict[str, dict[str, str]]()
    for app, some in dict(meta.get("deploy_map") or {}).items():
        sites = sites_in(some)
        everyone = any(site.upper() == ALL_SITES for site in sites)
        path = _config(job / str(app) / "config", CLIENT) if Path(str(app)).name == app else None
        if path is not None:
            about = _about(filters_of(path), f"{app}/config/{path.name}")
            defenses |= {name: about for name in names if everyone or name in sites}
    return defenses


def _about(
    filters: Sequence[tuple[str, Mapping[str, Any]]],
    source: str,
) -> dict[str, str]:
    """What a chain of filters declares; it declares nothing if one of them is another's."""
    names = [path.rpartition(".")[2] for path, _ in filters]
    links: list[Defense] = []
    who = list[str]()
    for name, (path, args) in zip(names, filters, strict=True):
        if name == NO_CHANGE and path.startswith("nvflare."):
            continue
        if name != MARKS or not path.startswith(OWN):
            ran = f"the filters {', '.join(names)} ran ({source})"
            return undeclared(f"{ran}, of which {name} is not known")
        own = chain_of(args.get("defense", "none"))
        who.append(f"{MARKS}({own!r})")
        try:
            rate = float(args.get("learning_rate") or 1.0)
            links += [declared.scaled(link, rate) for link in own.links]
        except ValueError:
            return undeclared(f"{who[-1]} ran ({source}), not as a clip or noise of all weights")
    if not links:
        return {}
    anew = {declared.OPTIMIZER: "sgd"} if computes_anew(chain(*links)) else {}
    return {**declares(links, f"{', '.join(who)} in {source}"), **anew}


def _model(components: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The model that the server's configuration names, as "module:name" with its settings."""
    for component in components:
        model = component.get("args", {}).get("model") if isinstance(component, Mapping) else None
        path = model.get("path") if isinstance(model, Mapping) else None
        if isinstance(path, str) and "." in path:
            args = model.get("args") or {}
            plain = {k: v for k, v in args.items() if not isinstance(v, Mapping | None)}
            settings = [f",{name}={json.dumps(value)}" for name, value in plain.items()]
            about = {"model": ":".join(path.rsplit(".", 1)) + "".join(settings)}
            if others := [name for name, value in args.items() if isinstance(value, Mapping)]:
                about["model_needs"] = ",".join(others)
            return about
    return {}


def _simulate(
    base: Path,
    names: Sequence[str],
    seconds: float,
    say: Say,
) -> None:
    """Run the simulator until it ends, or the last round is kept."""
    command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator"]
    command += [str(base / "job"), "-w", str(base / "workspace")]
    # a process for each client: filters keep their state there, as at a real site
    command += ["-c", ",".join(names), "-t", str(len(names)), "-m", str(len(names))]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    end = time.monotonic() + seconds
    ended = False
    with (base / "log.txt").open("wb") as log, _started(command, base, log, path) as process:
        while process.poll() is None:
            if time.monotonic() > end:
                if ended:
                    return  # all is kept: the rest is stopped
                raise ValueError(f"the job ran longer than {seconds:g} s; give more seconds")
            if not ended and (base / DONE).exists():
                ended = True
                end = time.monotonic() + GRACE
                say("the last round is kept; the simulator ends")
            time.sleep(POLL)


@contextmanager
def _started(
    command: Sequence[str],
    place: Path,
    log: Any,
    path: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, and all that it started."""
    process = subprocess.Popen(
        command,
        cwd=place,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Ctrl-C reaches this process alone, which then ends the others
        start_new_session=True,
    )
    family: set[psutil.Process] = set()
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            # listed before it dies: its children would then have no parent
            root = psutil.Process(process.pid)
            family = {root, *root.children(recursive=True)}
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
