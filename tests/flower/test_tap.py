"""The tap shows batches to the mods of this client, and to nobody else."""

import threading

import torch

from leakbound.client_side.batches import _OF_CALL, listening
from leakbound.defenses import GaussianNoise, NoisyCopy
from leakbound.flower import DefenseMod, tap


def test_nothing_is_kept_where_no_one_listens():
    tap(torch.zeros(2, 1, 2, 2), torch.tensor([0, 1]))
    with listening() as heard:
        pass
    tap(torch.zeros(2, 1, 2, 2), torch.tensor([0, 1]))
    assert heard == []


def test_batches_are_copies_in_order_and_listeners_share_them():
    inputs = torch.rand(2, 1, 2, 2)
    with listening() as outer:
        tap(inputs, torch.tensor([0, 1]))
        with listening() as inner:
            tap(inputs[:1], torch.tensor([2]))
        was = inputs.clone()
        inputs.zero_()
    assert inner is outer
    assert sum(batch.size for batch in outer) == 3
    assert [batch.size for batch in outer] == [2, 1]
    assert torch.equal(outer[0].inputs, was)


def test_other_threads_are_not_heard():
    with listening() as heard:
        other = threading.Thread(target=tap, args=(torch.zeros(1, 2), torch.tensor([0])))
        other.start()
        other.join()
    assert heard == []


def test_a_mod_that_needs_no_batch_does_not_listen(flower, setup, batches):
    heard = []

    def inner(message, context, call_next):
        reply = call_next(message, context)
        heard.append(_OF_CALL.get())
        return reply

    for defense, listens in ((GaussianNoise(0.1), False), (NoisyCopy(0.1), True)):
        flower.ask(flower.client_app([DefenseMod(defense, setup), inner], batches=batches))
        assert (heard.pop() is not None) == listens
