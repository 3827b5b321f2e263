"""The server: averages adapters."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import get_peft_model_state_dict

from adapters.task import build

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Federated averaging of the adapters alone."""
    config = context.run_config
    FedAvg(fraction_evaluate=0.0).start(
        grid=grid,
        initial_arrays=ArrayRecord(get_peft_model_state_dict(build())),
        train_config=ConfigRecord({"lr": config["learning-rate"], "steps": config["local-steps"]}),
        num_rounds=config["num-server-rounds"],
    )
