"""A connection to Ray: to a running cluster, or to a local one that ends with it."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

ANSWER = 5.0
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The opening of HTTP/2 with empty settings; a server answers with its own settings."""
STORE = 100 << 20
"""Bytes of shared memory for a local Ray: records and pictures are small."""
MORTAL = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3",
    "RAY_gcs_server_request_timeout_seconds": "5",
    "RAY_agent_register_timeout_ms": "60000",
}
"""For a local Ray: its processes end soon after one of them was killed."""
PREFIX = (
    103 - len("/") - 8 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
)
"""Longest name before a folder's 8 random letters: a socket's name has at most 103 bytes
on macOS, and 107 on Linux; on Windows Ray has no such sockets."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextmanager
def connected(address: str | None, workers: int) -> Iterator[int]:
    """A connection to Ray, and how many workers to start: 0 means one per CPU.

    Without an address, it uses the Ray of this process, or starts one here.
    """
    try:
        with environment(QUIET):
            import ray
    except ImportError:
        raise ValueError("engine is 'ray', which is not installed: leakbound[ray]") from None

    library: Any = ray  # some of it has no types

    def count() -> int:
        return workers or max(1, int(library.cluster_resources().get("CPU", 1)))

    if ray.is_initialized():
        yield count()
        return
    with _signals_kept(), environment(QUIET), _temporary_folder() as folder:
        try:
            with warnings.catch_warnings(action="ignore"):  # Ray leaves some files open
                _connect(ray, address, workers, folder)
            yield count()
        finally:
            with warnings.catch_warnings(action="ignore"):
                ray.shutdown()
                _read_secret()


def _connect(
    ray: Any,
    address: str | None,
    workers: int,
    folder: str,
) -> None:
    try:
        if address is None:
            _start_here(ray, workers or os.cpu_count() or 1, folder)
            return
        if address == "auto":
            from ray._private.services import canonicalize_bootstrap_address_or_die

            with _loopback():
                address = canonicalize_bootstrap_address_or_die(address)
        local = _reach(address) in ("localhost", "127.0.0.1", "::1")
        with _loopback() if local else nullcontext():
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
            )
    except (ConnectionError, RuntimeError, TimeoutError, AssertionError) as error:
        where = "can be started here" if address is None else f"is at the address {address!r}"
        raise ValueError(
            f"no Ray {where}: {one_line(error)}; give the address of a cluster that this machine "
            "is a node of, or none to start one here"
        ) from None


def _start_here(
    ray: Any,
    cpus: int,
    folder: str,
) -> None:
    """Start a Ray whose processes listen only on the loopback and require its secret."""
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with _loopback(), environment(MORTAL | secret):
        if not _read_secret():
            raise ValueError(
                f"ray {ray.__version__} lets every account of this machine in; install ray>=2.52"
            )
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=STORE,
            _temp_dir=folder,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )


def _read_secret() -> bool:
    """Make Ray read its secret from the environment again; False if it supports no secrets."""
    import ray._raylet

    inner: Any = ray._raylet  # without types
    if not hasattr(inner, "AuthenticationTokenLoader"):
        return False
    inner.AuthenticationTokenLoader.instance().reset_cache()
    inner.Config.initialize("")
    return True


@contextmanager
def _loopback() -> Iterator[None]:
    """Make Ray use the loopback address; otherwise it listens on every interface."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with environment({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _reach(address: str) -> str:
    """Check that the address speaks HTTP/2, as Ray's head does, and return the host.

    Ray itself would try for minutes.
    """
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f'address is {address!r}; give "auto" or host:port of the cluster\'s head, as '
            "`ray start --head` prints it"
        )
    host = host.strip("[]")
    known = True
    try:
        with socket.create_connection((host, int(port)), ANSWER) as line:
            if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
                line.sendall(HELLO)
                known = line.recv(9)[3:4] == b"\x04"
    except OSError as error:
        raise ValueError(
            f"address is {address!r}, where nothing answers ({error.strerror or error}); "
            "check that the cluster is running"
        ) from None
    if not known:
        raise ValueError(
            f"address is {address!r}, where another program than Ray's head answers; give the port "
            "that `ray start --head` prints"
        )
    return host


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while; processes that start meanwhile inherit them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _signals_kept() -> Iterator[None]:
    here = threading.current_thread() is threading.main_thread()  # other threads must not set any
    numbers = (signal.SIGINT, signal.SIGTERM) if here else ()
    kept = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:
                signal.signal(number, handler)


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for Ray's sockets and logs: killed processes leave theirs behind."""
    usual = tempfile.gettempdir()
    prefix = f"leakbound-ray-{os.getpid()}-"
    short = os.name == "nt" or len(os.fsencode(usual)) + len(prefix) <= PREFIX
    place = usual if short else "/tmp"
    return tempfile.TemporaryDirectory(
        prefix=prefix,
        dir=place,
        ignore_cleanup_errors=True,
    )


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
