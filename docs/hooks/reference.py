"""The reference: a page for each public module, by mkdocstrings, and one for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from leakbound.cli import usage
from leakbound.cli.options import VERBS

MODULES: Mapping[str, str] = {
    "leakbound": "The names that most programs need",
    "leakbound.core": "Tasks, updates, observations, noise distributions",
    "leakbound.randomness": "Named streams of randomness, and a secure source",
    "leakbound.client": "What a client computes, also for attackers who simulate it",
    "leakbound.protocol": "One round: clients, defense, server",
    "leakbound.pairing": "Pairs of truth and reconstruction",
    "leakbound.metrics": "How close a reconstruction is",
    "leakbound.attacks": "Attacks",
    "leakbound.defenses": "Defenses",
    "leakbound.models": "Models to audit",
    "leakbound.data": "Images, and their splits",
    "leakbound.bounds": "Bounds on errors and on probabilities",
    "leakbound.channel": "What an update leaks: Fisher information, overlaps, priors by class",
    "leakbound.engines.sensitivity": "How much every coordinate leaks",
    "leakbound.domains": "What one example is: images, rows of a table",
    "leakbound.assess": "Records: what was reconstructed, what bounds it, the verdict",
    "leakbound.risk": "Statements about risk, and calibration",
    "leakbound.audit": "Plans, experiments, results",
    "leakbound.report": "The report of a run",
    "leakbound.captured": "Updates from your own run",
    "leakbound.cluster": "Audits on many machines",
    "leakbound.lpips": "A perceptual distance, from your weight file",
    "leakbound.inspection": "Marks of malicious models",
    "leakbound.meter": "The leak meter",
    "leakbound.flower": "With Flower",
    "leakbound.opacus": "With Opacus",
    "leakbound.gate": "The gate: answers of a policy",
    "leakbound.loggers": "Results in MLflow and Weights & Biases",
    "leakbound.losses": "Losses by name",
    "leakbound.trees": "Trees of XGBoost clients",
    "leakbound.tensors": "Tensors in files",
    "leakbound.testing": "Checks for your own attack or defense",
    "leakbound.registry": "Names to things",
}


def pages() -> dict[str, str]:
    """All pages of the reference by path, and `index.md`."""
    rows = ["| module | what for |", "|---|---|"]
    found = {}
    for name, title in MODULES.items():
        short = name.removeprefix("leakbound.")
        rows.append(f"| [`{name}`]({short}.md) | {title} |")
        found[f"reference/{short}.md"] = _page(name)
    head = (
        "# Reference\n\n"
        "| | |\n|---|---|\n"
        "| Command line | [every command and option](command_line.md) |\n"
        "| Plans | [every key](plan_keys.md) |\n"
        "| Attacks and defenses | [each attack](../attacks/index.md), "
        "[each defense](../defenses/index.md) |\n"
        "| Schemas | [records.jsonl, utility.jsonl, diagnosis.jsonl](records.schema.json), "
        "[report.json](report.schema.json) |\n\n"
        "## Python\n\nThese pages come from the docstrings. Names in a module's `__all__` are "
        "public; the rest may change.\n\n"
    )
    found["reference/command_line.md"] = _command_line()
    return {"reference/index.md": head + "\n".join(rows) + "\n"} | found


def _command_line() -> str:
    """Every command with all its options, as its own help prints them."""
    blocks = [
        "# Command line",
        "`leakbound COMMAND --help` prints the usual options, `--help-all` all of them, as here.",
    ]
    for verb, (options, _) in VERBS.items():
        text = usage.help_of(verb, options, all_options=True).strip("\n")
        blocks.append(f"## `leakbound {verb}`\n\n```text\n{text}\n```")
    return "\n\n".join(blocks) + "\n"


def _home(place: str) -> str:
    """The page of a module: its own, or that of the package that exports its names."""
    return place if f"leakbound.{place}" in MODULES else place.partition(".")[0]


def _page(name: str) -> str:
    module = import_module(name)
    own = [n for n in getattr(module, "__all__", ()) if not n.startswith("_")]
    if name == "leakbound":  # its packages have pages; the names are documented where they live
        homes = {n: _home(place) for n, place in module._WHERE.items()}
        rows = [f"- [`{n}`]({place}.md)" for n, place in homes.items()]
        packages = [f"- [`{n}`]({n}.md)" for n in module._PACKAGES]
        first = (module.__doc__ or "").strip()
        return (
            f"# `leakbound`\n\n{first}\n\n## Names\n\n"
            + "\n".join(rows)
            + ("\n\n## Packages\n\n" + "\n".join(packages) + "\n")
        )
    members = f"\n      members: {own}" if own else ""
    return f"# `{name}`\n\n::: {name}\n    options:\n      show_root_heading: false{members}\n"
