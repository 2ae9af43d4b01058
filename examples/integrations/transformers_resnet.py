"""Prune an image classifier of Hugging Face transformers on handwritten digits, fine-tuned and measured by its Trainer.

Run it as `python examples/integrations/transformers_resnet.py`; it downloads nothing and takes half a minute on one core.
"""

import tempfile

import numpy as np
from torch import nn
from transformers import (
    EvalPrediction,
    PrinterCallback,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

import secateurs as sc
from secateurs.data import load
from secateurs.integrations.transformers import WithLoss, evaluate_with, finetune_with

digits = load("digits")
train_set, val_set, test_set = (
    [{"pixel_values": image, "labels": label} for image, label in zip(*part.batch(slice(None)), strict=True)]
    for part in (digits.train, digits.search, digits.test)
)
folder = tempfile.mkdtemp()


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The metric that the Trainer computes."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(1) == prediction.label_ids))}


def trainer(model: nn.Module, epochs: float = 1) -> Trainer:
    """A new Trainer of a model, quiet and without checkpoints."""
    arguments = TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=256,
        learning_rate=5e-3,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    made = Trainer(model, arguments, train_dataset=train_set, eval_dataset=val_set, compute_metrics=accuracy)
    made.remove_callback(PrinterCallback)
    return made


set_seed(0)
config = ResNetConfig(
    num_channels=1, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10
)
model = ResNetForImageClassification(config)
start = trainer(model, 8)
start.train()

result = sc.prune(
    model,
    start.get_train_dataloader(),
    start.get_eval_dataloader(),
    max_drop=0.02,
    finetune=finetune_with(lambda network: trainer(network, 2)),
    evaluate=evaluate_with(trainer, monitor="eval_accuracy"),
    progress=False,
)
print(result)
metrics = trainer(WithLoss(result.model)).evaluate(test_set)
print(f"Test accuracy {100 * metrics['eval_accuracy']:.1f} %.")
result.save(f"{folder}/small.safetensors")
