"""Files and folders: the only place that opens users' files and writes ours.

The rule for every write: a file, link, device or folder that leakbound did not write stays
unchanged. One of two marks identifies what leakbound writes:

- A document (HTML, JSON, SARIF, JUnit, PNG, Markdown, TOML, safetensors) has a *seal* near its
  start: the words "leakbound, sha256" and the SHA-256 of everything else in the file. A user's file
  has no seal, and a document that the user changed has a wrong one; neither is replaced.
- A journal (JSON Lines) is identified by its records: lines in the one canonical form of `encode`
  that have a `schema` and the journal's key.

A picture in a run is named by the digest of its content. A regular file with that name and other
content is a damaged picture and is written again. Any other file (a table as CSV) is written once,
and later only with the same bytes.

Windows has no fcntl, changes line ends without O_BINARY, and neither renames nor removes a file
that a process has open. `tests/test_portable.py` imitates it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import secrets
import stat
import struct
import time
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

try:
    from fcntl import LOCK_EX, LOCK_NB, flock

    LOCKS = True
except ImportError:  # Windows
    LOCKS = False

RUN = "run.json"
LOCK = ".lock"
SEAL = "leakbound, sha256 " + "0" * 64
"""The seal before its digest is known; `write` inserts the digest."""

_SEAL = re.compile(rb"leakbound, sha256 ([0-9a-f]{64})")
MOST_TOML = 1 << 22
"""Bytes of a TOML file that is read."""
# A seal or a journal's record lies within these bytes: a user's large file is read no further.
_HEAD = 1 << 16
_JOURNAL_HEAD = 1 << 24
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_HEADER = 33  # the signature and the IHDR chunk, which has to come first
_CHARSET = b'<meta charset="utf-8">'
_PART = re.compile(r"\..+\.[0-9a-f]{16}\.leakbound-part")
# What `os.link` raises on file systems without hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_LINKS |= {errno.EINVAL}  # Windows, on a FAT file system
# O_NONBLOCK: a FIFO that takes the place of a checked file must not block the call.
_PLAIN = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_NONBLOCK", "O_CLOEXEC"))
# For our own files no link is followed: it could lead out of the run's folder.
_DIRECT = _PLAIN | getattr(os, "O_NOFOLLOW", 0)
_FRESH = 600.0
"""Seconds without locks in which a file that nobody has open may still be getting its name."""
_CONTENT = re.compile(r"[0-9a-f]{16,64}")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def opened(path: Path) -> BinaryIO:
    """A regular file, open for reading; a FIFO would block forever, and a device may never end."""
    # Checked twice: to open a device may already act, and the path may name another file by then.
    _regular(Path(path).stat(), path)
    descriptor = os.open(path, os.O_RDONLY | _PLAIN)
    try:
        _regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def check_regular(path: Path, what: str = "file") -> None:
    """As `opened`, for a file that a library opens by name; raises a ValueError."""
    try:
        _regular(Path(path).stat(), path)
    except FileNotFoundError:
        raise ValueError(f"{what} {str(path)!r} does not exist; check the path") from None
    except OSError as error:
        raise ValueError(
            f"{what} {str(path)!r} cannot be read: {error.strerror}; give the path of a file"
        ) from None


@contextmanager
def writing(
    place: Path,
    mend: str = "make room, or name another place",
    *,
    name: str = "out",
) -> Iterator[None]:
    """Errors of our writes in this block become a ValueError that names the place."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{name} is {str(place)!r}, which cannot be written: {error.strerror or error}; {mend}"
        ) from None


def read(path: Path) -> bytes:
    """The content of a regular file; raises as `opened`."""
    with opened(path) as stream:
        return stream.read()


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables of a TOML file; `what` names it in errors, as in "plan 'p.toml'".

    Raises:
        ValueError: it cannot be read, is too large, or is no TOML in UTF-8.
    """
    content = read_bytes(path, what, most=MOST_TOML)
    try:
        return tomllib.loads(content.decode("utf-8-sig"))  # Windows editors write a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8 text: {error.reason} at {error.start}") from None
    except (ValueError, RecursionError) as error:  # of arrays nested too deep
        raise ValueError(f"{what} is not valid TOML: {error}") from None


def read_json(
    path: Path,
    what: str,
    *,
    most: int,
) -> dict[str, Any]:
    """The object in a JSON file of at most `most` bytes; as `read_toml`."""
    content = read_bytes(path, what, most=most)
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError):  # lists nested thousands deep exhaust the stack
        raise ValueError(f"{what} is not valid JSON in UTF-8; save it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} holds a {type(value).__name__}; give one with a JSON object")
    return value


def read_bytes(
    path: Path,
    what: str,
    *,
    most: int,
) -> bytes:
    """A file of at most `most` bytes; `what` is its name in errors."""
    try:
        with opened(path) as stream:
            content = stream.read(most + 1)  # one more byte shows a larger file
    except OSError as error:
        raise ValueError(f"{what} cannot be read: {error.strerror}; check the path") from None
    if len(content) > most:
        raise ValueError(f"{what} is over {most} bytes; give a smaller file")
    return content


def folder(base: Path, *names: str) -> Path:
    """A folder to write into, created if missing; leftovers of killed writes are removed.

    Every created folder, parents too, is accessible to its owner only. `base` may be a link to a
    folder, because the user names it. Folders below it may not: a link would lead elsewhere.
    """
    place = Path(base)
    for parent in [*reversed(place.parents), place]:
        _make(parent)
    if not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(place))
    for name in names:
        place = place / name
        _make(place)
        if not stat.S_ISDIR((status := os.lstat(place)).st_mode):
            raise _refusal(place, status)
    _remove_parts(place)
    return place


def check(*paths: Path, key: str | None = None) -> None:
    """Reject early what `write` would reject later, before any work is done."""
    for path in paths:
        _known(path, key)


def write(
    path: Path,
    content: bytes | Iterable[bytes],
    *,
    key: str | None = None,
) -> None:
    """Write a file in one step; readable by its owner only. It replaces only leakbound's files.

    A kill or a loss of power leaves the old file or the new one (of a picture in a run, perhaps
    none); `folder` removes what else it leaves. `content`: a document without its seal, or, with a
    `key`, a journal's lines, whole or one by one.
    """
    path = Path(path)
    named = False
    if isinstance(content, bytes):
        digest = hashlib.sha256(content).hexdigest()
        named = _CONTENT.fullmatch(path.stem) is not None and digest.startswith(path.stem)
        content = content if named or key is not None else _sealed(path, content)
        # Before the check for a seal: a table as CSV has none, and may stay if it is the same.
        if _holds(path, content):
            return
        before = _known(path, key, named=named)
        content = (content,)
    else:
        before = _known(path, key)
    part, descriptor = _new_part(path)
    try:
        with os.fdopen(descriptor, "wb", buffering=0):  # `_write_all` writes past any buffer
            for lines in content:
                _write_all(descriptor, lines)
            # Before it gets its name, which must not stand for an empty file after a loss of power.
            os.fsync(descriptor)
            if LOCKS:  # closed, it would be unlocked, and so a leftover
                _settle(part, path, before)
        if not LOCKS:
            _settle(part, path, before)
        if not named:
            _keep_name(path)
    finally:
        with suppress(FileNotFoundError):
            part.unlink()


def put(descriptor: int, content: bytes) -> None:
    """Write all of it and wait until it is on disk."""
    _write_all(descriptor, content)
    os.fsync(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def appending(path: Path, key: str) -> int:
    """A descriptor that appends to an existing journal of leakbound."""
    before = _known(path, key)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | _DIRECT)
    # The path may name another file since the check.
    if before is None or not os.path.samestat(before, os.fstat(descriptor)):
        os.close(descriptor)
        raise _refusal(path)
    return descriptor


def append(
    path: Path,
    record: Mapping[str, Any],
    key: str,
) -> None:
    """Append one record to a journal, which is created if missing.

    A kill of the process loses nothing; the call does not wait for the disk.
    """
    if not os.path.lexists(path):
        write(path, encode(record), key=key)
        return
    descriptor = appending(path, key)
    try:
        # A full disk may have cut the last line: the record then begins on a new one.
        os.lseek(descriptor, -1, os.SEEK_END)
        whole = os.read(descriptor, 1) == b"\n"
        _write_all(descriptor, encode(record) if whole else b"\n" + encode(record))
    finally:
        os.close(descriptor)


def encode(record: Mapping[str, Any]) -> bytes:
    """One record as one JSON line, in one canonical form."""
    # JSON has no NaN: other readers would reject the whole line.
    text = json.dumps(
        record,
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
    )
    return text.encode("ascii") + b"\n"


def decode(line: bytes, key: str) -> dict[str, Any] | None:
    """The record in a line; None if the line is not one that `encode` wrote for this journal."""
    try:
        record = json.loads(line)
        whole = isinstance(record, dict) and "schema" in record and encode(record) == line
    except (ValueError, RecursionError):
        return None
    return record if whole and key in record else None


@contextmanager
def claimed(base: Path) -> Iterator[Path]:
    """The folder of a run, created if missing and locked against other processes."""
    from filelock import FileLock, Timeout

    place = folder(base)
    check_run(place)
    lock = FileLock(place / LOCK, timeout=0, mode=0o600)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"out is {str(base)!r}, where another run is active; wait for it or choose another "
            "folder"
        ) from None
    try:
        yield place
    finally:
        lock.release()


def check_run(place: Path) -> None:
    """Reject a folder that is not a run's: it holds other files but no run.json of leakbound."""
    names = {path.name for path in place.iterdir()} if os.path.lexists(place) else set()
    lock = place / LOCK
    if LOCK in names:
        status = lock.lstat()
        # Our lock file is empty; a file with content is the user's.
        if not stat.S_ISREG(status.st_mode) or status.st_size:
            raise _refusal(lock, None if stat.S_ISREG(status.st_mode) else status)
    others = sorted(name for name in names - {LOCK} if not _PART.fullmatch(name))
    if others and RUN not in names:
        raise ValueError(
            f"out is {str(place)!r}, which holds other files ({others[0]!r}, ...) but no {RUN}; "
            "choose an empty or new folder"
        )
    check(place / RUN)


def _regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it is {_kind(status)}, not a regular file", str(path))


def _make(place: Path) -> None:
    with suppress(FileExistsError):
        if not place.exists():
            place.mkdir(mode=0o700)


def _new_part(path: Path) -> tuple[Path, int]:
    """A new file next to `path`, locked while the process lives; an unlocked one is a leftover."""
    while True:
        # Cut, because file systems limit a name to about 255 bytes.
        part = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.leakbound-part")
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | _DIRECT, 0o600)
        if not LOCKS:
            return part, descriptor
        with suppress(OSError):  # a file system without locks
            flock(descriptor, LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return part, descriptor
        os.close(descriptor)  # another process removed it as a leftover before it was locked


def _remove_parts(place: Path) -> None:
    for part in place.iterdir():
        if not _PART.fullmatch(part.name):
            continue
        with suppress(OSError):  # gone, or being written: locked, or open on Windows
            status = part.lstat()
            if not stat.S_ISREG(status.st_mode):
                continue
            if not LOCKS:
                if time.time() - status.st_mtime > _FRESH:
                    part.unlink()
                continue
            descriptor = os.open(part, os.O_RDWR | _DIRECT)
            try:
                flock(descriptor, LOCK_EX | LOCK_NB)
                part.unlink()
            finally:
                os.close(descriptor)


def _settle(
    part: Path,
    path: Path,
    before: os.stat_result | None,
) -> None:
    """Give the file its name, unless another process took the name since the check."""
    if before is not None:
        now = os.lstat(path)
        # The time, too: a program may have written to the same file in place.
        if not os.path.samestat(before, now) or before.st_mtime_ns != now.st_mtime_ns:
            raise _refusal(path)
        part.replace(path)
        return
    try:
        # A link, unlike a rename, never replaces a file that took the name meanwhile.
        os.link(part, path, follow_symlinks=False)
    except FileExistsError:
        raise _refusal(path) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A short race is left here, only on file systems without links.
        if os.path.lexists(path):
            raise _refusal(path) from None
        part.rename(path)


def _keep_name(path: Path) -> None:
    """Wait until the folder is on disk: what a run writes later never outlives its run.json."""
    with suppress(OSError):  # a folder that we may not read, or a file system that cannot
        descriptor = os.open(path.parent, os.O_RDONLY | _PLAIN)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _holds(path: Path, content: bytes) -> bool:
    try:
        status = os.lstat(path)
        same = stat.S_ISREG(status.st_mode) and status.st_size == len(content)
        return same and read(path) == content
    except OSError:
        return False


def _known(
    path: Path,
    key: str | None,
    *,
    named: bool = False,
) -> os.stat_result | None:
    """Leakbound's file at the path; if `named` by its content's digest, also a damaged copy."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(path, status)
    with opened(path) as stream:
        # The path may name another file since `lstat`.
        same = os.path.samestat(status, os.fstat(stream.fileno()))
        ours = named or (_is_sealed(stream) if key is None else _is_journal(stream, key))
        if not same or not ours:
            raise _refusal(path)
    return status


def _refusal(path: Path, status: os.stat_result | None = None) -> ValueError:
    what = "a file that leakbound did not write, or that was changed since"
    if status is not None:
        what = _kind(status)
    return ValueError(
        f"{str(path)!r} is {what}; it stays unchanged: move it away, or name another place"
    )


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "no regular file")


def _sealed(path: Path, content: bytes) -> bytes:
    """A document with its seal, if its kind has a place for one."""
    blank = SEAL.encode()
    if content.startswith(_PNG):
        text = b"tEXtComment\0" + blank
        # A chunk's length leaves out its type; the checksum is set below, after the digest.
        chunk = struct.pack(">I", len(text) - 4) + text + b"\0" * 4
        content = content[:_PNG_HEADER] + chunk + content[_PNG_HEADER:]
    elif path.suffix == ".json":
        content = b'{\n "written_by": "' + blank + b'",' + content[1:]
    elif _CHARSET in content[:_HEAD]:
        meta = b'%s\n<meta name="generator" content="%s">' % (_CHARSET, blank)
        content = content.replace(_CHARSET, meta, 1)
    elif path.suffix == ".md":
        content = b"<!-- written by %s -->\n%s" % (blank, content)
    elif path.suffix == ".toml":
        content = b"# written by %s\n%s" % (blank, content)
    elif path.suffix not in (".safetensors", ".sarif", ".xml"):  # their writers put it in
        return content
    seal = _SEAL.search(content, 0, _HEAD)
    assert seal is not None
    head = content[: seal.start(1)]
    rest = content[seal.end(1) :]
    head += _digest(io.BytesIO(content)).encode()
    # A PNG's checksum begins at the chunk's type, after its length.
    if content.startswith(_PNG):
        rest = struct.pack(">I", zlib.crc32(head[_PNG_HEADER + 4 :])) + rest[4:]
    return head + rest


def _is_sealed(stream: BinaryIO) -> bool:
    seal = _SEAL.search(stream.read(_HEAD))
    stream.seek(0)
    return seal is not None and _digest(stream) == seal[1].decode()


def _digest(stream: BinaryIO) -> str:
    """The digest of all but the seal, and of a PNG without the checksum after the seal."""
    head = stream.read(_HEAD)
    seal = _SEAL.search(head)
    assert seal is not None
    end = seal.end() + (4 if head.startswith(_PNG) else 0)
    state = hashlib.sha256(head[: seal.start()] + head[end:])
    while chunk := stream.read(1 << 20):
        state.update(chunk)
    return state.hexdigest()


def _is_journal(stream: BinaryIO, key: str) -> bool:
    """Whether it holds a record of the journal; lines that a full disk cut are skipped."""
    left = _JOURNAL_HEAD
    while line := stream.readline(left):
        if decode(line, key) is not None:
            return True
        left -= len(line)
    return False
