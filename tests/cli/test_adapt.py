import json
import shutil

import pytest
import torch

import hypersphere as hs

transformers = pytest.importorskip("transformers")

TEXT = "the unit sphere is where directions live. rotations keep its points apart. " * 60


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A small GPT-2 with a vocabulary of bytes, as a folder of Hugging Face."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.mark.filterwarnings("error:the adapter does not store")  # all else is frozen
def test_adapt_trains_rotations_that_load_into_the_model(model_folder, text, tmp_path, succeeds):
    words = ["--text", text, "--out", tmp_path / "adapter", "--block-size", "4", "--steps", "30", "--lr", "0.01"]
    out = succeeds("adapt", model_folder, *words)
    before, after = (float(part.split()[0]) for part in out.split("text: ")[1].split(", ")[:2])
    assert after < before
    model = transformers.GPT2LMHeadModel.from_pretrained(model_folder).eval()
    tokens = torch.tensor(list(TEXT.encode()))
    test = tokens[int(len(tokens) * 0.9) :]
    objective = hs.training.text.NextToken(model)
    assert objective.mean_loss(test, 32, 8) == pytest.approx(before, abs=1e-4)
    hs.rotation.load_adapter(model, tmp_path / "adapter")
    assert objective.mean_loss(test, 32, 8) == pytest.approx(after, abs=1e-4)


def test_adapt_has_the_options_of_rotate(model_folder, text, tmp_path, succeeds, fails):
    words = ["--text", text, "--out", tmp_path / "adapter", "--block-size", "4", "--steps", "2"]
    options = ["--side", "input", "--dropout", "0.1", "--quantize", "int8", "--embeddings"]
    out = succeeds("adapt", model_folder, *words, *options)
    after = float(out.split("before, ")[1].split()[0])
    model = transformers.GPT2LMHeadModel.from_pretrained(model_folder).eval()
    hs.rotation.load_adapter(model, tmp_path / "adapter")
    rotations = {name: rotation for name, _, rotation in hs.rotation.rotated_layers(model)}
    assert "transformer.wpe" in rotations
    assert {(one.side, one.dropout, one.layout.block_size) for one in rotations.values()} == {("input", 0.1, 4)}
    tokens = torch.tensor(list(TEXT.encode()))
    test = tokens[int(len(tokens) * 0.9) :]
    assert hs.training.text.NextToken(model).mean_loss(test, 32, 8) == pytest.approx(after, abs=1e-4)
    words[3] = tmp_path / "other"
    assert "side must be 'auto', 'weight' or 'input'" in fails(2, "adapt", model_folder, *words, "--side", "left")


def diverge(*_, **__):
    raise FloatingPointError("the loss became nan")


def test_adapt_writes_the_format_of_peft(text, tmp_path, fails, succeeds, monkeypatch):
    peft = pytest.importorskip("peft")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=32, **sizes)
    model_folder = tmp_path / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(model_folder)
    words = ["--text", text, "--out", tmp_path / "adapter", "--block-size", "4", "--steps", "5", "--peft"]
    with monkeypatch.context() as patch:
        patch.setattr(hs.training.loop, "minimize", diverge)
        fails(1, "adapt", model_folder, *words)
    assert not (tmp_path / "adapter").exists()  # so that the command can be repeated
    succeeds("adapt", model_folder, *words)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "OFT"
    base = transformers.LlamaForCausalLM.from_pretrained(model_folder).eval()
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ours = transformers.LlamaForCausalLM.from_pretrained(model_folder).eval()
    hs.rotation.load_adapter(ours, tmp_path / "adapter")
    tokens = torch.randint(256, (2, 9))
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_adapt_names_invalid_arguments(model_folder, text, tmp_path, fails):
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    for words, message in (
        ((tmp_path, "--text", text), "MODEL must be the folder of a model of Hugging Face"),
        ((model_folder, "--text", tmp_path / "none.txt"), "--text must be an existing file"),
        ((model_folder, "--text", tmp_path / "short.txt"), "--text must be a text of at least 660 tokens, not 5"),
        ((model_folder, "--text", text, "--out", tmp_path / "used"), "--out must be a new or an empty folder"),
        ((model_folder, "--text", text, "--device", "toaster"), "device 'toaster' cannot be used"),
        ((model_folder, "--text", text, "--block-size", "3"), "block_size must be a divisor of 16"),
        (
            (model_folder, "--text", text, "--block-size", "4", "--peft"),
            "must be a linear layer inside the model for PEFT",
        ),
    ):
        assert message in fails(2, "adapt", *words)


@pytest.mark.slow
def test_adapt_refuses_weights_that_are_damaged_or_do_not_fit(model_folder, text, tmp_path, command):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    out = tmp_path / "adapter"

    def refusal():
        code, printed, errors = command("adapt", folder, "--text", text, "--out", out, "--steps", "1")
        assert (printed, out.exists()) == ("", False)
        return code, errors

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_layer": 2}))
    code, errors = refusal()
    assert code == 3
    assert f"the weights in {folder} are incomplete: 12 are missing, such as transformer.h.1.attn" in errors
    (folder / "config.json").write_text(json.dumps({**config, "n_embd": 32}))
    code, errors = refusal()
    assert (code, "MODEL must be the folder of a causal language model" in errors) == (2, True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    code, errors = refusal()
    assert (code, f"the weights in {folder} are not readable safetensors files" in errors) == (3, True)


def test_adapt_names_the_folder_of_a_model_that_does_not_fit(text, tmp_path, fails):
    for content in ('{"model_type": "vit"}', "{"):
        (tmp_path / "config.json").write_text(content)
        line = fails(2, "adapt", tmp_path, "--text", text, "--out", tmp_path / "adapter")
        assert line.startswith(
            f"hypersphere: MODEL must be the folder of a causal language model, not {str(tmp_path)!r}: "
        )
        assert len(line) < 400
