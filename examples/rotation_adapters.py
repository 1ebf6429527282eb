"""Fine-tune a language model by rotation in six kinds of loops. Each writes an adapter that loads into the base model.

Needs transformers; some functions need accelerate or lightning. The model is small and has random weights.
"""

import tempfile

import torch
import transformers
from torch import nn

import hypersphere as hs


def base_model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def rotated_model() -> nn.Module:
    """Return the model with everything frozen except block rotations of its linear layers."""
    model = base_model().requires_grad_(False)
    hs.rotation.rotate_(model, block_size=8)
    for parameter in hs.rotation.rotation_parameters(model):
        parameter.requires_grad_()
    return model


def batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(64, (count, 4, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": one, "labels": one} for one in tokens]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Weight decay would pull rotations towards the identity.
    return torch.optim.AdamW(hs.rotation.rotation_parameters(model), lr=1e-2, weight_decay=0.0)


def fit(model: nn.Module, called: nn.Module | None = None) -> None:
    """Train the rotations of a model by an ordinary loop, and call `called` in its place if it is given."""
    optimizer = optimizer_of(model)
    for batch in batches():
        (model if called is None else called)(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def with_trainer(folder: str) -> nn.Module:
    """Train with `Trainer` of transformers. Its own checkpoints would call `save_pretrained`, so they are off."""
    model = rotated_model()
    rows = [{"input_ids": row, "labels": row} for batch in batches() for row in batch["input_ids"]]
    settings = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=3,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    transformers.Trainer(model, settings, train_dataset=rows).train()
    hs.rotation.save_adapter(model, folder)
    return model


def with_accelerate(folder: str) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)  # remove cpu=True to use accelerators
    model = rotated_model()
    wrapped, optimizer = accelerator.prepare(model, optimizer_of(model))
    for batch in batches():
        accelerator.backward(wrapped(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    model = accelerator.unwrap_model(wrapped)
    hs.rotation.save_adapter(model, folder)
    return model


def with_lightning(folder: str) -> nn.Module:
    import lightning

    class FineTuning(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = rotated_model()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    module = FineTuning()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    hs.rotation.save_adapter(module.model, folder)
    return module.model


def with_compile(folder: str, backend: str = "inductor") -> nn.Module:
    model = rotated_model()
    fit(model, torch.compile(model, backend=backend))
    hs.rotation.save_adapter(model, folder)
    return model


def with_checkpointing(folder: str) -> nn.Module:
    model = rotated_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    fit(model)
    hs.rotation.save_adapter(model, folder)
    return model


def with_fsdp(folder: str) -> nn.Module | None:
    """Train in every process of a group (torchrun). The first process writes the adapter and returns the model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = rotated_model()
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    fit(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if torch.distributed.get_rank() != 0:
        return None
    model = rotated_model()  # the parameters above are distributed over the processes
    model.load_state_dict(state)
    hs.rotation.save_adapter(model, folder)
    return model


@torch.no_grad()
def largest_difference(trained: nn.Module, folder: str) -> float:
    """Return how much the outputs differ between the trained model and the base model with the saved adapter."""
    loaded = hs.rotation.load_adapter(base_model(), folder).eval()
    tokens = batches()[0]["input_ids"]
    return float((trained.eval()(tokens).logits - loaded(tokens).logits).abs().max())


if __name__ == "__main__":
    for function in (with_trainer, with_accelerate, with_lightning, with_compile, with_checkpointing):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{function.__name__}: difference {largest_difference(function(folder), folder):.0e}")
