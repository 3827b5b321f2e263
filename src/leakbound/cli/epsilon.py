"""What `leakbound audit-epsilon` does: a lower bound on the epsilon of running code."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from leakbound import audit as audits
from leakbound import audit_epsilon as epsilons
from leakbound import check, registry
from leakbound._util import copies
from leakbound._util.user_code import find
from leakbound.audit.context import check_outputs
from leakbound.audit.plan import DataSpec
from leakbound.cli import options
from leakbound.cli.shared import Bar, plural
from leakbound.cli.terminal import as_json, brief, console, errors, safe, table
from leakbound.core import Task
from leakbound.randomness import stream
from leakbound.risk.deployment import file


def audit_epsilon(command: options.AuditEpsilon) -> int:
    """Exit code 0: consistent with the claim; 1: it leaks more; 2: cannot tell."""
    check.positive(weight_scale=command.weight_scale)
    check.count(examples=command.examples)
    claims = _claims(command)
    context = audits.PlanContext(DataSpec(source=command.data))
    base = context.batches(command.examples, 1, command.seed)[0]
    if not base.inputs.is_floating_point() and command.model == options.AuditEpsilon.model:
        raise ValueError(f"data is {command.data!r}, which is text; give --model decoder or yours")
    errors.say(f"importing Python code: {brief(command.function)}")
    client = find("function", command.function)
    model = _model(command, context)
    if command.client == "training":
        client = epsilons.of_training(client, model)
    elif command.client == "flower":
        client = epsilons.of_flower(client)
    task = Task.of(
        copies.duplicate(model).eval(),
        loss=context.loss,
        classes=context.dataset.classes,
        domain=context.domain,
    )
    task = check_outputs(context, task, command.model)
    client_and_claims = client, dict(model.state_dict()), base, task, claims
    how: dict[str, Any] = {"confidence": command.confidence, "seed": command.seed}
    with Bar(errors, "runs") as bar:
        if command.one_run:
            audit = epsilons.audit_one_run(*client_and_claims, canaries=command.canaries, **how)
        else:
            audit = epsilons.audit_many_runs(
                *client_and_claims, runs=command.runs, watch=bar, **how
            )
    audit = replace(audit, client=command.function)
    if command.json:
        known = {"verdict": audit.sentence, "code": audit.code, "bounded": claims.bounded}
        print(as_json(asdict(audit) | known))
    else:
        _show(audit, command.model)
    return audit.code


def _claims(command: options.AuditEpsilon) -> epsilons.Claims:
    names = ("delta", "declared", "noise_multiplier", "sampling_rate", "steps")
    said = {name: getattr(command, name) for name in names} | {"rounds": command.rounds}
    if command.deployment is not None:
        deployment, _ = file.read(command.deployment)
        claim = deployment.claim
        local = deployment.local
        stated = (claim.delta, claim.epsilon, deployment.noise.multiplier, local.rate, local.steps)
        for name, value in zip(names, stated, strict=True):  # an option counts more than the file
            # An option at its default counts as not given.
            if value is not None and said[name] == getattr(options.AuditEpsilon, name):
                said[name] = value
        covered = claim.rounds or deployment.rounds or command.rounds
        if (
            said["declared"] == claim.epsilon
            and claim.epsilon is not None
            and command.rounds > covered
        ):
            raise ValueError(
                f"rounds is {command.rounds}, and the claim in {str(command.deployment)!r} covers "
                f"{covered}; give at most as many"
            )
    return epsilons.Claims(**said, replace=command.neighbors == "replace")


def _model(
    command: options.AuditEpsilon,
    context: audits.PlanContext,
) -> nn.Module:
    built: nn.Module = registry.parse(
        "model",
        command.model,
        input_shape=context.input_shape,
        classes=context.loss.outputs(context.dataset.classes),
        generator=stream(command.seed, "model", command.model),
    )
    model = copies.duplicate(built)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(command.weight_scale)
    return model


def _show(audit: epsilons.EpsilonAudit, model: str) -> None:
    rows = table("", right=["epsilon"])
    rows.add_column("from")
    for name, value, source in audit.lines:
        rows.add_row(name, value or "not given", safe(source))
    runs = plural(audit.runs, "run")
    console.print(f"{brief(audit.client)}: {runs} with {brief(model)}")
    console.print(rows)
    console.print(
        f"delta {audit.claims.delta:g}; {audit.confidence:.0%} confidence, all bounds together"
    )
    console.print(f"[bold]{safe(audit.sentence)}[/bold]")
