"""Run the experiments that are not done yet, in several processes, one line per record."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

import torch

from leakbound.cli import kit
from leakbound_reproductions.outcome import Tell
from leakbound_reproductions.priprune import cell as cells
from leakbound_reproductions.priprune.cell import Record
from leakbound_reproductions.priprune.study import Cell


def records(
    wanted: Iterable[Cell], folder: Path, workers: int, tell: Tell = lambda part, done, total: None
) -> dict[str, Record]:
    """The records of all experiments by id; those in the folder's journal are not run again.

    Ctrl-C loses only the running experiments, because each record is written when it is ready.
    """
    kit.folder(folder)
    path = folder / "cells.jsonl"
    kit.check(path, key="id")
    done = read(path)
    once = {cell.id: cell for cell in wanted}
    todo = [cell for id_, cell in once.items() if id_ not in done]
    before = len(once) - len(todo)
    tell("cells", before, len(once))
    for now, (record, seconds) in enumerate(_each(todo, workers), 1):
        kit.append(path, {"schema": 1, **record}, "id")
        cost = {"id": record["id"], "schema": 1, "seconds": seconds}
        kit.append(folder / "timings.jsonl", cost, "id")
        done[record["id"]] = record
        tell("cells", before + now, len(once))
    return {id_: done[id_] for id_ in once}


def read(path: Path) -> dict[str, Record]:
    """The journal's records by id; incomplete lines are skipped."""
    found: dict[str, Record] = {}
    if path.exists():
        for line in kit.read(path).splitlines(keepends=True):
            record = kit.decode(line, "id")
            if record is not None:
                del record["schema"]
                found[record["id"]] = record
    return found


def _each(todo: list[Cell], workers: int) -> Iterator[tuple[Record, float]]:
    if workers <= 1 or len(todo) <= 1:
        _start()
        yield from (_timed(cell) for cell in todo)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start)
    try:
        running = set()
        left = iter(todo)
        while True:
            for cell in left:
                running.add(pool.submit(_timed, cell))
                if len(running) > workers:
                    break
            if not running:
                return
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _timed(cell: Cell) -> tuple[Record, float]:
    """The record and its processor time in seconds, which is not part of it."""
    began = time.process_time()
    return cells.run(cell), time.process_time() - began


def _start() -> None:
    torch.set_num_threads(1)
