"""Batches that a train script in another thread shows: those of this round, and once."""

import threading

import torch

from leakbound.client_side.batches import listen, listening, shown, tap


def show(size):
    """As a train script does, in a thread of its own."""
    given = torch.zeros(size, 2), torch.zeros(size, dtype=torch.long)
    thread = threading.Thread(target=tap, args=given)
    thread.start()
    thread.join()


def sizes():
    return [batch.size for batch in shown()]


def test_a_process_hears_every_thread_until_it_asks():
    show(1)  # nobody listens yet
    listen()
    show(2)
    show(3)
    assert sizes() == [2, 3]
    show(4)
    assert sizes() == []


def test_a_new_round_forgets_the_batches_before():
    listen()
    show(2)
    listen()
    show(1)
    assert sizes() == [1]


def test_a_mods_own_call_comes_first():
    listen()
    with listening() as tapped:
        tap(torch.zeros(5, 2), torch.zeros(5, dtype=torch.long))
    assert [batch.size for batch in tapped] == [5]
    assert sizes() == []
