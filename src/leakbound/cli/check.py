"""What `leakbound check` does: whether the requirements of a policy hold."""

from __future__ import annotations

from leakbound.cli import options
from leakbound.cli.shared import check_files, workers_of, write_files
from leakbound.cli.terminal import brief, console, errors, safe


def check(command: options.CheckOptions) -> int:
    """Exit code 0: all hold; 1: one is broken; 2: none is broken, and one cannot be decided."""
    from leakbound.gate import policy, reports, rules

    if command.log is not None:
        from leakbound import loggers

        loggers.check_installed(command.log)
    stated = policy.read(command.policy)
    workers = workers_of(command.workers)
    places = {form: path for form in reports.FORMS if (path := getattr(command, form)) is not None}
    for form, path in places.items():
        if path.suffix != (ending := reports.FORMS[form][1]):
            raise ValueError(f"{form} is {str(path)!r}; name a file that ends in {ending}")
        check_files(path.parent, [path.name])
    requirements = rules.decide(
        stated,
        workers=workers,
        say=lambda text: errors.say(brief(text)),
    )
    console.say(f"leakbound check: {safe(command.policy)}: {reports.summary(requirements)}")
    order = [*policy.CODES]  # what needs attention first
    for one in sorted(
        requirements,
        key=lambda one: order.index(one.answer),
        reverse=True,
    ):
        words = f"{safe(one.subject)}: {brief(one.stated)}: {brief(one.found)}"
        console.say(f"{one.answer:<11} {words}")
    for form, path in places.items():
        write_files(path.parent, {path.name: reports.FORMS[form][0](requirements)})
    code = policy.CODES[rules.worst([one.answer for one in requirements])]
    if command.log is not None:
        try:
            console.say(f"logged: {command.log} run {loggers.LOGGERS[command.log](requirements)}")
        except (ValueError, OSError) as error:  # a known fault stays one
            errors.say(f"leakbound: {brief(error)}")
            return code or policy.CODES[policy.UNSURE]
    return code
