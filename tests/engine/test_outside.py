"""Work that leaves vmap sees all rows, as trees, and its result comes back row by row."""

import pytest
import torch

from fedthe.engine.outside import run_outside


def test_work_outside_sees_all_rows():
    def work(x, y):
        assert x.shape == (3, 2)
        assert y.shape == (3, 2)
        return (x + y.sum(),)

    x, y = torch.arange(6.0).view(3, 2), torch.ones(2)
    assert torch.equal(torch.vmap(lambda row: run_outside(work, row, y)[0])(x), x + 6)
    assert torch.equal(run_outside(lambda x: (2 * x,), y)[0], 2 * y)


def mix(row, state, rest):
    """Of a row number, a nested tree and a list -> nested too; it reads other rows than its own."""
    assert row.shape == state["count"].shape
    total = rest[0].sum(0, keepdim=True).expand_as(rest[0])
    return {"deep": {"sum": state["body"]["w"] + total, "rows": row + 0}, "pair": (state["count"] * 2, [rest[0]])}


def test_trees_go_in_and_out_inside_vmap():
    row, w, count, x = torch.arange(3), torch.rand(3, 4), torch.tensor([5, 6, 7]), torch.rand(3, 4)

    def one(row, w, count, x):
        assert w.shape == (4,)
        made = run_outside(mix, row, {"body": {"w": w}, "count": count, "none": {}}, [x])
        assert made["deep"]["sum"].shape == (4,)
        return made

    made = torch.vmap(one)(row, w, count, x)
    assert torch.equal(made["deep"]["sum"], w + x.sum(0))
    assert torch.equal(made["deep"]["rows"], row)
    assert torch.equal(made["pair"][0], 2 * count)
    assert torch.equal(made["pair"][1][0], x)


def test_trees_go_in_and_out_outside_vmap():
    w, x = torch.rand(4), torch.rand(4)
    made = run_outside(mix, torch.tensor(3), {"body": {"w": w}, "count": torch.tensor(5)}, [x])
    assert torch.equal(made["deep"]["sum"], w + x)
    assert made["deep"]["rows"] == 3
    assert made["pair"][0] == 10
    assert torch.equal(made["pair"][1][0], x)


def test_what_is_the_same_for_all_rows_is_repeated_and_any_axis_may_be_that_of_rows():
    def work(x, y):
        assert x.shape == (3, 2)
        assert y.shape == (3, 5)
        return {"x": x, "y": y}

    x, y = torch.rand(2, 3), torch.rand(5)
    made = torch.vmap(lambda row: run_outside(work, row, y), in_dims=1)(x)
    assert torch.equal(made["x"], x.T)
    assert torch.equal(made["y"], y.expand(3, 5))


def test_an_empty_tree_may_come_back():
    assert torch.vmap(lambda row: (run_outside(lambda x: {}, row), row)[1])(torch.ones(2)).tolist() == [1, 1]
    assert run_outside(lambda x: {"a": {}, "b": x}, torch.ones(2))["a"] == {}


def test_no_gradient_goes_through():
    x = torch.ones(3, 2, requires_grad=True)
    assert not torch.vmap(lambda row: run_outside(lambda x: {"a": 2 * x}, row)["a"])(x).requires_grad
    assert not run_outside(lambda x: {"a": 2 * x}, x)["a"].requires_grad


def test_an_error_of_the_work_comes_out():
    def work(x):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        torch.vmap(lambda row: run_outside(work, row))(torch.ones(2))
