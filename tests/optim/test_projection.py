"""Weight projection and weighted gradients against the formulas of the thesis."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hypersphere.heads import ShardedHead, arcface, softmax
from hypersphere.layers import DecoupledConv2d, DecoupledLinear
from hypersphere.optim.projection import WeightedGradients, project_weights_


def network(**more):
    torch.manual_seed(0)
    return nn.Sequential(DecoupledConv2d(2, 4, 3, **more), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3))


def test_project_weights_keeps_outputs_and_sets_norms():
    model, x = network(magnitude="tanh"), torch.randn(2, 2, 3, 3)
    before, plain = model(x), model[3].weight.detach().clone()
    directions = nn.functional.normalize(model[0].weight.detach().flatten(1))
    project_weights_(model, norm=2.5)
    torch.testing.assert_close(model[0].weight.detach().flatten(1), 2.5 * directions)
    torch.testing.assert_close(model(x), before, atol=1e-6, rtol=1e-5)
    assert torch.equal(model[3].weight, plain)
    assert model[0].weight.requires_grad
    with torch.no_grad():
        model[0].weight[1] = 0
    project_weights_(model)
    assert model[0].weight[1].abs().max() == 0


def test_project_weights_keeps_class_vectors_of_a_head_at_norm_one_over_training():
    torch.manual_seed(0)
    x, y = torch.randn(32, 8), torch.randint(10, (32,))
    heads = {projected: arcface(8, 10, s=16.0) for projected in (True, False)}
    for projected, head in heads.items():
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
        for _ in range(300):
            optimizer.zero_grad()
            head(x, y).backward()
            optimizer.step()
            if projected:
                project_weights_(head)
    norms = {projected: head.weight.detach().norm(dim=1) for projected, head in heads.items()}
    torch.testing.assert_close(norms[True], torch.ones(10))
    assert norms[False].mean() > 1.1  # without projection the norms grow


def test_project_weights_leaves_scores_of_heads_unchanged_and_skips_heads_that_keep_norms():
    x = torch.randn(4, 8)
    unit, plain = arcface(8, 5), softmax(8, 5)
    model = nn.ModuleList([ShardedHead(unit), plain])
    before, weight = unit.scores(x), plain.weight.detach().clone()
    project_weights_(model)
    torch.testing.assert_close(model[0].weight.norm(dim=1), torch.ones(5))
    torch.testing.assert_close(model[0].scores(x), before)
    assert torch.equal(plain.weight, weight)
    with pytest.raises(ValueError, match="or heads with unit class vectors, but there is none"):
        project_weights_(plain)


def test_weighted_gradients_do_not_depend_on_the_norm():
    x = torch.randn(5, 4, dtype=torch.float64)
    updates = []
    for size in (1.0, 7.0):
        layer = DecoupledLinear(4, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(size * torch.tensor([[0.5, -0.5, 0.5, 0.5]]))
        with WeightedGradients(layer):
            layer(x).sum().backward()
            layer(x).sum().backward()  # accumulates
        updates.append(layer.weight.grad / 2)
        layer.weight.grad = None
        layer(x).sum().backward()
        torch.testing.assert_close(layer.weight.grad * size, updates[-1])
    w_hat, x_hat = torch.tensor([0.5, -0.5, 0.5, 0.5], dtype=torch.float64), nn.functional.normalize(x)
    expected = (x_hat - (x_hat @ w_hat)[:, None] * w_hat).sum(0, keepdim=True)  # (4.18)
    torch.testing.assert_close(updates[0], expected)
    torch.testing.assert_close(updates[1], expected)


@pytest.mark.parametrize("tool", [project_weights_, WeightedGradients])
def test_norm_control_rejects_layers_that_depend_on_norms(tool):
    for weighted in ({"magnitude": "ball", "weighting": "linear"}, {"magnitude": "inner_product"}):
        model = nn.Sequential(DecoupledLinear(2, 2), network(**weighted))
        before = model[0].weight.detach().clone()
        with pytest.raises(ValueError, match=r"operators that do not depend on ‖w‖, but '1\.0' does"):
            tool(model)
        assert torch.equal(model[0].weight, before)
    with pytest.raises(ValueError, match="must have decoupled operators"):
        tool(nn.Linear(2, 2))
    layer = DecoupledLinear(3, 3)
    nn.utils.parametrizations.orthogonal(layer)
    with pytest.raises(ValueError, match="is parametrised"):
        tool(layer)
    with pytest.raises(ValueError, match="norm must be a positive number"):
        project_weights_(network(), norm=0)


def test_weighted_gradients_survive_a_deep_copy_and_end_together():
    model, x = network(), torch.randn(2, 2, 3, 3)
    with torch.no_grad():
        model[0].weight.mul_(3)
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    norms = plain[0].weight.detach().flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    expected = norms * plain[0].weight.grad
    weighted = WeightedGradients(model)
    twin = copy.deepcopy(model)
    for module in (model, twin):
        module(x).square().sum().backward()
        torch.testing.assert_close(module[0].weight.grad, expected)
        module.zero_grad()
    with pytest.raises(ValueError, match="a model whose gradients are not weighted yet"):
        WeightedGradients(model)
    weighted.remove()
    for module in (model, twin):
        module(x).square().sum().backward()
        torch.testing.assert_close(module[0].weight.grad, plain[0].weight.grad)
    with WeightedGradients(model):
        model.zero_grad()
        model(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, expected)


def test_weighted_gradients_compile_in_one_graph():
    layer, x = DecoupledLinear(5, 3), torch.randn(4, 5)
    with WeightedGradients(layer):
        layer(x).square().sum().backward()
        expected, layer.weight.grad = layer.weight.grad, None
        torch.compile(layer, backend="aot_eager")(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected)


def test_update_angle_is_constant_under_projection_and_falls_with_the_norm_otherwise():
    """A plain step turns w by an angle proportional to 1/‖w‖², a weighted one by 1/‖w‖ (thesis, section C.7)."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rate, sizes = 1e-3, (1.0, 2.0, 4.0, 8.0)

    def update_angle(size, tool):
        torch.manual_seed(0)
        layer = DecoupledLinear(6, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.mul_(size / layer.weight.norm())
        if tool == "projection":
            project_weights_(layer)
        before = layer.weight.detach().clone()
        handle = WeightedGradients(layer) if tool == "weighted" else None
        layer(x).sum().backward()
        if handle is not None:
            handle.remove()
        after = before - rate * layer.weight.grad
        cross = after - (after @ before.mT) / before.square().sum() * before
        return torch.atan2(cross.norm(), (after @ before.mT).squeeze() / before.norm()).item()

    plain, weighted, projected = (
        [update_angle(size, tool) for size in sizes] for tool in ("plain", "weighted", "projection")
    )
    assert [plain[0] / angle for angle in plain] == pytest.approx([size**2 for size in sizes], rel=1e-3)
    assert [weighted[0] / angle for angle in weighted] == pytest.approx(sizes, rel=1e-3)
    assert projected == pytest.approx([projected[0]] * len(sizes), rel=1e-9)


def test_project_weights_reports_what_it_changed(capsys):
    project_weights_(network(), report=True)
    report = capsys.readouterr().out
    assert report.startswith("1 layer:\n  0  hidden ")
    assert report.endswith("1 skipped:\n  3: its output depends on ‖w‖\n")


def test_project_weights_includes_a_head_distributed_over_processes(monkeypatch, capsys):
    model = nn.ModuleList([nn.Linear(4, 8), ShardedHead(arcface(8, 5))])
    monkeypatch.setattr(type(model[1].processes), "size", property(lambda processes: 2))
    project_weights_(model, norm=3.0, report=True)
    torch.testing.assert_close(model[1].weight.norm(dim=1), torch.full((5,), 3.0))
    report = capsys.readouterr().out
    assert report.startswith("1 layer:\n  1.head  output ")
    assert report.endswith("1 skipped:\n  0: its output depends on ‖w‖\n")


def test_decoupled_layers_declare_parameters_without_decay():
    assert DecoupledLinear(2, 2).decay_free_parameters == ("weight",)
    assert DecoupledLinear(2, 2, magnitude="ball", weighting="linear").decay_free_parameters == ()
    assert DecoupledLinear(2, 2, magnitude=lambda w, x: x).decay_free_parameters == ()
    layer = DecoupledLinear(2, 2, magnitude="tanh", angular="sigmoid", learn_k="layer", learn_radius="layer")
    assert layer.decay_free_parameters == ("weight", "log_k", "log_radius")


def test_weighted_gradients_skip_frozen_weights_and_apply_once():
    model = nn.Sequential(DecoupledLinear(3, 4), DecoupledLinear(4, 2))
    model[1].weight.requires_grad_(False)
    weighted = WeightedGradients(model)
    with pytest.raises(ValueError, match="not weighted yet"):
        WeightedGradients(model)
    weighted.remove()
    WeightedGradients(model).remove()


def test_weighted_gradients_can_be_applied_to_a_copy_after_removal():
    layer = DecoupledLinear(5, 3)
    with WeightedGradients(layer):
        clone = copy.deepcopy(layer)
    x = torch.randn(2, 5)
    clone(x).sum().backward()
    plain, clone.weight.grad = clone.weight.grad, None
    with WeightedGradients(clone):
        clone(x).sum().backward()
    torch.testing.assert_close(clone.weight.grad, plain * clone.weight.detach().norm(dim=1, keepdim=True))


@pytest.mark.parametrize("norm", [0.5, 2.0, 8.0])
def test_angle_of_an_update_depends_on_the_norm_unless_weights_are_projected(norm):
    """Thesis, section C.7: the angle by which an update of a fixed size turns a weight depends on its norm."""
    torch.manual_seed(0)
    x = torch.randn(7, 4, dtype=torch.float64)

    def turned(project, size, rate=1e-4):
        layer = DecoupledLinear(4, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(size * torch.tensor([[0.5, -0.5, 0.5, 0.5]]))
        if project:
            project_weights_(layer)
        before = layer.weight.detach().clone()
        with WeightedGradients(layer) if not project else nullcontext():
            layer(x).sum().backward()
        with torch.no_grad():
            layer.weight -= rate * layer.weight.grad
        return torch.atan2((layer.weight.detach() - before).norm(), before.norm()).item()

    assert turned(True, norm) == pytest.approx(turned(True, 1.0), rel=1e-6)
    assert turned(False, norm) == pytest.approx(turned(False, 1.0) / norm, rel=1e-3)


def test_removed_weighting_leaves_no_hooks():
    layer = DecoupledLinear(5, 3)
    for _ in range(3):
        with WeightedGradients(layer):
            layer(torch.randn(2, 5)).sum().backward()
    assert not layer.weight._backward_hooks
    assert not layer._forward_pre_hooks
