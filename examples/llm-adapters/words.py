"""Words in each clinic's notes, from its adapters alone: `python words.py seen`.

The clinics' own notes are read only to count how many words are right.
"""

import sys
from pathlib import Path

from adapters.task import NOTES, PLACES, build, notes, texts

from leakbound import captured
from leakbound.attacks import AdapterWords
from leakbound.core import Task
from leakbound.domains import TokenDomain

TRAINING = captured.TrainingInfo(
    examples=NOTES,
    learning_rate=2e-4,
    steps=10,
    optimizer="adamw",
)


def found(folder: Path):
    """By file: the words that the adapters reveal, and the true ones."""
    words = texts().words
    domain = TokenDomain(len(words), PLACES, 0, words)
    task = Task.of(build(), domain=domain, loss="next_token", classes=len(words))
    for number, path in enumerate(sorted(folder.glob("round-0001/client-*.safetensors"))):
        seen = captured.observe(
            captured.load(path, path.parent / "before.safetensors"),
            task,
            input_shape=(PLACES,),
            training=TRAINING,
        )
        tokens = AdapterWords().found(seen).clear
        own = {words[token] for token in notes(number).flatten().tolist()}
        yield path.name, {words[token] for token in tokens}, own


def main() -> None:
    """Print them."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "seen")
    for name, told, own in found(folder):
        print(f"{name}: {len(told)} words, {len(told & own)} of {len(own)} true ones")
        print("  " + " ".join(sorted(told, key=len, reverse=True)[:12]))


if __name__ == "__main__":
    main()
