"""The presets against the oracle, peers and identities."""

import inspect
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hypersphere as hs
import oracle
from hypersphere.heads import PRESETS
from hypersphere.heads._class_storage import LocalClasses

from .samples import angles, problem


def test_softmax_is_linear_layer_and_cross_entropy():
    x, y = problem(batch=7)
    head = hs.heads.softmax(5, 4, bias=True).double()
    torch.nn.init.normal_(head.bias)
    torch.testing.assert_close(head(x, y), F.cross_entropy(F.linear(x, head.weight, head.bias), y), rtol=1e-12, atol=0)


def test_sphereface_plus_adds_the_energy_of_the_batch():
    x, y = problem()
    plain, plus = hs.heads.a_softmax(5, 4).double(), hs.heads.sphereface_plus(5, 4, energy_weight=0.7).double()
    plus.load_state_dict(plain.state_dict())
    w = plain.weight.detach().numpy()
    unit = w / np.linalg.norm(w, axis=1, keepdims=True)
    pairs = [np.linalg.norm(unit[label] - unit[j]) ** -2 for label in y.tolist() for j in range(4) if j != label]
    expected = plain(x, y).item() + 0.7 * sum(pairs) / (len(y) * 3)
    assert plus(x, y).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("normalization", ["none", "hard", "soft"])
@pytest.mark.parametrize("version", [1, 2])
def test_sphereface_r_equals_the_oracle(version, normalization):
    x, y = problem()
    head = hs.heads.sphereface_r(5, 4, m=1.7, version=version, s=12.0, normalization=normalization).double()
    theta, m = angles(x, head.weight), 1.7
    response = np.cos(theta / m) if version == 2 else np.cos(theta)
    for i, label in enumerate(y.tolist()):
        t = theta[i, label]
        response[i, label] = math.cos(t) if version == 2 else math.cos(min(m * t, math.pi))
    norms = x.norm(dim=1, keepdim=True).numpy()
    scores = response * (12.0 if normalization == "hard" else norms)
    expected = oracle.cross_entropy(scores, y.tolist())
    if normalization == "soft":
        expected += 0.01 * np.abs(norms - 12.0).mean()
    assert head(x, y).item() == pytest.approx(expected, rel=1e-10)
    plain = np.cos(theta) * (12.0 if normalization == "hard" else norms)
    np.testing.assert_allclose(head.scores(x).detach().numpy(), plain, rtol=1e-9, atol=1e-9)


def test_adaface_updates_and_saves_its_statistics():
    x, y = problem()
    head = hs.heads.adaface(5, 4, s=10.0).double()
    norms = x.norm(dim=1)
    head(x, y)
    assert head.norm_mean.item() == pytest.approx(0.99 * 20 + 0.01 * norms.mean().item(), rel=1e-6)
    assert head.norm_std.item() == pytest.approx(0.99 * 100 + 0.01 * norms.std().item(), rel=1e-6)
    head.eval()
    q = (0.333 * (norms - head.norm_mean) / head.norm_std).clamp(-1, 1).tolist()
    theta = angles(x, head.weight)
    scores = 10 * np.cos(theta)
    for i, label in enumerate(y.tolist()):
        scores[i, label] = 10 * (math.cos(theta[i, label] - 0.4 * q[i]) - 0.4 * (1 + q[i]))
    assert head(x, y).item() == pytest.approx(oracle.cross_entropy(scores, y.tolist()), rel=1e-10)
    assert {"norm_mean", "norm_std"} <= set(head.state_dict())
    quick = hs.heads.AngularHead(5, 4, radius=10.0, margin=hs.margin.NormAdaptive(momentum=1.0)).double()
    quick(x, y)
    assert quick.norm_mean.item() == pytest.approx(norms.mean().item(), rel=1e-6)


def test_adaface_needs_two_samples_to_update_its_statistics():
    x, y = problem(batch=7)
    head = hs.heads.adaface(5, 4).double()
    head(x, y.index_fill(0, torch.arange(1, 7), -100))
    assert (head.norm_mean.item(), head.norm_std.item()) == (20, 100)


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        ("am_softmax", "CosFaceLoss", {"margin": 0.35, "scale": 30}),
        ("arcface", "ArcFaceLoss", {"margin": math.degrees(0.5), "scale": 30}),
    ],
)
def test_presets_equal_pytorch_metric_learning(ours, theirs, options):
    losses = pytest.importorskip("pytorch_metric_learning.losses", reason="the extra 'compare' is not installed")
    x, y = problem(batch=20)
    head = hs.heads.PRESETS[ours](5, 4, s=30.0).double()
    peer = getattr(losses, theirs)(num_classes=4, embedding_size=5, **options).double()
    with torch.no_grad():
        peer.W.copy_(head.weight.T)
    near = hs.sphere.angle(hs.sphere.cosine(x, head.weight[y])) < math.pi - 0.5  # beyond, ArcFace's fall-backs differ
    assert head(x[near], y[near]).item() == pytest.approx(peer(x[near], y[near]).item(), rel=1e-6)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "sphereface2"])
def test_presets_accept_the_options_of_a_loss(name):
    x, y = problem(batch=7)
    y = y.index_fill(0, torch.tensor([1]), -1)
    options = {"label_smoothing": 0.1, "ignore_index": -1, "class_weights": torch.tensor([0.5, 1.0, 2.0, 1.0])}
    head = PRESETS[name](5, 4, **options).double().eval()
    expected = F.cross_entropy(
        head.logits(x, y), y, weight=options["class_weights"].double(), label_smoothing=0.1, ignore_index=-1
    )
    loss = head(x, y)
    if head.energy_weight:
        loss = loss - head.energy_weight * hs.energy.data_dependent_energy(head.weight, y[y >= 0])
    if name == "magface":
        a = x[y >= 0].norm(dim=1).clamp(10, 110)
        loss = loss - (35 * (1 / a + a / 110**2)).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)


def test_presets_have_distinct_reprs():
    assert len({repr(make(5, 4)) for make in PRESETS.values()}) == len(PRESETS) - 1  # w_softmax(cosine) is the modified
    assert repr(hs.heads.modified_softmax(5, 4)) == repr(hs.heads.w_softmax(5, 4))
    assert "energy_weight=1.0" in repr(hs.heads.sphereface_plus(5, 4))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("CosFace", "am_softmax"),
        ("SphereFace", "a_softmax"),
        ("ArcFace", "arcface"),
        ("arcfce", "arcface"),
        ("AngluarHead", "AngularHead"),
    ],
)
def test_heads_suggest_the_nearest_name(name, nearest):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'; did you mean {nearest}\\?"):
        getattr(hs.heads, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'hat'$"):
        hs.heads.hat  # noqa: B018


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("arcface", {"margin": 0.5}, "arcface has no option 'margin'; did you mean m? Options: s, m, annealing, "),
        ("arcface", {"scale": 64}, "arcface has no option 'scale'; did you mean s? "),
        ("arcface", {"label_smooth": 0.1}, "arcface has no option 'label_smooth'; did you mean label_smoothing? "),
        ("arcface", {"sub_centres": 3}, "arcface has no option 'sub_centres'; did you mean centers? "),
        ("arcface", {"warm_up": 9}, "arcface has no option 'warm_up'; did you mean ramp? "),
        ("softmax", {"temperature": 2}, "softmax has no option 'temperature'. Options: bias, annealing, ramp, "),
        ("sphereface2", {"radius": 64}, "sphereface2 has no option 'radius'; did you mean s? Options: s, m, t, "),
    ],
)
def test_presets_suggest_the_nearest_option(name, options, message):
    with pytest.raises(TypeError) as caught:
        PRESETS[name](5, 4, **options)
    assert str(caught.value).startswith(message)


def test_presets_leave_other_errors_of_arguments_unchanged():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'num_classes'"):
        hs.heads.arcface(5)


@pytest.mark.parametrize("name", [name for name, make in PRESETS.items() if "s" in inspect.signature(make).parameters])
def test_presets_name_an_invalid_s(name):
    with pytest.raises(ValueError, match=r"^s must be a positive number, not 0$"):
        PRESETS[name](5, 4, s=0)


@pytest.mark.parametrize("normalization", ["none", "hard", "soft"])
def test_sphereface_r_names_an_invalid_s(normalization):
    with pytest.raises(ValueError, match=r"^s must be a positive number, not -1$"):
        hs.heads.sphereface_r(5, 4, s=-1, normalization=normalization)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("am_softmax", {"m": 30}, r"m must be a number in \[0, 2\], because cosines differ by at most 2, not 30"),
        ("am_softmax", {"m": torch.tensor([0.1, 3.0, 0.2, 0.3])}, r"m must be a number in \[0, 2\], .*, not 3\.0"),
        ("combined_margin", {"m3": 2.5}, r"m3 must be a number in \[0, 2\], .*, not 2\.5"),
        ("sphereface2", {"m": 1.5}, r"m must be a number in \[0, 1\] for variant 'C', .*, not 1\.5"),
    ],
)
def test_presets_refuse_cosine_margins_that_cannot_be_met(name, options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        PRESETS[name](5, 4, **options)
    assert hs.heads.am_softmax(5, 4, m=2).margin.m == 2


def test_names_of_the_literature_are_presets():
    assert repr(hs.heads.aam_softmax(4, 3)) == repr(hs.heads.arcface(4, 3))
    for name, preset in hs.heads.PRESET_ALIASES.items():
        assert getattr(hs.heads, name) is hs.heads.PRESETS[preset]
    assert repr(hs.heads.cosface(4, 3)) == repr(hs.heads.am_softmax(4, 3))
    assert repr(hs.heads.sphereface(4, 3)) == repr(hs.heads.a_softmax(4, 3))


def test_sphereface_plus_adds_the_energy_after_its_first_steps():
    x, y = problem()
    plain = hs.heads.a_softmax(5, 4).double()
    plus = hs.heads.sphereface_plus(5, 4, energy_weight=0.7, energy_start=2).double()
    plus.load_state_dict({**plain.state_dict(), "steps": torch.tensor(0)})
    losses = [plus(x, y).item() for _ in range(4)]
    without = plain(x, y).item()
    energy = 0.7 * hs.energy.data_dependent_energy(plain.weight, y).item()
    assert losses == pytest.approx([without, without, without + energy, without + energy], rel=1e-12)
    with pytest.raises(ValueError, match="energy_start must be an integer >= 0, not -1"):
        hs.heads.sphereface_plus(5, 4, energy_start=-1)


def test_sphereface_plus_does_not_compute_the_energy_before_its_start():
    x, y = problem()
    head = hs.heads.sphereface_plus(5, 4, energy_start=2).double()
    needed = []

    class RecordingClasses(LocalClasses):
        def terms(self, inputs, rule):
            needed.append(rule.needs_energy)
            return super().terms(inputs, rule)

    head.class_storage = RecordingClasses()
    for _ in range(4):
        head(x, y)
    assert needed == [False, False, True, True]
