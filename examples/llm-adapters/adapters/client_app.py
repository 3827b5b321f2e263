"""A clinic: some steps of SGD on its own notes; sends its adapters."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from adapters.task import adapters_of, build, notes, receive

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Local steps on all notes at once."""
    model = receive(build(), msg.content["arrays"].to_torch_state_dict())
    config = msg.content["config"]
    own = notes(context.node_config["partition-id"])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=config["lr"])
    for _ in range(config["steps"]):
        optimizer.zero_grad()
        model(input_ids=own, labels=own).loss.backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(adapters_of(model)),
        "metrics": MetricRecord({"num-examples": len(own)}),
    }
    return Message(content=RecordDict(content), reply_to=msg)
