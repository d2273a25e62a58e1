"""One client's round and its deployment, against the same written out."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from fedthe import tree
from fedthe.engine.client import Fits, Received, deploy, pick_loss, work
from fedthe.engine.fit import LoopFit
from fedthe.engine.train import start
from fedthe.methods import compose
from fedthe.methods.apfl import APFL
from fedthe.methods.base import FedAvg, Fitted, Personal, Rounds
from fedthe.methods.ditto import Ditto
from fedthe.methods.fedrep import FedRep
from fedthe.methods.fedrod import FedRoD
from fedthe.methods.two_heads import TwoHeads, mean_feature
from helpers import fails
from trained_methods import NET, SETTINGS, Drifting, make_data

BALANCED = FedAvg(balanced=True)
SHARD = make_data()[0][0]


def make_fits():
    def fit(phase, epochs):
        return LoopFit(NET, SHARD, SETTINGS.optimizer, epochs, 8, True, 1, (0, phase, 3), 0)

    return Fits(fit("personal", 2), fit("local", 1))


def begin(*recipes):
    """Methods, a shared model, and what a client has of each; none as it is before the first round."""
    methods = [compose(NET, recipe) for recipe in recipes]
    begun = [start(method, 1, 0) for method in methods]

    def change(part, seed):
        draw = torch.Generator().manual_seed(seed)
        return tree.map_leaves(lambda leaf: leaf + 0.01 * torch.randn(leaf.shape, generator=draw), part)

    shared = change(begun[0].server.shared, 1)
    return methods, shared, [Received(change(each.averages, 2), change(each.clients[0], 3)) for each in begun]


def assert_same(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_two_heads():
    (method,), shared, (own,) = begin((BALANCED, TwoHeads()))
    done, fits = work([method], make_fits(), shared, [own], SHARD), make_fits()
    head = fits.personal(TwoHeads().loss, own.mine["personal"]["personal"], {"body": shared["body"]})
    feature = mean_feature(NET, shared["body"], SHARD)
    upload = fits.local(BALANCED.loss, shared)
    assert_same(done.upload, upload.params)
    assert_same(done.kept[0], {"personal": {"personal": head.params, "own_descriptor": feature}})
    assert_same(done.averages[0], {"descriptor": feature})
    assert done.loss == upload.losses[-1]
    state, loss = deploy(method, fits.personal, shared, own, SHARD)
    assert_same(state, own.averages | {"personal": head.params, "own_descriptor": feature})
    assert loss == head.losses[-1]


def test_fedrep_trains_the_body_under_the_head_that_it_has_just_trained():
    (method,), shared, (own,) = begin(FedRep())
    done, fits = work([method], make_fits(), shared, [own], SHARD), make_fits()
    head = fits.personal(FedRep().loss, own.mine["personal"], shared)
    body = fits.local(FedRep().loss, shared, head.params)
    assert_same(done.upload, body.params)
    assert_same(done.kept[0], {"personal": head.params})
    assert done.averages == ({},)


def test_what_is_deployed_but_not_kept_is_not_kept():
    """APFL deploys a mixture, under the names of the network; it keeps its own model and alpha."""
    (method,), shared, (own,) = begin(APFL())
    done = work([method], make_fits(), shared, [own], SHARD)
    made = APFL().personalize(make_fits().personal, shared, own.mine["personal"], SHARD).params
    assert_same(done.kept[0]["personal"], {name: made[name] for name in ("personal", "alpha")})
    assert_same(deploy(method, make_fits().personal, shared, own, SHARD)[0], made)


def test_rounds_may_change_what_clients_keep_for_them():
    (method,), shared, (own,) = begin((Drifting(), FedRoD()))
    done = work([method], make_fits(), shared, [own], SHARD)
    local = Drifting().local(make_fits().local, shared, own.mine["rounds"], SHARD)
    made = FedRoD().personalize(make_fits().personal, shared, own.mine["personal"], SHARD)
    assert_same(done.upload, local.params)
    assert_same(done.kept[0], {"rounds": local.mine, "personal": made.params})
    assert not torch.equal(done.kept[0]["rounds"]["drift"]["out"], own.mine["rounds"]["drift"]["out"])


@pytest.mark.parametrize(
    "recipes",
    [
        ((BALANCED, FedRoD()), (BALANCED, TwoHeads()), (BALANCED, TwoHeads(balanced_personal=True)), BALANCED),
        (APFL(), FedAvg(), (FedAvg(), TwoHeads())),
        ((Drifting(), APFL()), Drifting(), (Drifting(), TwoHeads())),
        (Ditto(),),
    ],
)
def test_each_of_several_methods_gets_what_it_gets_alone(recipes):
    methods, shared, received = begin(*recipes)
    drift = {name: part for name, part in received[0].mine.items() if name == "rounds"}  # the same for all of them
    received = [own._replace(mine=own.mine | drift) for own in received]
    assert len({method.core for method in methods}) == 1
    together = work(methods, make_fits(), shared, received, SHARD)
    assert len(together.kept) == len(together.averages) == len(methods)
    for i, (method, own) in enumerate(zip(methods, received, strict=True)):
        alone = work([method], make_fits(), shared, [own], SHARD)
        assert_same(together.upload, alone.upload)
        assert_same(together.kept[i], alone.kept[0])
        assert_same(together.averages[i], alone.averages[0])
        assert together.loss == alone.loss


@dataclass(frozen=True)
class Meddling(Personal):
    """Deploys a leaf under a name that the rounds keep."""

    def keep(self, net, params):
        return {"own": torch.zeros(2)}

    def personalize(self, fit, shared, mine, shard):
        assert mine.keys() == {"own"}  # nor does it see what they keep
        return Fitted({"own": mine["own"] + 1, "drift": {"out": torch.full((3, 64), 100.0)}})


def test_a_personal_part_does_not_change_what_is_kept_for_the_rounds():
    """Else methods with equal cores would not train the same shared model."""
    (method, plain), shared, (own, drifting) = begin((Drifting(), Meddling()), Drifting())
    own = own._replace(mine=own.mine | drifting.mine)
    assert method.core == plain.core
    done = work([method], make_fits(), shared, [own], SHARD)
    alone = work([plain], make_fits(), shared, [drifting], SHARD)
    assert_same(done.upload, alone.upload)
    assert_same(done.kept[0]["rounds"], alone.kept[0]["rounds"])
    assert torch.equal(done.kept[0]["personal"]["own"], own.mine["personal"]["own"] + 1)
    state, _ = deploy(method, make_fits().personal, shared, own, SHARD)
    assert (state["drift"]["out"] == 100).all()


@dataclass(frozen=True)
class Returns(Rounds):
    name: str = "other"

    def local(self, fit, shared, mine, shard):
        return Fitted(shared, mine={self.name: torch.zeros(())})


@pytest.mark.parametrize("name", ["other", "personal"])
def test_local_may_change_only_what_keep_names(name):
    """Nor what another part keeps: methods with equal cores have other personal parts."""
    methods, shared, received = begin((Returns(name), FedRoD()))
    sentence = fails(lambda: work(methods, make_fits(), shared, received, SHARD), repr(name))
    assert sentence == f"Returns.local returned {name!r} for a client to keep, but `keep` does not name it."


# losses


class FixedFit(NamedTuple):
    """Trains nothing, and says these losses."""

    losses: list
    net: object = NET
    lr: float = 0.1

    def __call__(self, loss, params, given=None, *, shard=None, weight_decay=None):
        return Fitted(params, torch.tensor(self.losses))


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("personal", "local", "expected"),
    [
        ([1.0], [3.0, 4.0], 4.0),
        ([], [3.0], 3.0),
        ([1.0], [], 0.0),
        ([], [], 0.0),
        ([1.0], [NAN, 4.0], NAN),
        ([1.0], [3.0, INF], INF),
        ([1.0, -INF, NAN], [INF, 4.0], -INF),
        ([INF], [], INF),
    ],
)
def test_the_loss_is_the_last_local_one_or_the_first_that_is_not_finite(personal, local, expected):
    fits = Fits(FixedFit(personal), FixedFit(local))
    for recipe in ((BALANCED, FedRoD()), Ditto()):
        methods, shared, received = begin(recipe)
        loss = work(methods, fits, shared, received, SHARD).loss
        assert loss.shape == ()
        assert loss == expected or (math.isnan(expected) and loss.isnan())
    _, loss = deploy(methods[0], fits.personal, shared, received[0], SHARD)
    first = next((each for each in personal if not math.isfinite(each)), (personal or [0.0])[-1])
    assert loss == first


@dataclass(frozen=True)
class Says(Personal):
    """Keeps something, and says this loss."""

    value: float = 1.0

    def keep(self, net, params):
        return {"kept": torch.zeros(())}

    def personalize(self, fit, shared, mine, shard):
        return Fitted({}, torch.tensor([1.0, self.value]))


@pytest.mark.parametrize(("values", "expected"), [((2.0, 3.0), 9.0), ((2.0, INF), INF), ((NAN, INF), NAN)])
def test_of_several_methods_the_first_loss_that_is_not_finite_counts(values, expected):
    methods, shared, received = begin(*((FedAvg(), Says(value)) for value in values))
    loss = work(methods, Fits(FixedFit([]), FixedFit([9.0])), shared, received, SHARD).loss
    assert loss == expected or (math.isnan(expected) and loss.isnan())


def test_losses_are_picked_row_by_row_under_vmap():
    before, losses = torch.tensor([1.0, NAN, 1.0]), torch.tensor([[2.0, 3.0], [INF, 3.0], [INF, NAN]])
    picked = torch.vmap(lambda one, some: pick_loss([one], some))(before, losses)
    assert picked[0] == 3
    assert picked[1].isnan()
    assert picked[2] == INF
    none = torch.vmap(lambda one: pick_loss([one], torch.zeros(0)))(before)
    assert none[0] == none[2] == 0
    assert none[1].isnan()


def test_rounds_and_personal_get_their_own_kept_leaves_and_averages():
    """What `personalize` receives: the shared model with the averages, and what the client keeps for it."""
    seen = {}

    @dataclass(frozen=True)
    class Looks(TwoHeads):
        def personalize(self, fit, shared, mine, shard):
            seen["shared"], seen["mine"] = shared, mine
            return Fitted({"personal": mine["personal"], "own_descriptor": mine["own_descriptor"] + 1})

    methods, shared, received = begin((Drifting(), Looks()))
    done = work(methods, make_fits(), shared, received, SHARD)
    assert_same(seen["shared"], shared | received[0].averages)
    mine = received[0].mine["personal"]
    assert_same(seen["mine"], mine)
    assert_same(done.averages[0], {"descriptor": mine["own_descriptor"] + 1})
    assert "descriptor" not in done.upload


@dataclass(frozen=True)
class Clashes(Rounds):
    def keep(self, net, params):
        return {"personal": torch.zeros(())}


def test_leaves_that_two_parts_keep_are_refused():
    fails(lambda: begin((Clashes(), FedRoD())), "two parts of the method use the name 'personal'")


@dataclass(frozen=True)
class Assigns(Personal):
    """Writes into the dicts that it gets, not into their tensors."""

    def keep(self, net, params):
        return {"own": {"bias": torch.zeros(3)}}

    def personalize(self, fit, shared, mine, shard):
        shared["head"]["out"] = shared["head"]["out"] + 1
        mine["own"]["bias"] = mine["own"]["bias"] + 1
        return Fitted({"head": shared["head"]})


def test_a_method_that_assigns_to_a_dict_changes_nobody_elses():
    methods, shared, received = begin((FedAvg(), Assigns()), FedAvg())
    before = tree.map_leaves(torch.clone, shared)
    together = work(methods, make_fits(), shared, received, SHARD)
    alone = work(methods[1:], make_fits(), shared, received[1:], SHARD)
    assert_same(shared, before)
    assert_same(together.upload, alone.upload)
    assert_same(together.kept[0], received[0].mine)  # which `personalize` did not return
    state, _ = deploy(methods[0], make_fits().personal, shared, received[0], SHARD)
    assert_same(state["head"], tree.map_leaves(lambda leaf: leaf + 1, shared["head"]))
    assert_same(shared, before)
