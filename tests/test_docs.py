"""Code in the documentation runs, plans and commands in it parse, links in it lead somewhere."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from tools import stored

from leakbound import cli, registry
from leakbound.audit import parse
from leakbound.cli.options import AttackOptions
from leakbound.data import sources
from leakbound.gate import policy
from leakbound.risk import deployment

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "reproductions" / "README.md",
    *sorted((ROOT / "examples").glob("*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELLS = ("", "sh", "bash", "console")
SHOWN = ("diff", "text")
"""What is shown and not run: a change, or a piece of something larger."""


GUIDES = ("add_an_attack", "add_a_defense", "add_a_domain", "add_a_framework")
"""Pages whose blocks build on each other: tests/test_guides.py runs them."""


def blocks(language):
    for page in PAGES:
        if language == "python" and page.stem in GUIDES:
            continue
        for number, (indent, name, code) in enumerate(FENCE.findall(page.read_text("utf-8"))):
            if name == language:
                text = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
                yield pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")


def command_lines(text):
    """The commands of leakbound in a block: without prompts, comments and settings before them."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words and words[0] == "leakbound":
            yield words[1:]


def commands():
    for language in SHELLS:
        for block in blocks(language):
            for number, words in enumerate(command_lines(block.values[0])):
                yield pytest.param(words, id=f"{block.id}-{number}")


def parsed(words, monkeypatch):
    """What the real command line makes of the words; nothing runs."""
    seen = []
    monkeypatch.setattr(cli, "_run", lambda command, known: seen.append(command) or 0)
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0, words
    return seen[0]


def options():
    """Every command with the options that its help names."""
    import dataclasses

    for verb, (command, _) in cli.verbs([]).items():
        yield verb, {field.name.replace("_", "-") for field in dataclasses.fields(command)}


COLUMNS = 80
"""A command on the built site and in a usual terminal has this much room."""


def too_wide(text):
    """Lines of shell fences that are wider than that."""
    lines = [
        line
        for indent, name, code in FENCE.findall(text)
        if name in SHELLS
        for line in re.sub(rf"^{indent}", "", code, flags=re.MULTILINE).splitlines()
    ]
    return [line for line in lines if len(line) > COLUMNS]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_command_is_wider_than_a_terminal(page):
    assert not too_wide(page.read_text("utf-8"))


def test_a_wide_command_is_found():
    fits, wide = "a" * COLUMNS, "a" * (COLUMNS + 1)
    text = f"```sh\n{fits}\n```\n- x\n\n  ```\n  {fits}\n  {wide}\n  ```\n```python\n{wide}\n```\n"
    assert too_wide(text) == [wide]


WORDS = 800
HOW_TOS = sorted(
    {
        *(ROOT / "docs" / "how_to").glob("*.md"),
        *(
            ROOT / "docs" / f"{name}.md"
            for name in (
                "captured_updates",
                "evidence",
                "flower",
                "leak_meter",
                "many_machines",
                "opacus",
                "plans",
                "quickstart",
                "train_under_defenses",
            )
        ),
    }
)


def words(text):
    """How many words a page has outside its code and its links' targets."""
    text = re.sub(r"\]\([^)]*\)", "]", FENCE.sub("", text))
    return len([word for word in text.split() if re.search(r"\w", word)])


@pytest.mark.parametrize("page", HOW_TOS, ids=lambda p: p.stem)
def test_a_how_to_is_short_and_has_a_picture(page):
    text = page.read_text("utf-8")
    assert words(text) <= WORDS
    pictures = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", text)
    assert pictures
    for described, target in pictures:
        assert len(described.split()) > 3, described
        assert (page.parent / target).stat().st_size < 150_000, target


def test_words_are_counted_outside_code_and_targets():
    assert words("One [two](three.md) - 4\n\n```sh\nfive\n```\n") == 3


def test_the_readme_fits_a_short_read():
    assert 500 <= words((ROOT / "README.md").read_text("utf-8")) <= 700


def unknown_fences(text):
    return {name for _, name, _ in FENCE.findall(text)} - {*SHELLS, *SHOWN, "python", "toml"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_code_escapes_these_tests(page):
    text = page.read_text("utf-8")
    assert not unknown_fences(text)
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text))


def test_a_planted_fence_is_caught():
    assert unknown_fences("- a\n\n  ```py\n  1 / 0\n  ```\n```python {.x}\n```\n```sh\n```\n") == {
        "py",
        "python {.x}",
    }


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder of its own; a package `lpips` whose weights are random ones of the real shapes."""
    import sys
    import types

    import torch

    monkeypatch.chdir(tmp_path)
    sides = {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3), 10: (256, 256, 3)}
    draw = torch.Generator().manual_seed(0)
    state = {
        "scaling_layer.shift": torch.tensor([-0.030, -0.088, -0.188]).reshape(1, 3, 1, 1),
        "scaling_layer.scale": torch.tensor([0.458, 0.448, 0.450]).reshape(1, 3, 1, 1),
    }
    for number, (place, (out, into, side)) in enumerate(sides.items()):
        weight = torch.randn(out, into, side, side, generator=draw) * (into * side**2 / 2) ** -0.5
        state[f"net.slice{number + 1}.{place}.weight"] = weight
        state[f"net.slice{number + 1}.{place}.bias"] = torch.zeros(out)
        last = torch.rand(1, out, 1, 1, generator=draw)
        state |= {f"{name}.model.1.weight": last for name in (f"lin{number}", f"lins.{number}")}
    package = types.ModuleType("lpips")
    package.LPIPS = lambda net: types.SimpleNamespace(state_dict=lambda: dict(state))
    monkeypatch.setitem(sys.modules, "lpips", package)


def lpips_file():
    """The first block of the page on LPIPS, which writes the file that the second reads."""
    page = ROOT / "docs" / "how_to" / "lpips.md"
    indent, _, code = FENCE.findall(page.read_text("utf-8"))[0]
    return re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)


@pytest.mark.parametrize("code", list(blocks("python")))
def test_python_runs(code, elsewhere, capsys):
    # dataclasses look their module up by name, so the block needs a module of its own
    import sys
    import types

    if "lpips_alex" in code and code != lpips_file():
        exec(lpips_file(), {})
    module = types.ModuleType("documentation")
    sys.modules["documentation"] = module
    try:
        exec(compile(code, "documentation", "exec"), module.__dict__)
    finally:
        del sys.modules["documentation"]


@pytest.mark.parametrize("code", list(blocks("toml")))
def test_plans_parse(code, tmp_path):
    table = tomllib.loads(code)
    if set(table) <= set(policy.KINDS):
        (tmp_path / "policy.toml").write_text(code)
        assert policy.read(tmp_path / "policy.toml").tables
    elif "clip" in table:  # of a deployment
        assert deployment.parse(table).clip.l2
    else:
        assert parse(table).experiments()


@pytest.mark.parametrize("words", list(commands()))
def test_commands_parse(words, monkeypatch):
    command = parsed(words, monkeypatch)
    if isinstance(command, AttackOptions):
        named = [("attack", text) for text in command.attack]
        named += [("defense", command.defense)] * (command.defense not in (None, "none"))
        for kind, text in named:
            registry.specs_of(kind, text)


NO_SOLUTION = ["calibrate --target 'psnr>=20 with probability<=0.01' --data mnist5k --steps 3"]
"""What a page shows as refused."""


def mentioned():
    """Commands within sentences that are more than the name of one."""
    for page in PAGES:
        text = FENCE.sub("", page.read_text("utf-8"))
        for mention in re.findall(r"`((?:[A-Z_]+=\S+ )*leakbound [a-z][^`|…]*)`", text):
            yield from (words for words in command_lines(mention) if words[1:])


def runnable(words):
    """Whether a command needs nothing but leakbound: no file, no code, no GPU, no address."""
    try:
        command = shlex.join(words)
        with pytest.MonkeyPatch.context() as patch:
            options = parsed(words, patch)
    except (AssertionError, IndexError):  # a sentence may name a part of a command
        return False
    known = set(sources.PACKAGED) | {None}
    given = {name: value for name, value in vars(options).items() if name != "out"}
    files = [value for value in given.values() if isinstance(value, Path)]
    if words[0] not in ("attack", "bound", "calibrate", "list") and command != "audit --quick":
        return False
    named = " ".join(map(str, given.values()))
    own = given.get("data") in known and given.get("kind") in ("auto", None)
    return own and not files and not re.search(r"\w:\w|\.[a-z]\w{2,}", named)


def test_what_is_runnable():
    assert runnable(["attack", "--data", "german"])
    for words in (
        ["attack", "--data", "t.csv"],
        ["attack", "--model", "a.b:c"],
        ["attack", "--kind", "xgboost"],
        ["attack", "--attack", "learned_prior,prior=x.safetensors"],
        ["bound", "--deployment", "x.toml"],
        ["audit"],
        ["bound", "--steps"],
        ["capture", "."],
    ):
        assert not runnable(words), words


OF_ALL_DIGITS = (
    "bound --noise-multiplier 0.05 --data mnist5k --out runs/risk",
    "calibrate --target 'psnr>=30 with probability<=0.01' --data mnist5k --steps 3 --prior mixture",
)
"""Count the neighbors of 5,000 digits, or fit a mixture to them: ten seconds or more."""
OF_THE_WHEEL = ["audit --quick"]
"""CI runs it from the installed wheel, twice."""


def runnable_commands():
    found = [*(own.values[0] for own in commands()), *mentioned()]
    known = sorted({shlex.join(words) for words in found if runnable(words)})
    slow = {*OF_ALL_DIGITS, *OF_THE_WHEEL}
    assert slow <= {*known}
    return [pytest.param(one, marks=[pytest.mark.slow] if one in slow else []) for one in known]


@pytest.mark.parametrize("command", runnable_commands())
def test_commands_that_need_no_file_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(shlex.split(command))
    shown = capsys.readouterr()
    assert end.value.code == (2 if command in NO_SOLUTION else 0), shown.err
    assert bool(shown.out.strip()) != (command in NO_SOLUTION)


def test_there_are_commands_to_parse():
    found = list(commands())
    assert len(found) > 20
    assert [[*command_lines(block)] for block in ("$ A=1 leakbound list  # all", "make\n")] == [
        [["list"]],
        [],
    ]
    with pytest.raises(SystemExit):
        cli.main(["attack", "--no-such-option"])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_sentences_name_real_options(page):
    known = dict(options())
    text = FENCE.sub("", page.read_text("utf-8"))
    for mention in re.findall(r"`(?:[A-Z_]+=\S+ )*leakbound ([a-z][^`]*)`", text):
        name, *words = mention.split()
        assert name in known, mention
        given = {word.partition("=")[0][2:] for word in words if word.startswith("--")}
        assert given <= known[name], mention


def test_the_gallery_says_what_was_measured():
    text = (ROOT / "docs" / "gallery.md").read_text("utf-8")
    numbers = json.loads((ROOT / "docs" / "images" / "gallery" / "numbers.json").read_text("utf-8"))
    pictures = sorted((ROOT / "docs" / "images" / "gallery").glob("*.png"))
    assert [picture.stem for picture in pictures] == sorted(numbers)
    for picture in pictures:
        assert picture.stat().st_size < 150_000, picture
        assert f"](images/gallery/{picture.name})" in text
        section = text.partition(f"images/gallery/{picture.name}")[2].partition("\n## ")[0]
        for said in texts(numbers[picture.stem]):
            assert said in section, f"{picture.stem}: {said}"


def texts(found):
    """Every measured text in a nested dictionary."""
    for value in found.values():
        if isinstance(value, dict):
            yield from texts(value)
        elif isinstance(value, str):
            yield value


RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))


def lost(page):
    """The links of a page that lead nowhere; stored results are read as the page they become."""
    text = page.read_text("utf-8")
    if page.suffix == ".json":
        text = stored.markdown(json.loads(text))
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    return [t for t in targets if "://" not in t and not (page.parent / t).exists()]


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not lost(page)


def test_a_lost_link_is_found_in_text_and_in_stored_results(tmp_path):
    text = "[a](gone.md) [b](https://e) [c](page.md#d)"
    (tmp_path / "page.md").write_text(text)
    sections = [{"body": [{"columns": ["[e](lost.md)"], "rows": []}], "says": [text]}]
    (tmp_path / "page.json").write_text(json.dumps({"title": "T", "sections": sections}))
    assert lost(tmp_path / "page.md") == ["gone.md"]
    assert lost(tmp_path / "page.json") == ["lost.md", "gone.md"]


def test_the_readme_example_reconstructs(capsys):
    code = next(iter(blocks("python"))).values[0]
    exec(compile(code, "README", "exec"), {"__name__": "readme"})
    verdict, psnr = re.fullmatch(r"(\w+) \((.*),\)\n", capsys.readouterr().out).groups()
    assert verdict == "exposed"
    assert float(psnr) > 25


def test_no_page_names_a_private_path():
    for page in (*PAGES, *RESULTS):
        assert not re.search(r"/(home|root|work|tmp)/", page.read_text("utf-8")), page
