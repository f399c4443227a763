"""FedAvg as Flower's documentation writes it: a ServerApp with the stock strategy, a ClientApp that trains an MLP."""

import json
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

client_app = ClientApp()
server_app = ServerApp()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    hidden = nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(200, 10))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    with np.load(str(context.node_config["data"])) as file:
        x, y = torch.from_numpy(file["x_train"].astype(np.float32) / 255), torch.from_numpy(file["y_train"]).long()
    model = mlp()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        batch = torch.randint(len(y), (30,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(RecordDict(content), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    nodes, cohort = 8, int(context.run_config["cohort"])
    while len(list(grid.get_node_ids())) < nodes:
        time.sleep(1)
    times = [time.time()]

    def evaluate(number: int, arrays: ArrayRecord) -> None:
        times.append(time.time())

    strategy = FedAvg(cohort / nodes, 0.0, min_train_nodes=cohort, min_available_nodes=nodes)
    start = ArrayRecord(mlp().state_dict())
    strategy.start(grid, start, num_rounds=int(context.run_config["rounds"]), evaluate_fn=evaluate)
    Path(str(context.run_config["out"])).write_text(json.dumps(np.diff(times[1:]).tolist()))
