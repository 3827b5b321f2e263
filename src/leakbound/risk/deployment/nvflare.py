"""Facts from NVFlare's settings: a job's config_fed_client (.json, .conf), a site's privacy.json.

Checked against nvflare 2.9.0. It imports nothing of NVFlare, and runs nothing that a file names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from leakbound import check
from leakbound._util import files
from leakbound.registry import row_of
from leakbound.risk.deployment.facts import LARGEST, Deployment, Mistake
from leakbound.risk.deployment.file import described
from leakbound.risk.deployment.mistakes import CLEAR

MOST_BYTES = 2**20
"""The most bytes of a file of settings."""
TRAIN = "train"
RESULTS = "task_result_filters"
OWN = "leakbound.nvflare."
_PATHS = ("path", "class_path", "name")
"""Keys under which NVFlare finds a component's class."""
ALL_SITES = "@ALL"
DEFAULT_ROUNDS = 5
"""Of the workflows below: NVFlare's job interface writes no argument that has its default."""
FIVE_ROUNDS = (
    "Cyclic",
    "CyclicController",
    "FedAvg",
    "FedAvgLR",
    "FedOpt",
    "PTFedAvg",
    "Scaffold",
    "ScatterAndGather",
    "ScatterAndGatherScaffold",
)
STATISTICS = "statistics of each client's data"
IDENTIFIERS = "which identifiers the clients share"
SCORES = "scores of models"
TRAINS_NOTHING: Mapping[str, str] = {
    "CrossSiteEval": SCORES,
    "CrossSiteModelEval": SCORES,
    "DhPSIController": IDENTIFIERS,
    "EvalController": SCORES,
    "GlobalModelEval": SCORES,
    "HECrossSiteModelEval": SCORES,
    "HierarchicalStatisticsController": STATISTICS,
    "PSIExecutor": IDENTIFIERS,
    "StatisticsController": STATISTICS,
    "StatisticsExecutor": STATISTICS,
}
"""NVFlare's workflows and executors that train no model, and what they return."""
Table = Mapping[str, Any]


@dataclass(frozen=True)
class _Filter:
    """One filter of results: its class, its settings and where it is named."""

    path: str
    args: Table
    key: str
    why_not: str | None = None
    line: int | None = None

    @property
    def kind(self) -> str:
        """The class of a filter that is known, otherwise empty."""
        name = self.path.rpartition(".")[2]
        ours = self.path.startswith(("nvflare.app_", OWN)) or self.path == name
        return name if ours and name in _KNOWN else ""

    def number(self, name: str, default: float | None) -> float | None:
        value = self.args.get(name, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and -LARGEST <= value <= LARGEST):
            raise ValueError(f"{self.key}.args.{name} is {str(value)[:40]!r}; give a number")
        return None if value is None else float(value)

    def count(self, name: str, default: int | None = None) -> int | None:
        value = self.number(name, default)
        return None if value is None else int(value)


@dataclass
class _Stated:
    """What the filters so far state, by the keys of a deployment, in the order in which they run.

    `entries` and `steps` are those of one update.
    """

    entries: int | None = None
    steps: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def note(
        self,
        name: str,
        key: str,
        text: str,
        *,
        line: int | None = None,
        fatal: bool = False,
    ) -> None:
        self.mistakes.append(Mistake(name=name, key=key, text=text, line=line, fatal=fatal))

    def wrong(
        self,
        one: _Filter,
        name: str,
        text: str,
        *,
        fatal: bool = True,
    ) -> None:
        short = one.path.rpartition(".")[2]
        self.note(
            name,
            one.key,
            f"{short}: {text}",
            line=one.line,
            fatal=fatal,
        )

    @property
    def noisy(self) -> bool:
        return "noise.at" in self.facts

    def clip(self, **values: Any) -> None:
        """State the clip; without values, that it is not known."""
        for name in ("norm", "kind", "entries", "at"):
            self.facts[f"clip.{name}"] = values.get(name)

    def clamp(self, gamma: float) -> None:
        if not self.noisy:  # a clamp after noise is no bound of what is under it
            norm = None if self.steps is None else gamma * self.steps
            self.clip(
                norm=norm,
                kind="elementwise",
                entries=self.entries,
                at="client",
            )

    def change(self) -> None:
        """Something else changes the update: it may undo a bound, but no noise that is added."""
        if not self.noisy:
            self.clip()


def read(
    path: Path | str,
    *,
    entries: int | None = None,
    steps: int | None = None,
) -> tuple[Deployment, tuple[Mistake, ...]]:
    """The facts that an NVFlare client's settings state, and the mistakes in them.

    Of a job's config_fed_client it also reads the job's meta.json and config_fed_server, next to
    it or in the server's own app. Of privacy.json the default scope counts. A filter that is not
    known is a mistake "not-stated" with its path: it states nothing. The files do not state what
    the training script does.

    Args:
        path: of config_fed_client.json, config_fed_client.conf or privacy.json.
        entries: P, the number of entries of an update; no file states it.
        steps: local steps of a round, as clients report them; no file states it.

    Raises:
        ValueError: a file is larger than 1 MB, damaged or of another kind, or a setting is no
            number; it is HOCON, and pyhocon is not installed; or the job trains no model.

    Example:
        >>> import tempfile
        >>> chain = '{"tasks": ["train"], "filters": [{"path": "my.Filter"}]}'
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "config_fed_client.json"
        ...     _ = file.write_text('{"task_result_filters": [' + chain + ']}')
        ...     facts, mistakes = read(file)
        >>> facts.noise.at, mistakes[0].name, mistakes[0].line
        (None, 'not-stated', 1)
    """
    check.given(check.count, entries=entries, steps=steps)
    place = Path(path)
    text, table = _load(place)
    facts = _Stated(entries, steps, {"title": place.name, "correlation": "none"})
    if "scopes" in table:
        filters = _of_scope(table, facts)
    elif {RESULTS, "executors", "format_version"} & set(table):
        filters = _of_job(table, _of_server(place, table, facts))
    else:
        raise ValueError(
            f"{str(path)!r} has neither executors, {RESULTS} nor scopes; give config_fed_client or "
            "privacy.json of NVFlare"
        )
    for one in _with_lines(filters, table, text):
        if one.why_not is not None:
            facts.wrong(one, "never-runs", one.why_not)
        elif one.kind:
            _KNOWN[one.kind](facts, one)
        else:
            facts.change()
            words = f"what {one.path[:200]} does is not stated; describe it in a deployment file"
            facts.wrong(one, "not-stated", words, fatal=False)
    return described(facts.facts, facts.mistakes)


def filters_of(path: Path | str) -> list[tuple[str, Table]]:
    """The filters that run on a training's results at a client: class paths, arguments, in order.

    Args:
        path: of config_fed_client in a job.

    Raises:
        ValueError: as `read`.
    """
    place = Path(path)
    table = _load(place)[1]
    task = _of_server(place, table, _Stated())
    return [(one.path, one.args) for _, one in _of_job(table, task) if one.why_not is None]


def _load(path: Path) -> tuple[str, Table]:
    what = f"settings {str(path)!r}"
    try:
        with files.opened(path) as stream:
            content = stream.read(MOST_BYTES + 1)
        text = content.decode("utf-8-sig")
        if len(content) > MOST_BYTES:
            raise ValueError(f"larger than {MOST_BYTES} bytes")
        table = _hocon(text) if path.suffix == ".conf" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{what} cannot be read: {str(error)[:300]}; give NVFlare's file"
        ) from None
    if not isinstance(table, dict):
        raise ValueError(f"{what} holds a {type(table).__name__}; give NVFlare's file")
    return text, table


def _hocon(text: str) -> Any:
    if re.search(r"^\s*\"?include\b", text, re.MULTILINE):
        raise ValueError("it includes other files; write their content into it")
    try:
        from pyhocon import ConfigFactory
    except ImportError:
        raise ValueError("it is HOCON; pip install pyhocon, or convert it to JSON") from None
    try:
        parsed = ConfigFactory.parse_string(text, resolve=False)
        return json.loads(json.dumps(parsed.as_plain_ordered_dict(), default=str))
    except Exception as error:  # of its parser's own kinds
        raise ValueError(f"no HOCON: {type(error).__name__}: {error}") from None


def _rows(table: Table, key: str) -> list[Table]:
    rows = table.get(key) or []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{key} is no list of tables; give NVFlare's file")
    return rows


def _path_of(row: Table) -> str:
    return next((row[name] for name in _PATHS if isinstance(row.get(name), str)), "")


def _filter(
    row: Table,
    key: str,
    why_not: str | None = None,
) -> _Filter:
    path = _path_of(row)
    args = row.get("args") or {}
    if not path or not isinstance(args, dict):
        raise ValueError(f"{key} has no path, or args that are no table; give NVFlare's file")
    return _Filter(path, args, key, why_not)


def _why_not_out(direction: Any) -> str | None:
    """Why a filter of that direction does not run on a client's results; None if it runs."""
    direction = str(direction or "out").lower()
    if direction in ("out", "inout"):
        return None
    return f"its direction is {direction[:20]!r}; results of a client go 'out'"


def _of_job(table: Table, task: str) -> list[tuple[Table, _Filter]]:
    filters = []
    for i, chain in enumerate(_rows(table, RESULTS)):
        tasks = chain.get("tasks")
        why_not = _why_not_out(chain.get("direction"))
        if not isinstance(tasks, list) or task not in tasks:
            why_not = (
                f"it is for the tasks {str(tasks)[:100]}, and NVFlare 2.9 compares names exactly "
                f"('*' is no pattern), so results of {task!r} leave unchanged; name {task!r}"
            )
        for j, row in enumerate(_rows(chain, "filters")):
            off = "it is disabled" if row.get("disabled") is True else why_not
            one = _filter(row, f"{RESULTS}[{i}].filters[{j}]", off)
            if _class_of(one.path) != "StatisticsPrivacyFilter":  # touches no weights
                filters.append((row, one))
    return filters


def _class_of(path: str) -> str:
    """The name of a class of NVFlare's own; empty for another's."""
    return path.rpartition(".")[2] if path.startswith("nvflare.") else ""


def _of_scope(table: Table, facts: _Stated) -> list[tuple[Table, _Filter]]:
    """The filters of the default scope, for the results of every task."""
    scopes = _rows(table, "scopes")
    name = table.get("default_scope")
    chosen = [i for i, scope in enumerate(scopes) if scope.get("name") == name]
    if name is None or not chosen:
        text = f"default_scope is {str(name)[:60]!r}, so jobs without a scope run no filter of it"
        facts.note("no-default-scope", "default_scope", text, fatal=True)
        return []
    others = [str(scope.get("name"))[:40] for i, scope in enumerate(scopes) if i != chosen[0]]
    if others:
        text = f"a job may ask for another scope ({', '.join(others)[:200]}) with other filters"
        facts.note("other-scopes", "scopes", text)
    i = chosen[0]
    return [
        (row, _filter(row, f"scopes[{i}].{RESULTS}[{j}]", _why_not_out(row.get("direction"))))
        for j, row in enumerate(_rows(scopes[i], RESULTS))
    ]


def _with_lines(
    filters: list[tuple[Table, _Filter]],
    table: Table,
    text: str,
) -> Iterator[_Filter]:
    """The filters with the lines of their paths, found in the order of the document."""
    lines = dict[int, int]()
    at = 0
    line = 1
    for owner, key, value in _names(table):
        quoted = re.escape(json.dumps(value)[1:-1])
        # without a match, such as of an escaped path, all later ones have no line either
        named = re.compile(rf'"?{key}"?\s*[:=]\s*"?{quoted}').search(text, at)
        if named is None:
            break
        line += text.count("\n", at, named.start())
        lines[owner] = line
        line += text.count("\n", named.start(), named.end())
        at = named.end()
    for row, one in filters:
        yield replace(one, line=lines.get(id(row)))


def _names(value: Any) -> Iterator[tuple[int, str, str]]:
    """Every class path in a document: its table, its key and itself, in order."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in _PATHS and isinstance(inner, str):
                yield id(value), key, inner
            yield from _names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _names(inner)


def _of_server(
    client: Path,
    table: Table,
    facts: _Stated,
) -> str:
    """State rounds, cohort and weights from the job's other files; the training task's name."""
    root = client.resolve().parent.parent.parent
    meta = _load(root / "meta.json")[1] if (root / "meta.json").is_file() else {}
    apps = dict(meta.get("deploy_map") or {})
    sites_of = {str(app): sites_in(some) for app, some in apps.items()}
    server = _server_of(client, root, sites_of)
    _check_work(client, server, table, facts)
    if meta:
        _compare_apps(client, root, table, facts)
    sites = set[str]().union(*sites_of.values())
    everyone = any(site.upper() == ALL_SITES for site in sites)
    population = None if everyone else len(sites - {"server"}) or None
    facts.facts["title"] = str(meta.get("name") or client.name)[:200]
    # Whether an aggregator does not weigh by the local steps that clients report.
    args = [row.get("args") for row in _rows(server, "components")]
    uniform = any(isinstance(a, dict) and a.get("weigh_by_local_iter") is False for a in args)
    rounds = 0
    stated = dict[str, Any]()
    task = None
    for row in _rows(server, "workflows"):
        one = _filter(row, "workflows")
        default = DEFAULT_ROUNDS if _class_of(one.path) in FIVE_ROUNDS else None
        number = one.count("num_rounds", default)
        if number is None:
            continue
        trained = str(one.args.get("train_task_name") or one.args.get("task_name") or TRAIN)
        if task not in (None, trained):  # filters of one task do not cover another
            return trained
        task = trained
        rounds += number
        # without a number, NVFlare asks every client
        cohort = one.count("num_clients")
        stated = {
            "rounds": rounds,
            "weights": "uniform" if uniform else "examples",
            "participation.law": "all" if cohort in (None, population) else "fixed-size",
            "participation.cohort": cohort,
            "participation.replies": one.count("min_clients"),
        }
    facts.facts |= {**stated, "participation.population": population}
    return task or TRAIN


def sites_in(some: Any) -> set[str]:
    """The sites of one app in a job's deploy_map: a list, a name, or a table that holds a list."""
    if isinstance(some, Mapping):
        some = some.get("targets") or some.get("sites") or ()
    if isinstance(some, str):
        return {some}
    if not isinstance(some, list | tuple):
        return set()
    return set[str]().union(*(sites_in(one) for one in some))


def _server_of(
    client: Path,
    root: Path,
    sites_of: Mapping[str, set[str]],
) -> Table:
    """The server's settings: beside the client's, or in the app that the server runs."""
    places = [client.parent]
    for app, sites in sites_of.items():
        if "server" in sites and Path(app).name == app:
            places.append(root / app / "config")
    for place in places:
        for ending in (".json", ".conf"):
            path = place / f"config_fed_server{ending}"
            if path.is_file():
                return _load(path)[1]
    return {}


def _check_work(
    client: Path,
    server: Table,
    table: Table,
    facts: _Stated,
) -> None:
    """Reject a job that trains no model; note what leaves a job that also does other work."""
    names = workflows_in(server)
    if not names:
        executors = [row.get("executor") for row in _rows(table, "executors")]
        paths = [_path_of(one) for one in executors if isinstance(one, Mapping)]
        names = [_class_of(path) for path in paths if path]
    refuse_without_training(client, names)
    for name in names:
        if TRAINS_NOTHING.get(name, SCORES) != SCORES:
            text = f"{name} returns {TRAINS_NOTHING[name]}, too, and no number here covers that"
            facts.note(CLEAR, "workflows", text)


def workflows_in(server: Table) -> list[str]:
    """The class names of a server's workflows; "" for classes that are not NVFlare's."""
    return [_class_of(_filter(row, "workflows").path) for row in _rows(server, "workflows")]


def refuse_without_training(place: Path, names: Sequence[str]) -> None:
    """Reject workflows (or executors) of which none trains a model.

    Raises:
        ValueError: with what the job does instead.
    """
    if not names or any(name not in TRAINS_NOTHING for name in names):
        return
    raise ValueError(
        f"{str(place)!r} belongs to a job that trains no model: {names[0]} returns "
        f"{TRAINS_NOTHING[names[0]]}. No bound or attack here covers that, and NVFlare's filters "
        "for it state no probability; give a job that trains"
    )


def _compare_apps(
    client: Path,
    root: Path,
    table: Table,
    facts: _Stated,
) -> None:
    """Note apps of other sites whose filters differ: this file does not speak for them."""
    for path in sorted(root.glob(f"*/config/{client.name}")):
        if path.samefile(client) or _load(path)[1].get(RESULTS) == table.get(RESULTS):
            continue
        text = (
            f"{path.parent.parent.name[:60]} has other filters of results than this app, so what "
            "is stated does not hold for its sites; read its file, too"
        )
        facts.note("other-apps", RESULTS, text)


def _exclude(facts: _Stated, one: _Filter) -> None:
    excluded = one.args.get("exclude_vars")
    what = f"removes {str(excluded)[:60]}" if excluded else "removes nothing"
    facts.wrong(one, "no-noise", f"{what}; the other entries leave as they are, without noise")


def _percentile(facts: _Stated, one: _Filter) -> None:
    gamma = one.number("gamma", 0.01)
    share = one.number("percentile", 10)
    if gamma is None or gamma <= 0 or share is None or not 0 <= share <= 100:
        facts.wrong(
            one,
            "filter-off",
            f"gamma {gamma} and percentile {share} switch it off; give "
            "gamma above 0 and a percentile from 0 to 100",
        )
        return
    facts.clamp(gamma)
    facts.wrong(
        one,
        "no-noise",
        f"it clamps each entry to {gamma:g} times the local steps and adds no noise; the "
        f"percentile gives no probability. The L2 norm can reach {gamma:g} steps sqrt(P); entries "
        "without dimensions pass unchanged",
    )


def _svt(facts: _Stated, one: _Filter) -> None:
    gamma = one.number("gamma", 1e-5)
    epsilon = one.number("epsilon", 0.1)
    fraction = one.number("fraction", 0.1)
    variance = one.number("noise_var", 0.1)
    release = one.number("epsilon_release", None)
    if gamma is None or epsilon is None or fraction is None or min(gamma, epsilon, fraction) <= 0:
        raise ValueError(f"{one.key}: gamma, epsilon and fraction are above 0")
    count = None
    if facts.entries is not None:
        count = min(math.ceil(fraction * facts.entries), facts.entries)
        # NVFlare draws the noise of each sent entry for this much epsilon
        release = count * (variance or 0.0) if release is None else release
    total = None if release is None else epsilon + release
    if not facts.noisy:
        facts.clamp(gamma)
        facts.facts |= {"noise.pure_epsilon": total, "noise.at": "client"}
    sent = "the share of entries sent" if count is None else f"{count:,} entries"
    each = "epsilon + entries sent * noise_var" if total is None else f"{total:,.6g}"
    facts.wrong(
        one,
        "selection-without-halt",
        f"a round costs epsilon {each}, not {epsilon:g}: {sent} get noise of their own. Its "
        "selection does not stop after as many positive answers, as the proof of the sparse vector "
        "technique requires; entries without dimensions pass unchanged, and the number of passes "
        "leaves in the meta data",
    )


def _he(facts: _Stated, one: _Filter) -> None:
    layers = one.args.get("encrypt_layers")
    facts.facts |= {
        "secure_aggregation.on": not layers,
        "secure_aggregation.kind": "homomorphic",
        "secure_aggregation.shared_key": True,
    }
    if layers:
        facts.wrong(
            one,
            "partly-encrypted",
            f"it encrypts {str(layers)[:60]} alone; the server "
            "reads all other layers: leave encrypt_layers out",
        )
    facts.wrong(
        one,
        "shared-key",
        "all clients share one secret key, so the server and any one "
        "client together read every update; the decrypted model has no noise",
    )


def _convert(facts: _Stated, one: _Filter) -> None:
    facts.wrong(
        one,
        "never-converts",
        "NVFlare 2.9 clears the task's data before filters of "
        "results run, so it changes nothing: clamps after it act on whole weights; set "
        "params_transfer_type to DIFF",
        fatal=False,
    )


def _own(facts: _Stated, one: _Filter) -> None:
    """The chain of a LeakboundFilter: a clip and Gaussian noise state numbers, other links none."""
    defense = one.args.get("defense", "none")
    rate = one.number("learning_rate", None) or 1.0
    texts = [defense] if isinstance(defense, str) else defense
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{one.key}.args.defense is {str(defense)[:60]!r}; give names with settings"
        )
    before = facts.noisy
    for spec in (row_of("defense", text) for text in texts):
        name = spec["name"]
        if name == "clip" and not before and not (facts.noisy and facts.facts.get("clip.kind")):
            kind = "none" if facts.noisy else "l2"
            facts.clip(
                norm=_times(spec.get("clip_norm"), rate),
                kind=kind,
                at="client",
            )
        elif name == "gaussian_noise" and not facts.noisy:
            facts.facts |= {
                "noise.std": _times(spec.get("noise_std"), rate),
                "noise.at": "client",
                "noise.seeded": one.args.get("seed") is not None,
            }
        elif name not in ("none", "clip"):
            if name != "magnitude_pruning":  # it only makes entries smaller
                facts.change()
            facts.wrong(
                one,
                "not-stated",
                f"what {name} changes is not stated",
                fatal=False,
            )


def _times(value: Any, rate: float) -> float | None:
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) * rate if fine else None


_KNOWN: Mapping[str, Callable[[_Stated, _Filter], None]] = {
    "ExcludeVars": _exclude,
    "PercentilePrivacy": _percentile,
    "SVTPrivacy": _svt,
    "HEModelEncryptor": _he,
    "ConvertWeights": _convert,
    "LeakboundFilter": _own,
}
