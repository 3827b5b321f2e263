"""The client: plain training, and Flower's own clip around it."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod

from privacy_check.task import Net, loader, train

MODS = [fixedclipping_mod]
app = ClientApp()


@app.train(mods=MODS)
def fit(message: Message, context: Context) -> Message:
    """One round of one client. No loss is sent: it would leave without noise."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    who, config = context.node_config, context.run_config
    batches = loader(who["partition-id"], who["num-partitions"], config["batch-size"])
    train(net, batches, config["local-epochs"], config["learning-rate"])
    metrics = MetricRecord({"num-examples": len(batches.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
