"""A method of your own in one file: MOON (Li et al. 2021, https://arxiv.org/abs/2103.16257), beside FedAvg.

MOON is FedAvg with one more term in the local loss: a sample's features should be more like those of the received model
than like those of the model that the client trained last. So a client keeps the body that it trained last.

The run shows how to add a method. One seed and a few rounds do not tell which of the two is better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import fedthe
from fedthe.errors import InputError
from fedthe.methods.base import Batch, Fit, Fitted, Net, Rounds, Shard, Tree
from fedthe.methods.losses import cross_entropy


@dataclass(frozen=True)
class Moon(Rounds):
    mu: float = 1.0  # the weight of the contrast
    temperature: float = 0.5

    def __post_init__(self) -> None:
        if self.mu < 0 or self.temperature <= 0:
            raise InputError("moon: mu must not be negative, and temperature must be positive.")

    def keep(self, net: Net, params: Tree) -> Tree:
        return {"previous": params["body"]}

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        given = {"received": shared["body"], "previous": mine["previous"]}
        trained, losses, _ = fit(self.contrastive_loss, shared, given)
        return Fitted(trained, losses, {"previous": trained["body"]})

    def contrastive_loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        z = net.features(params["body"], batch.x)
        others = [net.features(given[name], batch.x) for name in ("received", "previous")]
        alike = torch.stack([torch.cosine_similarity(z, other, dim=-1) for other in others], -1) / self.temperature
        contrast = cross_entropy(alike, torch.zeros_like(batch.y))  # the received model is the right one of the two
        return self.loss(net, params, {}, batch) + self.mu * contrast


def main() -> None:
    torch.set_num_threads(1)  # batches are small: a second thread gains little
    fedthe.METHODS["moon"] = Moon
    results = fedthe.run(
        name="my_method",
        methods=["fedavg", "moon"],
        dataset="glyphs",
        size=20,
        clients=4,
        rounds=8,
        local_epochs=1,
        # the training settings of `fedthe demo`
        batch=16,
        flip=False,
        crop=2,
        lr=0.1,
        momentum=0.5,
        samples=200,
    )
    table = results.table()
    print(f"{'accuracy (%)':16}" + "".join(f"{test:>16}" for test in results.tests))
    for method in results.methods:
        print(f"{method:16}" + "".join(f"{table[method][test]:16.1f}" for test in results.tests))
    print(f"{results.seconds:.0f} s; everything is in {results.folder}")


if __name__ == "__main__":
    main()
