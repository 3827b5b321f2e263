"""The server: FedAvg inside Flower's clip and noise, described before the first round."""

from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import (
    Grid,
    NeighboringRelation,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
    ServerApp,
)
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg

from privacy_check.check import check
from privacy_check.task import Net

app = ServerApp()


def strategy_of(config) -> DifferentialPrivacyClientSideFixedClipping:
    """All clients take part in every round; the accountant stops a round with fewer replies."""
    clients = config["num-clients"]
    accountant = RdpAccountant(
        PrivacyConfig(
            target_delta=1e-5,
            population_size=clients,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
        )
    )
    average = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    return DifferentialPrivacyClientSideFixedClipping(
        average,
        config["noise-multiplier"],
        config["clipping-norm"],
        clients,
        accountant=accountant,
    )


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Write deployment.toml, then train."""
    config = context.run_config
    strategy = strategy_of(config)
    arrays = ArrayRecord(Net().state_dict())
    check(strategy, config, arrays, Path("deployment.toml"))
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=config["num-server-rounds"])
