"""One thread for every test: small tensors gain nothing by more, and results do not depend on the machine's cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
