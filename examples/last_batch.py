"""FedAvg + fine-tuning on fewer rows: does the number of rows matter, or the size of the last batch?

The one epoch of fine-tuning ends with a full step on the last batch, however small it is: 1,125 rows are 35 batches of
32 and one of five. Here a trained global model is fine-tuned on more and on fewer rows of every client.

    fedthe table main-dir0.1 --methods fedavg_ft                            # trains what is needed
    python examples/last_batch.py runs/paper/trainings/ID-100.safetensors   # a few minutes on a CPU

Take an ID whose JSON says that it served fedavg_ft.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedthe import Settings, build, load_dataset
from fedthe.config import make_config
from fedthe.engine.loop import Loop
from fedthe.engine.shards import Shards
from fedthe.engine.train import deploy_some
from fedthe.engine.visit import Run
from fedthe.experiment.training import Deployed
from fedthe.methods import compose
from fedthe.methods.finetune import FineTune
from fedthe.nets import CNN
from fedthe.records import load_progress, read_json
from fedthe.study.figures.base import average, rate

CLIENTS, ROWS = 20, 1500  # training rows of each client

path = Path(sys.argv[1])
trained, seed = load_progress(path), read_json(path.with_suffix(".json"))["seed"]
assert trained is not None
method, engine, training = compose(CNN(10), FineTune()), Loop(), make_config({"dataset": "cifar10"}).training
data = load_dataset("cifar10", natural="none")
for rows in (ROWS, 1477, 1136, 1125, 1120, 750, 736):
    federation = build(data, Settings(clients=CLIENTS, dirichlet=0.1, seed=seed, train_fraction=rows / ROWS))
    run = Run(seed, Shards(federation, engine.device))
    assert {len(client.train) for client in federation.clients} == {rows}
    states = deploy_some(method, run, training, trained, engine, range(CLIENTS))
    deployed = Deployed("fedavg_ft", method, federation, run, states, engine, ["original"])
    accuracy = average(rate(deployed, samples=None))["original"]["mean"]
    print(f"{rows} rows, {rows % 32 or 32} in the last batch: accuracy {accuracy:.1f} % on original", flush=True)
