"""Bundles of small trained methods, for the tests of deployment."""

from functools import cache

import numpy as np

from fedthe.deploy.bundle import Bundle, take_input
from fedthe.deploy.card import write_card
from fedthe.deploy.export import finish_bundle
from fedthe.engine.train import deploy
from fedthe.methods import METHODS
from fedthe.methods.compose import compose
from trained_methods import SETTINGS, make_data, make_federation, net_for, trained


@cache
def make_method(name):
    return compose(net_for(name), METHODS[name])


@cache
def make_model(name, client=0):
    """What a client deploys."""
    method = make_method(name)
    return deploy(method, make_data()[0], SETTINGS, 0, trained(method))[client]


@cache
def make_bundle(name, client=0):
    pool = make_federation().pool
    about = {"dataset": "made", "rounds": 2, "fedthe": "0", "torch": "0"}
    begun = Bundle(
        "client", name, make_method(name), pool.classes, take_input(pool.x, None), 0, client, parts={}, about=about
    )
    return finish_bundle(begun, make_model(name, client), make_data()[0][client])


def make_card(name):
    return write_card(make_bundle(name))


def stack_probabilities(predictions):
    return np.stack([each.probabilities for each in predictions])
