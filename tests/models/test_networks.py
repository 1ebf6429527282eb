"""What networks compute: makers, training, and each one's own laws."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import hypersphere as hs
from hypersphere.layers import DecoupledConv1d, DecoupledConv2d, DecoupledLinear, sphere_conv2d
from hypersphere.models import (
    GCN,
    MLP,
    MODELS,
    Autoencoder,
    Discriminator,
    Generator,
    Level,
    PlainCNN,
    PointNet,
    PointNet2,
    ResidualUnit,
    ResNet,
    SphereFaceNet,
    SphereFaceUnit,
    ball_query,
    farthest_points,
    normalized_adjacency,
    transform_penalty,
)


def small_networks(conv):
    """Networks with the size of their images."""
    return [
        (PlainCNN(3, (4, 4, 6), 8, image_size=8, norm=None, conv=conv), (8, 8)),
        (PlainCNN(4, (4, 6, 6), 8, image_size=32, large_stem=True, conv=conv), (32, 32)),
        (ResNet((1, 2), (4, 6), conv=conv), (8, 8)),
        (ResNet((1, 1), (4, 6), large_stem=True, shortcut="projection", conv=conv), (16, 16)),
        (SphereFaceNet((0, 1), (4, 6), 8, image_size=(9, 7), conv=conv), (9, 7)),
        (Discriminator((4, 6), image_size=8, conv=conv), (8, 8)),
    ]


@pytest.mark.parametrize("magnitude", ["sphere", "tanh", "inner_product"])
def test_one_constructor_gives_the_decoupled_network(magnitude):
    torch.manual_seed(0)
    for model, size in small_networks(partial(DecoupledConv2d, magnitude=magnitude)):
        made = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
        assert all(isinstance(m, DecoupledConv2d) and m.magnitude == hs.magnitude.MAGNITUDES[magnitude]() for m in made)
        model(torch.rand(3, 3, *size)).sum().backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())


def test_inner_product_networks_are_plain_ones():
    torch.manual_seed(1)
    plain = small_networks(nn.Conv2d)[0][0]
    torch.manual_seed(1)
    same = small_networks(partial(DecoupledConv2d, magnitude="inner_product"))[0][0]
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(plain(x), same(x))


def test_a_sphere_network_sees_directions_alone():
    model = PlainCNN(6, (4, 6, 8), 5, image_size=8, norm=None, conv=sphere_conv2d, linear=DecoupledLinear)
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(model(x), model(7 * x))


def test_networks_rotate_and_fold():
    torch.manual_seed(0)
    model = PlainCNN(3, (4, 4, 4), 6, image_size=8, num_classes=3).eval()
    x = torch.rand(2, 3, 8, 8)
    hs.rotation.rotate_(model, "cayley")
    rotated = model(x)
    assert type(model.classifier[-1]) is nn.Linear  # the output layer is left alone
    torch.testing.assert_close(hs.rotation.fold_(model)(x), rotated)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, None])
def test_cnn69_trains_as_a_spherenet_without_shortcuts(norm):
    torch.manual_seed(0)
    model = MODELS["spherenet_cnn69"](
        widths=(8, 8, 8), feature_dim=16, image_size=8, num_classes=2, norm=norm, conv=sphere_conv2d
    )
    assert sum(isinstance(m, DecoupledConv2d) for m in model.modules()) == 69
    x, y = torch.rand(16, 3, 8, 8), torch.arange(16) % 2
    x[y == 1, :, :4] *= 0.2
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.003), []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        assert all(bool(torch.isfinite(g).all()) for g in gradients)
        assert float(gradients[0].abs().max()) > 0  # it reaches the first layer
        optimizer.step()
        losses.append(float(loss.detach()))
    if norm is not None:  # without one, so deep and narrow a network maps all images alike, and can only stay finite
        assert sum(losses[-3:]) / 3 < 0.8 * losses[0]


def test_features_are_what_the_classifier_sees():
    model = PlainCNN(3, (4, 4, 4), 6, image_size=8, num_classes=3)
    x = torch.rand(4, 3, 8, 8)
    model.eval()
    logits = torch.relu(model.features(x)) @ model.classifier[-1].weight.mT
    torch.testing.assert_close(model(x), logits)
    assert (model.features(x) < 0).any()  # nothing is cut off from a feature


def test_parameter_free_shortcuts_take_every_other_pixel_and_append_zeros():
    unit = ResidualUnit(2, 5, stride=2, shortcut="pad", norm=None)
    for parameter in unit.parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(2, 2, 5, 5)
    expected = torch.cat([x[:, :, [0, 2, 4]][..., [0, 2, 4]].clamp(min=0), torch.zeros(2, 3, 3, 3)], 1)
    assert torch.equal(unit(x), expected)
    assert torch.equal(ResidualUnit(2, 2, norm=None, activation=None)(torch.zeros(1, 2, 3, 3)), torch.zeros(1, 2, 3, 3))


def test_sphereface_starts_as_its_authors_and_ends_without_activation():
    torch.manual_seed(0)
    model = SphereFaceNet((1, 2), (16, 32), 8, image_size=(12, 10))
    stds = {
        name: float(m.weight.detach().std())
        for name, m in model.named_modules()
        if isinstance(m, nn.Conv2d) and "resid" in name
    }
    assert len(stds) == 6
    assert all(0.009 < std < 0.011 for std in stds.values())
    assert model(torch.randn(20, 3, 12, 10)).min() < 0
    unit = SphereFaceUnit(3, bias=False, activation=None)
    nn.init.zeros_(unit.residual[1].weight)
    x = torch.randn(1, 3, 4, 4)
    assert torch.equal(unit(x), x)


def test_pointnet_does_not_care_for_order_and_starts_with_identity_transforms():
    torch.manual_seed(0)
    turned, plain = PointNet(transforms=True).eval(), PointNet().eval()
    points = torch.rand(2, 20, 3)
    features, matrices = turned.with_transform(points)
    torch.testing.assert_close(turned(points[:, torch.randperm(20)]), features)
    torch.testing.assert_close(matrices, torch.eye(64).expand(2, 64, 64))
    shared = {k: v for k, v in turned.state_dict().items() if not k.startswith("turn_")}
    names = dict(zip(shared, plain.state_dict(), strict=True))  # dropout moves the numbers of layers
    plain.load_state_dict({names[k]: v for k, v in shared.items()})
    torch.testing.assert_close(plain(points), features)
    assert plain.with_transform(points)[1] is None
    q = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    assert float(transform_penalty(q.unsqueeze(0))) == pytest.approx(0, abs=1e-20)


def test_point_networks_of_spheres():
    torch.manual_seed(0)
    level = Level(6, 0.6, 5, (4, 6))
    nets = [
        PointNet(per_point=(4, 4, 4, 8), hidden=(6, 5), conv=DecoupledConv1d, linear=DecoupledLinear),
        PointNet2((level,), (6, 8), (6, 5), conv=sphere_conv2d, linear=DecoupledLinear),
    ]
    for net in nets:
        net(torch.rand(3, 12, 3)).sum().backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in net.parameters())


def test_grouping_against_brute_force():
    torch.manual_seed(0)
    points = torch.rand(2, 40, 3, dtype=torch.float64)
    chosen, cloud = farthest_points(points, 10), points.numpy()
    for b in range(2):
        expected = [0]
        while len(expected) < 10:
            gaps = ((cloud[b][:, None] - cloud[b][expected]) ** 2).sum(2).min(1)
            expected.append(int(gaps.argmax()))
        assert chosen[b].tolist() == expected
    centres = points[torch.arange(2)[:, None], chosen]
    index = ball_query(points, centres, 0.35, 6)
    for b in range(2):
        for m in range(10):
            near = np.flatnonzero(((cloud[b] - centres[b, m].numpy()) ** 2).sum(1) < 0.35**2)[:6].tolist()
            assert index[b, m].tolist() == near + [near[0]] * (6 - len(near))


def test_pointnet2_pools_over_balls():
    torch.manual_seed(0)
    net = PointNet2((Level(3, 0.5, 8, (4,)),), (5,), (6,), flat_norm=None).eval()
    points = torch.rand(1, 8, 3)
    first, second = (m for m in net.nets.modules() if isinstance(m, nn.Conv2d))
    w1, w2, w3 = first.weight.flatten(1), second.weight.flatten(1), net.tail[0].weight
    scale = (1 + 1e-5) ** -0.5  # a batch norm that has seen nothing
    centres = points[0, farthest_points(points, 3)[0]]
    rows = []
    for centre in centres:
        near = points[0][(points[0] - centre).square().sum(1).sqrt() < 0.5] - centre
        rows.append(torch.cat([centre, torch.relu(near @ w1.mT * scale).amax(0)]))
    pooled = torch.relu(torch.stack(rows) @ w2.mT * scale).amax(0)
    torch.testing.assert_close(net(points)[0], torch.relu(w3 @ pooled))


def test_gcn_is_its_formula_dense_and_sparse():
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 1, 2, 1, 3], [1, 0, 2, 1, 2, 3]])  # one twice, one loop; node 4 is alone
    a = np.zeros((5, 5))
    for i, j in edges.T.tolist():
        a[j, i] = 1
    a += np.eye(5)
    root = np.diag(a.sum(1) ** -0.5)
    expected = root @ a @ root
    dense, sparse = (normalized_adjacency(edges, 5, dense=d) for d in (True, False))
    np.testing.assert_allclose(dense.numpy(), expected, atol=1e-6)
    assert sparse.is_sparse
    model, x = GCN(4, 3, num_classes=2).eval(), torch.rand(5, 4)
    w0, w1 = (w.detach().double().numpy().T for w in (model.hidden.weight, model.classifier.weight))
    z = expected @ np.maximum(expected @ x.double().numpy() @ w0, 0) @ w1
    np.testing.assert_allclose(model(x, dense).detach().numpy(), z, atol=1e-6)
    torch.testing.assert_close(model(x, sparse), model(x, dense))
    model(x, sparse).sum().backward()
    features = GCN(4, 3).eval()(x, sparse)
    assert features.shape == (5, 3)
    GCN(4, 3, linear=DecoupledLinear)(x, sparse).sum().backward()


def test_gcn_takes_a_graph_of_the_data_room():
    mask = torch.zeros(3, 3, dtype=torch.bool).fill_diagonal_(True)
    edges = torch.tensor([[0, 1], [1, 0]])
    graph = hs.data.Graph(torch.rand(3, 4), torch.tensor([0, 1, 0]), edges, *mask, ("a", "b"))
    adjacency = normalized_adjacency(graph.edge_index, len(graph))
    assert GCN(4, num_classes=2)(graph.features, adjacency).shape == (3, 2)


def test_a_discriminator_of_spectrally_normalised_layers():
    def spectral(maker):
        return lambda *words, **more: parametrizations.spectral_norm(maker(*words, **more))

    model = Discriminator((4, 6), image_size=8, conv=spectral(nn.Conv2d), linear=spectral(nn.Linear)).eval()
    assert model(Generator(5, (8, 4))(torch.randn(3, 5))).shape == (3,)
    top = [
        torch.linalg.matrix_norm(m.weight.detach().flatten(1), 2) for m in model.modules() if hasattr(m, "kernel_size")
    ]
    assert all(0.9 < float(value) < 1.1 for value in top)


@torch.no_grad()
def test_codes_of_angles_and_norms_multiply_to_the_code():
    torch.manual_seed(0)
    net = Autoencoder(1, (4, 5)).eval()
    x = torch.rand(2, 1, 8, 12)
    product, angle, norm = (net.encode(x, keep=keep) for keep in ("product", "angle", "norm"))
    torch.testing.assert_close(angle * norm, product)
    assert (angle.abs() <= 1 + 1e-6).all()
    assert (norm >= 0).all()
    for keep in ("angle", "norm"):
        scaled = net.encode(x, keep=keep, rescale=True)
        assert float(scaled.square().mean()) == pytest.approx(float(product.square().mean()), rel=1e-4)
        assert net.decode(scaled).shape == x.shape
    assert torch.equal(net(x), net.decode(product))
    nothing = Autoencoder(1, (4, 5), norm=None).encode(torch.zeros(1, 1, 8, 8), keep="angle", rescale=True)
    assert torch.isfinite(nothing).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PlainCNN(7), "depth must be a multiple of the 3 stages, not 7"),
        (lambda: PlainCNN(9, large_stem=True, image_size=64), "and one more for the large stem"),
        (lambda: PlainCNN((2, 0, 1)), "depth must be 3 numbers >= 1"),
        (lambda: PlainCNN(image_size=4), "image_size must be at least 8"),
        (lambda: PlainCNN(kernel_size=2), "kernel_size must be an odd number"),
        (lambda: PlainCNN(num_classes=1), "num_classes must be None or a number >= 2"),
        (lambda: ResNet((1,), (4, 8)), "depths must be 2 numbers >= 1"),
        (lambda: ResNet((1, 1), (8, 4)), "shortcut must be 'projection' where widths fall"),
        (lambda: ResNet(shortcut="conv"), "shortcut must be 'pad' or 'projection'"),
        (lambda: SphereFaceNet((1,)), "units must be 4 numbers >= 0"),
        (lambda: MLP(widths=()), "widths must be one number or more"),
        (lambda: Autoencoder(widths=(4,)), "widths must be two numbers or more"),
        (lambda: Autoencoder(1, (2, 2)).encode(torch.zeros(1, 1, 4, 4), keep="sign"), "keep must be one of 'product'"),
        (lambda: Discriminator(image_size=20), "image_size must be a multiple of 8"),
        (lambda: farthest_points(torch.zeros(1, 3, 3), 4), "count must be a number from 1 to the 3 points"),
        (lambda: normalized_adjacency(torch.tensor([[0], [5]]), 3), "edge_index must be nodes from 0 to 2"),
        (lambda: normalized_adjacency(torch.zeros(3, 2), 3), r"edge_index must be int64 \(2, E\)"),
    ],
)
def test_bad_arguments_name_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()
