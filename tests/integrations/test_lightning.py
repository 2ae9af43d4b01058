"""A network is trained, measured and replaced by the real Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from run_script import define_operators
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import secateurs
from secateurs.data import load
from secateurs.errors import InvalidInput

define_operators()
L = pytest.importorskip("lightning", reason="Lightning is not installed: make test-integrations")
from secateurs.integrations.lightning import PruneAtEpoch, evaluate_with, finetune_with  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # Lightning warns of missing workers, loggers and checkpoints


def loaders() -> list[Any]:
    digits = load("digits")
    return [DataLoader(TensorDataset(*part.batch(slice(None))), batch_size=128) for part in (digits.train, digits.search)]


class Module(L.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10))
        self.scale = nn.Parameter(torch.ones(()))  # a weight outside the network
        self.rates: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 0:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return nn.functional.cross_entropy(self.scale * self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimiser = torch.optim.SGD(self.parameters(), lr=0.08, momentum=0.9)
        return [optimiser], [torch.optim.lr_scheduler.LambdaLR(optimiser, lambda epoch: 1 / (1 + epoch))]


def trainer(epochs: int = 1, **options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(max_epochs=epochs, accelerator="cpu", **{**quiet, **options})


def test_finetune_trains_the_given_network_and_leaves_the_own_one() -> None:
    module, other = Module(), Module().net
    own, weights = module.net, module.net[1].weight.clone()
    before = other[1].weight.clone()
    finetune_with(trainer, module, loaders()[0])(other)
    assert module.net is own
    assert torch.equal(module.net[1].weight, weights)
    assert not torch.equal(other[1].weight, before)


def test_evaluate_gives_what_the_module_logs() -> None:
    module, other = Module(), Module().net
    val = loaders()[1]
    inputs, labels = val.dataset.tensors
    with torch.no_grad():
        right = float((other(inputs).argmax(1) == labels).float().mean())
    assert evaluate_with(trainer, module, val, monitor="acc")(other) == pytest.approx(right, abs=1e-6)
    assert evaluate_with(trainer, module, val, monitor="acc", mode="min")(other) == pytest.approx(-right, abs=1e-6)
    with pytest.raises(InvalidInput, match="got 'f1', wanted a value logged in validation: acc"):
        evaluate_with(trainer, module, val, monitor="f1")(other)
    with pytest.raises(InvalidInput, match="wanted the attribute that holds the network: net"):
        evaluate_with(trainer, module, val, monitor="acc", network="backbone")(other)


def test_the_callback_prunes_and_the_training_goes_on() -> None:
    torch.manual_seed(0)
    train, val = loaders()
    module = Module()
    sizes: list[int] = []
    buffers: list[Any] = []

    class Watch(L.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            optimiser = trainer.optimizers[0]
            held = {id(weight) for group in optimiser.param_groups for weight in group["params"]}
            assert held == {id(weight) for weight in pl_module.parameters()}
            buffers.append(optimiser.state[pl_module.scale]["momentum_buffer"])
            sizes.append(sum(p.numel() for p in pl_module.net.parameters()))

    pruning = PruneAtEpoch(2, train, val, max_drop=0.1, progress=False)
    trainer(4, callbacks=[pruning, Watch()]).fit(module, train)
    assert pruning.result is not None
    assert sizes[0] == sizes[1] == 64 * 24 + 24 + 24 * 16 + 16 + 16 * 10 + 10
    assert sizes[2] == sizes[3] < sizes[1]
    assert buffers[1] is buffers[2]  # the momentum of a weight outside the network is kept
    assert module.rates == pytest.approx([0.08, 0.08 / 2, 0.08 / 3, 0.08 / 4])  # by epochs, the pruning notwithstanding
    assert module.net is pruning.result.model


def test_a_training_on_several_devices_is_refused() -> None:
    train, val = loaders()
    spread = trainer(1, strategy="ddp", devices=1)  # not fitted: that leaves a process group and its environment behind
    with pytest.raises(InvalidInput, match="got the strategy DDPStrategy, wanted training on one device"):
        PruneAtEpoch(0, train, val, max_drop=0.1).on_fit_start(spread, Module())


def test_a_checkpoint_of_the_smaller_network_is_resumed(tmp_path: Any) -> None:
    train, val = loaders()
    module = Module()
    pruning = PruneAtEpoch(1, train, val, max_drop=0.1, progress=False)
    first = trainer(2, callbacks=[pruning])
    first.fit(module, train)
    first.save_checkpoint(tmp_path / "last.ckpt")
    assert pruning.result is not None
    pruning.result.save(tmp_path / "small.safetensors")

    again = Module()
    again.net = secateurs.load(Module().net, tmp_path / "small.safetensors").module
    second = trainer(3, callbacks=[PruneAtEpoch(1, train, val, max_drop=0.1)])
    second.fit(again, train, ckpt_path=tmp_path / "last.ckpt")
    assert second.current_epoch == 3
    assert again.rates == pytest.approx([0.08 / 3])
