"""Ctrl-C and SIGTERM: each ends the program in time, and neither is taken for a result.

Python runs the handler of a signal only between two of its own instructions. So an exception from a
handler waits for a long call of native code: a large singular value decomposition takes minutes.
Native code that calls Python (TorchScript, a hook) may also turn the exception into another one. So
a thread notes every stop when it comes, and ends the process if the program does not end by itself
within `GRACE` seconds. What is finished has to be on disk at any time.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

GRACE = 3.0
"""Seconds from a stop to the forced end."""
DEFAULTS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
"""The stops, and the handlers of a program that has none of its own."""

STOPPED = "stopped"
_noted: int | None = None
_words = STOPPED


def last_words(text: str | None = None) -> str:
    """What the program says after a stop; a text replaces it, for what is known only later."""
    global _words
    _words = _words if text is None else text
    return _words


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends the program as Ctrl-C does."""


def came() -> int | None:
    """The signal that asked the program to stop; None: none did, or nobody notes them."""
    return _noted


def check() -> None:
    """Raise the stop again if one came: code in between may have swallowed it.

    Raises:
        KeyboardInterrupt: a stop came; `Terminated` if it was SIGTERM.
    """
    if _noted is not None:
        raise _exception(_noted)


def reraise(error: BaseException) -> None:
    """Raise a stop that an error hides, so that nobody records it as a failure.

    Raises:
        KeyboardInterrupt: a stop came, or the error was raised because of one.
    """
    check()
    seen = set[int]()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        # TorchScript keeps the name of a Python exception in its text alone
        if isinstance(one, KeyboardInterrupt) or "KeyboardInterrupt" in str(one):
            raise KeyboardInterrupt from error
        one = one.__cause__ or one.__context__


@contextmanager
def noted(
    end: Callable[[int], None],
    *,
    until_exit: bool = False,
) -> Iterator[None]:
    """Note the stops that come inside the block. They raise `KeyboardInterrupt` or `Terminated`.

    Nothing changes outside of the main thread, and for a stop that already has another handler.

    Args:
        end: ends the process; called with the signal, in another thread, if the block has not ended
            `GRACE` seconds after a stop.
        until_exit: after a stop, wait for the end of the process instead of that of the block.
    """
    global _noted
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number, handler in DEFAULTS.items() if signal.getsignal(number) is handler]
    _noted = None
    for number in ours:
        signal.signal(number, _raise)
    reader, writer = socket.socketpair()
    # The handler of a signal must never wait.
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watch = threading.Thread(
        target=_watch,
        args=(reader, ours, end),
        daemon=True,
    )
    watch.start()
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, DEFAULTS[number])
        # Otherwise the watch outlives the block, and ends the process if it has to.
        if not (until_exit and _noted is not None):
            signal.set_wakeup_fd(before)
            writer.close()
            watch.join()
            _noted = None


def _raise(number: int, frame: Any) -> None:
    global _noted
    _noted = _noted or number
    if number == signal.SIGTERM:  # a second one does not disturb what this one ends
        signal.signal(number, signal.SIG_IGN)
    raise _exception(number)


def _exception(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


def _watch(
    reader: socket.socket,
    ours: list[int],
    end: Callable[[int], None],
) -> None:
    """Wait for a stop, then for the end of the block, which closes the other side."""
    global _noted
    deadline: float | None = None
    with reader:
        while True:
            reader.settimeout(None if deadline is None else max(0.0, deadline - time.monotonic()))
            try:
                sent = reader.recv(1)
            except (TimeoutError, BlockingIOError):  # the latter at a timeout of 0
                assert _noted is not None  # a deadline has a stop
                end(_noted)
                return
            if not sent:
                return
            if deadline is None and sent[0] in ours:
                _noted = sent[0]  # the handler may still wait for native code
                deadline = time.monotonic() + GRACE


def _forget() -> None:
    """A forked process would write its own signals into the parent's socket."""
    with suppress(ValueError):  # not the main thread
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
