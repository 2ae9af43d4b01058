"""Table 3: methods compared on CIFAR-10 ResNets."""
