"""Prune the network of a LightningModule on handwritten digits: after a training, and in the middle of one.

Run it as `python examples/integrations/lightning_digits.py`; it takes half a minute on one core.
"""

import logging
import warnings

import lightning as L
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import secateurs as sc
from secateurs.data import load
from secateurs.integrations.lightning import PruneAtEpoch, evaluate_with, finetune_with

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

digits = load("digits")
train, val, test = (
    DataLoader(TensorDataset(*part.batch(slice(None))), batch_size=64) for part in (digits.train, digits.search, digits.test)
)


class Classifier(L.LightningModule):
    """A small convolutional network and its training."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, 10)),
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        return functional.cross_entropy(self.net(inputs), labels)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """Log the accuracy on a batch."""
        inputs, labels = batch
        self.log("val_acc", (self.net(inputs).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> dict[str, object]:
        """SGD whose learning rate falls to zero at the last epoch."""
        optimiser = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        epochs = self.trainer.max_epochs
        return {"optimizer": optimiser, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)}


def trainer(epochs: int = 1, **options: object) -> L.Trainer:
    """A new Trainer that writes nothing."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(max_epochs=epochs, accelerator="cpu", **quiet, **options)


print("# After a training: the Trainer fine-tunes and measures")
L.seed_everything(0, verbose=False)
module = Classifier()
trainer(6).fit(module, train)
result = sc.prune(
    module.net,
    train,
    val,
    max_drop=0.02,
    finetune=finetune_with(lambda: trainer(2, limit_val_batches=0), module, train),
    evaluate=evaluate_with(trainer, module, val, monitor="val_acc"),
    progress=False,
)
module.net = result.model  # the module now trains, validates and saves the smaller network
print(result)
accuracy = trainer().validate(module, test, verbose=False)[0]["val_acc"]
print(f"Test accuracy {100 * accuracy:.1f} %.")

print("# In the middle of a training: the callback prunes before epoch 4 of 8")
L.seed_everything(1, verbose=False)
module = Classifier()
pruning = PruneAtEpoch(4, train, val, max_drop=0.02, progress=False)
trainer(8, callbacks=[pruning]).fit(module, train)
accuracy = trainer().validate(module, test, verbose=False)[0]["val_acc"]
print(f"{100 * pruning.result.macs.removed:.1f} % of the MACs are removed; test accuracy {100 * accuracy:.1f} %.")
