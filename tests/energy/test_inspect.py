"""Measurements of the neurons of models, state dicts and files."""

import math
import pickle

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

import oracle
from hypersphere.energy import inspect, layer_energies, random_energy


def weights():
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(12, 6, generator=generator)
    w[7] = 2 * w[3]
    w[7, 0] += 0.05
    w[9] = -w[1]
    w[9, 0] += 0.05
    return w


def test_inspect_agrees_with_numpy():
    w = weights()
    (layer,) = inspect({"layer": w}, pairs=2, bins=18).layers
    for power in (0, 1, 2):
        for half_space in (False, True):
            energy = layer.energy(power, "euclidean", half_space)
            exact = oracle.energy(w.numpy(), power, half_space=half_space)
            assert energy.value == pytest.approx(exact, rel=1e-2, abs=1e-5)  # float32 of a near pair
            assert energy.random_mean == random_energy(12, 6, power, "euclidean", half_space)[0]
    assert layer.energy(0, "angular").value == pytest.approx(oracle.energy(w.numpy(), 0, "angular"), rel=1e-3)
    assert layer.energy().excess > 1
    assert (layer.nearest[0].first, layer.nearest[0].second) == (3, 7)
    assert (
        layer.separation == layer.nearest[0].angle == pytest.approx(oracle.angle(*w[[3, 7]].double().numpy()), rel=1e-3)
    )
    assert (layer.most_opposite[0].first, layer.most_opposite[0].second) == (1, 9)
    assert layer.most_opposite[0].angle == pytest.approx(oracle.angle(*w[[1, 9]].double().numpy()), rel=1e-4)
    angles = [oracle.angle(a, b) for i, a in enumerate(w.double().numpy()) for b in w.double().numpy()[:i]]
    assert layer.angle_counts == tuple(np.histogram(angles, 18, (0, math.pi))[0])
    singular = np.linalg.svd(w.double().numpy(), compute_uv=False)
    share = singular / singular.sum()
    assert layer.effective_rank == pytest.approx(math.exp(-(share * np.log(share)).sum()), rel=1e-3)
    assert layer.zero_neurons == 0


def test_inspect_estimates_the_covering_radius_from_below():
    axes = torch.cat([torch.eye(3), -torch.eye(3)])
    (layer,) = inspect({"axes": axes}, probes=20_000).layers
    assert layer.covering_radius == pytest.approx(math.acos(3**-0.5), abs=0.02)
    assert layer.covering_radius <= math.acos(3**-0.5)


def test_inspect_reads_models_state_dicts_and_files_alike(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))
    state = {name: p.detach().clone() for name, p in net.state_dict().items()}
    save_file(state, tmp_path / "net.safetensors")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "net.pt")
    values = [
        [layer.energy().value for layer in inspect(source).layers]
        for source in (net, state, tmp_path / "net.safetensors", str(tmp_path), tmp_path / "net.pt")
    ]
    assert all(value == values[0] for value in values)
    assert [layer.name for layer in inspect(tmp_path / "net.pt").layers][1] == "state_dict.3.weight"


def test_inspect_reads_other_frameworks_and_dtypes():
    kernel = np.random.default_rng(0).normal(size=(3, 3, 4, 8)).astype(np.float32)
    inspection = inspect({"Conv_0": {"kernel": kernel, "bias": np.zeros(8)}, "half": torch.randn(4, 5).half()})
    assert [(layer.name, layer.neurons, layer.length) for layer in inspection.layers] == [
        ("Conv_0.kernel", 8, 36),
        ("half", 4, 5),
    ]
    rows = kernel.reshape(-1, 8).T
    assert inspection.layers[0].energy().value == pytest.approx(oracle.energy(rows, 2), rel=1e-5)


def test_inspect_samples_large_layers_and_lists_defects():
    inspection = inspect(
        {"w": torch.randn(500, 8), "bad": torch.full((3, 3), math.nan), "one": torch.ones(1, 3)}, max_neurons=100
    )
    (layer,) = inspection.layers
    assert (layer.neurons, layer.sampled, sum(layer.angle_counts)) == (500, 100, 4950)
    assert inspection.skipped == ("bad: not finite", "one: only 1 x 3: at least two neurons of two numbers are needed")


def test_inspection_prints_a_table_and_plots(tmp_path):
    inspection = inspect({"first": weights(), "second": torch.randn(5, 2)})
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(inspection)
    text = console.export_text()
    assert "first" in text
    assert "12×6" in text
    assert "no reference" in text
    assert "| second | 5×2 |" in str(inspection)
    pytest.importorskip("altair", reason="altair (extra 'report') is not installed")
    chart = inspection.plot(tmp_path / "angles.png")
    assert (tmp_path / "angles.png").stat().st_size > 5000
    assert [panel["title"]["text"] for panel in chart.to_dict()["concat"]] == ["first", "second"]
    assert "vega" in str(chart._repr_mimebundle_())  # a notebook displays the chart, not a repr


class Evil:
    def __reduce__(self):
        return print, ("opened",)


def test_inspect_does_not_run_pickled_code(tmp_path, capsys):
    torch.save({"w": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"evil.pt cannot be opened as a file of weights, without running code"):
        inspect(tmp_path / "evil.pt")
    assert "opened" not in capsys.readouterr().out
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"model must be a .safetensors file or one of .pt"):
        inspect(tmp_path / "evil.pkl")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({}, "model must have a layer"),
        ("nowhere.safetensors", "model must be a module, a state dict, or the path of a file that exists"),
        (3, "model must be a module, a state dict, or the path"),
    ],
)
def test_inspect_rejects_bad_input(source, words):
    with pytest.raises(ValueError, match=words):
        inspect(source)


@pytest.mark.parametrize("scale", [1e25, 1e-25, 0.0])
def test_inspect_handles_extreme_scales(scale):
    (layer,) = inspect({"w": weights() * scale}).layers
    if scale:
        (one,) = inspect({"w": weights()}).layers
        assert layer.effective_rank == pytest.approx(one.effective_rank, rel=1e-3)
        norms = weights().double().norm(dim=1)
        measured = layer.norms.mean, layer.norms.least, layer.norms.largest
        assert measured == pytest.approx([scale * float(v) for v in (norms.mean(), norms.min(), norms.max())], rel=1e-5)
    else:
        assert (layer.effective_rank, layer.zero_neurons, layer.norms.largest) == (0, 12, 0)
        assert layer.separation == pytest.approx(math.pi / 2)  # zero neurons have no direction


def test_inspect_measures_holes_and_orthogonality():
    axes = torch.cat([torch.eye(3), -torch.eye(3)])
    (layer,) = inspect({"axes": axes}).layers
    assert layer.hole_radius == pytest.approx(math.acos(3**-0.5))
    assert layer.orthogonality_error == pytest.approx((3 / 15) ** 0.5)
    flat = torch.tensor([[1.0, 0], [0, 1], [0.6, 0.8]])
    (layer,) = inspect({"flat": flat}).layers
    assert layer.hole_radius == pytest.approx(math.pi - math.pi / 4)
    cap = torch.nn.functional.normalize(torch.tensor([[0.1, 0, 1], [-0.1, 0, 1], [0, 0.02, 1]]), dim=1)
    (layer,) = inspect({"cap": cap}, probes=50_000).layers
    assert layer.covering_radius <= layer.hole_radius == pytest.approx(layer.covering_radius, abs=0.02)
    assert inspect({"long": torch.randn(4, 5)}).layers[0].hole_radius is None


def test_inspect_lists_what_is_skipped(tmp_path):
    w = torch.randn(4, 3)
    linear = nn.Linear(3, 4)
    optimiser = torch.optim.Adam(linear.parameters())
    linear(w).sum().backward()
    optimiser.step()
    inspection = inspect(
        {
            "w": w,
            "optimizer": optimiser.state_dict(),
            "words": np.array([["a", "b"]]),
            "things": np.array([[None, 1]], dtype=object),
            "thin": w.to_sparse(),
            "nowhere": w.to("meta"),
        }
    )
    assert [layer.name for layer in inspection.layers] == ["w"]
    assert [line.split(":")[0] for line in inspection.skipped] == ["optimizer", "words", "things", "thin", "nowhere"]
    assert inspect(nn.Sequential(linear, nn.Linear(4, 1))).skipped == ("1: one neuron per set",)
    torch.save({"w": w}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert inspect(tmp_path / "old.pt").layers[0].neurons == 4
    save_file({"w": w}, tmp_path / "cut.safetensors")
    for name, content in (
        ("cut.safetensors", (tmp_path / "cut.safetensors").read_bytes()[:-8]),
        ("cut.pt", (tmp_path / "old.pt").read_bytes()[:40]),
        ("empty.pt", b""),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} cannot be opened as a file of weights"):
            inspect(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "is_optimizer"),
    [
        ("optimizer", True),
        ("optimizer_state_dict", True),
        ("optimiser", True),
        ("optim", True),
        ("optim_state", True),
        ("OptimizerG", True),
        ("optimus", False),
        ("optimal_head", False),
        ("my_optimizer", False),
    ],
)
def test_inspect_skips_the_state_of_an_optimizer_by_its_whole_name(name, is_optimizer):
    inspection = inspect({"w": torch.randn(4, 3), name: {"weight": torch.randn(4, 3)}})
    assert [layer.name for layer in inspection.layers] == ["w"] + [f"{name}.weight"] * (not is_optimizer)
    assert inspection.skipped == ((f"{name}: the state of an optimiser",) if is_optimizer else ())


def test_inspect_handles_recursive_dictionaries_and_8_bit_floats(tmp_path):
    w = torch.randn(6, 5)
    endless = {"a": {"weight": w}}
    endless["a"]["again"] = endless
    inspection = inspect(endless)
    assert [layer.name for layer in inspection.layers] == ["a.weight"]
    assert "a.again.: a dictionary that contains itself" in inspection.skipped
    deep = {"weight": w}
    for _ in range(500):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="two finite neurons"):
        inspect(deep)
    small = inspect({"weight": w.to(torch.float8_e4m3fn)}).layers[0]
    assert small.energy().value == pytest.approx(inspect({"w": w}).layers[0].energy().value, rel=0.1)


def test_inspect_reads_the_transposed_weights_of_gpt2_files():
    w = torch.randn(8, 24, generator=torch.Generator().manual_seed(0))  # (in, out)
    inspection = inspect({"h.0.attn.c_attn.weight": w, "h.0.ln.weight": torch.ones(8), "lm_head.weight": w})
    assert [(layer.neurons, layer.length) for layer in inspection.layers] == [(24, 8), (8, 24)]
    assert inspection.layers[0].energy().value == pytest.approx(oracle.energy(w.T.numpy(), 2), rel=1e-5)


@pytest.mark.parametrize(
    ("option", "words"), [({"report": 3}, "report must be a bool"), ({"seed": 0.5}, "seed must be")]
)
def test_inspect_rejects_bad_options(option, words):
    with pytest.raises(ValueError, match=words):
        inspect({"w": torch.randn(5, 4)}, **option)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"power": 3}, "power must be 0, 1 or 2, not 3"),
        ({"distance": "chord"}, "distance must be 'euclidean' or 'angular', not 'chord'"),
        ({"half_space": "yes"}, "half_space must be a bool, not 'yes'"),
    ],
)
def test_energy_of_an_inspected_layer_names_the_invalid_argument(form, words):
    (layer,) = inspect({"w": torch.eye(3)}).layers
    with pytest.raises(ValueError, match=words):
        layer.energy(**form)


@pytest.mark.slow
def test_inspect_and_layer_energies_sample_the_same_rows():
    w = torch.randn(5000, 4)
    (layer,) = inspect({"w": w}).layers
    body = nn.Sequential(nn.Linear(4, 1))
    assert layer.sampled == 2048
    assert layer.energy(2).value == pytest.approx(layer_energies(body, w)["head"], rel=1e-5)


@pytest.mark.parametrize("half_space", [False, True])
def test_inspect_deviation_of_a_sampled_layer_is_the_deviation_of_its_value(half_space):
    generator = torch.Generator().manual_seed(0)
    layers = [
        inspect({"w": torch.randn(60, 6, generator=generator)}, max_neurons=20, probes=1).layers[0] for _ in range(200)
    ]
    energies = [layer.energy(1, half_space=half_space) for layer in layers]
    values = np.array([energy.value for energy in energies])
    # The standard error of a deviation of 200 values is 5 %. All 60 rows would have a third of the deviation.
    assert values.std() == pytest.approx(energies[0].random_deviation, rel=0.2)
    assert values.mean() == pytest.approx(energies[0].random_mean, abs=4 * values.std() / math.sqrt(len(values)))


def test_inspect_accepts_the_old_name_of_max_neurons():
    with pytest.warns(DeprecationWarning, match="the argument most is deprecated, use max_neurons instead"):
        old = inspect({"w": torch.randn(9, 4)}, most=5)
    assert old.layers[0].neurons == 9
