"""`hypersphere adapt`: fine-tune a causal language model by rotation, and write only the rotations."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from hypersphere._validation import require
from hypersphere.cli import options
from hypersphere.cli.output import is_out_of_memory, print_line

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["adapt"]

HELD_OUT = 0.1  # fraction of the text, at its end, on which the loss is measured


def adapt(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder of a causal language model of Hugging Face transformers.")
    ],
    text: Annotated[Path, typer.Option(help="File with the text to train on, in UTF-8.")],
    out: Annotated[Path, typer.Option(help="Folder to write the adapter to.")] = Path("adapter"),
    method: Annotated[str, typer.Option(help="Orthogonal map: cayley, neumann, exponential, householder…")] = "cayley",
    block_size: Annotated[int, typer.Option(min=2, help="Size of the blocks of each rotation.")] = 32,
    factors: Annotated[int, typer.Option(min=1, help="Butterfly factors of each rotation (BOFT).")] = 1,
    side: Annotated[str, typer.Option(help="What linear layers rotate: auto, weight or input.")] = "auto",
    dropout: Annotated[
        float, typer.Option(help="Probability with which a block is replaced by the identity in training.")
    ] = 0.0,
    quantize: Annotated[str | None, typer.Option(help="Format of the frozen weights: int8.")] = None,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="Rotate embeddings, too.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimiser steps.")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 8,
    context: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 128,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of AdamW.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed for all random number generators.")] = 0,
    peft: Annotated[bool, typer.Option("--peft", help="Write the adapter in the format of PEFT.")] = False,
    device: options.Device = None,
    threads: options.Threads = None,
) -> None:
    """Rotate the linear layers of a language model, train the rotations on a text, and write them as an adapter.

    A model without a tokenizer is trained on bytes. Nothing is downloaded.
    """
    import torch

    from hypersphere import rotation
    from hypersphere.training import minimize
    from hypersphere.training.processes import choose_device
    from hypersphere.training.text import NextToken, TextWindows

    torch_device = choose_device(device)
    occupied = out.exists() and (not out.is_dir() or any(out.iterdir()))
    require(not occupied, "--out", "a new or an empty folder", str(out))
    network, tokens = _read(model, text)
    length = min(context, getattr(network.config, "max_position_embeddings", context))
    first_held_out = int(len(tokens) * (1 - HELD_OUT))
    train, test = tokens[:first_held_out], tokens[first_held_out:]
    shortest = 2 * (length + 1)
    require(len(test) >= shortest, "--text", f"a text of at least {round(shortest / HELD_OUT):,} tokens", len(tokens))
    torch.manual_seed(seed)
    rotation.rotate_(
        network,
        method,
        block_size=block_size,
        factors=factors,
        side=cast(Any, side),  # `rotate_` checks the values of side and quantize
        dropout=dropout,
        quantize=cast(Any, quantize),
        embeddings=embeddings,
    )
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    trained = rotation.rotation_parameters(network)
    for parameter in trained:
        parameter.requires_grad_()
    if peft:  # fail before training, not after it, if PEFT cannot represent a layer
        with TemporaryDirectory() as folder:
            rotation.save_adapter(network, folder, format="peft")
    network.to(torch_device)
    objective = NextToken(network)
    before = objective.mean_loss(test.to(torch_device), length, batch)
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    objective.train()
    windows = TextWindows(train.to(torch_device), length, batch, torch.Generator().manual_seed(seed))
    minimize(objective, windows, optimizer=optimizer, scheduler=schedule, steps=steps)
    after = objective.mean_loss(test.to(torch_device), length, batch)
    rotation.save_adapter(network, out, format="peft" if peft else "hypersphere")
    count = sum(parameter.numel() for parameter in trained)
    layers = sum(1 for _ in rotation.rotated_layers(network))
    print_line(f"trained {count:,} parameters of {layers} rotated layers: {out}")
    print_line(f"loss per token of the last {HELD_OUT:.0%} of the text: {before:.4f} before, {after:.4f} after")
    print_line(f"Next: hs.rotation.load_adapter(model, {str(out)!r}), and hs.rotation.merge(model) for inference")


def _read(folder: Path, text: Path) -> tuple[Any, Tensor]:
    """Return the model of a folder, and the tokens of a text."""
    import torch

    try:
        import transformers
    except ImportError as error:
        raise ImportError("adapt needs transformers: pip install transformers") from error
    from safetensors import SafetensorError

    from hypersphere.data import DamagedData

    is_model = (folder / "config.json").is_file()
    require(is_model, "MODEL", "the folder of a model of Hugging Face (with a config.json)", str(folder))
    require(text.is_file(), "--text", "an existing file", str(text))
    content = text.read_bytes()
    transformers.utils.logging.disable_progress_bar()
    # Local files only, as safetensors: nothing is downloaded and nothing is unpickled.
    load: Any = transformers.AutoModelForCausalLM.from_pretrained  # its annotation lacks `output_loading_info`
    try:
        network, loaded = load(folder, local_files_only=True, use_safetensors=True, output_loading_info=True)
    except SafetensorError as error:
        raise DamagedData(f"the weights in {folder} are not readable safetensors files: {error}") from None
    except Exception as error:  # configs and shapes that do not fit raise errors of many kinds
        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]  # the rest lists all models of transformers
        raise ValueError(
            f"MODEL must be the folder of a causal language model, not {str(folder)!r}: {reason}"
        ) from error
    if missing := sorted(loaded["missing_keys"]):  # transformers draws them at random
        raise DamagedData(f"the weights in {folder} are incomplete: {len(missing)} are missing, such as {missing[0]}")
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokens = tokenizer(content.decode("utf-8", errors="replace"), return_tensors="pt").input_ids[0]
    else:
        size = network.config.vocab_size
        accepted = "a model with a tokenizer, or with a vocabulary of at least 256, one per byte"
        require(size >= 256, "MODEL", accepted, str(folder))
        tokens = torch.tensor(list(content))
    return network, tokens.long()
