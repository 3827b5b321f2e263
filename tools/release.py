"""Build, check and sign a release of both distributions.

    python tools/release.py --key ~/.ssh/release_key     # or `make release KEY=...`

Writes into dist/: an sdist and a wheel of leakbound and of leakbound-reproductions, a list of what
a plain installation holds (CycloneDX), SHA256SUMS, and its signature (SHA256SUMS.sig). The version
is that of the commit's tag, so an untagged commit or a changed tree is refused. Nothing is
uploaded.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINNED = ("-c", ROOT / "constraints.txt")
SUMS = "SHA256SUMS"
PURPOSE = "file"
"""Namespace of the signature, as `ssh-keygen -Y` calls it."""


class ReleaseError(Exception):
    """Why nothing can be released, and what to do."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        words = " ".join(map(str, command))
        raise ReleaseError(f"{words} failed:\n{(done.stdout + done.stderr).strip()}")
    return done.stdout.strip()


def tagged(root: Path = ROOT) -> str:
    """The version in the tag of the present commit.

    Raises:
        ReleaseError: the tree has changes, or the commit has no tag v*.
    """
    changed = run("git", "status", "--porcelain", cwd=root)
    if changed:
        raise ReleaseError(f"the tree has changes; commit or remove them:\n{changed}")
    tags = run("git", "tag", "--points-at", "HEAD", "--list", "v*", cwd=root).split()
    if len(tags) != 1:
        raise ReleaseError(f"the commit has {len(tags)} tags v*; give it one: git tag -s v0.1.0")
    return tags[0].removeprefix("v")


def environment(folder: Path, *packages: str | Path) -> Path:
    """The Python of a new environment with these packages (arguments of `pip install`)."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    quiet = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(python, *quiet, *packages)
    return python


def build(python: Path, out: Path, version: str) -> Path:
    """Both sdists, and their wheels from them; the wheel of leakbound."""
    for folder in (ROOT, ROOT / "reproductions"):
        run(python, "-m", "build", "--outdir", out, folder)
    files = sorted(out.iterdir())
    run(python, "-m", "twine", "check", "--strict", *files)
    wrong = [file.name for file in files if f"-{version}" not in file.name]
    if len(files) != 4 or wrong:
        names = ", ".join(file.name for file in files)
        raise ReleaseError(f"{names}: these are not two sdists and two wheels of {version}")
    return next(
        file for file in files if file.name.startswith("leakbound-") and file.suffix == ".whl"
    )


def tried(out: Path, wheel: Path, work: Path, tools: Path) -> None:
    """Install the wheel with nothing else, use it, list what came with it; then both wheels."""
    python = environment(work / "plain", *PINNED, wheel)
    bound = (
        "bound",
        "--noise-multiplier",
        "0.05",
        "--dim",
        "784",
        "--norm",
        "1",
        "--prior",
        "sphere",
    )
    run(python.with_name("leakbound"), *bound, cwd=work)
    found = out / f"{wheel.name.split('-py3')[0]}.cdx.json"
    run(tools.with_name("cyclonedx-py"), "environment", python, "-o", found)
    both = environment(work / "both", *PINNED, *out.glob("*.whl"))
    run(both, "-m", "pip", "check")
    run(both.with_name("leakbound"), "audit", "--quick", "--out", work / "quick", cwd=work)
    run(both.with_name("leakbound"), "reproduce", "--help", cwd=work)


def sums(out: Path) -> Path:
    """Write SHA-256 of every file, as `sha256sum -c` reads them."""
    files = [file for file in sorted(out.iterdir()) if not file.name.startswith(SUMS)]
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in files]
    (out / SUMS).write_text("\n".join(lines) + "\n", encoding="ascii")
    return out / SUMS


def sign(file: Path, key: Path) -> Path:
    """Sign a file with an SSH key; `ssh-keygen -Y verify` checks it."""
    run("ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", PURPOSE, file)
    return file.with_name(file.name + ".sig")


def release(out: Path, key: Path | None) -> None:
    version = tagged()
    if out.exists() and any(out.iterdir()):
        raise ReleaseError(f"{out} holds files; move them, or give another --out")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tools = environment(work / "tools", "-r", ROOT / "tools" / "release-requirements.txt")
        print(f"building {version}", flush=True)
        wheel = build(tools, out, version)
        print("installing and using the wheels (some minutes)", flush=True)
        tried(out, wheel, work, tools)
    listed = sums(out)
    if key is None:
        print(f"{listed} is not signed; give --key to sign it")
    else:
        print(f"signed: {sign(listed, key)}")
    print(listed.read_text(encoding="ascii"), end="")


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--out", type=Path, default=ROOT / "dist", help="an empty or new folder")
    options.add_argument("--key", type=Path, help="a private SSH key that signs the checksums")
    given = options.parse_args()
    try:
        release(given.out.resolve(), given.key)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
