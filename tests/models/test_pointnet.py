import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from hypersphere.layers import DecoupledConv1d, DecoupledLinear, sphere_conv2d
from hypersphere.models import Level, PointNet, PointNet2, ball_query, farthest_points, transform_penalty


def test_pointnet_is_invariant_to_the_order_of_points():
    torch.manual_seed(0)
    model = PointNet(transforms=True).eval()
    points = torch.rand(2, 20, 3)
    torch.testing.assert_close(model(points[:, torch.randperm(20)]), model(points))


def test_pointnet_transforms_start_as_the_identity():
    torch.manual_seed(0)
    with_transforms, plain = PointNet(transforms=True).eval(), PointNet().eval()
    points = torch.rand(2, 20, 3)
    features, matrices = with_transforms.with_transform(points)
    torch.testing.assert_close(matrices, torch.eye(64).expand(2, 64, 64))
    state = {name: value for name, value in with_transforms.state_dict().items() if "transform" not in name}
    # Dropout between fully connected layers shifts their positions in the sequence.
    names = dict(zip(state, plain.state_dict(), strict=True))
    plain.load_state_dict({names[name]: value for name, value in state.items()})
    torch.testing.assert_close(plain(points), features)
    assert plain.with_transform(points)[1] is None


def small_pointnet(transforms: bool = True) -> PointNet:
    torch.manual_seed(0)
    model = PointNet(transforms=transforms, per_point=(4, 5, 8), hidden=(6, 5))
    if transforms:
        nn.init.normal_(model.feature_transform.matrix.weight, std=0.3)  # away from the identity
    return model


def test_pointnet_penalty_is_that_of_the_last_training_batch():
    model = small_pointnet().double()
    points = torch.rand(3, 10, 3, dtype=torch.float64)
    matrices = model.with_transform(points)[1].detach().numpy()
    model(points)
    expected = sum(np.linalg.norm(np.eye(5) - a @ a.T) ** 2 for a in matrices) / 2
    assert expected > 1e-3
    assert model.penalty().item() == pytest.approx(expected, rel=1e-9)
    model.eval()(points[:1])  # evaluation does not change it
    assert model.penalty().item() == pytest.approx(expected, rel=1e-9)


def test_pointnet_penalty_trains_the_feature_transform():
    model = small_pointnet()
    points = torch.rand(4, 10, 3)
    optimizer, values = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(30):
        model(points)
        penalty = model.penalty()
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()
        values.append(penalty.item())
    assert values[-1] < 0.2 * values[0]


def test_pointnet_penalty_is_zero_without_transforms_and_an_error_before_a_forward_pass():
    assert small_pointnet(transforms=False).penalty().item() == 0
    with pytest.raises(RuntimeError, match="call the model on points first"):
        small_pointnet().penalty()


def test_pointnet_can_be_copied_and_pickled_after_a_forward_pass():
    model = small_pointnet()
    points = torch.rand(4, 10, 3)
    model(points)
    model.eval()
    expected = model(points)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(points), expected)
    assert model.penalty() is not None  # copying does not clear the original


def test_transform_penalty_is_zero_for_orthogonal_matrices():
    q = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    assert float(transform_penalty(q.unsqueeze(0))) == pytest.approx(0, abs=1e-20)


def test_point_networks_accept_decoupled_layers():
    torch.manual_seed(0)
    level = Level(6, 0.6, 5, (4, 6))
    networks = [
        PointNet(per_point=(4, 4, 4, 8), hidden=(6, 5), conv=DecoupledConv1d, linear=DecoupledLinear),
        PointNet2((level,), (6, 8), (6, 5), conv=sphere_conv2d, linear=DecoupledLinear),
    ]
    for network in networks:
        network(torch.rand(3, 12, 3)).sum().backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in network.parameters())


def test_farthest_points_match_brute_force():
    torch.manual_seed(0)
    points = torch.rand(2, 40, 3, dtype=torch.float64)
    chosen, clouds = farthest_points(points, 10), points.numpy()
    for cloud, indices in zip(clouds, chosen.tolist(), strict=True):
        expected = [0]
        while len(expected) < 10:
            distances = ((cloud[:, None] - cloud[expected]) ** 2).sum(2).min(1)
            expected.append(int(distances.argmax()))
        assert indices == expected


def test_ball_query_matches_brute_force():
    torch.manual_seed(0)
    points = torch.rand(2, 40, 3, dtype=torch.float64)
    centres = points[:, ::4]
    index = ball_query(points, centres, 0.35, 6)
    for b in range(2):
        for m in range(10):
            distances = ((points[b].numpy() - centres[b, m].numpy()) ** 2).sum(1)
            near = np.flatnonzero(distances < 0.35**2)[:6].tolist()
            assert index[b, m].tolist() == near + [near[0]] * (6 - len(near))


def test_farthest_points_rejects_more_points_than_there_are():
    with pytest.raises(ValueError, match=r"count must be in 1\.\.3, the number of points, not 4"):
        farthest_points(torch.zeros(1, 3, 3), 4)


def test_pointnet2_accepts_the_old_name_of_group_all_widths():
    levels = (Level(3, 0.5, 8, (4,)),)
    with pytest.warns(DeprecationWarning, match="argument whole is deprecated, use group_all_widths") as caught:
        model = PointNet2(levels, whole=(5,), hidden=(6,))
    assert caught[0].filename == __file__  # the warning names the line of the caller
    assert [mlp[0].out_channels for mlp in model.point_mlps] == [4, 5]
    with pytest.warns(DeprecationWarning, match="whole"), pytest.raises(TypeError, match="given twice"):
        PointNet2(levels, whole=(5,), group_all_widths=(5,))


def test_pointnet2_matches_a_direct_computation():
    torch.manual_seed(0)
    network = PointNet2((Level(3, 0.5, 8, (4,)),), (5,), (6,), flat_norm=None).eval()
    points = torch.rand(1, 8, 3)
    first, second = (m for m in network.point_mlps.modules() if isinstance(m, nn.Conv2d))
    w1, w2, w3 = first.weight.flatten(1), second.weight.flatten(1), network.global_mlp[0].weight
    scale = (1 + 1e-5) ** -0.5  # batch normalisation with its initial statistics
    rows = []
    for centre in points[0, farthest_points(points, 3)[0]]:
        offsets = points[0][(points[0] - centre).square().sum(1).sqrt() < 0.5] - centre
        rows.append(torch.cat([centre, torch.relu(offsets @ w1.mT * scale).amax(0)]))
    pooled = torch.relu(torch.stack(rows) @ w2.mT * scale).amax(0)
    torch.testing.assert_close(network(points)[0], torch.relu(w3 @ pooled))
