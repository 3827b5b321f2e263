"""Re-identification: is it this person? A matcher names one of M candidates.

The gallery of a true example holds it and M - 1 examples that the attack never saw, with the same
label. Given the gallery, each of them is equally likely to be the true one, so a matcher without
the update is right with probability 1 / M, and no attacker is right more often than F(1 / M)
(`bounds.knowledge.naming_success`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leakbound import check
from leakbound._util import user_code
from leakbound.assess.chance import fellows
from leakbound.assess.criterion import Criterion
from leakbound.assess.record import Reidentification
from leakbound.assess.released import nine
from leakbound.bounds.knowledge import naming_success
from leakbound.core import Batch, NotApplicable
from leakbound.domains import Domain
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
    candidates: int = CANDIDATES,
    noise_multiplier: float | None = None,
    name: str | None = None,
    source: torch.Generator | None = None,
) -> Reidentification:
    """Whether a matcher names each true example among M candidates.

    The score of a candidate is its best over all reconstructions, since nobody tells an attacker
    which of them is whose. Equal scores are drawn by lot. Other examples of the batch are in no
    gallery.

    Args:
        truth: (B, *S) the examples behind the update.
        reconstructions: (N, *S) in any order.
        others: examples that the attack never saw, drawn like the true ones: if they differ in
            kind, a matcher may find the odd one out, and neither 1 / M nor the bound holds.
        criterion: of the domain; says which candidates are near copies of the true one.
        matcher: a name as in `matcher_of`, or a function.
        candidates: M, the true example included; fewer if the labels leave fewer.
        noise_multiplier: of the release, for the bound F(1 / M); None without a bound.
        name: of a function, in the result and in errors.
        source: draws galleries and lots; the same ones for each call if None.

    Raises:
        NotApplicable: no other example has the label of one of the true ones.
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
    galleries = _galleries(truth, others, candidates, source)
    # Only what is in a gallery is scored, in an order that says nothing.
    used = torch.unique(torch.cat(galleries))
    pool = torch.cat([truth.inputs.cpu(), others.inputs.cpu()[used]])
    shuffled = permutation(len(pool), source)
    best = torch.empty(len(pool), dtype=torch.float64)
    best[shuffled] = _scores(score, named, reconstructions.cpu(), pool[shuffled]).amax(0)
    right = []
    near = 0
    for place, gallery in enumerate(galleries):
        rest = truth.size + torch.searchsorted(used, gallery)
        everyone = torch.cat([torch.tensor([place]), rest])
        # In random order: the first of equal scores is drawn by lot.
        everyone = everyone[permutation(len(everyone), source)]
        right.append(int(everyone[best[everyone].argmax()]) == place)
        apart = criterion.domain.distances(truth.inputs[place : place + 1].cpu(), pool[rest])
        near += bool((apart <= criterion.within).any())
    count = len(galleries[0]) + 1
    bound = None
    if noise_multiplier is not None:
        bound = nine(naming_success(count, noise_multiplier), up=True)
    return Reidentification(
        matcher=named,
        right=tuple(right),
        candidates=count,
        near=near,
        noise_multiplier=noise_multiplier,
        bound=bound,
    )


def _galleries(
    truth: Batch, others: Batch, candidates: int, source: torch.Generator
) -> list[Tensor]:
    """For each true example, the places of M - 1 of the others; M is the same for all."""
    by_example = fellows(truth, others)
    count = min(candidates - 1, *map(len, by_example))
    if count < 1:
        raise NotApplicable(
            "re-identification needs two candidates or more: give other examples with the labels "
            "of the true ones"
        )
    return [places[permutation(len(places), source)[:count]] for places in by_example]


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
    """(N, D) differences of neighbors, down and across."""
    exact = images.double()
    return torch.cat([exact.diff(dim=dim).flatten(1) for dim in (-2, -1)], 1)


def _cosine(one: Tensor, two: Tensor) -> Tensor:
    return torch.nn.functional.normalize(one) @ torch.nn.functional.normalize(two).T
