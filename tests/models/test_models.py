"""Networks against the literature: sizes by arithmetic from He et al., names and accuracy of the public weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from nets import assert_same_bits
from secateurs._util.download import home
from secateurs.errors import ArtefactError, DownloadError, InvalidInput
from secateurs.models import (
    PUBLIC_MEAN,
    PUBLIC_STD,
    build,
    example_input,
    load_public,
    load_weights_,
    names,
    public_weights,
    resnet,
    resnet20,
    resnet32,
    resnet56,
    resolve,
)

SMALL = ["densenet-small", "mobilenet-small", "resnext-small", "split-small", "unet-small", "mlp", "cnn1d", "fcn3"]


def macs(model: nn.Module, x: Tensor) -> int:
    """Multiply-adds of convolutions and linear layers, as torch counts them."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(x)
    return counter.get_total_flops() // 2


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def weights_of(model: nn.Module) -> int:
    """Weights of convolutions and linear layers, without biases: what the paper counts."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear))


def resnet_weights(depth: int) -> int:
    """Weights of convolutions and the linear layer, by He et al.'s table: 2n layers of 16, 32, 64 filters, 3×3."""
    n = (depth - 2) // 6
    stage1 = 2 * n * 9 * 16 * 16
    stage2 = 9 * 16 * 32 + (2 * n - 1) * 9 * 32 * 32
    stage3 = 9 * 32 * 64 + (2 * n - 1) * 9 * 64 * 64
    return 9 * 3 * 16 + stage1 + stage2 + stage3 + 64 * 10


# Section 4.2 of He et al. (2015), table 6: parameters in millions.
@pytest.mark.parametrize(("depth", "millions"), [(20, "0.27"), (32, "0.46"), (44, "0.66"), (56, "0.85"), (110, "1.7")])
def test_resnet_sizes_are_those_of_the_literature(depth: int, millions: str) -> None:
    model = build(f"resnet{depth}")
    n = (depth - 2) // 6
    batchnorm = 2 * (16 + 2 * n * (16 + 32 + 64))
    assert weights_of(model) == resnet_weights(depth)
    assert parameters(model) == resnet_weights(depth) + batchnorm + 10
    assert f"{parameters(model) / 1e6:.2g}" == millions


@pytest.mark.parametrize(("constructor", "depth"), [(resnet20, 20), (resnet32, 32), (resnet56, 56)])
def test_constructors_are_named_after_the_depth(constructor: Callable[..., nn.Module], depth: int) -> None:
    assert weights_of(constructor()) == resnet_weights(depth)
    assert constructor(classes=7, in_channels=1, shortcut="B")(torch.zeros(2, 1, 8, 8)).shape == (2, 7)


def test_resnet20_costs_what_the_table_says() -> None:
    # 32×32 pixels for the stem and stage 1, then 16×16 and 8×8; stages 2 and 3 begin with half the channels.
    stem, stage1 = 1024 * 27 * 16, 6 * 1024 * 9 * 16 * 16
    stage2 = 256 * 9 * (16 * 32 + 5 * 32 * 32)
    stage3 = 64 * 9 * (32 * 64 + 5 * 64 * 64)
    assert stem + stage1 + stage2 + stage3 + 640 == 40_551_040
    assert macs(resnet(20), torch.zeros(1, 3, 32, 32)) == 40_551_040
    assert weights_of(resnet(20)) == 268_336


@pytest.mark.parametrize("depth", [8, 14, 20, 110])
def test_depth_counts_the_layers_with_weights(depth: int) -> None:
    convolutions = [module for module in resnet(depth).modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == depth - 1  # and the linear layer


def test_option_a_has_no_weights_and_option_b_two_projections() -> None:
    projections = 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64
    assert parameters(build("resnet20-b")) - parameters(build("resnet20")) == projections
    assert not any("shortcut" in name for name in build("resnet56").state_dict())


def test_resnet_names_are_those_of_the_public_checkpoints() -> None:
    state = [name for name in resnet(20).state_dict() if not name.endswith("num_batches_tracked")]
    assert state[:6] == [
        *("conv1.weight", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"),
        "layer1.0.conv1.weight",
    ]
    assert {"layer2.0.bn1.weight", "layer3.2.conv2.weight", "layer3.2.bn2.running_var", "linear.bias"} <= set(state)
    assert len(state) == 97  # as many as in the checkpoint: 19 convolutions, 19 BatchNorms of 4, weight and bias
    assert {"layer2.0.shortcut.0.weight", "layer3.0.shortcut.1.bias"} <= set(build("resnet20-b").state_dict())


def test_option_a_shortcut_takes_every_second_pixel_between_zero_channels() -> None:
    block = resnet(8).layer2[0].eval()
    nn.init.zeros_(block.bn2.weight)  # silences the residual branch: what is left is the shortcut
    x = np.random.default_rng(0).random((2, 16, 6, 6), dtype=np.float32)
    expected = np.zeros((2, 32, 3, 3), dtype=np.float32)
    expected[:, 8:24] = x[:, :, ::2, ::2]
    np.testing.assert_array_equal(block(torch.from_numpy(x)).detach().numpy(), expected)


def test_option_a_pads_any_widths_to_fit() -> None:
    model = resnet(8, widths=(3, 6, 6), in_channels=1, classes=4)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 4)


OUTPUTS = {"unet-small": (3, 2, 16, 16), "fcn3": (3, 1), "fcn10": (3, 1)}


@pytest.mark.parametrize("name", names())
def test_every_network_traces_and_computes_the_same_traced(name: str) -> None:
    torch.manual_seed(0)
    model, x = build(name).eval(), example_input(name, batch=3)
    with torch.no_grad():
        out = model(x)
        traced = fx.symbolic_trace(model)(x)
    assert out.shape == OUTPUTS.get(name, (3, 10))
    assert out.isfinite().all()
    torch.testing.assert_close(traced, out, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["resnet8", "resnet8-b", *SMALL])
def test_every_weight_takes_part(name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    model(example_input(name, batch=8)).square().sum().backward()
    assert [key for key, weight in model.named_parameters() if weight.grad is None] == []


def test_options_reach_the_constructor() -> None:
    model = build("resnet8", in_channels=1, classes=7, widths=(4, 8, 12))
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 7)
    assert build("mlp", hidden=(5,), outputs=3)(torch.zeros(2, 64)).shape == (2, 3)


def test_example_input_is_reproducible_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, again = example_input("cnn1d", batch=4), example_input("cnn1d", batch=4)
    assert first.shape == (4, 1, 64)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("resnet21"), r"unknown model 'resnet21'\. Did you mean .*'resnet20'"),
        (lambda: example_input("vgg"), r"unknown model 'vgg'\. Did you mean 'vgg16'"),
        (lambda: build("vgg16", widht=8), r"model 'vgg16' has no option 'widht'\. Did you mean 'width'\?"),
        (lambda: build("resnext-small", width=6), "'resnext-small' failed with options {'width': 6}: ValueError"),
        (lambda: resnet(21), r"no CIFAR ResNet has depth 21: wanted 6n \+ 2"),
        (lambda: resnet(2), "no CIFAR ResNet has depth 2"),
        (lambda: build("resnet20", shortcut="C"), "shortcut='C': wanted \"A\""),
        (lambda: resnet(8, widths=(16, 32)), r"widths=\(16, 32\): wanted three positive numbers"),
        (lambda: resnet(8, widths=(16, 8, 8)), "not drop any: got 16 channels in, 8 out"),
        (lambda: resolve(":build"), "wanted package.module:function"),
        (lambda: resolve("torch.nn:"), "wanted package.module:function"),
        (lambda: resolve("no_such_package.networks:build"), "no module 'no_such_package' in .*Run from the folder"),
        (lambda: resolve("torch.nn:Linera"), r"torch\.nn has no 'Linera'\. Did you mean .*'Linear'"),
        (lambda: resolve("math:pi"), "math has a value of type float, not a function, named 'pi'"),
        (lambda: resolve("math:sqrt", x=1), "'math:sqrt' failed with options {'x': 1}: TypeError"),
        (lambda: resolve("builtins:dict"), "model 'builtins:dict' gave a dict: wanted a torch.nn.Module"),
        (lambda: public_weights("resnet21"), "no public weights for 'resnet21'.*'resnet20'"),
    ],
)
def test_bad_names_and_options_are_explained(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(InvalidInput, match=message):
        call()


def test_resolve_takes_built_in_names_and_callables() -> None:
    assert parameters(resolve("fcn3")) == 10
    assert resolve("torch.nn:Linear", in_features=3, out_features=5).weight.shape == (5, 3)


def test_resolve_finds_modules_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from torch import nn\ndef make(width=2):\n    import late_part\n    return nn.Linear(width, late_part.OUT)\n"
    (tmp_path / "nets_of_mine.py").write_text(source)
    (tmp_path / "late_part.py").write_text("OUT = 5\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    model = resolve("nets_of_mine:make", width=3)
    assert isinstance(model, nn.Linear)
    assert model.weight.shape == (5, 3)
    assert sys.path == path


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def make(:", "importing broken_net failed: SyntaxError"),
        ("import not_installed_anywhere", "importing broken_net failed: No module named 'not_installed_anywhere'"),
        ("def make(): raise RuntimeError('no luck')", "failed with options {}: RuntimeError: no luck"),
    ],
)
def test_resolve_says_what_is_wrong_with_a_users_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "broken_net.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    with pytest.raises(InvalidInput, match=re.escape(message)):
        resolve("broken_net:make")
    assert sys.path == path
    sys.modules.pop("broken_net", None)


def randomised(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = resnet(8, widths=(2, 4, 8))
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    return model


def save(state: dict[str, Tensor], path: Path) -> Path:
    safetensors.torch.save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".th"])
def test_weights_load_as_they_were_saved(tmp_path: Path, suffix: str) -> None:
    source, target = randomised(0), randomised(1)
    load_weights_(target, save(source.state_dict(), tmp_path / f"weights{suffix}"))
    assert_same_bits(target.state_dict(), source.state_dict())


def test_wrapped_and_prefixed_weights_without_batch_counters_load(tmp_path: Path) -> None:
    source, target = randomised(0), randomised(1)
    state = {f"module.{k}": v for k, v in source.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save({"state_dict": state, "best_prec1": 91.7}, tmp_path / "weights.th")
    load_weights_(target, tmp_path / "weights.th")
    assert torch.equal(target.layer2[0].bn1.running_var, source.layer2[0].bn1.running_var)


def test_a_module_named_module_keeps_its_name(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.other = nn.Linear(2, 3), nn.Linear(3, 1)

    source, target = Wrapper(), Wrapper()
    load_weights_(target, save(source.state_dict(), tmp_path / "weights.pt"))
    assert torch.equal(target.module.weight, source.module.weight)


def without(key: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: without("bn1.bias", s), r"does not fit the network; missing: bn1\.bias\."),
        (lambda s: s | {"extra.weight": torch.ones(1)}, r"unexpected: extra\.weight\."),
        (
            lambda s: s | {"linear.weight": torch.ones(10, 9)},
            "of another shape: linear.weight is 10×9 in the file, 10×8 in the network",
        ),
        (lambda s: {"a": torch.ones(1)}, "missing: .*, and [0-9]+ more; unexpected: a"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(tmp_path: Path, change: object, message: str, suffix: str) -> None:
    assert callable(change)
    path = save(change(randomised(0).state_dict()), tmp_path / f"weights{suffix}")
    target, before = randomised(1), randomised(1).state_dict()
    with pytest.raises(ArtefactError, match=message):
        load_weights_(target, path)
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_truncated_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = save(randomised(0).state_dict(), tmp_path / f"weights{suffix}")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ArtefactError, match=re.escape(str(path))):
        load_weights_(randomised(1), path)


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    torch.save(randomised(0), tmp_path / "whole_model.pt")
    with pytest.raises(ArtefactError, match="holds more than tensors, which is never unpickled"):
        load_weights_(randomised(1), tmp_path / "whole_model.pt")


def test_other_files_are_named(tmp_path: Path) -> None:
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    (tmp_path / "weights.onnx").write_bytes(b"")
    for name, message in [
        ("list.pt", "holds no state dict"),
        ("weights.onnx", "wanted .safetensors, .th, .pt or .pth, got '.onnx'"),
        ("absent.pt", "the file does not exist"),
    ]:
        with pytest.raises(ArtefactError, match=message):
            load_weights_(randomised(0), tmp_path / name)


def test_damaged_public_weights_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECATEURS_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # discard port: nothing answers, so nothing leaves this machine
    monkeypatch.setenv("no_proxy", "")
    path = tmp_path / "weights" / "resnet20-12fca82f.th"
    path.parent.mkdir()
    path.write_bytes(b"not the weights")
    with pytest.raises(DownloadError, match=f"cannot download https://.*/resnet20-12fca82f.th: .*put it at {path}"):
        load_public(20)


@pytest.mark.realdata
@pytest.mark.parametrize("depth", [20, 32, 56])
def test_public_weights_load_strictly(depth: int) -> None:
    model = load_public(depth)
    assert not model.training
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.realdata
def test_public_resnet20_has_its_accuracy_on_cifar10() -> None:
    # 9,173 of the 10,000 test images, from the binary files: one byte of label, then 3×32×32 of pixels.
    path = home() / "data" / "cifar-10-batches-bin" / "test_batch.bin"
    records = np.fromfile(path, dtype=np.uint8).reshape(10_000, 3073)
    labels = torch.from_numpy(records[:, 0].astype(np.int64))
    pixels = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32)).float() / 255
    images = (pixels - torch.tensor(PUBLIC_MEAN).view(3, 1, 1)) / torch.tensor(PUBLIC_STD).view(3, 1, 1)
    model = load_public(20)
    with torch.inference_mode():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(250), labels.split(250), strict=True))
    assert right / 10_000 == pytest.approx(0.9173, abs=0.00005)
