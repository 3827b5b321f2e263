"""What `leakbound train-prior` does."""

from __future__ import annotations

from contextlib import suppress

from leakbound._util import files
from leakbound.attacks import save_prior, train_prior
from leakbound.attacks.pace import Pace, ended_by_interrupt
from leakbound.attacks.prior.denoiser import Denoiser
from leakbound.attacks.prior.files import digest
from leakbound.audit.context import PlanContext, one_thread
from leakbound.audit.plan import DataSpec
from leakbound.cli import options
from leakbound.cli.shared import Bar
from leakbound.cli.terminal import brief, console


def train(command: options.TrainPrior) -> int:
    if command.out.suffix != ".safetensors":
        raise ValueError(f"out is {str(command.out)!r}; give a name that ends in .safetensors")
    # Before minutes of training.
    with files.writing(command.out):
        files.check(command.out)
    schema = None if command.schema is None else str(command.schema)
    context = PlanContext(
        DataSpec(
            command.data,
            size=command.size,
            channels=command.channels,
            schema=schema,
        )
    )
    public = context.dataset.batch(context.splits["public"]) if context.public else None
    if public is None:
        raise ValueError(f"data is {command.data!r}, which has too few examples for a public part")
    console.say(f"learning from {public.size} public examples of {brief(command.data)}")
    reached = 0
    model = list[Denoiser]()
    pace = Pace()

    def watch(step: int, loss: float) -> bool:
        nonlocal reached
        reached = step
        bar(step, command.steps, f"loss {loss:.3f}")
        return pace.over

    classes = context.dataset.classes
    stopped = suppress(KeyboardInterrupt)
    with Bar(console, "steps") as bar, one_thread(), stopped, pace, ended_by_interrupt(pace):
        model.append(
            train_prior(
                public,
                classes=classes,
                steps=command.steps,
                width=command.width,
                seed=command.seed,
                watch=watch,
            )
        )
    if not model:
        raise KeyboardInterrupt
    about = {
        "data": command.data,
        "domain": context.domain.name,
        "public_sha256": digest(public),
        "examples": public.size,
        "steps": command.steps,
        "steps_done": reached,
        "seed": command.seed,
    }
    with files.writing(command.out):
        if command.out.parent != command.out:
            files.folder(command.out.parent)
        save_prior(command.out, model[0], about)
    early = f", stopped after {reached} of {command.steps} steps" if reached < command.steps else ""
    console.say(f"prior: {brief(command.out)}{early}")
    return 0
