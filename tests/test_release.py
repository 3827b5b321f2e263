"""The script of `make release`: what it refuses, checksums and their signature.

A whole release takes minutes, so only `make release` itself builds and installs.
"""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("release_script", ROOT / "tools" / "release.py")
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)


def git(folder, *words):
    who = ("-c", "user.name=x", "-c", "user.email=x@localhost")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_only_a_tagged_commit_without_changes_is_released(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "a")
    with pytest.raises(release.ReleaseError, match=r"0 tags v\*; give it one"):
        release.tagged(tmp_path)
    git(tmp_path, "tag", "v1.2.3")
    assert release.tagged(tmp_path) == "1.2.3"
    git(tmp_path, "tag", "v1.2.4")
    with pytest.raises(release.ReleaseError, match="2 tags"):
        release.tagged(tmp_path)
    (tmp_path / "a").write_text("2")
    with pytest.raises(release.ReleaseError, match=r"changes; commit or remove them:\nM a"):
        release.tagged(tmp_path)


def test_a_folder_with_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "tagged", lambda: "1")
    (tmp_path / "mine").touch()
    with pytest.raises(release.ReleaseError, match="holds files; move them"):
        release.release(tmp_path, None)


def test_sums_are_those_of_sha256sum_and_a_change_breaks_the_signature(tmp_path):
    if not (shutil.which("sha256sum") and shutil.which("ssh-keygen")):
        pytest.skip("needs sha256sum and ssh-keygen")
    out, key = tmp_path / "dist", tmp_path / "key"
    out.mkdir()
    (out / "b.whl").write_bytes(b"b")
    (out / "a.tar.gz").write_bytes(b"a")
    listed = release.sums(out)
    subprocess.run(["sha256sum", "-c", "--strict", listed.name], cwd=out, check=True)
    new = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
    subprocess.run(new, check=True)
    signature = release.sign(listed, key)
    signers = tmp_path / "signers"
    signers.write_text(f"me {key.with_suffix('.pub').read_text()}")
    verify = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "me", "-n", release.PURPOSE]
    verify += ["-s", str(signature)]
    content = listed.read_bytes()
    assert subprocess.run(verify, input=content, capture_output=True).returncode == 0
    assert subprocess.run(verify, input=content + b" ", capture_output=True).returncode != 0
    assert release.sums(out).read_bytes() == content, "the signature is not among the files"
