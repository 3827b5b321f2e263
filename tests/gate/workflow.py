"""Runs the GitHub workflow of a project here: the `run:` lines of its steps, in their order.

    python tests/gate/workflow.py PROJECT [--package PACKAGE]

leakbound's action is the one of this clone. With PACKAGE its install step runs, and installs that.
Steps of GitHub's own actions are left out. The exit code is that of the first step that fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent.parent
ACTION = ROOT / "integrations" / "github-action" / "action.yml"
OURS = "leakbound/integrations/github-action@"
GITHUBS = ("actions/checkout@", "actions/setup-python@", "github/codeql-action/upload-sarif@")
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")
"""As the runner calls it."""


def steps(project: Path, package: str | None) -> Iterator[tuple[str, dict[str, str]]]:
    """The script of every step that runs here, and its variables."""
    (path,) = (project / ".github" / "workflows").glob("*.yml")
    for job in yaml.safe_load(path.read_text("utf-8"))["jobs"].values():
        for step in job["steps"]:
            uses = step.get("uses", "")
            if "run" in step:
                yield step["run"], _filled(step.get("env", {}), {})
            elif OURS in uses:
                yield from _of_action(step["with"], package)
            elif not uses.startswith(GITHUBS):
                raise ValueError(f"{path} uses {uses!r}, which cannot run here")


def _of_action(
    given: Mapping[str, str], package: str | None
) -> Iterator[tuple[str, dict[str, str]]]:
    action = yaml.safe_load(ACTION.read_text("utf-8"))
    known = {name: str(own.get("default", "")) for name, own in action["inputs"].items()}
    if unknown := set(given) - set(known):
        raise ValueError(f"the action has no input {sorted(unknown)}")
    install, check = action["runs"]["steps"]
    inputs = known | dict(given)
    if package is not None:
        yield install["run"], _filled(install["env"], inputs | {"package": package})
    yield check["run"], _filled(check["env"], inputs)


def _filled(env: Mapping[str, str], inputs: Mapping[str, str]) -> dict[str, str]:
    def value(found: re.Match[str]) -> str:
        return inputs[found[1]]

    return {key: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", value, text) for key, text in env.items()}


def run(project: Path, package: str | None = None, **settings: str) -> tuple[int, str]:
    """The exit code, and the summary that GitHub shows."""
    with tempfile.TemporaryDirectory() as place:
        output, summary = Path(place, "output"), Path(place, "summary")
        names = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary)}
        env = os.environ | names | {"RUNNER_TEMP": place} | settings
        code = 0
        for script, own in steps(project, package):
            code = subprocess.run(
                [*BASH, script], env=env | own, cwd=project, check=False
            ).returncode
            if code:
                break
        return code, summary.read_text("utf-8") if summary.exists() else ""


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("project", type=Path)
    options.add_argument("--package")
    arguments = options.parse_args()
    found, said = run(arguments.project, arguments.package)
    print(said)
    sys.exit(found)
