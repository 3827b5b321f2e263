"""A hospital: trains, defends what it sends, and measures what that still leaks."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from hospital.task import CLIP_NORM, Net, accuracy, calibration, hospitals, images
from leakbound.defenses import DpSgd
from leakbound.flower import DefenseMod, Setup, protected, tap
from leakbound.flower.meter import LeakMeter
from leakbound.meter import Policy


def client_app(*, defended: bool = True, path: str | None = None) -> ClientApp:
    """The app; `defended=False` trains without noise, for comparison.

    `path`: a file on the hospital's own disk for what its meter reads.
    """
    setup = Setup(Net, learning_rate="lr", classes=10, public=images()[0])
    meter = LeakMeter(setup, Policy(on_leak="warn"), path=path)
    noise = DpSgd(clip_norm=CLIP_NORM, noise_multiplier=calibration().noise_multiplier)
    # The first mod of the list is the outermost: the meter sees what really leaves.
    mods = [meter, DefenseMod(noise, setup)] if defended else [meter]
    app = ClientApp()

    @app.train(mods=protected(mods))
    def train(msg: Message, context: Context) -> Message:
        """One step of SGD on all of the hospital's images, as DP-SGD in a mod needs it."""
        batch = own_images(context)
        model = received(msg)
        tap(batch.inputs, batch.labels)  # shows the batch to the mods, in this process
        optimizer = torch.optim.SGD(model.parameters(), lr=msg.content["config"]["lr"])
        loss = torch.nn.functional.cross_entropy(model(batch.inputs), batch.labels)
        loss.backward()
        optimizer.step()
        # No training loss in the metrics: it would leave without noise.
        metrics = MetricRecord({"num-examples": batch.size})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        """Loss and accuracy on the hospital's images; these numbers leave without noise."""
        batch = own_images(context)
        loss, share = accuracy(received(msg), batch)
        metrics = {"eval_loss": loss, "eval_acc": share, "num-examples": batch.size}
        return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)

    return app


def own_images(context: Context):
    """The images of this hospital."""
    return hospitals(context.node_config["num-partitions"])[context.node_config["partition-id"]]


def received(msg: Message) -> Net:
    """The model at the weights that the server sent."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return model


app = client_app()
