"""What makes an audit start fast: its processes import neither PyTorch's compiler, nor sympy, nor
SciPy's distributions.
"""

import subprocess
import sys

import pytest
import torch

from leakbound._util import optimizers
from leakbound._util.modules import unfilled

AUDIT = """
import sys
from leakbound import audit
plan = audit.parse({
    "data": {"source": "digits"},
    "models": [{"name": "mlp", "hidden": [8]}],
    "attacks": [{"name": "inverting_gradients", "steps": 2}, {"name": "idlg", "steps": 1}],
    "defenses": [{"name": "none"}, {"name": "dp_sgd", "noise_multiplier": 5.0}],
    "risk": {"probability": 0.05},
    "utility": {"rounds": 1, "repeats": 1},
})
found = [result.record for result in audit.run(plan)]
assert [one.status for one in found] == ["ok"] * 6, [one.reason for one in found]
assert any(bound.on_error for one in found[2:] for bound in getattr(one, "bounds", ()))
print(sorted({"torch._dynamo", "sympy", "scipy.stats"} & set(sys.modules)))
"""


def test_an_audit_imports_no_compiler():
    run = subprocess.run(
        [sys.executable, "-c", AUDIT], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Adam", {"lr": 0.1, "fused": True}),
        ("AdamW", {"lr": 0.1, "weight_decay": 0.5}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("LBFGS", {"line_search_fn": "strong_wolfe"}),
    ],
)
def test_optimizers_take_pytorchs_steps(name, settings):
    ends = []
    for module in (torch.optim, optimizers):
        x = torch.linspace(-1, 2, 5).requires_grad_()
        rule = getattr(module, name)([x], **settings)

        def closure(rule=rule, x=x):
            rule.zero_grad()
            loss = (x**4 - x).sum()
            loss.backward()
            return loss

        for _ in range(3):
            rule.step(closure)
        ends.append(x.detach())
    assert torch.equal(*ends)


def test_an_unfilled_module_has_memory_and_draws_nothing():
    before = torch.get_rng_state()
    module = unfilled(lambda: torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)))
    assert torch.equal(torch.get_rng_state(), before)
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"cpu"}
    assert module[1].num_batches_tracked.dtype == torch.long
    assert all(isinstance(p, torch.nn.Parameter) for p in module.parameters())
