"""The server: averages, evaluates, and keeps what an honest-but-curious server sees."""

from collections.abc import Callable
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from hospital.task import CLIP_NORM, Net, accuracy, calibration, images
from leakbound import captured
from leakbound.audit.plan import Spec
from leakbound.defenses import Defense, DpSgd
from leakbound.flower import Watched


def server_app(
    out: Path | str = "seen",
    *,
    defended: bool = True,
    attack_steps: int = 500,
    on_report: Callable[[captured.UpdateResult], None] = lambda outcome: None,
) -> ServerApp:
    """The app. What it sees of round 1 goes to `out`, and a leak report to `out`/report."""
    out = Path(out)
    app = ServerApp()
    noise = calibration().noise_multiplier
    defense = DpSgd(clip_norm=CLIP_NORM, noise_multiplier=noise) if defended else None

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        # Evaluation by the clients would leave without noise: the server has a test set.
        strategy = FedAvg(fraction_evaluate=0.0)
        watched = Watched(
            strategy,
            out=out / "updates",
            on_round=lambda number, seen: on_report(
                report(seen, out / "report", defense, attack_steps)
            ),
        )
        result = watched.start(
            grid=grid,
            initial_arrays=ArrayRecord(Net().state_dict()),
            train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
            num_rounds=context.run_config["num-server-rounds"],
            evaluate_fn=evaluate,
        )
        last = max(result.evaluate_metrics_serverapp)
        share = result.evaluate_metrics_serverapp[last]["accuracy"]
        print(f"accuracy after {last} rounds: {share:.1%}")

    return app


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Loss and accuracy on the server's own test set."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    loss, share = accuracy(model, images()[2])
    return MetricRecord({"loss": loss, "accuracy": share})


def report(
    seen: list[captured.Capture], out: Path, defense: Defense | None, steps: int
) -> captured.UpdateResult:
    """Attack the update of the smallest hospital, knowing the defense, and write a leak report."""
    smallest = min(seen, key=lambda capture: float(capture.about["examples"]))
    settings = (("restarts", 2), ("steps", steps), ("total_variation", 0.001))
    outcome = captured.attack_update(
        smallest,
        Net(),
        captured.Settings((1, 28, 28), attacks=[Spec("inverting_gradients", settings)]),
        captured.TrainingInfo(steps=1, defense=defense),  # as the server asks of every hospital
        output=captured.Output(out),
    )
    print(f"attacked {smallest.name}; report: {outcome.page}")
    return outcome


app = server_app()
