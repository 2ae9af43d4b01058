"""Networks of the paper and of its ancestors, and a small one of every topology that makes surgery hard, by their names."""

from functools import partial

from secateurs.models import NamedNetwork
from secateurs_lab.models.lenet import LeNet5, MaxPlusNet, lenet300
from secateurs_lab.models.mlp import MLP
from secateurs_lab.models.topologies import FCN, CNN1d, SmallDenseNet, SmallMobileNet, SmallResNeXt, SmallSplitNet, SmallUNet
from secateurs_lab.models.vgg import VGG16

_CIFAR, _SMALL, _MNIST = (3, 32, 32), (3, 16, 16), (1, 28, 28)

fcn3_network = NamedNetwork(partial(FCN, hidden=3), (2,))
fcn10_network = NamedNetwork(partial(FCN, hidden=10), (2,))
vgg16_network = NamedNetwork(VGG16, _CIFAR)
lenet300_network = NamedNetwork(lenet300, _MNIST)
lenet5_network = NamedNetwork(LeNet5, _MNIST)
maxplus_network = NamedNetwork(MaxPlusNet, _MNIST)
densenet_small = NamedNetwork(SmallDenseNet, _SMALL)
mobilenet_small = NamedNetwork(SmallMobileNet, _SMALL)
resnext_small = NamedNetwork(SmallResNeXt, _SMALL)
split_small = NamedNetwork(SmallSplitNet, _SMALL)
unet_small = NamedNetwork(SmallUNet, _SMALL)
mlp_network = NamedNetwork(MLP, (1, 8, 8))
cnn1d_network = NamedNetwork(CNN1d, (1, 64))
