"""Re-identification: is it this person? A matcher names one of M candidates.

The gallery of a true example holds it and M - 1 examples that the attack never saw, with the same
label. Given the gallery, each of them is equally likely to be the true one, so a matcher without
the update is right with probability 1 / M, and no attacker is right more often than F(1 / M)
(`bounds.knowledge.naming_success`). The galleries of one update share no candidate: exchanging two
candidates of one gallery then leaves all others as likely as before, so without the update the
answers are independent.

By person, each candidate is another example of someone: of the true person, and of M - 1 persons
who are not in the update. A person with many examples is more likely to be in an update, so all of
a gallery have as many examples of each label as the true one. Each of them may then have given the
update's example with the same probability, and 1 / M and F(1 / M) hold as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakbound import check
from leakbound._util import user_code
from leakbound.assess.chance import by_label
from leakbound.assess.criterion import Criterion
from leakbound.assess.record import Reidentification
from leakbound.assess.released import nine
from leakbound.bounds.knowledge import naming_success
from leakbound.core import Batch, NotApplicable
from leakbound.domains import Domain, smooth_axes
from leakbound.randomness import permutation, stream

CANDIDATES = 100
BLOCK = 1 << 25
"""Numbers of the candidates that are scored at a time: 256 MiB in float64."""
Matcher = Callable[[Tensor, Tensor], Any]
"""From reconstructions (N, *S) and candidates (P, *S) to scores (N, P), higher for the same person.
Each pair is scored by itself."""
NEAREST = "nearest"
EDGES = "edges"


def built_in(domain: Domain) -> tuple[str, ...]:
    """The names of the built-in matchers for examples of this domain."""
    return (NEAREST, EDGES) if domain.has_neighbors else (NEAREST,)


def matcher_of(name: str, domain: Domain) -> Matcher:
    """The matcher of that name: "nearest", "edges" (of images), or the user's "module:callable".

    "nearest" compares by the domain's distance: of images, in pixel space.
    """
    if name == NEAREST:
        return lambda reconstructions, candidates: -domain.distances(reconstructions, candidates)
    if name == EDGES:
        if not domain.has_neighbors:
            raise ValueError(f"matcher is 'edges', which is for images; {domain.name} have none")
        return edges
    if ":" not in name:
        check.one_of(built_in(domain), matcher=name)
    return user_code.find("matcher", name)


def edges(reconstructions: Tensor, candidates: Tensor) -> Tensor:
    """Scores (N, P): the cosine of the images' spatial gradients.

    Brightness and contrast do not count. A flat image has no edges and scores 0 everywhere.

    Example:
        >>> image = torch.rand(1, 1, 8, 8)
        >>> round(float(edges(0.2 * image + 0.5, image)), 4)
        1.0
    """
    return _cosine(_gradient(reconstructions), _gradient(candidates))


def embedded(embed: Callable[[Tensor], Any], name: str = "embedding") -> Matcher:
    """A matcher of the cosine of embeddings: `embed` maps examples (N, *S) to vectors (N, D).

    Example:
        >>> matcher = embedded(lambda images: images.flatten(1))
        >>> matcher(torch.eye(2)[:1], torch.eye(2)).tolist()
        [[1.0, 0.0]]
    """

    def matcher(reconstructions: Tensor, candidates: Tensor) -> Tensor:
        return _cosine(*(_vectors(embed, name, images) for images in (reconstructions, candidates)))

    return matcher


def reidentify(
    truth: Batch,
    reconstructions: Tensor,
    others: Batch,
    criterion: Criterion,
    matcher: str | Matcher = NEAREST,
    *,
    persons: Tensor | None = None,
    other_persons: Tensor | None = None,
    candidates: int = CANDIDATES,
    noise_multiplier: float | None = None,
    name: str | None = None,
    source: torch.Generator | None = None,
) -> Reidentification:
    """Whether a matcher names each true example, or its person, among M candidates.

    The score of a candidate is its best over all reconstructions, since nobody tells an attacker
    which of them is whose. Equal scores are drawn by lot. Other examples of the batch are in no
    gallery.

    By person (`other_persons`), the true candidate is another example of the person. Persons with
    several examples in the batch do not count, nor those with too few others like them.

    Args:
        truth: (B, *S) the examples behind the update.
        reconstructions: (N, *S) in any order.
        others: (P, *S) examples that the attack never saw, drawn like the true ones: if they
            differ in kind, a matcher may find the odd one out, and neither 1 / M nor the bound
            holds. By person, all other examples of everybody in them.
        criterion: of the domain; says which candidates are near copies of the true one.
        matcher: a name as in `matcher_of`, or a function.
        persons: (B,) whom each true example is of, as numbers; None if not known.
        other_persons: (P,) the same of `others`; candidates are then persons.
        candidates: M, the true one included; fewer if labels, or similar persons, leave fewer.
        noise_multiplier: of the release, for the bound F(1 / M); None without a bound.
        name: of a function, in the result and in errors.
        source: draws galleries and lots; the same ones for each call if None.

    Raises:
        NotApplicable: no other example has the label of one of the true ones, or no person of the
            batch has another example and others like them.
        ValueError: the matcher fails, or returns no number for a pair.

    Source: this project; docs/risk.md, "Is it this person?".

    Example:
        >>> from leakbound.domains import of_shape
        >>> examples, labels = torch.rand(51, 1, 8, 8), torch.zeros(51, dtype=torch.long)
        >>> truth, others = Batch(examples[:1], labels[:1]), Batch(examples[1:], labels[1:])
        >>> answer = truth.inputs + 0.1 * torch.randn(1, 1, 8, 8)
        >>> found = reidentify(truth, answer, others, Criterion.of(of_shape((1, 8, 8))))
        >>> found.right, found.candidates
        ((True,), 51)
    """
    check.count(candidates=candidates)
    if candidates < 2:
        raise ValueError("candidates is 1; give 2 or more: the true example and others")
    for what, examples in (("reconstructions", reconstructions), ("others", others.inputs)):
        if examples.shape[1:] != truth.inputs.shape[1:]:
            raise ValueError(
                f"{what} holds examples {tuple(examples.shape[1:])} and the truth "
                f"{tuple(truth.inputs.shape[1:])}; give examples of one shape"
            )
        check.finite(what, examples)
    named = matcher if isinstance(matcher, str) else name or "your function"
    score = matcher_of(matcher, criterion.domain) if isinstance(matcher, str) else matcher
    source = source or stream(0, "gallery")
    if other_persons is None:
        galleries = _of_examples(
            truth,
            others,
            candidates,
            source,
        )
    elif persons is None:
        raise ValueError("other_persons is without persons; give whom each true example is of")
    else:
        galleries = _of_persons(
            truth,
            others,
            persons,
            other_persons,
            candidates,
            source,
        )
    counted = galleries.counted & _first_of_each(criterion, truth.inputs.cpu(), persons)
    # Only what is in a gallery is scored, in an order that says nothing.
    used = torch.unique(torch.cat([galleries.true[galleries.counted], *galleries.others]))
    every = torch.cat([truth.inputs.cpu(), others.inputs.cpu()])
    pool = every[used]
    shuffled = permutation(len(pool), source)
    best = torch.empty(len(pool), dtype=torch.float64)
    best[shuffled] = _scores(score, named, reconstructions.cpu(), pool[shuffled]).amax(0)
    right = []
    near = 0
    for place, gallery in enumerate(galleries.others):
        if not galleries.counted[place]:
            right.append(False)
            continue
        true = galleries.true[place : place + 1]
        # In random order: the first of equal scores is drawn by lot.
        everyone = torch.cat([true, gallery])[permutation(1 + len(gallery), source)]
        chosen = best[torch.searchsorted(used, everyone)].argmax()
        right.append(bool(everyone[chosen] == true))
        apart = criterion.domain.distances(every[place : place + 1], every[gallery])
        near += bool((apart <= criterion.within).any())
    bound = None
    if noise_multiplier is not None:
        bound = nine(naming_success(galleries.size, noise_multiplier), up=True)
    return Reidentification(
        matcher=named,
        right=tuple(right),
        counted=() if bool(counted.all()) else tuple(counted.tolist()),
        by_person=other_persons is not None,
        candidates=galleries.size,
        near=near,
        noise_multiplier=noise_multiplier,
        bound=bound,
    )


@dataclass(frozen=True, eq=False)
class _Galleries:
    """Places in the truth and, after it, the others.

    Attributes:
        true: (B,) the candidate whose name is right.
        others: for each true example the places of the M - 1 others; of one that does not count,
            none.
        counted: (B,) whether there is a gallery.
        size: M, the same for all.
    """

    true: Tensor
    others: list[Tensor]
    counted: Tensor
    size: int


def _of_examples(
    truth: Batch,
    others: Batch,
    candidates: int,
    source: torch.Generator,
) -> _Galleries:
    """The true candidate is the true example; the others have its label."""
    groups, other_groups = by_label(truth, others)
    members = {int(group): (other_groups == group).nonzero()[:, 0] for group in groups}
    wanted = {group: int((groups == group).sum()) for group in members}
    count = min(candidates - 1, *(len(members[group]) // wanted[group] for group in members))
    if count < 1:
        raise NotApplicable(
            "re-identification needs two candidates or more for each example: give more other "
            "examples with the labels of the true ones"
        )
    drawn = {group: _parts(places, count, source) for group, places in members.items()}
    return _Galleries(
        true=torch.arange(truth.size),
        others=[truth.size + next(drawn[int(group)]) for group in groups],
        counted=torch.ones(truth.size, dtype=torch.bool),
        size=1 + count,
    )


def _of_persons(
    truth: Batch,
    others: Batch,
    persons: Tensor,
    other_persons: Tensor,
    candidates: int,
    source: torch.Generator,
) -> _Galleries:
    """The true candidate is another example of the person; so are those of similar persons."""
    labels = torch.cat(by_label(truth, others)).numpy()
    owner = torch.unique(torch.cat([persons, other_persons]), return_inverse=True)[1].numpy()
    held = np.zeros((owner.max() + 1, labels.max() + 1), dtype=int)
    np.add.at(held, (owner, labels), 1)
    # Persons are similar if they have as many examples of each label.
    kind = np.unique(held, axis=0, return_inverse=True)[1].reshape(-1)
    in_batch = np.bincount(owner[: truth.size], minlength=len(held))
    victims = owner[: truth.size]
    possible = (in_batch[victims] == 1) & (held.sum(1)[victims] > 1)
    free = {one: np.flatnonzero((kind == one) & (in_batch == 0)) for one in set(kind[victims])}
    wanted = {one: int((kind[victims[possible]] == one).sum()) for one in free}
    enough = sorted(len(free[kind[one]]) // wanted[kind[one]] for one in victims[possible])
    # Half of the persons or more have so many others like them.
    count = min(candidates - 1, enough[(len(enough) - 1) // 2]) if enough else 0
    if count < 1:
        raise NotApplicable(
            "re-identification by person needs persons with another example outside of the batch, "
            "and others with as many examples: leave by person out"
        )
    drawn = {one: _parts(torch.from_numpy(some), count, source) for one, some in free.items()}
    true = torch.arange(truth.size)
    counted = torch.zeros(truth.size, dtype=torch.bool)
    galleries = []
    for place, person in enumerate(victims):
        gallery = torch.zeros(0, dtype=torch.long)
        one = kind[person]
        if possible[place] and len(free[one]) // wanted[one] >= count:
            counted[place] = True
            true[place] = _another(owner, person, place, source)
            shown = []
            for other in next(drawn[one]).tolist():
                # As for the true person: one example of the label was drawn, another is shown.
                mine = np.flatnonzero((owner == other) & (labels == labels[place]))
                shown.append(_another(owner, other, _one_of(mine, source), source))
            gallery = torch.tensor(shown)
        galleries.append(gallery)
    return _Galleries(
        true=true,
        others=galleries,
        counted=counted,
        size=1 + count,
    )


def _parts(
    places: Tensor,
    count: int,
    source: torch.Generator,
) -> Iterator[Tensor]:
    """Random parts of so many places, none in two."""
    order = permutation(len(places), source)
    return iter(torch.split(places[order], count))


def _another(
    owner: Any,
    person: int,
    place: int,
    source: torch.Generator,
) -> int:
    """The place of a random example of the person, other than that one."""
    every = np.flatnonzero(owner == person)
    return _one_of(every[every != place], source)


def _one_of(places: Any, source: torch.Generator) -> int:
    return int(places[int(permutation(len(places), source)[0])])


def _first_of_each(
    criterion: Criterion,
    inputs: Tensor,
    persons: Tensor | None,
) -> Tensor:
    """(B,) whether an example is the first of its person, and near none that counts.

    A person's examples may be in an update together. They look alike, so they are named together.
    """
    alike = criterion.domain.distances(inputs, inputs) <= 2 * criterion.within
    if persons is not None:
        alike |= persons[:, None].cpu() == persons.cpu()
    counted = torch.zeros(len(inputs), dtype=torch.bool)
    for place, row in enumerate(alike):
        counted[place] = not bool((row & counted)[:place].any())
    return counted


def _scores(matcher: Matcher, name: str, reconstructions: Tensor, pool: Tensor) -> Tensor:
    """(N, P) in float64, block by block: large images fit into memory."""
    count = max(1, BLOCK // max(1, pool[0].numel()))
    blocks = torch.split(pool, count)
    return torch.cat([_checked(matcher, name, reconstructions, block) for block in blocks], 1)


def _checked(matcher: Matcher, name: str, reconstructions: Tensor, block: Tensor) -> Tensor:
    """The scores; whatever goes wrong in the user's function is said with its name."""
    sizes = tuple(reconstructions.shape), tuple(block.shape)
    call = f"matcher {name!r}, called with tensors of shapes {sizes[0]} and {sizes[1]},"
    # Copies: what a function does to its arguments changes nothing here.
    scores = _called(call, matcher, reconstructions.clone(), block.clone())
    wanted = (len(reconstructions), len(block))
    if tuple(scores.shape) != wanted:
        raise ValueError(
            f"{call} returned shape {tuple(scores.shape)}; return {wanted}: a score for each "
            "reconstruction and candidate"
        )
    return _numbers(call, scores)


def _vectors(embed: Callable[[Tensor], Any], name: str, inputs: Tensor) -> Tensor:
    call = f"embedding {name!r}, called with a tensor of shape {tuple(inputs.shape)},"
    vectors = _called(call, embed, inputs.clone())
    if vectors.ndim != 2 or len(vectors) != len(inputs):
        raise ValueError(
            f"{call} returned shape {tuple(vectors.shape)}; return ({len(inputs)}, D): a vector "
            "for each example"
        )
    return _numbers(call, vectors)


def _called(call: str, function: Callable[..., Any], *inputs: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            return torch.as_tensor(function(*inputs)).detach().cpu().double()
    except Exception as error:  # it runs the user's code
        raise ValueError(f"{call} raised {type(error).__name__}: {error}") from error


def _numbers(call: str, numbers: Tensor) -> Tensor:
    if bool(numbers.isnan().any()):
        raise ValueError(f"{call} returned NaN; return a number for each")
    return numbers


def _gradient(images: Tensor) -> Tensor:
    """(N, D) differences of neighbors along every axis."""
    exact = images.double()
    axes = smooth_axes(images.shape[1:])
    return torch.cat([exact.diff(dim=axis).flatten(1) for axis in axes], 1)


def _cosine(one: Tensor, two: Tensor) -> Tensor:
    return torch.nn.functional.normalize(one) @ torch.nn.functional.normalize(two).T
