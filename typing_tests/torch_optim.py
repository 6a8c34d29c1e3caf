"""How the optimizers look to a type checker; checked by mypy, never run."""

from typing import Any

import torch

import lossscale.torch as ls
from lossscale.diagnostics import UpdateStatistics
from lossscale.torch import optim

model = torch.nn.Linear(2, 1)
params = model.parameters()

adamw: torch.optim.AdamW = optim.AdamW(params)
adamw = optim.AdamW(
    model.named_parameters(),
    1e-3,
    (0.9, 0.99),
    1e-8,
    0.1,
    True,
    maximize=True,
    foreach=None,
    capturable=False,
    fused=True,
    master_weights=True,
    moments_dtype=torch.bfloat16,
    write_back=True,
)
adam: torch.optim.Adam = optim.Adam(params, torch.tensor(0.1), master_weights=True)
own = optim.SGD([{"params": [model.weight], "lr": 0.1}], momentum=0.9, nesterov=True)
sgd: torch.optim.SGD = own
any_of_them: torch.optim.Optimizer = own

masters: list[torch.Tensor] = list(own.master_parameters())
exported: dict[str, Any] = own.float32_state_dict(model)
own.load_float32_state_dict(model, exported)
own.reset_masters()
own.copy_settings()
own.load_state_dict(own.state_dict())
own.step()
loss: Any = own.step(lambda: 1.0)
own.measure_next_update()
update: UpdateStatistics | None = own.last_update
own.last_update = None  # type: ignore[misc]
torch.optim.lr_scheduler.ExponentialLR(own, 0.9).step()

conversion = ls.to_float16(model, keep_float32=["head", torch.nn.Embedding])
kept: tuple[str, ...] = conversion.kept
reasons: dict[str, str] = conversion.reasons
ls.to_float16(model, keep_normalisation=False)
ls.to_float16(model, keep_float32=[torch.Tensor])  # type: ignore[list-item]
ls.to_float32(model)

optim.SGD(params, moments_dtype=torch.bfloat16)  # type: ignore[call-arg]
optim.AdamW(params, master_weights="yes")  # type: ignore[arg-type]
