import pytest
import torch

from hypersphere.models import Autoencoder


@torch.no_grad()
def test_autoencoder_angle_times_norm_is_the_product():
    torch.manual_seed(0)
    model = Autoencoder(1, (4, 5)).eval()
    x = torch.rand(2, 1, 8, 12)
    product, angle, norm = (model.encode(x, keep=keep) for keep in ("product", "angle", "norm"))
    torch.testing.assert_close(angle * norm, product)
    assert (angle.abs() <= 1 + 1e-6).all()
    assert (norm >= 0).all()
    assert torch.equal(model(x), model.decode(product))


@torch.no_grad()
@pytest.mark.parametrize("keep", ["angle", "norm"])
def test_autoencoder_rescaled_codes_have_the_root_mean_square_of_the_product(keep):
    torch.manual_seed(0)
    model = Autoencoder(1, (4, 5)).eval()
    x = torch.rand(2, 1, 8, 12)
    scaled, product = model.encode(x, keep=keep, rescale=True), model.encode(x)
    assert float(scaled.square().mean()) == pytest.approx(float(product.square().mean()), rel=1e-4)
    assert model.decode(scaled).shape == x.shape


def test_autoencoder_rescaled_code_of_a_zero_image_is_finite():
    model = Autoencoder(1, (4, 5), norm=None)
    assert torch.isfinite(model.encode(torch.zeros(1, 1, 8, 8), keep="angle", rescale=True)).all()


def test_autoencoder_rejects_invalid_arguments():
    with pytest.raises(ValueError, match=r"widths must be a sequence of 2 or more integers >= 1, not \(4,\)"):
        Autoencoder(widths=(4,))
    with pytest.raises(ValueError, match="keep must be one of 'product', 'angle', 'norm', not 'sign'"):
        Autoencoder(1, (2, 2)).encode(torch.zeros(1, 1, 4, 4), keep="sign")
