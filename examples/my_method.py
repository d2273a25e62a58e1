"""A method of your own in one file: FedProx (Li et al. 2020, https://arxiv.org/abs/1812.06127), beside FedAvg.

FedProx is FedAvg with one more term in the local loss, mu / 2 * ||w - received||^2, which keeps the client's model near
the one it received.

The run shows how to add a method. One seed and a few rounds do not tell which of the two is better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import fedthe
from fedthe import tree
from fedthe.errors import InputError
from fedthe.methods.base import Batch, Fit, Fitted, Net, Rounds, Shard, Tree


@dataclass(frozen=True)
class FedProx(Rounds):
    mu: float = 0.1  # the weight of the proximal term

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise InputError(f"fedprox: mu must not be negative, but it is {self.mu}.")

    def local(self, fit: Fit, shared: Tree, mine: Tree, shard: Shard) -> Fitted:
        return fit(self.proximal_loss, shared, given=shared)

    def proximal_loss(self, net: Net, params: Tree, given: Tree, batch: Batch) -> Tensor:
        squares = tree.map_leaves(lambda w, received: (w - received).square().sum(), params, given)
        return self.loss(net, params, {}, batch) + self.mu / 2 * sum(tree.flatten(squares).values())


def main() -> None:
    torch.set_num_threads(1)  # batches are small: a second thread gains little
    fedthe.METHODS["fedprox"] = FedProx
    results = fedthe.run(
        name="my_method",
        methods=["fedavg", "fedprox"],
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
