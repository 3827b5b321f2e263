"""Both federations, without and with the defense, in this process: no Ray, nothing that listens.

python run_in_process.py [--rounds 20] [--hospitals 5] [--attack-steps 500] [--out seen]
"""

import argparse
import json
import logging
from pathlib import Path

import torch
from hospital.client_app import client_app
from hospital.server_app import server_app
from hospital.task import ROUNDS, calibration, hospitals

from leakbound import captured, evaluate, pair
from leakbound.flower import run

RATES = {False: 0.1, True: 1.0}
"""Clipped gradients are shorter and need larger steps."""


def federation(name: str, *, defended: bool, given: argparse.Namespace) -> None:
    """One training. Here the server's reconstruction is compared with the truth: both are known."""
    out = given.out / name
    readings = out / "readings.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    readings.unlink(missing_ok=True)
    torch.manual_seed(0)  # the model's first weights
    print(f"-- {name}")

    def judge(outcome: captured.UpdateResult) -> None:
        answer = outcome.answers[0]
        truth = hospitals(given.hospitals)[0]  # the smallest: the server attacks it
        if answer is None:
            print("the attack does not apply:", outcome.records[0].reason)
            return
        psnr = evaluate(pair(truth, answer), data_range=1.0)["psnr"]
        print(
            "PSNR of the images that the server reconstructed:", [round(v, 1) for v in psnr], "dB"
        )

    run(
        server_app(out, defended=defended, attack_steps=given.attack_steps, on_report=judge),
        client_app(defended=defended, path=str(readings)),
        given.hospitals,
        run_config={"num-server-rounds": given.rounds, "learning-rate": RATES[defended]},
    )
    for line in readings.read_text("utf-8").splitlines()[: given.hospitals]:
        read = json.loads(line)
        print(f"meter of hospital {read['client']}, round 1: {read['verdict']}, {read['action']}")


def main() -> None:
    """Run them and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--hospitals", type=int, default=5)
    parser.add_argument("--attack-steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("seen"))
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    print("images of the hospitals:", [batch.size for batch in hospitals(given.hospitals)])
    found = calibration()
    print(
        f"accepted risk: {found.target}; noise multiplier {found.noise_multiplier:g} "
        f"over {ROUNDS} rounds"
    )
    federation("undefended", defended=False, given=given)
    federation("defended", defended=True, given=given)


if __name__ == "__main__":
    main()
