"""A clinic: some steps of AdamW on its own notes; sends its adapters."""

import tempfile

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from transformers import Trainer, TrainingArguments

from adapters.task import build, notes

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Local steps of transformers' trainer, with its defaults, on all notes at once."""
    model = build()
    set_peft_model_state_dict(model, msg.content["arrays"].to_torch_state_dict())
    config = msg.content["config"]
    own = notes(context.node_config["partition-id"])
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=config["steps"],
            learning_rate=config["lr"],
            per_device_train_batch_size=len(own),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        rows = [{"input_ids": note, "labels": note} for note in own]
        Trainer(model, settings, train_dataset=rows).train()
    content = {
        "arrays": ArrayRecord(get_peft_model_state_dict(model)),
        "metrics": MetricRecord({"num-examples": len(own)}),
    }
    return Message(content=RecordDict(content), reply_to=msg)
